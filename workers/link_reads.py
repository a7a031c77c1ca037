"""Reads of an engine from one attached store: lookups, fetches, loads, and their ends.

Owns the table of open reads. Runs on the link's thread, never waits; the copies are copy_lanes.py's. What lies on other
nodes only is asked of the agent (remote_reads.py): it is located with the lookup, and brought into the store here when
it is to be fetched; then the store is asked for the chain again. A rank of a group is told by its leader when to bring
(`Bring`), and says what it has then before anything is fetched.

Invariants:
 1. A read is listed from its order until its ReadEnded is emitted: here, or by the lane that has claimed its job.
 2. The store holds at most `max_reads` reads of this client; lookups beyond that wait here.
 3. Every read that the store holds is closed there, after its copies have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from tournant.kvstore.agent_wire import Brought as BroughtReply
from tournant.kvstore.agent_wire import Located
from tournant.kvstore.block import Part, Version
from tournant.kvstore.events import Fetched as FetchedReply
from tournant.kvstore.events import Opened
from tournant.kvstore.groups import ROW, Handle
from tournant.kvstore.read_group import Answer
from tournant.workers.attachment import Attachment
from tournant.workers.copy_lanes import CopyUp
from tournant.workers.remote_reads import RemoteReads
from tournant.workers.transfer_messages import (
    HOST,
    NVME,
    REMOTE,
    Bring,
    Brought,
    EndRead,
    Fetch,
    Fetched,
    Found,
    Load,
    Lookup,
    ReadEnded,
    Shown,
)


@dataclass(frozen=True, slots=True)
class _Remote:
    """What a node was asked for, blocks, and what came."""

    asked: int
    count: int
    num_bytes: int
    seconds: float


@dataclass(slots=True, eq=False)
class _Read:
    """A lookup and what has become of it. since: of the order that is being carried out; at_store: its number there,
    0 = not asked yet; shown: every version of each key that was found, in a group of ranks; picks: the ones to be read,
    None before the answer; told: `Found` was emitted; node, num_remote: who has so many keys behind the picks; asked,
    bringing: a `Bring` was given, and not answered; fetching: a `Fetch` was given; question: to the agent, 0 = none is
    open; remote: what came from the node; handles: where the fetched blocks lie, None before.
    """

    number: int
    keys: tuple[bytes, ...]
    since: float
    at_store: int = 0
    shown: list[list[Handle]] = field(default_factory=list)
    picks: list[Handle] | None = None
    told: bool = False
    node: str = ""
    num_remote: int = 0
    asked: bool = False
    bringing: bool = False
    fetching: bool = False
    question: int = 0
    remote: _Remote | None = None
    handles: list[Handle] | None = None
    load: tuple[Load, float] | None = None
    job: CopyUp | None = None


class LinkReads:
    """See the module. Methods raise StoreUnavailable, and ValueError for a reply that fits no question; then `lose` is
    to be called.
    """

    def __init__(self, attachment: Attachment, remote: RemoteReads | None = None) -> None:
        self._at = attachment
        self._remote = remote
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
        """Choose the first `count` blocks of what was found, in a group the versions that its leader names. Ignored
        before that, and the second time.
        """
        read = self._reads.get(order.read)
        if read is None or read.picks is None or not read.told or read.bringing or read.fetching:
            return
        read.fetching, read.since = True, since
        if self._at.in_group:
            read.picks = named(read.shown, order.picks)
        elif self._ask_node(read, read.picks, order.count):
            return
        else:
            read.picks = read.picks[: order.count]
        self._start_fetch(read, read.picks)

    def bring(self, order: Bring, since: float) -> None:
        """Of a group's rank: see `Bring`. Ignored before `Found`, and the second time."""
        read = self._reads.get(order.read)
        if read is None or read.picks is None or not read.told or read.asked or read.fetching:
            return
        read.asked = read.bringing = True
        read.since = since
        if not self._ask_node(read, read.picks, order.count):
            self._go_on(read, read.picks)

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
        read.picks = self._chosen(message, len(read.keys))
        if self._at.in_group:
            read.shown = shown_here(Answer(message.counts, message.rows, message.parts), self._at.part)
        if read.told:  # what was brought is among it
            self._go_on(read, read.picks)
            return
        missing = read.keys[len(read.picks) :]
        if missing and self._remote is not None:
            read.question = self._remote.locate(missing, partial(self._located, read))
            if read.question:
                return
        self._found(read, read.picks)

    def _located(self, read: _Read, answer: Located | None) -> None:
        """The agent knows who has the other keys, or nobody does."""
        read.question = 0
        picks = read.picks or []
        if answer is not None:
            read.node, read.num_remote = answer.node, min(answer.count, len(read.keys) - len(picks))
        self._found(read, picks)

    def _found(self, read: _Read, picks: list[Handle]) -> None:
        read.told = True
        tiers = bytes(map(_tier, picks)) + bytes([REMOTE]) * read.num_remote
        self._at.emit(Found(read.number, tiers, self._at.clock() - read.since, _versions(read)))
        if not tiers:
            self._end(read)

    def _ask_node(self, read: _Read, picks: Sequence[Handle], count: int) -> bool:
        """Have what is not here of the first `count` blocks brought. False when there is nothing to be asked for."""
        local = len(picks)
        wanted = read.keys[local : min(count, local + read.num_remote)]
        if not wanted or self._remote is None:
            return False
        done = partial(self._brought, read, len(wanted))
        read.question = self._remote.bring(read.node, wanted, local, done)
        return bool(read.question)

    def _brought(self, read: _Read, asked: int, answer: BroughtReply | None) -> None:
        """The agent has brought what it could: ask the store again, or go on with what it had."""
        read.question = 0
        count, num_bytes = (0, 0) if answer is None else (min(answer.count, asked), answer.num_bytes)
        read.remote = _Remote(asked, count, num_bytes, self._at.clock() - read.since)
        picks = read.picks or []
        if not count:
            self._go_on(read, picks)
            return
        self._let_go(read)
        read.picks, read.keys = None, read.keys[: len(picks) + count]
        self._open(read)

    def _go_on(self, read: _Read, picks: Sequence[Handle]) -> None:
        """Nothing more comes from other nodes: say what is here, or fetch it."""
        if read.bringing:
            read.bringing = False
            self._at.emit(Brought(read.number, _versions(read)))
        else:
            self._start_fetch(read, picks)

    def fetched(self, message: FetchedReply) -> None:
        """The store has answered a fetch."""
        read = self._at_store.get(message.read)
        if read is None or read.picks is None or read.handles is not None:
            return
        self._at.settle("fetch", message.read)
        handles = self._chosen(message, len(read.picks))
        if any(handle[:2] != picked[:2] for handle, picked in zip(handles, read.picks, strict=False)):
            raise ValueError("the store fetched other versions than it was asked for")
        for handle in handles:
            self._at.memory.slot(handle.page, handle.length)  # raises for a place outside the pool
        read.handles = handles
        from_nvme = sum(handle.length for handle, was in zip(handles, read.picks, strict=False) if not was.generation)
        far = read.remote or _Remote(0, 0, 0, 0.0)
        came = (far.count, far.num_bytes, far.seconds, far.count < far.asked)
        before_s = far.seconds if self._at.in_group else 0.0  # of another order than this one
        seconds = before_s + self._at.clock() - read.since
        self._at.emit(Fetched(read.number, len(read.handles), from_nvme, seconds, *came))
        if read.load is not None:
            self._begin(read, *read.load)

    def _chosen(self, message: Opened | FetchedReply, most: int) -> list[Handle]:
        if len(message.counts) > most:
            raise ValueError(f"the store answers {len(message.counts)} blocks; it was asked for {most}")
        return choose_here(Answer(message.counts, message.rows, message.parts), self._at.part)

    # ---- steps

    def _ask(self) -> None:
        """Send lookups that wait, as far as the store has room."""
        at = self._at
        while self._queue and len(self._at_store) < at.status.max_reads:
            self._open(self._queue.popleft())

    def _open(self, read: _Read) -> None:
        read.at_store = self._at.client.start_open(read.keys)
        self._at_store[read.at_store] = read
        self._at.expect("open", read.at_store)

    def _start_fetch(self, read: _Read, picks: Sequence[Handle]) -> None:
        self._at.expect("fetch", read.at_store)
        self._at.client.start_fetch(read.at_store, [handle.version for handle in picks])

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
        if read.question and self._remote is not None:
            self._remote.forget(read.question)
        if not read.told:
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
        self._let_go(read)
        self._ask()

    def _let_go(self, read: _Read) -> None:
        del self._at_store[read.at_store]
        self._at.settle("open", read.at_store)
        self._at.settle("fetch", read.at_store)
        self._at.client.close_read(read.at_store)


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


def shown_here(answer: Answer, part: Part) -> list[list[Handle]]:
    """Per key, all versions that one answer shows of this one part, as they are shown. Ends at the first key without.
    Raises ValueError as `handles`.
    """
    found: list[list[Handle]] = []
    for handles in answer.handles():
        here = [handle for handle in handles if answer.parts[handle.part] == part]
        if not here:
            break
        found.append(here)
    return found


def named(shown: Sequence[Sequence[Handle]], picks: Sequence[Version]) -> list[Handle]:
    """Per key, the handle of the version that a leader has picked; ends at the first that was not shown."""
    found: list[Handle] = []
    for handles, version in zip(shown, picks, strict=False):
        handle = next((one for one in handles if one.version == version), None)
        if handle is None:
            break
        found.append(handle)
    return found


def _versions(read: _Read) -> tuple[tuple[Shown, ...], ...]:
    return tuple(tuple((one.writer_id, one.counter, _tier(one)) for one in key) for key in read.shown)


def _tier(handle: Handle) -> int:
    return HOST if handle.generation else NVME
