"""A folder of segments: names, the lock, what opening it finds, and what can be done with it without a running store.

Owns which files are the store's and the scan for records. Files that are not the store's are counted, never touched.

Invariants:
 1. Two processes never use one folder at the same time: an exclusive lock is held from open to close.
 2. What a scan adopts has an intact header and trailer at its own place; payloads are checked by whoever reads them.
 3. Nothing in the folder, whatever its bytes, stops it from being opened; what is not a record is counted and left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tournant.kvstore.checkpoint import (
    CHECKPOINT_ASIDE,
    CHECKPOINT_NAME,
    Checkpoint,
    CheckpointRefused,
    read_checkpoint,
)
from tournant.kvstore.codecs import restore
from tournant.kvstore.config import MAX_SEGMENT_BYTES, PAGE_BYTES
from tournant.kvstore.disk_events import RecordAt, Recovery, SegmentFound
from tournant.kvstore.disk_io import PROBE_NAME, DiskIO, FolderRefused, RealDisk, opened, page_buffer, read_all
from tournant.kvstore.record import (
    FRAME_BYTES,
    MAX_SEGMENT,
    CorruptBlock,
    RecordRefused,
    Stored,
    check_trailer,
    parse_header,
    record_bytes,
    starts_like_a_record,
)

LOCK_NAME = "lock"
MAX_PROBLEMS = 100
_SEGMENT_NAME = re.compile(r"segment-([0-9a-f]{16})")
_WINDOW_PAGES = 64
_NO_BYTES = bytes(PAGE_BYTES)


def segment_name(segment: int) -> str:
    """Name of a segment's file."""
    return f"segment-{segment:016x}"


def segment_number(name: str) -> int | None:
    """Number of the segment with this name, None for other names."""
    found = _SEGMENT_NAME.fullmatch(name)
    number = MAX_SEGMENT + 1 if found is None else int(found[1], 16)
    return number if number <= MAX_SEGMENT else None


def is_ours(name: str) -> bool:
    """Whether the store makes files of this name."""
    return name in (LOCK_NAME, CHECKPOINT_NAME, CHECKPOINT_ASIDE, PROBE_NAME) or segment_number(name) is not None


class Folder:
    """An open, locked folder. Raises FolderRefused when it is used by another process or not safely ours; OSError.

    make: whether a missing folder is made.
    """

    def __init__(self, disk: DiskIO, path: Path, *, make: bool = True) -> None:
        if not make and not path.is_dir():
            raise FolderRefused(f"{path} is no folder")
        self.disk = disk
        self.path = path
        self.handle = disk.open_folder(path)
        self._lock: int | None = None
        try:
            self._lock = disk.open_file(self.handle, LOCK_NAME, create=True)
            if not disk.lock(self._lock):
                raise FolderRefused(f"{path} is used by another process; stop that store, or name another folder")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            self.disk.close(self._lock)
            self._lock = None
        self.disk.close(self.handle)

    def segments(self) -> list[int]:
        """Numbers of all segments, rising."""
        numbers = (segment_number(name) for name in self.disk.names(self.handle))
        return sorted(number for number in numbers if number is not None)

    def foreign_bytes(self) -> int:
        """What files take that are not the store's."""
        names = [name for name in self.disk.names(self.handle) if not is_ours(name)]
        return sum(self.disk.size(self.handle, name).allocated for name in names)

    def clear(self) -> int:
        """Remove every file of the store but the lock. Returns the bytes that took on disk."""
        freed = 0
        for name in self.disk.names(self.handle):
            if is_ours(name) and name != LOCK_NAME:
                freed += self.disk.size(self.handle, name).allocated
                self.disk.unlink(self.handle, name)
        self.disk.sync(self.handle)
        return freed


@contextmanager
def locked(path: Path, disk: DiskIO | None = None, *, make: bool = False) -> Iterator[Folder]:
    """A folder for the length of the block."""
    folder = Folder(RealDisk() if disk is None else disk, path, make=make)
    try:
        yield folder
    finally:
        folder.close()


# -------------------------------------------------------------------- scanning


@dataclass(frozen=True, slots=True)
class Scanned:
    """Something a scan met at a place. record, stored: of adopted ones; problem: why it is none."""

    outcome: Literal["adopted", "refused", "corrupt"]
    record: RecordAt | None = None
    stored: Stored | None = None
    problem: str = ""


