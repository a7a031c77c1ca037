"""Tries tile sizes of the attention kernels on the card at hand and prints them, fastest first.

Every candidate's output is compared with that of the tiles in use before its time counts; candidates that do not fit
the card or are wrong are listed as such. The rates stand beside the card's own copy bandwidth and matrix rate of the
same run. What it prints goes into kernels/triton/tiles.py by hand, with the card and the date.

    python -m benchmarks.device.autotune [--kind decode prefill] [--head-size 128] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import product

import numpy as np
import torch
from triton.runtime.errors import OutOfResources, PTXASError

from benchmarks.device.bench import seconds
from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import make_plan
from tournant.kernels.triton.backend import TritonKernels
from tournant.kernels.triton.card import Card
from tournant.kernels.triton.plan import device_plan
from tournant.kernels.triton.tiles import TileShape

TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class Workload:
    """sequences with `queries` query rows each at the end of `context` tokens, one layer."""

    kind: str
    sequences: int
    queries: int
    context: int
    heads: int
    kv_heads: int
    head_size: int
    block_tokens: int
    dtype: torch.dtype

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that must be read at least once."""
        return self.sequences * self.context * 2 * self.kv_heads * self.head_size * self.dtype.itemsize

    @property
    def operations(self) -> float:
        """Floating-point operations of both products, causal."""
        seen = self.queries * (self.context - self.queries) + self.queries * (self.queries + 1) / 2
        return 4.0 * self.sequences * self.heads * self.head_size * seen


def candidates(kind: str) -> Iterator[TileShape]:
    """Tiles worth trying."""
    if kind == "decode":
        for block_n, warps, stages in product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5)):
            yield TileShape(16, block_n, warps, stages)
    else:
        for block_m, block_n, warps, stages in product((64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4)):
            yield TileShape(block_m, block_n, warps, stages)


def bounds(device: torch.device, size: int) -> tuple[float, float]:
    """(bytes read and written per second by a copy, operations per second of a bf16 product of `size`^3)."""
    source = torch.randn(size * size, device=device)
    target, matrix = torch.empty_like(source), source.view(size, size).to(torch.bfloat16)
    copy = 2 * source.nbytes / seconds(lambda: target.copy_(source), device)
    return copy, 2.0 * size**3 / seconds(lambda: matrix @ matrix, device)


def try_tiles(work: Workload, shapes: Sequence[TileShape], device: torch.device) -> list[tuple[str, float, TileShape]]:
    """("" or what is wrong, seconds, tile) of every shape, good ones first, fastest first."""
    layout = KVLayout(1, work.kv_heads, work.block_tokens, work.head_size, work.dtype)
    blocks = -(-work.context // work.block_tokens)
    tables = np.random.default_rng(0).permutation(work.sequences * blocks).reshape(work.sequences, blocks)
    kv_cache = torch.randn(layout.shape(tables.size), dtype=work.dtype, device=device)
    q = torch.randn(work.sequences * work.queries, work.heads, work.head_size, dtype=work.dtype, device=device)
    starts, contexts = np.arange(work.sequences + 1) * work.queries, [work.context] * work.sequences
    plan = make_plan(tables, starts, contexts, layout, work.heads)
    card = Card.of(device)
    kernels = TritonKernels(card)

    def attend(shape: TileShape | None, out: torch.Tensor) -> torch.Tensor:
        if shape is not None:
            plan.native = device_plan(plan, card, device, decode=shape, prefill=shape)
        kernels.paged_attention(out, q, kv_cache, 0, plan, work.head_size**-0.5)
        return out

    wanted = attend(None, torch.empty_like(q)).float()
    found = []
    for shape in shapes:
        try:
            out = attend(shape, torch.empty_like(q))
            error = float((out.float() - wanted).abs().max())
            wrong = "" if error < TOLERANCE else f"off by {error:.3g}"
            found.append((wrong, seconds(lambda out=out: attend(None, out), device), shape))  # type: ignore[misc]
        except (OutOfResources, PTXASError) as problem:
            found.append((type(problem).__name__, float("inf"), shape))
    return sorted(found, key=lambda row: (row[0], row[1]))


def report(work: Workload, rows: Sequence[tuple[str, float, TileShape]], copy: float, product_rate: float) -> str:
    """A Markdown table."""
    lines = [
        "| rows | tokens | warps | stages | ms | of copy bandwidth | of matrix rate | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for wrong, took, shape in rows:
        sides = " | ".join(map(str, astuple(shape)))
        shares = f"{work.kv_bytes / took / copy:.3f} | {work.operations / took / product_rate:.3f}"
        lines.append(f"| {sides} | {took * 1e3:.3f} | {shares} | {wrong} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Tune for a shape of 32 heads over 8 KV heads: decode 16 sequences of 16k tokens, prefill one of 8k."""
    parser = argparse.ArgumentParser(description="Try attention tiles on this machine's GPU.")
    parser.add_argument("--kind", nargs="+", choices=("decode", "prefill"), default=("decode", "prefill"))
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    options = parser.parse_args(arguments)
    device = torch.device("cuda")
    copy, product_rate = bounds(device, 8192)
    print(f"{torch.cuda.get_device_name(device)}, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}")
    print(f"copy {copy / 1e12:.2f} TB/s, bf16 products {product_rate / 1e12:.0f} TFLOP/s\n")
    for kind in options.kind:
        sequences, queries, context = (16, 1, 1 << 14) if kind == "decode" else (1, 1 << 13, 1 << 13)
        dtype = getattr(torch, options.dtype)
        work = Workload(kind, sequences, queries, context, 32, 8, options.head_size, options.block_tokens, dtype)
        print(
            f"{kind}: {work}\n\n{report(work, try_tiles(work, list(candidates(kind)), device), copy, product_rate)}\n"
        )


if __name__ == "__main__":
    main()
