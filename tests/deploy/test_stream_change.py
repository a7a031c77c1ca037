"""A replica with streams changes its weights in its turn: what runs goes on or is handed back, nothing gets lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.async_test import async_test
from tests.deploy.fake_engine import FakeEngineClient, make_info
from tests.deploy.fleet import Fleet, continuing, until
from tournant.cluster.weights_rollout import Weights
from tournant.deploy.engine_swap import EngineSwap, SwapFailed
from tournant.deploy.frontend import Frontend, FrontendOptions
from tournant.deploy.resume import MAX_RESUMES
from tournant.deploy.tokenizer import Tokenizer
from tournant.deploy.weights_loop import stream_change
from tournant.kvstore.block import Namespace
from tournant.workers.errors import ConfigError
from tournant.workers.model_folder import ModelFiles
from tournant.workers.sampling_params import SamplingParams

TEXT = "the quick brown fox jumps over the lazy dog"
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
IDS = {"old": b"o" * 32, "new": b"n" * 32, "bad": b"b" * 32}
FILES = {name: ModelFiles(Path("/", name), name, weights_id) for name, weights_id in IDS.items()}


def resolve(model: str | None) -> ModelFiles:
    return FILES[model or "old"]


async def start(files: ModelFiles) -> FakeEngineClient:
    if files.name == "bad":
        raise ConfigError("these weights are bad")
    info = make_info(namespace=Namespace(files.weights_id, "fp32", "fp32", b"l" * 32))
    return FakeEngineClient(continuing(TEXT if files.name == "old" else TEXT.upper()), info)


class Replicas(Fleet):
    """Two replicas whose weights can be changed, and a frontend over them."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[tuple[str, bool, int]] = []

    async def begin(self) -> None:
        for name in ("a", "b"):
            await self.add(name, await EngineSwap.start(start, FILES["old"]))

    async def change(self, name: str, weights: Weights, drain_s: float = 0.0) -> str:
        server, engine = self.sites[name].server, self.sites[name].engine

        def tell() -> None:
            self.states.append((name, server.draining, server.epoch))

        return await stream_change(server, engine, resolve, drain_s, tell)(weights)

    def running(self, name: str) -> FakeEngineClient:
        engine: Any = self.sites[name].engine.engine
        return engine

    def step(self, count: int = 1) -> None:
        for name in self.sites:
            self.running(name).step(count)


@async_test
async def test_answers_move_to_engines_on_their_weights_while_one_after_another_changes(tokenizer: Tokenizer) -> None:
    fleet = Replicas()
    await fleet.begin()
    frontend = Frontend(tokenizer, fleet.pool, FrontendOptions(max_resumes=MAX_RESUMES))
    try:
        streams = [frontend.submit([1, 2, 3], GREEDY) for _ in range(4)]
        await until(lambda: [len(fleet.running(name).running) for name in "ab"] == [2, 2])
        fleet.step(5)
        await until(lambda: all(len(stream.answers[0].token_ids) == 5 for stream in streams))
        assert await fleet.change("a", Weights(1, "new", "t")) == IDS["new"].hex()
        await until(lambda: len(fleet.running("b").running) == 4)
        assert fleet.running("a").submitted == []
        await until(lambda: fleet.pool.preferred() == (IDS["new"], 1))
        assert (fleet.pool.weights_id, fleet.pool.model_of(IDS["new"])) == (IDS["old"], "new")
        fleet.pool.use(IDS["new"])
        late = frontend.submit([1, 2, 3], GREEDY)
        await until(lambda: len(fleet.running("a").running) == 1)

        waiting = asyncio.ensure_future(fleet.change("b", Weights(1, "new", "t"), drain_s=20.0))
        await until(lambda: not fleet.pool.engines[1].serving)
        fleet.step(20)
        assert [(await stream.collect()).answers[0].text for stream in streams] == [TEXT[:20]] * 4
        assert (await late.collect()).answers[0].text == TEXT[:20].upper()
        await waiting
        await until(lambda: all(engine.serving for engine in fleet.pool.engines))
        assert {engine.weights_id for engine in fleet.pool.engines} == {IDS["new"]}
        assert fleet.states == [("a", True, 0), ("a", False, 1), ("b", True, 0), ("b", False, 1)]
    finally:
        await fleet.close()


@async_test
async def test_weights_that_cannot_be_loaded_leave_a_replica_as_it_was() -> None:
    fleet = Replicas()
    await fleet.begin()
    try:
        with pytest.raises(SwapFailed, match="these weights are bad"):
            await fleet.change("a", Weights(1, "bad", "t"))
        await until(lambda: fleet.pool.engines[0].serving)
        assert fleet.pool.engines[0].weights_id == IDS["old"]
        assert fleet.states[-1] == ("a", False, 0)
        with pytest.raises(ConfigError, match="0123 where it was loaded first"):
            await fleet.change("a", Weights(1, "new", "t", "0123"))
        assert len(fleet.states) == 2  # it was known before anybody had to wait
    finally:
        await fleet.close()
