"""The link between an engine and real store processes: what is saved is found, and whatever happens everything ends."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.link_harness import PART, PATIENCE_S, Engine, Gate, Node, content, faulty, keys, node
from tournant.kvstore.block import Part
from tournant.kvstore.client import StoreClient
from tournant.kvstore.groups import ROW
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.read_group import Answer, choose
from tournant.kvstore.slots import SlotState
from tournant.kvstore.token_bucket import Pace
from tournant.workers.link_reads import choose_here
from tournant.workers.store_link import StoreLink
from tournant.workers.transfer_messages import (
    HOST,
    NVME,
    Attached,
    Copied,
    Detached,
    DropStash,
    EndRead,
    Fetch,
    Fetched,
    Found,
    Leave,
    Lent,
    Load,
    Loaded,
    Lookup,
    ReadEnded,
    Save,
    Saved,
    SaveEntry,
    Stash,
    Stashed,
    Unstash,
    Unstashed,
    Used,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as found:
        yield found


# ---- without faults


def test_what_is_saved_is_found_and_loaded(store: Node) -> None:
    store.start()
    engine = store.engine()
    attached = engine.attached()
    assert (attached.credit, attached.slot_bytes, attached.host_bytes) == ((8,), 3 * 4096 - 96, 128 * 3 * 4096)
    chain = keys(20)
    entries = engine.fill(chain)
    save = engine.number()
    engine.submit(Save(save, tuple(entries[:8])))
    saved = engine.wait(Saved)
    assert saved == Saved(save, True, (), 8)
    copied = engine.wait(Copied)
    assert (copied.number, copied.num_bytes) == (save, 8 * engine.images.slot_bytes)
    engine.save(entries[8:])
    engine.rows[:] = 0
    found = engine.lookup([*chain, *keys(3, "other")])
    assert found.tiers == bytes([HOST] * 20)
    fetched = engine.fetch(found.read, 17)
    assert (fetched.count, fetched.num_bytes) == (17, 0)
    ended = engine.load(found.read, range(40, 55), skip=2)
    assert (ended.count, ended.corrupt, ended.num_bytes) == (15, 0, 15 * engine.images.slot_bytes)
    assert engine.holds(entries[2:17], 40)
    assert not engine.rows[:40].any()
    assert not engine.rows[55:].any()
    progress = [event.count for event in engine.events if isinstance(event, Loaded)]
    assert progress == [8]
    store.at_rest(8)


def test_blocks_of_both_tiers_come_back(store: Node) -> None:
    store.start(blocks=32, nvme=NvmeConfig(), nvme_bytes=8 << 20, segment_bytes=1 << 20)
    engine = store.engine(credit_blocks=4)
    engine.attached()
    chain = keys(48)
    entries = engine.fill(chain)
    for start in range(0, 48, 4):
        engine.save(entries[start : start + 4])
        store.wait_for(lambda found: found.nvme_records >= found.blocks)
    store.wait_for(lambda found: found.in_host < 48)
    total: Counter[int] = Counter()
    for start in reversed(range(0, 48, 8)):
        found = engine.lookup(chain[start : start + 8])
        assert len(found.tiers) == 8
        total.update(found.tiers)
        fetched = engine.fetch(found.read, 8)
        assert fetched.num_bytes == found.tiers.count(NVME) * engine.images.slot_bytes
        assert engine.load(found.read, range(48, 48 + fetched.count)).count == fetched.count == 8
        assert engine.holds(entries[start : start + 8], 48)
    assert total[HOST] > 0
    assert total[NVME] > 0
    status = store.status()
    assert (status.host_hits, status.nvme_hits) == (total[HOST], total[NVME])
    store.at_rest(4)


def test_two_links_share_a_store(store: Node) -> None:
    store.start()
    first, second = store.engine(), store.engine()
    first.attached()
    second.attached()
    chain = keys(6)
    entries = first.fill(chain)
    first.save(entries)
    assert second.bring(chain, 10).count == 6
    assert second.holds(entries, 10)
    store.at_rest(16)


def test_copiers_share_a_save(store: Node) -> None:
    store.start(blocks=512)
    engine = store.engine(num_copiers=4, credit_blocks=32)
    assert engine.attached().credit == (32,)
    entries = engine.fill(keys(30))
    save = engine.number()
    engine.submit(Save(save, tuple(entries), copiers=4))
    assert engine.wait(Saved).ok
    assert engine.bring(keys(30), 32).count == 30
    assert engine.holds(entries, 32)


def test_nothing_found_ends_the_read_at_once(store: Node) -> None:
    store.start()
    engine = store.engine()
    engine.attached()
    found = engine.lookup(keys(4))
    assert found.tiers == b""
    assert engine.ended(found.read).count == 0
    assert engine.lookup([]).tiers == b""
    engine.submit(EndRead(found.read), EndRead(999), Fetch(found.read, 3), Load(found.read, 0, (1,)), DropStash(5))
    assert engine.lookup(keys(4)).tiers == b""
    assert Counter(type(event) for event in engine.events if not isinstance(event, Attached)) == {
        Found: 3,
        ReadEnded: 3,
    }


def test_more_keys_and_reads_than_the_store_allows_wait_or_are_cut(store: Node) -> None:
    store.start(max_reads=2, max_keys=5, max_entries=3)
    engine = store.engine()
    engine.attached()
    chain = keys(8)
    engine.save(engine.fill(chain))
    reads = [engine.number() for _ in range(6)]
    engine.submit(*(Lookup(read, chain) for read in reads), Used(chain))
    for read in reads[:2]:
        assert engine.wait(Found, lambda event, read=read: event.read == read).tiers == bytes([HOST] * 5)  # type: ignore[misc]
    engine.submit(EndRead(reads[4]))  # waits for its turn
    assert engine.wait(Found, lambda event: event.read == reads[4]).tiers == b""
    for read in (0, 1, 2, 3, 5):
        assert len(engine.wait(Found, lambda event, read=reads[read]: event.read == read).tiers) == 5  # type: ignore[misc]
        engine.submit(EndRead(reads[read]))
        engine.ended(reads[read])
    store.at_rest(8)


def test_many_reads_at_once(store: Node) -> None:
    store.start(blocks=512, max_pinned_share=0.9)
    engine = store.engine(num_blocks=400)
    engine.attached()
    chains = [keys(8, str(number)) for number in range(40)]
    entries = [engine.fill(chain) for chain in chains]
    for number, chain in enumerate(chains):  # all share the first blocks of the pool, one after another
        entries[number] = engine.fill(chain)
        engine.save(entries[number])
    reads = {engine.number(): place for place in range(40)}
    engine.submit(*(Lookup(read, chains[place]) for read, place in reads.items()))
    for read, place in reads.items():
        assert len(engine.wait(Found, lambda event, read=read: event.read == read).tiers) == 8  # type: ignore[misc]
        engine.submit(Fetch(read, 8), Load(read, 0, tuple(range(8 * place, 8 * place + 8))))
    for read, place in reads.items():
        assert engine.ended(read).count == 8
        assert engine.holds(entries[place], 8 * place)
    store.at_rest(8)


# ---- refusals, damage, deadlines


def test_refused_entries_are_named_and_their_slots_come_back(store: Node) -> None:
    store.start()
    engine = store.engine()
    engine.attached()
    entries = engine.fill(keys(3))
    again = [SaveEntry(one.block, one.key, entries[0].version, 0, 0) for one in entries[:1]]  # a version written twice
    save = engine.number()
    engine.submit(Save(save, (*entries, *again)))
    saved = engine.wait(Saved)
    assert saved == Saved(save, True, (3,), 4)
    store.at_rest(8)


def test_a_save_beyond_the_credit_is_refused_in_part(store: Node) -> None:
    store.start()
    engine = store.engine(credit_blocks=2)
    engine.attached()
    entries = engine.fill(keys(5))
    save = engine.number()
    engine.submit(Save(save, tuple(entries)))
    saved = engine.wait(Saved)
    assert saved == Saved(save, True, (2, 3, 4), 2)
    store.at_rest(2)


def test_a_credit_that_the_store_does_not_give_is_cut(store: Node) -> None:
    store.start(blocks=128)
    engine = store.engine(credit_blocks=100)
    assert engine.attached().credit == (16,)  # half of the share, which leaves room for another engine
    store.at_rest(16)


@pytest.mark.parametrize(
    ("blocks", "credits"), [(4, (1,)), (32, (4, 2, 1)), (128, (16, 8, 4, 2)), (1024, (32, 32)), (12_000, (256,))]
)
def test_the_credit_is_a_share_of_the_pool_and_leaves_some_to_others(
    store: Node, blocks: int, credits: tuple[int, ...]
) -> None:
    store.start(blocks=blocks)
    for credit in credits:
        assert store.engine(credit_blocks=None).attached().credit == (credit,)
    store.at_rest(sum(credits))


def test_ranks_that_attach_at_once_all_get_credit(store: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has asked how much is lent before any of them has taken something."""
    barrier, connect = threading.Barrier(3), StoreLink._connect

    def connect_with_the_others(link: StoreLink, credit: int) -> tuple[StoreClient, ...]:
        barrier.wait(PATIENCE_S)
        return connect(link, credit)

    monkeypatch.setattr(StoreLink, "_connect", connect_with_the_others)
    store.start(blocks=128)
    engines = [store.engine(credit_blocks=None, num_sharing=3) for _ in range(3)]
    assert [engine.attached().credit for engine in engines] == [(5,)] * 3


