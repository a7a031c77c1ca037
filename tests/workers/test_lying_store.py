"""A store that lies or is broken costs hits and nothing else: no lane, no step, no memory."""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workers.link_harness import PATIENCE_S, Engine, Gate, content, faulty, keys, node
from tests.workers.lying_store import Flood, Lie, LyingStore, changed, lying_store
from tournant.kvstore.block import Part
from tournant.kvstore.client import Identity
from tournant.kvstore.config import PAGE_BYTES, StoreConfig
from tournant.kvstore.errors import StoreRefused
from tournant.kvstore.events import Attach, Drain, Fetch, Open, Report
from tournant.kvstore.events import Refused as RefusedReply
from tournant.kvstore.groups import ROW
from tournant.kvstore.host_tier import HostMemory
from tournant.kvstore.local_store import LocalStore
from tournant.kvstore.report_book import Lent as LentSlot
from tournant.workers.copy_lanes import CopyDown, CopyLanes, Job
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.store_link import SHUTTING_DOWN
from tournant.workers.transfer_messages import (
    BlockImages,
    Copied,
    Detached,
    Event,
    Found,
    Load,
    Lookup,
    ReadEnded,
    Refused,
    Save,
    Saved,
)
from tournant.workers.transfer_messages import Fetch as FetchOrder

OUTSIDE = 1_000_000  # a page that no pool of these tests has
ROW_FIELDS = ("writer_id", "counter", "part", "length", "page", "generation", "checksum")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LyingStore]:
    with lying_store(tmp_path / "store.socket") as found:
        yield found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Engine]]:
    """What makes an engine, which tries to attach at once."""
    made: list[Engine] = []
    yield lambda: (made.append(Engine(tmp_path / "store.socket")), made[-1])[1]
    for engine in made:
        engine.close()


def check_that_all_works(engine: Engine, name: str, first: int = 0) -> None:
    """What is saved now comes back: both lanes and the link live."""
    entries = engine.fill(keys(4, name), first)
    engine.save(entries)
    assert engine.bring(keys(4, name), first + 20).count == 4
    assert engine.holds(entries, first + 20)


def with_rows(**new: int) -> Lie:
    """The honest answer with other fields in all of its rows."""
    return lambda _, answer: replace(
        answer,
        rows=b"".join(
            ROW.pack(*(dict(zip(ROW_FIELDS, row, strict=True)) | new).values()) for row in ROW.iter_unpack(answer.rows)
        ),
    )


def more(_: Any, answer: Any) -> Any:
    """The same blocks again behind those that were asked for."""
    return replace(answer, counts=answer.counts * 9, rows=answer.rows * 9)


LIES: dict[str, tuple[type, Lie]] = {
    "more found than asked": (Open, more),
    "found without end": (Open, lambda _, answer: Flood(answer)),
    "rows that do not fit": (Open, changed(counts=b"\1")),
    "more fetched than asked": (Fetch, more),
    "fetched outside": (Fetch, with_rows(page=OUTSIDE)),
    "fetched beyond": (Fetch, with_rows(length=1 << 30)),
    "other versions": (Fetch, with_rows(counter=99)),
    "lent outside": (Report, changed(lent=((OUTSIDE, 1),))),
    "lent at the end": (Report, changed(lent=((40 * 3 - 1, 1),))),
    "lent without end": (Report, changed(lent=tuple((page, 7) for page in range(0, 60, 3)))),
    "refused twice": (Report, changed(refused=(0, 0))),
    "refused what was not reported": (Report, changed(refused=(50,))),
}


