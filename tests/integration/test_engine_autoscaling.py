"""Autoscaling by a real Serve: engines come with load and go without it, to none and back, and what runs goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from tests.cluster.service_harness import wait_for
from tests.integration.conftest import Deployed
from tests.integration.load import Load
from tournant.deploy.app import make_app
from tournant.deploy.config import parse_config

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]
APP = "scaled"
READERS, LENGTH = 4, 400  # they ask all the while, and one engine is enough for them
CROWD, WORDS = 24, 100  # a prompt has about two tokens a word, and most of them wait
ENGINE = {"device": "cpu", "dtype": "float32", "deterministic": True, "max_num_seqs": 8, "kv_cache_bytes": "32MiB"}


def scaling(delay_s: float) -> dict[str, Any]:
    """One engine or two, by prompt tokens that wait; none when nobody asks."""
    kwargs = {"target_queue_s": 0.02, "tokens_per_s": 1000.0, "decode_cost": 0.0}
    return {
        "min_replicas": 0,
        "initial_replicas": 1,
        "max_replicas": 2,
        "metrics_interval_s": 0.25,
        "look_back_period_s": 1.0,
        "upscale_delay_s": 0.2,
        "downscale_delay_s": delay_s,
        "policy": {"policy_function": "tournant.cluster.autoscaling:ServingPolicy", "policy_kwargs": kwargs},
    }


class Scaled:
    """The application, and how many engines it has."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/{APP}"

    @classmethod
    @contextmanager
    def deploy(cls, nodes: Deployed, model: Path, ingress: str, delay_s: float) -> Iterator[Scaled]:
        """Deploy it for a while."""
        args = {"model": str(model), "served_model_name": "M", "ingress": ingress, "engine": ENGINE}
        config = parse_config(args | {"advanced": {"num_threads": 1, "weights_drain_s": 0}})
        options = {"autoscaling_config": scaling(delay_s), "ray_actor_options": {"num_cpus": 0}}
        app = make_app(config, options, str(nodes.cluster.folder), {"ray_actor_options": {"num_cpus": 0}})
        serve.run(app, name=APP, route_prefix=f"/{APP}")
        try:
            yield cls(nodes.url)
        finally:
            serve.delete(APP)

    @property
    def engines(self) -> int:
        deployment = serve.status().applications[APP].deployments["Replica"]
        return deployment.replica_states.get("RUNNING", 0)

    async def until(self, engines: int) -> float:
        """Wait until there are so many; how many seconds that took."""
        began = time.monotonic()
        await asyncio.to_thread(wait_for, lambda: self.engines == engines)
        return time.monotonic() - began


async def sawtooth(service: Scaled, teeth: int, told: Callable[[str], None]) -> float:
    """Crowds come and go while a few read on; then they go, and somebody comes after all. Returns the longest time that
    an engine stayed behind load.
    """
    readers, crowd = Load(service.url, LENGTH), Load(service.url, LENGTH // 2, CROWD, "{0} " * WORDS)
    await readers.learn()
    longest_s = 0.0
    async with readers.running(READERS):
        for _ in range(teeth):
            async with crowd.running(CROWD):
                told(f"2 engines after {await service.until(2):.1f} s")
                await crowd.until(CROWD // 4)
            behind_s = await service.until(1)
            longest_s = max(longest_s, behind_s)
            told(f"1 engine after {behind_s:.1f} s")
            await readers.until(2 * READERS)
    behind_s = await service.until(0)
    told(f"none after {behind_s:.1f} s")
    began = time.monotonic()
    async with readers.running(1):
        await readers.until(1)
    told(f"an answer after {time.monotonic() - began:.1f} s")
    told(f"readers: {readers.told}; crowds: {crowd.told}")
    assert service.engines == 1
    assert readers.failures + crowd.failures == []
    return max(longest_s, behind_s)


@pytest.mark.parametrize(
    ("ingress", "teeth", "delay_s"),
    [
        ("resilient", 1, 2.0),
        pytest.param("resilient", 3, 10.0, marks=pytest.mark.soak),
        pytest.param("direct", 3, 10.0, marks=pytest.mark.soak),
    ],
)
def test_engines_come_with_a_crowd_and_go_with_it_and_those_who_read_on_do_not_notice(
    nodes: Deployed, tiny_model: Path, ingress: str, teeth: int, delay_s: float
) -> None:
    with Scaled.deploy(nodes, tiny_model, ingress, delay_s) as service:
        behind_s = asyncio.run(sawtooth(service, teeth, lambda text: print(f"\n{ingress}: {text}", end="")))
        if ingress == "resilient":
            facts: Any = serve.get_app_handle(APP).describe.remote().result(timeout_s=60)
            print(f"\n{facts['num_resumed']} answers went on in the other engine")
        if delay_s >= 10:  # less is what a busy machine takes for other things
            assert behind_s <= 2 * delay_s
