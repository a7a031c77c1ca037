"""The simulated world: virtual time, one list of pending deliveries, one node store core, its disk and its replicas.

Everything that happens is drawn from one seeded generator, so a seed and a set of faults name a schedule. After every
event of the core the invariants of STORE.md section 6 are checked (`after_step`); the oracle is memory.content.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.adopter import Adopter, Elsewhere
from tests.simulation.disk import Disk
from tests.simulation.memory import Memory, content
from tests.simulation.replica import CREDIT, SLOT_BYTES, Rank, Replica
from tournant.kvstore.block import Namespace, Part, Version, block_key
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.disk_events import DiskEvent, DiskInstruction, ReadDone, ReadRecords, WriteRecords
from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.events import (
    Attach,
    Attached,
    ClientClosed,
    ClientExited,
    Disconnect,
    HardUnpin,
    Open,
    Opened,
    Report,
    Reported,
    Send,
    SetGenerations,
    Tick,
    Verified,
    Verify,
)
from tournant.kvstore.groups import Copy
from tournant.kvstore.node_store import Event, Instruction, NodeStore
from tournant.kvstore.slots import SlotState

FAULTS = (
    "dropped message", "duplicated message", "late message", "rank killed", "store killed", "power loss", "eof lies",
    "stalled rank", "clock jump", "slow copy", "cancel", "forget", "weights update", "host bit flip", "hung disk",
    "slow disk", "disk full", "write error", "read error", "sync error", "delete error", "checkpoint error", "bit flip",
    "swapped records", "forged report", "corrupt transfer",
)  # fmt: skip
BETWEEN_NODES = "corrupt transfer"
TICK_US = 20_000
QUIET_US = 9_000_000  # longer than the slowest I/O


class Violation(Exception):  # noqa: N818 - a broken invariant
    """An invariant does not hold. `invariant`: its id in STORE.md."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(invariant, message)
        self.invariant = invariant


@dataclass(frozen=True)
class Setup:
    """What a schedule is made of, next to its seed."""

    seed: int
    faults: frozenset[str]
    ranks: int
    replicas: int
    slots: int
    nvme: bool
    eviction: str = "lru"
    admission: str = "all"
    prefetch: int = 0
    events: int = 200
    adopts: bool = False

    @staticmethod
    def draw(seed: int, *, events: int = 200, evictions: tuple[str, ...] = ("lru",)) -> Setup:
        """A random setup: each fault is on with the same odds of being off."""
        rng = random.Random(seed * 2 + 1)
        faults = frozenset(fault for fault in FAULTS if fault != BETWEEN_NODES and rng.randrange(3) == 0)
        ranks = rng.choice((1, 1, 2, 2, 3))
        replicas = rng.choice((1, 2, 2))
        nvme = rng.randrange(3) > 0
        slots = ranks * (replicas * CREDIT * 2 + rng.randrange(2, 10 if nvme else 24))
        chosen = (rng.choice(evictions), rng.choice(("all", "all", "seen_twice")), rng.choice((0, 2)))
        adopts = rng.randrange(3) == 0  # drawn last, so that the seeds of before it mean what they did
        faults |= {BETWEEN_NODES} if adopts else set()
        return Setup(seed, faults, ranks, replicas, slots, nvme, *chosen, events, adopts)

    def config(self) -> StoreConfig:
        """Of the store: small, with short deadlines."""
        record = SLOT_BYTES + 2 * 4096
        slots = self.slots + self.ranks * CREDIT * 2 * self.adopts
        return StoreConfig(
            host_bytes=slots * SLOT_BYTES,
            nvme_bytes=record * 6 * 8 if self.nvme else 0,
            segment_bytes=record * 6,
            eviction=self.eviction,
            admission=self.admission,
            prefetch_blocks=self.prefetch,
            max_lent_share=0.6,
            max_pinned_share=0.8,
            pin_us=150_000,
            fetch_us=100_000,
            io_us=400_000,
            disk_retry_us=100_000,
            incomplete_reports=6,
            records_per_write=4,
            records_per_read=2,
            checkpoint_segments=2,
        )


_chains: dict[tuple[int, int, int], tuple[list[bytes], list[int]]] = {}


