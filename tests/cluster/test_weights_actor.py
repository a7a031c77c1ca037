"""The roll-out on a real Ray: held calls, an actor that is killed in the middle of an update, and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import ray

from tournant.cluster.weights_actor import WeightsClient
from tournant.cluster.weights_follower import Follower
from tournant.cluster.weights_rollout import Action, Phase, RolloutConfig, Status, UpdateRunning, UpdateUnavailable

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]

CONFIG = RolloutConfig(turn_us=60_000_000, silent_us=2_000_000)


class Replica:
    """A follower and the loop that a replica runs, with an engine that is only a name."""

    def __init__(self, name: str, client: WeightsClient) -> None:
        self.follower = Follower(name)
        self.client = client
        self.task = asyncio.get_running_loop().create_task(self.run())

    async def run(self) -> None:
        while self.follower.phase is not Phase.LEAVING:
            report = self.follower.report()
            order = await self.client.report(report, hold_s=0.5)
            match self.follower.take(report.number, order):
                case Action.START:
                    assert self.follower.weights is not None
                    self.follower.started(f"id of {self.follower.weights.model}")
                case Action.CHANGE:
                    target = self.follower.target
                    assert target is not None
                    if target.model == "bad":
                        self.follower.failed("no such file")
                    else:
                        self.follower.changed(f"id of {target.model}")

    @property
    def serves(self) -> tuple[int, str | None] | None:
        weights = self.follower.weights
        return weights and (weights.epoch, weights.model)


async def until(client: WeightsClient, holds: Callable[[Status], bool]) -> Status:
    deadline = time.monotonic() + 60
    while not holds(status := await client.status()):
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.05)
    return status


def run(test: Callable[[WeightsClient], Awaitable[None]], app: str, idle_s: float = 60.0) -> None:
    async def begin() -> None:
        client = WeightsClient(app, "old", CONFIG, idle_s)
        for _ in range(12):  # a busy machine takes longer to start an actor than callers wait
            with suppress(UpdateUnavailable):
                await client.status()
                break
        await test(client)

    asyncio.run(begin())


def test_an_update_goes_on_though_its_actor_is_killed() -> None:
    async def test(client: WeightsClient) -> None:
        with pytest.raises(UpdateUnavailable, match="no replica is there"):
            await client.update("new", "t0")
        replicas = [Replica(name, client) for name in ("a", "b", "c")]
        await until(client, lambda status: len(status.replicas) == 3 and status.state == "done")
        assert await client.update("new", "t1") == 1
        ray.kill(ray.get_actor(client.name, namespace="tournant-killed"), no_restart=False)
        await until(client, lambda status: status.state == "learning")
        status = await until(client, lambda status: status.state == "done" and len(status.replicas) == 3)
        assert (status.target.epoch, status.target.model) == (1, "new")
        assert {replica.serves for replica in replicas} == {(1, "new")}
        assert await client.update("bad", "t2") == 2
        status = await until(client, lambda status: status.state == "failed")
        assert (status.failed, status.target.epoch) == (2, 3)
        assert "no such file" in status.failure
        assert {replica.serves and replica.serves[1] for replica in replicas} == {"new"}
        plain = status.to_plain()
        assert (plain["epoch"], plain["failed_epoch"], plain["weights_id"]) == (3, 2, "id of new")
        for replica in replicas:
            replica.task.cancel()

    run(test, "killed")


def test_a_second_update_is_refused_in_words_and_the_actor_ends_when_nobody_calls() -> None:
    async def test(client: WeightsClient) -> None:
        follower = Follower("a")
        for _ in range(2):
            report = follower.report()
            if follower.take(report.number, await client.report(report, hold_s=0.1)) is Action.START:
                follower.started("id")
        asking = asyncio.gather(client.update("new", "t1"), client.report(follower.report(), hold_s=5.0))
        report = follower.report()
        order = await client.report(report, hold_s=5.0)  # held until there is an update
        assert follower.take(report.number, order) is Action.CHANGE
        await client.report(follower.report(), hold_s=0.1)
        assert (await asking)[0] == 1
        with pytest.raises(UpdateRunning, match=r"^the weights update with epoch 1 is not over") as caught:
            await client.update("newer", "t2")
        assert type(caught.value) is UpdateRunning
        assert caught.value.epoch == 1
        deadline = time.monotonic() + 60
        while True:
            try:
                ray.get_actor(client.name, namespace="tournant-idle")
            except ValueError:
                break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        assert (await client.status()).target.model == "old"  # nobody is left who knew more

    run(test, "idle", idle_s=2.0)
