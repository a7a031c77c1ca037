"""KV memory that real request lengths reserve: in blocks of 16 tokens, beside one contiguous piece per sequence.

Lengths are those of the Azure 2023 traces. A contiguous cache cannot grow a sequence, so it reserves the longest one it
allows, 8,192 tokens here; blocks reserve what a sequence has at its end, when it has most. Counted, not timed.
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import torch

from benchmarks.common import Cell, Options, Report, Samples, Table, at_most, run_main
from tournant.kernels.layout import KVLayout
from tournant.workers.block_manager import BlockManager

TRACES = {"conversation": "azure2023_conv.csv.gz", "code": "azure2023_code.csv.gz"}
MAX_MODEL_LEN = 8192
MAX_RESERVED, MAX_WASTE = 0.27, 0.01
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, block_tokens=16, head_size=64, dtype=torch.bfloat16)


def run(options: Options) -> Report:
    """Count both traces, or say why not."""
    report = Report("KV memory")
    lengths = {
        name: _lengths(options.traces / file) for name, file in TRACES.items() if (options.traces / file).is_file()
    }
    rows = [_row(name, found) for name, found in lengths.items()]
    if len(lengths) == len(TRACES):
        rows.append(_row("both", [length for found in lengths.values() for length in found]))
    notes = [
        f"Not counted: {file} is not in the folder of --traces." for name, file in TRACES.items() if name not in lengths
    ]
    report.add(
        Table(
            "reserved KV over Azure request lengths",
            (
                "requests",
                "count",
                "cut to the limit",
                "GiB paged",
                "GiB contiguous",
                "paged / contiguous",
                "bar",
                "waste in last blocks",
                "bar of waste",
            ),
            rows,
            [
                f"SmolLM2-135M, bf16, {LAYOUT.block_tokens} tokens per block, contiguous pieces of {MAX_MODEL_LEN:,} "
                "tokens, every request once; waste = token slots reserved and never used, of those reserved.",
                *notes,
            ],
        )
    )
    return report


def _lengths(path: Path) -> list[int]:
    """Tokens of prompt and answer of every request."""
    with gzip.open(path, "rt", newline="") as file:
        return [int(row["ContextTokens"]) + int(row["GeneratedTokens"]) for row in csv.DictReader(file)]


def _row(name: str, lengths: list[int]) -> list[Cell]:
    """Reserve every sequence from a real block manager and give it back."""
    used = [min(length, MAX_MODEL_LEN) for length in lengths]
    manager = BlockManager(MAX_MODEL_LEN // LAYOUT.block_tokens, LAYOUT.block_tokens)
    blocks = 0
    for length in used:
        table = manager.allocate(manager.blocks_for(length)) or []
        blocks += len(table)
        manager.release(table)
    paged, contiguous = blocks * LAYOUT.block_bytes, len(used) * MAX_MODEL_LEN * LAYOUT.token_bytes
    ratio, waste = paged / contiguous, 1 - sum(used) * LAYOUT.token_bytes / paged
    return [
        name,
        f"{len(used):,}",
        str(sum(length > MAX_MODEL_LEN for length in lengths)),
        paged / (1 << 30),
        contiguous / (1 << 30),
        ratio,
        at_most(MAX_RESERVED, Samples((ratio,))),
        f"{waste:.2%}",
        at_most(MAX_WASTE, Samples((waste,))),
    ]


if __name__ == "__main__":
    run_main(run, __doc__)
