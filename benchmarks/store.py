"""The block store: NVMe restore and write beside raw direct I/O, I/O orders, codecs.

Raw means os.preadv and os.pwritev on an O_DIRECT file of the same folder, the same sizes in the same order by as many
threads, in the same rounds. Data is random. Files lie under build/, so the numbers are those of the repository's disk.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    REPO,
    BenchmarkError,
    Cell,
    Options,
    Report,
    Table,
    at_least,
    interleave,
    run_main,
    say,
    timed,
)
from tournant.kvstore.block import Part, Version
from tournant.kvstore.codecs import CODECS, codec_for, decode, encode
from tournant.kvstore.config import MAX_SEGMENT_BYTES, PAGE_BYTES
from tournant.kvstore.disk_events import (
    DiskEvent,
    DiskInstruction,
    ReadDone,
    ReadRecords,
    RecordAt,
    RecordRead,
    RecordToWrite,
    WriteDone,
    WriteRecords,
)
from tournant.kvstore.nvme_folder import segment_name
from tournant.kvstore.nvme_tier import NvmeConfig, NvmeTier
from tournant.kvstore.policies.io_order import ORDERS
from tournant.kvstore.record import RecordHeader, checksum, record_bytes

FOLDER = REPO / "build" / "bench-store"
BLOCKS = {"360 KiB": 360 << 10, "2 MiB": 2 << 20}
DEPTH = 4
BATCH, IN_FLIGHT = 8, 4  # records of one instruction, instructions waiting or running
MIN_RESTORE, MIN_WRITE = 0.8, 0.7
WAIT_S = 120.0


def run(options: Options) -> Report:
    """All sections."""
    report = Report("Block store")
    try:
        nvme_rates(options, report)
        io_orders(options, report)
        codecs(options, report)
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
    return report


# -------------------------------------------------------------------- NVMe


class Bench:
    """An open tier with blocks of random bytes in its pool. total: bytes of all blocks together."""

    def __init__(self, name: str, length: int, total: int, data: bytes | None, form: str, **config: Any) -> None:
        self.length, self.count = length, total // length
        self.pages = -(-length // PAGE_BYTES)
        self.pool = memoryview(mmap.mmap(-1, self.count * self.pages * PAGE_BYTES))
        source = np.random.default_rng(7)
        for index in range(self.count):
            self.slot(index)[:] = source.bytes(length) if data is None else data
        self._written: list[RecordAt] = []
        self._failures: list[str] = []
        self._room = threading.Semaphore()
        self._lock = threading.Lock()
        self._io = itertools.count(1)
        self.folder = FOLDER / name
        self.tier = self._open(persist=False, **config)
        if not self.tier.direct:
            raise BenchmarkError(f"no direct I/O in {FOLDER}: there is nothing to compare with")
        self.headers = [self._header(index, form) for index in range(self.count)]

    def _open(self, **config: Any) -> NvmeTier:
        tier = NvmeTier(self.folder, NvmeConfig(workers=DEPTH, **config), self.pool, self._event)
        tier.open()
        return tier

    def reopen(self, **config: Any) -> None:
        """The same files under another configuration."""
        self.tier.close()
        self.tier = self._open(**config)

    def slot(self, index: int) -> memoryview:
        """Bytes of a block in the pool."""
        start = index * self.pages * PAGE_BYTES
        return self.pool[start : start + self.length]

    def _header(self, index: int, form: str) -> RecordHeader:
        version, part = Version(1, index), Part(0, 1, 0, 1)
        return RecordHeader(
            index.to_bytes(32, "big"), version, part, bytes(32), form, self.length, checksum(self.slot(index))
        )

    def _event(self, event: DiskEvent) -> None:
        with self._lock:
            if isinstance(event, ReadDone):
                self._failures += [result.reason for result in event.results if result.outcome != "ok"]
            elif event.error is not None:
                self._failures.append(event.error.message)
            if isinstance(event, WriteDone):
                self._written += event.records
        self._room.release()

    def carry_out(self, instructions: Sequence[DiskInstruction], window: int = 1 << 20) -> None:
        """Submit all, at most `window` in flight, and wait for all. Raises BenchmarkError when one failed."""
        window = min(window, len(instructions))
        room = self._room = threading.Semaphore(window)
        for instruction in instructions:
            if not room.acquire(timeout=WAIT_S) or not self.tier.submit(instruction):
                raise BenchmarkError("the tier does not answer or its queue is full")
        for _ in range(window):
            if not room.acquire(timeout=WAIT_S):
                raise BenchmarkError("the tier does not answer")
        if self._failures:
            raise BenchmarkError(f"the NVMe tier failed: {self._failures[:3]}")

    def write(self, segment: int) -> list[RecordAt]:
        """Write every block once into a new segment, in runs of BATCH records as the core writes them."""
        self._written = []
        size = record_bytes(self.length)
        items = [RecordToWrite(header, index * self.pages) for index, header in enumerate(self.headers)]
        runs = [
            WriteRecords(next(self._io), segment, first * size, tuple(items[first : first + BATCH]))
            for first in range(0, len(items), BATCH)
        ]
        self.carry_out(runs, 2 * IN_FLIGHT)
        return sorted(self._written, key=lambda record: record.offset)

    def read(self, records: Sequence[RecordAt], order: Sequence[int], window: int = IN_FLIGHT) -> None:
        """Read records into their slots, checked, in this order, some in one instruction as the core asks for them."""
        reads = [
            RecordRead(1, records[index].offset, records[index].size, records[index].header, index * self.pages)
            for index in order
        ]
        batches = [tuple(reads[first : first + BATCH]) for first in range(0, len(reads), BATCH)]
        self.carry_out([ReadRecords(next(self._io), batch) for batch in batches], window)

    def reading(self, records: Sequence[RecordAt], order: Sequence[int]) -> Callable[[], None]:
        """`read` with these arguments."""
        return partial(self.read, records, order)


@contextmanager
def bench(
    name: str, length: int, total: int, data: bytes | None = None, form: str = "bf16", **config: Any
) -> Iterator[Bench]:
    """A Bench, closed at the end."""
    made = Bench(name, length, total, data, form, **config)
    try:
        yield made
    finally:
        made.tier.close()
        shutil.rmtree(made.folder)


def raw(path: Path, call: Callable[[int, list[memoryview], int], int], made: Bench, order: Sequence[int]) -> None:
    """Payloads where records have them, through bare system calls; DEPTH threads take them in turn."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    todo = iter(order)
    problems: list[str] = []

    def work() -> None:
        size = record_bytes(made.length)
        moved = [call(file, [made.slot(index)], index * size + PAGE_BYTES) for index in todo]
        problems.extend(f"{count} of {made.length} bytes were moved" for count in moved if count != made.length)

    threads = [threading.Thread(target=work) for _ in range(DEPTH)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(file)
    if problems:
        raise BenchmarkError(problems[0])


def nvme_rates(options: Options, report: Report) -> None:
    """Restore and write through the tier, beside raw direct I/O."""
    total = (16 if options.quick else 256) << 20
    rows = [row for name, length in BLOCKS.items() for row in _rates(name, length, total, options.rounds)]
    note = (
        f"{DEPTH} threads, {total >> 20} MiB in random order; restore includes the checks of header, trailer and "
        f"payload; records are written in runs of {BATCH}, raw blocks one by one; writes are not synced on either side."
    )
    columns = ("what", "GB/s ours", "GB/s raw direct I/O", "ours / raw", "bar")
    report.add(Table("NVMe at queue depth 4", columns, rows, [note]))


def _rates(name: str, length: int, total: int, rounds: int) -> list[list[Cell]]:
    say(f"NVMe, blocks of {name}")
    with bench("rates", length, total, order="fcfs") as made:  # the order of the raw reads
        order = shuffled(made.count)
        records = made.write(1)
        path = made.folder / segment_name(1)
        numbers = itertools.count(2)

        def write_raw() -> None:
            raw(made.folder / f"raw-{next(numbers)}", os.pwritev, made, range(made.count))

        reads = {
            "raw read": timed(lambda: raw(path, os.preadv, made, order)),
            "restore": timed(lambda: made.read(records, order)),
        }
        writes = {"raw write": timed(write_raw), "write": timed(lambda: made.write(next(numbers)))}
        found = interleave(reads, rounds) | interleave(writes, rounds)  # apart: a write is still busy when it returns
        gigabytes = made.count * made.length / 1e9
    rates = {which: seconds.map(lambda value: gigabytes / value) for which, seconds in found.items()}
    rows: list[list[Cell]] = []
    for ours, theirs, limit in (("restore", "raw read", MIN_RESTORE), ("write", "raw write", MIN_WRITE)):
        ratio = rates[ours].over(rates[theirs])
        rows.append([f"{ours}, {name}", rates[ours], rates[theirs], ratio, at_least(limit, ratio)])
    return rows


def shuffled(count: int) -> list[int]:
    """The numbers below `count` in an order that is always the same."""
    order = list(range(count))
    random.Random(1).shuffle(order)
    return order


def io_orders(options: Options, report: Report) -> None:
    """The same reads under each I/O order."""
    total = (8 if options.quick else 128) << 20
    blocks = {"64 KiB": 64 << 10, **BLOCKS}
    rows = [row for name, length in blocks.items() for row in _orders(name, length, total, options.rounds)]
    note = (
        f"{total >> 20} MiB of neighbouring records, the same file for all, all in the queue at once in random order, "
        f"{DEPTH} threads."
    )
    columns = ("order, block", "GB/s", "rate / FCFS", "MB of seek per request", "requests per call")
    report.add(Table("I/O orders on NVMe", columns, rows, [note]))


def _orders(name: str, length: int, total: int, rounds: int) -> list[list[Cell]]:
    say(f"I/O orders, blocks of {name}")
    figures: dict[str, tuple[float, float]] = {}
    with bench("orders", length, total, queue_limit=1 << 16) as made:
        records, order = made.write(1), shuffled(made.count)

        def under(name: str) -> float:
            made.reopen(order=name, queue_limit=1 << 16)
            seconds = timed(lambda: made.read(records, order, 1 << 20))()
            stats = made.tier.stats()
            figures[name] = (
                (stats.seek_distance - MAX_SEGMENT_BYTES) / stats.requests / 1e6,
                stats.requests / stats.calls,
            )  # less the way to segment 1
            return seconds

        found = interleave({name: partial(under, name) for name in ORDERS}, rounds)
        gigabytes = made.count * length / 1e9
    rows: list[list[Cell]] = []
    for order_name, seconds in found.items():
        rate = seconds.map(lambda value: gigabytes / value)
        rows.append([f"{order_name}, {name}", rate, found["fcfs"].over(seconds), *figures[order_name]])
    return rows


def codecs(options: Options, report: Report) -> None:
    """What LZ4 on byte planes saves and costs."""
    length, total = 360 << 10, (8 if options.quick else 64) << 20
    normal = np.random.default_rng(3).standard_normal(length // 2, dtype=np.float32)
    upper = (normal.view(np.uint32) >> 16).astype("<u2")
    wide = (upper[: length // 4].astype("<u4") << 16).tobytes()
    rows = [
        _codec("normals as bf16", "bf16", upper.tobytes(), total, options.rounds),
        _codec("bf16 widened to fp32", "fp32", wide, total, options.rounds),
    ]
    columns = ("data", "share saved", "GB/s encode", "GB/s decode", "restore rate / plain", "codec in the end")
    note = f"Blocks of 360 KiB, {total >> 20} MiB; encode and decode by one thread, restore by {DEPTH}."
    report.add(Table("LZ4 on byte planes", columns, rows, [note]))


def _codec(name: str, form: str, data: bytes, total: int, rounds: int) -> list[Cell]:
    payload, codec = memoryview(data), codec_for(form)
    packed = encode(codec, payload)
    if packed is None:
        raise BenchmarkError(f"{name} does not compress at all")
    target = memoryview(bytearray(len(data)))
    with ExitStack() as stack:
        tiers = {
            which: stack.enter_context(bench(which, len(data), total, data, form, codec=which)) for which in CODECS
        }
        reads = {which: made.reading(made.write(1), range(made.count)) for which, made in tiers.items()}
        found = interleave(
            {
                "encode": timed(lambda: encode(codec, payload)),
                "decode": timed(lambda: decode(codec, memoryview(packed), target)),
                **{which: timed(read) for which, read in reads.items()},
            },
            rounds,
        )
        state = tiers["lz4"].tier.stats().codec[form]
    rates = [found[which].map(lambda seconds: len(data) / 1e9 / seconds) for which in ("encode", "decode")]
    return [name, 1 - len(packed) / len(data), *rates, found["none"].over(found["lz4"]), state or "on"]


if __name__ == "__main__":
    run_main(run, __doc__)
