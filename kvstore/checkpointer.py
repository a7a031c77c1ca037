"""Checkpoints of the NVMe index, made in slices so that no step of the core takes long.

Owns when one is due and what it says; segment_log.py owns what is where. A checkpoint covers sealed segments only, so a
record that moves while it is made lies in a segment that the next start scans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tournant.kvstore.disk_events import RecordAt, SegmentCover
from tournant.kvstore.groups import Copy
from tournant.kvstore.record import RecordHeader
from tournant.kvstore.segment_log import SegmentLog, SegmentState

SLICE = 4096  # records per tick


class Checkpointer:
    """Decides by the number of segments sealed since the last one; the work per sealed segment stays bounded."""

    def __init__(self, log: SegmentLog, header: Callable[[Copy], RecordHeader], every_segments: int) -> None:
        self._log = log
        self._header = header
        self._every = every_segments
        self._sealed = 0
        self._left: Iterator[Copy] | None = None
        self._records: list[RecordAt] = []
        self._covers: tuple[SegmentCover, ...] = ()

    def sealed(self) -> None:
        """One more segment is sealed."""
        self._sealed += 1

    @property
    def due(self) -> bool:
        """Enough is new for another one: at least half as many segments as there are."""
        return self._sealed >= max(self._every, len(self._log.segments) // 2)

    @property
    def running(self) -> bool:
        """One is being made."""
        return self._left is not None

    def begin(self) -> None:
        """Start to make one."""
        sealed = [s for s in self._log.segments.values() if s.state is SegmentState.SEALED]
        self._sealed = 0
        self._records = []
        self._covers = tuple(SegmentCover(s.number, s.end) for s in sealed)
        self._left = iter([copy for s in sealed for copy in s.live.values()])

    def go_on(self) -> tuple[tuple[SegmentCover, ...], tuple[RecordAt, ...]] | None:
        """Another slice; what to write when it was the last."""
        if self._left is None:
            return None
        for _ in range(SLICE):
            copy = next(self._left, None)
            if copy is None:
                break
            place = copy.place
            if place is not None:
                self._records.append(RecordAt(place.segment, place.offset, place.size, self._header(copy)))
        else:
            return None
        self._left = None
        covers = tuple(cover for cover in self._covers if cover.segment in self._log.segments)
        known = {cover.segment for cover in covers}
        records = tuple(at for at in self._records if at.segment in known)
        self._records = []
        return covers, records
