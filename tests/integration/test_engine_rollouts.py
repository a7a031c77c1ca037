"""The service is deployed anew and given other weights while clients ask it, and every request is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from ray import serve

from tests.helpers.tiny_model import build_tiny_model
from tests.integration.conftest import APP, Deployed
from tests.integration.load import Load

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]
CLIENTS, LENGTH, LONG = 12, 40, 1500


@asynccontextmanager
async def measured(name: str, load: Load) -> AsyncIterator[None]:
    began, before = time.monotonic(), load.num_answered
    load.slowest_s = 0.0
    yield
    print(f"\n{name}: {time.monotonic() - began:.0f} s, {load.num_answered - before} more; {load.told}")


async def replace_all(deployed: Deployed, load: Load) -> None:
    """Deploy it as its arguments say now, under load before, meanwhile and after: all that was there is replaced."""
    before = set(deployed.engines())
    await load.until(8)
    await asyncio.to_thread(deployed.run)
    await load.until(8)
    after = set(deployed.engines())
    assert (len(after), before & after) == (2, set())


async def update_weights(load: Load, model: Path) -> None:
    """All engines get other weights, under load."""
    handle = serve.get_app_handle(APP)
    epoch = await handle.update_weights.remote(str(model))
    while True:
        status = await handle.weights_status.remote()
        if status["state"] == "done" and status["epoch"] == epoch:
            break
        await asyncio.sleep(0.2)
    await load.until(CLIENTS)
    assert len(load.answered) == 2


def test_everything_is_replaced_under_load_and_no_request_is_lost(deployed: Deployed) -> None:
    """Both engines and both ingresses, one after another."""

    async def scenario() -> None:
        load = Load(deployed.url, LENGTH, pause_s=0.2)  # with none it would be the clients that take the time
        await load.learn()
        deployed.args["engine"]["max_num_seqs"] = 32
        async with load.running(4):
            await replace_all(deployed, load)
        assert load.failures == []

    asyncio.run(scenario())


def test_the_weights_change_under_load_and_every_answer_is_of_one_model(deployed: Deployed, tmp_path: Path) -> None:
    new = build_tiny_model(tmp_path / "new", seed=9)

    async def scenario() -> None:
        load = Load(deployed.url, LENGTH)
        await load.learn()
        async with load.running(4):
            await update_weights(load, new)
        assert load.failures == []

    asyncio.run(scenario())


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ingress", "seed"), [("resilient", 7), ("direct", 8)])
def test_three_rollouts_lose_no_request(deployed: Deployed, tmp_path: Path, ingress: str, seed: int) -> None:
    """Of a changed engine, of other weights, and of other resources. Some streams outlast what they began on."""
    new = build_tiny_model(tmp_path / "new", seed=seed)

    async def scenario() -> None:
        deployed.args["ingress"] = ingress
        await asyncio.to_thread(deployed.run)
        load, long = Load(deployed.url, LENGTH), Load(deployed.url, LONG, num_prompts=2)
        await load.learn()
        await long.learn()
        async with load.running(CLIENTS), long.running(2), measured(f"{ingress}: engine", load):
            deployed.args["engine"]["max_num_seqs"] = 24
            await replace_all(deployed, load)
        print(long.told)
        async with load.running(CLIENTS), measured(f"{ingress}: weights", load):
            await update_weights(load, new)
        async with load.running(CLIENTS), long.running(2):
            async with measured(f"{ingress}: resources", load):
                deployed.options["ray_actor_options"] = {"num_cpus": 0.5}
                await replace_all(deployed, load)
            while load.num_answered < 1000:
                await asyncio.sleep(0.1)
        print(long.told)
        assert (load.failures, long.failures) == ([], [])

    try:
        asyncio.run(scenario())
    finally:
        deployed.args["ingress"] = "resilient"
        deployed.options.pop("ray_actor_options", None)
        deployed.run()
