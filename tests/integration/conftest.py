"""A Ray of two nodes for the proofs of what the service survives, with Serve, and the service on it.

The nodes outlive a file, because starting them takes longer than most tests: files that use them stand side by side.
The GCS keeps its state on disk, so that it can be killed and brought back.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.exceptions import RayActorError

from tests.cluster.conftest import RayCluster, run_cluster
from tests.cluster.service_harness import free_port, wait_for
from tournant.cluster.engines_actor import EnginesClient
from tournant.deploy.app import make_app
from tournant.deploy.config import parse_config

APP = "tournant"


class Deployed:
    """The service on a cluster: args of its configuration, options of its deployments, and `run`, which deploys it as
    they say by now.
    """

    def __init__(self, cluster: RayCluster, model: Path, port: int) -> None:
        self.cluster = cluster
        self.url = f"http://127.0.0.1:{port}"
        self.args: dict[str, Any] = {
            "model": str(model),
            "served_model_name": "M",
            "cache_dir": str(cluster.folder / "cache"),
            "num_replicas": 2,
            "ingress": "resilient",
            "engine": {"device": "cpu", "dtype": "float32", "deterministic": True, "kv_cache_bytes": "4MiB"},
            "advanced": {"num_threads": 1, "weights_drain_s": 5},
        }
        self.options: dict[str, Any] = {"health_check_period_s": 0.5}
        self.ingress_options: dict[str, Any] = {"num_replicas": 2}

    def run(self) -> None:
        """Deploy, and return when nothing of what was before is left."""
        config = parse_config(self.args)
        ingress = self.ingress_options if config.ingress == "resilient" else None
        serve.run(make_app(config, self.options, str(self.cluster.folder), ingress), name=APP, route_prefix="/")
        wait_for(lambda: all(set(states) == {"RUNNING"} for states in self.states().values()))

    @staticmethod
    def states() -> dict[str, dict[str, int]]:
        """How many replicas are in which state, by deployment."""
        deployments = serve.status().applications[APP].deployments
        return {name: dict(found.replica_states) for name, found in deployments.items()}

    def engines(self) -> list[int]:
        """Processes of engines, the longest living first."""
        module, folder = b"tournant.workers.engine_process", b"TMPDIR=%s\0" % str(self.cluster.folder).encode()
        found = []
        for path in Path("/proc").iterdir():
            with suppress(OSError):
                ours = path.name.isdecimal() and module in (path / "cmdline").read_bytes()
                if ours and folder in (path / "environ").read_bytes():
                    found.append((path.stat().st_ctime_ns, int(path.name)))
        return [pid for _, pid in sorted(found)]

    @staticmethod
    def replicas() -> set[str]:
        """Engines that the registry names."""
        found = asyncio.run(EnginesClient(APP).changes(None))
        return {member.replica for member in found.members}

    @staticmethod
    def num_resumed() -> int:
        """Answers that went on in another engine, by what the ingresses that there are have counted."""
        found = serve.get_app_handle(APP).broadcast("describe").results(timeout_s=60)
        return sum(facts["num_resumed"] for facts in found)

    def logged(self, words: str) -> list[str]:
        """Lines with these words of what workers wrote to their standard error."""
        files = (self.cluster.folder / "ray/session_latest/logs").glob("worker-*.err")
        return [line for file in files for line in file.read_text(errors="replace").splitlines() if words in line]


def start_serve(port: int) -> None:
    """Return when its proxy listens. On a busy machine Serve kills one that is slow to start, and starts another."""
    with suppress(RayActorError):
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})

    def listens() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    wait_for(listens)


class Proofs:
    """The cluster that files share, and the service on it."""

    def __init__(self) -> None:
        self._ends = ExitStack()
        self._deployed: Deployed | None = None
        self._runs = False

    def get(self, model: Path) -> Deployed:
        """A resilient service, on the first call for a while as it is made, else as the file before left it."""
        deployed = self.nodes(model)
        if not self._runs:
            deployed.run()
            self._runs = True
        return deployed

    def nodes(self, model: Path) -> Deployed:
        """The same, but the service need not run."""
        if self._deployed is None:
            cluster = self._ends.enter_context(run_cluster(gcs_storage="rocksdb"))
            cluster.add_node("a")
            port = free_port()
            self._ends.callback(serve.shutdown)
            start_serve(port)
            self._deployed = Deployed(cluster, model, port)
        elif not ray.is_initialized():
            ray.init(address=self._deployed.cluster.cluster.address, log_to_driver=False)
        return self._deployed

    def close(self) -> None:
        """End all of it; `get` starts another one."""
        self._deployed, self._runs = None, False
        self._ends.close()


@pytest.fixture(scope="package")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proofs]:
    """They end with the last test of this folder."""
    tmp_path_factory.getbasetemp()  # is decided here, not in the folder of a cluster, which goes with it
    made = Proofs()
    yield made
    made.close()


@pytest.fixture(scope="module")
def nodes(proofs: Proofs, tiny_model: Path) -> Deployed:
    """For a file that deploys something itself, beside the service if that runs."""
    return proofs.nodes(tiny_model)


@pytest.fixture(scope="module")
def deployed(proofs: Proofs, tiny_model: Path) -> Deployed:
    """The resilient service: two engines, two ingresses."""
    return proofs.get(tiny_model)
