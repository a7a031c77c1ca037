"""Questions to a running store that need no attaching, and their answers: status, list, verify, clear of an operator,
and what it has to tell the directory.

Owns these messages and what they say of a node store; the socket is server.py's, the words on the screen the command
line's. Of an operator's queries only `Clear` changes something. All page through blocks, so that no answer takes long
or grows without bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from tournant.kvstore.directory import Announcement, Heard
from tournant.kvstore.groups import Copy, Group, Place
from tournant.kvstore.node_store import NodeStore
from tournant.kvstore.slots import Slot, SlotState
from tournant.kvstore.stats import StoreStats

LIST_GROUPS = 2048  # ids looked at for one page
VERIFY_BYTES = 64 << 20  # payload checked for one page


@dataclass(frozen=True, slots=True)
class StatusQuery:
    """How is the store?"""


@dataclass(frozen=True, slots=True)
class ListBlocks:
    """The next blocks after an id; 0 begins."""

    after: int


@dataclass(frozen=True, slots=True)
class VerifyBlocks:
    """Check the bytes of the next blocks after an id in every tier; 0 begins. What is bad is checked again and
    dropped.
    """

    after: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget every block on every tier. What clients hold or read is given back as they end."""


@dataclass(frozen=True, slots=True)
class PollAnnouncements:
    """What is to be sent to the shards of the directory now? From the first such question on the store gathers changes.

    node: number of the node in the cluster; num_shards: 1 to MAX_SHARDS; both the same in all questions, or everything
    is told again. heard: replies of shards to earlier announcements, (shard, reply).
    """

    node: int
    num_shards: int
    heard: tuple[tuple[int, Heard], ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    """pages: (state, pages) of the host pool, states as in slots.py, where what is not cut into slots counts as FREE;
    pinned_pages: held by reads and hard pins; blocks: known, on whatever tier; in_host: those that are whole in host
    slots; max_reads, max_keys, max_entries: limits of a client; the rest: gauges, and counters since the start.
    """

    incarnation: int
    host_pages: int
    pages: tuple[tuple[int, int], ...]
    pinned_pages: int
    blocks: int
    in_host: int
    clients: int
    open_reads: int
    nvme_cap_bytes: int
    nvme_used_bytes: int
    nvme_records: int
    nvme_segments: int
    evicted: int
    lost: int
    written: int
    written_bytes: int
    loaded: int
    loaded_bytes: int
    corrupt: int
    read_errors: int
    write_errors: int
    reported: int
    refused_entries: int
    dropped_incomplete: int
    credit_short: int
    opened: int
    keys_asked: int
    keys_found: int
    host_hits: int
    nvme_hits: int
    expired_reads: int
    late_fetches: int
    adopted: int
    refused_records: int
    corrupt_records: int
    max_reads: int
    max_keys: int
    max_entries: int


@dataclass(frozen=True, slots=True)
class BlockLine:
    """One block as `ls` shows it. parts: how many of it are here; length: payload of all parts, bytes; host, nvme:
    whether all parts lie in that tier; pins: readers that hold it; heat: 0 to 3, how often it was used.
    """

    key: bytes
    writer_id: int
    counter: int
    parts: int
    length: int
    depth: int
    host: int
    nvme: int
    pins: int
    heat: int


@dataclass(frozen=True, slots=True)
class Listed:
    """after: id to go on from; more: whether there may be more."""

    after: int
    more: bool
    lines: tuple[BlockLine, ...]


@dataclass(frozen=True, slots=True)
class VerifiedBlocks:
    """Parts checked per tier; those that moved meanwhile are not counted. after, more: as in Listed."""

    after: int
    more: bool
    host_good: int
    host_bad: int
    nvme_good: int
    nvme_bad: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """blocks: how many were forgotten."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Announcements:
    """messages: (shard, what it is to be told), at most one for each shard. One that gets lost is asked for again."""

    messages: tuple[tuple[int, Announcement], ...]


def status(core: NodeStore) -> Status:
    """Counters and gauges of a store."""
    residency, tiers, reads = core.residency, core.tiers, core.reads
    stats = {field.name: getattr(core.stats, field.name) for field in fields(StoreStats)}
    pages = list(residency.pool.pages)
    pages[SlotState.FREE] += residency.pool.num_pages - sum(pages)
    return Status(
        incarnation=core.incarnation,
        host_pages=residency.pool.num_pages,
        pages=tuple(enumerate(pages)),
        pinned_pages=residency.pinned_pages,
        blocks=len(residency.index.by_gid),
        in_host=len(residency.policy),
        clients=sum(residency.use_count.values()),
        open_reads=len(reads.reads),
        nvme_cap_bytes=core.config.nvme_bytes,
        nvme_used_bytes=tiers.log.used_bytes,
        nvme_records=tiers.log.num_live,
        nvme_segments=len(tiers.log.segments),
        evicted=residency.num_evicted,
        lost=residency.num_lost,
        written=tiers.num_written,
        written_bytes=tiers.written_bytes,
        loaded=tiers.loader.num_loaded,
        loaded_bytes=tiers.loader.loaded_bytes,
        corrupt=tiers.loader.num_corrupt + tiers.num_bad_slots,
        read_errors=tiers.loader.num_errors,
        write_errors=tiers.num_write_errors,
        max_reads=core.config.max_reads,
        max_keys=core.config.max_keys,
        max_entries=core.config.max_entries,
        **{name: value for name, value in stats.items() if name in Status.__dataclass_fields__},
    )


def list_blocks(core: NodeStore, query: ListBlocks) -> Listed:
    """One page of blocks in the order of their ids."""
    lines = []
    last, newest = query.after, next(reversed(core.residency.index.by_gid), 0)
    for gid in range(query.after + 1, min(query.after + LIST_GROUPS, newest) + 1):
        last = gid
        group = core.residency.index.by_gid.get(gid)
        if group is not None:
            lines.append(_line(group))
    return Listed(last, last < newest, tuple(lines))


def _line(group: Group) -> BlockLine:
    return BlockLine(
        key=group.key,
        writer_id=group.writer_id,
        counter=group.counter,
        parts=len(group.copies),
        length=group.held_bytes,
        depth=group.depth,
        host=int(group.in_host),
        nvme=int(group.on_nvme),
        pins=group.pins,
        heat=group.heat,
    )


@dataclass(frozen=True, slots=True)
class CopyToCheck:
    """A part and where it was when a check began. generation: of its slot, 0 without one."""

    copy: Copy
    slot: Slot | None
    generation: int
    place: Place | None

    @property
    def slot_unmoved(self) -> bool:
        """The slot still holds this part, so what was read from it counts."""
        slot = self.slot
        return slot is not None and self.copy.slot is slot and slot.generation == self.generation and self.copy.readable

    @property
    def place_unmoved(self) -> bool:
        """The record is still the one that counts."""
        return self.place is not None and self.copy.place == self.place


def copies_to_check(core: NodeStore, query: VerifyBlocks) -> tuple[int, bool, list[CopyToCheck]]:
    """One page of parts, up to VERIFY_BYTES of payload: (id to go on from, whether there may be more, parts)."""
    found: list[CopyToCheck] = []
    size, last, newest = 0, query.after, next(reversed(core.residency.index.by_gid), 0)
    for gid in range(query.after + 1, min(query.after + LIST_GROUPS, newest) + 1):
        group = core.residency.index.by_gid.get(gid)
        if group is not None:
            if found and size + group.held_bytes > VERIFY_BYTES:
                break
            found += _places(group)
            size += group.held_bytes
        last = gid
    return last, last < newest, found


def _places(group: Group) -> Iterator[CopyToCheck]:
    for copy in group.copies:
        slot = copy.slot if copy.readable else None
        yield CopyToCheck(copy, slot, 0 if slot is None else slot.generation, copy.place)
