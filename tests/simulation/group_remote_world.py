"""Groups of ranks on several nodes that restore each other's blocks, over agents that are late, dead or lie.

The world of group_world.py with two differences: groups lie on the nodes in another order each, so that the parts of
one are on other nodes than those that the next one's ranks need; and every rank's link asks the agent of its node
(group_remote_agents.py). What must hold is the same, and more at the end:

I11 every read ends by itself, whatever an agent leaves out.
I13 blocks of other nodes are promised exactly where every rank can have them in one version, for all that is known.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

from tests.simulation import group_world
from tests.simulation.group_ranks import SimRank
from tests.simulation.group_remote_agents import RemoteRank, SimAgent, held
from tests.simulation.group_world import QUIET_US, Group, GroupWorld, Setup
from tournant.workers import remote_reads
from tournant.workers.transfer_messages import REMOTE

REMOTE_FAULTS = ("agent dead", "agent late", "agent silent", "a part comes", "other version", "stale directory")
ROOM = 16  # slots of a store for those who adopt


def draw(seed: int, *, events: int = group_world.EVENTS) -> Setup:
    """A random setup with two groups or nodes at least."""
    setup = Setup.draw(seed, events=events)
    rng = random.Random(seed * 2 + 1_000_001)
    faults = setup.faults | {fault for fault in REMOTE_FAULTS if rng.randrange(3) == 0}
    nodes = max(2, setup.nodes)
    return replace(setup, faults=faults, nodes=nodes, groups=2, slots=setup.slots + ROOM)


class RemoteWorld(GroupWorld):
    """See the module."""

    def __post_init__(self) -> None:
        self.agents: dict[str, SimAgent] = {}
        super().__post_init__()

    def form(self, old: Group | None, weights: int = 0) -> Group:
        """On the nodes from another one on."""
        self.agents = self.agents or {node.name: SimAgent(self, node) for node in self.nodes}
        nodes, turn = self.nodes, self.rng.randrange(len(self.nodes))
        self.nodes = nodes[turn:] + nodes[:turn]
        try:
            return super().form(old, weights)
        finally:
            self.nodes = nodes

    def _act(self) -> None:
        if self.strikes("agent dead", 60):
            self.rng.choice(list(self.agents.values())).die()
        super()._act()

    def _rest(self, when: str) -> None:
        """I11: reads end by themselves before anything is let go."""
        end = self.now + QUIET_US
        while self.now < end and any(group.reads for group in self.groups):
            self._next()
        if left := [reading for group in self.groups for reading in group.reads.values()]:
            self.violated("I11", f"{left[0]} does not end by itself {when}")
        super()._rest(when)

    def _drained(self) -> bool:
        return super()._drained() and not any(agent.bringing for agent in self.agents.values())

    def _expected(self, group: Group, keys: Sequence[bytes]) -> bytes:
        here = super()._expected(group, keys)
        have = [self._versions_here(rank, keys) for rank in group.ranks]
        reach = [
            len(mine) + self.agents[rank.node.name].best(keys[len(mine) :], rank.part)[0]
            for rank, mine in zip(group.ranks, have, strict=True)
        ]
        place = len(here)
        while place < min(reach):
            known = [mine[place] for mine in have if place < len(mine)]
            if len(known) == len(group.ranks) or (known and not set.intersection(*known)):
                break
            place += 1
        self.count("promised at the end", place - len(here))
        return here + bytes([REMOTE]) * (place - len(here))

    @staticmethod
    def _versions_here(rank: SimRank, keys: Sequence[bytes]) -> list[set[object]]:
        found: list[set[object]] = []
        for key in keys:
            versions = {version for version, _ in held(rank.node, key, rank.part)}
            if not versions:
                break
            found.append(set(versions))
        return found


def run(setup: Setup) -> RemoteWorld:
    """One schedule from its setup. Raises Violation."""
    with (
        patch.object(group_world, "SimRank", RemoteRank),
        patch.object(remote_reads, "AgentClient", RemoteRank.open_line),
        patch.object(remote_reads, "REST_S", 0.02),
        patch.object(remote_reads, "LATE_S", 0.01),
    ):
        world = RemoteWorld(setup)
        world.run()
    return world
