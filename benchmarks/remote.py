"""Blocks of another node's store into the store here: bytes per second, and those of Ray's object transport alone.

Two nodes on this machine, so both go through its loopback and share its cores. Both move the same bytes in objects of
the same size, as many at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.common import Cell, Options, Report, Table, at_least, interleave, run_main, say
from benchmarks.own_ray import SETTINGS
from tournant.cluster.block_adopter import AHEAD
from tournant.cluster.block_transport import BATCH_BYTES
from tournant.cluster.node_store import StorePlan
from tournant.cluster.node_store_actor import find_store, stop_store
from tournant.kvstore.agent_client import AgentClient
from tournant.kvstore.agent_wire import AGENT_SOCKET, Brought
from tournant.kvstore.block import Part, Version
from tournant.kvstore.client import Identity, StoreClient, connect
from tournant.kvstore.config import StoreConfig

SHARE = 0.7  # of what Ray's transport alone reaches
BLOCK_BYTES = 360 << 10  # of the default model: 16 tokens in bf16
PART, WEIGHTS = Part(0, 30, 0, 3), b"w" * 32
APP = "benchmark"
WAIT_S = 60.0


def run(options: Options) -> Report:
    """One chain after another, brought from node "a" to node "b"."""
    report = Report("Blocks of other nodes")
    count = 8 if options.quick else 256
    with _two_nodes() as (a, b):
        say("two nodes with a store each")
        rounds = options.rounds + 1
        plan = StorePlan(StoreConfig((count * rounds + 128) * BLOCK_BYTES * 3 // 2), drain_s=0.1)
        paths = ray.get([_find.options(scheduling_strategy=_on(node)).remote(plan) for node in (a, b)])
        try:
            found = _measure(options, a, b, list(map(Path, paths)), count, rounds)
        finally:
            ray.get([_stop.options(scheduling_strategy=_on(node)).remote() for node in (a, b)])
    report.add(_table(found, count))
    return report


def _table(found: dict[str, Any], count: int) -> Table:
    alone, brought = found.values()
    share = brought.over(alone)
    rows: list[list[Cell]] = [
        [name, value.map(lambda rate: rate / 1e6), ratio, bar]
        for (name, value), ratio, bar in zip(found.items(), ("", share), ("", at_least(SHARE, share)), strict=True)
    ]
    note = f"{count} blocks of {BLOCK_BYTES:,} bytes in objects of up to {BATCH_BYTES:,}"
    return Table("between two nodes of this machine", ["what", "MB/s", "share", "bar"], rows, [note])


def _measure(options: Options, a: str, b: str, paths: list[Path], count: int, rounds: int) -> dict[str, Any]:
    chains = iter([_chain(number, count) for number in range(rounds)])
    writer = Identity(WEIGHTS, "bf16", 1, PART, (PART,), BLOCK_BYTES, 32)
    user = Identity(WEIGHTS, "bf16", 2, PART, (PART,), BLOCK_BYTES, 1)
    payload = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, np.uint8).tobytes()
    sender = _Sender.options(scheduling_strategy=_on(a)).remote()  # type: ignore[attr-defined]
    receiver = _Receiver.options(scheduling_strategy=_on(b)).remote(sender)  # type: ignore[attr-defined]
    with connect(paths[0], writer) as there, connect(paths[1], user):
        agent = AgentClient(paths[1].with_name(AGENT_SOCKET))

        def brought() -> float:
            chain = next(chains)
            _write(there, chain, payload)
            start = time.perf_counter()
            agent.bring(a, chain, 0, PART, (WEIGHTS, "bf16", b""), (BLOCK_BYTES,), WAIT_S)
            while not (answers := agent.take()):
                select.select([agent], [], [], 1.0)
            answer = answers[0]
            if not isinstance(answer, Brought) or answer.count != count:
                raise RuntimeError(f"not all blocks came: {answer}")
            return count * BLOCK_BYTES / (time.perf_counter() - start)

        def alone() -> float:
            return float(ray.get(receiver.receive.remote(count), timeout=WAIT_S))

        contestants = {"Ray's objects alone": alone, "blocks of another node into the store here": brought}
        try:
            return dict(interleave(contestants, options.rounds))
        finally:
            agent.close()


def _chain(number: int, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{number}/{place}".encode()).digest() for place in range(count)]


def _write(client: StoreClient, chain: list[bytes], payload: bytes) -> None:
    for place, key in enumerate(chain):
        version = Version(client.identity.writer_id, int.from_bytes(key[:6], "little"))
        entry = client.write(key, version, payload, place)
        if entry is None or client.publish([entry]).refused:
            raise RuntimeError("the store does not take a block")


@ray.remote(num_cpus=0)
def _find(plan: StorePlan) -> str:
    return find_store(plan, APP)


@ray.remote(num_cpus=0)
def _stop() -> None:
    stop_store(APP, 30)


@ray.remote(num_cpus=0, max_concurrency=4)
class _Sender:
    """Puts the same bytes into Ray's shared memory as a store's actor does."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._blocks = [rng.integers(0, 256, BLOCK_BYTES, np.uint8) for _ in range(BATCH_BYTES // BLOCK_BYTES)]

    def give(self, count: int) -> list[Any]:
        """A reference of so many blocks."""
        return [ray.put(self._blocks[:count])]


@ray.remote(num_cpus=0)
class _Receiver:
    """Asks for objects, some at once, and looks at none of their bytes."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def receive(self, count: int) -> float:
        """Bytes per second of so many blocks."""
        batch = BATCH_BYTES // BLOCK_BYTES
        sizes = [min(batch, count - start) for start in range(0, count, batch)]
        start = time.perf_counter()
        with ThreadPoolExecutor(AHEAD) as threads:
            for _ in threads.map(self._one, sizes):
                pass
        return count * BLOCK_BYTES / (time.perf_counter() - start)

    def _one(self, size: int) -> None:
        ray.get(ray.get(self._sender.give.remote(size))[0])


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


@contextlib.contextmanager
def _two_nodes() -> Iterator[tuple[str, str]]:
    """Ray ids of two nodes: of the Ray that this process is connected to, or of one of its own."""
    if ray.is_initialized():
        ids = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and len(node["Resources"]) > 0)
        yield ids[0], ids[1]
        return
    os.environ |= SETTINGS
    folder = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))  # short enough for sockets
    os.environ["RAY_TMPDIR"] = str(folder)
    (folder / "ray").mkdir()
    node = {"num_cpus": 2, "object_store_memory": 400 << 20, "memory": 2 << 30, "plasma_directory": "/dev/shm"}
    head = {**node, "include_dashboard": False, "temp_dir": str(folder / "ray")}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        other = cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        yield str(cluster.head_node.node_id), str(other.node_id)
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    run_main(run, __doc__)
