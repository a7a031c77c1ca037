"""The registry of engines as an actor of a real Ray."""

from __future__ import annotations

import asyncio

import pytest
import ray

from tournant.cluster.app_namespace import namespace_of
from tournant.cluster.engine_members import Member, MembersConfig
from tournant.cluster.engines_actor import ACTOR_NAME, EngineAnnouncer, EnginesClient, EngineWatch

pytestmark = pytest.mark.ray


@pytest.mark.usefixtures("ray_cluster")
def test_the_registry_hears_of_everybody_again_after_it_was_killed() -> None:
    async def scenario() -> None:
        client = EnginesClient("registry", MembersConfig(lease_us=2_000_000), idle_s=60.0)
        seen: list[set[str]] = []
        watch = EngineWatch(client, lambda members: seen.append({member.replica for member in members}))
        members = [Member(name, "127.0.0.1", 1, b"t", "n", "00", 0) for name in "ab"]
        first, second = (EngineAnnouncer(client, member, heartbeat_s=0.3) for member in members)

        async def until(names: set[str]) -> None:
            while not seen or seen[-1] != names:
                await asyncio.sleep(0.02)

        await until({"a", "b"})
        before = len(seen)
        ray.kill(ray.get_actor(ACTOR_NAME, namespace=namespace_of("registry")), no_restart=False)
        while len(seen) == before or seen[-1] != {"a", "b"}:
            await asyncio.sleep(0.02)
        await second.stop()
        await until({"a"})
        if first._task is not None:
            first._task.cancel()  # it dies without a word
        await until(set())
        await watch.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))
