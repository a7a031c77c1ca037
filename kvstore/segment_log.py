"""Where records lie on NVMe: append positions, live bytes per segment, the cap, and which segment is given back.

Owns segment numbers, offsets and the count of bytes; no I/O, no choice of what is written (tier_manager.py).

Invariants:
 1. Segment numbers only grow; a segment is appended to only in the run that made it.
 2. Reserved ranges never overlap. What a write did not use stays a hole, unless it was the last range of its segment.
 3. Bytes of all segments, of foreign files and of the checkpoint stay within the cap plus one segment.
 4. A segment is closed and deleted only while no I/O of it is in flight.
"""

from __future__ import annotations

from enum import IntEnum

from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.groups import Copy, Group, Place

MOSTLY_DEAD = 0.5  # below this share of live bytes a segment is given back before older ones
CHECKPOINT_BYTES_PER_RECORD = 256


class SegmentState(IntEnum):
    """OPEN: appended to; FULL: to be closed; CLOSING, DELETING: its I/O is in flight; RETIRED: after an error;
    LEAVING: to be deleted."""

    OPEN = 0
    FULL = 1
    CLOSING = 2
    SEALED = 3
    LEAVING = 4
    DELETING = 5


class Segment:
    """One file. end: bytes reserved in it; live: offset -> copy whose place it is; ios: in flight."""

    __slots__ = ("end", "ios", "live", "live_bytes", "number", "state")

    def __init__(self, number: int, end: int, state: SegmentState) -> None:
        self.number = number
        self.end = end
        self.state = state
        self.live: dict[int, Copy] = {}
        self.live_bytes = 0
        self.ios = 0


class SegmentLog:
    """All segments of one folder. cap_bytes: most bytes there; segment_bytes: when a segment is full."""

    def __init__(self, cap_bytes: int, segment_bytes: int) -> None:
        self._cap_bytes = cap_bytes
        self._segment_bytes = segment_bytes
        self.segments: dict[int, Segment] = {}
        self.next_number = 1
        self.foreign_bytes = 0
        self.num_live = 0
        self._used = 0  # bytes of all segments
        self._open: Segment | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes that count against the cap."""
        return self._used + self.foreign_bytes + self.num_live * CHECKPOINT_BYTES_PER_RECORD

    def adopt(self, number: int, size: int) -> None:
        """A segment found in the folder; nothing is appended to it."""
        self.segments[number] = Segment(number, size, SegmentState.SEALED)
        self._used += size
        self.next_number = max(self.next_number, number + 1)

    def reserve(self, size: int) -> tuple[int, int] | None:
        """Segment and offset for `size` bytes, or None while the cap leaves no room.

        Raises ValueError when a whole segment is too small.
        """
        if size > self._segment_bytes:
            raise ValueError(f"a run of {size} bytes exceeds the {self._segment_bytes} bytes of a segment")
        segment = self._open
        if segment is not None and segment.end + size > self._segment_bytes:
            segment.state = SegmentState.FULL
            self._open = segment = None
        if self.used_bytes + size > self._cap_bytes:
            return None
        if segment is None:
            segment = self._open = Segment(self.next_number, 0, SegmentState.OPEN)
            self.segments[segment.number] = segment
            self.next_number += 1
        offset = segment.end
        segment.end += size
        self._used += size
        return segment.number, offset

    def give_back(self, number: int, offset: int, reserved: int, used: int) -> None:
        """A write used less than it had reserved; the rest is free again if nothing was reserved behind it."""
        segment = self.segments[number]
        if segment.end == offset + reserved:
            segment.end = offset + used
            self._used -= reserved - used

    def put(self, copy: Copy, place: Place) -> None:
        """The copy lies at this place now."""
        if copy.place is not None:
            raise InvariantViolation(f"a copy at {copy.place} gets a second place {place}")
        segment = self.segments[place.segment]
        copy.place = place
        segment.live[place.offset] = copy
        segment.live_bytes += place.size
        self.num_live += 1

    def forget(self, copy: Copy) -> None:
        """The record of a copy is dead space from now on."""
        place = copy.place
        if place is None:
            return
        copy.place = None
        segment = self.segments[place.segment]
        del segment.live[place.offset]
        segment.live_bytes -= place.size
        self.num_live -= 1

    def forget_group(self, group: Group) -> None:
        """The records of all parts are dead space."""
        for copy in group.copies:
            self.forget(copy)

    def fill(self) -> None:
        """Append nothing more to the open segment."""
        if self._open is not None:
            self._open.state = SegmentState.FULL
            self._open = None

    def retire(self, number: int) -> list[Group]:
        """The segment is not trusted any more: groups that lose their records; it is to be deleted."""
        segment = self.segments[number]
        if segment is self._open:
            self._open = None
        segment.state = SegmentState.LEAVING
        groups = {copy.group.gid: copy.group for copy in segment.live.values()}
        for group in groups.values():
            self.forget_group(group)
        return list(groups.values())

    def deleted(self, number: int) -> None:
        """The file is gone."""
        segment = self.segments.pop(number)
        if segment.live or segment.ios:
            raise InvariantViolation(
                f"segment {number} is deleted with {len(segment.live)} records, {segment.ios} I/Os"
            )
        self._used -= segment.end

    def candidate(self) -> Segment | None:
        """The segment to give back next: an empty or mostly dead one, else the oldest. None when none is sealed."""
        sealed = [s for s in self.segments.values() if s.state is SegmentState.SEALED]
        if not sealed:
            return None
        emptiest = min(sealed, key=lambda s: (s.live_bytes / max(1, s.end), s.number))
        if emptiest.live_bytes < MOSTLY_DEAD * emptiest.end:
            return emptiest
        return min(sealed, key=lambda s: s.number)

    @property
    def leaving(self) -> bool:
        """A segment is on its way out."""
        return any(s.state in (SegmentState.LEAVING, SegmentState.DELETING) for s in self.segments.values())

    def validate(self) -> None:
        """Recount from scratch. Raises InvariantViolation."""
        used = live = 0
        for segment in self.segments.values():
            used += segment.end
            live += len(segment.live)
            end = total = 0
            for offset in sorted(segment.live):
                copy = segment.live[offset]
                place = copy.place
                if place is None or place.segment != segment.number or place.offset != offset or copy.group.dead:
                    raise InvariantViolation(f"I6: segment {segment.number} lists a copy at {offset} that is not there")
                if offset < end:
                    raise InvariantViolation(f"I6: records of segment {segment.number} overlap at {offset}")
                end = offset + place.size
                total += place.size
            if end > segment.end or total != segment.live_bytes or segment.ios < 0:
                raise InvariantViolation(
                    f"I6: segment {segment.number}: records end at {end} of {segment.end}, {total} live bytes of "
                    f"{segment.live_bytes} counted, {segment.ios} I/Os"
                )
        if used != self._used or live != self.num_live:
            raise InvariantViolation(
                f"I6: {self._used} bytes and {self.num_live} records counted; there are {used}, {live}"
            )
        if self.used_bytes > self._cap_bytes + self._segment_bytes and not self.foreign_bytes:
            raise InvariantViolation(f"I6: {self.used_bytes} bytes on disk; the cap is {self._cap_bytes}")
