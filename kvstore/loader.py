"""Loads from NVMe into host slots, whole groups at a time.

Owns the slots of loads in flight. Which groups are wanted is decided by who calls `load`; where their records lie is
segment_log.py's.

Invariants:
 1. A load that fails for one part fails for its group: no reader sees some of its parts.
 2. A slot that a read fills is not reused before the read has ended; past its deadline it is QUARANTINED until then.
 3. Every group whose load was begun comes to `settled` once, when none of its parts is on its way any more.
"""

from __future__ import annotations

from collections.abc import Callable

from tournant.kvstore.config import PAGE_BYTES, StoreConfig
from tournant.kvstore.disk_events import ReadDone, ReadRecords, RecordRead
from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.groups import Copy, Group
from tournant.kvstore.io_table import Io, IoTable
from tournant.kvstore.record import RecordHeader
from tournant.kvstore.residency import Residency
from tournant.kvstore.segment_log import SegmentLog, SegmentState
from tournant.kvstore.slots import SlotState


class Loader:
    """header: what the record of a copy says of itself; entered: called for a group that came into the host pool."""

    def __init__(
        self,
        config: StoreConfig,
        residency: Residency,
        log: SegmentLog,
        ios: IoTable,
        header: Callable[[Copy], RecordHeader],
        entered: Callable[[Group], None],
    ) -> None:
        self._config = config
        self._residency = residency
        self._log = log
        self._ios = ios
        self._header = header
        self._entered = entered
        self.settled: list[Group] = []
        self.num_loaded = self.num_corrupt = self.num_errors = self.loaded_bytes = 0

    def load(self, groups: list[Group], now_us: int) -> list[Group]:
        """Begin to bring groups that are on NVMe into host slots; returns the leading ones that are on their way now.

        A group that is being loaded already counts. Stops at the first that has no place, no slot or a sick disk.
        """
        begun: list[Group] = []
        reads: list[Copy] = []
        for group in groups:
            if not any(copy.loading for copy in group.copies):
                if self._ios.stalled or not group.on_nvme or not self._take_slots(group):
                    break
                reads += group.copies
            begun.append(group)
        for first in range(0, len(reads), self._config.records_per_read):
            self._start_read(reads[first : first + self._config.records_per_read], now_us)
        return begun

    def _take_slots(self, group: Group) -> bool:
        residency = self._residency
        residency.pin(group)  # making room must not drop the group itself
        for copy in group.copies:
            slot = residency.take_slot(-(-copy.length // PAGE_BYTES), SlotState.LOADING, copy)
            if slot is None:
                for taken in group.copies:
                    residency.detach_slot(taken)
                break
            residency.attach_slot(copy, slot)
        residency.unpin(group)
        return all(copy.slot is not None for copy in group.copies)

    def _start_read(self, copies: list[Copy], now_us: int) -> None:
        number, io = self._ios.start(ReadRecords, now_us, 0, copies)
        reads = []
        for copy in copies:
            place, slot = copy.place, copy.slot
            if place is None or slot is None:
                raise InvariantViolation("a load lacks a place or a slot")
            self._log.segments[place.segment].ios += 1
            io.places.append(place)
            io.slots.append(slot)
            reads.append(RecordRead(place.segment, place.offset, place.size, self._header(copy), slot.page))
        self._ios.out.append(ReadRecords(number, tuple(reads)))

    def read_done(self, event: ReadDone, now_us: int) -> None:
        """A read has ended. Corrupt records are forgotten, those that could not be read are kept."""
        done = self._ios.end(event.io)
        touched: dict[int, Group] = {}
        for copy, place, slot, result in zip(done.copies, done.places, done.slots, event.results, strict=True):
            self._log.segments[place.segment].ios -= 1
            group = copy.group
            if copy.slot is not slot:  # quarantined meanwhile: nobody waits for it
                self._residency.pool.free(slot)
                continue
            touched[group.gid] = group
            if group.dead:
                self._residency.detach_slot(copy)
            elif result.outcome == "ok":
                self._residency.pool.move(slot, SlotState.VISIBLE, copy)
                self.num_loaded += 1
                self.loaded_bytes += copy.length
            else:
                self._residency.detach_slot(copy)
                if result.outcome == "corrupt":
                    self.num_corrupt += 1
                    self._log.forget_group(group)
                else:
                    self.num_errors += 1
        for group in touched.values():
            self._settle(group, now_us)

    def late(self, io: Io, now_us: int) -> None:
        """A read is past its deadline: its slots belong to it alone, its groups are not loaded."""
        groups: dict[int, Group] = {}
        for copy, slot in zip(io.copies, io.slots, strict=True):
            if copy.slot is slot:
                self._residency.quarantine(copy)
                groups[copy.group.gid] = copy.group
        for group in groups.values():
            self._settle(group, now_us)

    def _settle(self, group: Group, now_us: int) -> None:
        """When no part is on its way any more, the group is in the host pool or it is not."""
        if any(copy.loading for copy in group.copies):
            return
        self.settled.append(group)
        if group.dead:
            for copy in group.copies:
                if copy.readable:
                    self._residency.detach_slot(copy)
            return
        if group.in_host:
            if not group.in_policy:
                self._residency.entered(group, now_us)
                place = group.copies[0].place
                if place is None or self._log.segments[place.segment].state is SegmentState.LEAVING:
                    self._log.forget_group(group)
                self._entered(group)
            return
        for copy in group.copies:
            self._residency.detach_slot(copy)
        if not group.on_nvme:
            self._residency.drop(group)