class _Pages:
    """Pages of a file by offset, through one window."""

    def __init__(self, disk: DiskIO, file: int) -> None:
        self._disk, self._file = disk, file
        self._memory = page_buffer(_WINDOW_PAGES)
        self._start = self._stop = 0

    def page(self, offset: int, ahead: int = 1) -> memoryview | None:
        """The page at an offset, None at the end of the file. `ahead`: pages to read at once if it must be read."""
        if not self._start <= offset <= self._stop - PAGE_BYTES:
            got = read_all(self._disk, self._file, [self._memory[: ahead * PAGE_BYTES]], offset)
            self._start, self._stop = offset, offset + got
        at = offset - self._start
        return self._memory[at : at + PAGE_BYTES] if self._stop - offset >= PAGE_BYTES else None


def scan(disk: DiskIO, file: int, segment: int, start: int, size: int, kv_form: str | None = None) -> Iterator[Scanned]:
    """Records in a segment's file from page `start` on. kv_form: the only numeric form adopted, None = every one.

    Damage is reported once per stretch of pages that are neither record nor hole. Raises OSError.
    """
    pages = _Pages(disk, file)
    offset = start
    in_rubbish = crossing = False  # crossing: what is no record is crossed in large steps
    while offset + PAGE_BYTES <= size:
        page = pages.page(offset, _WINDOW_PAGES if crossing else 1)
        if page is None:
            break
        if not starts_like_a_record(page):
            is_hole = bytes(page) == _NO_BYTES
            if not is_hole and not in_rubbish:
                yield Scanned("corrupt", problem=f"segment {segment} offset {offset}: no record begins here")
            in_rubbish, crossing = not is_hole, True
            offset += PAGE_BYTES
            continue
        found, step = _record_at(pages, page, segment, offset, size, kv_form)
        yield found
        in_rubbish = crossing = step == PAGE_BYTES
        offset += step
    if size % PAGE_BYTES and offset < size and not in_rubbish:
        yield Scanned("corrupt", problem=f"segment {segment} ends inside a page, at byte {size}")


def _record_at(
    pages: _Pages, page: memoryview, segment: int, offset: int, size: int, kv_form: str | None
) -> tuple[Scanned, int]:
    """The record whose header is `page`, and how far the scan may go on from it: over a record whose header is intact,
    else one page.
    """
    try:
        header, stored = parse_header(page, segment, offset)
    except RecordRefused as error:
        return Scanned("refused", problem=f"segment {segment} offset {offset}: {error}"), PAGE_BYTES
    except CorruptBlock as error:
        return Scanned("corrupt", problem=str(error)), PAGE_BYTES
    length = record_bytes(stored.length)
    if kv_form is not None and header.kv_form != kv_form:
        problem = f"segment {segment} offset {offset}: numeric form {header.kv_form}, this store keeps {kv_form}"
        return Scanned("refused", problem=problem), length
    last = pages.page(offset + length - PAGE_BYTES) if offset + length <= size else None
    if last is None:
        return Scanned("corrupt", problem=f"segment {segment} offset {offset}: the file ends inside the record"), length
    try:
        check_trailer(last, header, stored, segment, offset)
    except (CorruptBlock, RecordRefused) as error:
        return Scanned("corrupt", problem=f"segment {segment} offset {offset}: {error}"), length
    return Scanned("adopted", RecordAt(segment, offset, length, header), stored), length


# -------------------------------------------------------------------- opening


def recover(folder: Folder, kv_form: str | None, *, direct: bool) -> Recovery:
    """What is in a folder: the checkpoint's records and those of a scan of what it does not cover.

    A segment that cannot be read is reported without records, so that it can be deleted. Raises OSError only when the
    folder itself cannot be listed.
    """
    problem = ""
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = read_checkpoint(folder.disk, folder.handle)
    except CheckpointRefused as error:
        problem = str(error)
    covers = {cover.segment: cover.covered for cover in checkpoint.segments} if checkpoint else {}
    known: dict[int, list[RecordAt]] = {}
    for record in checkpoint.records if checkpoint else ():
        if record.offset + record.size <= covers.get(record.segment, 0):
            known.setdefault(record.segment, []).append(record)
    segments, records = [], []
    for segment in folder.segments():
        found, adopted = _recover_segment(
            folder, segment, covers.get(segment, 0), known.get(segment, []), kv_form, direct
        )
        segments.append(found)
        records += adopted
    highest = max((found.segment for found in segments), default=0)
    return Recovery(
        segments=tuple(segments),
        records=tuple(records),
        next_segment=max(highest + 1, checkpoint.next_segment if checkpoint else 0),
        refused=sum(found.refused for found in segments),
        corrupt=sum(found.corrupt for found in segments),
        foreign_bytes=folder.foreign_bytes(),
        checkpoint=problem,
    )


