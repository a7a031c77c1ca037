"""Who is served, with how much: numeric forms of KV, sizes of slots, credit, limits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kvstore.store_harness import SLOT, Store, keys, read, write, writer
from tournant.kvstore.block import Part, Version
from tournant.kvstore.client import Identity, StoreClient
from tournant.kvstore.clients import MAX_CREDIT
from tournant.kvstore.config import MAX_RUN_RECORDS, PAGE_BYTES
from tournant.kvstore.errors import StoreRefused
from tournant.kvstore.events import Tick
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.report_book import Lent

TIER: dict[str, Any] = {"nvme": NvmeConfig(), "nvme_bytes": 8 << 20, "segment_bytes": 1 << 20}
FP8 = "fp8_e4m3"


@pytest.fixture(params=["socket", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    found = Store(request.param, tmp_path)
    yield found
    found.close()


def fp8(**changes: Any) -> Identity:
    return replace(writer(**changes), kv_form=FP8)


# ---- numeric forms


def test_another_tenant_is_refused(store: Store) -> None:
    store.start()
    with pytest.raises(StoreRefused, match="tenant secret"):
        store.attach(writer(tenant_check=b"other"))


def test_a_form_found_in_the_folder_gives_way_to_the_first_client(store: Store) -> None:
    store.start(**TIER)
    write(store.attach(writer()), keys(5))
    store.wait_for_disk()
    store.stop()
    store.start(**TIER)
    assert store.status().adopted == 5
    rank = store.attach(fp8())
    found = store.status()
    assert (found.blocks, found.nvme_records, found.refused_records) == (0, 0, 5)
    assert read(rank, keys(5)) == []
    assert write(rank, keys(5), first=9) == 5
    assert len(read(rank, keys(5))) == 5
    store.wait_for_disk()
    assert (store.verify().host_good, store.verify().nvme_good) == (5, 5)


def test_records_of_two_forms_in_a_folder_wait_for_the_first_client(store: Store) -> None:
    """The newer ones are not refused because older ones of another form lie before them."""
    store.start(**TIER)
    old = store.attach(writer())
    write(old, keys(4, "old"))
    store.wait_for_disk()
    old.close()
    store.wait_for(lambda found: not found.clients)
    new = store.attach(fp8())
    write(new, keys(3, "new"))
    store.wait_for_disk()
    store.stop()
    store.start(**TIER)
    rank = store.attach(fp8())
    assert len(read(rank, keys(3, "new"))) == 3
    assert read(rank, keys(4, "old")) == []


def test_a_form_of_clients_that_are_gone_gives_way(store: Store) -> None:
    store.start()
    first = store.attach(writer())
    write(first, keys(6))
    first.close()
    store.wait_for(lambda found: not found.clients)
    rank = store.attach(fp8())
    assert read(rank, keys(6)) == []
    assert store.status().refused_records == 6
    back = store.attach(fp8())
    assert write(back, keys(6), first=9) == 6
    assert len(read(rank, keys(6))) == 6
    assert store.status().refused_records == 6, "a second client of the form drops nothing"


def test_a_form_that_attached_clients_use_is_not_given_up(store: Store) -> None:
    store.start()
    first = store.attach(writer())
    write(first, keys(3))
    with pytest.raises(
        StoreRefused,
        match=r"1 attached clients keep .* as 'bf16', this one brings 'fp8_e4m3'; give .*kv_cache_dtype",
    ):
        store.attach(fp8())
    assert len(read(first, keys(3))) == 3
    assert store.status().refused_records == 0
    store.attach(replace(fp8(), weights_id=b"x" * 32))
    assert len(read(first, keys(3))) == 3, "other weights may have another form"


def test_forms_that_take_turns_are_served_for_ever(tmp_path: Path) -> None:
    """Each finds none of the other's blocks, and none of its own from before."""
    store = Store("local", tmp_path).start()
    for turn in range(10):
        rank = store.attach(fp8() if turn % 2 else writer())
        assert read(rank, keys(2)) == []
        assert write(rank, keys(2), first=2 * turn + 1) == 2
        rank.close()
    assert store.local is not None
    assert len(store.local.shell.core.weights.entries) == 2
    assert store.status().refused_records == 18
    store.close()


