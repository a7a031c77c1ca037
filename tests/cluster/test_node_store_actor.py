"""One store per node on a real Ray, whoever asks for it and whatever dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.cluster.conftest import RayCluster
from tests.kvstore.store_harness import writer
from tournant.cluster.node_store import StorePlan
from tournant.cluster.node_store_actor import find_store, stop_store
from tournant.kvstore.client import connect
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.errors import StoreConfigError, StoreRefused, StoreUnavailable

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]

PLAN = StorePlan(StoreConfig(4 << 20, chunk_bytes=1 << 20), drain_s=5.0)
OTHER = replace(PLAN, store=StoreConfig(8 << 20, chunk_bytes=1 << 20))


@pytest.fixture
def app(request: pytest.FixtureRequest) -> Iterator[str]:
    """An application name of this test's own, whose store ends with it."""
    yield request.node.name
    stop_store(request.node.name, 30)


def actor_of(app: str) -> Any:
    return ray.get_actor(f"tournant-store-{ray.get_runtime_context().get_node_id()}", namespace=f"tournant-{app}")


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def status(app: str) -> dict[str, Any]:
    """Asked until the store and its actor answer."""
    found: list[dict[str, Any]] = []

    def asked() -> bool:
        try:
            found.append(ray.get(actor_of(app).status.remote(), timeout=30))
        except (ray.exceptions.RayActorError, StoreUnavailable):
            return False
        return True

    until(asked)
    return found[0]


@ray.remote(num_cpus=0, resources={"head": 0.01})
def ask_as_replica(app: str) -> str:
    """What a replica in a process of its own gets."""
    return find_store(PLAN, app)


def test_two_replicas_get_one_store_and_a_killed_one_comes_back_for_both(app: str, ray_cluster: RayCluster) -> None:
    sockets = ray.get([ask_as_replica.remote(app) for _ in range(2)], timeout=90)
    assert sockets[0] == sockets[1] == find_store(PLAN, app)
    assert Path(sockets[0]).is_relative_to(ray_cluster.folder)
    assert status(app)["starts"] == 1
    os.kill(status(app)["pid"], signal.SIGKILL)
    until(lambda: status(app)["starts"] == 2)
    assert find_store(PLAN, app) == status(app)["socket"] == sockets[0]
    connect(Path(sockets[0]), writer()).close()


def test_a_killed_actor_comes_back_with_a_store_at_the_same_socket(app: str) -> None:
    socket = find_store(PLAN, app)
    first = status(app)["pid"]
    ray.kill(actor_of(app), no_restart=False)
    until(lambda: not Path("/proc", str(first)).exists())
    assert find_store(PLAN, app) == socket
    assert status(app)["pid"] != first
    connect(Path(socket), writer()).close()


def test_another_configuration_is_refused_while_engines_are_attached_and_taken_afterwards(app: str) -> None:
    socket = find_store(PLAN, app)
    client = connect(Path(socket), writer())
    with pytest.raises(StoreRefused, match=rf"^the node store runs with host_bytes {4 << 20}, not {8 << 20}; engines"):
        find_store(OTHER, app)
    client.close()
    until(lambda: not status(app)["clients"])
    assert find_store(OTHER, app) == socket
    assert status(app)["host_pages"] == (8 << 20) // 4096


def test_a_store_that_cannot_start_is_one_sentence_and_leaves_no_actor(app: str) -> None:
    nvme = StoreConfig(4 << 20, chunk_bytes=1 << 20, nvme_bytes=8 << 20, segment_bytes=1 << 20)
    with pytest.raises(StoreConfigError, match=r"^[^\n]*/dev/null[^\n]*$"):
        find_store(StorePlan(nvme, "/dev/null"), app)
    with pytest.raises(StoreConfigError, match=r"^host_bytes is \d+; Ray hands out \d+ bytes"):
        find_store(StorePlan(StoreConfig(1 << 44)), app)
    assert find_store(PLAN, app)


def test_a_store_ends_with_its_actor_when_nobody_uses_it(app: str) -> None:
    short = replace(PLAN, idle_exit_s=1.0)
    socket = Path(find_store(short, app))
    client = connect(socket, writer())
    pid = status(app)["pid"]
    client.close()

    def gone() -> bool:
        try:
            actor_of(app)
        except ValueError:
            return True
        return False

    until(gone)
    assert not Path("/proc", str(pid)).exists()
    assert not socket.exists()
    assert find_store(short, app) == str(socket)
