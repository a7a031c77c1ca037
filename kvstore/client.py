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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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
        """Hand a message over. Raises StoreUnavailable; WireError when a field is out of its range."""
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


@dataclass(frozen=True, slots=True)
class Lent:
    """A slot that this client may write until it reports or releases it."""

    page: int
    generation: int


class StoreClient:
    """See the module. Attaches when made: raises StoreRefused (nothing was changed), StoreUnavailable.

    incarnation: of the store; reports carry the step's blocks; `credit` says how many slots are free to be written.
    """

    def __init__(self, transport: Transport, identity: Identity, timeout_s: float = TIMEOUT_S) -> None:
        self.identity = identity
        self.timeout_s = timeout_s
        self._transport = transport
        self._pid = os.getpid()
        self._over = ""  # why this client is over
        self._free: deque[Lent] = deque()
        self._seq = self._answered = self._read = self._request = 0
        self._taken: set[tuple[int, int]] = set()  # (page, generation) of slots that are taken and not reported yet
        self._unanswered: deque[tuple[Report, set[tuple[int, int]]]] = deque()  # with their slots
        self._reported: deque[Reported] = deque()
        self.num_bad = 0
        self.num_moved = 0  # copies given up because the slot got another generation
        try:
            deadline = time.monotonic() + timeout_s
            who = identity
            part, slot_bytes = who.part, who.slot_bytes
            transport.send(
                Attach(
                    NO_CLIENT, who.weights_id, who.kv_form, who.tenant_check, who.writer_id, part, who.local_parts,
                    slot_bytes, who.credit,
                ),
                deadline,
            )  # fmt: skip
            attached = self._wait(Attached, lambda message: True, deadline, attaching=True)
            self.memory = transport.memory()
        except BaseException:
            transport.close()
            raise
        self.incarnation = attached.incarnation
        self._free.extend(Lent(*pair) for pair in attached.lent)

    # ---- writing

    @property
    def credit(self) -> int:
        """Lent slots that can be written now."""
        return len(self._free)

    def take_slot(self) -> Lent | None:
        """A lent slot to write and then report or release; None when the credit is used up."""
        if not self._free:
            return None
        lent = self._free.popleft()
        self._taken.add((lent.page, lent.generation))
        return lent

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
            NO_CLIENT, self._seq + 1, tuple(entries), tuple((lent.page, lent.generation) for lent in released)
        )
        self._send(report, self._deadline(None))
        self._seq += 1
        self._unanswered.append((report, self._hand_over(report)))
        return self._seq

    def collect(self) -> list[Reported]:
        """Replies to `post` that have arrived, in order; does not wait. Raises StoreUnavailable."""
        self._check()
        while self._answered < self._seq and self._next(0.0) is not None:
            continue
        found = list(self._reported)
        self._reported.clear()
        return found

    def publish(
        self, entries: Sequence[ReportEntry], released: Sequence[Lent] = (), timeout_s: float | None = None
    ) -> Reported:
        """Report and wait for the reply: `refused` lists the indexes of entries that changed nothing, whose slots can
        be written again; all others are visible as soon as all parts are. Raises like `post`.
        """
        seq = self.post(entries, released)
        deadline = self._deadline(timeout_s)
        while self._answered < seq:
            if self._next(deadline) is None:
                raise self._lost(f"no reply to report {seq} within {self._limit(timeout_s):g} s")
        reply = self._reported.pop()
        if reply.seq != seq:
            raise InvariantViolation(f"report {reply.seq} is answered after {seq}")
        return reply

    # ---- reading

    def open(self, keys: Sequence[bytes], timeout_s: float | None = None) -> tuple[int, Answer]:
        """What the store has of a chain, pinned softly until `close_read` or the store's time limit: (read, answer).

        Raises StoreUnavailable: what was pinned ends by itself.
        """
        self._check()
        self._read += 1
        read, deadline = self._read, self._deadline(timeout_s)
        self._send(Open(NO_CLIENT, read, tuple(keys)), deadline)
        found = self._wait(Opened, lambda message: message.read == read, deadline)
        return read, Answer(found.counts, found.rows, found.parts)

    def fetch(self, read: int, picks: Sequence[Version], timeout_s: float | None = None) -> Answer:
        """Have the chosen versions of the first keys of a read brought into host slots; those that are there, a prefix.

        An evicted, lost or slow block ends the prefix. Raises StoreUnavailable as `open`.
        """
        self._check()
        deadline = self._deadline(timeout_s)
        self._send(Fetch(NO_CLIENT, read, tuple(picks)), deadline)
        found = self._wait(Fetched, lambda message: message.read == read, deadline)
        return Answer(found.counts, found.rows, found.parts)

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
        self._send(Used(NO_CLIENT, tuple(keys)), self._deadline(None))

    def close_read(self, read: int) -> None:
        """All copies of a read have ended; its pins end. Does not wait. Raises StoreUnavailable: they end by
        themselves.
        """
        self._check()
        self._send(CloseRead(NO_CLIENT, read), self._deadline(None))

    def bad(self, key: bytes, handle: Handle) -> None:
        """Tell the store that the bytes under a handle are wrong; it checks again and drops them. Does not wait."""
        self._check()
        self.num_bad += 1
        place = (handle.page, handle.generation)
        self._send(Bad(NO_CLIENT, key, handle.version, *place), self._deadline(None))

    def forget(self, key: bytes, version: Version) -> None:
        """Tell the store that a version is incomplete across nodes. Does not wait."""
        self._check()
        self._send(Forget(NO_CLIENT, key, version), self._deadline(None))

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
        self._send(HardUnpin(NO_CLIENT, request), self._deadline(None))

    # ---- the end

    def close(self) -> None:
        """End the service and unmap the pool. Slots still lent come back when this process ends. Idempotent."""
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

    def _wait(self, kind: type[_M], wanted: Callable[[_M], bool], deadline: float, *, attaching: bool = False) -> _M:
        while (message := self._next(deadline, attaching=attaching)) is not None:
            if isinstance(message, kind) and wanted(message):
                return message
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
        if isinstance(message, Reported) and self._answered < message.seq <= self._seq:
            self._answered = message.seq
            self._take_back(message.refused)
            self._free.extend(Lent(*pair) for pair in message.lent)
            self._reported.append(message)
        return message

    def _hand_over(self, report: Report) -> set[tuple[int, int]]:
        """Slots that a report names are the store's now; which of those of its entries were this client's."""
        reported = _slots_of(report.entries)
        named = reported.union(report.released)
        ours = reported & self._taken
        if named - self._taken:  # of an entry that was refused before, and free again
            ours |= {(lent.page, lent.generation) for lent in self._free} & reported
            self._free = deque(lent for lent in self._free if (lent.page, lent.generation) not in named)
        self._taken -= named
        return ours

    def _take_back(self, refused: Sequence[int]) -> None:
        """Slots of refused entries of the oldest unanswered report are still lent: they can be written again."""
        report, slots = self._unanswered.popleft()
        if not refused:
            return
        none = set(refused)
        slots -= _slots_of(entry for number, entry in enumerate(report.entries) if number not in none)
        for later, held in self._unanswered:  # which may take what was refused here
            again = slots & _slots_of(later.entries)
            held |= again
            slots -= again.union(later.released)
        self._free.extend(Lent(*pair) for pair in sorted(slots))

    def _lost(self, why: str) -> StoreUnavailable:
        self._over = why
        return StoreUnavailable(f"the store is lost to this client: {why}; attach again")


def _slots_of(entries: Iterable[ReportEntry]) -> set[tuple[int, int]]:
    return {(entry.page, entry.generation) for entry in entries}


def connect(
    path: Path, identity: Identity, timeout_s: float = TIMEOUT_S, page_lock: PageLock | None = None
) -> StoreClient:
    """Attach to the store that listens at a socket; `timeout_s` is the deadline of this and, by default, of every call.

    Raises StoreUnavailable when none listens there, StoreRefused when it says no; nothing is held then.
    """
    return StoreClient(SocketTransport(path, time.monotonic() + timeout_s, page_lock), identity, timeout_s)


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
