"""On a Ray of three nodes: an engine on one restores what an engine on another has saved, whatever dies meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from benchmarks import remote as benchmark
from benchmarks.common import Options
from tests.cluster.conftest import RayCluster
from tests.workers.link_harness import Engine
from tests.workers.link_harness import keys as any_keys
from tournant.cluster.node_store import StorePlan
from tournant.cluster.node_store_actor import find_store, stop_store
from tournant.kvstore.agent_wire import AGENT_SOCKET
from tournant.kvstore.config import StoreConfig
from tournant.workers import remote_reads
from tournant.workers.transfer_messages import HOST, REMOTE, EndRead, Fetch, Load, SaveEntry

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]

APP = "remote"
PLAN = StorePlan(StoreConfig(8 << 20, chunk_bytes=1 << 20), drain_s=5.0)
PATIENCE_S = 60.0


@ray.remote(num_cpus=0)
def find_store_here(app: str) -> str:
    return find_store(PLAN, app)


@ray.remote(num_cpus=0)
def stop_store_here(app: str) -> None:
    stop_store(app, 30)


def keys(count: int, name: str) -> tuple[bytes, ...]:
    """Keys that end alike, as those of a chain do."""
    chain = any_keys(count, name)
    return tuple(key[:-2] + chain[0][-2:] for key in chain)


class Engines:
    """An engine's link on each of two nodes."""

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        sockets = ray.get([self._find(name) for name in "ab"], timeout=PATIENCE_S)
        self.sockets = dict(zip("ab", map(Path, sockets), strict=True))
        self.a, self.b = (self._engine(name) for name in "ab")

    def _find(self, name: str) -> Any:
        return find_store_here.options(scheduling_strategy=self.cluster.on(name)).remote(APP)

    def _engine(self, name: str) -> Engine:
        path = self.sockets[name]
        engine = Engine(path, agent=path.with_name(AGENT_SOCKET), lookup_ms=60_000, restore_ms=10_000)
        engine.attached()
        return engine

    def saved_by_a(self, name: str, count: int = 30) -> tuple[tuple[bytes, ...], list[SaveEntry]]:
        """A chain that is in the store of node a, and known to be there on node b."""
        chain = keys(count, name)
        entries = self.a.fill(chain)
        self.a.save(entries)
        self.known(chain)
        return chain, entries

    def known(self, chain: Sequence[bytes]) -> int:
        """Wait until node b knows that another node has the whole chain; an open read of it."""
        end = time.monotonic() + PATIENCE_S
        while (found := self.b.lookup(chain)).tiers != bytes([REMOTE]) * len(chain):
            assert time.monotonic() < end, found
            self.b.submit(EndRead(found.read))
            threading.Event().wait(0.05)
        return found.read

    def actor(self, name: str) -> Any:
        return ray.get_actor(f"tournant-store-{self.cluster.node_id(name)}", namespace=f"tournant-{APP}")


@pytest.fixture(scope="module")
def engines(ray_cluster: RayCluster) -> Iterator[Engines]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_reads, "REST_S", 0.2)
        made = Engines(ray_cluster)
        yield made
        for engine in (made.a, made.b):
            engine.close()
    left = [name for name in "ab" if name in ray_cluster.nodes]
    ray.get([stop_store_here.options(scheduling_strategy=ray_cluster.on(name)).remote(APP) for name in left])


def test_what_one_node_has_saved_is_restored_on_another(engines: Engines) -> None:
    chain, entries = engines.saved_by_a("shared")
    assert engines.b.bring(chain, 0).count == len(chain)
    assert engines.b.holds(entries, 0)
    assert engines.b.lookup(chain).tiers == bytes([HOST]) * len(chain)


def test_the_store_of_the_other_node_is_killed(engines: Engines) -> None:
    """What the directory says is wrong then: a miss. Its successor's blocks are found again."""
    chain, _ = engines.saved_by_a("killed")
    read = engines.known(chain)
    pid = ray.get(engines.actor("a").status.remote(), timeout=PATIENCE_S)["pid"]
    os.kill(pid, signal.SIGKILL)
    engines.b.submit(Fetch(read, len(chain)), Load(read, 0, tuple(range(len(chain)))))
    assert engines.b.ended(read).count == 0
    engines.a.attached(after=len(engines.a.events))
    later, entries = engines.saved_by_a("after the kill")
    assert engines.b.bring(later, 0).count == len(later)
    assert engines.b.holds(entries, 0)


def test_the_benchmark_runs(engines: Engines) -> None:
    (table,) = benchmark.run(Options(quick=True, rounds=1)).tables
    assert [row[0] for row in table.rows] == ["Ray's objects alone", "blocks of another node into the store here"]


def test_a_node_is_removed_in_the_middle(engines: Engines) -> None:
    chain, _ = engines.saved_by_a("removed")
    half, entries = engines.saved_by_a("half")
    assert engines.b.bring(half[:10], 0).count == 10
    read = engines.known(chain)
    engines.b.submit(Fetch(read, len(chain)), Load(read, 0, tuple(range(30))))
    engines.cluster.remove_node("a")
    assert engines.b.ended(read).count in (0, len(chain))
    assert engines.b.bring(half, 0).count == 10, "what was brought before is here"
    assert engines.b.holds(entries[:10], 0)
