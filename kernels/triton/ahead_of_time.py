"""Compiles the kernels to machine code for cards that are not there, and reports what ptxas says of each.

Owns: a driver that knows only its target, so that the wrappers run as they are on CPU tensors and launch nothing; the
list of variants that matter; the table in docs/kernels.md. It must not run under Triton's interpreter. Compiled code
goes through Triton's own cache, so a second run is quick.

    python -m tournant.kernels.triton.ahead_of_time [--full] [--arch 80 90] [--write docs/kernels.md]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from tournant.kernels.triton.ahead_of_time_variants import Variant, full_variants, quick_variants
from tournant.kernels.triton.card import A100, H200, Card

CARDS = {card.arch: card for card in (A100, H200)}
REGISTERS_PER_SM, THREADS_PER_SM, MAX_PROGRAMS_PER_SM = 65536, 2048, 32
BEGIN, END = "<!-- ahead of time: begin -->", "<!-- ahead of time: end -->"


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel for one card. registers and spill_bytes (stored and loaded) per thread, shared_bytes per program;
    programs_per_sm: how many run on a multiprocessor at once, by registers, threads and shared memory.
    """

    kernel: str
    variant: str
    arch: int
    num_warps: int
    num_stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    programs_per_sm: int


class _Target:
    """A driver that launches nothing: it only says what to compile for. The device number is the architecture."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def launches(arch: int, call: Callable[[Card], None]) -> list[tuple[Any, dict[str, Any]]]:
    """(jitted function, what Triton would compile) of every launch that `call` makes on a card of this architecture."""
    found: list[tuple[Any, dict[str, Any]]] = []

    def hook(**event: Any) -> bool:
        found.append((event["fn"].jit_function, event["compile"]))
        return True  # do not compile, hence do not launch

    triton.runtime.driver.set_active(_Target(arch))
    triton.knobs.runtime.jit_cache_hook = hook
    try:
        call(CARDS[arch])
    finally:
        triton.knobs.runtime.jit_cache_hook = None
    return found


def ptxas_report(ptx: str, arch: int) -> tuple[int, int]:
    """(registers per thread, bytes of spill stores and loads) that ptxas reports for a kernel's PTX."""
    name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            get_ptxas(arch).path,
            "-v",
            f"--gpu-name={name}",
            str(source),
            "-o",
            str(source.with_suffix(".cubin")),
        ]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise RuntimeError(f"ptxas said nothing of registers and spills: {log}")
    return int(registers[1]), int(spills[1]) + int(spills[2])


def compile_all(variants: Iterable[Variant], archs: Iterable[int]) -> Iterator[Compiled]:
    """Compile every launch of every variant, each different one once, and report it."""
    seen = set()
    for variant, arch in product(variants, archs):
        for function, wanted in launches(arch, variant.call):
            key = (function.fn.__qualname__, arch, wanted["key"])
            if key not in seen:
                seen.add(key)
                yield _compile(variant.label, arch, function, wanted)


def _compile(label: str, arch: int, function: Any, wanted: dict[str, Any]) -> Compiled:
    source = ASTSource(function, wanted["signature"], wanted["constants"], wanted["configs"][0])
    options = {key: wanted[key] for key in ("num_warps", "num_stages", "enable_fp_fusion")}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spills = ptxas_report(built.asm["ptx"], arch)
    shared, threads = built.metadata.shared, 32 * wanted["num_warps"]
    per_sm = min(
        REGISTERS_PER_SM // (-(-registers // 8) * 8 * threads),
        THREADS_PER_SM // threads,
        (CARDS[arch].shared_bytes + 1024) // (shared + 1024),
        MAX_PROGRAMS_PER_SM,
    )
    name = function.fn.__name__.removesuffix("_kernel")
    return Compiled(name, label, arch, wanted["num_warps"], wanted["num_stages"], registers, spills, shared, per_sm)


def table(rows: Iterable[Compiled]) -> str:
    """A Markdown table."""
    lines = [
        "| kernel | variant | sm | warps / stages | registers | spill bytes | shared KiB | programs per SM |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.kernel} | {row.variant} | {row.arch} | {row.num_warps} / {row.num_stages} | {row.registers} "
        f"| {row.spill_bytes} | {row.shared_bytes / 1024:.1f} | {row.programs_per_sm} |"
        for row in rows
    ]
    return "\n".join(lines)


def write_table(path: Path, text: str) -> None:
    """Replace what stands between the two marks of a document. Raises ValueError when it has no marks."""
    document = path.read_text(encoding="utf-8")
    if BEGIN not in document or END not in document:
        raise ValueError(f"{path} has no lines {BEGIN!r} and {END!r}; add them where the table belongs")
    head, tail = document.split(BEGIN)[0], document.split(END)[1]
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Compile, print the table as it grows, and write it where asked."""
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for GPUs that are not there.")
    parser.add_argument("--full", action="store_true", help="every variant of docs/kernels.md, some minutes")
    parser.add_argument("--arch", type=int, nargs="+", default=sorted(CARDS), choices=sorted(CARDS))
    parser.add_argument("--write", type=Path, help="a document whose table to replace")
    options = parser.parse_args(arguments)
    rows: list[Compiled] = []
    for row in compile_all(full_variants() if options.full else quick_variants(), options.arch):
        rows.append(row)
        print(table([row]).splitlines()[-1], flush=True)
    if options.write is not None:
        write_table(options.write, f"Triton {triton.__version__}.\n\n{table(rows)}")


if __name__ == "__main__":
    main()
