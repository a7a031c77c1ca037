"""The directory under faults: node stores with their announcers, shards, routers that follow the shards, readers.

Node stores are real cores on a simulated disk; the network drops, repeats and delays, stores and shards die and come
back. What must hold (`Violation.invariant`):

D1 after a quiet tail a shard lists what the stores hold, and nothing else (with room for all; else nothing else).
D2 bounds hold, and the shard's own recount.
D3 an entry was true when the store that the shard believes in was asked, and is on the shard of its chain.
D4 a router's copy equals the shard's entries after a quiet tail.
D5 what a reader takes is there: an entry that is wrong is a miss.
D6 after a quiet tail nobody tells everything again.
D7 a shard never goes back to an earlier life of a store.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.simulation.disk import Disk
from tests.simulation.memory import Memory
from tests.simulation.world import Violation
from tournant.kvstore.announcer import Announcer, AnnouncerConfig
from tournant.kvstore.block import Part, Version
from tournant.kvstore.config import PAGE_BYTES, StoreConfig
from tournant.kvstore.directory import HOST, NVME, Announcement, Directory, DirectoryConfig, Heard, Position, shard_of
from tournant.kvstore.disk_events import DiskInstruction
from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.events import (
    Attach,
    Attached,
    CloseRead,
    Fetch,
    Forget,
    Open,
    Opened,
    Report,
    Reported,
    ReportEntry,
    Send,
    Tick,
    Verified,
    Verify,
)
from tournant.kvstore.node_store import Event, NodeStore

FAULTS = (
    "dropped message", "duplicated message", "late message", "shard killed", "store killed", "node dead",
    "store silent", "node thought lost", "clock jump", "cleared", "corrupt record",
    "router slow",
)  # fmt: skip
CREDIT = 6
BLOCKS = 5  # of a document
DOCUMENTS = 12
POLL_US, TICK_US, HEARTBEAT_US, SILENT_US = 20_000, 10_000, 60_000, 400_000
QUIET_US, CALM_US = 1_500_000, 500_000  # the quiet tail, and its end in which nothing may be left to be told
WHOLE = Part(0, 1, 0, 1)
Name = tuple[int, bytes, int]  # incarnation, key, where
Places = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Setup:
    """What a schedule is made of, next to its seed."""

    seed: int
    faults: frozenset[str]
    nodes: int
    shards: int
    slots: int
    max_keys: int
    max_holders: int
    max_changed: int
    log_keys: int
    events: int = 200

    @staticmethod
    def draw(seed: int) -> Setup:
        """A random setup: each fault is on with the same odds of being off."""
        rng = random.Random(seed * 2 + 1)
        faults = frozenset(fault for fault in FAULTS if rng.randrange(3) == 0)
        return Setup(
            seed, faults, rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 3)), rng.randrange(2 * CREDIT, 5 * CREDIT),
            rng.choice((12, 1000, 1000, 1000)), rng.choice((1, 16, 16, 16)), rng.choice((4, 1000, 1000)),
            rng.choice((16, 1000)),
        )  # fmt: skip


@functools.cache
def chain(document: int) -> list[bytes]:
    """Keys of a document. Three documents at a time share the first two; all keys of a chain end alike."""
    family = document // 3
    route = hashlib.sha256(b"family%d" % family).digest()[:2]
    names = [f"{family}/{n}" if n < 2 else f"{document}/{n}" for n in range(BLOCKS)]
    return [hashlib.sha256(name.encode()).digest()[:30] + route for name in names]


class Node:
    """One node: its store, which has one writer and reader, its announcer and its disk."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.disk = Disk(world.rng, frozenset(), world.count)
        self.dead = self.up = False
        self.silent_until = 0
        self.true: dict[bytes, int] = {}
        self.start()

    def start(self) -> None:
        """A new store finds the folder of the one before it."""
        world, setup = self.world, self.world.setup
        self.incarnation = world.rng.getrandbits(64)
        world.lives.setdefault(self.number, []).append(self.incarnation)
        record = PAGE_BYTES * 3
        config = StoreConfig(
            host_bytes=setup.slots * PAGE_BYTES, nvme_bytes=record * 24, segment_bytes=record * 6, max_lent_share=0.6,
            copy_start=0.4, copy_stop=0.2, records_per_write=4,
        )  # fmt: skip
        self.memory = Memory(self.incarnation)
        self.core = NodeStore(config, self.incarnation, b"")
        self.core.recover(self.disk.recover())
        self.lent: list[tuple[int, int]] = []
        self.counter = self.seq = self.read = 0
        limits = AnnouncerConfig(self.number, setup.shards, setup.max_changed, batch=8, heartbeat_us=HEARTBEAT_US)
        self.announcer = Announcer(limits, self.incarnation, self.core.residency)
        self.up = True
        self.step(Attach(1, b"w" * 32, "none", b"", self.incarnation, WHOLE, (WHOLE,), PAGE_BYTES, CREDIT))

    def kill(self) -> None:
        """The process is gone, what it had asked of the disk may be done or not."""
        self.up = False
        self.disk.crash(power=False)
        if self.world.strikes("node dead", 3):
            self.dead = True
        else:
            self.world.later(self.world.rng.randrange(5_000, 200_000), self.start)

    def step(self, event: Event) -> list[object]:
        """One event of the core; replies to its client."""
        incarnation, replies = self.incarnation, []

        def arrive(later_event: Event) -> None:
            if self.up and incarnation == self.incarnation:
                self.step(later_event)

        for instruction in self.core.step(self.world.now, event):
            if isinstance(instruction, Send):
                replies.append(instruction.reply)
                if isinstance(instruction.reply, Attached | Reported):
                    self.lent += instruction.reply.lent
            elif isinstance(instruction, Verify):
                arrive(Verified(instruction.io, True))
            elif isinstance(instruction, DiskInstruction):
                self.disk.submit(instruction, self.memory, self.world.later, arrive)
        return replies

    def work(self) -> None:
        """A request writes, reads or forgets some blocks."""
        rng = self.world.rng
        keys = chain(rng.randrange(DOCUMENTS))
        kind = rng.randrange(10)
        if kind < 5:
            self._write(keys[rng.randrange(2) : rng.randrange(2, BLOCKS + 1)])
        elif kind < 9:
            self._read(keys)
        else:
            for key, group in list(self.core.residency.index.by_key.items())[: rng.randrange(3)]:
                self.step(Forget(1, key, group.version))
        if self.world.strikes("cleared", 40):
            self.core.clear()
            self.step(Tick())

    def _write(self, keys: list[bytes]) -> None:
        entries = []
        for key in keys[: len(self.lent)]:
            self.counter += 1
            page, generation = self.lent.pop(0)
            value = self.counter ^ 1 if self.world.strikes("corrupt record", 8) else self.counter
            self.memory.contents[page] = value
            entries.append(
                ReportEntry(key, Version(self.incarnation, self.counter), page, generation, PAGE_BYTES, self.counter)
            )
        self.seq += 1
        self.step(Report(1, self.seq, tuple(entries)))

    def _read(self, keys: list[bytes]) -> None:
        self.read += 1
        read = self.read
        for opened in self.step(Open(1, read, tuple(keys))):
            if isinstance(opened, Opened):
                picks = []
                for key in keys[: len(opened.counts)]:
                    group = self.core.residency.index.by_key.get(key)  # the same step may have dropped it
                    if group is not None:
                        picks.append((group if group.complete or group.older is None else group.older).version)
                self.step(Fetch(1, read, tuple(picks)))
        incarnation = self.incarnation
        self.world.later(
            self.world.rng.randrange(20_000),
            lambda: self.up and incarnation == self.incarnation and self.step(CloseRead(1, read)),
        )

    def holds(self) -> dict[bytes, int]:
        """What can be read from this node now, and from where: recounted, without what the announcer looks at."""
        found: dict[bytes, int] = {}
        if self.up:
            for key, first in self.core.residency.index.by_key.items():
                places = []
                for group in (first, first.older):
                    if group is not None and group.complete:
                        if group.in_host:
                            places.append(HOST)
                        elif group.on_nvme:
                            places.append(NVME)
                if places:
                    found[key] = min(places)
        return found


