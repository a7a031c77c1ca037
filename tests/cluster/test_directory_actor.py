"""The directory on a Ray of three nodes: what a store on one node holds is found from another, whatever dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from benchmarks import directory as benchmark
from benchmarks.common import Options
from tests.cluster.conftest import RayCluster
from tests.kvstore.store_harness import keys, write, writer
from tournant.cluster.directory_actor import Directory, Held, find_directory, find_shard, number_of
from tournant.cluster.node_store import StorePlan
from tournant.cluster.node_store_actor import find_store, stop_store
from tournant.kvstore.client import StoreClient, connect
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.directory import Announcement, DirectoryConfig, Position, shard_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]

APP, NUM_SHARDS = "shared", 2
PLAN = StorePlan(StoreConfig(4 << 20, chunk_bytes=1 << 20), drain_s=5.0, directory_shards=NUM_SHARDS)
PATIENCE_S = 60.0


@ray.remote(num_cpus=0)
def find_store_here(app: str) -> str:
    """What a replica on a node gets."""
    return find_store(PLAN, app)


@ray.remote(num_cpus=0)
def stop_store_here(app: str) -> None:
    stop_store(app, 30)


@ray.remote(num_cpus=0)
def lookup_here(app: str, chain: list[bytes]) -> list[Held]:
    """What an agent on a node finds."""
    return Directory(app, NUM_SHARDS).lookup(chain, PATIENCE_S)


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def chain_of(name: str, count: int = 6) -> list[bytes]:
    """Keys that end alike, as those of a chain do."""
    chain = keys(count, name)
    return [key[:-2] + chain[0][-2:] for key in chain]


class Stores:
    """Node stores on "a" and "b" with a client each, and the directory that they tell."""

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        config = DirectoryConfig(silent_us=3_000_000)
        self.shards = [find_shard(APP, shard, config) for shard in range(NUM_SHARDS)]  # else the stores make them
        self.sockets = dict(zip("ab", ray.get([self.find(name) for name in "ab"], timeout=PATIENCE_S), strict=True))
        self.clients: list[StoreClient] = []
        self.directory = Directory(APP, NUM_SHARDS)

    def find(self, name: str) -> Any:
        return find_store_here.options(scheduling_strategy=self.cluster.on(name)).remote(APP)

    def write(self, name: str, chain: list[bytes]) -> None:
        self.clients.append(connect(Path(self.sockets[name]), writer()))
        assert write(self.clients[-1], chain) == len(chain)

    def status(self, name: str) -> dict[str, Any]:
        actor = ray.get_actor(f"tournant-store-{self.cluster.node_id(name)}", namespace=f"tournant-{APP}")
        return ray.get(actor.status.remote(), timeout=PATIENCE_S)  # type: ignore[no-any-return]

    def holders(self, chain: list[bytes]) -> list[tuple[int, str]]:
        """Runs with the names of the nodes that hold them in host slots."""
        names = {self.cluster.node_id(name): name for name in self.cluster.nodes}
        found = self.directory.lookup(chain, PATIENCE_S)
        return [(run.num_keys, "".join(sorted(names.get(one, "?") for one in run.host))) for run in found]


@pytest.fixture(scope="module")
def stores(ray_cluster: RayCluster) -> Iterator[Stores]:
    made = Stores(ray_cluster)
    yield made
    for client in made.clients:
        client.close()
    left = [name for name in "ab" if name in ray_cluster.nodes]
    ray.get([stop_store_here.options(scheduling_strategy=ray_cluster.on(name)).remote(APP) for name in left])


def test_blocks_of_one_node_are_found_from_another(stores: Stores) -> None:
    shared, own = chain_of("shared"), chain_of("own")
    assert shard_of(shared[0], NUM_SHARDS) != shard_of(own[0], NUM_SHARDS), "both shards are asked"
    stores.write("a", shared)
    stores.write("b", shared[:4])
    stores.write("b", own)
    until(lambda: stores.holders(shared) == [(4, "ab"), (2, "a")])
    until(lambda: stores.holders(own) == [(6, "b")])
    here = lookup_here.options(scheduling_strategy=stores.cluster.on("b"))
    assert ray.get(here.remote(APP, shared), timeout=PATIENCE_S)[1] == Held(2, (stores.cluster.node_id("a"),), ())
    assert stores.holders([*shared, *own]) == [(4, "ab"), (2, "a"), (6, "b")], "as far as all is known"
    assert stores.holders([*shared, keys(1)[0], *own]) == [(4, "ab"), (2, "a")]
    status = ray.get([actor.status.remote() for actor in stores.shards], timeout=PATIENCE_S)
    assert sum(one["entries"] for one in status) == 12
    assert set(status[0]["nodes"]) == {stores.cluster.node_id(name) for name in "ab"}


def test_a_router_gets_the_changes_under_numbers_that_it_can_know(stores: Stores) -> None:
    chain = chain_of("routed")
    stores.write("a", chain)
    until(lambda: stores.holders(chain))
    actor = stores.shards[shard_of(chain[0], NUM_SHARDS)]
    changes = ray.get(actor.changes_since.remote(Position(0)), timeout=PATIENCE_S)
    assert changes.start_over
    assert (chain[0], (number_of(stores.cluster.node_id("a")),), ()) in changes.older


def test_a_killed_store_leaves_no_entries_and_its_successor_is_heard(stores: Stores) -> None:
    chain, later = chain_of("killed"), chain_of("after the kill")
    stores.write("a", chain)
    until(lambda: stores.holders(chain) == [(6, "a")])
    os.kill(stores.status("a")["pid"], signal.SIGKILL)
    until(lambda: stores.holders(chain) == [])
    assert ray.get(stores.find("a"), timeout=PATIENCE_S) == stores.sockets["a"]
    stores.write("a", later)
    until(lambda: stores.holders(later) == [(6, "a")])


@pytest.mark.parametrize("restarts", [True, False], ids=["and is started again by Ray", "and is made anew"])
def test_a_killed_shard_learns_everything_again(stores: Stores, restarts: bool) -> None:
    """By the same directory client, which asks its successor; a lookup meanwhile ends in time."""
    chain = chain_of(f"shard {restarts}")
    stores.write("b", chain)
    until(lambda: stores.holders(chain) == [(6, "b")])
    actor = ray.get_actor(f"tournant-directory-{shard_of(chain[0], NUM_SHARDS)}", namespace=f"tournant-{APP}")
    pid = ray.get(actor.status.remote(), timeout=PATIENCE_S)["pid"]
    if restarts:
        os.kill(pid, signal.SIGKILL)
    else:
        ray.kill(actor, no_restart=True)
    assert stores.directory.lookup(chain, 0.05) in ([], [Held(6, (stores.cluster.node_id("b"),), ())])
    until(lambda: not Path("/proc", str(pid)).exists())
    until(lambda: stores.holders(chain) == [(6, "b")])


def test_a_stopped_shard_is_a_miss_in_time_and_then_goes_on(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tournant.cluster.directory_actor.REST_S", 1e6)
    chain, later = chain_of("stopped"), chain_of("stopped still")
    stores.write("b", chain)
    until(lambda: stores.holders(chain) == [(6, "b")])
    actor = find_directory(APP, NUM_SHARDS)[shard_of(chain[0], NUM_SHARDS)]
    pid = ray.get(actor.status.remote(), timeout=PATIENCE_S)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        asking = Directory(APP, NUM_SHARDS)
        assert asking.lookup(chain, 0.2) == []
        assert asking.lookup(chain, 1e6) == [], "it is left alone for a while"
        stores.write("b", later)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: stores.holders(chain) == stores.holders(later) == [(6, "b")])


def test_a_node_that_is_gone_leaves_no_entries(stores: Stores) -> None:
    chain, both = chain_of("removed"), chain_of("both")
    for name in "ab":
        stores.write(name, both)
    stores.write("a", chain)
    until(lambda: (stores.holders(chain), stores.holders(both)) == ([(6, "a")], [(6, "ab")]))
    stores.cluster.remove_node("a")
    until(lambda: (stores.holders(chain), stores.holders(both)) == ([], [(6, "b")]))


def test_a_store_that_ends_says_goodbye_and_one_said_to_be_lost_is_heard_again(stores: Stores) -> None:
    chain = chain_of("goodbye")
    stores.write("b", chain)
    until(lambda: stores.holders(chain))
    stores.directory.node_lost(stores.cluster.node_id("b"))
    until(lambda: stores.holders(chain) == [(6, "b")])
    for client in stores.clients:
        client.close()
    here = stop_store_here.options(scheduling_strategy=stores.cluster.on("b"))
    ray.get(here.remote(APP), timeout=PATIENCE_S)
    actors = find_directory(APP, NUM_SHARDS)
    until(lambda: [one["entries"] for one in ray.get([actor.status.remote() for actor in actors])] == [0, 0])


def test_a_shard_that_nobody_tells_anything_ends_and_is_made_again(ray_cluster: RayCluster) -> None:
    made = find_shard("idle", 0, idle_exit_s=0.5)
    message = Announcement(1, 1, 1)
    assert ray.get(made.announce.remote("n" * 56, message), timeout=PATIENCE_S).question
    directory = Directory("idle", 1)

    def gone() -> bool:
        try:
            ray.get_actor("tournant-directory-0", namespace="tournant-idle")
        except ValueError:
            return True
        return False

    until(gone)
    assert directory.lookup(keys(3)) == [], "no shard is a miss"
    again = find_shard("idle", 0, idle_exit_s=60.0)
    assert ray.get(again.lookup.remote(keys(1)[0]), timeout=PATIENCE_S) == []
    ray.kill(again)


def test_the_benchmark_runs(ray_cluster: RayCluster) -> None:
    tables = benchmark.run(Options(quick=True, rounds=1)).tables
    assert [[row[0] for row in table.rows] for table in tables] == [
        ["look-up of 512", "announcement"],
        ["look-up of 512"],
    ]


def test_what_is_no_key_is_refused(ray_cluster: RayCluster) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Directory("none", 1).lookup([b"short"])
