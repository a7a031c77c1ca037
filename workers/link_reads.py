"""Reads of an engine from one attached store: lookups, fetches, loads, and their ends.

Owns the table of open reads. Runs on the link's thread, never waits; the copies are copy_lanes.py's.

Invariants:
 1. A read is listed from its order until its ReadEnded is emitted: here, or by the lane that has claimed its job.
 2. The store holds at most `max_reads` reads of this client; lookups beyond that wait here.
 3. Every read that the store holds is closed there, after its copies have ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import islice

from tournant.kvstore.block import Part
from tournant.kvstore.events import Fetched as FetchedReply
from tournant.kvstore.events import Opened
from tournant.kvstore.groups import ROW, Handle
from tournant.kvstore.read_group import Answer
from tournant.workers.attachment import Attachment
from tournant.workers.copy_lanes import CopyUp
from tournant.workers.transfer_messages import HOST, NVME, EndRead, Fetch, Fetched, Found, Load, Lookup, ReadEnded


@dataclass(slots=True, eq=False)
class _Read:
    """A lookup and what has become of it. since: of the order that is being carried out; at_store: its number there,
    0 = not asked yet; picks, tiers: what was found, None before; fetching: a `Fetch` was given; handles: where
    the fetched blocks lie, None before.
    """

    number: int
    keys: tuple[bytes, ...]
    since: float
    at_store: int = 0
    picks: list[Handle] | None = None
    tiers: bytes = b""
    fetching: bool = False
    handles: list[Handle] | None = None
    load: tuple[Load, float] | None = None
    job: CopyUp | None = None


class LinkReads:
    """See the module. Methods raise StoreUnavailable; then `lose` is to be called."""

    def __init__(self, attachment: Attachment) -> None:
        self._at = attachment
        self._reads: dict[int, _Read] = {}
        self._at_store: dict[int, _Read] = {}
        self._queue: deque[_Read] = deque()  # lookups that the store has no room for

    def lookup(self, order: Lookup, since: float) -> None:
        """Ask the store, now or when it has room. What is longer than it allows is asked for in part."""
        read = _Read(order.read, order.keys[: self._at.status.max_keys], since)
        self._reads[read.number] = read
        self._queue.append(read)
        self._ask()

    def fetch(self, order: Fetch, since: float) -> None:
        """Choose the first `count` blocks of what was found. Ignored before that, and the second time."""
        read = self._reads.get(order.read)
        if read is None or read.picks is None or read.fetching:
            return
        read.fetching, read.since = True, since
        self._at.expect("fetch", read.at_store)
        self._at.client.start_fetch(read.at_store, [handle.version for handle in read.picks[: order.count]])

    def load(self, order: Load, since: float) -> None:
        """Copy what was fetched, as soon as it is; without a fetch the read ends."""
        read = self._reads.get(order.read)
        if read is None or read.load is not None:
            return
        read.load = (order, since)
        if not read.fetching:
            self._end(read)
        elif read.handles is not None:
            self._begin(read, order, since)

    def end(self, order: EndRead) -> None:
        """Nothing more of a read is wanted."""
        read = self._reads.get(order.read)
        if read is not None:
            self._end(read)

    def lose(self) -> None:
        """The store is lost: all reads end, those that are being copied with their jobs."""
        self._queue.clear()
        for read in list(self._reads.values()):
            self._end(read)

    # ---- replies

    def opened(self, message: Opened) -> None:
        """The store has answered a lookup."""
        read = self._at_store.get(message.read)
        if read is None or read.picks is not None:
            return
        self._at.settle("open", message.read)
        read.picks = choose_here(Answer(message.counts, message.rows, message.parts), self._at.part)
        read.tiers = bytes(HOST if handle.generation else NVME for handle in read.picks)
        self._at.emit(Found(read.number, read.tiers, self._at.clock() - read.since))
        if not read.tiers:
            self._end(read)

    def fetched(self, message: FetchedReply) -> None:
        """The store has answered a fetch."""
        read = self._at_store.get(message.read)
        if read is None or read.picks is None or read.handles is not None:
            return
        self._at.settle("fetch", message.read)
        handles = choose_here(Answer(message.counts, message.rows, message.parts), self._at.part)
        if any(handle[:2] != picked[:2] for handle, picked in zip(handles, read.picks, strict=False)):
            raise ValueError("the store fetched other versions than it was asked for")
        read.handles = handles
        from_nvme = sum(handle.length for handle, tier in zip(read.handles, read.tiers, strict=False) if tier == NVME)
        self._at.emit(Fetched(read.number, len(read.handles), from_nvme, self._at.clock() - read.since))
        if read.load is not None:
            self._begin(read, *read.load)

    # ---- steps

    def _ask(self) -> None:
        """Send lookups that wait, as far as the store has room."""
        at = self._at
        while self._queue and len(self._at_store) < at.status.max_reads:
            read = self._queue.popleft()
            read.at_store = at.client.start_open(read.keys)
            self._at_store[read.at_store] = read
            at.expect("open", read.at_store)

    def _begin(self, read: _Read, order: Load, since: float) -> None:
        handles = (read.handles or [])[order.skip : order.skip + len(order.blocks)]
        if not handles:
            self._end(read)
            return
        job = CopyUp(
            read.number,
            self._at.memory,
            order.blocks[: len(handles)],
            since,
            partial(self._copied, read, order.skip),
            handles=handles,
        )
        read.job = job
        self._at.begin(job)

    def _copied(self, read: _Read, skip: int, job: CopyUp) -> None:
        """The lane has ended the read; the store is told."""
        del self._reads[read.number]
        read.job = None
        if job.bad >= 0 and not self._at.over:
            self._at.client.bad(read.keys[skip + job.bad], job.handles[job.bad])
        self._close(read)

    def _end(self, read: _Read) -> None:
        """End a read here, unless a lane has its job and ends it."""
        if read.job is not None and not self._at.stop(read.job):
            return
        read.job = None
        del self._reads[read.number]
        if read.picks is None:
            self._at.emit(Found(read.number, b"", self._at.clock() - read.since))
        self._at.emit(ReadEnded(read.number, 0))
        self._close(read)

    def _close(self, read: _Read) -> None:
        """No copy of the read is under way: the store may let go."""
        if self._at.over:
            return
        if not read.at_store:
            self._queue.remove(read)
            return
        del self._at_store[read.at_store]
        self._at.settle("open", read.at_store)
        self._at.settle("fetch", read.at_store)
        self._at.client.close_read(read.at_store)
        self._ask()


def choose_here(answer: Answer, part: Part) -> list[Handle]:
    """Per key, what `read_group.choose` chooses of one answer for this one part, and where it lies: a version in a host
    slot before one on NVMe, then the one shown first. Ends at the first key without. Raises ValueError as `handles`.
    """
    if part not in answer.parts:
        return []
    wanted = answer.parts.index(part)
    if len(answer.rows) != sum(answer.counts) * ROW.size:
        raise ValueError(f"{len(answer.rows)} bytes of rows do not fit counts of {sum(answer.counts)} handles")
    rows = ROW.iter_unpack(answer.rows)
    found: list[Handle] = []
    for count in answer.counts:
        best: Handle | None = None
        for fields in islice(rows, count):
            if fields[2] == wanted and (best is None or (not best.generation and fields[5])):
                best = Handle._make(fields)
        if best is None:
            break
        found.append(best)
    return found
