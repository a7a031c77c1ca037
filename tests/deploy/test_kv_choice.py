"""Requests go to the engine that has most of their prompt, unless more waits there than that saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.deploy.async_test import async_test
from tests.deploy.fake_engine import FakeEngineClient
from tests.deploy.fleet import Fleet, continuing, fleet, until
from tournant.cluster.directory_actor import number_of
from tournant.cluster.index_feed import IndexFeed, NoAnswer
from tournant.cluster.router_index import DirectoryCopy
from tournant.deploy.engine_pool import PoolEngine
from tournant.deploy.kv_choice import KVChoice
from tournant.kvstore.block import KEY_BYTES
from tournant.kvstore.directory import Changes
from tournant.workers.messages import EngineRequest, EngineStats
from tournant.workers.sampling_params import SamplingParams

NODES = {name: f"{number:056x}" for number, name in enumerate("abc", 0xA00000)}
BLOCK = 16


class Silent:
    """A directory that is not there."""

    def read(self, positions: Mapping[int, int]) -> Mapping[int, Changes | NoAnswer]:
        return dict.fromkeys(positions, NoAnswer.ABSENT)


def prompt(start: int, blocks: int) -> EngineRequest:
    """Of so many full blocks; those of equal starts are alike as far as they go."""
    keys = [bytes([start]) + number.to_bytes(KEY_BYTES - 1, "big") for number in range(blocks)]
    return EngineRequest(1, [start] * (BLOCK * blocks + 1), SamplingParams(max_tokens=1), keys)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def three(found: Fleet) -> list[PoolEngine]:
    for name, node in NODES.items():
        site = await found.add(name, FakeEngineClient(continuing("a")), told=False)
        object.__setattr__(site.member, "node", node)
    found.tell()
    await until(lambda: sum(engine.serving for engine in found.pool.engines) == 3)
    return found.pool.engines


@pytest.fixture
def choice() -> KVChoice:
    return KVChoice(IndexFeed(Silent(), DirectoryCopy(0)), clock=Clock())


@async_test
async def test_the_same_head_goes_to_the_same_engine(choice: KVChoice) -> None:
    async with fleet() as found:
        engines = await three(found)
        first = {start: choice(prompt(start, 8), engines).replica for start in range(12)}
        assert len(set(first.values())) == 3, "all of them work"
        for engine in engines:
            say(engine, queued_tokens=0)
        again = {start: choice(prompt(start, 9), engines).replica for start in range(12)}
        assert again == first


@async_test
async def test_what_waits_outweighs_what_is_saved(choice: KVChoice) -> None:
    async with fleet() as found:
        engines = await three(found)
        home = choice(prompt(1, 8), engines)
        say(home, queued_tokens=1_000_000)
        assert choice(prompt(1, 8), engines) is not home
        assert choice(prompt(1, 8), [home]) is home


@async_test
async def test_one_that_drains_is_passed_over_and_one_that_left_is_forgotten(choice: KVChoice) -> None:
    async with fleet() as found:
        engines = await three(found)
        home = choice(prompt(1, 8), engines)
        found.sites[home.replica].server.begin_drain(60.0)
        await until(lambda: not home.serving)
        assert choice(prompt(1, 8), engines) is not home
        choice.keep(set(NODES) - {home.replica})
        assert choice._scoring.index.lookup(prompt(1, 8).keys, [(home.replica, None)])[0].device == 0


@async_test
async def test_tokens_count_that_the_engine_has_not_spoken_of_yet(choice: KVChoice) -> None:
    async with fleet() as found:
        engines = await three(found)
        chosen = choice(prompt(1, 8), engines)
        assert choice._candidate(chosen, prompt(2, 1)).queued_tokens == 8 * BLOCK + 1
        say(chosen, queued_tokens=7)
        assert choice._candidate(chosen, prompt(2, 1)).queued_tokens == 7
        assert choice._candidate(chosen, prompt(2, 1)).node == number_of(NODES[chosen.replica])


def say(engine: PoolEngine, **stats: Any) -> None:
    """As if a step had ended."""
    assert engine.client is not None
    engine.client._stats = EngineStats(**stats)
