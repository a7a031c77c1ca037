"""Ray's GCS is killed under load and brought back: requests need no part of it, and afterwards it knows what it knew.

It keeps its state in RocksDB, which comes with Ray 2.60 (alpha there), so that no Redis is needed. Without any such
store a GCS that ends takes the cluster with it, whatever runs there.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
import ray

from tests.integration.conftest import Deployed, Proofs
from tests.integration.load import Load

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]


@pytest.fixture(scope="module", autouse=True)
def _last(proofs: Proofs) -> Iterator[None]:
    """The last file that uses these nodes ends them."""
    yield
    proofs.close()


async def lose_it(deployed: Deployed, load: Load, num_answers: int, *, kill_engine: bool) -> None:
    """The GCS is away until that many requests that came meanwhile are answered. An engine may be lost meanwhile."""
    node, engines = deployed.cluster.cluster.head_node, deployed.engines()
    assert len(engines) == 2
    node.kill_gcs_server()
    try:
        if kill_engine:
            os.kill(engines[0], signal.SIGKILL)
        await load.until(num_answers)
        assert load.failures == []
    finally:
        node.start_gcs_server()  # on this thread, with which it ends
    await load.until(num_answers)


async def replaced(deployed: Deployed, engine: int) -> None:
    """There are two engines again without this one, and Serve and the registry know them."""
    while engine in (found := deployed.engines()) or len(found) < 2:
        await asyncio.sleep(0.2)
    while len(await asyncio.to_thread(deployed.replicas)) < 2:
        await asyncio.sleep(0.2)


def test_the_gcs_is_killed_and_brought_back_under_load(deployed: Deployed) -> None:
    """It then starts what is new."""

    @ray.remote(num_cpus=0)
    def work() -> int:
        return 1

    async def scenario() -> None:
        load = Load(deployed.url, length=40)
        await load.learn()
        async with load.running(4):
            await lose_it(deployed, load, 20, kill_engine=False)
        assert load.failures == []
        assert ray.get(work.remote()) == 1
        assert set(deployed.states()) == {"Ingress", "Replica"}
        assert len(await asyncio.to_thread(deployed.replicas)) == 2

    asyncio.run(scenario())


@pytest.mark.soak
def test_engines_die_while_the_gcs_is_away(deployed: Deployed) -> None:
    async def scenario() -> None:
        load = Load(deployed.url, length=60, num_prompts=20)
        await load.learn()
        async with load.running(20):
            for turn in range(3):
                first = deployed.engines()[0]
                await lose_it(deployed, load, 60, kill_engine=True)
                await replaced(deployed, first)
                print(f"\n{turn}: {load.told}")
        assert load.failures == []

    asyncio.run(scenario())