def test_damaged_slots_cut_the_prefix_and_are_dropped(store: Node) -> None:
    store.start()
    engine = store.engine(**faulty(flip_every_save=5))
    engine.attached()
    chain = keys(8)
    entries = engine.fill(chain)
    engine.save(entries)
    ended = engine.bring(chain, 20)
    assert (ended.count, ended.corrupt) == (4, 1)
    assert engine.holds(entries[:4], 20)
    store.wait_for(lambda found: found.corrupt == 1)
    assert len(engine.lookup(chain).tiers) == 4
    engine.submit(*(EndRead(event.read) for event in engine.events if isinstance(event, Found)))
    store.at_rest(8)


def test_slots_damaged_before_a_load_cut_the_prefix(store: Node) -> None:
    store.start()
    engine = store.engine(**faulty(flip_every_load=3))
    engine.attached()
    chain = keys(6)
    engine.save(engine.fill(chain))
    ended = engine.bring(chain, 20)
    assert (ended.count, ended.corrupt) == (2, 1)
    store.wait_for(lambda found: found.corrupt == 1)
    store.at_rest(8)


def test_failed_copies_are_refused_or_cut_and_give_their_slots_back(store: Node) -> None:
    store.start()
    engine = store.engine(**faulty(fail_every_save=3, fail_every_load=2))
    engine.attached()
    chain = keys(2)
    entries = engine.fill(chain)
    save = engine.number()
    engine.submit(Save(save, (*entries, *engine.fill(keys(3, "other"), 8))))
    assert engine.wait(Saved) == Saved(save, True, (2,), 5)
    ended = engine.bring(chain, 20)
    assert (ended.count, ended.corrupt) == (1, 0)
    one = engine.number()
    engine.submit(Save(one, tuple(engine.fill(keys(1, "third"), 16))))
    assert engine.wait(Saved, lambda event: event.save == one) == Saved(one, False, (0,), 1)
    store.at_rest(8)


