"""Blocks that come from elsewhere: found in a folder at the start, or fetched whole from another node.

Owns nothing; adds groups to the index under the version that their writer gave them. Adoption is a copy, not a write:
no version is minted, and a part that is here already only counts as used.

Invariant: blocks of some weights in two numeric forms are never here beside a client of these weights. The form of its
clients wins: what was found in a folder, or was left by clients that are gone, leaves when the first one attaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tournant.kvstore.clients import MAX_PARTS
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_events import Recovery
from tournant.kvstore.events import AdoptEntry, GaveWay, ReportEntry
from tournant.kvstore.groups import MAX_COPIES, Copy
from tournant.kvstore.residency import Residency
from tournant.kvstore.slots import Slot, SlotState
from tournant.kvstore.tier_manager import TierManager
from tournant.kvstore.weights import WeightsTable


class Adoption:
    """make_room: makes place for one more version of a key."""

    def __init__(
        self, residency: Residency, tiers: TierManager, weights: WeightsTable, make_room: Callable[[bytes], None]
    ) -> None:
        self._residency = residency
        self._tiers = tiers
        self._weights = weights
        self._make_room = make_room
        self.num_adopted = 0
        self.num_refused = 0

    def recover(self, recovery: Recovery) -> None:
        """Index what an opened folder holds. At most two versions of a key stay, those appended last."""
        index = self._residency.index
        self._tiers.adopt_segments(recovery)
        for at in recovery.records:
            header = at.header
            number = self._weights.number(header.weights_id, header.kv_form)
            taken = at.offset in self._tiers.log.segments[at.segment].live  # only a forged checkpoint says so
            if number is None or taken or len(index.parts) >= MAX_PARTS:
                self.num_refused += 1
                continue
            group = index.find(header.key, header.version.writer_id, header.version.counter)
            if group is None:
                self._make_room(header.key)
                group = index.create(header.key, header.version, number, ())
            part = index.part_number(header.part)
            copy = group.copy_of(part)
            if copy is None and len(group.copies) >= MAX_COPIES:
                self.num_refused += 1
                continue
            if copy is None:
                copy = Copy(group, part, header.length, header.checksum)
                group.add(copy)
            self._tiers.adopt_record(copy, at)
            self.num_adopted += 1

    def give_way(self, weights_id: bytes, kv_form: str) -> GaveWay | None:
        """Drop what there is of these weights in other forms, on every tier, before their first client of this form is
        served; nobody uses it, as `clients.py` has seen to. None when nothing was dropped.
        """
        others = self._weights.in_other_forms(weights_id, kv_form)
        if not others:
            return None
        numbers, records = set(others), 0
        for group in [group for group in self._residency.index.by_gid.values() if group.weights in numbers]:
            records += len(group.copies)
            self._residency.drop(group)
        for number in others:
            self._weights.gone(number)
        forms = tuple(self._weights.entries[number].kv_form for number in others)
        return GaveWay(kv_form, forms, records) if records else None

    def adopt(self, entries: Sequence[AdoptEntry], now_us: int) -> tuple[tuple[int, int], ...]:
        """Take slots for parts that are not here yet: (index of the entry, page) of each that got one."""
        targets = []
        for place, entry in enumerate(entries):
            page = self._adopt(entry, now_us)
            if page is not None:
                targets.append((place, page))
        return tuple(targets)

    def take_over(self, entry: ReportEntry, part: int, weights: int, slot: Slot, now_us: int) -> bool:
        """File a part that a client has copied into a slot lent to it, its number and that of its weights given. False:
        nothing was changed but that a part which is here counts as used.

        Parts of a block that a writer here has not completed are that writer's to bring.
        """
        index, residency = self._residency.index, self._residency
        group = index.find(entry.key, entry.version.writer_id, entry.version.counter)
        if group is not None:
            if group.complete and group.copy_of(part) is not None:
                residency.touched([group], now_us)
                self._tiers.touched([group])
                return False
            busy = any(copy.io for copy in group.copies)
            if busy or not group.in_policy or group.weights != weights or len(group.copies) >= MAX_COPIES:
                self.num_refused += 1
                return False
            residency.leaves_policy(group)  # it comes back with other bytes and another state on disk
        else:
            self._make_room(entry.key)
            group = index.create(entry.key, entry.version, weights, ())
            group.cost_us, group.kind, group.depth = entry.cost_us, entry.kind, entry.depth
        copy = Copy(group, part, entry.length, entry.checksum)
        group.add(copy)
        residency.pool.move(slot, SlotState.VISIBLE, copy)
        residency.attach_slot(copy, slot)
        residency.entered(group, now_us)
        self._tiers.entered(group)
        self.num_adopted += 1
        return True

    def _adopt(self, entry: AdoptEntry, now_us: int) -> int | None:
        index, residency = self._residency.index, self._residency
        others = self._weights.in_other_forms(entry.weights_id, entry.kv_form)
        in_use = any(map(residency.use_count.get, others))
        number = None if in_use else self._weights.number(entry.weights_id, entry.kv_form)
        if number is None or len(index.parts) >= MAX_PARTS or entry.length < 1:
            self.num_refused += 1
            return None
        part = index.part_number(entry.part)
        group = index.find(entry.key, entry.version.writer_id, entry.version.counter)
        if group is not None and group.copy_of(part) is not None:
            residency.touched([group], now_us)
            self._tiers.touched([group])
            return None
        if group is not None and len(group.copies) >= MAX_COPIES:
            self.num_refused += 1
            return None
        slot = residency.take_slot(-(-entry.length // PAGE_BYTES), SlotState.VISIBLE, None)
        if slot is None:
            self.num_refused += 1
            return None
        if group is None or group.dead:  # making room for the slot may have dropped it
            self._make_room(entry.key)
            group = index.create(entry.key, entry.version, number, ())
            group.cost_us, group.kind, group.depth = entry.cost_us, entry.kind, entry.depth
        copy = Copy(group, part, entry.length, entry.checksum)
        group.add(copy)
        slot.user = copy
        residency.attach_slot(copy, slot)
        if group.complete and group.in_host and not group.in_policy:
            residency.entered(group, now_us)
            self._tiers.entered(group)
        self.num_adopted += 1
        return slot.page
