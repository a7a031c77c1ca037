"""Groups of rank processes over real stores: from whichever tier blocks come, tokens are the right ones (I1, I14)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workers.harness import files_of
from tests.workers.launch_harness import ENDS_S, Ranks, config_of
from tests.workers.parallel_harness import NUM_NEW, Chosen, without_near_ties
from tests.workers.test_engine_process import Answer, run
from tests.workers.tiered_engine import BLOCK_BYTES, BLOCK_TOKENS, Store, node_store, random_prompts, tiered
from tournant.kvstore.admin import Status, StatusQuery
from tournant.kvstore.client import ask
from tournant.workers.engine_client import ProcessEngineClient
from tournant.workers.messages import TierStats
from tournant.workers.offload_config import Faults, OffloadConfig
from tournant.workers.rank_launch import GroupPlace
from tournant.workers.replica_engine import ReplicaEngine

LENGTHS = (33, 64, 100, 170, 250, 300, 380)
FULL = sum((length - 1) // BLOCK_TOKENS for length in LENGTHS)  # blocks that may come back
SEALED = sum((length + NUM_NEW - 1) // BLOCK_TOKENS for length in LENGTHS)  # blocks that go down
POOL_BLOCKS, HOST_BLOCKS = 150, 600
NVME_BYTES = 256 << 20


@pytest.fixture(scope="module")
def chosen(tiny_model: Path) -> Chosen:
    """REF: one process, no store."""
    return without_near_ties(tiny_model, LENGTHS)


class Faulty(Ranks):
    """Ranks beside the leader that have faults of their own."""

    def __init__(self, **faults: Any) -> None:
        super().__init__()
        self.faults = faults

    def start(self, place: GroupPlace) -> None:
        if place.offload is not None:
            place = replace(place, offload=replace(place.offload, faults=replace(place.offload.faults, **self.faults)))
        super().start(place)


class Group:
    """An engine of several ranks over a store, and the launchers of all its starts."""

    def __init__(self, make_launcher: Callable[[], Ranks]) -> None:
        self.launchers: list[Ranks] = []
        self._make_launcher = make_launcher
        self.engine: ReplicaEngine

    def _launcher(self) -> Ranks:
        self.launchers.append(self._make_launcher())
        return self.launchers[-1]

    async def start(
        self, folder: Path, store: Store, split: tuple[int, int], engine: dict[str, Any], **offload: Any
    ) -> None:
        """Wait until it is ready."""
        defaults = {"kv_cache_bytes": POOL_BLOCKS * BLOCK_BYTES, "deterministic": True}
        config = config_of(*split, **defaults | engine)
        lower = OffloadConfig(str(store.socket), **{"restore": "always"} | offload)
        self.engine = await ReplicaEngine.start(
            config, files_of(folder), offload=lower, make_launcher=self._launcher, first_wait_s=0.0
        )

    @property
    def client(self) -> ProcessEngineClient:
        """Of the present engine."""
        assert self.engine._client is not None
        return self.engine._client

    @property
    def tiers(self) -> TierStats:
        """Counters of the present engine."""
        return self.engine.stats.tiers

    async def until(self, reached: Callable[[], bool]) -> None:
        """Let the engine check itself, and say its numbers, until they are so."""
        while True:
            assert await self.client.validate() == ""
            if reached():
                return
            await asyncio.sleep(0.01)

    async def ask(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """All at once."""
        answers = [Answer(self.engine, prompt, max_tokens=NUM_NEW) for prompt in prompts]  # type: ignore[arg-type]
        for answer in answers:
            await answer.done.wait()
        return answers

    async def answers(self, chosen: Chosen) -> tuple[int, int, int]:
        """Ask; they are right. Blocks that came from device, host and NVMe."""
        answers = await self.ask(chosen.prompts)
        assert [answer.tokens for answer in answers] == chosen.answers
        tiers = [answer.outputs[0].cached_by_tier for answer in answers]
        return tuple(sum(column) // BLOCK_TOKENS for column in zip(*tiers, strict=True))  # type: ignore[return-value]

    async def forget_device(self, saved: int = 0) -> None:
        """Everything is below, at least so many blocks of it written by this engine, and nothing on the device."""
        await self.until(
            lambda: self.tiers.saved_blocks >= saved and not (self.tiers.dirty_blocks or self.engine.stats.kv_used)
        )
        assert await self.engine.reset_prefix_cache()


@asynccontextmanager
async def group(
    folder: Path,
    store: Store,
    split: tuple[int, int],
    make_launcher: Callable[[], Ranks] = Ranks,
    engine: dict[str, Any] | None = None,
    **offload: Any,
) -> AsyncIterator[Group]:
    """A group that ends with the test."""
    made = Group(make_launcher)
    await made.start(folder, store, split, engine or {}, **offload)
    try:
        await made.until(lambda: made.tiers.attached == 1)
        yield made
        assert await made.client.validate() == ""
    finally:
        await made.engine.close()


async def on_disk(store: Store) -> None:
    """Until all that the store has lies on NVMe."""
    while True:
        status = ask(store.socket, StatusQuery())
        assert isinstance(status, Status)
        if status.nvme_records >= status.blocks:
            return
        await asyncio.sleep(0.01)


async def lose_and_find_the_store(one: Group, store: Store, chosen: Chosen) -> None:
    """Right without it; what it had on NVMe comes back with it."""
    await on_disk(store)
    store.process.kill()
    await one.until(lambda: one.tiers.attached == 0)
    assert await one.answers(chosen) == (0, 0, 0)
    await one.until(lambda: not one.engine.stats.kv_used)
    assert await one.engine.reset_prefix_cache()
    store.start()
    await one.until(lambda: one.tiers.attached == 1)
    device, host, nvme = await one.answers(chosen)
    assert (device, host + nvme) == (0, FULL)
    assert nvme > 0


async def lose_a_rank(one: Group, chosen: Chosen) -> None:
    """kill -9 of rank 1 while blocks come back: requests end, and the next ranks read what these have written."""
    await one.forget_device()
    loaded = one.tiers.loaded_blocks
    answers = [Answer(one.engine, prompt, max_tokens=NUM_NEW) for prompt in chosen.prompts]  # type: ignore[arg-type]
    await one.until(lambda: one.engine.stats.num_restoring > 0 or one.tiers.loaded_blocks > loaded)
    os.kill(one.launchers[-1].pid(1), signal.SIGKILL)
    for answer, want in zip(answers, chosen.answers, strict=True):
        await answer.done.wait()
        assert answer.outputs[-1].finish_reason == "error" or answer.tokens == want
    assert any(answer.outputs[-1].finish_reason == "error" for answer in answers)
    writer_id = one.engine.info.writer_id
    await one.engine.wait_ready()
    assert one.engine.info.writer_id != writer_id
    await one.until(lambda: one.tiers.attached == 1)
    device, host, nvme = await one.answers(chosen)
    assert (device, host + nvme) == (0, FULL), "of the ranks that are gone"


def is_invisible_to_one_rank(folder: Path, store: Store, chosen: Chosen) -> None:
    """An engine of one rank has no use for what was written, and writes its own."""
    alone = tiered(folder, store.socket, POOL_BLOCKS)
    alone.attach()
    assert alone.ask_window(chosen.prompts, max_tokens=NUM_NEW) == chosen.answers
    tiers = alone.engine.stats().tiers
    assert (tiers.lookups > 0, tiers.host_hit_tokens, tiers.nvme_hit_tokens) == (True, 0, 0)
    alone.settle()
    alone.close()


TENSOR, PIPELINE, BOTH, SHARED_HEADS = (2, 1), (1, 2), (2, 2), (4, 1)


@pytest.mark.parametrize(
    ("split", "others"), [(TENSOR, (SHARED_HEADS, BOTH)), (PIPELINE, ())], ids=["tensor", "pipeline"]
)
def test_the_same_tokens_from_every_tier(
    tiny_model: Path, tmp_path: Path, chosen: Chosen, split: tuple[int, int], others: tuple[tuple[int, int], ...]
) -> None:
    """And over losses of the store and of a rank. What one split has written is nothing to the others."""

    async def scenario(store: Store) -> None:
        slow = lambda: Faulty(load_delay_ms=4)  # noqa: E731 - so that a rank can be killed in the middle
        async with group(tiny_model, store, split, slow) as one:
            assert await one.answers(chosen) == (0, 0, 0)
            await one.forget_device(SEALED)
            assert await one.answers(chosen) == (0, FULL, 0)
            await one.forget_device()
            is_invisible_to_one_rank(tiny_model, store, chosen)
            assert await one.answers(chosen) == (0, FULL, 0)
            await one.forget_device()
            await lose_and_find_the_store(one, store, chosen)
            await lose_a_rank(one, chosen)

    with node_store(tmp_path, 2 * HOST_BLOCKS, nvme_bytes=NVME_BYTES) as store:
        run(lambda: scenario(store))
        for other in others:
            run(lambda: shares_with_its_like(tiny_model, store, other, chosen))  # noqa: B023 - waited for here


async def shares_with_its_like(folder: Path, store: Store, split: tuple[int, int], chosen: Chosen) -> None:
    """It finds nothing of other splits, then all of its own; when its store hangs, it and its ranks still end well."""
    ranks = Ranks(kills=False)
    async with group(folder, store, split, lambda: ranks) as one:
        assert await one.answers(chosen) == (0, 0, 0)
        await one.forget_device(SEALED)
        device, host, nvme = await one.answers(chosen)
        assert (device, host + nvme) == (0, FULL)
        client = one.client
        store.process.process.send_signal(signal.SIGSTOP)
        await one.ask(random_prompts(3, seed=5))
    assert client.process.returncode == 0, "it had to be killed"
    for process in ranks.processes:
        assert process.process.wait(ENDS_S) == 0, "a rank had to be killed"
    store.process.process.send_signal(signal.SIGCONT)


def test_two_groups_write_and_read_the_same_at_once(tiny_model: Path, tmp_path: Path, chosen: Chosen) -> None:
    """One of them is late in all it does, and damages blocks on one rank: these are missing for all of its ranks."""
    late = Faults(kernel_delay_ms=2, save_delay_ms=0.5, load_delay_ms=0.5)

    async def scenario(store: Store) -> None:
        async with (
            group(tiny_model, store, TENSOR, lambda: Faulty(flip_every_save=4), faults=late) as bad,
            group(tiny_model, store, TENSOR) as good,
        ):
            assert await bad.answers(chosen) == (0, 0, 0)
            await bad.forget_device(SEALED)
            device, host, nvme = await bad.answers(chosen)
            assert (device, nvme) == (0, 0)
            assert 0 < host < FULL - len(LENGTHS) // 2
            assert bad.tiers.corrupt_blocks > 0
            assert sum(await good.answers(chosen)) > 0, "of another group of the same split"
            prompts = random_prompts(20, seed=3)
            first, second = await asyncio.gather(good.ask(prompts), bad.ask(prompts))
            for one in (bad, good):
                await one.forget_device()
            third, fourth = await asyncio.gather(good.ask(prompts), bad.ask(prompts))
            tokens = [answer.tokens for answer in first]
            assert [[answer.tokens for answer in answers] for answers in (second, third, fourth)] == [tokens] * 3
            assert all(any(answer.outputs[0].cached_by_tier[1] for answer in answers) for answers in (third, fourth))

    with node_store(tmp_path, 2 * HOST_BLOCKS, nvme=False) as store:
        run(lambda: scenario(store))


def test_ranks_with_two_kinds_of_blocks(tiny_model: Path, tmp_path: Path, chosen: Chosen) -> None:
    """The first 64 tokens of every chain as they are, the rest in fp8: what comes back twice is the same twice."""

    async def scenario(store: Store) -> None:
        lower = {"lower_kv_dtype": "fp8_e4m3", "lower_kv_dtype_from": 64}
        async with group(tiny_model, store, TENSOR, engine={"deterministic": False}, **lower) as one:
            answers = []
            for saved in (SEALED, 0, 0):
                answers.append([(await one.ask([prompt]))[0] for prompt in chosen.prompts])
                await one.forget_device(saved)
            assert [answer.tokens for answer in answers[0]] == chosen.answers
            assert [answer.tokens for answer in answers[1]] == [answer.tokens for answer in answers[2]]
            for again in answers[1:]:
                cached = [answer.outputs[0].cached_by_tier[1] for answer in again]
                assert cached == [(length - 1) // BLOCK_TOKENS * BLOCK_TOKENS for length in LENGTHS]

    with node_store(tmp_path, HOST_BLOCKS, nvme=False) as store:
        run(lambda: scenario(store))