def chain(weights: int, tenant: int, document: int) -> tuple[list[bytes], list[int]]:
    """Keys and contexts of a document's blocks. Documents of one family share their first blocks."""
    name = (weights, tenant, document)
    if name not in _chains:
        parent = namespace(weights, tenant).digest()
        keys, contexts = [], []
        context = hash((weights, tenant))
        for place in range(5):
            tokens = [document // 3, place] if place < 2 else [document, place]
            parent = block_key(parent, tokens)
            context = hash((context, *tokens))
            keys.append(parent)
            contexts.append(context)
        _chains[name] = (keys, contexts)
    return _chains[name]


def namespace(weights: int, tenant: int) -> Namespace:
    """Identity of what a tenant's requests under some weights may share."""
    return Namespace(bytes([weights]) * 32, "fp32", "sim", b"layout", tenant_salt=b"tenant%d" % tenant)


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
        self.steps = 0
        self.trace = 0
        self._heap: list[tuple[int, int, Rank | Adopter | None, Callable[[], None]]] = []
        self._next = 0
        self._ranks: dict[int, Rank | Adopter] = {}
        self._next_client = 1
        self._lent: dict[int, dict[int, int]] = {}
        self._reported: set[tuple[bytes, Version, int]] = set()
        self.meant: dict[int, tuple[int, Version, int]] = {}  # content -> context, version, part of its writer
        self._ever_lent: set[tuple[int, int]] = set()
        self.copying: list[int] = []  # pages between the check of their checksum and the end of the copy
        self.num_requests = self.num_ended = self.num_opens = self.num_verified = self.num_accepted = 0
        self.disk = Disk(self.rng, self.setup.faults, self.count)
        self.store_up = False
        self._start_store()
        heads = self.setup.ranks
        self.parts = tuple(Part(0, 2, head, head + 1) for head in range(heads))
        self.replicas = [Replica(self, number, self.parts, weights=1) for number in range(self.setup.replicas)]
        self.elsewhere = Elsewhere(self)
        self.adopters = [Adopter(self, *one) for one in enumerate(self.parts if self.setup.adopts else ())]
        self.later(TICK_US, self._tick)

    # ---- time and chance

    def later(self, delay: int, action: Callable[[], None], rank: Rank | Adopter | None = None) -> None:
        """Do something after a while; what a rank does waits while the rank is stopped and ends with it."""
        self._next += 1
        heapq.heappush(self._heap, (self.now + delay, self._next, rank, action))

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

    # ---- the store process

    def _start_store(self) -> None:
        incarnation = self.rng.getrandbits(64)
        self.memory = Memory(incarnation)
        self.core = NodeStore(self.setup.config(), incarnation, b"check")
        if self.setup.nvme:
            recovery = self.disk.recover()
            self.core.recover(recovery)
            if recovery.records:
                self.count("recovered")
        self._lent = {}
        self._held: dict[bytes, dict[Version, set[int]]] = {}  # parts reported since the version was last dropped
        self._num_dropped = self.core.residency.num_dropped
        self._ever_lent = set()
        self._ever_replied: set[tuple[int, int]] = set()
        self.store_up = True

    def _kill_store(self) -> None:
        self.store_up = False
        self.disk.crash(power=self.strikes("power loss", 2))
        for rank in [rank for rank in self._ranks.values() if rank.client]:
            rank.lost_connection()
        self._ranks = {}
        self.later(self.rng.randrange(5_000, 60_000), self._start_store)

    def connect(self, rank: Rank | Adopter) -> int:
        """A new connection; numbers are never used again."""
        client = self._next_client
        self._next_client += 1
        self._ranks[client] = rank
        return client

    def killed(self, rank: Rank) -> None:
        """The process is gone: EOF comes, or not, and its pidfd tells later."""
        rank.client = 0
        incarnation = self.core.incarnation
        for client in [client for client, owner in self._ranks.items() if owner is rank]:
            if self.rng.randrange(3):
                self.later(self.rng.randrange(5, 2000), lambda c=client: self._deliver(ClientClosed(c), incarnation))
            self.later(self.rng.randrange(2000, 40_000), lambda c=client: self._exited(c, incarnation))

    def _exited(self, client: int, incarnation: int) -> None:
        if incarnation == self.core.incarnation:
            self._lent.pop(client, None)
            self._ranks.pop(client, None)
        self._deliver(ClientExited(client), incarnation)

    def to_store(self, rank: Rank | Adopter, message: Event) -> None:
        """A message of a rank is on its way."""
        incarnation = self.core.incarnation
        if not self.store_up or (rank.memory is not None and rank.memory.incarnation != incarnation):
            return
        delay = self.rng.randrange(5, 400)
        if isinstance(message, Attach | HardUnpin):  # the one sets up the connection, the other waits for no answer
            self.later(delay, lambda: self._deliver(message, incarnation))
            return
        if self.strikes("dropped message", 15):
            return
        if self.strikes("late message", 15):
            delay *= 10 + self.rng.randrange(200)
        self.later(delay, lambda: self._deliver(message, incarnation))
        if self.strikes("duplicated message", 10):
            self.later(delay + self.rng.randrange(60_000), lambda: self._deliver(message, incarnation))

    def _deliver(self, event: Event, incarnation: int) -> None:
        if self.store_up and incarnation == self.core.incarnation:
            self.step(event)

    def step(self, event: Event) -> None:
        """One event of the core and everything it asks for."""
        self.steps += 1
        over = isinstance(event, Open) and event.read <= self.core.reads.newest(event.client)
        try:
            out = self.core.step(self.now + self.jump, event)
        except InvariantViolation as error:
            self.violated(str(error).split(":")[0], str(error))
            return
        self.trace = zlib.crc32(f"{self.now} {type(event).__name__} {len(out)}".encode(), self.trace)
        if isinstance(event, Report):
            self._book_report(event, out)
        if self.core.residency.num_dropped != self._num_dropped:
            self._forget_dropped()
        if isinstance(event, Open):
            self._check_opened(event, out, over=over)
        for instruction in out:
            self._carry_out(instruction)
        self.after_step()

    def _carry_out(self, instruction: Instruction) -> None:
        incarnation, memory = self.core.incarnation, self.memory
        match instruction:
            case SetGenerations(pairs):
                memory.generations.update(pairs)
            case Send(client, reply):
                if isinstance(reply, Attached | Reported):
                    self._book_lent(client, reply)
                rank = self._ranks.get(client)
                if rank is not None and (isinstance(reply, Attached) or not self.strikes("dropped message", 20)):
                    delay = self.rng.randrange(5, 400)
                    self.later(delay, lambda: rank.client == client and rank.on_reply(reply), rank=rank)
            case Disconnect(client):
                rank = self._ranks.get(client)
                if rank is not None and rank.client == client:
                    self.count("disconnected")
                    attached = rank.memory is not None
                    rank.lost_connection()
                    if attached and rank.alive and isinstance(rank, Rank):
                        self.later(self.rng.randrange(1000, 100_000), lambda: rank.alive and rank.replica.fail())
            case Verify(io, page, _, checksum):
                good = memory.contents.get(page) == checksum
                self.later(self.rng.randrange(20, 500), lambda: self._deliver(Verified(io, good), incarnation))
            case WriteRecords() | ReadRecords():
                self._to_disk(instruction, memory, incarnation)
            case _ if isinstance(instruction, DiskInstruction):
                self._to_disk(instruction, memory, incarnation)
            case _:
                raise TypeError(f"the world does not know {instruction}")

    def _book_lent(self, client: int, reply: Attached | Reported) -> None:
        """I4: a slot is lent once under each generation. A reply that is sent again lends nothing new."""
        if isinstance(reply, Reported):
            if (client, reply.seq) in self._ever_replied:
                return
            self._ever_replied.add((client, reply.seq))
        for pair in reply.lent:
            if pair in self._ever_lent:
                self.violated("I4", f"slot {pair[0]} is lent twice at generation {pair[1]}")
            self._ever_lent.add(pair)
        self._lent.setdefault(client, {}).update(reply.lent)

    def _to_disk(self, instruction: DiskInstruction, memory: Memory, incarnation: int) -> None:
        hang = self.rng.randrange(500_000, 3_000_000) if self.strikes("hung disk", 25) else 0

        def done(event: DiskEvent) -> None:
            if isinstance(event, ReadDone):
                self._check_loaded(instruction, memory)
            self._deliver(event, incarnation)
            if isinstance(event, ReadDone):
                self._check_shown(instruction, event, memory)

        self.disk.submit(instruction, memory, lambda delay, act: self.later(delay + hang, act), done)

    def _check_loaded(self, instruction: DiskInstruction, memory: Memory) -> None:
        """An I/O wrote into host slots just now: nobody else may have had them."""
        if not isinstance(instruction, ReadRecords) or not self.store_up or memory is not self.memory:
            return
        for read in instruction.reads:
            slot = self.core.residency.pool._by_page.get(read.slot)
            if slot is None or slot.state not in (SlotState.LOADING, SlotState.QUARANTINED):
                state = None if slot is None else slot.state
                self.violated("I5", f"a load wrote into slot {read.slot}, which is {state}")

    def _check_shown(self, instruction: DiskInstruction, event: ReadDone, memory: Memory) -> None:
        """I10: what was read from the disk is what its record said, or it is not shown."""
        if not isinstance(instruction, ReadRecords) or not self.store_up or memory is not self.memory:
            return
        for read, result in zip(instruction.reads, event.results, strict=True):
            good = result.outcome == "ok" and memory.contents.get(read.slot) == read.header.checksum
            slot = self.core.residency.pool._by_page.get(read.slot)
            copy = slot.user if slot is not None and slot.state is SlotState.VISIBLE else None
            if isinstance(copy, Copy) and copy.group.key == read.header.key and not good:
                self.violated("I10", f"slot {read.slot} shows a record that was not read whole")

    def _book_report(self, event: Report, out: list[Instruction]) -> None:
        """I4: an entry counts exactly when its slot is lent to that client at that generation."""
        replies = [i.reply for i in out if isinstance(i, Send) and isinstance(i.reply, Reported)]
        lent = self._lent.get(event.client, {})
        if not replies or (event.entries and event.seq in self._booked(event.client)):
            return
        self._booked(event.client).add(event.seq)
        rank = self._ranks.get(event.client)
        for place, entry in enumerate(event.entries):
            accepted = place not in replies[0].refused
            if accepted and lent.get(entry.page) != entry.generation:
                self.violated("I4", f"a report for slot {entry.page} was taken, which is not lent to its client")
            if accepted:
                del lent[entry.page]
            if accepted and rank is not None:
                name = (entry.key, entry.version, rank.number)
                if isinstance(rank, Adopter) != (name in self._reported):
                    what = "adopted, but never written" if isinstance(rank, Adopter) else "written twice"
                    self.violated("I3", f"{entry.version} of a part was {what}")
                self._reported.add(name)
                self._held.setdefault(entry.key, {}).setdefault(entry.version, set()).add(rank.number)
        for page, generation in event.released:
            if lent.get(page) == generation:
                del lent[page]

    def _forget_dropped(self) -> None:
        self._num_dropped = self.core.residency.num_dropped
        index = self.core.residency.index
        for key, versions in self._held.items():
            left = {
                group.version: {self.parts.index(index.parts[copy.part]) for copy in group.copies}
                for group in index.versions(key)
            }
            self._held[key] = {version: parts & left[version] for version, parts in versions.items() if version in left}

    def _check_opened(self, event: Open, out: list[Instruction], *, over: bool) -> None:
        """I13: what was reported whole is shown until something drops it; an open ends at the first key without.

        over: the same read was opened or closed before, so the answer is an old one or empty.
        """
        cut, self._num_cut = self._num_cut, self.core.reads.num_cut_by_pins
        replies = [i.reply for i in out if isinstance(i, Send) and isinstance(i.reply, Opened)]
        if over or cut != self._num_cut or not replies or len(replies[0].counts) == len(event.keys):
            return
        place = len(replies[0].counts)
        if any(len(parts) == len(self.parts) for parts in self._held.get(event.keys[place], {}).values()):
            self.violated("I13", f"a block that was reported whole is not shown, at place {place}")

    _num_cut: int = 0

    def _booked(self, client: int) -> set[int]:
        return self._seqs.setdefault((self.core.incarnation, client), set())

    _seqs: dict[tuple[int, int], set[int]] = field(default_factory=dict)

    def after_step(self) -> None:
        """Recount the core; compare what it says is lent with what was said to be lent."""
        try:
            self.core.validate()
        except InvariantViolation as error:
            self.violated(str(error).split(":")[0], str(error))
        clients = self.core.clients.by_number
        for client, lent in self._lent.items():
            known = clients.get(client)
            have = {page: slot.generation for page, slot in known.lent.items()} if known is not None else {}
            if have != lent:
                self.violated("I8", f"slots lent to client {client} are {have}; it was told {lent}")

    # ---- oracles that replicas call

    def written_somewhere(self, key: bytes, version: Version, part: int) -> None:
        """A part was written by a replica of another node."""
        self._reported.add((key, version, part))

    def may_write(self, rank: Rank | Adopter, memory: Memory, page: int, generation: int) -> bool:
        """I5: a process writes into a slot only while it is lent to it. False: its mapping is of a dead store."""
        if memory is not self.memory or not self.store_up:
            return True
        slot = self.core.residency.pool.find(page, generation)
        if slot is None or slot.state is not SlotState.LENT:
            self.violated("I5", f"rank {rank.number} writes into slot {page}, which is not lent to it any more")
        return True

    def accepted(self, replica: Replica, key: bytes, version: Version, part: int, context: int, value: int) -> None:
        """I1, I2, I3, I9: what a replica takes for a part of a block is what a writer of this version made for it."""
        self.num_accepted += 1
        if value != content(context, (version.writer_id, version.counter), part):
            meant = self.meant.get(value)
            kind = "I2"
            if meant is not None:
                kind = "I9" if meant[0] != context else "I1" if meant[1] != version else "I2"
            self.violated(kind, f"replica {replica.number} accepted for part {part} of {version} what was {meant}")
        if (key, version, part) not in self._reported:
            self.violated("I3", f"replica {replica.number} accepted {version}, which was never reported")
        if self.adopters and part == 0 and self.rng.randrange(4) == 0:
            self.elsewhere.copied(key, version, context)

    # ---- the schedule

    def _tick(self) -> None:
        if self.store_up:
            self.step(Tick())
            if self.quiet:
                for replica in self.replicas:
                    replica.publish()
                for adopter in self.adopters:
                    adopter.flush()
        self.later(TICK_US, self._tick)

    def act(self) -> None:
        """Something that a user, an operator or fate does."""
        rng = self.rng
        if self.adopters and rng.randrange(3) == 0:
            self._act_elsewhere()
            return
        replica = rng.choice(self.replicas)
        choice = rng.randrange(100)
        if choice < 35:
            tenant, document = int(rng.randrange(5) == 0), rng.randrange(4)
            keys, contexts = self.chain_of(replica.weights, tenant, document)
            length = 1 + rng.randrange(len(keys))
            replica.request(contexts[:length], keys[:length])
        elif choice < 90:
            replica.publish()
        elif self.strikes("cancel", 3):
            replica.cancel()
        elif self.strikes("rank killed", 12):
            replica.fail()
        elif self.strikes("store killed", 12) and self.store_up:
            self._kill_store()
        elif self.strikes("stalled rank", 8):
            rng.choice(replica.ranks).paused_until = self.now + rng.randrange(10_000, 400_000)
        elif self.strikes("eof lies", 12):
            self._eof_lies(rng.choice(replica.ranks))
        elif self.strikes("clock jump", 8):
            self.jump += rng.choice((-3_600_000_000, 3_600_000_000))
        elif self.strikes("weights update", 20):
            replica.update_weights(1 + (replica.weights + 1) % 3)
        elif self.strikes("host bit flip", 8):
            pages = sorted(page for page in self.memory.contents if page not in self.copying)
            if pages:
                self.memory.contents[rng.choice(pages)] ^= 1 << 70
        elif choice > 97:
            self.disk.rot()

    def _act_elsewhere(self) -> None:
        """Another node's replica writes, or blocks are brought from there."""
        rng, replica = self.rng, self.rng.choice(self.replicas)
        if rng.randrange(3) == 0:
            keys, contexts = self.chain_of(replica.weights, 0, rng.randrange(4))
            place = rng.randrange(len(keys))
            self.elsewhere.written(keys[place], contexts[place])
        else:
            rng.choice(self.adopters).bring()

    def _eof_lies(self, rank: Rank) -> None:
        """The connection ends while the process lives on, and writes on into what was lent to it."""
        client, incarnation = rank.client, self.core.incarnation
        if not client or rank.memory is None:
            return
        replica = rank.replica
        self._deliver(ClientClosed(client), incarnation)

        def fail() -> None:
            if rank.alive:
                replica.fail()

        self.later(self.rng.randrange(1000, 100_000), fail)

    def all_ranks(self) -> list[Rank]:
        """Of all replicas, in order."""
        return [rank for replica in self.replicas for rank in replica.ranks]

    def chain_of(self, weights: int, tenant: int, document: int) -> tuple[list[bytes], list[int]]:
        """Keys and contexts. A mutant leaves something out of the keys."""
        return chain(weights, tenant, document)

    def run(self) -> World:
        """Faults and load for `events` events of the core, then a quiet tail in which everything must end."""
        while self.steps < self.setup.events:
            if self.rng.randrange(3) == 0:
                self.act()
            self._next_delivery()
        self.quiet = self.disk.quiet = True
        self._wake_all()
        end = self.now + QUIET_US
        while self._heap[0][0] < end and not self._drained():
            self._next_delivery()
        self._check_quiet()
        self._count_branches()
        return self

    def _count_branches(self) -> None:
        """Branches of the core that the last incarnation has been through."""
        tiers, stats, residency = self.core.tiers, self.core.stats, self.core.residency
        for name, number in (
            ("loaded", tiers.loader.num_loaded), ("written", tiers.num_written),
            ("corrupt", tiers.loader.num_corrupt), ("bad slot", tiers.num_bad_slots),
            ("evicted", residency.num_evicted), ("evicted clean", residency.num_evicted - residency.num_lost),
            ("incomplete dropped", stats.dropped_incomplete), ("credit short", stats.credit_short),
            ("read expired", stats.expired_reads), ("fetch late", stats.late_fetches),
            ("cut by pins", self.core.reads.num_cut_by_pins), ("entry refused", stats.refused_entries),
            ("prefetched", stats.prefetched),
        ):  # fmt: skip
            self.counts[name] = self.counts.get(name, 0) + number

    def _drained(self) -> bool:
        """Nothing is left to wait for, except ticks."""
        core = self.core
        pages = core.residency.pool.pages
        return (
            self.store_up
            and self.num_ended == self.num_requests
            and not core.reads.reads
            and not core.residency.pinned_pages
            and not any(pages[state] for state in (SlotState.LOADING, SlotState.DRAINING, SlotState.QUARANTINED))
            and self._lent_slots() == self._credit_slots()
        )

    def _credit_slots(self) -> int:
        """The standing credit: of all ranks, and of the adopters that have found an engine of their weights."""
        adopting = sum(client.attach.adopts for client in self.core.clients.by_number.values())
        return (sum(len(replica.ranks) for replica in self.replicas) + adopting) * CREDIT

    def _lent_slots(self) -> int:
        return sum(len(client.lent) for client in self.core.clients.by_number.values())

    def _next_delivery(self) -> None:
        at, _, rank, action = heapq.heappop(self._heap)
        self.now = max(self.now, at)
        if rank is not None:
            if not rank.alive:
                return
            if rank.paused_until > self.now:
                self.later(rank.paused_until - self.now, action, rank)
                return
        action()

    def _wake_all(self) -> None:
        for replica in self.replicas:
            replica.give_up_reads()
            replica.sealed = []
            for rank in replica.ranks:
                rank.paused_until = 0

    def _check_quiet(self) -> None:
        """I11: every request has ended, pins and copies have drained, credit stands where it should."""
        if self.num_ended < self.num_requests:
            self.violated("I11", f"{self.num_requests - self.num_ended} requests have not ended")
        core = self.core
        if core.residency.pinned_pages or core.reads.reads:
            self.violated("I11", f"{core.residency.pinned_pages} pages stay pinned, {len(core.reads.reads)} reads open")
        pages = core.residency.pool.pages
        if pages[SlotState.LOADING] or pages[SlotState.DRAINING] or pages[SlotState.QUARANTINED]:
            self.violated("I11", f"pages by state are {pages} after a quiet tail")
        lent = self._lent_slots()
        if lent != self._credit_slots():
            self.violated("I11", f"{lent} slots are lent; the credit of all is {self._credit_slots()}")
        for rank in (rank for replica in self.replicas for rank in replica.ranks):
            known = core.clients.by_number.get(rank.client)
            told = {*rank.lent, *rank.busy} - {(entry.page, entry.generation) for entry in rank.done}
            if known is not None and not told <= {(s.page, s.generation) for s in known.lent.values()}:
                self.violated("I11", f"rank {rank.number} counts on {sorted(told)}, which are not lent to it")


def run(setup: Setup) -> World:
    """One schedule from its setup. Raises Violation."""
    return World(setup).run()
