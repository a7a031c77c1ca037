"""A rank's or reader's way to a node store, over a socket (`connect`) or inside one process (local_store.py).

Owns this process's mapping of the pool, its free lent slots, the numbers of its reports and reads, and the deadline of
each call. Copies bytes; decides nothing: which versions are read is read_group.py's choice.

Rules:
 1. One thread owns a client. A forked child must not use it: every call there raises InvariantViolation, and the pool
    is not mapped there.
 2. Every call ends by its deadline. StoreUnavailable means that this client is over: blocks may be lost, none is wrong;
    end in-place reads, `close` it and attach again. Handles and lent slots of before mean nothing to the new store.
 3. Bytes count as read only when their checksum is the handle's and the slot's generation did not change meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from tournant.kvstore.block import Part, Version
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.errors import InvariantViolation, StoreRefused, StoreUnavailable
from tournant.kvstore.events import (
    Attach,
    Attached,
    Bad,
    CloseRead,
    Fetch,
    Fetched,
    Forget,
    HardPin,
    HardPinned,
    HardUnpin,
    Open,
    Opened,
    Refused,
    Report,
    Reported,
    ReportEntry,
    Used,
)
from tournant.kvstore.groups import Handle
from tournant.kvstore.host_tier import HostMemory, PageLock
from tournant.kvstore.read_group import Answer
from tournant.kvstore.record import checksum
from tournant.kvstore.report_book import Lent, ReportBook
from tournant.kvstore.socket_transport import SocketTransport
from tournant.kvstore.wire import Answer as StoreMessage
from tournant.kvstore.wire import Query, Request

TIMEOUT_S = 5.0
NO_CLIENT = 0  # in messages of a client: the store puts the number in
Copier = Callable[[memoryview, memoryview], None]
_M = TypeVar("_M")


class Transport(Protocol):
    """What carries messages. deadline: `time.monotonic()` at which to give up with StoreUnavailable."""

    def send(self, message: Request, deadline: float) -> None:
        """Hand a message over; with a deadline of 0, what has no room now is sent by `flush` or the next `send`.

        Raises StoreUnavailable; WireError when a field is out of its range.
        """
        ...

    def flush(self) -> None:
        """Send what there is room for now. Raises StoreUnavailable."""
        ...

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something left to do."""
        ...

    def fileno(self) -> int:
        """Readable when `receive` may have something, writable when `flush` may get on."""
        ...

    def receive(self, deadline: float) -> StoreMessage | None:
        """The next message, or None when none has come by the deadline. Raises StoreUnavailable when the store is
        gone.
        """
        ...

    def memory(self) -> HostMemory:
        """The pool, known once `Attached` has come."""
        ...

    def close(self) -> None:
        """No more messages; the memory is unmapped. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Who attaches; fields as in `events.Attach`. A reader has no part, no local_parts and no credit."""

    weights_id: bytes
    kv_form: str
    writer_id: int = 0
    part: Part | None = None
    local_parts: tuple[Part, ...] = ()
    slot_bytes: int = 0
    credit: int = 0
    tenant_check: bytes = b""
    adopts: bool = False


