"""What a node holds of which block: groups (one version of one key, all parts of it) and where their copies lie.

Owns the index key -> groups and the ids of groups. Does not decide what leaves or moves.

Invariants:
 1. At most two groups per key: the newest is found first.
 2. A group holds at most one copy per part; a copy is in a host slot, on NVMe, in both, or on its way.
 3. A group is complete when it has a copy of every part that this node was promised; only complete groups are read.
 4. A dead group is in no index; it lives on until the last pin and the last I/O on its slots have ended.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from tournant.kvstore.block import Part, Version
from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.slots import Slot, SlotState

HEAT_MAX = 3  # two bits
MAX_COPIES = 127  # parts of a group: the handles of both versions of a key are counted in one byte
_VISIBLE, _LOADING = SlotState.VISIBLE, SlotState.LOADING


class Place(NamedTuple):
    """Where a record lies on NVMe: segment number, first byte in it, bytes with header and trailer."""

    segment: int
    offset: int
    size: int


class Handle(NamedTuple):
    """One part of one version as a reader sees it. page, generation: its host slot (generations begin at 1), both 0
    when it is on NVMe only; length: bytes of payload; checksum: XXH3-64 of the payload; part: index into the list of
    parts sent along.
    """

    writer_id: int
    counter: int
    part: int
    length: int
    page: int
    generation: int
    checksum: int

    @property
    def version(self) -> Version:
        """The write that made these bytes."""
        return Version(self.writer_id, self.counter)


ROW = struct.Struct("<QQIIQQQ")  # a Handle


class Copy:
    """One part of a group. slot: host slot or None; place: NVMe place or None; io: id of the write that reads the slot,
    0 = none.
    """

    __slots__ = ("checksum", "group", "io", "length", "part", "place", "slot")

    def __init__(self, group: Group, part: int, length: int, checksum: int) -> None:
        self.group = group
        self.part = part
        self.length = length
        self.checksum = checksum
        self.slot: Slot | None = None
        self.place: Place | None = None
        self.io = 0

    @property
    def readable(self) -> bool:
        """In a host slot, whole."""
        return self.slot is not None and self.slot.state is SlotState.VISIBLE

    @property
    def loading(self) -> bool:
        """A read into its slot is in flight."""
        return self.slot is not None and self.slot.state is SlotState.LOADING


class Group:
    """One version of one key with all parts this node holds. born: its writer's report number when it appeared.

    wanted: parts that make it complete here; empty for a group found on disk, whose parts are all there is.
    pins: reads and hard pins that hold it. rows: packed handles, None when they must be packed again.
    """

    __slots__ = (
        "born",
        "complete",
        "copies",
        "cost_us",
        "counter",
        "dead",
        "depth",
        "gid",
        "heat",
        "in_policy",
        "key",
        "kind",
        "older",
        "pins",
        "rows",
        "wanted",
        "weights",
        "writer_id",
    )

    def __init__(self, gid: int, key: bytes, version: Version, weights: int, wanted: tuple[int, ...]) -> None:
        self.gid = gid
        self.key = key
        self.writer_id = version.writer_id
        self.counter = version.counter
        self.weights = weights
        self.wanted = wanted
        self.copies: list[Copy] = []
        self.older: Group | None = None
        self.rows: bytes | None = None
        self.pins = 0
        self.heat = 0
        self.cost_us = 0
        self.kind = 0
        self.depth = 0
        self.born = 0
        self.complete = False
        self.in_policy = False
        self.dead = False

    @property
    def version(self) -> Version:
        """The write that made this group."""
        return Version(self.writer_id, self.counter)

    def copy_of(self, part: int) -> Copy | None:
        """Its copy of a part."""
        for copy in self.copies:
            if copy.part == part:
                return copy
        return None

    def add(self, copy: Copy) -> None:
        """A new part; completes the group when it was the last one promised."""
        if self.copy_of(copy.part) is not None:
            raise InvariantViolation(f"a second copy of part {copy.part} of one version")
        self.copies.append(copy)
        self.rows = None
        if len(self.wanted) <= 1:  # with no parts promised, what there is counts
            self.complete = not self.wanted or copy.part == self.wanted[0] or self.complete
        elif len(self.copies) >= len(self.wanted):
            self.complete = all(self.copy_of(part) for part in self.wanted)

    def pack(self) -> bytes:
        """Handles of all parts, one ROW each; kept until a slot changes. Slots are shown once all parts are in them."""
        rows = b""
        shown = self.in_host
        for copy in self.copies:
            slot = copy.slot
            page, generation = (slot.page, slot.generation) if shown and slot is not None else (0, 0)
            rows += ROW.pack(self.writer_id, self.counter, copy.part, copy.length, page, generation, copy.checksum)
        self.rows = rows
        return rows

    @property
    def in_host(self) -> bool:
        """All parts can be read from host slots."""
        for copy in self.copies:  # a loop: this is asked for every block of every read
            slot = copy.slot
            if slot is None or slot.state is not _VISIBLE:
                return False
        return True

    @property
    def on_nvme(self) -> bool:
        """All parts lie on NVMe."""
        for copy in self.copies:  # noqa: SIM110 - asked for every block that leaves
            if copy.place is None:
                return False
        return True

    @property
    def held_bytes(self) -> int:
        """Bytes of payload of all parts."""
        return sum(copy.length for copy in self.copies)

    @property
    def host_pages(self) -> int:
        """Pages of the host slots of all parts."""
        total = 0
        for copy in self.copies:  # a loop, not a generator: asked for each pin
            if copy.slot is not None:
                total += copy.slot.pages
        return total

    @property
    def busy(self) -> bool:
        """A pin, a load or a write to disk holds a slot of it."""
        if self.pins:
            return True
        for copy in self.copies:  # noqa: SIM110 - asked for every block that leaves
            if copy.io or (copy.slot is not None and copy.slot.state is _LOADING):
                return True
        return False


class GroupIndex:
    """Key -> groups, group id -> group, and the table of parts."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, Group] = {}
        self.by_gid: dict[int, Group] = {}
        self.parts: list[Part] = []
        self._part_numbers: dict[Part, int] = {}
        self._next_gid = 1

    def part_number(self, part: Part) -> int:
        """Index of a part in the table; a new part is added."""
        number = self._part_numbers.get(part)
        if number is None:
            number = self._part_numbers[part] = len(self.parts)
            self.parts.append(part)
        return number

    def versions(self, key: bytes) -> Iterator[Group]:
        """Groups of a key, the newest first."""
        group = self.by_key.get(key)
        while group is not None:
            yield group
            group = group.older

    def find(self, key: bytes, writer_id: int, counter: int) -> Group | None:
        """The group of one version."""
        group = self.by_key.get(key)
        while group is not None and (group.writer_id != writer_id or group.counter != counter):
            group = group.older
        return group

    def create(self, key: bytes, version: Version, weights: int, wanted: tuple[int, ...]) -> Group:
        """A new, empty group in front of the others of its key."""
        group = Group(self._next_gid, key, version, weights, wanted)
        self._next_gid += 1
        group.older = self.by_key.get(key)
        self.by_key[key] = group
        self.by_gid[group.gid] = group
        return group

    def remove(self, group: Group) -> None:
        """Take a group out of the index: nobody finds it any more."""
        group.dead = True
        del self.by_gid[group.gid]
        first = self.by_key[group.key]
        if first is group:
            if group.older is None:
                del self.by_key[group.key]
            else:
                self.by_key[group.key] = group.older
        else:
            before = first
            while before.older is not group:
                if before.older is None:
                    raise InvariantViolation("a group is missing from the chain of its key")
                before = before.older
            before.older = group.older
        group.older = None

    def validate(self) -> None:
        """Recount from scratch. Raises InvariantViolation."""
        seen = 0
        for key, first in self.by_key.items():
            group: Group | None = first
            names = []
            while group is not None:
                seen += 1
                names.append((group.writer_id, group.counter))
                if group.dead or group.key != key or self.by_gid.get(group.gid) is not group or not group.copies:
                    raise InvariantViolation(f"I6: group {group.gid} is indexed wrongly, dead or empty")
                numbers = [copy.part for copy in group.copies]
                if len(numbers) > 1 and len(set(numbers)) != len(numbers):
                    raise InvariantViolation(f"I6: group {group.gid} has two copies of a part")
                if group.complete != (not [part for part in group.wanted if part not in numbers]):
                    raise InvariantViolation(f"I6: group {group.gid} is marked complete={group.complete}; it is not so")
                if group.rows is not None and group.rows != group.pack():
                    raise InvariantViolation(f"I6: group {group.gid} keeps handles of an earlier state")
                group = group.older
            if len(names) > 2 or (len(names) > 1 and names[0] == names[1]):
                raise InvariantViolation(f"I6: a key has the groups {names}; at most 2 versions")
        if seen != len(self.by_gid):
            raise InvariantViolation(f"I6: {len(self.by_gid)} groups have ids, {seen} are found by key")
