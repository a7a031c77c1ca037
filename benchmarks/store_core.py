"""CPU time of the node store core alone, per event and per block of its run; traces through it.

No sockets and no payloads: events go in, instructions come out and are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.common import Cell, Options, Report, Samples, Table, at_most, interleave, run_main, say
from benchmarks.store_replay import CoreCache
from benchmarks.trace_replay import hit_ratio
from benchmarks.traces import load, load_anchors
from tournant.kvstore.block import KEY_BYTES, Part, Version
from tournant.kvstore.config import PAGE_BYTES, StoreConfig
from tournant.kvstore.events import Attach, CloseRead, Fetch, Open, ReportEntry, Send, Used
from tournant.kvstore.events import Report as StoreReport
from tournant.kvstore.node_store import Event, Instruction, NodeStore

WEIGHTS = b"w" * KEY_BYTES
WHOLE = Part(0, 1, 0, 1)
LONG = 512
REPEATS = 200
MAX_EVENT_US, MAX_BLOCK_US = 5.0, 1.0
REPLAYED = ("mooncake_conversation", "mooncake_synthetic", "claude_code_first60")
DIGITS = 4


def run(options: Options) -> Report:
    """All sections."""
    report = Report("Block store: core")
    events(options, report)
    replays(options, report)
    return report


class _Driver:
    """A core with one client that stores whole blocks. `chain`: keys of LONG blocks that are there."""

    def __init__(self) -> None:
        slots = 8 * LONG
        self.core = NodeStore(StoreConfig(host_bytes=slots * PAGE_BYTES, max_lent_share=0.5), 1, b"")
        self.lent: list[tuple[int, int]] = []
        self.seq = self.read = self.counter = 0
        self.step(Attach(1, WEIGHTS, "none", b"", 1, WHOLE, (WHOLE,), PAGE_BYTES, LONG))
        self.chain = tuple(number.to_bytes(KEY_BYTES, "little") for number in range(1 << 40, (1 << 40) + LONG))
        self.report(self.chain)

    def step(self, event: Event) -> list[Instruction]:
        """One event; lent slots are kept."""
        out = self.core.step(self.seq + self.read, event)
        for instruction in out:
            if isinstance(instruction, Send) and hasattr(instruction.reply, "lent"):
                self.lent += instruction.reply.lent
        return out

    def report(self, keys: tuple[bytes, ...]) -> float:
        """Report blocks of these keys; seconds of CPU of the event alone."""
        self.seq += 1
        entries = []
        for key in keys:
            self.counter += 1
            page, generation = self.lent.pop()
            entries.append(ReportEntry(key, Version(1, self.counter), page, generation, PAGE_BYTES, 0))
        event = StoreReport(1, self.seq, tuple(entries))
        start = time.process_time()
        self.step(event)
        return time.process_time() - start

    def new_keys(self, count: int) -> tuple[bytes, ...]:
        """Keys that nobody has asked for."""
        return tuple((self.counter + place).to_bytes(KEY_BYTES, "little") for place in range(1, count + 1))

    def open_and_close(self, count: int) -> float:
        """Open, pick, fetch and close a chain of this length; seconds of CPU of the three events."""
        self.read += 1
        keys = self.chain[:count]
        picks = tuple(Version(1, place + 1) for place in range(count))
        messages = (Open(1, self.read, keys), Fetch(1, self.read, picks), CloseRead(1, self.read))
        start = time.process_time()
        for message in messages:
            self.step(message)
        return time.process_time() - start

    def use(self, count: int) -> float:
        """Say that a chain was used; seconds of CPU."""
        event = Used(1, self.chain[:count])
        start = time.process_time()
        self.step(event)
        return time.process_time() - start


def events(options: Options, report: Report) -> None:
    """Costs of the events of a read and of a write, split into what an event and what a block of its run costs."""
    say("events of the core")
    reading, writing = _Driver(), _Driver()
    repeats = 20 if options.quick else REPEATS

    def mean(action: Callable[[int], float], count: int) -> Callable[[], float]:
        return lambda: sum(action(count) for _ in range(repeats)) / repeats * 1e6

    cases: dict[str, tuple[Callable[[int], float], int]] = {
        "open, fetch and close": (reading.open_and_close, 3),
        "used": (reading.use, 1),
        "report, with eviction and lending": (lambda count: writing.report(writing.new_keys(count)), 1),
    }
    found = interleave(
        {f"{name} {count}": mean(action, count) for name, (action, _) in cases.items() for count in (1, LONG)},
        options.rounds,
    )
    rows: list[list[Cell]] = []
    columns = ["messages", "us per message of one block", "bar", f"us per further block of {LONG}", "bar "]
    for name, (_, messages) in cases.items():
        one = found[f"{name} 1"].map(lambda us, messages=messages: us / messages)
        long, short = found[f"{name} {LONG}"], found[f"{name} 1"]
        further = Samples(
            tuple((a - b) / (LONG - 1) / messages for a, b in zip(long.values, short.values, strict=True))
        )
        rows.append([name, one, at_most(MAX_EVENT_US, one), further, at_most(MAX_BLOCK_US, further)])
    report.add(Table("core, CPU time", columns, rows))


def replays(options: Options, report: Report) -> None:
    """LRU through the core on the public traces beside the published digits, at every listed capacity."""
    if not any(options.traces.glob("anchors_*")):
        say(f"no traces in {options.traces}: nothing is replayed")
        return
    rows: list[list[Cell]] = []
    for name in REPLAYED[:1] if options.quick else REPLAYED:
        trace = load(name, options.traces)
        for capacity, published in sorted(load_anchors(options.traces)[name].items())[: 2 if options.quick else None]:
            say(f"{name}, {capacity} blocks")
            ratio = round(hit_ratio(trace, CoreCache("lru", capacity)), DIGITS)
            equal = "yes" if ratio == published["lru"] else "NO"
            rows.append([name, f"{capacity:,}", f"{ratio:.4f}", f"{published['lru']:.4f}", equal])
    report.add(Table("LRU through the core", ["trace", "blocks", "hit ratio", "published", "equal"], rows))


if __name__ == "__main__":
    run_main(run, __doc__)