def test_a_late_disk_cuts_the_fetch(store: Node) -> None:
    slow = NvmeConfig(bytes_per_s=1)
    tier = {"nvme_bytes": 8 << 20, "segment_bytes": 1 << 20, "fetch_us": 100_000}
    store.start(nvme=NvmeConfig(), **tier)
    engine = store.engine()
    engine.attached()
    chain = keys(8)
    engine.save(engine.fill(chain))
    store.wait_for(lambda found: found.nvme_records == 8)
    assert store.process is not None
    store.process.stop()
    store.start(nvme=slow, **tier)
    engine.attached(after=len(engine.events))
    found = engine.lookup(chain)
    assert found.tiers == bytes([NVME] * 8)
    assert engine.fetch(found.read, 8).count == 0
    assert engine.load(found.read, [1, 2]).count == 0


# ---- stashes


def test_a_stash_comes_back(store: Node) -> None:
    store.start()
    engine = store.engine(credit_blocks=3)
    engine.attached()
    first, second, third, fourth = (engine.number() for _ in range(4))
    for block in range(4):
        engine.rows[block] = block + 1
    engine.submit(*(Stash(stash, block) for block, stash in enumerate((first, second, third, fourth))))
    for stash in (first, second, third):
        assert engine.wait(Stashed, lambda event, stash=stash: event.stash == stash).ok  # type: ignore[misc]
    assert engine.wait(Stashed, lambda event: event.stash == fourth) == Stashed(fourth, False, 0), "no credit is left"
    assert [event.number for event in engine.events if isinstance(event, Copied)] == [fourth, first, second, third]
    engine.rows[:] = 0
    engine.submit(Unstash(second, 9), DropStash(first), Unstash(first, 10), Unstash(77, 11))
    assert engine.wait(Unstashed, lambda event: event.stash == second) == Unstashed(second, True, 1)
    assert engine.wait(Lent) == Lent(1)
    assert engine.wait(Unstashed, lambda event: event.stash == first) == Unstashed(first, False, 0)
    assert engine.wait(Unstashed, lambda event: event.stash == 77) == Unstashed(77, False, 0)
    assert (engine.rows[9] == 2).all()
    assert not engine.rows[10:].any()
    engine.save(engine.fill(keys(2)))
    engine.submit(DropStash(third))
    engine.wait(Lent, after=1 + next(i for i, event in enumerate(engine.events) if isinstance(event, Lent)))
    store.at_rest(3)