@pytest.mark.parametrize("name", LIES)
def test_a_reply_that_makes_no_sense_is_a_lost_store(
    store: LyingStore, start: Callable[[], Engine], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    engine = start()
    engine.attached()
    check_that_all_works(engine, "before")
    question, lie = LIES[name]
    store.lies[question] = lie
    save, read = engine.number(), engine.number()
    engine.submit(Lookup(read, keys(4, "before")))
    if question is Report:
        engine.submit(Save(save, tuple(engine.fill(keys(3), 8))))
    if question is Fetch:
        engine.wait(Found, lambda event: event.read == read)
        engine.submit(FetchOrder(read, 2), Load(read, 0, (50, 51)))
    detached = engine.wait(Detached)
    ended = engine.events[: engine.events.index(detached)]
    assert [event.read for event in ended if isinstance(event, ReadEnded)].count(read) == 1
    if question is Report:
        kinds = (event for event in ended if save in (getattr(event, "number", 0), getattr(event, "save", 0)))
        assert Counter(map(type, kinds)) == {Copied: 1, Saved: 1}
    store.lies.clear()
    engine.attached(after=engine.events.index(detached))
    check_that_all_works(engine, "after", 4)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("lent", [((OUTSIDE, 1),), tuple((page, 1) for page in range(0, 120, 3))])
def test_slots_that_make_no_sense_are_not_attached_to(
    store: LyingStore, start: Callable[[], Engine], caplog: pytest.LogCaptureFixture, lent: tuple[tuple[int, int], ...]
) -> None:
    store.lies[Attach] = changed(lent=lent)
    engine = start()
    wait_until(lambda: store.num_attached > 2)
    store.lies.clear()
    engine.attached()
    check_that_all_works(engine, "after")
    assert caplog.text.count("makes no sense") == 1
    assert "Traceback" not in caplog.text


def test_a_store_that_is_broken_again_and_again_is_tried_less_and_less(
    store: LyingStore, start: Callable[[], Engine]
) -> None:
    store.lies[Open] = more
    engine = start()
    paces = []
    for number in range(4):
        seen = len(engine.events)
        engine.attached(after=seen if number else 0)
        engine.save(engine.fill(keys(1, str(number))))
        engine.submit(Lookup(engine.number(), keys(1, str(number))))
        engine.wait(Detached, after=seen)
        paces.append(engine.link._retry_s)
    assert paces == [0.1, 0.2, 0.4, 0.8]
    store.lies.clear()
    engine.attached(after=len(engine.events))


def wait_until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_memory_that_is_not_there_is_not_mapped(
    store: LyingStore, start: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that would have to be found at the first touch."""
    sparse = [os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for _ in range(2)]
    for fd, size in zip(sparse, (1 << 28, 1 << 19), strict=True):
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    monkeypatch.setattr(store, "passed", lambda: sparse)
    engine = start()
    found = engine.wait(Refused, lambda event: event.lasting)
    assert "cannot be a pool" in found.reason
    monkeypatch.undo()
    engine.attached()
    check_that_all_works(engine, "after")
    for fd in sparse:
        os.close(fd)


# ---- refusals


def test_a_refusal_lasts_when_it_comes_twice_and_nobody_else_is_there(
    store: LyingStore, start: Callable[[], Engine]
) -> None:
    store.lies[Attach] = lambda *_: RefusedReply("it never fits")
    engine = start()
    engine.wait(Refused, lambda event: event.lasting)
    assert [event for event in engine.events if isinstance(event, Refused)][:2] == [
        Refused("it never fits", False),
        Refused("it never fits", True),
    ]


def test_a_refusal_may_end_with_the_others(store: LyingStore, start: Callable[[], Engine]) -> None:
    store.lies[Attach] = lambda *_: RefusedReply("2 clients have it all")
    store.status["clients"] = 2
    engine = start()
    count = lambda: sum(isinstance(event, Refused) for event in engine.events)  # noqa: E731
    wait_until(lambda: (engine.poll(), count() > 3)[1])
    assert not any(event.lasting for event in engine.events if isinstance(event, Refused))
    store.lies.clear()
    engine.attached()


def test_a_store_that_shuts_down_does_not_refuse(store: LyingStore, start: Callable[[], Engine]) -> None:
    answered: list[Any] = []
    store.lies[Attach] = lambda _, answer: (answered.append(answer), RefusedReply(f"the store is {SHUTTING_DOWN}"))[1]
    engine = start()
    wait_until(lambda: len(answered) > 3)
    store.lies.clear()
    engine.attached()
    assert not [event for event in engine.events if isinstance(event, Refused)]


def test_a_real_store_that_shuts_down_says_so() -> None:
    with LocalStore(StoreConfig(64 * PAGE_BYTES)) as store:
        store.shell.handle(Drain())
        with pytest.raises(StoreRefused, match=SHUTTING_DOWN):
            store.attach(Identity(b"w" * 32, "bf16", 1, Part(0, 1, 0, 1), (Part(0, 1, 0, 1),), PAGE_BYTES, 1))


# ---- lanes and the log


class Odd:
    """Images that fail for a reason which no device gives."""

    def __init__(self, images: BlockImages) -> None:
        self.slot_bytes, self.image_bytes = images.slot_bytes, images.image_bytes

    def save(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        raise KeyError("a bug\nin two lines")

    def load(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        raise KeyError("a bug")


@pytest.mark.parametrize("config", [{"images": Odd}, faulty(fail_every_save=1)], ids=["odd", "faulty"])
def test_blocks_that_cannot_be_copied_fill_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any]
) -> None:
    with node(tmp_path) as store:
        store.start()
        engine = store.engine(**config)
        engine.attached()
        for number in range(20):
            save = engine.number()
            engine.submit(Save(save, tuple(engine.fill(keys(8, str(number))))))
            assert not engine.wait(Saved, lambda event, save=save: event.save == save).ok  # type: ignore[misc]
    lines = [record.getMessage() for record in caplog.records if "could not be copied" in record.getMessage()]
    assert len(lines) == 1
    assert "\n" not in caplog.text.split("could not be copied")[1].splitlines()[0]
    assert "Traceback" not in caplog.text
    if config.get("images") is Odd:
        assert "KeyError: 'a bug\\nin two lines' (test_lying_store.py:" in lines[0]


def test_a_lane_outlives_a_slot_outside_the_pool(tmp_path: Path) -> None:
    events: list[Event] = []
    told: list[Job] = []
    images = Engine(tmp_path / "nothing").images
    memory = HostMemory.create(6 * PAGE_BYTES)
    lanes = CopyLanes(images, OffloadConfig("/nowhere"), events.append, told.append)
    for number, page in enumerate((OUTSIDE, 0), 1):
        place = (LentSlot(page, 1), images.slot_bytes)
        lanes.submit(CopyDown(number, memory, [3], 0.0, lambda job: None, places=[place]))
    wait_until(lambda: len(told) == 2)
    lanes.close()
    assert [[digest is not None for digest in job.checksums] for job in told if isinstance(job, CopyDown)] == [
        [False],
        [True],
    ]
    assert [event.num_bytes for event in events if isinstance(event, Copied)] == [0, images.slot_bytes]
    memory.close()


def test_a_link_whose_copy_hangs_is_closed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tournant.workers.store_link.CLOSE_S", 0.05)
    with node(tmp_path) as store:
        store.start()
        engine = store.engine(images=Gate)
        gate = engine.images
        assert isinstance(gate, Gate)
        engine.attached()
        (entry,) = engine.fill(keys(1))
        engine.submit(Save(1, (entry,)))
        assert gate.entered.wait(PATIENCE_S)
        engine.close(0.0)
        assert "a copy hangs" in caplog.text
        assert engine.link._thread.is_alive()
        gate.go_on.set()
        engine.link._thread.join(PATIENCE_S)
        assert not engine.link._thread.is_alive()
        assert content(entry.key, entry.version) == engine.rows[0].tobytes()
