"""Groups of ranks over real store cores in virtual time: does what a group reads have one version, on every rank?

Owns time, chance, the processes, and the engine of each group: a driver of random orders, which checks the promises of
transfer_messages.py as they come true. Real: GroupLink and GroupMerge, every rank's LinkSession, the stores' core (see
group_ranks.py). A block's bytes stand for (key, version, part), so that whatever is accepted can be judged (I1, I2).
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.simulation.group_ranks import SimNode, SimRank, weights_id
from tests.simulation.memory import content
from tests.simulation.world import Violation, chain
from tournant.kvstore.block import BlockRef, Part, Version
from tournant.kvstore.errors import InvariantViolation
from tournant.workers.group_link import GroupLink, publishers
from tournant.workers.transfer_messages import (
    HOST,
    NVME,
    Attached,
    Copied,
    Detached,
    DropStash,
    EndRead,
    Event,
    Fetch,
    Fetched,
    Found,
    Lent,
    Load,
    Loaded,
    Lookup,
    Order,
    ReadEnded,
    Save,
    Saved,
    SaveEntry,
    Stash,
    Stashed,
    Unstash,
    Unstashed,
    Used,
)
from tournant.workers.write_credit import WriteCredit

FAULTS = (
    "slow copy", "failed copy", "late rank", "late order", "stalled rank", "store killed", "host bit flip", "cancel",
    "group formed anew", "old rank lives on", "evictions", "slow disk", "read error", "write error", "hung disk",
)  # fmt: skip
LATER_FAULTS = ("weights update", "rank on old weights", "said twice")  # drawn last: seeds of before mean what they did
NUM_BLOCKS = 24
NUM_DOCUMENTS = 4
MOST_READS = 4  # at once; a store takes two of a rank
EVENTS = 400
QUIET_US = 20_000_000
ASK_US = 5_000
LATEST_US = 300_000  # that a message is on its way to a rank that runs
LENT_SHARE = 0.6  # of a store's slots, at most
FIRST_CODED = 1 << 30  # all blocks are of kind 0


@dataclass(frozen=True)
class Setup:
    """What a schedule is made of, next to its seed. shared_heads: two ranks in a row hold the same part."""

    seed: int
    faults: frozenset[str]
    ranks: int
    groups: int
    nodes: int
    shared_heads: bool
    slots: int
    credit: int
    nvme: bool
    events: int = EVENTS

    @staticmethod
    def draw(seed: int, *, events: int = EVENTS) -> Setup:
        """A random setup: each fault is on in a third of the schedules."""
        rng = random.Random(seed * 2 + 1)
        faults = frozenset(fault for fault in FAULTS if rng.randrange(3) == 0)
        ranks, groups, credit = rng.choice((2, 2, 3)), rng.choice((1, 2, 2)), rng.choice((3, 4))
        nodes = rng.randrange(1, ranks + 1)
        lent = -(-ranks // nodes) * groups * credit
        slots = int(lent / LENT_SHARE) + rng.randrange(2, 40)
        shared_heads, nvme = rng.randrange(4) == 0, rng.randrange(2) == 0
        faults |= {fault for fault in LATER_FAULTS if rng.randrange(3) == 0}
        return Setup(seed, faults, ranks, groups, nodes, shared_heads, slots, credit, nvme, events)


@dataclass(eq=False)
class Reading:
    """A lookup as its engine sees it. count: blocks asked for, then fetched; loaded: known to be good."""

    number: int
    keys: tuple[bytes, ...]
    found: Found | None = None
    count: int = 0
    fetched: bool = False
    load: Load | None = None
    loaded: int = 0
    ended: bool = False


@dataclass(eq=False)
class Going:
    """A save or stash that is not answered. blocks: held until `Copied`."""

    entries: tuple[SaveEntry, ...]
    blocks: tuple[int, ...]
    value: int = 0
    copied: bool = False
    dropped: bool = False


class LeaderLink:
    """The link of rank 0 as GroupLink sees it."""

    def __init__(self, rank: SimRank) -> None:
        self.rank = rank
        self.events: list[Event] = []

    def submit(self, orders: Sequence[Order]) -> None:
        """See `Link`."""
        self.rank.tell(orders)

    def take_events(self) -> list[Event]:
        """See `Link`."""
        events, self.events = self.events, []
        return events

    def close(self, flush_s: float) -> None:
        """See `Link`."""


class Group:
    """One group of ranks under one writer id, and its engine. weights: number of those that all ranks are to have."""

    def __init__(self, world: GroupWorld, writer_id: int, weights: int = 1) -> None:
        setup = world.setup
        self.world, self.writer_id, self.uid = world, writer_id, world.next_group(weights)
        self.weights = weights
        self.alive = True
        self.admits = True  # new requests; not while the weights are about to be changed
        self.where = [world.nodes[rank * setup.nodes // setup.ranks] for rank in range(setup.ranks)]
        self.index = [rank // 2 if setup.shared_heads else rank for rank in range(setup.ranks)]
        names = [node.name for node in self.where]
        places = publishers(names, [world.parts[index] for index in self.index])
        self.ranks = [
            SimRank(self, rank, node, self.index[rank], *places[rank]) for rank, node in enumerate(self.where)
        ]
        self.leader = LeaderLink(self.ranks[0])
        self.link = GroupLink(self.leader, names, self._tell, self._woken)
        self.credit = WriteCredit(writer_id, FIRST_CODED)
        self.attached = False
        self.free = list(range(NUM_BLOCKS))
        self.held: dict[int, tuple[str, int]] = {}
        self.accepted_early: set[int] = set()
        self.reads: dict[int, Reading] = {}
        self.going: dict[int, Going] = {}
        self.stashes: dict[int, int] = {}  # kept ones: number -> value
        self.coming: dict[int, tuple[int, int]] = {}  # unstashes: number -> block, value
        self.number = 0
        self._wakes = False

    # ---- processes

    def _tell(self, ranks: Sequence[int], orders: Sequence[Order]) -> None:
        for rank in ranks:
            self.ranks[rank].tell(orders)

    def hear(self, rank: int, event: Event) -> None:
        """What a rank says arrives at the leader."""
        if not self.alive:
            return
        if rank == 0:
            self.leader.events.append(event)
            self._woken()
        else:
            self.link.deliver(rank, [event])

    def _woken(self) -> None:
        if not self._wakes and self.alive:
            self._wakes = True
            self.ranks[0].soon(self.world.rng.randrange(1, 300), self._wake)

    def _wake(self) -> None:
        self._wakes = False
        if self.alive:
            for event in self.link.take_events():
                self._on_event(event)
            self.check()

    def submit(self, *orders: Order) -> None:
        """Orders of the engine."""
        self.link.submit(orders)
        self.check()

    def check(self) -> None:
        """The merge and the credit recount themselves."""
        try:
            self.link.validate()
            self.credit.validate()
        except InvariantViolation as error:
            text = str(error)
            self.world.violated(text.split(":")[0] if text[0] == "I" and ":" in text[:4] else "I8", text)

    def is_held(self, block: int, *names: tuple[str, int]) -> bool:
        """Whether a block is held for an order. Nobody gives a block back in a rank that has outlived its group."""
        return not self.alive or self.held.get(block) in names

    def end(self, rng: random.Random) -> None:
        """The parent kills all; one that it cannot reach may live on for a while, stopped at first or not."""
        self.alive = False
        for rank in self.ranks:
            if rank.number and self.world.strikes("old rank lives on", 2):
                lives_us = rng.randrange(50_000, 500_000)
                if self.world.strikes("stalled rank", 2):
                    rank.paused_until = max(rank.paused_until, self.world.now + rng.randrange(20_000, 300_000))
                    lives_us += rank.paused_until - self.world.now
                    self.world.count("old rank wakes")
                self.world.later(lives_us, rank.kill)
                self.world.old.append(rank)
            else:
                rank.kill()

    # ---- other weights

    @property
    def weights_id(self) -> bytes:
        """That its links tell their stores."""
        return weights_id(self.weights)

    def chain(self, document: int) -> tuple[list[bytes], list[int]]:
        """Keys of a document, made with the digest of its weights, and what the right weights give."""
        return chain(self.weights, 0, document)

    def computed(self, rank: SimRank, document: int, place: int, ref: BlockRef) -> int:
        """What a rank has in a block that the group has just computed."""
        world, (_, contexts) = self.world, chain(rank.weights, 0, document)
        value = world.mean(contexts[place], ref.key, ref.version, self.uid, rank.part_index)
        world.made_with[value] = rank.weights
        return value

    @property
    def is_of_one_mind(self) -> bool:
        """Whether all ranks have the weights that they are to have; compared when the group forms."""
        return all(rank.weights == self.weights for rank in self.ranks)

    def close(self) -> None:
        """I11: the engine ends, however much is under way; nothing is left open. Its processes go on until `end`."""
        self._count_under_way()
        self.alive = False
        self.link.close(0.0)
        for event in self.link.take_events():
            self._on_event(event)
        if self._open() or self.held or self.attached:
            self.world.violated("I11", f"the engine has ended, not so {self._open()}; blocks are held for {self.held}")

    def _count_under_way(self) -> None:
        stores = {id(node): node for node in self.where}.values()
        for name, is_so in (
            ("lookup", any(one.found is None for one in self.reads.values())),
            ("fetch", any(one.found is not None and not one.fetched for one in self.reads.values())),
            ("load", any(one.load is not None for one in self.reads.values())),
            ("copy down", any(one.entries and not one.copied for one in self.going.values())),
            ("report", any(one.entries and one.copied for one in self.going.values())),
            ("stash", bool(self.coming) or any(not one.entries for one in self.going.values())),
            ("spill", any(node.is_spilling for node in stores)),
        ):  # fmt: skip
            self.world.count(f"update during {name}", int(is_so))

    # ---- what an engine does

    def act(self) -> None:
        """Something that an engine may order now."""
        rng = self.world.rng
        choice = rng.randrange(100)
        if choice < 32:
            self.publish()
        elif choice < 62:
            if self.admits:
                self.look_up()
        elif choice < 65:
            keys, _ = self.chain(rng.randrange(NUM_DOCUMENTS))
            self.submit(Used(tuple(keys[: rng.randrange(1, 5)])))
        elif choice < 75:
            self.stash()
        elif choice < 84 and self.stashes:
            self.unstash(rng.choice(list(self.stashes)))
        elif choice < 88:
            self.drop_stash()
        elif self.reads and self.world.strikes("cancel", 4):
            self.submit(EndRead(rng.choice(list(self.reads))))

    def next_number(self) -> int:
        """Of an order."""
        self.number += 1
        return self.number

    def take_blocks(self, count: int, name: str, number: int) -> tuple[int, ...]:
        """Free blocks, held for an order from now on."""
        blocks = tuple(self.free.pop(self.world.rng.randrange(len(self.free))) for _ in range(count))
        self.held.update(dict.fromkeys(blocks, (name, number)))
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        """They may be written again, and are."""
        for block in blocks:
            del self.held[block]
            self.accepted_early.discard(block)
            self.free.append(block)
            for rank in self.ranks if self.alive else ():
                rank.blocks[block] = self.world.garbage()

    def publish(self) -> None:
        """Blocks of a chain were computed: on every rank its part of what this version is."""
        world = self.world
        document = world.rng.randrange(NUM_DOCUMENTS)
        keys, _ = self.chain(document)
        first = world.rng.randrange(len(keys)) if world.rng.randrange(3) == 0 else 0
        count = min(world.rng.randrange(1, 5), len(keys) - first, self.credit.credits[0], len(self.free))
        if not self.attached or not count:
            return
        number = self.next_number()
        blocks = self.take_blocks(count, "save", number)
        refs = self.credit.mint(0, keys[first : first + count])
        entries = []
        for place, (block, ref) in enumerate(zip(blocks, refs, strict=True)):
            for rank in self.ranks:
                rank.blocks[block] = self.computed(rank, document, first + place, ref)
            entries.append(SaveEntry(block, ref.key, ref.version, 10, first + place))
        self.going[number] = Going(tuple(entries), blocks)
        self.submit(Save(number, tuple(entries)))

    def look_up(self) -> None:
        """Ask for a chain, or its beginning."""
        keys, _ = self.chain(self.world.rng.randrange(NUM_DOCUMENTS))
        if len(self.reads) == MOST_READS:
            return
        number = self.next_number()
        reading = self.reads[number] = Reading(number, tuple(keys[: self.world.rng.randrange(1, 6)]))
        self.world.count("lookup")
        self.submit(Lookup(number, reading.keys))

    def stash(self) -> None:
        """Put a growing block away: every rank has its own bytes of it."""
        if not self.attached or not self.free or not self.credit.credits[0]:
            return
        number = self.next_number()
        (block,) = self.take_blocks(1, "stash", number)
        self.credit.take_one()
        value = self.world.rng.getrandbits(40)
        for rank in self.ranks:
            rank.blocks[block] = value + rank.number
        self.going[number] = Going((), (block,), value)
        self.submit(Stash(number, block))

    def unstash(self, number: int) -> None:
        """Bring one back."""
        if self.free:
            (block,) = self.take_blocks(1, "unstash", number)
            self.coming[number] = (block, self.stashes.pop(number))
            self.submit(Unstash(number, block))

    def drop_stash(self) -> None:
        """Not wanted any more, kept already or on its way."""
        going = [number for number, one in self.going.items() if not one.entries and not one.dropped]
        names = [*self.stashes, *going]
        if names:
            number = self.world.rng.choice(names)
            self.stashes.pop(number, None)
            if number in self.going:
                self.going[number].dropped = True
            self.submit(DropStash(number))

    # ---- what it hears

    def _on_event(self, event: Event) -> None:
        self.world.note(type(event).__name__, getattr(event, "read", 0))
        self.world.count(type(event).__name__)
        match event:
            case Attached():
                self._require(not self.attached and not self._open(), event)
                self.attached = True
                self.credit.attached(event.credit)
            case Detached():
                self._require(self.attached and not self._open(), event)
                self.attached = False
                self.credit.detached()
                self.stashes.clear()
            case Found():
                self._on_found(event)
            case Fetched():
                self._on_fetched(event)
            case Loaded() | ReadEnded():
                self._on_progress(event)
            case Copied(number):
                going = self.going.get(number)
                self._require(going is not None and not going.copied, event)
                if going is not None:
                    going.copied = True
                    self.give_back(going.blocks)
            case Saved():
                self._on_saved(event)
            case Stashed(stash):
                going = self.going.pop(stash, None)
                self._require(going is not None and going.copied, event)
                self.credit.replied(0, event.num_lent)
                if going is not None and event.ok and not going.dropped:
                    self.stashes[stash] = going.value
            case Unstashed(stash, ok):
                self._require(stash in self.coming, event)
                self._came_back(stash, ok=ok)
                self.credit.replied(0, event.num_lent)
            case Lent(num_lent, kind):
                self._require(num_lent > 0 and self.attached, event)
                self.credit.replied(kind, num_lent)

    def _require(self, fits: bool, event: Event) -> None:
        """I4: an order is answered as transfer_messages.py says, once and in its order."""
        if not fits:
            self.world.violated("I4", f"the engine hears {event} although it cannot be")

    def _open(self) -> list[int]:
        return [*self.reads, *self.going, *self.coming]

    def _on_found(self, event: Found) -> None:
        reading = self.reads.get(event.read)
        self._require(reading is not None and reading.found is None and len(event.tiers) <= len(reading.keys), event)
        if reading is None:
            return
        reading.found = event
        reading.count = len(event.tiers)
        if not event.tiers:
            return
        self.world.count("found")
        self.world.count("found on NVMe", int(NVME in event.tiers))
        if self.world.rng.randrange(20) == 0:
            self.submit(EndRead(event.read))
            return
        reading.count = self.world.rng.randrange(1, reading.count + 1)
        self.submit(Fetch(event.read, reading.count))

    def _on_fetched(self, event: Fetched) -> None:
        reading = self.reads.get(event.read)
        self._require(
            reading is not None and reading.found is not None and not reading.fetched and event.count <= reading.count,
            event,
        )
        if reading is None:
            return
        self._require(event.count == min(rank.fetched.get(event.read, 0) for rank in self.ranks), event)
        reading.fetched, reading.count = True, event.count
        skip = self.world.rng.randrange(event.count) if event.count and self.world.rng.randrange(3) == 0 else 0
        count = min(event.count - skip, len(self.free))
        if count <= 0 or self.world.rng.randrange(20) == 0:
            self.submit(EndRead(event.read))
            return
        reading.load = Load(event.read, skip, self.take_blocks(count, "read", event.read))
        self.submit(reading.load)

    def _on_progress(self, event: Loaded | ReadEnded) -> None:
        """An engine that has ended is told of no block."""
        reading = self.reads.get(event.read)
        blocks = () if reading is None or reading.load is None else reading.load.blocks
        self._require(
            reading is not None
            and reading.found is not None
            and reading.loaded * self.alive + isinstance(event, Loaded) <= event.count <= len(blocks),
            event,
        )
        if reading is None:
            return
        for place in range(reading.loaded, event.count):
            self._accept(reading, blocks[place], reading.keys[place + (reading.load.skip if reading.load else 0)])
        reading.loaded = event.count
        if isinstance(event, Loaded):
            self.accepted_early.update(blocks[: event.count])
            return
        self.world.count("verified", int(event.count > 0))
        self.give_back(blocks)
        del self.reads[event.read]

    def _accept(self, reading: Reading, block: int, key: bytes) -> None:
        """I1, I2, I3, I9: what a kernel would read now is, on every rank, its part of one version of this key, computed
        with the weights that this group has.
        """
        world = self.world
        found: set[tuple[Version, int]] = set()
        for rank in self.ranks:
            value = rank.blocks.get(block, 0)
            meant = world.meant.get(value)
            if meant is None or meant[0] != key or meant[2] != rank.part_index:
                world.violated("I2", f"read {reading.number}: rank {rank.number} has {meant} in block {block}")
                return
            found.add(meant[1])
            if world.made_with[value] != self.weights:
                other = world.made_with[value]
                world.violated("I9", f"rank {rank.number} reads KV of weights {other} on weights {self.weights}")
            if (key, meant[1][0], rank.part) not in rank.node.reported:
                world.violated("I3", f"read {reading.number}: {meant[1]} was never reported")
        if len(found) > 1:
            world.violated("I1", f"read {reading.number}: ranks have {found} in block {block}")
        world.count("accepted")
        writer = found.pop()[1]
        world.count("accepted of another group", int(writer != self.uid))
        world.count("accepted after going back", int(world.were_others_between(writer, self)))

    def _on_saved(self, event: Saved) -> None:
        going = self.going.pop(event.save, None)
        self._require(going is not None and going.copied, event)
        self.credit.replied(0, event.num_lent)
        self.world.count("refused", len(event.refused))
        if going is not None and event.ok:
            self.world.count("saved")
            for place, entry in enumerate(going.entries):
                if place in event.refused:
                    continue
                for rank in self.ranks:
                    if (entry.key, entry.version, rank.part) not in rank.node.reported:
                        self.world.violated("I13", f"{entry} counts as saved; rank {rank.number} has not reported it")

    def _came_back(self, stash: int, *, ok: bool) -> None:
        block, value = self.coming.pop(stash)
        if ok:
            self.world.count("brought back")
            for rank in self.ranks:
                if rank.blocks.get(block) != value + rank.number:
                    self.world.violated("I2", f"stash {stash} came back to rank {rank.number} as something else")
        self.give_back([block])

    # ---- rest

    def let_go(self) -> None:
        """Nothing more is wanted."""
        for read in list(self.reads):
            self.submit(EndRead(read))
        for number in list(self.stashes):
            del self.stashes[number]
            self.submit(DropStash(number))

    @property
    def is_at_rest(self) -> bool:
        """Attached, nothing open, all credit there."""
        granted = [rank.granted for rank in self.ranks]
        at_rest = self.attached and min(granted) > 0 and not self._open() and self.credit.credits == [min(granted)]
        return at_rest and [rank.credit for rank in self.ranks] == granted

    def state(self) -> str:
        """For a message."""
        return f"attached {self.attached}, open {self._open()}, credit {self.credit.credits}"


@dataclass
class GroupWorld:
    """See the module. counts: how often each fault and branch happened."""

    setup: Setup
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.setup.seed)
        self.now, self.steps, self.trace, self.quiet = 1_000_000, 0, 0, False
        self.meant: dict[int, tuple[bytes, tuple[Version, int], int]] = {}  # key, version and its group, part
        self.made_with: dict[int, int] = {}  # the same -> weights of the rank that computed it
        self.weights_of: list[int] = []  # by number of a group, from 1 on
        self._seats: dict[int, list[int]] = {}  # numbers of the groups that were in one place, in order
        self.old: list[SimRank] = []
        self._garbage = self._order = 0
        self._heap: list[tuple[int, int, SimRank | None, Callable[[], object]]] = []
        self.parts = tuple(Part(0, 2, head, head + 1) for head in range(self.setup.ranks))
        self.nodes = [SimNode(self, f"node {number}") for number in range(self.setup.nodes)]
        self.groups = [self.form(None) for _ in range(self.setup.groups)]
        self._seats = {seat: [group.uid] for seat, group in enumerate(self.groups)}

    lent_share = LENT_SHARE

    # ---- time and chance

    def later(self, delay: int, act: Callable[[], object], rank: SimRank | None = None) -> None:
        """Do something after a while; what a process does waits while it is stopped, and ends with it."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay, self._order, rank, act))

    def _next(self) -> None:
        at, _, rank, act = heapq.heappop(self._heap)
        self.now = max(self.now, at)
        if rank is not None and not rank.alive:
            return
        if rank is not None and (rank.paused_until > self.now or rank.suspended):
            if not rank.suspended:
                self.later(rank.paused_until - self.now, rank.wake)
            rank.suspended.append(act)
            return
        act()

    def way(self, rank: int) -> int:
        """Microseconds between a rank and its leader."""
        late = self.rng.randrange(100_000) if rank and self.strikes("late order", 20) else 0
        return self.rng.randrange(1, 20) if rank == 0 else self.rng.randrange(20, 2000) + late

    def count(self, name: str, number: int = 1) -> None:
        """It happened so often."""
        self.counts[name] = self.counts.get(name, 0) + number

    def strikes(self, fault: str, odds: int) -> bool:
        """Whether a fault happens now."""
        if fault in self.setup.faults and not self.quiet and self.rng.randrange(odds) == 0:
            self.count(fault)
            return True
        return False

    def note(self, *what: object) -> None:
        """Into the trace."""
        self.trace = zlib.crc32(f"{self.now} {what}".encode(), self.trace)

    def violated(self, invariant: str, message: str) -> None:
        """An invariant does not hold."""
        raise Violation(invariant, f"{invariant}: {message} (step {self.steps}, {self.setup})")

    # ---- the oracle

    def mean(self, context: int, key: bytes, version: Version, group: int, part: int) -> int:
        """The bytes that a group of ranks writes as a part of a version of a block. No two write the same."""
        value = content(hash((context, group)), (version.writer_id, version.counter), part)
        self.meant[value] = (key, (version, group), part)
        return value

    def form(self, old: Group | None, weights: int = 0) -> Group:
        """A new group of ranks, in the place of an old one, on its weights or others. A mutant keeps its writer id."""
        return Group(self, self.new_writer(old), weights or (1 if old is None else old.weights))

    def new_writer(self, old: Group | None) -> int:
        """Writer id of a group that takes the place of an old one."""
        del old
        return self.rng.getrandbits(63)

    def replace(self, old: Group, weights: int = 0) -> None:
        """Another group in the place of one that has ended. One of whose ranks has other weights is formed again."""
        seat = self.groups.index(old)
        group = self.form(old, weights)
        if group.weights != old.weights and self.strikes("rank on old weights", 2):
            self.rng.choice(group.ranks).weights = old.weights
            if not group.is_of_one_mind:
                group.end(self.rng)
                group = self.form(group, weights)
        self.groups[seat] = group
        self._seats[seat].append(group.uid)

    def begin_update(self, group: Group) -> None:
        """A group takes no new requests; after a while it ends, whatever it has under way, and another one comes up on
        other weights, or, when these cannot be loaded, on the same.
        """
        if not group.admits:
            return
        group.admits = False
        weights = group.weights if self.rng.randrange(4) == 0 else 3 - group.weights

        def swap() -> None:
            if not group.alive or self.quiet:
                group.admits = True
                return
            group.close()
            group.end(self.rng)
            self.replace(group, weights)

        self.later(self.rng.randrange(500, 100_000), swap)

    def were_others_between(self, writer: int, group: Group) -> bool:
        """Whether a block was written in the place of a group before that had other weights for a while."""
        seat = self._seats[self.groups.index(group)] if group in self.groups else []
        later = seat[seat.index(writer) :] if writer in seat else []
        return any(self.weights_of[uid - 1] != group.weights for uid in later)

    def next_group(self, weights: int) -> int:
        """Its number among all groups that there ever were."""
        self.weights_of.append(weights)
        return len(self.weights_of)

    def garbage(self) -> int:
        """Bytes that mean nothing."""
        self._garbage += 1
        return -self._garbage

    # ---- the schedule

    def run(self) -> GroupWorld:
        """Load and faults, then a quiet tail in which everything must end, then a last look at what is there."""
        while self.steps < self.setup.events:
            if self.rng.randrange(4) == 0:
                self._act()
            self._next()
        self.quiet = True
        for node in self.nodes:
            node.disk.quiet = True
        for rank in self.old:
            rank.kill()
        ranks = [rank for group in self.groups for rank in group.ranks]
        woken = max(self.now, *(rank.paused_until for rank in ranks)) + LATEST_US
        while self.now < woken:
            self._next()
        self._rest("after the last fault")
        self._check_quiet()
        self._look_at_all()
        return self

    def _act(self) -> None:
        rng = self.rng
        choice = rng.randrange(100)
        group = rng.choice(self.groups)
        if choice < 90:
            group.act()
        elif self.strikes("stalled rank", 6):
            rank = rng.choice(group.ranks)
            rank.paused_until = max(rank.paused_until, self.now + rng.randrange(10_000, 400_000))
        elif self.strikes("store killed", 20):
            node = rng.choice(self.nodes)
            if node.up:
                node.kill()
        elif self.strikes("host bit flip", 3):
            memory = rng.choice(self.nodes).memory
            if memory.contents:
                memory.contents[rng.choice(sorted(memory.contents))] ^= 1 << 70
        elif self.strikes("group formed anew", 20):
            group.end(rng)
            self.replace(group)
        elif self.strikes("evictions", 3):
            node = rng.choice(self.nodes)
            groups = [one for one in node.core.residency.index.by_gid.values() if one.complete and not one.busy]
            if node.up and groups:
                node.core.residency.drop(rng.choice(groups))
        elif self.strikes("weights update", 5):
            self.begin_update(group)

    def _rest(self, when: str) -> None:
        end = asked = self.now + QUIET_US
        while not self._drained():
            if not end - QUIET_US < self.now < asked:
                asked = self.now + ASK_US
                for group in self.groups:
                    group.let_go()
            if self.now > end:
                states = [group.state() for group in self.groups]
                self.violated("I11", f"not at rest {QUIET_US / 1e6:.0f} s {when}: {states}")
            self._next()

    def _drained(self) -> bool:
        return all(group.is_at_rest for group in self.groups) and not any(
            node.core.reads.reads or node.core.residency.pinned_pages or not node.up for node in self.nodes
        )

    def _check_quiet(self) -> None:
        """I11: no block is held, and nobody is attached but the ranks that there are."""
        attached = sum(rank.session is not None for group in self.groups for rank in group.ranks)
        clients = sum(len(node.core.clients.by_number) for node in self.nodes)
        if clients != attached:
            self.violated("I11", f"{clients} clients are attached, of {attached} ranks")
        for group in self.groups:
            if len(group.free) != NUM_BLOCKS:
                self.violated("I11", f"blocks are held for {group.held} after a quiet tail")

    def _look_at_all(self) -> None:
        """I13: what every rank has in one version is found, in the tier that it is in; nothing else is."""
        for group in self.groups:
            for document in range(NUM_DOCUMENTS):
                keys, _ = group.chain(document)
                number = group.next_number()
                group.reads[number] = reading = Reading(number, tuple(keys[:4]))
                before = self._expected(group, reading.keys)
                group.submit(Lookup(number, reading.keys))
                end = self.now + QUIET_US
                while reading.found is None and self.now < end:
                    self._next()
                tiers = b"" if reading.found is None else reading.found.tiers
                after = self._expected(group, reading.keys)
                if tiers not in (before, after):
                    self.violated("I13", f"of document {document} {tiers!r} is found; there is {before!r}, {after!r}")
                self.count("found at the end", len(tiers))
                self.count("found of both weights", len(tiers) * int(len(set(self.weights_of)) > 1))
                self._rest("after a lookup")

    def _expected(self, group: Group, keys: Sequence[bytes]) -> bytes:
        tiers = bytearray()
        for key in keys:
            had = [rank.node.has(key, rank.part) for rank in group.ranks]
            both = [all(by[version] for by in had) for version in had[0] if all(version in by for by in had)]
            if not both:
                break
            tiers.append(HOST if any(both) else NVME)
        return bytes(tiers)


def run(setup: Setup) -> GroupWorld:
    """One schedule from its setup. Raises Violation."""
    return GroupWorld(setup).run()