def test_blocks_that_a_load_still_fills_can_give_way(tmp_path: Path) -> None:
    """A reader that is gone had asked for them."""
    store = Store("local", tmp_path).start(**TIER)
    write(store.attach(writer()), keys(5))
    store.wait_for_disk()
    store.stop()
    store.start(**TIER)
    assert store.local is not None
    reader = store.attach(replace(writer(), part=None, local_parts=(), slot_bytes=0, credit=0))
    read_id, answer = reader.open(keys(5))
    reader.start_fetch(read_id, [Version(h[0].writer_id, h[0].counter) for h in answer.handles()])
    reader.close()
    rank = store.attach(fp8(credit=4))
    assert read(rank, keys(5)) == []
    assert write(rank, keys(5), first=9) == 5
    store.wait_for_disk()
    store.local.shell.core.validate()
    store.close()


def test_one_line_says_how_many_records_gave_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store("local", tmp_path).start()
    first = store.attach(writer())
    write(first, keys(6))
    first.close()
    with caplog.at_level(logging.WARNING, "tournant.kvstore"):
        store.attach(fp8())
        store.attach(fp8())
    (line,) = [record.message for record in caplog.records if "refused" in record.message]
    assert line == f"refused 6 records whose KV is stored as bf16: the engines keep it as {FP8} now"
    store.close()


# ---- sizes of slots


