"""What moves between host and NVMe, and when: copying down, giving segments back, sick disks.

Owns which blocks are to be copied down and whether the disk may be written to. Decides by watermarks and admission
(policies/); where records lie is segment_log.py's, which slots are free residency.py's, loading up loader.py's.

Invariants:
 1. Clean copies are made early, coldest first; a copy is dropped only when its room is needed (residency.py).
 2. A slot that an I/O reads or writes is not reused before that I/O has ended, however late it is.
 3. An I/O past its deadline makes the tier STALLED: nothing new is asked of the disk until all late ones have ended.
 4. Full or failing for writes means read-only for a while; requests go on without. A full disk gets one segment back;
    while whoever fills it takes that too, it gets no more.
"""

from __future__ import annotations

from tournant.kvstore.checkpointer import Checkpointer
from tournant.kvstore.config import MAX_RUN_RECORDS, StoreConfig
from tournant.kvstore.disk_events import (
    CheckpointDone,
    CloseSegment,
    DeleteSegment,
    DiskError,
    DiskEvent,
    ReadDone,
    ReadRecords,
    RecordAt,
    RecordToWrite,
    Recovery,
    SegmentClosed,
    SegmentDeleted,
    WriteCheckpoint,
    WriteDone,
    WriteRecords,
)
from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.events import Verify
from tournant.kvstore.groups import Copy, Group, Place
from tournant.kvstore.io_table import IoTable
from tournant.kvstore.loader import Loader
from tournant.kvstore.policies.admission import AdmissionPolicy
from tournant.kvstore.policies.watermarks import Watermarks
from tournant.kvstore.record import RecordHeader, record_bytes
from tournant.kvstore.residency import Residency
from tournant.kvstore.segment_log import Segment, SegmentLog, SegmentState
from tournant.kvstore.slots import SlotState
from tournant.kvstore.weights import WeightsTable

KEPT_HEAT = 2  # blocks used this often since the last time are appended again when their segment is given back


def _bytes_on_disk(group: Group) -> int:
    """Of the records of all parts, at most: a codec may save some."""
    return sum(record_bytes(copy.length) for copy in group.copies)


