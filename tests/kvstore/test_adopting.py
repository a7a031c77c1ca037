"""A client that adopts: what it may report, under whose version, and what that changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tournant.kvstore.block import Part, Version
from tournant.kvstore.config import PAGE_BYTES, StoreConfig
from tournant.kvstore.disk_events import RecordAt, WriteDone, WriteRecords
from tournant.kvstore.events import (
    Attach,
    Attached,
    ClientExited,
    Open,
    Opened,
    Refused,
    Report,
    Reported,
    ReportEntry,
    Send,
    Tick,
)
from tournant.kvstore.node_store import Event, NodeStore
from tournant.kvstore.read_group import Answer
from tournant.kvstore.record import record_bytes
from tournant.kvstore.slots import SlotState

PARTS = (Part(0, 1, 0, 1), Part(0, 1, 1, 2))
KEYS = [bytes([number]) * 32 for number in range(8)]
FAR = Version(1 << 60, 5)
RECORD = record_bytes(PAGE_BYTES)
ENGINE, ADOPTER, OTHER = 1, 2, 3


class Core:
    """A store with an engine of one or two ranks as clients 1 (and 11), and slots that were lent by client."""

    def __init__(self, nvme: bool = False) -> None:
        config = StoreConfig(
            32 * PAGE_BYTES, nvme_bytes=RECORD * 16 if nvme else 0, segment_bytes=RECORD * 4, max_lent_share=0.6
        )
        self.core = NodeStore(config, 7, b"check")
        self.lent: dict[int, list[tuple[int, int]]] = {}
        self.seq: dict[int, int] = {}
        self.writes: list[WriteRecords] = []

    def step(self, event: Event) -> list[object]:
        replies = []
        for one in self.core.step(1000, event):
            if isinstance(one, Send):
                replies.append(one.reply)
                if isinstance(one.reply, Attached | Reported):
                    self.lent.setdefault(one.client, []).extend(one.reply.lent)
            elif isinstance(one, WriteRecords):
                self.writes.append(one)
        self.core.validate()
        return replies

    def attach(
        self, client: int, part: Part = PARTS[0], *, parts: tuple[Part, ...] = (), adopts: bool = False,
        weights: bytes = b"w" * 32, form: str = "fp32", writer: int = 100, credit: int = 4,
    ) -> object:  # fmt: skip
        event = Attach(client, weights, form, b"check", writer, part, parts or (part,), PAGE_BYTES, credit, adopts)
        (reply,) = self.step(event)
        return reply

    def report(self, client: int, key: bytes, version: Version, checksum: int = 9, **changes: int) -> bool:
        """Whether the entry was taken."""
        page, generation = self.lent[client].pop(0)
        entry = ReportEntry(
            key, version, changes.get("page", page), changes.get("generation", generation),
            changes.get("length", PAGE_BYTES), checksum, 50, 0, 3,
        )  # fmt: skip
        self.seq[client] = self.seq.get(client, 0) + 1
        (reply,) = (r for r in self.step(Report(client, self.seq[client], (entry,))) if isinstance(r, Reported))
        if reply.refused:
            self.lent[client].append((page, generation))
        return not reply.refused

    def shown(self, keys: list[bytes], client: int = ENGINE) -> list[set[tuple[Version, Part]]]:
        self.seq[-client] = read = self.seq.get(-client, 0) + 1
        (reply,) = (r for r in self.step(Open(client, read, tuple(keys))) if isinstance(r, Opened))
        answer = Answer(reply.counts, reply.rows, reply.parts)
        return [{(one.version, reply.parts[one.part]) for one in key} for key in answer.handles()]


@pytest.fixture
def store() -> Iterator[Core]:
    made = Core()
    made.attach(ENGINE)
    made.attach(ADOPTER, adopts=True, writer=0)
    yield made
    made.core.validate()


def test_a_copy_is_shown_under_its_writers_version(store: Core) -> None:
    assert store.report(ADOPTER, KEYS[0], FAR)
    assert store.shown(KEYS) == [{(FAR, PARTS[0])}]
    stats = store.core.stats
    assert (stats.adopted, stats.reported) == (1, 0)
    group = store.core.residency.index.by_key[KEYS[0]]
    assert (group.cost_us, group.depth) == (50, 3)


def test_a_part_that_is_here_keeps_its_slot_lent(store: Core) -> None:
    assert store.report(ADOPTER, KEYS[0], FAR)
    assert not store.report(ADOPTER, KEYS[0], FAR)
    assert len(store.lent[ADOPTER]) == 4
    assert store.report(ADOPTER, KEYS[0], Version(8, 8)), "another version of the key is another block"
    assert store.shown(KEYS) == [{(FAR, PARTS[0]), (Version(8, 8), PARTS[0])}]
    assert store.report(ADOPTER, KEYS[0], Version(9, 9))
    assert len(store.shown(KEYS)[0]) == 2, "two versions at most"


@pytest.mark.parametrize(
    "changes", [{"generation": 77}, {"page": 31}, {"length": PAGE_BYTES + 1}, {"length": 0}], ids=str
)
def test_only_what_fills_a_slot_that_is_lent_counts(store: Core, changes: dict[str, int]) -> None:
    assert not store.report(ADOPTER, KEYS[0], FAR, **changes)
    assert store.shown(KEYS) == []


def test_a_slot_of_another_client_is_not_its_to_report(store: Core) -> None:
    page, generation = store.lent[ENGINE][0]
    assert not store.report(ADOPTER, KEYS[0], FAR, page=page, generation=generation)


def test_the_parts_of_a_block_join(store: Core) -> None:
    """Also of one whose first part lies on NVMe already: it is written down again, whole."""
    store.attach(OTHER, PARTS[1], adopts=True, writer=0)
    assert store.report(ADOPTER, KEYS[0], FAR)
    assert store.report(OTHER, KEYS[0], FAR)
    assert store.shown(KEYS) == [{(FAR, PARTS[0]), (FAR, PARTS[1])}]


def test_the_parts_of_a_block_join_beside_a_disk() -> None:
    store = Core(nvme=True)
    store.attach(ENGINE)
    store.attach(ADOPTER, adopts=True, writer=0)
    store.attach(OTHER, PARTS[1], adopts=True, writer=0)
    assert store.report(ADOPTER, KEYS[0], FAR)
    store.step(Tick())
    (write,) = store.writes
    assert not store.report(OTHER, KEYS[0], FAR), "while its first part is being written"
    store.step(WriteDone(write.io, None, (RecordAt(write.segment, write.offset, RECORD, write.records[0].header),)))
    assert store.report(OTHER, KEYS[0], FAR)
    store.step(Tick())
    assert [len(one.records) for one in store.writes] == [1, 2]


def test_a_block_that_a_writer_here_has_not_completed_is_the_writers() -> None:
    store = Core()
    store.attach(ENGINE, parts=PARTS)
    store.attach(11, PARTS[1], parts=PARTS)
    store.attach(ADOPTER, PARTS[1], adopts=True, writer=100)
    version = Version(100, 1)
    assert store.report(ENGINE, KEYS[0], version)
    assert not store.report(ADOPTER, KEYS[0], version)
    assert store.shown(KEYS) == []
    assert store.report(11, KEYS[0], version)
    assert store.shown(KEYS) == [{(version, PARTS[0]), (version, PARTS[1])}]


def test_an_adopter_is_no_writer(store: Core) -> None:
    """It may come and go under any writer id, and ends no block of it."""
    store.attach(OTHER, adopts=True, writer=100)
    assert store.core.clients.writers[100].clients == 1
    store.step(ClientExited(OTHER))
    assert store.core.clients.writers[100].clients == 1
    assert store.report(ENGINE, KEYS[0], Version(100, 1))
    assert not store.report(ENGINE, KEYS[1], FAR), "a writer reports its own versions alone"


def test_it_serves_engines_that_are_here(store: Core) -> None:
    other = store.attach(OTHER, adopts=True, weights=b"v" * 32)
    assert isinstance(other, Refused)
    assert "an engine of its weights" in other.message
    assert isinstance(store.attach(4, adopts=True, form="fp8"), Refused)
    assert store.report(ADOPTER, KEYS[0], FAR)
    store.step(ClientExited(ENGINE))
    assert not store.report(ADOPTER, KEYS[1], FAR), "nobody wants it any more"
    store.attach(5, form="fp8")
    assert store.core.residency.index.by_key == {}, "and it keeps no blocks in an old form"
    assert not store.report(ADOPTER, KEYS[2], FAR)


def test_its_credit_comes_back_at_its_exit(store: Core) -> None:
    pages = store.core.residency.pool.pages
    assert pages[SlotState.LENT] == 8
    assert store.report(ADOPTER, KEYS[0], FAR)
    assert pages[SlotState.LENT] == 8
    store.step(ClientExited(ADOPTER))
    assert pages[SlotState.LENT] == 4
    assert store.shown(KEYS) == [{(FAR, PARTS[0])}]