class Shard:
    """One shard and the router that follows it."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.position = Position(0)
        self.follows_at = 0
        self.copy: dict[bytes, Places] = {}
        self.start()

    def start(self) -> None:
        """A new, empty shard."""
        setup = self.world.setup
        self.believed: dict[int, int] = {}  # node -> which of its lives
        config = DirectoryConfig(
            max_keys=setup.max_keys, max_holders=setup.max_holders, max_nodes=8, log_keys=setup.log_keys, changes=8,
            silent_us=SILENT_US,
        )  # fmt: skip
        self.directory = Directory(config, self.world.rng.getrandbits(64))
        self.up = True

    def kill(self) -> None:
        """The shard is gone for a while; what comes meanwhile is lost."""
        self.up = False
        self.world.later(self.world.rng.randrange(1_000, 100_000), self.start)

    def follow(self) -> None:
        """The router takes in what has changed."""
        if not self.up or self.world.now < self.follows_at:
            return
        if self.world.strikes("router slow", 8):
            self.follows_at = self.world.now + self.world.rng.randrange(500_000)
        found = self.directory.changes_since(self.position)
        self.position = found.position
        if found.start_over:
            self.world.count("start over")
            self.copy.clear()
        for number in found.lost:
            self.copy = {key: _without(places, number) for key, places in self.copy.items()}
        for key, host, nvme in found.entries:
            self.copy[key] = (host, nvme)
        for key, host, nvme in found.older:
            self.copy.setdefault(key, (host, nvme))
        self.copy = {key: places for key, places in self.copy.items() if any(places)}

    def entries(self) -> dict[bytes, Places]:
        """All entries."""
        return {key: (one.host, one.nvme) for key, one in self.directory._index.items()}


def _without(places: Places, number: int) -> Places:
    host, nvme = (tuple(node for node in nodes if node != number) for nodes in places)
    return host, nvme


@dataclass
class World:
    """One schedule. `counts`: how often each fault and branch happened."""

    setup: Setup
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.setup.seed)
        self.now = 1_000_000
        self.jump = 0
        self.quiet = False
        self.trace = self.steps = self.num_reads = self.num_claimed = self.num_taken = 0
        self._heap: list[tuple[int, int, Callable[[], object]]] = []
        self._next = 0
        self.lives: dict[int, list[int]] = {}
        self.told: set[tuple[int, Name]] = set()
        self.nodes = [Node(self, number) for number in range(self.setup.nodes)]
        self.shards = [Shard(self, number) for number in range(self.setup.shards)]
        for node in self.nodes:
            self._every(POLL_US, lambda node=node: self._poll(node))
            self._every(TICK_US, lambda node=node: node.up and node.step(Tick()))
        for shard in self.shards:
            self._every(POLL_US, lambda shard=shard: self._tend(shard))

    # ---- time and chance

    def later(self, delay: int, action: Callable[[], object]) -> None:
        """Do something after a while."""
        self._next += 1
        heapq.heappush(self._heap, (self.now + delay, self._next, action))

    def _every(self, period: int, action: Callable[[], object]) -> None:
        def again() -> None:
            action()
            self.later(self.rng.randrange(period // 2, 2 * period), again)

        self.later(self.rng.randrange(period), again)

    def count(self, name: str) -> None:
        """Something worth counting happened."""
        self.counts[name] = self.counts.get(name, 0) + 1

    def strikes(self, fault: str, odds: int) -> bool:
        """Whether a fault happens now."""
        if fault in self.setup.faults and not self.quiet and self.rng.randrange(odds) == 0:
            self.count(fault)
            return True
        return False

    def violated(self, invariant: str, message: str) -> None:
        """An invariant does not hold."""
        raise Violation(invariant, f"{message} (step {self.steps}, {self.setup})")

    def run_until(self, time: int) -> None:
        """Let everything happen that is due by then."""
        while self._heap and self._heap[0][0] <= time:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = time

    # ---- messages

    def _send(self, action: Callable[[], object]) -> None:
        """A message is on its way: `action` at its arrival."""
        if self.strikes("dropped message", 12):
            return
        delay = self.rng.randrange(200, 5_000)
        if self.strikes("late message", 12):
            delay *= self.rng.randrange(10, 200)
        self.later(delay, action)
        if self.strikes("duplicated message", 10):
            self.later(delay + self.rng.randrange(200_000), action)

    def _poll(self, node: Node) -> None:
        if not node.up or self.now < node.silent_until:
            return
        if self.strikes("store silent", 60):
            node.silent_until = self.now + self.rng.randrange(2 * SILENT_US)
        self.told.update((node.number, (node.incarnation, key, where)) for key, where in node.holds().items())
        for number, message in node.announcer.poll(self.now):
            self._send(lambda number=number, message=message: self._arrived(node, self.shards[number], message))
        if node.announcer.num_changed > self.setup.max_changed:
            self.violated("D2", f"{node.announcer.num_changed} changes wait")

    def _arrived(self, node: Node, shard: Shard, message: Announcement) -> None:
        if not shard.up:
            return
        self.steps += 1
        reply = shard.directory.announce(self.now + self.jump, message)
        size = len(message.host) + 8 * len(message.nvme) + 64 * len(message.gone)
        self.trace = zlib.crc32(f"{self.now} {message.seq} {size} {len(shard.directory)}".encode(), self.trace)
        if reply.question:
            self.count("asked")
        self._check(shard)
        self._send(lambda: self._heard(node, shard.number, reply))

    def _heard(self, node: Node, number: int, reply: Heard) -> None:
        if node.up:
            node.announcer.heard(number, reply)

    def _tend(self, shard: Shard) -> None:
        if self.strikes("clock jump", 60):
            self.jump += self.rng.randrange(-3_600_000_000, 3_600_000_000)
        if not shard.up:
            return
        if self.strikes("node thought lost", 40):
            shard.directory.node_lost(self.rng.randrange(self.setup.nodes))
        for number in shard.directory.expire(self.now + self.jump):
            self.count("expired")
            shard.believed.pop(number, None)
        shard.follow()
        self._check(shard)

    # ---- what must hold

    def _check(self, shard: Shard) -> None:
        """D2, D3, D7."""
        directory = shard.directory
        try:
            directory.validate()
        except InvariantViolation as error:
            self.violated("D2", str(error))
        for number, heard in directory._nodes.items():
            if heard.incarnation is not None:
                life = self.lives[number].index(heard.incarnation)
                if life < shard.believed.get(number, 0):
                    self.violated("D7", f"shard {shard.number} went back to life {life} of node {number}")
                shard.believed[number] = life
        for key, places in shard.entries().items():
            if shard_of(key, self.setup.shards) != shard.number:
                self.violated("D3", f"shard {shard.number} has a key of another one")
            for number, where in _listed(places):
                incarnation = directory._nodes[number].incarnation
                if incarnation is None or (number, (incarnation, key, where)) not in self.told:
                    self.violated("D3", f"an entry that was never true of node {number}")

    def read(self) -> None:
        """Somebody looks a chain up, goes to the node that holds most of it, and takes what is there."""
        keys = chain(self.rng.randrange(DOCUMENTS))
        shard = self.shards[shard_of(keys[0], self.setup.shards)]
        if not shard.up:
            return
        self.num_reads += 1
        claimed: dict[int, int] = {}
        place = 0
        for run in shard.directory.lookup(keys):
            for number in (*run.host, *run.nvme):
                if claimed.get(number, 0) == place:
                    claimed[number] = place + run.num_keys
            place += run.num_keys
        if not claimed:
            return
        number = max(claimed, key=lambda one: (claimed[one], -one))
        node = self.nodes[number]
        taken = node.core.lookup(keys[: claimed[number]]) if node.up else 0
        if any(key not in node.holds() for key in keys[:taken]):
            self.violated("D5", f"node {number} gives blocks that it does not hold")
        self.num_claimed += claimed[number]
        self.num_taken += taken
        if taken < claimed[number]:
            self.count("wrong entry")

    def disturb(self) -> None:
        """Processes die."""
        if self.strikes("store killed", 60):
            node = self.rng.choice(self.nodes)
            if node.up:
                node.kill()
        if self.strikes("shard killed", 60):
            shard = self.rng.choice(self.shards)
            if shard.up:
                shard.kill()

    def finish(self) -> None:
        """A quiet tail, then D1, D4 and D6."""
        self.quiet = True
        for node in self.nodes:
            node.silent_until = 0
        self.run_until(self.now + QUIET_US)
        told = [node.announcer.stats.full for node in self.nodes]
        self.run_until(self.now + CALM_US)
        if told != [node.announcer.stats.full for node in self.nodes]:
            self.violated("D6", "everything is told again though nothing was lost")
        roomy = self.setup.max_keys > BLOCKS * DOCUMENTS and self.setup.max_holders >= self.setup.nodes
        for shard in self.shards:
            true = {
                (key, node.number, where)
                for node in self.nodes
                for key, where in node.holds().items()
                if shard_of(key, self.setup.shards) == shard.number
            }
            entries = shard.entries()
            listed = {(key, *one) for key, places in entries.items() for one in _listed(places)}
            if listed - true or (roomy and true - listed):
                self.violated("D1", f"shard {shard.number}: {len(listed - true)} wrong, {len(true - listed)} missing")
            if any(entries.get(key) != places for key, places in shard.copy.items()):
                self.violated("D4", f"the copy of shard {shard.number} has entries that the shard does not have")


def _listed(places: Places) -> Iterator[tuple[int, int]]:
    for where, numbers in zip((HOST, NVME), places, strict=True):
        for number in numbers:
            yield number, where


def run(setup: Setup) -> World:
    """One schedule. Raises Violation."""
    world = World(setup)
    for _ in range(setup.events):
        world.run_until(world.now + world.rng.randrange(8_000))
        ready = [node for node in world.nodes if node.up]
        if ready:
            world.rng.choice(ready).work()
        world.read()
        world.disturb()
    world.finish()
    for node in world.nodes:
        world.counts["full"] = world.counts.get("full", 0) + node.announcer.stats.full
        world.counts["overflow"] = world.counts.get("overflow", 0) + node.announcer.stats.overflows
    for shard in world.shards:
        world.counts["evicted"] = world.counts.get("evicted", 0) + shard.directory.stats.evicted
        world.counts["stale"] = world.counts.get("stale", 0) + shard.directory.stats.stale
    return world
