"""A replica's conversation with the roll-out: joining, changing in its turn, failing, running out of time, ending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.deploy.async_test import async_test
from tournant.cluster.weights_rollout import Order, Phase, Report, Rollout, RolloutConfig, UpdateUnavailable, Weights
from tournant.deploy import weights_loop as module
from tournant.deploy.engine_swap import SwapFailed
from tournant.deploy.weights_loop import WeightsLoop
from tournant.workers.errors import ConfigError, ModelFormatError

CONFIG = RolloutConfig(turn_us=60_000_000, silent_us=30_000_000)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.001)


class Answering:
    """The roll-out in this process: answers every report at once, unless it is away."""

    def __init__(self, config: RolloutConfig = CONFIG) -> None:
        self.core = Rollout("old", config, 0, settling=False)
        self.away = False
        self.reports: list[Report] = []

    async def report(self, report: Report, hold_s: float) -> Order:
        await asyncio.sleep(0.001)
        if self.away:
            raise UpdateUnavailable("nobody answers")
        self.reports.append(report)
        return self.core.hear(time.monotonic_ns() // 1000, report)

    @property
    def state(self) -> str:
        return self.core.status(time.monotonic_ns() // 1000).state

    def update(self, model: str) -> None:
        self.core.update(time.monotonic_ns() // 1000, model, f"wish for {model}")


class Engine:
    """What a change does to a replica."""

    def __init__(self) -> None:
        self.models: list[str | None] = []
        self.error: Exception | None = None
        self.hangs = False

    async def change(self, weights: Weights) -> str:
        self.models.append(weights.model)
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return f"id of {weights.model}"


async def begin(answering: Answering, engine: Engine, name: str = "a") -> WeightsLoop:
    loop = WeightsLoop(name, answering, engine.change)
    weights = await loop.join()
    await loop.started(f"id of {weights.model}")
    return loop


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.001)


@async_test
async def test_replicas_join_change_and_end() -> None:
    answering, engines = Answering(), [Engine(), Engine()]
    loops = [await begin(answering, engine, name) for engine, name in zip(engines, "ab", strict=True)]
    assert [loop.weights for loop in loops] == [Weights(0, "old", "", "id of old")] * 2
    answering.update("new")
    await until(lambda: answering.state == "done")
    assert [engine.models for engine in engines] == [["new"], ["new"]]
    assert {loop.weights and loop.weights.epoch for loop in loops} == {1}
    await asyncio.gather(*(loop.stop() for loop in loops))
    assert [report.phase for report in answering.reports[-2:]] == [Phase.LEAVING] * 2
    assert answering.core.num_live == 0
    await loops[0].stop()


@async_test
@pytest.mark.parametrize("error", [ModelFormatError("no such folder"), SwapFailed("no such folder", serving=True)])
async def test_what_cannot_be_loaded_is_reported_and_the_replica_goes_on(error: Exception) -> None:
    answering, engine = Answering(), Engine()
    loop = await begin(answering, engine)
    epochs: list[int] = []
    loop.on_epoch = epochs.append
    engine.error = error
    answering.update("bad")
    await until(lambda: answering.state == "failed")
    await until(lambda: loop.weights is not None and loop.weights.epoch == 2)
    assert answering.core.plan.failure == "replica a: no such folder"
    assert (loop.lost, loop.weights and loop.weights.model, engine.models) == ("", "old", ["bad"])
    await until(lambda: epochs == [2])  # the same weights by a new name
    await loop.stop()


@async_test
@pytest.mark.parametrize("hangs", [False, True])
async def test_a_replica_without_an_engine_says_so_and_is_lost(hangs: bool) -> None:
    answering, engine = Answering(RolloutConfig(turn_us=200_000, silent_us=30_000_000)), Engine()
    loop = await begin(answering, engine)
    engine.hangs, engine.error = hangs, SwapFailed("neither can be loaded", serving=False)
    answering.update("bad")
    await until(lambda: loop.lost != "")
    assert ("longer than" if hangs else "neither can be loaded") in loop.lost
    await until(lambda: answering.state == "failed")
    assert loop.lost in answering.core.plan.failure
    assert answering.core.num_live == 0
    await loop.stop()


@async_test
async def test_a_change_that_breaks_in_a_way_that_nobody_thought_of_costs_the_replica() -> None:
    answering, engine = Answering(), Engine()
    loop = await begin(answering, engine)
    engine.error = KeyError("model.norm")
    answering.update("bad")
    await until(lambda: answering.state == "failed")
    assert (loop.lost, answering.core.plan.failure) == ("KeyError: 'model.norm'", "replica a: KeyError: 'model.norm'")
    await loop.stop()


@async_test
async def test_a_replica_with_other_bytes_is_not_let_in() -> None:
    answering = Answering()
    first = await begin(answering, Engine())
    second = WeightsLoop("b", answering, Engine().change)
    await second.join()
    with pytest.raises(ConfigError, match="found the weights other"):
        await second.started("other")
    await asyncio.gather(first.stop(), second.stop())


@async_test
async def test_without_answers_a_replica_goes_on_and_one_that_joins_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answering, engine = Answering(), Engine()
    loop = await begin(answering, engine)
    answering.away = True
    monkeypatch.setattr(module, "JOIN_S", 0.05)
    with pytest.raises(UpdateUnavailable, match=r"in 0.05 s: nobody answers$"):
        await WeightsLoop("b", answering, engine.change).join()
    assert loop.lost == ""
    answering.away = False
    answering.update("new")
    await until(lambda: answering.state == "done")
    await loop.stop()