def test_a_pool_without_chunk_bytes_serves_two_sizes(store: Store) -> None:
    store.start(host_bytes=32 * SLOT)
    ranks = [store.attach(writer(credit=2, slot_bytes=size)) for size in (SLOT, 2 * SLOT)]
    for number, rank in enumerate(ranks):
        chain = keys(5, str(number))
        assert rank.credit == 2
        assert write(rank, chain) == 5
        assert len(read(rank, chain, slot_bytes=rank.identity.slot_bytes)) == 5
    with pytest.raises(StoreRefused, match=r"slots of 1 pages need a chunk of the pool for themselves.* host_bytes"):
        store.attach(writer(credit=1, slot_bytes=SLOT // 2))
    assert store.attach(writer(credit=2)).credit == 2, "another client with one of the sizes is served"


def lent_in_both_halves(store: Store) -> tuple[StoreClient, Lent]:
    """A client of a full pool of 64 slots with one lent slot, which it keeps, in the first half, all others behind."""
    store.start(host_bytes=64 * SLOT)
    rank = store.attach(writer(credit=8))
    held = rank.take_slot()
    assert held is not None
    assert write(rank, keys(64 + 36)) == 100
    other = rank.take_slot()
    assert other is not None
    assert held.page < 64 <= min(other.page, *(lent.page for lent in rank._book.free))
    return rank, held


def test_a_second_size_gets_a_chunk_while_the_first_goes_on(store: Store) -> None:
    """Slots that are lent in every chunk are no reason to wait for ever: the next ones are lent elsewhere."""
    first, held = lent_in_both_halves(store)
    second = store.attach(writer(credit=2, slot_bytes=2 * SLOT))
    assert second.credit == 0, "every chunk has lent slots"
    assert write(first, keys(100, "more"), first=1000) == 100
    first.publish([], [held])
    second.publish([])
    assert second.credit == 2
    chain = keys(6, "second")
    assert write(second, chain) == 6
    assert write(first, keys(100, "again"), first=2000) == 100
    assert len(read(second, chain, slot_bytes=2 * SLOT)) == 6, "the first size does not take it back"


def test_a_chunk_that_nobody_waits_for_any_more_is_used_again(store: Store) -> None:
    first, _ = lent_in_both_halves(store)
    second = store.attach(writer(credit=2, slot_bytes=2 * SLOT))
    assert second.credit == 0, "every chunk has lent slots"
    second.close()
    store.wait_for(lambda found: found.clients == 1)
    chain = keys(56, "after")
    assert write(first, chain, first=1000) == 56
    assert len(read(first, chain[:28])) == 28
    assert len(read(first, chain[28:])) == 28, "half of the pool holds 32 slots"


@pytest.mark.parametrize(
    ("slot_bytes", "words"),
    [
        (
            40 * SLOT,
            rf"slot_bytes is {40 * SLOT}; a slot must fit into one chunk .* {16 * SLOT} and .* more host_bytes",
        ),
        (
            9 * SLOT,
            "credit of 1 slots of 18 pages: 18 pages .* at most 16 may be, max_lent_share 0.25.* more host_bytes",
        ),
    ],
)
def test_a_slot_that_the_pool_has_no_room_for_is_refused(store: Store, slot_bytes: int, words: str) -> None:
    store.start(host_bytes=32 * SLOT)
    with pytest.raises(StoreRefused, match=words):
        store.attach(writer(credit=1, slot_bytes=slot_bytes))
    assert store.status().clients == 0


# ---- credit and clients


@pytest.mark.parametrize("credit", [5, (1 << 32) - 1])
def test_a_credit_above_the_share_is_cut_to_half_of_it(store: Store, credit: int) -> None:
    """All clients together may have 4 slots."""
    store.start(host_bytes=16 * SLOT)
    ranks = [store.attach(writer(credit=credit)) for _ in range(2)]
    for number, rank in enumerate(ranks):
        assert rank.credit == 2
        assert write(rank, keys(30, str(number))) == 30
        assert rank.credit == 2
    with pytest.raises(
        StoreRefused, match=r"credit of 1 slots of 2 pages: 10 pages would be lent or pinned, at most 8"
    ):
        store.attach(writer(credit=1))
    for rank in ranks:
        rank.close()
    store.wait_for(lambda found: not found.clients)
    assert store.attach(writer(credit=4)).credit == 4, "what there is room for is given"


def test_a_credit_is_never_longer_than_a_reply_can_tell(tmp_path: Path) -> None:
    store = Store("socket", tmp_path).start(host_bytes=(MAX_CREDIT + 100) * PAGE_BYTES, max_lent_share=1.0)
    assert store.attach(writer(credit=MAX_CREDIT + 50, slot_bytes=PAGE_BYTES)).credit == MAX_CREDIT
    store.close()


def test_too_many_clients_is_told_with_what_to_change(store: Store) -> None:
    store.start(max_clients=1)
    store.attach(writer(credit=1))
    with pytest.raises(
        StoreRefused,
        match=r"1 clients are attached and max_clients is 1; .* one client for each size .* raise max_clients",
    ):
        store.attach(writer(credit=1, slot_bytes=2 * SLOT))


def test_what_is_not_cut_into_slots_is_free(store: Store) -> None:
    store.start(host_bytes=64 * SLOT)
    assert dict(store.status().pages)[0] == 128
    rank = store.attach(writer(credit=4))
    write(rank, keys(3))
    pages = dict(store.status().pages)
    assert pages[0] == 128 - 2 * (4 + 3)
    assert sum(pages.values()) == 128


def test_a_block_of_more_parts_than_one_write_can_have_stays_in_ram(tmp_path: Path) -> None:
    parts = tuple(Part(0, 1, head, head + 1) for head in range(MAX_RUN_RECORDS + 1))
    tier = TIER | {"nvme_bytes": 16 << 20, "segment_bytes": 4 << 20}
    store = Store("local", tmp_path).start(host_bytes=512 * PAGE_BYTES, copy_start=0.01, copy_stop=0.001, **tier)
    identity = writer(credit=1, part=parts[0], parts=parts, slot_bytes=PAGE_BYTES)
    ranks = [store.attach(replace(identity, part=part)) for part in parts]
    for rank in ranks:
        assert write(rank, keys(1)) == 1
    assert store.local is not None
    store.local.shell.handle(Tick())
    found = store.status()
    assert (found.blocks, found.in_host, found.nvme_records) == (1, 1, 0)
    store.close()
