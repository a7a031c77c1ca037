"""An engine of several ranks on nodes of a Ray cluster, each over the store of its node, driven without Serve."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from tests.cluster.conftest import RayCluster
from tests.cluster.service_harness import ENDS_S, parent_of
from tests.workers.test_group_offload import Group, group
from tests.workers.tiered_engine import BLOCK_BYTES
from tournant.cluster.node_store import StorePlan
from tournant.cluster.node_store_actor import find_store, stop_store
from tournant.cluster.shard_actors import RayRanks, node_address
from tournant.kvstore.admin import BlockLine, ListBlocks, Listed, Status, StatusQuery
from tournant.kvstore.client import ask
from tournant.kvstore.config import StoreConfig

HOST_BLOCKS, NVME_BYTES = 300, 64 << 20
PLAN = StorePlan(StoreConfig(HOST_BLOCKS * BLOCK_BYTES, nvme_bytes=NVME_BYTES, segment_bytes=4 << 20), drain_s=5.0)


def find(app: str, folder: str) -> str:
    """The store of the node where this is called. folder: in which each node has its own for NVMe."""
    node = ray.get_runtime_context().get_node_id()
    return find_store(replace(PLAN, nvme_folder=f"{folder}/{node[:8]}"), app)


@ray.remote(num_cpus=0)
def call(function: Callable[[], str | None]) -> str | None:
    return function()


class NodeStores:
    """Stores of an application by the names of their nodes; `socket` is that of the head, where rank 0 runs. `find`
    gives a rank that of its node.
    """

    def __init__(self, cluster: RayCluster, app: str, folder: Path, nodes: Sequence[str]) -> None:
        self._cluster, self._app = cluster, app
        self.find: Callable[[], str] = partial(find, app, str(folder))
        found = [self._call(name, self.find) for name in nodes]
        self.sockets = dict(zip(nodes, map(Path, ray.get(found, timeout=ENDS_S)), strict=True))
        self.socket = self.sockets["head"]

    def _call(self, name: str, function: Callable[[], str | None]) -> ray.ObjectRef:
        return call.options(scheduling_strategy=self._cluster.on(name)).remote(function)

    def status(self, name: str) -> Status:
        found = ask(self.sockets[name], StatusQuery(), ENDS_S)
        assert isinstance(found, Status)
        return found

    def blocks(self, name: str) -> list[BlockLine]:
        """All that a store knows."""
        lines: list[BlockLine] = []
        page = Listed(0, True, ())
        while page.more:
            answer = ask(self.sockets[name], ListBlocks(page.after), ENDS_S)
            assert isinstance(answer, Listed)
            page = answer
            lines += page.lines
        return lines

    async def on_disk(self) -> None:
        """Until all parts of all blocks are."""
        while not all(block.nvme for name in self.sockets for block in self.blocks(name)):
            await asyncio.sleep(0.01)

    @contextmanager
    def killed(self) -> Iterator[None]:
        """All processes are gone, and come back only at the end, because their keepers are stopped."""
        pids = [self._pid(name) for name in self.sockets]
        keepers = [parent_of(pid) for pid in pids]
        for keeper in keepers:
            os.kill(keeper, signal.SIGSTOP)
        try:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            yield
        finally:
            for keeper in keepers:
                os.kill(keeper, signal.SIGCONT)

    def _pid(self, name: str) -> int:
        node = self._cluster.node_id(name)
        actor = ray.get_actor(f"tournant-store-{node}", namespace=f"tournant-{self._app}")
        pid: int = ray.get(actor.status.remote(), timeout=ENDS_S)["pid"]
        return pid

    def stop(self) -> None:
        ray.get([self._call(name, partial(stop_store, self._app, 30)) for name in self.sockets], timeout=ENDS_S)


@asynccontextmanager
async def ranks_on(
    nodes: Sequence[str], folder: Path, stores: NodeStores, split: tuple[int, int], **offload: object
) -> AsyncIterator[Group]:
    """A group with a rank on each of these nodes, the first on the head, whose engine ends with the test."""
    bundles = placement_group([{name: 1.0} for name in nodes])
    assert bundles.wait(ENDS_S)
    launcher = partial(RayRanks, bundles, node_address(), 1, stores.find)
    patient = {"lookup_ms": 10_000, "restore_ms": 60_000}
    try:
        async with group(folder, stores, split, launcher, **patient | offload) as one:  # type: ignore[arg-type]
            yield one
    finally:
        remove_placement_group(bundles)


async def forget_all(one: Group) -> None:
    """Nothing is on the device, and nothing of it goes down later."""
    await one.until(lambda: not one.engine.stats.kv_used)
    assert await one.engine.reset_prefix_cache()
