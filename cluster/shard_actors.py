"""The ranks of a Serve replica as Ray actors in its placement group: `RayRanks` is the launcher of one group.

Owns which rank goes where, and the waiting for nodes that may be gone. The processes are workers/shard_actor.py's.

A bundle is one rank's place. Rank 0 is the replica's engine and has the replica's bundle, the first; the others are
dealt to the remaining bundles node by node, the replica's node first, so that the ranks of a stage, who speak most, are
together wherever Ray has put the bundles. That is read anew for every group: after the loss of a node Ray places its
bundles again.

Invariants:
 1. Every call has a deadline; one that a dead node does not answer ends no later.
 2. Actors belong to the replica: they end with its process, and their ranks with them.
 3. What is known of a rank's end before `kill` is kept.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tournant.workers.errors import ConfigError
from tournant.workers.rank_launch import GroupPlace
from tournant.workers.shard_actor import RankFacts, ShardActor, threads_of_one

START_S = 120.0  # for a bundle of a lost node to be placed again, and for Ray to start a worker
KILL_S = 10.0  # for a node to answer
THREADS = 4  # of an actor: start, wait, kill, and one to spare
_LOG = logging.getLogger("tournant.shards")


@dataclass(slots=True)
class _Shard:
    """A rank's actor. started, ended: what its calls will return; where: as causes name it."""

    rank: int
    actor: Any
    started: Any
    ended: Any
    where: str


class RayRanks:
    """`RankLauncher` of one group of ranks in a replica's placement group.

    host: `node_address()` of the replica; num_threads: of each rank, None = the cores of its node, shared by the ranks
    there; find_store: called on a rank's node, gives the socket of the store there.
    """

    def __init__(
        self,
        group: PlacementGroup,
        host: str,
        num_threads: int | None = None,
        find_store: Callable[[], str] | None = None,
    ) -> None:
        self.host = host
        self._find_store = find_store
        self._group = group
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._shards: list[_Shard] = []
        self._facts: list[RankFacts] = []
        self._killed = False
        self._causes: list[str] = []

    def start(self, place: GroupPlace) -> None:
        """See `RankLauncher.start`. Raises ConfigError when there are fewer bundles than ranks, RuntimeError when a
        rank cannot be started or is not placed in START_S.
        """
        table = bundles_of(self._group)
        bundles, nodes = table.resources, table.nodes
        size = place.split.size
        if len(bundles) < size:
            raise ConfigError(
                f"the replica's placement group has {len(bundles)} bundles, and its {size} ranks need one each; leave "
                "placement_group_bundles out"
            )
        dealt = deal(nodes, size)
        here = Counter(nodes[bundle] for bundle in dealt)
        for rank, bundle in enumerate(dealt[1:], start=1):
            shared = here[nodes[bundle]] if self._num_threads is None else None
            with self._lock:
                if self._killed:
                    return
                self._shards.append(self._make(place, rank, bundle, bundles[bundle], nodes[bundle], shared))
        with self._lock:
            shards = list(self._shards)
        self._wait_started(shards)

    def _make(
        self, place: GroupPlace, rank: int, bundle: int, wants: Mapping[str, float], node: str, shared: int | None
    ) -> _Shard:
        others = {name: amount for name, amount in wants.items() if name not in ("CPU", "GPU", "memory")}
        actor: Any = (
            ray.remote(ShardActor)
            .options(
                num_cpus=wants.get("CPU", 0),
                num_gpus=wants.get("GPU", 0),
                resources=others,
                max_concurrency=THREADS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            )
            .remote()
        )
        started = actor.start.remote(place, rank, shared, self._find_store)
        return _Shard(rank, actor, started, None, f"rank {rank} on Ray node {node[:8] or '(none yet)'}")

    def _wait_started(self, shards: Sequence[_Shard]) -> None:
        """Raises RuntimeError as soon as one cannot be started."""
        end = time.monotonic() + START_S
        left = {shard.started: shard for shard in shards}
        while left:
            done, _ = ray.wait(list(left), timeout=max(0.0, end - time.monotonic()))
            if not done:
                names = ", ".join(shard.where for shard in left.values())
                raise RuntimeError(f"not started within {START_S:g} s: {names}; are there nodes with room for them?")
            shard = left.pop(done[0])
            try:
                facts: RankFacts = ray.get(shard.started, timeout=0)
            except RayError as error:
                raise RuntimeError(f"{shard.where}: {_words(error)}") from None
            with self._lock:
                shard.where = f"rank {facts.rank} on {facts.host} (Ray node {facts.node[:8]})"
                shard.ended = shard.actor.wait.remote()
                self._facts.append(facts)

    def kill(self) -> None:
        """See `RankLauncher.kill`; a node that does not answer in KILL_S is left, and Ray ends what is there."""
        self.causes()
        with self._lock:
            self._killed = True
            shards, self._shards = self._shards, []
        calls = [shard.actor.kill.remote() for shard in shards]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=KILL_S)
        for shard, call in zip(shards, calls, strict=True):
            try:
                ray.get(call, timeout=0)
            except RayActorError:
                pass  # it is gone already, or its node is
            except RayError as error:
                _LOG.error("%s: it is not known to have ended: %s", shard.where, _words(error))
            ray.kill(shard.actor)

    def causes(self) -> list[str]:
        """See `RankLauncher.causes`; asks nobody: answers come by themselves."""
        with self._lock:
            for shard in self._shards:
                if shard.ended is None or not ray.wait([shard.ended], timeout=0)[0]:
                    continue
                if cause := _cause(shard):
                    self._causes.append(cause)
                shard.ended = None
            return list(self._causes)

    def facts(self) -> list[RankFacts]:
        """Where the ranks run that were started here."""
        with self._lock:
            return sorted(self._facts, key=lambda facts: facts.rank)