def test_a_stash_that_is_dropped_while_it_is_copied_gives_its_slot_back(store: Node) -> None:
    store.start()
    engine = store.engine(images=Gate)
    gate = engine.images
    assert isinstance(gate, Gate)
    engine.attached()
    stash = engine.number()
    engine.submit(Stash(stash, 1))
    assert gate.entered.wait(PATIENCE_S)
    engine.submit(DropStash(stash))
    engine.lookup(keys(1))  # so that the order has been carried out
    gate.go_on.set()
    assert engine.wait(Stashed) == Stashed(stash, False, 1)


# ---- the end of reads


def test_a_read_can_be_ended_in_every_state(store: Node) -> None:
    store.start()
    engine = store.engine(images=Gate)
    gate = engine.images
    assert isinstance(gate, Gate)
    engine.attached()
    gate.go_on.set()
    chain = keys(20)
    entries = engine.fill(chain)
    engine.save(entries)
    gate.go_on.clear()
    gate.entered.clear()

    opening, found, fetching, fetched, loading, queued = (engine.number() for _ in range(6))
    engine.submit(Lookup(opening, chain), EndRead(opening))
    assert engine.ended(opening).count == 0
    assert engine.wait(Found, lambda event: event.read == opening).tiers == b""
    for read in (found, fetching, fetched, loading, queued):
        engine.submit(Lookup(read, chain))
        engine.wait(Found, lambda event, read=read: event.read == read)  # type: ignore[misc]
    engine.submit(EndRead(found), Fetch(fetching, 20), EndRead(fetching))
    assert engine.ended(found).count == engine.ended(fetching).count == 0
    engine.fetch(fetched, 20)
    engine.submit(EndRead(fetched))
    assert engine.ended(fetched).count == 0
    for read, first in ((loading, 20), (queued, 40)):
        engine.fetch(read, 20)
        engine.submit(Load(read, 0, tuple(range(first, first + 20))))
    assert gate.entered.wait(PATIENCE_S)
    engine.submit(EndRead(loading), EndRead(queued))  # in this order: the end of the second tells that both were taken
    assert engine.ended(queued).count == 0, "it need not wait for the copy before it"
    assert not [event for event in engine.events if isinstance(event, ReadEnded) and event.read == loading]
    gate.go_on.set()
    assert engine.ended(loading).count == 8, "what had begun is whole, nothing more was begun"
    assert engine.holds(entries[:8], 20)
    assert not engine.rows[28:].any()
    store.at_rest(8)
    assert Counter(event.read for event in engine.events if isinstance(event, ReadEnded)).most_common(1)[0][1] == 1


def test_a_load_without_a_fetch_ends_the_read(store: Node) -> None:
    store.start()
    engine = store.engine()
    engine.attached()
    chain = keys(2)
    engine.save(engine.fill(chain))
    found = engine.lookup(chain)
    assert engine.load(found.read, [5, 6]).count == 0
    assert not engine.rows[5:7].any()
    store.at_rest(8)


# ---- the store goes away


