"""A Ray of three nodes on this machine, for tests of what happens between nodes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NODE = {"num_cpus": 4, "object_store_memory": 80 << 20, "memory": 1 << 30}
HEALTH = {  # a node that is gone refuses connections, and is declared dead within 4 s; one that is busy is not
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
    "prestart_worker_first_driver": False,
}


@dataclass
class RayCluster:
    """Nodes by name: "head", to which this process is connected, "a" and "b". A node has a resource and a label `name`
    of its name; those that are not the head have a resource "beside" too. folder: for everything that is written; short
    enough for sockets.
    """

    cluster: Cluster
    folder: Path
    nodes: dict[str, Any]

    def add_node(self, name: str) -> str:
        """One more node; its Ray id."""
        resources = {name: 8, "beside": 8}
        options = {**NODE, "plasma_directory": str(self.folder), "resources": resources, "labels": {"name": name}}
        self.nodes[name] = self.cluster.add_node(**options)
        return self.node_id(name)

    def remove_node(self, name: str) -> None:
        """Kill all that runs on a node, as when its machine is gone."""
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)

    def processes(self, name: str) -> list[int]:
        """All that runs on a node: its raylet, what that has started, and so on."""
        parents: dict[int, int] = {}
        for path in Path("/proc").iterdir():
            with suppress(OSError):
                if path.name.isdecimal():
                    stat = (path / "stat").read_text().rpartition(")")[2].split()
                    parents[int(path.name)] = int(stat[1])
        (raylet,) = self.nodes[name].all_processes["raylet"]
        found = [int(raylet.process.pid)]
        for pid in found:  # grows meanwhile
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def node_id(self, name: str) -> str:
        """Ray's id of a node."""
        return str(self.nodes[name].node_id)

    def on(self, name: str) -> NodeAffinitySchedulingStrategy:
        """For `.options(scheduling_strategy=...)` of what is to run on a node."""
        return NodeAffinitySchedulingStrategy(self.node_id(name), soft=False)


@contextmanager
def run_cluster(**system: Any) -> Iterator[RayCluster]:
    """A Ray of this process's own with one node, which ends with the block. system: more of Ray's system
    configuration; with `gcs_storage="rocksdb"` what the GCS knows is in the cluster's folder.
    """
    folder = Path("/tmp", f"c{os.getpid()}")
    folder.mkdir(mode=0o700)
    environment = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(folder),  # where the address of this cluster is written, which nobody else is to find
        "TMPDIR": str(folder),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        (folder / "ray").mkdir()
        if "gcs_storage" in system:
            system["gcs_storage_path"] = str(folder / "gcs")
        head = {
            **NODE, "resources": {"head": 8}, "labels": {"name": "head"}, "include_dashboard": False,
            "temp_dir": str(folder / "ray"), "plasma_directory": str(folder), "_system_config": HEALTH | system,
        }  # fmt: skip
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            yield RayCluster(cluster, folder, {"head": cluster.head_node})
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder)


class Clusters:
    """The cluster that files share, because starting one takes longer than most of them."""

    def __init__(self) -> None:
        self._ends = ExitStack()
        self._running: RayCluster | None = None

    def get(self) -> RayCluster:
        """With nodes "head", "a" and "b", whichever of these a file before has removed."""
        running = self._running = self._running or self._ends.enter_context(run_cluster())
        for name in ("a", "b"):
            if name not in running.nodes:
                running.add_node(name)
        return running

    def close(self) -> None:
        """End it, if it runs; `get` starts another one."""
        self._running = None
        self._ends.close()


@pytest.fixture(scope="package")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """They end with the last test of this folder."""
    tmp_path_factory.getbasetemp()  # is decided here, not in the folder of a cluster, which goes with it
    made = Clusters()
    yield made
    made.close()


@pytest.fixture(scope="module")
def ray_cluster(clusters: Clusters) -> RayCluster:
    """A Ray of three nodes. A file leaves nothing there that works, and names of its own."""
    return clusters.get()


@pytest.fixture(scope="module")
def no_cluster(clusters: Clusters) -> None:
    """For a file that starts a Ray itself: no other one runs."""
    clusters.close()