def _recover_segment(
    folder: Folder, segment: int, covered: int, known: list[RecordAt], kv_form: str | None, direct: bool
) -> tuple[SegmentFound, list[RecordAt]]:
    name = segment_name(segment)
    counts = {"adopted": 0, "refused": 0, "corrupt": 0}
    adopted: list[RecordAt] = []
    length = allocated = 0
    try:
        size = folder.disk.size(folder.handle, name)
        length, allocated = size.length, size.allocated
        with opened(folder.disk, folder.handle, name, direct=direct) as file:
            for record in sorted(known, key=lambda record: record.offset):
                if record.offset + record.size > length:
                    counts["corrupt"] += 1
                elif kv_form is not None and record.header.kv_form != kv_form:
                    counts["refused"] += 1
                else:
                    adopted.append(record)
            start = covered // PAGE_BYTES * PAGE_BYTES
            for one in scan(folder.disk, file, segment, start, min(length, MAX_SEGMENT_BYTES), kv_form):
                counts[one.outcome] += one.outcome != "adopted"
                if one.record is not None:
                    adopted.append(one.record)
    except OSError:
        counts["corrupt"] += 1
    counts["adopted"] = len(adopted)
    return SegmentFound(segment, length, allocated, **counts), adopted


# -------------------------------------------------------------------- without a running store


@dataclass(frozen=True, slots=True)
class FolderReport:
    """What is in a folder, found by scanning all of it. payload_bytes, stored_bytes: of adopted records; problems: the
    first MAX_PROBLEMS of what is refused or corrupt; segments: as in Recovery.
    """

    segments: tuple[SegmentFound, ...]
    adopted: int
    refused: int
    corrupt: int
    payload_bytes: int
    stored_bytes: int
    foreign_bytes: int
    problems: tuple[str, ...]


def ls(path: Path, show: Callable[[RecordAt, Stored], None] | None = None, disk: DiskIO | None = None) -> FolderReport:
    """Headers and trailers of every record; `show` is called with each adopted one. Raises FolderRefused, OSError."""
    with locked(path, disk) as folder:
        return _survey(folder, show, payloads=False)


def verify(path: Path, disk: DiskIO | None = None) -> FolderReport:
    """Read every record in full; only those whose payload verifies count as adopted. Raises FolderRefused, OSError."""
    with locked(path, disk) as folder:
        return _survey(folder, None, payloads=True)


def clear(path: Path, disk: DiskIO | None = None) -> int:
    """Remove the store's files and leave all others. Returns bytes freed. Raises FolderRefused, OSError."""
    with locked(path, disk) as folder:
        return folder.clear()


def _survey(folder: Folder, show: Callable[[RecordAt, Stored], None] | None, *, payloads: bool) -> FolderReport:
    segments: list[SegmentFound] = []
    problems: list[str] = []
    payload_bytes = stored_bytes = 0
    for segment in folder.segments():
        counts = {"adopted": 0, "refused": 0, "corrupt": 0}
        length = allocated = 0
        try:
            size = folder.disk.size(folder.handle, segment_name(segment))
            length, allocated = size.length, size.allocated
            with opened(folder.disk, folder.handle, segment_name(segment)) as file:
                for one in scan(folder.disk, file, segment, 0, min(length, MAX_SEGMENT_BYTES)):
                    problem = _payload_problem(folder.disk, file, one) if payloads else ""
                    counts["corrupt" if problem else one.outcome] += 1
                    if one.problem or problem:
                        problems.append(one.problem or problem)
                    elif one.record is not None and one.stored is not None:
                        payload_bytes += one.record.header.length
                        stored_bytes += one.stored.length
                        if show is not None:
                            show(one.record, one.stored)
        except OSError as error:
            counts["corrupt"] += 1
            problems.append(f"segment {segment} cannot be read: {error}")
        segments.append(SegmentFound(segment, length, allocated, **counts))
        del problems[MAX_PROBLEMS:]
    return FolderReport(
        segments=tuple(segments),
        adopted=sum(found.adopted for found in segments),
        refused=sum(found.refused for found in segments),
        corrupt=sum(found.corrupt for found in segments),
        payload_bytes=payload_bytes,
        stored_bytes=stored_bytes,
        foreign_bytes=folder.foreign_bytes(),
        problems=tuple(problems),
    )


def _payload_problem(disk: DiskIO, file: int, one: Scanned) -> str:
    """What is wrong with the payload of an adopted record, "" when nothing is."""
    if one.record is None or one.stored is None:
        return ""
    record, stored = one.record, one.stored
    data = memoryview(bytearray(record.size - FRAME_BYTES))
    if read_all(disk, file, [data], record.offset + PAGE_BYTES) < len(data):
        return f"segment {record.segment} offset {record.offset}: the file ends inside the record"
    payload = data[: stored.length]
    target = payload if stored.length == record.header.length else memoryview(bytearray(record.header.length))
    try:
        restore(record.header, stored, payload, target)
    except CorruptBlock as error:
        return f"segment {record.segment} offset {record.offset}: {error}"
    return ""