def everything_open(engine: Engine, gate: Gate, chain: tuple[bytes, ...]) -> dict[str, int]:
    """A read, save and stash in every state that waits for a copy or for the engine; numbers by name."""
    names = ("found", "fetched", "loading", "queued", "save", "stash", "kept", "unstash")
    number = {name: engine.number() for name in names}
    gate.go_on.set()
    engine.submit(Stash(number["kept"], 0), Stash(number["unstash"], 1))
    engine.wait(Stashed, lambda event: event.stash == number["unstash"])
    for name in names[:4]:
        engine.submit(Lookup(number[name], chain))
        engine.wait(Found, lambda event, read=number[name]: event.read == read)  # type: ignore[misc]
    gate.go_on.clear()
    gate.entered.clear()
    for name in names[1:4]:
        engine.fetch(number[name], len(chain))
    engine.submit(Load(number["loading"], 0, tuple(range(20, 30))), Load(number["queued"], 0, tuple(range(30, 40))))
    assert gate.entered.wait(PATIENCE_S)
    engine.submit(Unstash(number["unstash"], 50))
    engine.submit(Save(number["save"], tuple(engine.fill(keys(3, "more"), 10))), Stash(number["stash"], 5))
    engine.lookup(keys(1, "none"))  # all orders have been taken
    return number


def check_all_ended(engine: Engine, number: dict[str, int], detached: Detached) -> None:
    """Everything that `everything_open` began has ended, once, and before `Detached`."""
    before = engine.events[: engine.events.index(detached)]
    ended = Counter(event.read for event in before if isinstance(event, ReadEnded))
    assert {ended[number[name]] for name in ("found", "fetched", "loading", "queued")} == {1}
    assert set(ended.values()) == {1}
    assert [event.ok for event in before if isinstance(event, Saved) and event.save == number["save"]] == [False]
    assert [event.ok for event in before if isinstance(event, Stashed) and event.stash == number["stash"]] == [False]
    assert len([event for event in before if isinstance(event, Unstashed)]) == 1
    for name in ("save", "stash"):
        kinds = [
            type(event)
            for event in before
            if number[name] in (getattr(event, "number", 0), getattr(event, "save", 0), getattr(event, "stash", 0))
        ]
        assert kinds[0] is Copied
        assert len(kinds) == 2


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_the_loss_of_the_store_ends_everything(store: Node, how: str) -> None:
    store.start()
    engine = store.engine(images=Gate, timeout_s=PATIENCE_S if how == "killed" else 0.5)
    gate = engine.images
    assert isinstance(gate, Gate)
    engine.attached()
    gate.go_on.set()
    chain = keys(10)
    engine.save(engine.fill(chain))
    number = everything_open(engine, gate, chain)
    opening = engine.number()
    if how == "killed":
        store.kill()
    else:
        store.signal(signal.SIGSTOP)
        engine.submit(Lookup(opening, chain))  # one that shows that it does not answer
        assert engine.ended(opening).count == 0
    engine.ended(number["found"])
    assert not [event for event in engine.events if isinstance(event, Detached)], "copies are under way"
    gate.go_on.set()
    check_all_ended(engine, number, engine.wait(Detached))
    count = len(engine.events)
    engine.submit(Lookup(900, chain), Save(901, tuple(engine.fill(chain))), Stash(902, 1), Unstash(903, 1))
    engine.submit(Used(chain), Fetch(900, 1), DropStash(902))
    assert engine.ended(900).count == 0
    assert engine.wait(Unstashed, lambda event: event.stash == 903) == Unstashed(903, False, 0)
    assert engine.wait(Saved, lambda event: event.save == 901) == Saved(901, False, (), 0)
    assert engine.wait(Stashed, lambda event: event.stash == 902) == Stashed(902, False, 0)
    if how == "killed":
        store.start()
    else:
        store.signal(signal.SIGCONT)
    engine.attached(after=count)
    store.at_rest(8)
    assert len(engine.lookup(chain).tiers) == (0 if how == "killed" else 10)
    entries = engine.fill(keys(10, "new"))
    engine.save(entries)
    assert engine.bring(keys(10, "new"), 20).count == 10
    assert engine.holds(entries, 20)


