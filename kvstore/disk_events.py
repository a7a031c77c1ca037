"""What the node store core and the NVMe tier say to each other: instructions to the disk and events from it.

Owns the shared values and nothing else. The core decides which segment and offset each record goes to, when a segment
is closed or deleted, what is read and into which slot, and what an error means; the tier carries out and reports.

What the core promises (the tier relies on it, and no wrong bytes come of breaking it):
 1. A segment number names one file and is never used again, also not after a restart (`Recovery.next_segment`).
 2. Two writes never overlap: the next write into a segment starts at or after `offset + run_bytes(records)`, or, once
    WriteDone has told how much was used, right after its last record. What lies between stays a hole of the file.
 3. A slot is not reused, and a segment neither closed nor deleted, while an I/O of it is in flight.

What the tier promises: every accepted instruction is answered by exactly one event with its `io`, unless the tier was
closed before. Events come in no order between instructions. Nothing is retried, but a merged read that fails is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tournant.kvstore.record import RecordHeader

DiskErrorKind = Literal["full", "io", "sync"]


@dataclass(frozen=True, slots=True)
class DiskError:
    """full: no room or quota; io: reading or writing failed; sync: what was written may not have reached the disk, and
    a second fsync would not tell (the segment is to be retired). errno: 0 where the system gave none.
    """

    kind: DiskErrorKind
    message: str
    errno: int = 0


@dataclass(frozen=True, slots=True)
class RecordAt:
    """A record on disk. offset: first byte in its segment, whole pages; size: bytes it takes there, all pages counted;
    header: what it holds.
    """

    segment: int
    offset: int
    size: int
    header: RecordHeader


# ---- instructions


@dataclass(frozen=True, slots=True)
class RecordToWrite:
    """One part in a host slot. slot: first page of the slot in the pool."""

    header: RecordHeader
    slot: int


@dataclass(frozen=True, slots=True)
class WriteRecords:
    """Write 1 to config.MAX_RUN_RECORDS records one after another from `offset` on. The first write makes the file."""

    io: int
    segment: int
    offset: int
    records: tuple[RecordToWrite, ...]


@dataclass(frozen=True, slots=True)
class RecordRead:
    """Bring the payload of a record into a host slot, which has at least `header.length` bytes rounded up to pages.

    size: as in RecordAt. Key, version, part, weights, form, length and checksum found must be those of `header`.
    """

    segment: int
    offset: int
    size: int
    header: RecordHeader
    slot: int


@dataclass(frozen=True, slots=True)
class ReadRecords:
    """Records that are answered together; each is scheduled on its own, in the order of the tier's I/O policy."""

    io: int
    reads: tuple[RecordRead, ...]


@dataclass(frozen=True, slots=True)
class CloseSegment:
    """Sync a segment and its folder entry: after SegmentClosed without an error it survives a loss of power."""

    io: int
    segment: int


@dataclass(frozen=True, slots=True)
class DeleteSegment:
    """Give a segment's room back. Reads in flight still end well. A segment without a file counts as deleted."""

    io: int
    segment: int


@dataclass(frozen=True, slots=True)
class SegmentCover:
    """The checkpoint knows all that is worth keeping of a segment below `covered` bytes; open scans the rest."""

    segment: int
    covered: int


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Replace the checkpoint. records: the index; those outside the covered range are found by the scan again."""

    io: int
    next_segment: int
    segments: tuple[SegmentCover, ...]
    records: tuple[RecordAt, ...]


DiskInstruction = WriteRecords | ReadRecords | CloseSegment | DeleteSegment | WriteCheckpoint

# ---- events


@dataclass(frozen=True, slots=True)
class WriteDone:
    """records: those that are whole in the file, a prefix of the run; all of them unless there is an error."""

    io: int
    error: DiskError | None
    records: tuple[RecordAt, ...]

    @property
    def written(self) -> int:
        """Number of whole records."""
        return len(self.records)


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What became of one RecordRead.

    ok: the slot holds the payload, checked; corrupt: this record cannot be had any more (damaged, truncated, another
    record or no file there), forget it; error: reading failed, the record may be good. The slot's bytes mean nothing
    unless ok.
    """

    outcome: Literal["ok", "corrupt", "error"]
    reason: str = ""
    error: DiskError | None = None


@dataclass(frozen=True, slots=True)
class ReadDone:
    """results: one per read, in the order asked."""

    io: int
    results: tuple[ReadResult, ...]


@dataclass(frozen=True, slots=True)
class SegmentClosed:
    """An error here is of kind sync, or io when the file could not be opened."""

    io: int
    segment: int
    error: DiskError | None


@dataclass(frozen=True, slots=True)
class SegmentDeleted:
    """With an error the file is still there and still counts."""

    io: int
    segment: int
    error: DiskError | None


@dataclass(frozen=True, slots=True)
class CheckpointDone:
    """With an error the checkpoint before it is still in force."""

    io: int
    error: DiskError | None


DiskEvent = WriteDone | ReadDone | SegmentClosed | SegmentDeleted | CheckpointDone

# ---- what an opened folder holds


@dataclass(frozen=True, slots=True)
class SegmentFound:
    """A segment of an earlier run; nothing is appended to it.

    size: length of the file, bytes; allocated: bytes it takes of the disk; adopted, refused, corrupt: records in it.
    """

    segment: int
    size: int
    allocated: int
    adopted: int
    refused: int
    corrupt: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """What `open` found. records: by segment and offset, later ones are newer; a record's payload is checked when it is
    read. refused: records of another format or numeric form; corrupt: torn, damaged or misplaced ones; next_segment:
    lowest number never used; foreign_bytes: what else lies in the folder and counts against the cap; checkpoint: why it
    could not be used, empty when it was used or there is none.
    """

    segments: tuple[SegmentFound, ...]
    records: tuple[RecordAt, ...]
    next_segment: int
    refused: int
    corrupt: int
    foreign_bytes: int
    checkpoint: str
