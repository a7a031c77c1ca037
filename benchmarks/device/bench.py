"""What the sections of the GPU benchmark share: time budgets, timing, rows against bars, and the page they make.

Owns how a figure is taken (median of rounds after one that warms up, the L2 cache flushed before each) and shown. Knows
nothing of what is measured.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from tournant.workers.device import Device

Value = TypeVar("Value")
ROUNDS = 7
FLUSH_BYTES = 1 << 30  # takes about 0.3 ms, in which the CPU can give the card what is timed


class OutOfTimeError(Exception):
    """A section has used up its budget."""


class WrongResultError(Exception):
    """A result differs from what it must be; its time is worth nothing."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ratio: what `bar` asks for, a least value, or a greatest one with at_most; None: no bar."""

    section: str
    what: str
    figure: str
    ratio: float | None = None
    bar: float | None = None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        """Whether the bar is reached."""
        if self.ratio is None or self.bar is None:
            return ""
        return "met" if (self.ratio <= self.bar if self.at_most else self.ratio >= self.bar) else "missed"

    def cells(self) -> list[str]:
        """Cells of its table row."""
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        bar = "" if self.bar is None else f"{'≤' if self.at_most else '≥'} {self.bar:g}"
        return [self.section, self.what, self.figure, ratio, bar, self.verdict]


@dataclass
class Bench:
    """A run over all sections. dry: sizes so small that only the code is tried, on the CPU.

    copy_rate, product_rate, link_rate: bytes and operations per second, measured by the first section and used by the
    others as bounds. shared: what later sections use again.
    """

    device: Device
    dry: bool
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    copy_rate: float = 1.0
    product_rate: float = 1.0
    link_rate: float = 1.0
    shared: dict[str, Any] = field(default_factory=dict)
    _section: str = ""
    _deadline: float = float("inf")

    def pick(self, real: Value, dry: Value) -> Value:
        """A size for a GPU, or one for a dry run."""
        return dry if self.dry else real

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16; the interpreter multiplies that wrongly."""
        return self.pick(torch.bfloat16, torch.float16)

    def run(self, section: str, budget_s: float, call: Callable[[Bench], None]) -> None:
        """Carry out one section; what goes wrong becomes a note, and the figures it had stay."""
        self._section, self._deadline = section, time.monotonic() + budget_s
        started = time.monotonic()
        try:
            with torch.inference_mode():
                call(self)
        except OutOfTimeError:
            self.notes.append(f"{section}: not all measured within {budget_s:.0f} s")
        except Exception as error:  # a section must not take the others along
            traceback.print_exc()
            self.notes.append(f"{section}: ended by {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        gc.collect()
        if self.device.kind == "cuda":
            torch.cuda.empty_cache()
        print(f"-- {section}: {time.monotonic() - started:.1f} s", flush=True)

    def need_time(self, seconds: float = 0.0) -> None:
        """Raises OutOfTimeError when the section has not that much time left."""
        if time.monotonic() + seconds > self._deadline:
            raise OutOfTimeError(self._section)

    def add(
        self, what: str, figure: str, ratio: float | None = None, bar: float | None = None, *, at_most: bool = False
    ) -> None:
        """Note and print a figure."""
        row = Row(self._section, what, figure, ratio, bar, at_most)
        self.rows.append(row)
        print("  ".join(cell for cell in row.cells() if cell), flush=True)

    def compare(self, what: str, found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
        """Raises WrongResultError when `found` is off by more than tolerance times the largest wanted value."""
        error = float((found.double() - wanted.double()).abs().max())
        limit = tolerance * float(wanted.double().abs().max())
        if not error <= limit:
            raise WrongResultError(f"{what} is off by {error:.3g}; at most {limit:.3g} is right")

    def seconds(self, call: Callable[[], object], rounds: int = ROUNDS) -> float:
        """Median time of a call. Raises OutOfTimeError."""
        self.need_time()
        return seconds(call, self.device.torch_device, rounds=1 if self.dry else rounds)

    def markdown(self) -> str:
        """The page."""
        head = ["section", "what", "figure", "ratio", "bar", ""]
        lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * 6, *(row.cells() for row in self.rows))]
        notes = [f"- {note}" for note in self.notes] or ["- every section ran to its end"]
        return "\n".join([*lines, "", *notes, ""])


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Median time of a call after one that warms up; the L2 cache is flushed before each on a GPU."""
    call()
    if device.type != "cuda":
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    marks = []
    for _ in range(rounds):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in marks)


def wall_seconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median wall time of a call, until the device is idle, after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
