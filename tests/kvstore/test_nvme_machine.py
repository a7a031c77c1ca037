"""The NVMe tier against a naive model: a list of records per segment, each whole or damaged."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tests.helpers.nvme import Pool, TestTier, payload
from tournant.kvstore.block import Version
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_events import (
    CloseSegment,
    DeleteSegment,
    ReadRecords,
    RecordAt,
    SegmentCover,
    WriteCheckpoint,
    WriteRecords,
)
from tournant.kvstore.nvme_folder import segment_name
from tournant.kvstore.record import padded


@dataclass(eq=False)
class Known:
    """A record as the model knows it. frame_bad: header or trailer is damaged, so that a scan leaves it out."""

    at: RecordAt
    good: bool = True
    frame_bad: bool = False


class NvmeMachine(RuleBasedStateMachine):
    """Records of growing segments on real files."""

    records = Bundle("records")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="nvme-machine-"))
        self.pool = Pool(256)
        self.segments: dict[int, list[Known]] = {}
        self.current, self.end = 1, 0
        self.number = self.io = 0
        self.covered: dict[int, int] = {}
        self.checkpointed: set[Known] = set()

    @initialize(order=st.sampled_from(["fcfs", "sstf", "scan"]), direct=st.booleans())
    def start(self, order: str, direct: bool) -> None:
        self.config = {"order": order, "direct": direct, "workers": 2}
        self.tier = TestTier(self.folder, pool=self.pool, **self.config)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            assert self.tier.close()
        shutil.rmtree(self.folder)

    def next_io(self) -> int:
        self.io += 1
        return self.io

    def alive(self) -> list[Known]:
        return [known for segment in sorted(self.segments) for known in self.segments[segment]]

    @rule(
        target=records, lengths=st.lists(st.integers(1, 3 * PAGE_BYTES), min_size=1, max_size=4), gap=st.integers(0, 2)
    )
    def write(self, lengths: list[int], gap: int) -> object:
        self.end += gap * PAGE_BYTES
        numbers = range(self.number + 1, self.number + 1 + len(lengths))
        self.number += len(lengths)
        run = tuple(self.tier.to_write(number, length) for number, length in zip(numbers, lengths, strict=True))
        done = self.tier.do(WriteRecords(self.next_io(), self.current, self.end, run))
        assert done.error is None
        assert [record.header.length for record in done.records] == lengths
        made = [Known(record) for record in done.records]
        self.segments.setdefault(self.current, []).extend(made)
        self.end = done.records[-1].offset + done.records[-1].size
        return multiple(*made)

    @rule(asked=st.lists(records, min_size=1, max_size=4))
    def read(self, asked: list[Known]) -> None:
        reads = tuple(self.tier.to_read(known.at) for known in asked)
        done = self.tier.do(ReadRecords(self.next_io(), reads))
        alive = self.alive()
        for known, read, result in zip(asked, reads, done.results, strict=True):
            assert result.outcome == ("ok" if known.good and known in alive else "corrupt")
            if result.outcome == "ok":
                header = read.header
                assert self.pool.get(read.slot, header.length) == payload(header.version.counter, header.length)

    @rule(known=records, other=records)
    def read_another(self, known: Known, other: Known) -> None:
        """At the place of one record, another one or another version is asked for."""
        wrong = replace(known.at, header=replace(known.at.header, version=Version(1, 1)))
        if known is not other and known.at.size == other.at.size:
            wrong = replace(known.at, header=other.at.header)
        done = self.tier.do(ReadRecords(self.next_io(), (self.tier.to_read(wrong),)))
        assert done.results[0].outcome == "corrupt"

    @rule()
    def close_segment(self) -> None:
        if self.current in self.segments:
            assert self.tier.do(CloseSegment(self.next_io(), self.current)).error is None
        self.current, self.end = self.current + 1, 0

    @rule(known=records)
    def delete_segment(self, known: Known) -> None:
        number = known.at.segment
        assert self.tier.do(DeleteSegment(self.next_io(), number)).error is None
        self.segments.pop(number, None)
        if number == self.current:
            self.current, self.end = self.current + 1, 0

    @rule()
    def checkpoint(self) -> None:
        """Of all segments but the current one."""
        sealed = [segment for segment in self.segments if segment != self.current]
        covers = tuple(SegmentCover(segment, self._length(segment)) for segment in sealed)
        known = [known for segment in sealed for known in self.segments[segment]]
        records = tuple(one.at for one in known)
        assert self.tier.do(WriteCheckpoint(self.next_io(), self.current + 1, covers, records)).error is None
        self.covered = {cover.segment: cover.covered for cover in covers}
        self.checkpointed = set(known)

    @rule(known=consumes(records), where=st.sampled_from(["header", "payload", "trailer"]), bit=st.integers(0, 7))
    def flip(self, known: Known, where: str, bit: int) -> None:
        """Damage a record of a closed segment behind the tier's back."""
        if known not in self.alive():
            return
        body = padded(known.at.header.length)
        at = known.at.offset + {"header": 40, "payload": PAGE_BYTES, "trailer": PAGE_BYTES + body + 40}[where]
        with (self.folder / segment_name(known.at.segment)).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << bit]))
        known.good = False
        known.frame_bad = where != "payload"

    @rule()
    def reopen(self) -> None:
        assert self.tier.close()
        self.tier = TestTier(self.folder, pool=self.pool, **self.config)
        found = self.tier.found
        expected = [
            known.at
            for known in self.alive()
            if (known in self.checkpointed and known.at.segment in self.covered) or not known.frame_bad
        ]
        assert list(found.records) == expected
        assert found.checkpoint == ""
        assert found.next_segment > max(self.segments, default=0)
        assert found.foreign_bytes == 0
        self.current, self.end = max(self.current + 1, found.next_segment), 0

    @invariant()
    def nothing_is_left_over(self) -> None:
        if hasattr(self, "tier"):
            assert self.tier.events.empty()
            assert self.tier.tier.stats().queued == 0

    def _length(self, segment: int) -> int:
        return (self.folder / segment_name(segment)).stat().st_size


TestNvmeMachine = NvmeMachine.TestCase
