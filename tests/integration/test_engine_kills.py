"""Engines, and whole replicas, are killed or stopped under streams, and nobody who reads one notices."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from contextlib import suppress

import pytest
import ray

from tests.cluster.service_harness import parent_of
from tests.integration.conftest import APP, Deployed
from tests.integration.load import Load
from tournant.cluster.app_namespace import namespace_of
from tournant.cluster.engines_actor import ACTOR_NAME
from tournant.workers.engine_watchdog import look_at

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]


def hit(pid: int, number: signal.Signals) -> bool:
    """Whether a process got a signal."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


async def engine_that_works(deployed: Deployed, load: Load) -> int:
    """One of them, once as many answers as there are clients have come: no answer is to see four deaths, however slow
    the machine.
    """
    await load.until(20)
    while not (found := deployed.engines()):
        await asyncio.sleep(0.1)
    return found[0]


async def kill_in_turn(deployed: Deployed, load: Load, every_s: float, duration_s: float) -> dict[str, int]:
    """An engine is killed every so often, and in every fourth round its whole replica; how many of each."""
    done = {"engine": 0, "replica": 0}
    end = time.monotonic() + duration_s
    for turn in itertools.count(1):
        victim = await engine_that_works(deployed, load)
        kind = "engine" if turn % 4 else "replica"
        with suppress(OSError):  # it ended by itself meanwhile
            done[kind] += hit(victim if kind == "engine" else parent_of(victim), signal.SIGKILL)
        if time.monotonic() + every_s > end:
            return done
        await asyncio.sleep(every_s)
    return done


async def both_back(deployed: Deployed) -> None:
    while len(deployed.engines()) != 2 or len(await asyncio.to_thread(deployed.replicas)) != 2:
        await asyncio.sleep(0.2)


def ticks_of(pid: int) -> int:
    """CPU time that an engine's main thread, which computes, has used."""
    found = look_at(pid)
    assert found is not None
    return found.cpu_ticks


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_two_minutes_of_kills_under_twenty_streams(deployed: Deployed) -> None:
    async def scenario() -> None:
        load = Load(deployed.url, length=60, num_prompts=20)
        await load.learn()
        began = time.monotonic()
        async with load.running(20):
            done = await kill_in_turn(deployed, load, every_s=10, duration_s=120)
        took_s = time.monotonic() - began
        await both_back(deployed)
        num_resumed = await asyncio.to_thread(deployed.num_resumed)
        print(f"\n{done} in {took_s:.0f} s: {load.told}; {num_resumed} answers went on elsewhere")
        assert load.failures == []
        assert done["engine"] >= 5
        assert done["replica"] >= 1

    asyncio.run(scenario())


async def busiest_of(deployed: Deployed, load: Load, num_streams: int) -> int:
    """The engine that works most while so many streams flow: it has some of them."""
    await load.all_flow(num_streams, 3)
    idle = {pid: ticks_of(pid) for pid in deployed.engines()}
    await load.all_flow(num_streams, 30)
    return max(idle, key=lambda pid: ticks_of(pid) - idle[pid])


def test_an_engine_and_the_registry_are_killed_under_streams(deployed: Deployed) -> None:
    """That the engine comes back is for the long forms, and for the roll-out behind this."""

    async def scenario() -> None:
        load, long = Load(deployed.url, length=60), Load(deployed.url, length=1000, num_prompts=2)
        await load.learn()
        await long.learn()
        await both_back(deployed)
        before = await asyncio.to_thread(deployed.num_resumed)
        async with load.running(2):
            async with long.running(2, streams_only=True):
                assert hit(await busiest_of(deployed, long, 2), signal.SIGKILL)
            registry = ray.get_actor(ACTOR_NAME, namespace=namespace_of(APP))
            ray.kill(registry, no_restart=False)  # ingresses keep the engines that they have
            await load.until(6)
        assert (load.failures, long.failures) == ([], [])
        assert await asyncio.to_thread(deployed.num_resumed) > before

    asyncio.run(scenario())


@pytest.mark.soak
def test_an_engine_that_was_stopped_is_found_and_its_log_has_the_cause(deployed: Deployed) -> None:
    async def scenario() -> None:
        load = Load(deployed.url, length=60)
        await both_back(deployed)
        await load.learn()
        async with load.running(8):
            first, _ = deployed.engines()
            began = time.monotonic()
            assert hit(first, signal.SIGSTOP)
            while not (told := deployed.logged(f"process {first} is killed")):
                await asyncio.sleep(0.1)
            print(f"\nfound after {time.monotonic() - began:.1f} s: {told[0]}")
            assert "has said and done nothing for 15 s: it was stopped" in told[0]
            await load.until(8)
            await both_back(deployed)
        print(load.told)
        assert load.failures == []

    asyncio.run(scenario())