@dataclass(frozen=True, slots=True)
class Bundles:
    """A placement group as it is now: what each bundle holds, and the id of its node, "" while it has none."""

    resources: list[dict[str, float]]
    nodes: list[str]


def bundles_of(group: PlacementGroup) -> Bundles:
    """What Ray knows of a placement group."""
    table = placement_group_table(group)
    resources, nodes = table["bundles"], table["bundles_to_node_id"]
    order = sorted(resources)
    return Bundles([dict(resources[number]) for number in order], [nodes.get(number) or "" for number in order])


def deal(nodes: Sequence[str], size: int) -> list[int]:
    """Which bundle each of `size` ranks gets: rank 0 the first, the others node by node, its own first.

    >>> deal(["a", "b", "a", "b"], 4)
    [0, 2, 1, 3]
    """
    return sorted(
        range(len(nodes)), key=lambda bundle: (bundle != 0, nodes[bundle] != nodes[0], nodes[bundle], bundle)
    )[:size]


def leader_threads(group: PlacementGroup, size: int) -> int:
    """CPU threads of rank 0, which shares its node's cores with the ranks that are put there."""
    nodes = bundles_of(group).nodes
    return threads_of_one(sum(nodes[bundle] == nodes[0] for bundle in deal(nodes, size)))


def node_address() -> str:
    """Address of this Ray node, at which the others of its cluster find it."""
    node = ray.get_runtime_context().get_node_id()
    return next(str(one["NodeManagerAddress"]) for one in ray.nodes() if one["NodeID"] == node)


def leader_facts(pid: int) -> RankFacts:
    """Rank 0, of which `pid` is the process, on this node."""
    return RankFacts(0, socket.gethostname(), ray.get_runtime_context().get_node_id(), pid)


def _cause(shard: _Shard) -> str:
    """How a rank ended whose end is known."""
    try:
        how: str = ray.get(shard.ended, timeout=0)
    except RayError as error:
        return f"{shard.where}: {_words(error)}"
    return f"{shard.where}:{how.partition(':')[2]}" if how else ""


def _words(error: RayError) -> str:
    """The last line of what Ray says, or the error itself that a call raised."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[-1]
