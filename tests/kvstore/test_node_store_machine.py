"""The node store core against a naive model, driven by Hypothesis: what is reported whole is read so, or missed.

The simulator (tests/simulation) has the volume and the faults; this has the shrinking.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tournant.kvstore.block import Part, Version
from tournant.kvstore.config import PAGE_BYTES, StoreConfig
from tournant.kvstore.disk_events import (
    CheckpointDone,
    CloseSegment,
    DeleteSegment,
    DiskError,
    DiskInstruction,
    ReadDone,
    ReadRecords,
    ReadResult,
    RecordAt,
    SegmentClosed,
    SegmentDeleted,
    WriteCheckpoint,
    WriteDone,
    WriteRecords,
)
from tournant.kvstore.events import (
    Attach,
    Attached,
    ClientClosed,
    ClientExited,
    CloseRead,
    Fetch,
    Fetched,
    Forget,
    HardPin,
    HardPinned,
    HardUnpin,
    Open,
    Opened,
    Report,
    Reported,
    ReportEntry,
    Send,
    Tick,
    Used,
)
from tournant.kvstore.node_store import Event, NodeStore
from tournant.kvstore.policies import EVICTION
from tournant.kvstore.read_group import Answer, choose
from tournant.kvstore.record import record_bytes

PARTS = (Part(0, 1, 0, 1), Part(0, 1, 1, 2))
SLOTS, CREDIT = 14, 2
RECORD = record_bytes(PAGE_BYTES)
KEYS = [bytes([number]) * 32 for number in range(6)]
RANKS = st.integers(0, 1)
CHAINS = st.integers(1, len(KEYS)).map(lambda count: tuple(KEYS[:count]))


class NodeStoreMachine(RuleBasedStateMachine):
    """Two ranks of one writer. made: (key, version) -> parts whose report was taken, which their checksums name."""

    @initialize(eviction=st.sampled_from(sorted(EVICTION)), nvme=st.booleans())
    def start(self, eviction: str, nvme: bool) -> None:
        """A small store and two attached ranks."""
        config = StoreConfig(
            host_bytes=SLOTS * PAGE_BYTES, nvme_bytes=RECORD * 16 if nvme else 0, segment_bytes=RECORD * 4,
            eviction=eviction, max_lent_share=0.6, pin_us=1000, fetch_us=500, io_us=2000, disk_retry_us=100,
            incomplete_reports=3, records_per_write=2, records_per_read=1,
        )  # fmt: skip
        self.core = NodeStore(config, 7, b"check")
        self.now = self.counter = self.read = self.request = 0
        self.made: dict[tuple[bytes, Version], set[int]] = {}
        self.disk: list[DiskInstruction] = []
        self.writer = 100
        self.next_client = 1
        self.hard: list[tuple[int, int]] = []
        self.opened: dict[tuple[int, int], tuple[tuple[bytes, ...], list[Version]]] = {}
        self.attach()

    def attach(self) -> None:
        """A group of ranks forms."""
        self.writer += 1
        self.clients = [self.next_client, self.next_client + 1]
        self.next_client += 2
        self.lent: list[list[tuple[int, int]]] = [[], []]
        self.seq = [0, 0]
        for rank, client in enumerate(self.clients):
            self.step(Attach(client, b"w" * 32, "fp32", b"check", self.writer, PARTS[rank], PARTS, PAGE_BYTES, CREDIT))

    def step(self, event: Event) -> list[object]:
        """One event; the replies to it."""
        replies: list[object] = []
        for instruction in self.core.step(self.now, event):
            if isinstance(instruction, Send):
                replies.append(instruction.reply)
                if isinstance(instruction.reply, Attached | Reported) and instruction.client in self.clients:
                    self.lent[self.clients.index(instruction.client)] += instruction.reply.lent
            elif isinstance(instruction, DiskInstruction):
                self.disk.append(instruction)
        return replies

    def checksum(self, key: bytes, version: Version, rank: int) -> int:
        """Stands for the bytes of a part."""
        return key[0] << 40 | version.counter << 8 | rank

    @rule(key=st.sampled_from(KEYS), only=st.sampled_from([None, None, None, 0, 1]))
    def publish(self, key: bytes, only: int | None) -> None:
        """A step of the group stores a block, or one rank fails to."""
        self.counter += 1
        version = Version(self.writer, self.counter)
        for rank, client in enumerate(self.clients):
            if only not in (None, rank) or not self.lent[rank]:
                continue
            page, generation = self.lent[rank].pop(0)
            self.seq[rank] += 1
            entry = ReportEntry(key, version, page, generation, PAGE_BYTES, self.checksum(key, version, rank))
            replies = self.step(Report(client, self.seq[rank], (entry,)))
            if any(isinstance(reply, Reported) and not reply.refused for reply in replies):
                self.made.setdefault((key, version), set()).add(rank)

    @rule(rank=RANKS, keys=CHAINS)
    def open(self, rank: int, keys: tuple[bytes, ...]) -> None:
        """What is shown was made whole, all parts of it, with the checksums its writer gave."""
        self.read += 1
        (reply,) = (r for r in self.step(Open(self.clients[rank], self.read, keys)) if isinstance(r, Opened))
        picks = [pick.version for pick in choose([self.checked(reply, keys)], PARTS)]
        if picks:
            self.opened[self.clients[rank], self.read] = (keys, picks)

    def checked(self, reply: Opened | Fetched | HardPinned, keys: tuple[bytes, ...]) -> Answer:
        """I1 to I3 on the handles of a reply."""
        answer = Answer(reply.counts, reply.rows, reply.parts)
        for key, handles in zip(keys, answer.handles(), strict=False):
            for handle in handles:
                rank = PARTS.index(reply.parts[handle.part])
                assert self.made[key, handle.version] == {0, 1}
                assert handle.checksum == self.checksum(key, handle.version, rank)
        return answer

    @precondition(lambda self: self.opened)
    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        """The leader's picks; what comes back at once is a prefix of them, in host slots."""
        client, read = data.draw(st.sampled_from(sorted(self.opened)))
        keys, picks = self.opened[client, read]
        for reply in self.step(Fetch(client, read, tuple(picks))):
            if isinstance(reply, Fetched) and reply.read == read:
                self.check_fetched(reply, keys, picks)

    def check_fetched(self, reply: Fetched, keys: tuple[bytes, ...], picks: list[Version]) -> None:
        """Only what was picked, all of it readable."""
        for handles, version in zip(self.checked(reply, keys).handles(), picks, strict=False):
            assert {handle.version for handle in handles} == {version}
            assert len(handles) == len(PARTS)
            assert all(handle.generation for handle in handles)

    @precondition(lambda self: self.opened)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """A read is over."""
        client, read = data.draw(st.sampled_from(sorted(self.opened)))
        del self.opened[client, read]
        self.step(CloseRead(client, read))

    @rule(rank=RANKS, keys=CHAINS)
    def use(self, rank: int, keys: tuple[bytes, ...]) -> None:
        """A request ends."""
        self.step(Used(self.clients[rank], keys))

    @precondition(lambda self: self.made)
    @rule(data=st.data(), rank=RANKS)
    def pin_hard(self, data: st.DataObject, rank: int) -> None:
        """Blocks stay where they are, or are not pinned at all."""
        key, version = data.draw(st.sampled_from(sorted(self.made, key=lambda ref: (ref[0], ref[1].counter))))
        self.request += 1
        client = self.clients[rank]
        for reply in self.step(HardPin(client, self.request, ((key, version),))):
            if isinstance(reply, HardPinned) and reply.pinned:
                self.checked(reply, (key,))
                self.hard.append((client, self.request))

    @precondition(lambda self: self.hard)
    @rule()
    def unpin_hard(self) -> None:
        """The kernels have ended."""
        self.step(HardUnpin(*self.hard.pop()))

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """A leader found a version incomplete."""
        key, version = data.draw(st.sampled_from(sorted(self.made, key=lambda ref: (ref[0], ref[1].counter))))
        self.step(Forget(self.clients[0], key, version))
        assert self.core.residency.index.find(key, version.writer_id, version.counter) is None

    @precondition(lambda self: self.disk)
    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "ok", "corrupt", "error", "full"]))
    def disk_ends(self, data: st.DataObject, outcome: str) -> None:
        """Some instruction to the disk ends, well or not."""
        instruction = self.disk.pop(data.draw(st.integers(0, len(self.disk) - 1)))
        error = None if outcome in ("ok", "corrupt") else DiskError("full" if outcome == "full" else "io", "injected")
        replies: list[object] = []
        match instruction:
            case WriteRecords(io, segment, offset, records):
                kept = records if error is None else records[: len(records) // 2]
                placed = [RecordAt(segment, offset + i * RECORD, RECORD, r.header) for i, r in enumerate(kept)]
                self.step(WriteDone(io, error, tuple(placed)))
            case ReadRecords(io, reads):
                kind = {"full": "error"}.get(outcome, outcome)
                result = ReadResult(kind, "", error if kind == "error" else None)
                replies = self.step(ReadDone(io, (result,) * len(reads)))
            case CloseSegment(io, segment):
                self.step(SegmentClosed(io, segment, error and DiskError("sync", "injected")))
            case DeleteSegment(io, segment):
                self.step(SegmentDeleted(io, segment, error))
            case WriteCheckpoint(io):
                self.step(CheckpointDone(io, error))
        for reply in replies:
            for client in self.clients:
                if isinstance(reply, Fetched) and (client, reply.read) in self.opened:
                    self.check_fetched(reply, *self.opened[client, reply.read])

    @rule(us=st.sampled_from([1, 100, 600, 5000, -3_600_000_000]))
    def time_passes(self, us: int) -> None:
        """A tick; the clock may have been set back."""
        self.now += us
        self.step(Tick())

    @rule(closed_first=st.booleans())
    def group_dies(self, closed_first: bool) -> None:
        """All ranks are killed and form again."""
        for client in self.clients:
            if closed_first:
                self.step(ClientClosed(client))
            self.step(ClientExited(client))
        self.opened.clear()
        self.hard.clear()
        self.attach()

    @invariant()
    def counts_agree(self) -> None:
        """A recount finds nothing; what was told to be lent is lent."""
        if not hasattr(self, "core"):
            return
        self.core.validate()
        for rank, client in enumerate(self.clients):
            lent = self.core.clients.by_number[client].lent
            assert Counter(self.lent[rank]) == Counter((slot.page, slot.generation) for slot in lent.values())


TestNodeStoreMachine = NodeStoreMachine.TestCase
TestNodeStoreMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
