"""On a Ray of three nodes: replicas of two ranks restore what one on other nodes has computed, whatever dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from tests.cluster.conftest import RayCluster
from tests.cluster.remote_harness import answer_of
from tests.workers.launch_harness import Ranks
from tests.workers.parallel_harness import NUM_NEW, Chosen, without_near_ties
from tests.workers.test_group_offload import BLOCK_TOKENS, TENSOR, Group
from tournant.cluster.node_store import StorePlan
from tournant.cluster.node_store_actor import find_store, stop_store
from tournant.kvstore.admin import ListBlocks, Listed
from tournant.kvstore.agent_client import AgentClient
from tournant.kvstore.agent_wire import AGENT_SOCKET, Located
from tournant.kvstore.block import Part
from tournant.kvstore.client import ask
from tournant.kvstore.config import StoreConfig
from tournant.workers.rank_launch import GroupPlace

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]

APP = "remote-ranks"
PLAN = StorePlan(StoreConfig(16 << 20, chunk_bytes=1 << 20), drain_s=5.0)
PATIENCE_S = 120.0
LENGTHS = (33, 49, 64, 100)
FULL = sum((length - 1) // BLOCK_TOKENS for length in LENGTHS)  # blocks that may come back
SEALED = sum((length + NUM_NEW - 1) // BLOCK_TOKENS for length in LENGTHS)  # blocks that go down


@ray.remote(num_cpus=0)
def find_store_here() -> str:
    return find_store(PLAN, APP)


@ray.remote(num_cpus=0)
def stop_store_here() -> None:
    stop_store(APP, 30)


class At(Ranks):
    """Rank 1 uses the store of another node than the leader, or of the same."""

    def __init__(self, store: Path) -> None:
        super().__init__()
        self.store = store

    def start(self, place: GroupPlace) -> None:
        if place.offload is not None:
            place = replace(place, offload=replace(place.offload, store_socket=str(self.store)))
        super().start(place)


@pytest.fixture(scope="module")
def stores(ray_cluster: RayCluster) -> Iterator[dict[str, Path]]:
    """Sockets of the nodes' stores."""
    names = ("head", "a", "b")
    found = [find_store_here.options(scheduling_strategy=ray_cluster.on(name)).remote() for name in names]
    yield dict(zip(names, map(Path, ray.get(found, timeout=PATIENCE_S)), strict=True))
    left = [name for name in names if name in ray_cluster.nodes]
    ray.get([stop_store_here.options(scheduling_strategy=ray_cluster.on(name)).remote() for name in left])


@asynccontextmanager
async def replica(model: Path, first: Path, second: Path) -> AsyncIterator[Group]:
    """Of two ranks, each over the store of its node."""
    made = Group(lambda: At(second))
    waits = {"lookup_ms": 60_000, "restore_ms": 60_000}
    await made.start(model, cast(Any, SimpleNamespace(socket=first)), TENSOR, {}, **waits)
    try:
        await made.until(lambda: made.tiers.attached == 1)
        yield made
        assert await made.client.validate() == ""
    finally:
        await made.engine.close()


def until_known(there: Path, here: Path) -> None:
    """Until the agent of a node knows that other nodes hold what a store there has."""
    listed = ask(there, ListBlocks(0))
    assert isinstance(listed, Listed)
    end = time.monotonic() + PATIENCE_S
    with closing(AgentClient(here.with_name(AGENT_SOCKET))) as agent:
        for line in listed.lines:
            while True:
                agent.locate([line.key], Part(0, 1, 0, 1))
                answer = answer_of(agent)
                if isinstance(answer, Located) and answer.count:
                    break
                assert time.monotonic() < end, f"{here} does not hear of {there}"


def test_ranks_restore_what_ranks_on_other_nodes_computed(
    ray_cluster: RayCluster, stores: dict[str, Path], tiny_model: Path
) -> None:
    """From one node to two, then from two to the same two with the parts the other way round, then a node dies."""
    chosen = without_near_ties(tiny_model, LENGTHS)
    head, a, b = (stores[name] for name in ("head", "a", "b"))

    async def scenario() -> None:
        async with replica(tiny_model, a, a) as one:
            assert await one.answers(chosen) == (0, 0, 0)
            await one.forget_device(SEALED)
        until_known(a, head)
        until_known(a, b)
        async with replica(tiny_model, b, head) as two:
            assert await two.answers(chosen) == (0, FULL, 0)
            assert two.tiers.remote_blocks == FULL
            await two.forget_device()
            assert await two.answers(chosen) == (0, FULL, 0)
            assert two.tiers.remote_blocks == FULL, "it is here now"
        async with replica(tiny_model, head, b) as three:
            await check_one_by_one(three, chosen, 2, lambda: None)
            assert three.tiers.remote_blocks > 0
            await check_one_by_one(three, chosen, 4, lambda: ray_cluster.remove_node("a"))

    asyncio.run(asyncio.wait_for(scenario(), 380))


async def check_one_by_one(group: Group, chosen: Chosen, last: int, act: Callable[[], object]) -> None:
    """Ask for two prompts; something happens while they are being answered, which is right all the same."""
    some = Chosen(chosen.prompts[last - 2 : last], chosen.answers[last - 2 : last])
    asked = asyncio.ensure_future(group.answers(some))
    await asyncio.sleep(0)
    await asyncio.get_running_loop().run_in_executor(None, act)
    device, host, _ = await asked
    assert device == 0
    assert host <= sum((len(prompt) - 1) // BLOCK_TOKENS for prompt in some.prompts)