class TierManager:
    """The NVMe side of a store. Instructions gather in `ios`, groups whose load has ended in `loader.settled`."""

    def __init__(
        self, config: StoreConfig, residency: Residency, admission: AdmissionPolicy, weights: WeightsTable
    ) -> None:
        self.config = config
        self.enabled = config.nvme_bytes > 0
        self.log = SegmentLog(config.nvme_bytes, config.segment_bytes)
        self.ios = IoTable(config.io_us)
        self.loader = Loader(config, residency, self.log, self.ios, self.header, self.entered)
        self._residency = residency
        self._admission = admission
        self._weights = weights
        self._watermarks = Watermarks(config.copy_start, config.copy_parallel, config.copy_stop, config.num_copiers)
        # gid -> complete group in host slots, admitted to NVMe and not there, no write in flight; coldest first
        self._dirty: dict[int, Group] = {}
        self._dirty_pages = 0
        self._num_writes = 0
        self._read_only_until_us = 0
        self._gave_back = False  # a segment, since the last write that went well
        self._draining = False
        self._checkpointer = Checkpointer(self.log, self.header, config.checkpoint_segments)
        self._checkpoint_io = 0
        self.num_written = self.written_bytes = self.num_write_errors = self.num_bad_slots = 0
        residency.on_places_lost = self.log.forget_group
        residency.on_left_host = self._left_host

    # ---- what the rest of the core tells

    def adopt_segments(self, recovery: Recovery) -> None:
        """Take over the segments of an opened folder."""
        for found in recovery.segments:
            self.log.adopt(found.segment, max(found.size, found.allocated))
        self.log.next_number = max(self.log.next_number, recovery.next_segment)
        self.log.foreign_bytes = recovery.foreign_bytes

    def adopt_record(self, copy: Copy, at: RecordAt) -> None:
        """The copy lies there; a record found later, which was appended later, is the one that counts."""
        self.log.forget(copy)
        self.log.put(copy, Place(at.segment, at.offset, at.size))

    def entered(self, group: Group) -> None:
        """A complete group is in host slots."""
        self._consider(group)

    def begin_request(self, keys: tuple[bytes, ...], now_us: int) -> None:
        """A request asks for this chain; admission may learn from it."""
        if self.enabled:
            self._admission.begin_request(keys, now_us)

    def touched(self, groups: list[Group]) -> None:
        """A request used these blocks: the coldest are copied down first, and some are admitted only now."""
        if not self.enabled:
            return
        for group in groups:
            if group.gid in self._dirty:
                del self._dirty[group.gid]
                self._dirty[group.gid] = group
            elif group.in_policy and not group.on_nvme:
                self._consider(group)

    def _consider(self, group: Group) -> None:
        if not self.enabled or group.gid in self._dirty or not group.in_policy or group.on_nvme:
            return
        size = _bytes_on_disk(group)
        if any(copy.io for copy in group.copies) or size > self.config.segment_bytes // 2:
            return
        if len(group.copies) > MAX_RUN_RECORDS:
            return
        if self._admission.admit(group.key, group.heat):
            self._dirty[group.gid] = group
            self._dirty_pages += group.host_pages

    def _left_host(self, group: Group) -> None:
        if self._dirty.pop(group.gid, None) is not None:
            self._dirty_pages -= group.host_pages

    def writable(self, now_us: int) -> bool:
        """Whether a write may be tried."""
        return self.enabled and not self.ios.stalled and now_us >= self._read_only_until_us

    # ---- copying down

    def pump(self, now_us: int, *, idle: bool) -> None:
        """Start as many writes as the watermarks want; one when nothing else is to be done (idle)."""
        if not self._dirty or not self.writable(now_us):
            return
        pages = self._residency.pool.pages
        held = pages[SlotState.LENT] + pages[SlotState.LOADING] + pages[SlotState.DRAINING]
        held += pages[SlotState.QUARANTINED] + self._residency.pinned_pages
        total = self._residency.pool.num_pages
        copiers = self._watermarks.copiers(held, self._dirty_pages, total)
        if self._draining:
            copiers = self.config.num_copiers
        elif idle:
            copiers = max(1, copiers)
        while self._num_writes < copiers and self._dirty:
            if not self._start_write(now_us):
                break

    def _start_write(self, now_us: int) -> bool:
        copies: list[Copy] = []
        groups: list[Group] = []
        size = 0
        for group in self._dirty.values():
            more = _bytes_on_disk(group)
            if copies and (
                len(copies) + len(group.copies) > self.config.records_per_write
                or size + more > self.config.segment_bytes // 2
            ):
                break
            copies += group.copies
            groups.append(group)
            size += more
        place = self.log.reserve(size)
        self._close_full(now_us)
        if place is None:
            self._give_a_segment_back(now_us)
            return False
        for group in groups:
            self._left_host(group)  # from the dirty list only: it stays where it is
        io, entry = self.ios.start(WriteRecords, now_us, place[0], copies)
        entry.offset, entry.reserved = place[1], size
        self.log.segments[place[0]].ios += 1
        self._num_writes += 1
        for copy in copies:
            copy.io = io
        records = tuple(RecordToWrite(self.header(copy), copy.slot.page) for copy in copies if copy.slot is not None)
        self.ios.out.append(WriteRecords(io, place[0], place[1], records))
        return True

    def header(self, copy: Copy) -> RecordHeader:
        """What the record of a copy says of itself."""
        group = copy.group
        weights = self._weights.entries[group.weights]
        part = self._residency.index.parts[copy.part]
        return RecordHeader(
            group.key, group.version, part, weights.weights_id, weights.kv_form, copy.length, copy.checksum
        )

    def _write_done(self, io: int, event: WriteDone, now_us: int) -> None:
        done = self.ios.end(io)
        self.log.segments[done.segment].ios -= 1
        self._num_writes -= 1
        used = sum(at.size for at in event.records)
        if event.error is None:
            self._gave_back = False
            self.log.give_back(done.segment, done.offset, done.reserved, used)
        for copy, at in zip(done.copies, event.records, strict=False):
            if not copy.group.dead and copy.place is None:
                self.log.put(copy, Place(at.segment, at.offset, at.size))
                self.num_written += 1
                self.written_bytes += at.size
        groups = {copy.group.gid: copy.group for copy in done.copies}
        for copy in done.copies:
            copy.io = 0
        for group in groups.values():
            if group.dead:
                self._residency.drain(group)
            elif not group.on_nvme:
                self.log.forget_group(group)
                if event.error is None:
                    raise InvariantViolation("a write without an error left a record out")
                self._consider(group)
        if event.error is not None:
            self._write_failed(done.segment, event.error, now_us)

    def _write_failed(self, number: int, error: DiskError, now_us: int) -> None:
        self.num_write_errors += 1
        self._read_only_until_us = now_us + self.config.disk_retry_us
        segment = self.log.segments[number]
        if error.kind == "full" and not self._gave_back:
            self._give_a_segment_back(now_us)
        if segment.state is SegmentState.OPEN:
            self.log.fill()
        self._close_full(now_us)

    # ---- segments

    def _close_full(self, now_us: int) -> None:
        for segment in self.log.segments.values():
            if segment.state is not SegmentState.FULL or segment.ios:
                continue
            if not segment.live:  # of a disk that is full, for example
                segment.state = SegmentState.LEAVING
            elif not self.ios.stalled:
                segment.state = SegmentState.CLOSING
                io, _ = self.ios.start(CloseSegment, now_us, segment.number)
                self.ios.out.append(CloseSegment(io, segment.number))

    def _closed(self, event: SegmentClosed, now_us: int) -> None:
        self.ios.end(event.io)
        segment = self.log.segments[event.segment]
        if event.error is None:
            segment.state = SegmentState.SEALED if segment.live else SegmentState.LEAVING
            self._checkpointer.sealed()
            return
        self.num_write_errors += 1
        self._read_only_until_us = now_us + self.config.disk_retry_us
        self._lost_places(self.log.retire(segment.number))
        self._delete_leaving(now_us)

    def _lost_places(self, groups: list[Group]) -> None:
        """Groups without their records: those in host are dirty again, others are gone."""
        for group in groups:
            if group.in_host:
                self._consider(group)
            elif not any(copy.loading for copy in group.copies):
                self._residency.drop(group)

    def _give_a_segment_back(self, now_us: int) -> None:
        """One at a time: hot blocks are kept for another append, the rest is forgotten, the file is deleted."""
        if self.log.leaving:
            return
        segment = self.log.candidate()
        if segment is None:
            self.log.fill()
            self._close_full(now_us)
            return
        self._gave_back = True
        segment.state = SegmentState.LEAVING
        budget = segment.end // 4
        for group in self._hot_groups(segment):
            group.heat = 0
            budget -= group.held_bytes
            if budget >= 0 and not group.in_host:
                self.loader.load([group], now_us)
        self._delete_leaving(now_us)

    def _hot_groups(self, segment: Segment) -> list[Group]:
        users = self._residency.use_count
        groups = {copy.group.gid: copy.group for copy in segment.live.values()}
        return [g for g in groups.values() if g.heat >= KEPT_HEAT and users.get(g.weights)]

    def _delete_leaving(self, now_us: int) -> None:
        for segment in list(self.log.segments.values()):
            if segment.state is SegmentState.LEAVING and not segment.ios and not self.ios.stalled:
                lost = self.log.retire(segment.number)
                segment.state = SegmentState.DELETING
                io, _ = self.ios.start(DeleteSegment, now_us, segment.number)
                self.ios.out.append(DeleteSegment(io, segment.number))
                self._lost_places(lost)

    def _deleted(self, event: SegmentDeleted, now_us: int) -> None:
        self.ios.end(event.io)
        if event.error is None:
            self.log.deleted(event.segment)
        else:  # it still takes room: tried again when the disk is written to again
            self.log.segments[event.segment].state = SegmentState.LEAVING
            self._read_only_until_us = now_us + self.config.disk_retry_us

    # ---- deadlines, events, ends

    def on_event(self, event: DiskEvent, now_us: int) -> None:
        """Something that the disk was told has ended. Events of unknown numbers change nothing."""
        if event.io not in self.ios.flying:
            return
        match event:
            case WriteDone():
                self._write_done(event.io, event, now_us)
            case ReadDone():
                self.loader.read_done(event, now_us)
            case SegmentClosed():
                self._closed(event, now_us)
            case SegmentDeleted():
                self._deleted(event, now_us)
            case CheckpointDone():  # with an error the one before it is still in force
                self.ios.end(event.io)
                self._checkpoint_io = 0
        self._close_full(now_us)
        self._delete_leaving(now_us)

    def tick(self, now_us: int) -> None:
        """Mark late I/Os, quarantine the slots they load, go on with a checkpoint and with what waited for the disk."""
        for io in self.ios.newly_late(now_us):
            if io.kind is ReadRecords:
                self.loader.late(io, now_us)
        if self.enabled and not self.ios.stalled:
            self._close_full(now_us)
            if now_us >= self._read_only_until_us:
                self._delete_leaving(now_us)
                self._go_on_with_checkpoint(now_us)

    def clear(self, now_us: int) -> None:
        """All groups are forgotten: delete all segments, the open one as soon as it is closed."""
        if self.enabled:
            self.log.fill()
            self._close_full(now_us)
            for segment in self.log.segments.values():
                if segment.state is SegmentState.SEALED:
                    segment.state = SegmentState.LEAVING
            self._delete_leaving(now_us)

    def drain(self) -> None:
        """From now on everything dirty is copied down as fast as the disk takes it, then a checkpoint is written."""
        self._draining = True

    def drained(self, now_us: int) -> bool:
        """Whether `drain` has come to its end, well or because the disk does not take more."""
        if not self.enabled or not self.writable(now_us):
            return True
        if self._dirty or self._num_writes:
            return False
        if self._draining:
            self.log.fill()
            self._close_full(now_us)
            if not self.ios.flying and not self._checkpointer.running:
                self._draining = False
                self._checkpointer.begin()
        return not self._checkpointer.running and not self.ios.flying

    def _go_on_with_checkpoint(self, now_us: int) -> None:
        if self._checkpoint_io:
            return
        if self._checkpointer.due:
            self._checkpointer.begin()
        made = self._checkpointer.go_on()
        if made is not None:
            self._checkpoint_io, _ = self.ios.start(WriteCheckpoint, now_us)
            self.ios.out.append(WriteCheckpoint(self._checkpoint_io, self.log.next_number, *made))

    def verify(self, copy: Copy, now_us: int) -> None:
        """Have the bytes of a block's host slot checked; the slot is held until `verified`. Only of blocks that can be
        read: one that lacks parts is its writer's to drop.
        """
        if copy.slot is not None and copy.readable and copy.group.complete and not copy.io:
            self._left_host(copy.group)  # not written down while in doubt
            copy.io, _ = self.ios.start(Verify, now_us, 0, [copy])
            self.ios.checks.append(Verify(copy.io, copy.slot.page, copy.length, copy.checksum))

    def verified(self, number: int, good: bool) -> None:
        """A slot was checked; the block is dropped on every tier when it is not what its writer reported."""
        if number not in self.ios.flying or self.ios.flying[number].kind is not Verify:
            return
        for copy in self.ios.end(number).copies:
            copy.io = 0
            if not good:
                self.num_bad_slots += 1
                self._residency.drop(copy.group)
            self._residency.drain(copy.group)
            self._consider(copy.group)

    def validate(self) -> None:
        """Recount from scratch. Raises InvariantViolation."""
        self.log.validate()
        pages = sum(group.host_pages for group in self._dirty.values())
        if pages != self._dirty_pages:
            raise InvariantViolation(f"I6: {self._dirty_pages} pages are counted as dirty; a recount gives {pages}")
        for group in self._dirty.values():
            if group.dead or not group.in_policy or group.on_nvme or any(copy.io for copy in group.copies):
                raise InvariantViolation(f"I6: group {group.gid} waits to be copied down though it cannot be")
        for number, io in self.ios.flying.items():
            if io.kind is WriteRecords and not all(c.io == number and c.slot is not None for c in io.copies):
                raise InvariantViolation(f"I8: a slot that write {number} reads was given away")
            if io.kind is ReadRecords and any(
                s.user is not c and c.slot is s for c, s in zip(io.copies, io.slots, strict=True)
            ):
                raise InvariantViolation(f"I8: a slot that read {number} fills was given away")
        if self.ios.num_late != sum(io.late for io in self.ios.flying.values()):
            raise InvariantViolation("I6: late I/Os are counted wrongly")
