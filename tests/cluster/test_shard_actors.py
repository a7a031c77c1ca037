"""Replicas of several ranks on a Ray of three nodes, alone and deployed as the shipped files say: answers, and what
dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from ray import serve
from ray.util.placement_group import placement_group

from tests.cluster.conftest import RayCluster
from tests.cluster.group_harness import NodeStores, forget_all, ranks_on
from tests.cluster.service_harness import ENDS_S, Service, all_end, free_port, parent_of, wait_for
from tests.workers.harness import files_of
from tests.workers.parallel_harness import NUM_NEW, without_near_ties
from tests.workers.test_rank_launch import PLACE
from tournant.cluster.shard_actors import RayRanks, deal, leader_threads, node_address
from tournant.workers.errors import ConfigError
from tournant.workers.models.families import describe
from tournant.workers.split import Split

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]
HOST = socket.gethostname()
LENGTHS = (33, 100, 250)
FULL = sum((length - 1) // 16 for length in LENGTHS)  # blocks that may come back
SEALED = sum((length + NUM_NEW - 1) // 16 for length in LENGTHS)  # blocks that go down


@pytest.mark.parametrize(
    ("split", "nodes", "parts"),
    [
        ((1, 2), ("head", "b"), {"head": 1, "b": 1}),
        ((4, 1), ("head", "b", "b", "b"), {"head": 1, "b": 2}),  # two ranks for each of two KV heads, 0 and 1 the first
        ((2, 2), ("head", "b", "head", "b"), {"head": 2, "b": 2}),
    ],
    ids=["pipeline", "shared heads", "both"],
)
def test_the_same_tokens_from_every_tier_of_two_nodes(
    ray_cluster: RayCluster,
    tiny_model: Path,
    tmp_path: Path,
    split: tuple[int, int],
    nodes: tuple[str, ...],
    parts: dict[str, int],
) -> None:
    """And without stores. A store has each part that ranks of its node read once, however many of them hold it."""
    chosen = without_near_ties(tiny_model, LENGTHS)
    stores = NodeStores(ray_cluster, f"split{split[0]}x{split[1]}", tmp_path, list(parts))

    async def scenario() -> None:
        async with ranks_on(nodes, tiny_model, stores, split) as one:
            assert await one.answers(chosen) == (0, 0, 0)
            await one.forget_device(SEALED)
            for name, count in parts.items():
                assert [block.parts for block in stores.blocks(name)] == [count] * SEALED
                assert stores.status(name).reported == SEALED * count
            assert await one.answers(chosen) == (0, FULL, 0)
            await stores.on_disk()
            with stores.killed():
                await one.until(lambda: one.tiers.attached == 0)
                await forget_all(one)
                assert await one.answers(chosen) == (0, 0, 0)
                await forget_all(one)
            await one.until(lambda: one.tiers.attached == 1)
            device, host, nvme = await one.answers(chosen)
            assert (device, host + nvme) == (0, FULL)
            assert nvme > 0

    asyncio.run(scenario())
    stores.stop()


@pytest.fixture(scope="module")
def services(
    ray_cluster: RayCluster, tiny_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Service, Service]]:
    """tp.yaml with all its ranks on one node, and pp.yaml with a node for each rank."""
    port, cache = free_port(), tmp_path_factory.mktemp("cache")
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    head, b = {"CPU": 1, "head": 1}, {"CPU": 1, "b": 1}
    tp = Service("tp", tiny_models["tied"], cache, port, placement_group_bundles=[head] * 3)
    pp = Service("pp", tiny_models["m"], cache, port, placement_group_bundles=[head, b])
    try:
        serve.run_many([tp.target, pp.target])
        yield tp, pp
    finally:
        serve.shutdown()


def test_a_rank_is_killed_and_its_set_comes_back(ray_cluster: RayCluster, services: tuple[Service, Service]) -> None:
    _, service = services
    service.check_answers()
    service.forget_device()
    service.check_answers("host")
    first = service.facts()
    leader, rank = first["ranks"]
    assert [leader["node"], rank["node"]] == [ray_cluster.node_id(name) for name in ("head", "b")]
    assert (leader["pid"], first["last_end"]) == (first["engine_pid"], "")
    replica = parent_of(leader["pid"])
    with service.post("go on", max_tokens=1500, stream=True) as stream:
        assert stream.readline().startswith(b"data: {")
        os.kill(rank["pid"], signal.SIGKILL)
        *_, last, done = [line for line in stream.read().decode().splitlines() if line]
    assert done == "data: [DONE]"
    error = json.loads(last.removeprefix("data: "))["error"]
    cause = f"rank 1 on {HOST} (process {rank['pid']}): its process ended"
    assert (error["code"], cause in error["message"]) == ("engine_dead", True), error
    service.wait_answer()
    second = service.facts()
    assert (second["last_end"], second["restarting"]) == (cause, False)
    assert first["writer_id"] != second["writer_id"]
    assert parent_of(second["engine_pid"]) == replica
    assert [found["node"] for found in second["ranks"]] == [leader["node"], rank["node"]]
    assert all_end([leader["pid"]])
    service.wait_attached()
    service.check_answers("host")


def test_the_store_of_one_of_two_nodes_is_killed(ray_cluster: RayCluster, services: tuple[Service, Service]) -> None:
    """The answers go on without; all is below again once every rank has a store."""
    _, service = services
    service.check_answers()
    service.forget_device()
    head, b = ray_cluster.node_id("head"), ray_cluster.node_id("b")
    left, killed = service.store_pid(head), service.store_pid(b)
    assert left != killed
    os.kill(killed, signal.SIGKILL)
    assert all_end([killed])
    service.check_answers()
    service.forget_device()
    service.check_answers("host")
    assert service.store_pid(b) != killed
    assert service.store_pid(head) == left


def test_a_killed_replica_leaves_no_rank(services: tuple[Service, Service]) -> None:
    """Not even one that is stopped. What it has written is there for the next one."""
    service, _ = services
    service.check_answers()
    service.forget_device()
    service.check_answers("host")
    ranks = service.facts()["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    assert len({rank["node"] for rank in ranks}) == 1
    os.kill(ranks[2]["pid"], signal.SIGSTOP)
    os.kill(parent_of(ranks[0]["pid"]), signal.SIGKILL)
    assert all_end([rank["pid"] for rank in ranks])
    wait_for(lambda: service.replaced(ranks[0]["pid"]))
    service.wait_attached()
    service.check_answers("host")


def test_what_is_known_of_ranks_that_end(ray_cluster: RayCluster, tiny_model: Path) -> None:
    """One is killed, the node of another is lost, and a third is stopped: none is left, and nothing waits for ever."""
    files = files_of(tiny_model)
    group = placement_group([{name: 1.0} for name in ("head", "a", "head", "head")])
    assert group.wait(ENDS_S)
    assert leader_threads(group, 4) == max(1, len(os.sched_getaffinity(0)) // 3)
    assert leader_threads(group, 2) == max(1, len(os.sched_getaffinity(0)) // 2)
    with socket.create_server(("", 0), backlog=16) as silent:
        port = silent.getsockname()[1]
        launcher = RayRanks(group, node_address())
        place = replace(
            PLACE,
            host=launcher.host,
            port=port,
            channel_port=port,
            model=describe(files, PLACE.config).to_wire(),
            split=Split(5),
        )
        with pytest.raises(ConfigError, match="has 4 bundles, and its 5 ranks need one each"):
            launcher.start(place)
        launcher.start(replace(place, split=Split(4)))
        first, second, third = launcher.facts()
        head, a = ray_cluster.node_id("head"), ray_cluster.node_id("a")
        assert [(rank.rank, rank.node) for rank in (first, second, third)] == [(1, head), (2, head), (3, a)]
        assert launcher.causes() == []
        os.kill(first.pid, signal.SIGKILL)
        os.kill(second.pid, signal.SIGSTOP)
        killed = f"rank 1 on {HOST} (Ray node {head[:8]}): killed by signal 9"
        wait_for(lambda: launcher.causes() == [killed])
        ray_cluster.remove_node("a")
        wait_for(lambda: len(launcher.causes()) == 2)
        assert launcher.causes()[1].startswith(f"rank 3 on {HOST} (Ray node {a[:8]}): ")
        launcher.kill()
        launcher.kill()
        assert not Path(f"/proc/{second.pid}").exists()
        assert all_end([third.pid])
        assert len(launcher.causes()) == 2
        launcher.start(replace(place, split=Split(4)))
        assert len(launcher.facts()) == 3, "nothing is started after the kill"


@pytest.mark.parametrize(
    ("nodes", "size", "order"),
    [
        ("aaa", 3, [0, 1, 2]),
        ("abab", 4, [0, 2, 1, 3]),
        ("cabcab", 6, [0, 3, 1, 4, 2, 5]),
        ("abcab", 3, [0, 3, 1]),
    ],
)
def test_ranks_are_dealt_node_by_node(nodes: str, size: int, order: list[int]) -> None:
    assert deal(list(nodes), size) == order
