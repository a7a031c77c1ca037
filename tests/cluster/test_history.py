"""Two replicas of two ranks share stores on three nodes while everything is killed that can be: no answer is wrong, and
none is missing.

Rank 0 of both replicas is on the head, rank 1 on one of two other nodes, so that every block has its parts in two
stores, written by two groups at once and read by whatever groups come after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

from tests.cluster.chaos import KINDS, Clients, Kills
from tests.cluster.conftest import RayCluster
from tests.cluster.service_harness import Service, free_port, wait_for
from tests.workers.parallel_harness import without_near_ties
from tournant.deploy import app
from tournant.kvstore.admin import VerifiedBlocks, VerifyBlocks
from tournant.kvstore.client import ask

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]
LENGTHS = tuple(range(20, 260, 10))
LATE_S = 90.0  # no request may take longer; the service's own limits are 30 and 45 s
BLOCK_BYTES = 16 * 2 * 2 * 1 * 64 * 4  # of one of two ranks: tokens, layers, K and V, KV heads, head size, fp32


class CheckedReplica(app.Replica):
    """A replica whose engine can be asked whether all is as it must be."""

    async def validate(self) -> tuple[int, str]:
        """The engine's process, and what is wrong with it."""
        engine: Any = self.frontend.engine
        return engine.info.pid, await engine.engine._client.validate()


@pytest.fixture(scope="module")
def service(ray_cluster: RayCluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """tp.yaml with two replicas of two ranks."""
    port, cache = free_port(), tmp_path_factory.mktemp("cache")
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port, "request_timeout_s": 45})
    args: Mapping[str, Any] = {
        "num_replicas": 2,
        "request_timeout_s": 30,
        "engine": {"tensor_parallel_size": 2, "kv_cache_bytes": 64 * BLOCK_BYTES},
        "kv_store": {"host_bytes": 400 * BLOCK_BYTES},
        "advanced": {"lookup_ms": 1_000, "restore_ms": 5_000},
    }
    bundles = [{"CPU": 1, "head": 1}, {"CPU": 1, "beside": 1}]
    options = {"placement_group_bundles": bundles, "placement_group_strategy": "PACK"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "Replica", CheckedReplica)
        made = Service("tp", tiny_model, cache, port, args=args, **options)
    try:
        serve.run_many([made.target])
        yield made
    finally:
        serve.shutdown()


@pytest.mark.parametrize(
    ("duration_s", "seed"),
    [
        pytest.param(60.0, 1, marks=pytest.mark.timeout(600)),
        pytest.param(600.0, 2, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
    ids=["one minute", "ten minutes"],
)
def test_no_answer_is_wrong_or_missing(
    ray_cluster: RayCluster, service: Service, tiny_model: Path, duration_s: float, seed: int
) -> None:
    chosen = without_near_ties(tiny_model, LENGTHS)
    clients = Clients(service, chosen, seed, 4, LATE_S)
    kills = Kills(ray_cluster, service, clients, seed, patient=duration_s > 60)
    try:
        kills.run(duration_s)
        kills.wait_whole()
        clients.wait_calm(30)
    finally:
        clients.stop()
        print("\n".join([*kills.log, *clients.told()]))
    bad = [
        asked for asked in clients.history if asked.outcome in ("wrong", "late") or asked.back - asked.invoked > LATE_S
    ]
    assert not bad, bad
    check_engines(service)
    check_stores(ray_cluster, service)
    assert kills.done.keys() == set(KINDS)
    counts = clients.counts()
    assert counts["right"] > 50
    assert counts["refused"] + counts["broken"] > 0, "nobody noticed a kill"
    restored = [asked for asked in clients.history if asked.host]
    assert len(restored) > 0.1 * counts["right"], "too little came from the stores to mean anything"


def check_engines(service: Service) -> None:
    """Both are asked until they have said that nothing is wrong with them."""
    handle: Any = serve.get_app_handle(service.target.name)
    found: dict[int, str] = {}

    def both() -> bool:
        pid, problem = handle.validate.remote().result(timeout_s=60)
        found[pid] = problem
        return len(found) == 2

    wait_for(both)
    assert set(found.values()) == {""}


def check_stores(cluster: RayCluster, service: Service) -> None:
    """All bytes of all stores are what their checksums say."""
    good = 0
    for name in cluster.nodes:
        try:
            actor = ray.get_actor(
                f"tournant-store-{cluster.node_id(name)}", namespace=f"tournant-{service.target.name}"
            )
        except ValueError:
            continue  # no rank has been there
        socket = Path(ray.get(actor.status.remote(), timeout=60)["socket"])
        page = VerifiedBlocks(0, True, 0, 0, 0, 0)
        while page.more:
            answer = ask(socket, VerifyBlocks(page.after), 30.0)
            assert isinstance(answer, VerifiedBlocks)
            page = answer
            assert page.host_bad == 0
            good += page.host_good
    assert good > 0
