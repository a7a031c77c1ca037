"""The NVMe tier: carries out the core's disk instructions on a folder with a few threads, and reports.

Owns the queue, the threads and the state of the codecs. Decides nothing: where records go, what a failure means and how
long one waits is the core's (disk_events.py says what both sides promise).

Invariants:
 1. Every accepted instruction is answered by one event, from some thread of this tier, or from `close`.
 2. A call that hangs holds one thread: never the queue, another thread or `close`. At most one sync, deletion or
    checkpoint runs at a time, so that reads go on beside a slow sync.
 3. A payload is checked at every read, before the event says ok.
 4. No event comes after `close` has returned.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tournant.kvstore.checkpoint import write_checkpoint
from tournant.kvstore.codecs import CODECS, Codecs
from tournant.kvstore.config import MAX_RUN_RECORDS, MAX_SEGMENT_BYTES, PAGE_BYTES, check_range, shown
from tournant.kvstore.disk_events import (
    CheckpointDone,
    CloseSegment,
    DeleteSegment,
    DiskError,
    DiskErrorKind,
    DiskEvent,
    DiskInstruction,
    ReadDone,
    ReadRecords,
    ReadResult,
    RecordAt,
    RecordRead,
    Recovery,
    SegmentClosed,
    SegmentDeleted,
    WriteCheckpoint,
    WriteDone,
    WriteRecords,
)
from tournant.kvstore.disk_io import DiskIO, RealDisk, direct_works
from tournant.kvstore.errors import InvariantViolation, StoreConfigError
from tournant.kvstore.nvme_folder import Folder, recover, segment_name
from tournant.kvstore.policies.io_order import ORDERS, IoRequest
from tournant.kvstore.record import (
    FRAME_BYTES,
    MAX_KV_FORM_BYTES,
    check_header,
    record_bytes,
)
from tournant.kvstore.record_io import Scratch, read_run, write_run
from tournant.kvstore.segment_files import SegmentFiles
from tournant.kvstore.token_bucket import Pace

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FILE = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.EINVAL)  # of opening: nothing there, no regular file
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NvmeConfig:
    """What an operator chooses. kv_form: the only numeric form adopted at open, None = every one; workers: threads,
    which is the most calls to the disk at once; queue_limit: requests that may wait; order: a name of ORDERS; codec:
    "lz4" tries it where it pays; bytes_per_s: emulated disk, reads and writes each, 0 = off; persist: keep what an
    earlier run left; direct: try direct I/O; trace_requests: how many of the last requests `trace` returns.
    """

    kv_form: str | None = None
    workers: int = 4
    queue_limit: int = 1024
    order: str = "scan"
    codec: str = "none"
    bytes_per_s: int = 0
    persist: bool = True
    direct: bool = True
    trace_requests: int = 4096

    def __post_init__(self) -> None:
        for name, least, most in (
            ("workers", 1, 64),
            ("queue_limit", 1, 1 << 20),
            ("trace_requests", 0, 1 << 20),
            ("bytes_per_s", 0, 1 << 44),
        ):
            check_range(name, getattr(self, name), least, most)
        for name, known in (("order", tuple(ORDERS)), ("codec", CODECS)):
            if getattr(self, name) not in known:
                raise StoreConfigError(f"{name} is {shown(getattr(self, name))}; it must be one of {', '.join(known)}")
        form = self.kv_form
        if form is not None and not (form and form.isprintable() and len(form.encode()) <= MAX_KV_FORM_BYTES):
            raise StoreConfigError(
                f"kv_form is {shown(form)}; it must be a name of 1 to {MAX_KV_FORM_BYTES} bytes, such as bf16, "
                "or be left out"
            )


@dataclass(frozen=True, slots=True)
class NvmeStats:
    """Counters since the start and gauges. codec: per numeric form, why its codec is off, "" while it is on."""

    queued: int
    running: int
    seek_distance: int
    calls: int
    requests: int
    read_bytes: int
    written_bytes: int
    direct: bool
    codec: dict[str, str]


@dataclass(slots=True)
class _Batch:
    """A ReadRecords being carried out."""

    io: int
    results: list[ReadResult | None]
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.results)


@dataclass(frozen=True, slots=True)
class _Read:
    """One read of a batch. A merged run of them goes to the disk in one call."""

    batch: _Batch
    index: int
    read: RecordRead


_Piece = WriteRecords | _Read
_Control = CloseSegment | DeleteSegment | WriteCheckpoint


class NvmeTier:
    """See the module. pool: the host pool, writable, beginning at a page; on_event: called from this tier's threads,
    one call at a time, must be quick and not raise; disk: system calls, for tests.

    Raises ValueError when the pool does not begin at a page.
    """

    def __init__(
        self,
        folder: Path,
        config: NvmeConfig,
        pool: memoryview,
        on_event: Callable[[DiskEvent], None],
        disk: DiskIO | None = None,
    ) -> None:
        if pool.readonly or np.frombuffer(pool, dtype=np.uint8).ctypes.data % PAGE_BYTES:
            raise ValueError("the pool must be writable and begin at a page of memory")
        self._path, self.config = folder, config
        self._pool = pool.cast("B")
        self._on_event = on_event
        self._disk: DiskIO = RealDisk() if disk is None else disk
        self._codecs = Codecs(config.codec)
        self._read_pace, self._write_pace = Pace(config.bytes_per_s), Pace(config.bytes_per_s)
        self._emitting = threading.RLock()  # held while `on_event` runs
        self._changed = threading.Condition()  # guards all that follows
        self._order = ORDERS[config.order]()
        self._pieces: dict[int, _Piece] = {}
        self._control: deque[_Control] = deque()
        self._trace: deque[IoRequest] = deque(maxlen=config.trace_requests)
        self._controls_running = self._running = self._calls = self._taken = self._next_id = 0
        self._read_bytes = self._written_bytes = 0
        self._closing = self._muted = False
        self._threads: list[threading.Thread] = []
        self._folder: Folder | None = None
        self._files: SegmentFiles | None = None
        self.direct = False

    # ---------------------------------------------------------------- what the core's shell calls

    def open(self) -> Recovery:
        """Lock the folder (made if there is none), find what is in it, start the threads.

        Raises FolderRefused or OSError; nothing is held then. With `persist` off the folder is emptied first.
        """
        folder = Folder(self._disk, self._path)
        try:
            if not self.config.persist:
                folder.clear()
            self.direct = self.config.direct and direct_works(self._disk, folder.handle)
            found = recover(folder, self.config.kv_form, direct=self.direct)
        except BaseException:
            folder.close()
            raise
        self._folder = folder
        self._files = SegmentFiles(self._disk, folder.handle, direct=self.direct)
        for number in range(self.config.workers):
            thread = threading.Thread(target=self._serve, name=f"nvme-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return found

    def submit(self, instruction: DiskInstruction) -> bool:
        """Queue an instruction. False when the queue is full or the tier closed: nothing was taken and no event comes.

        Syncs, deletions and checkpoints are always taken by an open tier. Raises ValueError for what cannot be done.
        """
        if not isinstance(instruction, WriteRecords | ReadRecords):
            with self._changed:
                if not self._closing:
                    self._control.append(instruction)
                    self._changed.notify()
                return not self._closing
        pieces = list(self._checked(instruction))
        with self._changed:
            waiting = len(self._order)
            if self._closing or (waiting and waiting + len(pieces) > self.config.queue_limit):
                return False
            for position, length, piece in pieces:
                request = IoRequest(self._next_id, position, length, self._taken)
                self._next_id += 1
                self._pieces[request.id] = piece
                self._trace.append(request)
                self._order.push(request)
            self._changed.notify(len(pieces))
        return True

    def close(self, timeout_s: float = 10.0) -> bool:
        """End the threads. What has not begun is answered with an error; what has begun is waited for.

        True when all threads ended and the folder is free. False when a call still hangs after `timeout_s`: the lock
        and the pool stay in use until this process ends.
        """
        with self._changed:
            self._closing = True
            pieces, controls = list(self._pieces.values()), list(self._control)
            self._pieces.clear()
            self._control.clear()
            while self._order.take():
                continue
            self._changed.notify_all()
        error = DiskError("io", "the tier was closed")
        for piece in pieces:
            self._answer(piece, error)
        for control in controls:
            self._emit(_failed(control, error))
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._emitting:
            self._muted = True
        if any(thread.is_alive() for thread in self._threads):
            return False
        if self._files is not None and self._folder is not None:
            self._files.close()
            self._folder.close()
            self._files = self._folder = None
        return True

    def trace(self) -> tuple[IoRequest, ...]:
        """The last requests as they arrived, for io_trace.py."""
        with self._changed:
            return tuple(self._trace)

    def free_bytes(self) -> int:
        """Room left on the file system. Raises OSError."""
        return self._disk.free_bytes(self._open_folder().handle)

    def stats(self) -> NvmeStats:
        """Counters and gauges."""
        with self._changed:
            return NvmeStats(
                queued=len(self._order) + len(self._control),
                running=self._running,
                seek_distance=self._order.seek_distance,
                calls=self._calls,
                requests=self._taken,
                read_bytes=self._read_bytes,
                written_bytes=self._written_bytes,
                direct=self.direct,
                codec=self._codecs.why_off(),
            )

    def _open_folder(self) -> Folder:
        if self._folder is None:
            raise InvariantViolation("the tier is not open")
        return self._folder

    def _open_files(self) -> SegmentFiles:
        if self._files is None:
            raise InvariantViolation("the tier is not open")
        return self._files

    def _checked(self, instruction: WriteRecords | ReadRecords) -> Iterator[tuple[int, int, _Piece]]:
        """Position, length and piece of every request of an instruction."""
        if isinstance(instruction, WriteRecords):
            if not 0 < len(instruction.records) <= MAX_RUN_RECORDS:
                raise ValueError(f"a run has {len(instruction.records)} records; it must have 1 to {MAX_RUN_RECORDS}")
            size = 0
            for item in instruction.records:
                check_header(item.header)
                self._check_slot(item.slot, item.header.length)
                size += record_bytes(item.header.length)
            yield _position(instruction.segment, instruction.offset, size), size, instruction
            return
        if not instruction.reads:
            raise ValueError("a ReadRecords has no reads")
        batch = _Batch(instruction.io, [None] * len(instruction.reads))
        for index, read in enumerate(instruction.reads):
            self._check_slot(read.slot, read.header.length)
            if read.size % PAGE_BYTES or not FRAME_BYTES < read.size <= record_bytes(read.header.length):
                raise ValueError(f"a record of {read.header.length} bytes cannot take {read.size} bytes")
            yield _position(read.segment, read.offset, read.size), read.size, _Read(batch, index, read)

    def _check_slot(self, slot: int, length: int) -> None:
        if slot < 0 or slot * PAGE_BYTES + length > len(self._pool):
            raise ValueError(f"{length} bytes from page {slot} on are not in a pool of {len(self._pool)} bytes")

    # ---------------------------------------------------------------- threads

    def _serve(self) -> None:
        """Body of a thread."""
        scratch = Scratch()
        while (work := self._take()) is not None:
            try:
                if isinstance(work, list):
                    for reads in _by_call(work):
                        self._carry_out(reads, scratch)
                else:
                    self._emit(self._control_event(work))
            finally:
                with self._changed:
                    self._running -= 1
                    self._controls_running -= not isinstance(work, list)
                    if self._control:  # an idle thread may have passed it by
                        self._changed.notify()

    def _take(self) -> list[_Piece] | _Control | None:
        """The next work: a run of pieces in the order of the policy, or a control instruction. None = end."""
        with self._changed:
            while True:
                if self._control and not self._controls_running:
                    self._controls_running += 1
                    self._running += 1
                    return self._control.popleft()
                if run := self._order.take():
                    self._taken += len(run)
                    self._running += 1
                    return [self._pieces.pop(request.id) for request in run]
                if self._closing:
                    return None
                self._changed.wait()

    def _carry_out(self, pieces: list[_Piece], scratch: Scratch) -> None:
        """One write, or reads that follow each other in one segment. Every failure becomes an answer."""
        try:
            if isinstance(pieces[0], WriteRecords):
                self._write(pieces[0], scratch)
            else:
                self._read([piece for piece in pieces if isinstance(piece, _Read)], scratch)
        except Exception as error:
            _LOG.exception("the NVMe tier failed on %s", pieces)
            for piece in pieces:
                self._answer(piece, DiskError("io", f"{type(error).__name__}: {error}"))

    def _write(self, run: WriteRecords, scratch: Scratch) -> None:
        placed: tuple[RecordAt, ...] = ()
        problem: OSError | None = None
        try:
            with self._open_files().use(run.segment, create=True) as file:
                placed, problem = write_run(self._disk, file, run, self._pool, scratch, self._codecs)
        except OSError as error:
            problem = error
        size = sum(record.size for record in placed)
        self._write_pace.spend(size)
        with self._changed:
            self._calls += 1
            self._written_bytes += size
        self._emit(WriteDone(run.io, None if problem is None else _disk_error(problem), placed))

    def _read(self, reads: list[_Read], scratch: Scratch) -> None:
        found = False
        try:
            with self._open_files().use(reads[0].read.segment) as file:
                found = True
                problems = read_run(self._disk, file, [one.read for one in reads], self._pool, scratch, self._codecs)
        except OSError as error:
            if found and len(reads) > 1:  # find out which of them it was
                for one in reads:
                    self._read([one], scratch)
                return
            gone = not found and error.errno in _NO_FILE
            for one in reads:
                self._settle(
                    one,
                    ReadResult("corrupt", str(error)) if gone else ReadResult("error", str(error), _disk_error(error)),
                )
            return
        size = sum(one.read.size for one in reads)
        self._read_pace.spend(size)
        with self._changed:
            self._calls += 1
            self._read_bytes += size
        for one, problem in zip(reads, problems, strict=True):
            self._settle(one, ReadResult("corrupt", problem) if problem else ReadResult("ok"))

    def _settle(self, one: _Read, result: ReadResult) -> None:
        """Note a result, once; the last one of a batch answers it."""
        with self._changed:
            if one.batch.results[one.index] is not None:
                return
            one.batch.results[one.index] = result
            one.batch.left -= 1
            if one.batch.left:
                return
        self._emit(ReadDone(one.batch.io, tuple(result for result in one.batch.results if result is not None)))

    def _answer(self, piece: _Piece, error: DiskError) -> None:
        if isinstance(piece, WriteRecords):
            self._emit(WriteDone(piece.io, error, ()))
        else:
            self._settle(piece, ReadResult("error", error.message, error))

    def _control_event(self, work: _Control) -> DiskEvent:
        folder = self._open_folder().handle
        kind: DiskErrorKind = "io"
        try:
            if isinstance(work, CloseSegment):
                with self._open_files().use(work.segment) as file:
                    kind = "sync"
                    self._disk.sync(file)
                    self._disk.sync(folder)
                return SegmentClosed(work.io, work.segment, None)
            if isinstance(work, DeleteSegment):
                self._open_files().drop(work.segment)
                with suppress(FileNotFoundError):
                    self._disk.unlink(folder, segment_name(work.segment))
                return SegmentDeleted(work.io, work.segment, None)
            write_checkpoint(self._disk, folder, work)
            return CheckpointDone(work.io, None)
        except OSError as error:
            return _failed(work, _disk_error(error, kind))
        except Exception as error:
            _LOG.exception("the NVMe tier failed on %s", type(work).__name__)
            return _failed(work, DiskError("io", f"{type(error).__name__}: {error}"))

    def _emit(self, event: DiskEvent) -> None:
        with self._emitting:
            if self._muted:
                return
            try:
                self._on_event(event)
            except Exception:
                _LOG.exception("the receiver of %s failed", type(event).__name__)


def _position(segment: int, offset: int, size: int) -> int:
    """Place on one line through all segments. Raises ValueError for a place that no record can have."""
    if segment < 0 or offset < 0 or offset % PAGE_BYTES or offset + size > MAX_SEGMENT_BYTES:
        raise ValueError(f"{size} bytes at offset {offset} of segment {segment}; offsets are whole pages from 0 on")
    return segment * MAX_SEGMENT_BYTES + offset


def _by_call(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """A merged run cut into what one call can do: a write alone, reads together."""
    reads: list[_Piece] = []
    for piece in pieces:
        if isinstance(piece, _Read):
            reads.append(piece)
            continue
        if reads:
            yield reads
            reads = []
        yield [piece]
    if reads:
        yield reads


def _disk_error(error: OSError, kind: DiskErrorKind = "io") -> DiskError:
    return DiskError("full" if error.errno in _FULL else kind, str(error), error.errno or 0)


def _failed(work: _Control, error: DiskError) -> DiskEvent:
    if isinstance(work, CloseSegment):
        return SegmentClosed(work.io, work.segment, error)
    if isinstance(work, DeleteSegment):
        return SegmentDeleted(work.io, work.segment, error)
    return CheckpointDone(work.io, error)
