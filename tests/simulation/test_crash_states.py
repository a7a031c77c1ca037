"""Every workload of at most three disk operations, every state a loss of power may leave: what is served is right.

A crash happens after any call to the disk of a workload's last operation (earlier ones are the last of a shorter
workload). Of the pages that were not synced any subset is there; one page at a time is torn, the others all there or
all lost. Workloads with more than FULL_PAGES unsynced pages get as many states, drawn by a seed; the soak takes more.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.helpers.crash_disk import CrashDisk, PageAt, subsets
from tests.helpers.nvme import Pool, TestTier, payload
from tournant.kvstore.codecs import Codecs
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_events import (
    CloseSegment,
    DeleteSegment,
    RecordAt,
    RecordRead,
    SegmentCover,
    WriteCheckpoint,
    WriteRecords,
)
from tournant.kvstore.nvme_folder import Folder, recover, segment_name
from tournant.kvstore.record_io import Scratch, read_run

OPERATIONS = ("one", "two", "close", "checkpoint", "delete")
WORKLOADS = [workload for length in (1, 2, 3) for workload in product(OPERATIONS, repeat=length)]
LENGTHS = (PAGE_BYTES, 5000)  # a page, and two with an odd end
FULL_PAGES = 8
SOAK_PAGES = 12
TEARS = (512, 2048)
FOLDER = Path("/nowhere")


class Workload:
    """Operations on a tier over a CrashDisk, and what they wrote."""

    def __init__(self) -> None:
        self.disk = CrashDisk()
        self.tier = TestTier(FOLDER, self.disk, Pool(256), workers=1, direct=False)
        self.records: dict[tuple[int, int], RecordAt] = {}
        self.deleted: set[int] = set()
        self.crashes: list[CrashDisk] = []
        self._segment, self._offset, self._number, self._io = 1, 0, 0, 0

    def run(self, operations: tuple[str, ...]) -> None:
        """Carry out all; disks of crashes during the last one are kept."""
        for index, operation in enumerate(operations):
            if index == len(operations) - 1:
                self.disk.after_change = lambda: self.crashes.append(self.disk.copy())
            self._io += 1
            getattr(self, f"_{operation}")()
        self.disk.after_change = lambda: None
        self.tier.close()

    def _one(self) -> None:
        self._write(1)

    def _two(self) -> None:
        self._write(2)

    def _write(self, count: int) -> None:
        numbers = range(self._number + 1, self._number + 1 + count)
        self._number += count
        run = tuple(self.tier.to_write(number, LENGTHS[number % 2]) for number in numbers)
        done = self.tier.do(WriteRecords(self._io, self._segment, self._offset, run))
        assert done.error is None
        self.records |= {(record.segment, record.offset): record for record in done.records}
        self._offset = done.records[-1].offset + done.records[-1].size

    def _close(self) -> None:
        self.tier.do(CloseSegment(self._io, self._segment))
        self._segment, self._offset = self._segment + 1, 0

    def _checkpoint(self) -> None:
        ends: dict[int, int] = {}
        for record in self.records.values():
            ends[record.segment] = max(ends.get(record.segment, 0), record.offset + record.size)
        live = [record for record in self.records.values() if record.segment not in self.deleted]
        covers = tuple(SegmentCover(*item) for item in ends.items() if item[0] not in self.deleted)
        done = self.tier.do(WriteCheckpoint(self._io, self._segment + 1, covers, tuple(live)))
        assert done.error is None

    def _delete(self) -> None:
        oldest = min({record.segment for record in self.records.values()} - self.deleted, default=self._segment)
        self.deleted.add(oldest)
        self.tier.do(DeleteSegment(self._io, oldest))
        if oldest == self._segment:
            self._segment, self._offset = self._segment + 1, 0


def states(disk: CrashDisk, most: int | None, draw: random.Random) -> Iterator[tuple[CrashDisk, bool]]:
    """What a crash may leave of a disk; with each, whether nothing that had a name was lost."""
    for names in disk.name_states():
        pages = disk.dirty_pages(names)
        kept: Iterator[frozenset[PageAt]] = subsets(pages)
        if most is not None and len(pages) > most:
            some = {frozenset(page for page in pages if draw.random() < 0.5) for _ in range(2**most)}
            kept = iter([frozenset(), *some, frozenset(pages)])
        for chosen in kept:
            yield disk.after_crash(names, chosen, {}, keep_length=False), len(chosen) == len(pages)
            if len(chosen) < len(pages):
                yield disk.after_crash(names, chosen, {}, keep_length=True), False
        for page, bytes_kept in product(pages, TEARS):
            for others in (frozenset(), frozenset(pages) - {page}):
                yield disk.after_crash(names, others, {page: bytes_kept}, keep_length=True), False


SCRATCH, POOL, CODECS = Scratch(), Pool(64), Codecs("none")


def check(disk: CrashDisk, complete: bool, written: dict[tuple[int, int], RecordAt]) -> tuple[int, int]:
    """Reopen: everything adopted is a record that was written and verifies or misses; what nothing of was lost, and
    what has a file, is adopted and verifies. Returns (served, missed).
    """
    folder = Folder(disk, FOLDER)
    found = recover(folder, "bf16", direct=False)
    served = set()
    places = [(record.segment, record.offset) for record in found.records]
    assert len(places) == len(set(places))
    for record in found.records:
        assert written[record.segment, record.offset] == record
        slot = POOL.put(b"\xee" * record.header.length)
        file = disk.open_file(folder.handle, segment_name(record.segment))
        read = RecordRead(record.segment, record.offset, record.size, record.header, slot)
        problem = read_run(disk, file, [read], POOL.view, SCRATCH, CODECS)[0]
        if not problem:
            assert POOL.get(slot, record.header.length) == payload(record.header.version.counter, record.header.length)
            served.add((record.segment, record.offset))
    if complete:
        ends = {one.segment: one.size for one in found.segments}
        there = {place for place, record in written.items() if place[1] + record.size <= ends.get(place[0], 0)}
        assert served == there
        assert not found.corrupt
    assert found.next_segment > max((one.segment for one in found.segments), default=0)
    return len(served), len(written) - len(served)


def explore(workload: tuple[str, ...], most: int) -> tuple[int, int, int]:
    """States seen, records served and missed."""
    run = Workload()
    run.run(workload)
    seen = served = missed = 0
    draw = random.Random("/".join(workload))
    known = set()
    for disk in run.crashes:
        for after, complete in states(disk, most, draw):
            state = (complete, after.content())
            if state in known:
                continue
            known.add(state)
            good, lost = check(after, complete, run.records)
            seen, served, missed = seen + 1, served + good, missed + lost
    return seen, served, missed


@pytest.mark.parametrize("last", OPERATIONS)
def test_every_crash_state(last: str) -> None:
    totals = [explore(workload, FULL_PAGES) for workload in WORKLOADS if workload[-1] == last]
    seen, served, missed = (sum(column) for column in zip(*totals, strict=True))
    assert min(seen, served, missed) > 20  # else nothing was looked at


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_more_subsets_of_large_workloads() -> None:
    for workload in WORKLOADS:
        explore(workload, SOAK_PAGES)


@pytest.mark.parametrize(
    ("page", "what"),
    [(0, "header"), (1, "payload"), (2, "trailer")],
)
def test_a_lost_page_is_noticed(page: int, what: str) -> None:
    """The check above can fail: each page of a record is needed."""
    run = Workload()
    run.run(("two",))
    disk = run.crashes[-1]
    pages = disk.dirty_pages(disk.names_now)
    lost = disk.after_crash(disk.names_now, frozenset(pages) - {pages[4 + page]}, {}, keep_length=True)
    assert check(lost, False, run.records) == (1, 1), what
    with pytest.raises(AssertionError):
        check(lost, True, run.records)
