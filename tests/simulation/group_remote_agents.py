"""Agents of simulated nodes, which bring blocks of other nodes into the store of theirs, and ranks that ask them.

Real: `RemoteReads` with its deadlines and pauses, the link's session, the store's side of adopting. Simulated: the way
between a link and its agent, the directory, which knows all or lies, and what the agent does, a block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from tests.simulation.group_ranks import SLOT_BYTES, TIMEOUT_S, SimNode, SimRank, SimTransport
from tournant.kvstore.agent_wire import AgentAnswer, Brought, Located
from tournant.kvstore.block import Part, Version
from tournant.kvstore.client import Identity, StoreClient
from tournant.kvstore.errors import StoreRefused, StoreUnavailable
from tournant.kvstore.events import ReportEntry
from tournant.workers.link_session import LinkSession
from tournant.workers.remote_reads import RemoteIdentity, RemoteReads
from tournant.workers.transfer_messages import Event, Fetched

if TYPE_CHECKING:
    from tests.simulation.group_remote_world import RemoteWorld

LOCATE_S, BRING_S = 0.03, 0.1
CREDIT = 2
Way = list[tuple[Version, int]]  # versions of a part of a block, the newest first, and their checksums


def held(node: SimNode, key: bytes, part: Part) -> Way:
    """What a store has, whole, of a part of a block."""
    if not node.up:
        return []
    index = node.core.residency.index
    groups = [group for group in index.versions(key) if group.complete]
    return [
        (group.version, copy.checksum) for group in groups for copy in group.copies if index.parts[copy.part] == part
    ]


class SimAgent:
    """Of one node. It may be dead for a while."""

    def __init__(self, world: RemoteWorld, node: SimNode) -> None:
        self.world, self.node = world, node
        self.down_until = 0
        self.lines: list[SimAgentClient] = []
        self.bringing: list[Bringing] = []

    def die(self) -> None:
        """What it was doing ends, and nobody is told."""
        self.down_until = self.world.now + self.world.rng.randrange(5_000, 200_000)
        for one in list(self.bringing):
            one.end(tells=False)
        for line in self.lines:
            line.broken = "the agent is gone"
            line.rank.soon(0, line.rank.advance)
        self.lines = []

    def others(self, first: str = "") -> list[SimNode]:
        """Nodes beside this one, that of a name before all."""
        found = [node for node in self.world.nodes if node is not self.node]
        return sorted(found, key=lambda node: (node.name != first, node.name))

    def best(self, keys: Sequence[bytes], part: Part) -> tuple[int, str]:
        """The longest run that one of the others has."""
        best, name = 0, ""
        for node in self.others():
            count = next((place for place, key in enumerate(keys) if not held(node, key, part)), len(keys))
            if count > best:
                best, name = count, node.name
        return best, name


class SimAgentClient:
    """`AgentClient` of a rank."""

    has_unsent = False

    def __init__(self, agent: SimAgent, rank: SimRank) -> None:
        if agent.world.now < agent.down_until:
            raise StoreUnavailable("no agent listens")
        self.agent, self.rank, self.world = agent, rank, agent.world
        self.broken = ""
        self.num_open = self._last = 0
        self._inbox: list[AgentAnswer] = []
        agent.lines.append(self)

    def locate(self, keys: Sequence[bytes], part: Part) -> int:
        """See `AgentClient`."""
        number = self._next()

        def answer() -> None:
            count, node = self.agent.best(keys, part)
            if self.world.strikes("stale directory", 3):
                others = self.agent.others()
                count, node = self.world.rng.randrange(1, len(keys) + 1), others[0].name
            self.answer(Located(number, count, node))

        self._later(answer, 30_000)
        return number

    def bring(
        self,
        node: str,
        keys: Sequence[bytes],
        depth: int,
        part: Part,
        identity: tuple[bytes, str, bytes],
        slot_bytes: Sequence[int],
        timeout_s: float,
    ) -> int:
        """See `AgentClient`."""
        number = self._next()
        self._later(lambda: self.agent.bringing.append(Bringing(self, number, node, keys, part, identity)), 100_000)
        return number

    def _next(self) -> int:
        self._last += 1
        self.num_open += 1
        return self._last

    def _later(self, act: Callable[[], object], late_us: int) -> None:
        """The question arrives after a while, unless the agent is silent or dead by then."""
        world = self.world
        if world.strikes("agent silent", 12):
            return
        late = world.rng.randrange(late_us // 2, 2 * late_us) if world.strikes("agent late", 8) else 0
        world.later(world.rng.randrange(20, 1500) + late, lambda: None if self.broken else act())

    def answer(self, answer: AgentAnswer) -> None:
        """It is on its way."""

        def arrive() -> None:
            if not self.broken:
                self.num_open -= 1
                self._inbox.append(answer)
                self.rank.soon(0, self.rank.advance)

        self.world.later(self.world.rng.randrange(20, 500), arrive)

    def take(self) -> list[AgentAnswer]:
        """See `AgentClient`."""
        if self.broken:
            raise StoreUnavailable(self.broken)
        inbox, self._inbox = self._inbox, []
        return inbox

    def close(self) -> None:
        """See `AgentClient`: what is under way goes on."""
        self.broken = self.broken or "it was closed"


class Bringing:
    """One question: blocks of other nodes are adopted by the store here, in order."""

    def __init__(
        self,
        line: SimAgentClient,
        number: int,
        node: str,
        keys: Sequence[bytes],
        part: Part,
        who: tuple[bytes, str, bytes],
    ) -> None:
        self.line, self.number, self.first, self.keys, self.part = line, number, node, keys, part
        self.agent, self.world, self.node = line.agent, line.world, line.agent.node
        self.until = self.world.now + int(BRING_S * 1e6)
        self.count = self.num_bytes = 0
        self.failed = self.over = False
        self._waits: Callable[[], object] | None = None  # for an answer of the store
        self._client: StoreClient | None = None
        weights_id, form, _ = who
        identity = Identity(weights_id, form, 0, part, (part,), SLOT_BYTES, CREDIT, adopts=True)
        self.world.later(1, self._begin)
        if self.node.up:
            try:
                self._client = StoreClient(SimTransport(self.node, cast(Any, self)), identity, TIMEOUT_S, waits=False)
            except (StoreRefused, StoreUnavailable):
                self.world.count("adopter refused")

    def soon(self, delay: int, act: Callable[[], object]) -> None:
        """See `SimRank.soon`."""
        self.world.later(delay, act)

    def advance(self) -> None:
        """The store has said something."""
        if self.over or self._client is None:
            return
        try:
            came = self._client.take()
        except StoreUnavailable:
            self.end()
            return
        if came and self._waits is not None:
            act, self._waits = self._waits, None
            act()

    def end(self, *, tells: bool = True) -> None:
        """It leaves the store, and answers."""
        if self.over:
            return
        self.over = True
        self.agent.bringing.remove(self)
        if self._client is not None:
            self._client.close()
        if tells:
            self.line.answer(Brought(self.number, self.count, self.num_bytes, 1, self.failed))

    def _begin(self) -> None:
        if self._client is None:
            self.end()
        else:
            self.world.later(int(BRING_S * 1e6), self.end)
            self._next()

    def _next(self) -> None:
        world, client = self.world, self._client
        while self.count < len(self.keys) and held(self.node, self.keys[self.count], self.part):
            self.count += 1  # as it was here, or has come
        if self.over or client is None:
            return
        if self.count == len(self.keys) or world.strikes("a part comes", 5):
            self.end()
            return
        key = self.keys[self.count]
        found = next((one for node in self.agent.others(self.first) if (one := held(node, key, self.part))), [])
        if not found:
            self.end()
            return
        version, checksum = found[-1 if world.strikes("other version", 3) else 0]
        lent = client.take_slot()
        if lent is None:
            world.count("adopter lacks slots")
            self._post(())
            return
        memory = self.node.memory
        memory.scramble(lent.page)

        def copied() -> None:
            if self.over:
                return
            memory.contents[lent.page] = checksum
            world.count("brought")
            self.num_bytes += SLOT_BYTES
            named = self.version_of(version)
            self._post((ReportEntry(key, named, lent.page, lent.generation, SLOT_BYTES, checksum),))

        world.later(world.rng.randrange(10, 4000), copied)

    def version_of(self, version: Version) -> Version:
        """The version to report: the writer's."""
        return version

    def _post(self, entries: tuple[ReportEntry, ...]) -> None:
        """Report, and go on when it is answered; what is refused comes no further."""
        before = self.count

        def answered() -> None:
            if self.count < len(self.keys) and not held(self.node, self.keys[self.count], self.part):
                self.count = before
                self.end()
            else:
                self._next()

        self._waits = answered
        try:
            cast(StoreClient, self._client).post(entries)
        except StoreUnavailable:
            self.end()


class RemoteRank(SimRank):
    """A rank whose link asks the agent of its node."""

    def open_line(self) -> SimAgentClient:
        """What `RemoteReads` makes of a path."""
        return SimAgentClient(cast(Any, self.world).agents[self.node.name], self)

    def _attach(self) -> None:
        had = self.session
        super()._attach()
        if had is None and self.session is not None:
            group = self.group
            who = RemoteIdentity(group.weights_id, "fp32", b"", self.part, (SLOT_BYTES,), LOCATE_S, BRING_S)
            remote = RemoteReads(cast(Any, self), who, self.clock)
            self.session = LinkSession(self.session.attachment, remote)
            self.advance()

    def emit(self, event: Event) -> None:
        """See `SimRank`."""
        if isinstance(event, Fetched):
            self.world.count("fetched of another node", int(event.remote_blocks > 0))
            self.world.count("the node failed", int(event.remote_failed))
        super().emit(event)
