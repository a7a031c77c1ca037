"""Blocks of two sizes below one engine: plain ones at the head of a chain, fp8 ones behind, in slots of their own."""

from __future__ import annotations

import itertools
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.harness import Session
from tests.workers.link_harness import PATIENCE_S, Engine, Gate, Node, keys, node
from tests.workers.tiered_engine import node_store, random_prompts, tiered
from tournant.kernels import reference
from tournant.kernels.layout import KVLayout
from tournant.kvstore.block import Version, key_chain
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.slots import SlotState
from tournant.workers.device import CpuDevice
from tournant.workers.fp8_images import Fp8Images
from tournant.workers.kv_cache import KVCache
from tournant.workers.store_link import image_sizes
from tournant.workers.transfer_messages import (
    HOST,
    NVME,
    Copied,
    Detached,
    DropStash,
    EndRead,
    Lent,
    Save,
    Saved,
    SaveEntry,
    Stash,
    Stashed,
    Used,
    writer_of,
)

LAYOUT = KVLayout(2, 2, 16, 64, torch.bfloat16)
E4M3 = torch.float8_e4m3fn
PLAIN, CODED = LAYOUT.block_bytes, replace(LAYOUT, dtype=E4M3).block_bytes
PAGES = (-(-PLAIN // PAGE_BYTES), -(-CODED // PAGE_BYTES))
FIRST_CODED = 2
NUM_BLOCKS = 64
CHUNKS = {"chunk_bytes": 24 * PAGE_BYTES}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as found:
        yield found


class Pool:
    """Device blocks with random KV, and what they are after a way through the store."""

    def __init__(self) -> None:
        self.cache = KVCache(LAYOUT, NUM_BLOCKS, torch.device("cpu"))
        self.cache.tensor.normal_()
        self.images = Fp8Images(CpuDevice(), self.cache, E4M3, from_token=FIRST_CODED * LAYOUT.block_tokens)
        self._before = self.cache.tensor.clone()

    def wanted(self, block: int, depth: int) -> torch.Tensor:
        """The block as it was, rounded where its place says so: by the kernels' twin."""
        if depth < FIRST_CODED:
            return self._before[block]
        codes, rounded = torch.empty(1, CODED, dtype=torch.uint8), torch.empty_like(self._before[:1])
        reference.encode_blocks(self._before, torch.tensor([block]), codes, E4M3)
        reference.decode_blocks(codes, E4M3, torch.tensor([0]), rounded)
        return rounded[0]

    def holds(self, entries: list[SaveEntry], first: int) -> bool:
        return all(
            torch.equal(self.cache.tensor[first + place], self.wanted(entry.block, entry.depth))
            for place, entry in enumerate(entries)
        )


_counters = itertools.count(1)


def engine_on(store: Node, pool: Pool, **config: Any) -> Engine:
    gate = config.pop("gate", None)
    return store.engine(images=lambda _: pool.images if gate is None else gate(pool.images), **config)


def entry_of(engine: Engine, block: int, key: bytes, depth: int) -> SaveEntry:
    version = Version(writer_of(engine.writer_id, int(depth >= FIRST_CODED)), next(_counters))
    return SaveEntry(block, key, version, 10, depth)


def entries_of(engine: Engine, chain: tuple[bytes, ...], first: int = 0) -> list[SaveEntry]:
    return [entry_of(engine, first + depth, key, depth) for depth, key in enumerate(chain)]


def orders_of(engine: Engine, entries: list[SaveEntry]) -> list[Save]:
    kinds = entries[:FIRST_CODED], entries[FIRST_CODED:]
    return [Save(engine.number(), tuple(some), kind=kind) for kind, some in enumerate(kinds) if some]


def lent_pages(credit: tuple[int, int]) -> int:
    return credit[0] * PAGES[0] + credit[1] * PAGES[1]


def at_rest(store: Node, credit: tuple[int, int]) -> None:
    wanted = (0, 0, lent_pages(credit))
    store.wait_for(lambda at: (at.open_reads, at.pinned_pages, dict(at.pages)[SlotState.LENT]) == wanted)


# ---- the link


def test_images_say_their_sizes() -> None:
    pool = Pool()
    assert PAGES[0] > PAGES[1]
    assert image_sizes(pool.images) == (PLAIN, CODED)
    assert image_sizes(Fp8Images(CpuDevice(), pool.cache, E4M3)) == (CODED,)


def test_both_forms_are_saved_found_and_loaded(store: Node) -> None:
    store.start(**CHUNKS)
    pool = Pool()
    engine = engine_on(store, pool, credit_blocks=9)
    attached = engine.attached()
    assert (attached.credit, attached.slot_bytes) == ((4, 4), PLAIN)
    assert store.status().clients == 2
    chain = keys(6)
    entries = entries_of(engine, chain)
    orders = orders_of(engine, entries)
    engine.submit(*orders)
    for order, size in zip(orders, (PLAIN, CODED), strict=True):
        count = len(order.entries)
        assert engine.wait(Saved, lambda event, order=order: event.save == order.save) == Saved(  # type: ignore[misc]
            order.save, True, (), count
        )
        copied = engine.wait(Copied, lambda event, order=order: event.number == order.save)  # type: ignore[misc]
        assert copied.num_bytes == count * size
    found = engine.lookup(chain)
    assert found.tiers == bytes([HOST] * 6)
    assert engine.fetch(found.read, 6).count == 6
    ended = engine.load(found.read, range(20, 25), skip=1)
    assert (ended.count, ended.corrupt, ended.num_bytes) == (5, 0, PLAIN + 4 * CODED)
    assert pool.holds(entries[1:], 20)
    assert not torch.equal(pool.cache.tensor[21], pool.cache.tensor[entries[2].block]), "that one was rounded"
    engine.submit(Used(chain))
    at_rest(store, (4, 4))


def test_both_forms_come_back_from_disk(store: Node) -> None:
    store.start(nvme=NvmeConfig(), nvme_bytes=8 << 20, segment_bytes=1 << 20, **CHUNKS)
    pool = Pool()
    engine = engine_on(store, pool, credit_blocks=8)
    engine.attached()
    chain = keys(6)
    entries = entries_of(engine, chain)
    for order in orders_of(engine, entries):
        engine.submit(order)
        assert engine.wait(Saved, lambda event, order=order: event.save == order.save).ok  # type: ignore[misc]
    store.wait_for(lambda at: at.nvme_records == 6)
    assert store.process is not None
    store.process.stop()
    store.start(nvme=NvmeConfig(), nvme_bytes=8 << 20, segment_bytes=1 << 20, **CHUNKS)
    engine.attached(after=len(engine.events))
    found = engine.lookup(chain)
    assert found.tiers == bytes([NVME] * 6)
    assert engine.fetch(found.read, 6).num_bytes == 2 * PLAIN + 4 * CODED
    assert engine.load(found.read, range(20, 26)).count == 6
    assert pool.holds(entries, 20)
    at_rest(store, (4, 4))


def test_each_kind_has_its_own_credit(store: Node) -> None:
    store.start(**CHUNKS)
    pool = Pool()
    engine = engine_on(store, pool, credit_blocks=4)
    assert engine.attached().credit == (2, 2)
    entries = [entry_of(engine, block, key, 3) for block, key in enumerate(keys(5))]
    coded, plain = engine.number(), engine.number()
    engine.submit(Save(coded, tuple(entries), kind=1))
    engine.submit(Save(plain, tuple(entry_of(engine, 9, key, 0) for key in keys(1, "other"))))
    assert engine.wait(Saved, lambda event: event.save == coded) == Saved(coded, True, (2, 3, 4), 2)
    assert engine.wait(Saved, lambda event: event.save == plain) == Saved(plain, True, (), 1)
    stash = engine.number()
    engine.submit(Stash(stash, 1))
    assert engine.wait(Stashed).ok
    at_rest(store, (2, 2))
    engine.submit(DropStash(stash))
    assert engine.wait(Lent) == Lent(1, 0)


def test_slots_of_one_kind_that_the_store_lacked_come_later(store: Node) -> None:
    """Five chunks of 24 pages; the first engine pins all slots of fp8 size that there are room for."""
    store.start(blocks=16, max_pinned_share=1.0, max_lent_share=0.9, chunk_bytes=24 * PAGE_BYTES)
    pool = Pool()
    first = engine_on(store, pool, credit_blocks=2)
    assert first.attached().credit == (1, 1)
    room = 24 // PAGES[1] - 1
    chain = keys(room)
    for block, key in enumerate(chain):
        save = first.number()
        first.submit(Save(save, (entry_of(first, block, key, 5),), kind=1))
        assert first.wait(Saved, lambda event: event.save == save).ok  # noqa: B023 - waited for here
    found = first.lookup(chain)
    assert len(found.tiers) == room
    second = engine_on(store, pool, credit_blocks=2)
    assert second.attached().credit == (1, 0), "all slots of the smaller size are pinned or lent"
    first.submit(EndRead(found.read))
    assert second.wait(Lent) == Lent(1, 1)
    at_rest(store, (2, 2))


@pytest.mark.parametrize(("blocks", "credit"), [(64, (6, 6)), (8, (1, 1))])
def test_credit_that_the_store_does_not_give_to_both_is_halved_for_both(
    store: Node, blocks: int, credit: tuple[int, int]
) -> None:
    """A quarter of 192 pages: the larger slots alone would take all of it. Nothing of an attempt stays lent."""
    store.start(blocks=blocks, max_lent_share=0.25 if blocks == 64 else 0.34, chunk_bytes=8 * PAGE_BYTES)
    engine = engine_on(store, Pool(), credit_blocks=24)
    assert engine.attached().credit == credit
    at_rest(store, credit)
    assert store.status().clients == 2


@pytest.mark.parametrize("lost", [0, 1])
def test_the_loss_of_one_connection_is_that_of_both(store: Node, lost: int) -> None:
    store.start(**CHUNKS)
    pool = Pool()
    engine = engine_on(store, pool, credit_blocks=8, gate=Gate)
    gate = engine.images
    assert isinstance(gate, Gate)
    engine.attached()
    chain = keys(6)
    gate.go_on.set()
    for order in orders_of(engine, entries_of(engine, chain)):
        engine.submit(order)
        assert engine.wait(Saved, lambda event, order=order: event.save == order.save).ok  # type: ignore[misc]
    gate.go_on.clear()
    gate.entered.clear()
    more = orders_of(engine, entries_of(engine, keys(6, "more"), 8))
    read = engine.lookup(chain).read
    engine.submit(*more)
    assert gate.entered.wait(PATIENCE_S)
    session = engine.link._session
    assert session is not None
    with socket.socket(fileno=os.dup(session.attachment.clients[lost].fileno())) as connection:
        connection.shutdown(socket.SHUT_RD)  # its farewell still goes out
    assert engine.ended(read).count == 0
    assert not [event for event in engine.events if isinstance(event, Detached)], "a copy is under way"
    gate.go_on.set()
    detached = engine.wait(Detached)
    before = engine.events[: engine.events.index(detached)]
    for order in more:
        of_it = [event for event in before if order.save in (getattr(event, "number", 0), getattr(event, "save", 0))]
        assert [type(event) for event in of_it] == [Copied, Saved]
        assert of_it[1] == Saved(order.save, False, (), 0)
    engine.attached(after=engine.events.index(detached))
    assert len([event for event in engine.events if isinstance(event, Detached)]) == 1
    assert engine.bring(chain, 30).count == 6
    at_rest(store, (4, 4))
    assert store.status().clients == 2


def test_a_stopped_store_is_noticed_by_a_report_of_the_second_kind(store: Node) -> None:
    store.start(**CHUNKS)
    engine = engine_on(store, Pool(), credit_blocks=8, timeout_s=0.3)
    engine.attached()
    store.signal(signal.SIGSTOP)
    engine.submit(Save(7, tuple(entries_of(engine, keys(3))[2:]), kind=1))
    assert "report" in engine.wait(Detached).reason
    assert engine.wait(Saved) == Saved(7, False, (), 0)
    store.signal(signal.SIGCONT)
    engine.attached(after=len(engine.events))
    at_rest(store, (4, 4))


# ---- an engine on M


@pytest.mark.parametrize("first", [64, 0])
def test_an_engine_gets_back_plain_heads_and_rounded_tails(tiny_model: Path, tmp_path: Path, first: int) -> None:
    prompts = random_prompts(24, seed=3)
    with node_store(tmp_path, 800, nvme=False, chunk_bytes=64 * PAGE_BYTES) as store:
        session = tiered(
            tiny_model,
            store.socket,
            700,
            engine={"deterministic": False},
            lower_kv_dtype="fp8_e4m3",
            lower_kv_dtype_from=first,
        )
        session.attach()
        session.ask_window(prompts, window=8, max_tokens=12)
        session.settle()
        computed = kv_of(session, prompts)
        session.forget_device()
        session.ask_window(prompts, window=8, max_tokens=12)
        stats = session.engine.stats().tiers
        assert stats.host_hit_tokens == sum((len(prompt) - 1) // 16 * 16 for prompt in prompts) > 4000
        assert (stats.refused_saves, stats.corrupt_blocks, stats.lost_blocks, stats.store_losses) == (0, 0, 0, 0)
        coded = 0
        for before, after, prompt in zip(computed, kv_of(session, prompts), prompts, strict=True):
            full = (len(prompt) - 1) // 16
            plain = min(full, first // 16)
            assert torch.equal(after[:plain], before[:plain])
            assert full == plain or torch.equal(after[plain:full], rounded(before[plain:full]))
            coded += full - plain
        assert coded > 100
        session.settle()
        session.close()


def kv_of(session: Session, prompts: list[list[int]]) -> list[torch.Tensor]:
    """KV on the device of the full blocks of each prompt."""
    engine = session.engine
    found = []
    for prompt in prompts:
        chain = key_chain(engine.info.namespace_for(len(prompt)).digest(), prompt, 16)
        blocks = engine.scheduler.blocks.match(chain)
        assert len(blocks) == len(prompt) // 16
        found.append(engine.runner.cache.tensor[blocks].clone())  # type: ignore[attr-defined]
    return found


def rounded(blocks: torch.Tensor) -> torch.Tensor:
    """As fp8 images give them back, by the kernels' twin."""
    ids, out = torch.arange(len(blocks)), torch.empty_like(blocks)
    layout = KVLayout(blocks.shape[1], blocks.shape[3], blocks.shape[4], blocks.shape[5], E4M3)
    codes = torch.empty(len(blocks), layout.block_bytes, dtype=torch.uint8)
    reference.encode_blocks(blocks, ids, codes, E4M3)
    reference.decode_blocks(codes, E4M3, ids, out)
    return out