@pytest.mark.parametrize("request_kind", ["open", "fetch", "report"])
def test_every_request_has_a_deadline(store: Node, request_kind: str) -> None:
    store.start()
    engine = store.engine(timeout_s=0.3)
    engine.attached()
    chain = keys(3)
    engine.save(engine.fill(chain))
    found = engine.lookup(chain)
    store.signal(signal.SIGSTOP)
    if request_kind == "open":
        engine.submit(Lookup(500, chain))
    elif request_kind == "fetch":
        engine.submit(Fetch(found.read, 3))
    else:
        engine.submit(Save(500, tuple(engine.fill(keys(2, "more"), 8))))
    assert request_kind in engine.wait(Detached).reason
    assert engine.ended(found.read).count == 0
    if request_kind == "report":
        assert not engine.wait(Saved, lambda event: event.save == 500).ok
    store.signal(signal.SIGCONT)
    engine.attached(after=len(engine.events))
    store.at_rest(8)


def test_a_store_that_reads_nothing_is_lost(store: Node) -> None:
    store.start()
    engine = store.engine(timeout_s=0.3)
    engine.attached()
    store.signal(signal.SIGSTOP)
    engine.submit(*(Used(keys(4000)) for _ in range(100)))  # more than a socket takes
    assert "has read nothing" in engine.wait(Detached).reason
    store.signal(signal.SIGCONT)
    engine.attached(after=len(engine.events))
    store.at_rest(8)


def test_orders_are_for_the_store_of_which_the_engine_knows(store: Node) -> None:
    """Those that were given before it heard of a loss are not carried out at the next store; `Leave` is."""
    store.start()
    engine = store.engine()
    engine.attached()
    store.kill()
    store.start()
    store.wait_for(lambda found: found.clients == 1)
    while not any(isinstance(event, Attached) for event in list(engine.link._events)):
        assert engine._happened.wait(PATIENCE_S)
        engine._happened.clear()
    entries = engine.fill(keys(4))
    engine.submit(Save(901, tuple(entries)), Lookup(902, keys(4)), Stash(903, 9), Unstash(903, 9))
    assert engine.wait(Saved) == Saved(901, False, (), 0)
    assert engine.ended(902).count == 0
    assert engine.wait(Stashed) == Stashed(903, False, 0)
    assert engine.wait(Unstashed) == Unstashed(903, False, 0)
    kinds = [type(event) for event in engine.events]
    assert kinds[:4] == [Attached, Detached, Attached, Copied]
    store.at_rest(8)
    assert engine.save(entries).num_lent == 4
    engine.submit(Leave(), Lookup(904, keys(4)))
    assert engine.ended(904).count == 0
    engine.attached(after=len(kinds))
    assert len(engine.lookup(keys(4)).tiers) == 4


def test_a_link_waits_for_its_store(store: Node) -> None:
    engine = store.engine()
    assert engine.lookup(keys(2)).tiers == b""
    store.start()
    engine.attached()
    store.at_rest(8)


