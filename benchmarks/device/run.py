"""Everything about one GPU in at most 4 minutes: ceilings, kernels, copies, the engine, against the bars.

    benchmarks/device/run.sh [--dry] [--section NAME ...] [--output FILE]

Correctness comes before each figure: attention against float64, copies byte for byte, the engine's tokens against the
CPU's. RESULTS.md is written anew after each section, so that a run that is cut off keeps what it has.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

from benchmarks.device import attention, beyond, copies, engine
from benchmarks.device.bench import Bench
from tournant.kernels import ops
from tournant.workers.device import CpuDevice, Device, make_device
from tournant.workers.errors import ConfigError

RESULTS = Path(__file__).with_name("RESULTS.md")
SECTIONS: dict[str, tuple[float, Callable[[Bench], None]]] = {
    "ceilings": (12.0, copies.ceilings),
    "tokens": (30.0, engine.tokens),
    "decode attention": (40.0, attention.decode),
    "prefill attention": (20.0, attention.prefill),
    "block copies": (12.0, copies.block_copies),
    "decode step": (60.0, engine.decode_step),
    "restore": (20.0, engine.restore),
    "beyond the device": (40.0, beyond.larger_contexts),
}


class DryDevice(CpuDevice):
    """A CPU that captures steps, has two in flight and a link, as a GPU does."""

    num_in_flight = 2
    has_link = True

    def graph_sizes(self, max_num_seqs: int) -> tuple[int, ...]:
        """One and two sequences."""
        return (1, 2)


def page(bench: Bench) -> str:
    """RESULTS.md."""
    device = bench.device.torch_device
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "no card (a dry run: figures mean nothing)"
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    head = (
        f"# One GPU\n\n{card}, {time.strftime('%Y-%m-%d')}, {versions}. `benchmarks/device/run.sh` makes this page.\n"
    )
    return f"{head}\n{bench.markdown()}"


def measure(device: Device, *, dry: bool, sections: Sequence[str], output: Path | None) -> Bench:
    """Run the sections in their order and write the page after each."""
    bench = Bench(device, dry)
    for name, (budget_s, call) in SECTIONS.items():
        if name in sections:
            bench.run(name, budget_s, call)
            if output is not None:
                output.write_text(page(bench), encoding="utf-8")
    return bench


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every section ran to its end, 1 when one did not, 2 when there is no GPU."""
    parser = argparse.ArgumentParser(description="Measure one GPU against the bars.")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU under Triton's interpreter")
    parser.add_argument("--section", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--output", type=Path, help="page to write (default RESULTS.md; none for --dry)")
    options = parser.parse_args(arguments)
    if not options.dry:
        try:
            device = make_device("cuda")
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        bench = measure(device, dry=False, sections=options.section, output=options.output or RESULTS)
    else:
        before = ops.backend()
        ops.select_backend("triton")
        try:
            bench = measure(DryDevice(), dry=True, sections=options.section, output=options.output)
        finally:
            ops.select_backend(before)
    print(page(bench))
    return 1 if bench.notes else 0


if __name__ == "__main__":
    sys.exit(main())
