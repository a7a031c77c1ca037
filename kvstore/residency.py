"""Which groups are in host slots, and how they leave: making room, dropping, draining, pins.

Owns slots, index, eviction order and pin counts together, because every rule about them concerns all four. Does not
decide what is written to disk (tier_manager.py) and speaks to no client (node_store.py, reads.py).

Invariants:
 1. All parts of a group are evicted together (STORE.md section 4), and only while nothing holds them.
 2. A dropped group is unreadable at once; its slots are DRAINING until pins and I/O have ended, then FREE (I8).
 3. The eviction policy knows exactly the complete groups that have all parts in host slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tournant.kvstore.config import StoreConfig
from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.groups import HEAT_MAX, Copy, Group, GroupIndex
from tournant.kvstore.policies.eviction import BlockInfo, EvictionPolicy
from tournant.kvstore.slots import Slot, SlotPool, SlotState

CLEAN_WINDOW = 16  # candidates looked at for one that NVMe holds too, before a block is lost


class Residency:
    """Slots, groups and their order of leaving."""

    def __init__(self, config: StoreConfig, policy: EvictionPolicy) -> None:
        self.config = config
        self.pool = SlotPool(config.host_bytes, config.bytes_per_chunk)
        self.index = GroupIndex()
        self.policy = policy
        self.pinned_pages = 0  # host pages of groups that something pins
        self.num_evicted = 0
        self.num_lost = 0  # evicted without a copy on NVMe
        self.num_dropped = 0  # groups that became unreadable
        self.use_count: dict[int, int] = {}  # weights number -> attached clients
        self._resident_of: dict[int, dict[int, None]] = {}  # weights number -> gids in the policy
        self.on_places_lost: Callable[[Group], None] = lambda group: None
        self.on_left_host: Callable[[Group], None] = lambda group: None
        self.on_changed: Callable[[bytes], object] | None = None  # a key came, left the pool or is gone (announcer.py)

    # ---- making room

    def take_slot(self, pages: int, state: SlotState, user: object) -> Slot | None:
        """A slot of this size in the given state, evicting what may go; None when nothing may."""
        slot = self.pool.take(pages, state, user)
        if slot is not None:
            return slot
        if self._evict_one(pages) or self._empty_a_chunk(pages):
            return self.pool.take(pages, state, user)
        return None

    def _evict_one(self, pages: int) -> bool:
        chosen: Group | None = None
        for looked, group in enumerate(self._victims(pages)):
            if chosen is None:
                chosen = group
            if group.on_nvme:
                chosen = group
                break
            if not self.config.nvme_bytes or looked + 1 >= CLEAN_WINDOW:
                break
        if chosen is None:
            return False
        self.evict(chosen)
        return True

    def _victims(self, pages: int) -> Iterator[Group]:
        """Groups that may leave, in order: those of weights that nobody uses, then by the policy."""
        index = self.index.by_gid
        for number, gids in self._resident_of.items():
            if not self.use_count.get(number):
                for gid in gids:
                    group = index[gid]
                    if self._may_leave(group, pages):
                        yield group
        for gid in self.policy.victims():
            group = index[gid]
            if self._may_leave(group, pages):
                yield group

    def _may_leave(self, group: Group, pages: int) -> bool:
        slot = group.copies[0].slot
        return not group.busy and slot is not None and slot.pages == pages and not self.pool.is_emptying(slot.chunk)

    def _empty_a_chunk(self, pages: int) -> bool:
        """Evict all groups of one chunk of another slot size, so that it can be cut anew."""
        for chunk in self.pool.chunks_of_other_sizes(pages):
            groups: dict[int, Group] = {}
            for slot in chunk.slots:
                copy = slot.user
                if slot.state is SlotState.VISIBLE and isinstance(copy, Copy) and not copy.group.busy:
                    groups[copy.group.gid] = copy.group
                elif slot.state is not SlotState.FREE:
                    break
            else:
                for group in groups.values():
                    self.evict(group)
                return True
        return False

    def evict(self, group: Group) -> None:
        """Host copies of a group that nothing holds become FREE; without copies on NVMe the group is gone."""
        if group.busy:
            raise InvariantViolation(f"I8: group {group.gid} is evicted while something holds it")
        self.num_evicted += 1
        if not group.on_nvme:
            self.num_lost += 1
            self.drop(group)
            return
        self.leaves_policy(group)
        for copy in group.copies:
            self.detach_slot(copy)
        group.rows = None
        if self.on_changed is not None:
            self.on_changed(group.key)

    def drop(self, group: Group) -> None:
        """The group is unreadable from now on, on every tier of this node."""
        if group.dead:
            return
        self.num_dropped += 1
        if self.on_changed is not None and group.complete:
            self.on_changed(group.key)
        self.leaves_policy(group)
        if any(copy.place is not None for copy in group.copies):
            self.on_places_lost(group)
        for copy in group.copies:
            copy.place = None
            if copy.readable and copy.slot is not None:
                self.pool.move(copy.slot, SlotState.DRAINING, copy)
        self.index.remove(group)
        self.drain(group)

    def drain(self, group: Group) -> None:
        """Free the DRAINING slots of a group that nothing holds any more. Called whenever a holder ends."""
        if not group.dead or group.pins:
            return
        for copy in group.copies:
            slot = copy.slot
            if slot is not None and slot.state is SlotState.DRAINING and not copy.io:
                self.detach_slot(copy)
        if not any(copy.slot is not None or copy.io for copy in group.copies):
            group.copies = []  # without the cycle between both they are freed at once, not by a search of all memory

    # ---- coming in

    def entered(self, group: Group, now_us: int) -> None:
        """All parts of a complete group are in host slots now."""
        group.rows = None
        info = BlockInfo(group.held_bytes, group.cost_us, group.kind, group.depth, group.key)
        self.policy.insert(group.gid, info, now_us)
        group.in_policy = True
        if self.on_changed is not None:
            self.on_changed(group.key)
        self._resident_of.setdefault(group.weights, {})[group.gid] = None

    def touched(self, groups: list[Group], now_us: int) -> None:
        """A request used these blocks, head first; the tail counts as used first, so that it leaves first."""
        resident = []
        for group in reversed(groups):
            if group.heat < HEAT_MAX:
                group.heat += 1
            if group.in_policy:
                resident.append(group.gid)
        self.policy.touch_run(resident, now_us)

    def leaves_policy(self, group: Group) -> None:
        """It is not to be evicted, nor copied down, until it has `entered` again, or is gone."""
        if not group.in_policy:
            return
        group.in_policy = False
        self.policy.remove(group.gid)
        gids = self._resident_of[group.weights]
        del gids[group.gid]
        if not gids:
            del self._resident_of[group.weights]
        self.on_left_host(group)

    def attach_slot(self, copy: Copy, slot: Slot) -> None:
        """The copy lies, or is being loaded, in this slot."""
        copy.slot = slot
        copy.group.rows = None
        if copy.group.pins:
            self.pinned_pages += slot.pages

    def detach_slot(self, copy: Copy) -> None:
        """The slot becomes FREE: nobody reads or writes it any more."""
        slot = copy.slot
        if slot is None:
            return
        copy.slot = None
        copy.group.rows = None
        if copy.group.pins:
            self.pinned_pages -= slot.pages
        self.pool.free(slot)

    def quarantine(self, copy: Copy) -> None:
        """An I/O into the slot of this copy is late: the slot belongs to the I/O alone until it has ended."""
        slot = copy.slot
        if slot is None:
            raise InvariantViolation("a copy without a slot is quarantined")
        copy.slot = None
        copy.group.rows = None
        if copy.group.pins:
            self.pinned_pages -= slot.pages
        self.pool.move(slot, SlotState.QUARANTINED, None)

    # ---- holders

    def pin(self, group: Group) -> None:
        """One more holder."""
        if not group.pins:
            self.pinned_pages += group.host_pages
        group.pins += 1

    def unpin(self, group: Group) -> None:
        """One holder less; what waited for the last one happens."""
        if group.pins < 1:
            raise InvariantViolation(f"I7: group {group.gid} is unpinned with {group.pins} pins")
        group.pins -= 1
        if not group.pins:
            self.pinned_pages -= group.host_pages
            self.drain(group)

    def validate(self) -> None:
        """Recount from scratch. Raises InvariantViolation."""
        self.pool.validate()
        self.index.validate()
        pages = resident = 0
        for group in self.index.by_gid.values():
            if group.pins:
                pages += group.host_pages
            if group.in_policy != (group.complete and group.in_host):
                raise InvariantViolation(f"I6: group {group.gid} in the policy: {group.in_policy}; it should not be so")
            if group.in_policy != (group.gid in self._resident_of.get(group.weights, ())):
                raise InvariantViolation(f"I6: group {group.gid} is missing among the residents of its weights")
            resident += group.in_policy
        for group in self.dead_groups():
            if group.pins:
                pages += group.host_pages
            if not group.busy:
                raise InvariantViolation(f"I8: slots of dead group {group.gid} are held though nothing uses them")
        if pages != self.pinned_pages:
            raise InvariantViolation(f"I7: {self.pinned_pages} pages are counted as pinned; a recount gives {pages}")
        self.policy.validate()
        if len(self.policy) != resident:
            raise InvariantViolation(f"I6: the policy orders {len(self.policy)} groups, {resident} are resident")

    def dead_groups(self) -> list[Group]:
        """Dropped groups that still hold slots. Raises InvariantViolation when a copy does not know its slot."""
        dead: dict[int, Group] = {}
        for slot in self.pool.all_slots():
            copy = slot.user
            if isinstance(copy, Copy):
                if copy.slot is not slot:
                    raise InvariantViolation(f"I6: slot {slot.page} and the copy that it holds disagree")
                if copy.group.dead:
                    dead[copy.group.gid] = copy.group
        return list(dead.values())