def test_a_refusal_is_told_once(store: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tournant.workers.store_link.LAST_REFUSAL_S", 0.01)
    store.start(blocks=2)
    engine = store.engine(credit_blocks=1)  # three pages of six: more than a quarter
    store.wait_for(lambda found: "refuses this engine" in caplog.text)
    again = len(caplog.records)
    assert engine.lookup(keys(2)).tiers == b""
    store.kill()
    store.start(blocks=4)
    assert engine.attached().credit == (1,)
    assert caplog.text.count("refuses this engine") == 1, caplog.records[again:]


def test_a_closed_link_touches_nothing(store: Node) -> None:
    store.start()
    engine = store.engine(images=Gate)
    gate = engine.images
    assert isinstance(gate, Gate)
    engine.attached()
    entries = engine.fill(keys(4))
    engine.submit(Save(1, tuple(entries)), Lookup(2, keys(1, "x")))
    gate.go_on.set()
    engine.close(PATIENCE_S)
    assert [event for event in engine.events if isinstance(event, Saved)] == [Saved(1, True, (), 4)], "it was flushed"
    assert isinstance(engine.events[-1], Detached)
    store.wait_for(lambda found: found.clients == 0 and dict(found.pages)[SlotState.LENT] == 0)
    engine.submit(Lookup(3, keys(1)), Save(4, tuple(entries)))
    engine.poll()
    assert engine.events[-1] == Saved(4, False, (), 0)
    engine.close()
    other = store.engine()
    other.attached()
    assert other.bring(keys(4), 8).count == 4
    assert other.holds(entries, 8)


def test_slots_that_the_store_lacked_come_later(store: Node) -> None:
    store.start(blocks=16, max_pinned_share=1.0)
    first = store.engine(credit_blocks=2)
    first.attached()
    chain = keys(14)
    entries = first.fill(chain)
    for start in range(0, 14, 2):
        first.save(entries[start : start + 2])
    found = first.lookup(chain)
    assert len(found.tiers) == 14, "all slots are pinned or lent"
    second = store.engine(credit_blocks=2)
    assert second.attached().credit == (0,)
    first.submit(EndRead(found.read))
    assert second.wait(Lent) == Lent(2)
    second.save(second.fill(keys(2, "other")))
    store.at_rest(4)


# ---- at random


def test_a_store_that_comes_and_goes_while_everything_happens(store: Node) -> None:
    """A random history with kills and stops: whatever counts as loaded has its version's bytes, everything ends once,
    and in the end the store holds nothing for the engine but its credit.
    """
    rng = random.Random(7)
    tier = {"nvme": NvmeConfig(), "nvme_bytes": 8 << 20, "segment_bytes": 1 << 20, "fetch_us": 200_000}
    store.start(blocks=96, **tier)  # type: ignore[arg-type]
    faults = faulty(fail_every_save=29, flip_every_save=31, fail_every_load=37, flip_every_load=41)
    engine = store.engine(num_blocks=160, timeout_s=1.0, credit_blocks=8, **faults)
    engine.attached()
    history = _History(engine, rng)
    end = time.monotonic() + 5.0
    latest = end + PATIENCE_S  # on a busy machine little gets done between two faults
    kinds: Counter[str] = Counter()
    next_fault = time.monotonic() + 0.4
    while time.monotonic() < (end if min(history.num_loaded, history.num_saved) > 20 and len(kinds) == 2 else latest):
        history.act()
        history.take()
        if time.monotonic() > next_fault:
            next_fault = time.monotonic() + 0.8
            kind = rng.choice(["kill", "stop"])
            kinds[kind] += 1
            if kind == "kill":
                store.kill()
                store.start(blocks=96, **tier)  # type: ignore[arg-type]
            else:
                store.signal(signal.SIGSTOP)
                history.wait_until(lambda: history.detached)
                store.signal(signal.SIGCONT)
    history.finish()
    assert history.num_loaded > 20
    assert history.num_saved > 20
    assert kinds["kill"]
    assert kinds["stop"]
    store.at_rest(8)


class _History:
    """The engine of the random test: what it has ordered, what must still come, and the oracle."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine, self.rng = engine, rng
        self.detached = False
        self.credit = 8
        self.versions: dict[bytes, list[bytes]] = {}  # key -> contents that were saved, all incarnations
        self.free = list(range(160))
        self.reads: dict[int, dict[str, object]] = {}
        self.saves: dict[int, list[SaveEntry]] = {}
        self.newest_save = 0  # ordered since events were taken
        self.copied: set[int] = set()
        self.num_loaded = self.num_saved = 0
        self.seen = 0

    def act(self) -> None:
        engine, rng = self.engine, self.rng
        chain = keys(rng.randint(1, 12), str(rng.randint(0, 6)))
        count = min(len(chain), self.credit, 8, len(self.free))
        if rng.random() < 0.4 and count > 0 and not self.detached:
            entries = []
            for depth, key in enumerate(chain[:count]):
                block = self.free.pop()
                (entry,) = engine.fill([key], block)
                self.versions.setdefault(key, []).append(content(key, entry.version))
                entries.append(SaveEntry(block, key, entry.version, 5, depth))
            save = engine.number()
            self.saves[save] = entries
            self.newest_save = save
            self.credit -= count
            engine.submit(Save(save, tuple(entries), rng.choice([1, 1, 3])))
        elif len(self.reads) < 10:
            read = engine.number()
            # drawn once for each read: a chance at every turn would end them all on a fast machine
            end_after = rng.choice([Lookup, Fetch, Load] + 7 * [None])
            self.reads[read] = {"chain": chain, "blocks": [], "end_after": end_after}
            self._order(read, Lookup(read, chain))

    def _order(self, read: int, order: Lookup | Fetch | Load) -> None:
        """Of a read, which may not be wanted any more behind it."""
        self.engine.submit(order)
        if self.reads[read]["end_after"] is type(order):
            self.engine.submit(EndRead(read))

    def take(self) -> None:
        self.engine.poll()
        for event in itertools.islice(self.engine.events, self.seen, None):
            self._on(event)
        self.seen = len(self.engine.events)
        self.newest_save = 0

    def _on(self, event: object) -> None:
        match event:
            case Found(read, tiers) if tiers and read in self.reads:
                self._order(read, Fetch(read, len(tiers)))
            case Fetched(read, count) if read in self.reads:
                blocks = [self.free.pop() for _ in range(min(count, len(self.free)))]
                self.reads[read]["blocks"] = blocks
                self._order(read, Load(read, 0, tuple(blocks)))
            case ReadEnded(read, count):
                self._check_read(self.reads.pop(read), count)
            case Copied(number):
                assert number not in self.copied
                self.copied.add(number)
                self.free += [entry.block for entry in self.saves[number]]
            case Saved(save, ok, refused, num_lent):
                assert save in self.copied
                entries = self.saves.pop(save)
                if not self.detached:
                    self.credit += num_lent
                if ok:
                    self.num_saved += len(entries) - len(refused)
            case Lent(num_lent):
                self.credit += num_lent
            case Attached(_, (credit,)):
                self.detached, self.credit = False, credit
            case Detached():
                assert set(self.saves) <= {self.newest_save}, "2: what is open ends before"
                self.detached = True

    def _check_read(self, read: dict[str, object], count: int) -> None:
        blocks, chain = read["blocks"], read["chain"]
        assert isinstance(blocks, list)
        assert isinstance(chain, tuple)
        for key, block in zip(chain, blocks[:count], strict=False):
            assert self.engine.rows[block].tobytes() in self.versions[key], "bytes that nobody wrote"
            self.num_loaded += 1
        self.free += blocks

    def wait_until(self, condition: object) -> None:
        assert callable(condition)
        end = time.monotonic() + PATIENCE_S
        while not condition():
            self.act()
            self.take()
            assert time.monotonic() < end

    def finish(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while self.reads or self.saves or self.detached:
            self.engine.submit(*(EndRead(read) for read in self.reads))
            self.take()
            assert time.monotonic() < end, (self.reads, self.saves)
            time.sleep(0.001)


class _NotedPace(Pace):
    """Notes what it is to spend."""

    made: ClassVar[list[_NotedPace]] = []

    def __init__(self, per_s: float) -> None:
        super().__init__(0)
        self.per_s = per_s
        self.spent: list[int] = []
        self.made.append(self)

    def spend(self, amount: int) -> None:
        self.spent.append(amount)


def test_an_emulated_link_has_a_pace_in_each_direction(store: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tournant.workers.copy_lanes.Pace", _NotedPace)
    store.start()
    engine = store.engine(host_bytes_per_s=1 << 30)
    engine.attached()
    chain = keys(10)
    engine.save(engine.fill(chain))
    assert engine.bring(chain[:9], 20).count == 9
    down, up = _NotedPace.made
    assert {down.per_s, up.per_s} == {1 << 30}
    assert (sum(down.spent), sum(up.spent)) == (10 * engine.images.slot_bytes, 9 * engine.images.slot_bytes)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    """What a store may say of a chain: up to two versions a key, any parts, in host slots or not."""
    parts = [PART, Part(0, 2, 0, 1), Part(0, 2, 1, 2)]
    counts, rows = bytearray(), b""
    for _ in range(draw(st.integers(0, 5))):
        handles = draw(
            st.lists(st.tuples(st.integers(1, 2), st.integers(0, 2), st.booleans()), max_size=4, unique=True)
        )
        counts.append(len(handles))
        for counter, part, in_host in handles:
            rows += ROW.pack(7, counter, part, 100, 3, int(in_host), 5)
    return Answer(bytes(counts), rows, tuple(parts))


@given(answers())
def test_what_is_chosen_here_is_what_a_group_of_one_would_choose(answer: Answer) -> None:
    found = choose_here(answer, PART)
    assert [handle.version for handle in found] == [pick.version for pick in choose([answer], [PART])]
    for handle, shown in zip(found, answer.handles(), strict=False):
        assert handle in shown
        assert answer.parts[handle.part] == PART
    assert choose_here(answer, Part(9, 10, 0, 1)) == []


def test_rows_that_do_not_fit_their_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit counts of 2"):
        choose_here(Answer(b"\x02", b"\0" * ROW.size, (PART,)), PART)