class StoreClient:
    """See the module. Attaches when made: raises StoreRefused (nothing was changed), StoreUnavailable.

    incarnation: of the store; reports carry the step's blocks; `credit` says how many slots are free to be written.
    waits: whether calls that need no reply wait for room in the connection; if not, `take` sends what had no room.
    """

    def __init__(
        self, transport: Transport, identity: Identity, timeout_s: float = TIMEOUT_S, *, waits: bool = True
    ) -> None:
        self.identity = identity
        self.timeout_s = timeout_s
        self._transport = transport
        self._pid = os.getpid()
        self._over = ""  # why this client is over
        self._waits = waits
        self._book = ReportBook()
        self._read = self._request = 0
        self._kept: list[Opened | Fetched] = []  # replies that came while another one was waited for
        self.num_bad = 0
        self.num_moved = 0  # copies given up because the slot got another generation
        try:
            deadline = time.monotonic() + timeout_s
            who = identity
            part, slot_bytes = who.part, who.slot_bytes
            transport.send(
                Attach(
                    NO_CLIENT, who.weights_id, who.kv_form, who.tenant_check, who.writer_id, part, who.local_parts,
                    slot_bytes, who.credit, who.adopts,
                ),
                deadline,
            )  # fmt: skip
            attached = self._wait(Attached, lambda message: True, deadline, attaching=True)
            self.memory = transport.memory()
        except BaseException:
            transport.close()
            raise
        self.incarnation = attached.incarnation
        self._book.lend(attached.lent)

    # ---- writing

    @property
    def credit(self) -> int:
        """Lent slots that can be written now."""
        return len(self._book.free)

    @property
    def num_lent(self) -> int:
        """Lent slots that no report has handed over: those of `credit` and those that were taken."""
        return self._book.held

    def take_slot(self) -> Lent | None:
        """A lent slot to write and then report, release or put back; None when the credit is used up."""
        return self._book.take()

    def put_back(self, lent: Lent) -> None:
        """A slot that was taken is free to be written again. Nothing may still write to it."""
        self._book.put_back(lent)

    def slot_view(self, page: int, length: int | None = None) -> memoryview:
        """Memory of a slot, `identity.slot_bytes` long if not told otherwise. Ends with this client: do not keep it.

        Raises ValueError for more than a slot has, and outside the pool.
        """
        most = self.identity.slot_bytes
        if length is not None and length > most:
            raise ValueError(f"{length} bytes of a slot are asked for; slot_bytes is {most}")
        return self.memory.slot(page, most if length is None else length)

    def write(self, key: bytes, version: Version, payload: memoryview | bytes, depth: int = 0) -> ReportEntry | None:
        """Copy a payload into a lent slot; the entry to report once the step is over. None without credit.

        Raises ValueError when the payload does not fill a slot up to less than a page; nothing is copied or taken then.
        """
        data = memoryview(payload).cast("B")
        length, most = len(data), self.identity.slot_bytes
        least = max(0, most - 1) // PAGE_BYTES * PAGE_BYTES + 1
        if not least <= length <= most:
            raise ValueError(f"the payload has {length} bytes; for slot_bytes of {most} it must have {least} to {most}")
        lent = self.take_slot()
        if lent is None:
            return None
        self.slot_view(lent.page, length)[:] = data
        return ReportEntry(key, version, lent.page, lent.generation, length, checksum(data), depth=depth)

    def post(self, entries: Sequence[ReportEntry], released: Sequence[Lent] = ()) -> int:
        """Send a step's report without waiting; returns its number. The reply adds to `credit` when it is collected,
        slots of refused entries included.

        Raises StoreUnavailable (see the rules: each entry may or may not have become visible), WireError when an entry
        has no form on the wire and TypeError when one is None (nothing was sent in both cases).
        """
        self._check()
        for number, entry in enumerate(entries):
            if not isinstance(entry, ReportEntry):
                raise TypeError(
                    f"entry {number} is {entry!r}; leave out what `write` returned None for, without credit"
                )
        report = Report(
            NO_CLIENT, self._book.seq + 1, tuple(entries), tuple((lent.page, lent.generation) for lent in released)
        )
        self._send_on(report)
        self._book.sent(report)
        return report.seq

    def collect(self) -> list[Reported]:
        """Replies to `post` that have arrived, in order; does not wait. Raises StoreUnavailable."""
        self._check()
        while self._book.answered < self._book.seq and (message := self._next(0.0)) is not None:
            self._keep(message)
        return self._book.replies()

    def publish(
        self, entries: Sequence[ReportEntry], released: Sequence[Lent] = (), timeout_s: float | None = None
    ) -> Reported:
        """Report and wait for the reply: `refused` lists the indexes of entries that changed nothing, whose slots can
        be written again; all others are visible as soon as all parts are. Raises like `post`.
        """
        seq = self.post(entries, released)
        deadline = self._deadline(timeout_s)
        while self._book.answered < seq:
            if (message := self._next(deadline)) is None:
                raise self._lost(f"no reply to report {seq} within {self._limit(timeout_s):g} s")
            self._keep(message)
        reply = self._book.last_reply()
        if reply.seq != seq:
            raise InvariantViolation(f"report {reply.seq} is answered after {seq}")
        return reply

    # ---- reading

    def open(self, keys: Sequence[bytes], timeout_s: float | None = None) -> tuple[int, Answer]:
        """What the store has of a chain, pinned softly until `close_read` or the store's time limit: (read, answer).

        Raises StoreUnavailable: what was pinned ends by itself.
        """
        deadline = self._deadline(timeout_s)
        read = self.start_open(keys)
        found = self._wait(Opened, lambda message: message.read == read, deadline)
        return read, Answer(found.counts, found.rows, found.parts)

    def fetch(self, read: int, picks: Sequence[Version], timeout_s: float | None = None) -> Answer:
        """Have the chosen versions of the first keys of a read brought into host slots; those that are there, a prefix.

        An evicted, lost or slow block ends the prefix. Raises StoreUnavailable as `open`.
        """
        deadline = self._deadline(timeout_s)
        self.start_fetch(read, picks)
        found = self._wait(Fetched, lambda message: message.read == read, deadline)
        return Answer(found.counts, found.rows, found.parts)

    # ---- many reads at once

    def fileno(self) -> int:
        """Readable when `take` may have something. Not to be read or written."""
        return self._transport.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room in the connection: poll `fileno` for that too, then `take`."""
        return self._transport.has_unsent

    def start_open(self, keys: Sequence[bytes]) -> int:
        """`open` without waiting for `Opened`, which `take` brings: the number of the read."""
        self._check()
        self._read += 1
        self._send_on(Open(NO_CLIENT, self._read, tuple(keys)))
        return self._read

    def start_fetch(self, read: int, picks: Sequence[Version]) -> None:
        """`fetch` without waiting for `Fetched`, which `take` brings."""
        self._check()
        self._send_on(Fetch(NO_CLIENT, read, tuple(picks)))

    def take(self) -> list[Opened | Fetched | Reported]:
        """What has arrived of replies to `start_open`, `start_fetch` and `post`. Never waits. The credit that reports
        brought is counted. Raises StoreUnavailable. Deadlines are the caller's business.
        """
        self._check()
        try:
            self._transport.flush()
        except StoreUnavailable as error:
            raise self._lost(str(error)) from None
        while (message := self._next(0.0)) is not None:
            self._keep(message)
        found: list[Opened | Fetched | Reported] = [*self._kept, *self._book.replies()]
        self._kept.clear()
        return found

    # ---- what was read

    def current(self, handle: Handle) -> bool:
        """Whether the slot of a handle still is what it was when the handle was made. Check after every copy."""
        return handle.generation > 0 and self.memory.generations[handle.page] == handle.generation

    def intact(self, key: bytes, handle: Handle) -> bool:
        """Whether the slot holds the bytes of the handle now. Bytes that are wrong are told to the store."""
        self._check()
        good = checksum(self.memory.slot(handle.page, handle.length)) == handle.checksum
        if not self.current(handle):
            self.num_moved += 1
            return False
        if not good:
            self.bad(key, handle)
        return good

    def copy_out(
        self,
        keys: Sequence[bytes],
        handles: Sequence[Handle],
        targets: Sequence[memoryview],
        copy: Copier | None = None,
    ) -> int:
        """Copy parts, one per key, into buffers of at least their length; how many of the first are good.

        What lies in the targets behind that number means nothing. copy: (target, slot) for memory that is not copied by
        assignment; it must be complete, its completion event included, when it returns. Raises StoreUnavailable only
        when a bad block cannot be told.
        """
        self._check()
        pool, generations = self.memory.pool, self.memory.generations
        for number, (key, handle, target) in enumerate(zip(keys, handles, targets, strict=True)):
            page, generation, length = handle.page, handle.generation, handle.length
            good = False
            if generation and generations[page] == generation:
                source = pool[page * PAGE_BYTES : page * PAGE_BYTES + length]
                if copy is None:
                    target[:length] = source
                else:
                    copy(target[:length], source)
                good = checksum(source) == handle.checksum  # after the copy: what changed meanwhile shows here or below
            if not generation or generations[page] != generation:
                self.num_moved += 1
                return number
            if not good:
                self.bad(key, handle)
                return number
        return len(keys)

    def used(self, keys: Sequence[bytes]) -> None:
        """A request with this chain has ended: its blocks count as used now, the tail to leave first. Does not wait."""
        self._check()
        self._send_on(Used(NO_CLIENT, tuple(keys)))

    def close_read(self, read: int) -> None:
        """All copies of a read have ended; its pins end. Does not wait. Raises StoreUnavailable: they end by
        themselves.
        """
        self._check()
        self._send_on(CloseRead(NO_CLIENT, read))

    def bad(self, key: bytes, handle: Handle) -> None:
        """Tell the store that the bytes under a handle are wrong; it checks again and drops them. Does not wait."""
        self._check()
        self.num_bad += 1
        place = (handle.page, handle.generation)
        self._send_on(Bad(NO_CLIENT, key, handle.version, *place))

    def forget(self, key: bytes, version: Version) -> None:
        """Tell the store that a version is incomplete across nodes. Does not wait."""
        self._check()
        self._send_on(Forget(NO_CLIENT, key, version))

    def hard_pin(
        self, refs: Sequence[tuple[bytes, Version]], timeout_s: float | None = None
    ) -> tuple[int, Answer] | None:
        """Keep blocks where they are, to be read in place until `hard_unpin` or the exit of this process: (request,
        answer), or None when one of them is not in host slots or too much is pinned (nothing is pinned then).

        Raises StoreUnavailable: they may be pinned until this process ends.
        """
        self._check()
        self._request += 1
        request, deadline = self._request, self._deadline(timeout_s)
        self._send(HardPin(NO_CLIENT, request, tuple(refs)), deadline)
        found = self._wait(HardPinned, lambda message: message.request == request, deadline)
        return (request, Answer(found.counts, found.rows, found.parts)) if found.pinned else None

    def hard_unpin(self, request: int) -> None:
        """The kernels that read in place have ended. Does not wait."""
        self._check()
        self._send_on(HardUnpin(NO_CLIENT, request))

    # ---- the end

    def close(self) -> None:
        """End the service and unmap the pool; nothing of this process may read or write slots any more. Idempotent.

        Lent slots come back when the store hears of it, at the latest when this process ends.
        """
        if not self._over:
            self._over = "it was closed"
        self._transport.close()

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- messages

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise InvariantViolation("a forked child uses the store client of its parent; it must attach its own")
        if self._over:
            raise StoreUnavailable(f"this store client is over: {self._over}; attach again")

    def _limit(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else timeout_s

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + self._limit(timeout_s)

    def _send(self, message: Request, deadline: float) -> None:
        try:
            self._transport.send(message, deadline)
        except StoreUnavailable as error:
            raise self._lost(str(error)) from None

    def _send_on(self, message: Request) -> None:
        """Send what needs no reply now."""
        self._send(message, self._deadline(None) if self._waits else 0.0)

    def _wait(self, kind: type[_M], wanted: Callable[[_M], bool], deadline: float, *, attaching: bool = False) -> _M:
        while (message := self._next(deadline, attaching=attaching)) is not None:
            if isinstance(message, kind) and wanted(message):
                return message
            self._keep(message)
        raise self._lost(f"no {kind.__name__} by the deadline")

    def _next(self, deadline: float, *, attaching: bool = False) -> StoreMessage | None:
        """The next message, whatever it answers; reports' replies are kept."""
        try:
            message = self._transport.receive(deadline)
        except StoreUnavailable as error:
            raise self._lost(str(error)) from None
        if isinstance(message, Refused):
            self._lost(message.message)
            if attaching:
                raise StoreRefused(message.message)
            raise StoreUnavailable(f"the store ended this connection: {message.message}")
        if isinstance(message, Reported):
            self._book.replied(message)
        return message

    def _keep(self, message: StoreMessage) -> None:
        """Something that is not waited for now: `take` may want it."""
        if isinstance(message, Opened | Fetched):
            self._kept.append(message)

    def _lost(self, why: str) -> StoreUnavailable:
        self._over = why
        return StoreUnavailable(f"the store is lost to this client: {why}; attach again")


def connect(
    path: Path,
    identity: Identity,
    timeout_s: float = TIMEOUT_S,
    page_lock: PageLock | None = None,
    *,
    waits: bool = True,
) -> StoreClient:
    """Attach to the store that listens at a socket; `timeout_s` is the deadline of this and, by default, of every call;
    waits: see `StoreClient`.

    Raises StoreUnavailable when none listens there, StoreRefused when it says no; nothing is held then.
    """
    transport = SocketTransport(path, time.monotonic() + timeout_s, page_lock)
    return StoreClient(transport, identity, timeout_s, waits=waits)


def ask(path: Path, query: Query, timeout_s: float = TIMEOUT_S) -> StoreMessage:
    """Ask a running store an operator's question (admin.py). Raises StoreUnavailable, StoreRefused."""
    deadline = time.monotonic() + timeout_s
    transport = SocketTransport(path, deadline)
    try:
        transport.send(query, deadline)
        answer = transport.receive(deadline)
    finally:
        transport.close()
    if answer is None:
        raise StoreUnavailable(f"the store at {path} did not answer within {timeout_s:g} s")
    if isinstance(answer, Refused):
        raise StoreRefused(answer.message)
    return answer
