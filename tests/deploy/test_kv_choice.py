"""Requests go to the engine that has most of their prompt, unless more waits there than that saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.asgi_client import fetch
from tests.deploy.async_test import async_test
from tests.deploy.fake_engine import FakeEngineClient
from tests.deploy.fake_server import ASK, CHAT, COMPLETIONS, PROMPT, make
from tests.deploy.fleet import Fleet, continuing, fleet, until
from tests.deploy.keys import access_for, bearer, tenants
from tournant.cluster.directory_actor import number_of
from tournant.cluster.index_feed import IndexFeed, NoAnswer
from tournant.cluster.router_index import DirectoryCopy
from tournant.deploy.engine_pool import PoolEngine
from tournant.deploy.kv_choice import KVChoice
from tournant.deploy.tokenizer import Tokenizer
from tournant.kvstore.block import KEY_BYTES
from tournant.kvstore.directory import Changes
from tournant.workers.messages import EngineRequest, EngineStats, request_from_wire, request_to_wire
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


@async_test
async def test_a_conversation_stays_where_it_was_when_nothing_speaks_against_it(choice: KVChoice) -> None:
    async with fleet() as found:
        engines = await three(found)
        apart = [choice(prompt(start, 2), engines).replica for start in range(12)]
        assert len(set(apart)) == 3
        once = choice(replace(prompt(50, 2), session="one"), engines)
        others = [one for one in engines if one is not once]
        for start in range(51, 63):
            assert choice(replace(prompt(start, 2), session="one"), engines) is once
        say(once, queued_tokens=1_000_000)
        moved = choice(replace(prompt(63, 2), session="one"), engines)
        assert moved in others
        say(once, queued_tokens=0)
        assert choice(replace(prompt(64, 2), session="one"), engines) is moved


@async_test
async def test_clients_name_their_conversations_and_tenants_do_not_meet(tokenizer: Tokenizer, tmp_path: Path) -> None:
    server = make(tokenizer, "abc", access=access_for(tmp_path, tenants("ann", "bob")))

    async def session(path: str, headers: dict[str, str], **body: Any) -> str:
        asked = (ASK if path == CHAT else PROMPT) | body
        assert (await fetch(server.app, "POST", path, asked, headers)).status == 200
        return server.engine.submitted[-1].session

    ann, bob = bearer("ann"), bearer("bob")
    named = await session(CHAT, ann | {"x-session-id": "c1"}, user="u")
    assert await session(COMPLETIONS, ann | {"x-session-id": "c1"}) == named
    assert await session(CHAT, ann, prompt_cache_key="c1", user="u") == named
    assert await session(CHAT, ann, user="c1", prompt_cache_key={"no": "text"}) == named
    assert await session(CHAT, ann, user="u") not in (named, "")
    assert await session(CHAT, bob, user="c1") not in (named, "")
    assert await session(CHAT, bob, user=7) == ""
    assert len(await session(CHAT, bob, user="x" * 100_000)) == len(named)
    assert request_from_wire(request_to_wire(server.engine.submitted[0])).session == ""


def say(engine: PoolEngine, **stats: Any) -> None:
    """As if a step had ended."""
    assert engine.client is not None
    engine.client._stats = EngineStats(**stats)
