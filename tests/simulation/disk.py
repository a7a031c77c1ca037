"""The NVMe tier as the simulator sees it: what instructions of the core do to records, with every fault of a disk.

Stands in for kvstore/nvme_tier.py (whose own files are tested in tests/kvstore and test_crash_states.py) and keeps its
promises: a record is read back whole, of this key and version, or it is corrupt.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tests.simulation.memory import Memory
from tournant.kvstore.disk_events import (
    CheckpointDone,
    CloseSegment,
    DeleteSegment,
    DiskError,
    DiskEvent,
    DiskInstruction,
    ReadDone,
    ReadRecords,
    ReadResult,
    RecordAt,
    Recovery,
    SegmentClosed,
    SegmentDeleted,
    SegmentFound,
    WriteCheckpoint,
    WriteDone,
    WriteRecords,
)
from tournant.kvstore.record import record_bytes

Later = Callable[[int, Callable[[], None]], None]


class Record:
    """A record on the disk. content: of its payload, as in memory.py; synced: survives a loss of power."""

    __slots__ = ("at", "content", "synced", "torn")

    def __init__(self, at: RecordAt, content: int) -> None:
        self.at = at
        self.content = content
        self.torn = False
        self.synced = False


class Disk:
    """Files of one folder; survives its stores. `faults`: names switched on for this run."""

    def __init__(self, rng: random.Random, faults: frozenset[str], count: Callable[[str], None]) -> None:
        self._rng = rng
        self.faults = faults
        self._count = count
        self.segments: dict[int, dict[int, Record]] = {}
        self._deleted: dict[int, dict[int, Record]] = {}  # until the next sync: a crash may bring them back
        self.quiet = False
        self._writing: list[tuple[WriteRecords, Memory]] = []

    def _strikes(self, fault: str, odds: int) -> bool:
        if fault in self.faults and not self.quiet and self._rng.randrange(odds) == 0:
            self._count(fault)
            return True
        return False

    def submit(
        self, instruction: DiskInstruction, memory: Memory, later: Later, done: Callable[[DiskEvent], None]
    ) -> None:
        """Carry an instruction out after a while, then call `done` with its event."""
        delay = self._rng.randrange(50, 2000)
        if self._strikes("slow disk", 3 if isinstance(instruction, ReadRecords) else 12):
            delay += self._rng.randrange(100_000, 4_000_000)
        if isinstance(instruction, WriteRecords):
            self._writing.append((instruction, memory))
        later(delay, lambda: done(self._carry_out(instruction, memory)))

    def _carry_out(self, instruction: DiskInstruction, memory: Memory) -> DiskEvent:
        match instruction:
            case WriteRecords():
                return self._write(instruction, memory)
            case ReadRecords():
                results = tuple(self._read(r.segment, r.offset, r.header, r.slot, memory) for r in instruction.reads)
                return ReadDone(instruction.io, results)
            case CloseSegment(io, segment):
                if self._strikes("sync error", 4):
                    return SegmentClosed(io, segment, DiskError("sync", "injected"))
                for record in self.segments.get(segment, {}).values():
                    record.synced = True
                return SegmentClosed(io, segment, None)
            case DeleteSegment(io, segment):
                if self._strikes("delete error", 6):
                    return SegmentDeleted(io, segment, DiskError("io", "injected"))
                gone = self.segments.pop(segment, None)
                if gone is not None:
                    self._deleted[segment] = gone
                return SegmentDeleted(io, segment, None)
            case WriteCheckpoint(io):
                return CheckpointDone(io, DiskError("io", "injected") if self._strikes("checkpoint error", 3) else None)

    def _write(self, instruction: WriteRecords, memory: Memory) -> WriteDone:
        self._writing = [(w, m) for w, m in self._writing if w is not instruction]
        error = None
        count = len(instruction.records)
        if self._strikes("disk full", 8):
            error = DiskError("full", "injected")
        elif self._strikes("write error", 8):
            error = DiskError("io", "injected")
        if error is not None:
            count = self._rng.randrange(count + 1)
        placed = self._place(instruction, memory, count)
        return WriteDone(instruction.io, error, placed)

    def _place(self, instruction: WriteRecords, memory: Memory, count: int) -> tuple[RecordAt, ...]:
        segment = self.segments.setdefault(instruction.segment, {})
        offset, placed = instruction.offset, []
        for write in instruction.records[:count]:
            at = RecordAt(instruction.segment, offset, record_bytes(write.header.length), write.header)
            segment[offset] = Record(at, memory.contents.get(write.slot, 0))
            placed.append(at)
            offset += at.size
        return tuple(placed)

    def _read(self, number: int, offset: int, header: object, slot: int, memory: Memory) -> ReadResult:
        memory.scramble(slot)
        if self._strikes("read error", 10):
            return ReadResult("error", "injected", DiskError("io", "injected"))
        record = self.segments.get(number, self._deleted.get(number, {})).get(offset)
        if record is None or record.torn or not self.header_matches(record, header):
            return ReadResult("corrupt", "not there")
        if self.checksum_matters(record) and record.content != record.at.header.checksum:
            return ReadResult("corrupt", "checksum")
        memory.contents[slot] = record.content
        return ReadResult("ok")

    def header_matches(self, record: Record, header: object) -> bool:
        """Whether the record found is the one asked for."""
        return record.at.header == header

    def checksum_matters(self, record: Record) -> bool:
        """Always; a mutant says otherwise."""
        del record
        return True

    def rot(self) -> None:
        """A payload changes under its checksum, or two records trade places."""
        records = [record for segment in self.segments.values() for record in segment.values()]
        if not records:
            return
        if "bit flip" in self.faults and self._rng.randrange(2):
            self._rng.choice(records).content ^= 1 << self._rng.randrange(64)
            self._count("bit flip")
        elif "swapped records" in self.faults and len(records) > 1:
            a, b = self._rng.sample(records, 2)
            a.content, b.content = b.content, a.content
            headers = (a.at.header, b.at.header)
            a.at, b.at = replace(a.at, header=headers[1]), replace(b.at, header=headers[0])
            self._count("swapped records")

    def crash(self, *, power: bool) -> None:
        """The store process died; with `power`, the machine too. Writes in flight leave any of their records."""
        for instruction, memory in self._writing:
            placed = self._place(instruction, memory, self._rng.randrange(len(instruction.records) + 1))
            if placed and self._rng.randrange(2):
                self.segments[instruction.segment][placed[-1].offset].torn = True
                self._count("torn record")
        self._writing = []
        if power:
            self._count("power loss")
            for segment in self.segments.values():
                for offset, record in list(segment.items()):
                    if not record.synced and self._rng.randrange(2):
                        if self._rng.randrange(2):
                            del segment[offset]
                        else:
                            record.torn = True
            for number, segment in self._deleted.items():
                if self._rng.randrange(2):
                    self.segments[number] = segment
                    self._count("resurrected segment")
        self._deleted = {}

    def recover(self) -> Recovery:
        """What opening the folder finds."""
        found, records = [], []
        torn = 0
        for number in sorted(self.segments):
            segment = self.segments[number]
            whole = [segment[offset].at for offset in sorted(segment) if not segment[offset].torn]
            torn += len(segment) - len(whole)
            size = max((record.at.offset + record.at.size for record in segment.values()), default=0)
            found.append(SegmentFound(number, size, size, len(whole), 0, len(segment) - len(whole)))
            records += whole
        newest = max([*self.segments, *self._deleted], default=0)
        return Recovery(tuple(found), tuple(records), newest + 1, 0, torn, 0, "")
