"""Node stores, and the ranks that use them, in virtual time: what lies below the merge of a group's links.

Real: the core of every store, the client, and the session of a link with its reads and saves. Simulated: the connection
between them, disk and memory, the lanes that copy, the thread of the link (`SimRank` does what StoreLink's does), the
way between a rank and its leader. A process that is stopped does nothing until it wakes; one that is killed, never.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from tests.simulation.disk import Disk
from tests.simulation.memory import Memory
from tournant.kvstore.admin import Status
from tournant.kvstore.block import Part, Version
from tournant.kvstore.client import Identity, StoreClient
from tournant.kvstore.config import PAGE_BYTES, StoreConfig
from tournant.kvstore.disk_events import DiskInstruction
from tournant.kvstore.errors import InvariantViolation, StoreRefused, StoreUnavailable
from tournant.kvstore.events import (
    Attach,
    ClientExited,
    Disconnect,
    Report,
    Reported,
    ReportEntry,
    Send,
    SetGenerations,
    Tick,
    Verified,
    Verify,
)
from tournant.kvstore.node_store import NodeStore
from tournant.kvstore.slots import SlotState
from tournant.workers.attachment import Attachment
from tournant.workers.copy_lanes import CopyDown, CopyUp, Job
from tournant.workers.link_session import LinkSession, refuse
from tournant.workers.transfer_messages import (
    Attached,
    Copied,
    Detached,
    Event,
    Fetched,
    Lent,
    Loaded,
    Order,
    ReadEnded,
    Refused,
    Save,
    Stash,
)
from tournant.workers.transfer_wire import event_from_wire, event_to_wire, order_from_wire, order_to_wire

if TYPE_CHECKING:
    from tests.simulation.group_world import Group, GroupWorld

SLOT_BYTES = 4096
TICK_US = 20_000
TIMEOUT_S = 5.0
MASK = (1 << 64) - 1
UNNUMBERED = (Attached, Detached, Lent, Refused)  # events that belong to no order: each is said once


def weights_id(weights: int) -> bytes:
    """Digest of the weights with this number."""
    return bytes([weights]) * 32


class SimMemory(Memory):
    """Also what a client sees of its mapping."""

    def __init__(self, incarnation: int, num_pages: int) -> None:
        super().__init__(incarnation)
        self.num_pages = num_pages

    def slot(self, page: int, length: int) -> memoryview:
        """Bounds alone: contents are integers."""
        if not 0 <= page < self.num_pages or length > SLOT_BYTES:
            raise ValueError(f"slot {page} is outside the pool")
        return memoryview(b"")


class SimNode:
    """One node store process after another, on one disk. reported: every (key, version, part) it has ever taken."""

    def __init__(self, world: GroupWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.reported: set[tuple[bytes, Version, Part]] = set()
        self._writers: dict[tuple[bytes, Version, Part], int] = {}  # numbers of the groups that wrote them
        self.disk = Disk(world.rng, world.setup.faults, world.count)
        self.clients: dict[int, SimTransport] = {}
        self.numbers = 0
        self.up = False
        self._start()
        world.later(TICK_US, self._tick)

    def _config(self) -> StoreConfig:
        record = SLOT_BYTES + 2 * PAGE_BYTES
        setup = self.world.setup
        return StoreConfig(
            host_bytes=setup.slots * SLOT_BYTES,
            nvme_bytes=record * 6 * 8 if setup.nvme else 0,
            segment_bytes=record * 6,
            max_lent_share=self.world.lent_share,
            max_pinned_share=0.8,
            max_keys=4,
            max_reads=2,
            max_entries=2,
            pin_us=150_000,
            fetch_us=100_000,
            io_us=400_000,
            disk_retry_us=100_000,
            incomplete_reports=6,
            records_per_write=4,
            records_per_read=2,
        )

    def _start(self) -> None:
        incarnation = self.world.rng.getrandbits(64)
        self.memory = SimMemory(incarnation, self.world.setup.slots)
        self.core = NodeStore(self._config(), incarnation, b"")
        if self.world.setup.nvme:
            self.core.recover(self.disk.recover())
        self.up = True

    def status(self) -> Status:
        """The limits, which are all that a link looks at."""
        config = self.core.config
        return cast(
            Status,
            SimpleNamespace(max_keys=config.max_keys, max_reads=config.max_reads, max_entries=config.max_entries),
        )

    def kill(self) -> None:
        """The process is gone; later there is another one."""
        self.up = False
        self.disk.crash(power=False)
        for transport in list(self.clients.values()):
            transport.broken = "the store is gone"
            transport.arrived()
        self.clients = {}
        self.world.later(self.world.rng.randrange(5_000, 60_000), self._start)

    def _tick(self) -> None:
        if self.up:
            self.step(Tick())
        self.world.later(TICK_US, self._tick)

    def deliver(self, event: Any, incarnation: int) -> None:
        """A message or event arrives, if the store that it was meant for still lives."""
        if self.up and self.core.incarnation == incarnation:
            self.step(event)

    def step(self, event: Any) -> None:
        """One event of the core, and all it asks for."""
        world = self.world
        world.steps += 1
        out = self.core.step(world.now, event)
        for instruction in out:
            self._carry_out(instruction, event)
        if world.steps % 16 == 0:
            try:
                self.core.validate()
            except InvariantViolation as error:
                world.violated(str(error).split(":")[0], str(error))

    def _carry_out(self, instruction: Any, event: Any) -> None:
        incarnation, memory, world = self.core.incarnation, self.memory, self.world
        match instruction:
            case SetGenerations(pairs):
                memory.generations.update(pairs)
            case Send(client, reply):
                if isinstance(reply, Reported) and isinstance(event, Report):
                    self._book(event, reply)
                if client in self.clients:
                    self.clients[client].receive_later(reply)
            case Disconnect(client, reason):
                transport = self.clients.pop(client, None)
                if transport is not None and not transport.inbox:
                    transport.broken = reason
                    transport.arrived()
            case Verify(io, page, _, checksum):
                good = memory.contents.get(page) == checksum
                world.later(world.rng.randrange(20, 500), lambda: self.deliver(Verified(io, good), incarnation))
            case _ if isinstance(instruction, DiskInstruction):
                hang = world.rng.randrange(500_000, 3_000_000) if world.strikes("hung disk", 15) else 0
                self.disk.submit(
                    instruction,
                    memory,
                    lambda delay, act: world.later(delay + hang, act),
                    lambda done: self.deliver(done, incarnation),
                )
            case _:
                raise TypeError(f"the world does not know {instruction}")

    def _book(self, event: Report, reply: Reported) -> None:
        part = self.core.clients.by_number[event.client].attach.part
        for place, entry in enumerate(event.entries):
            if place not in reply.refused and part is not None:
                self.reported.add((entry.key, entry.version, part))
                self._check_filed(entry, part)

    def _check_filed(self, entry: ReportEntry, part: Part) -> None:
        """I3: a version of a part is one group's; I9: it is filed under the weights that its writer has."""
        core, meant = self.core, self.world.meant.get(entry.checksum)
        if meant is None:
            return
        name, uid = (entry.key, entry.version, part), meant[1][1]
        if self._writers.setdefault(name, uid) != uid:
            self.world.violated("I3", f"groups {self._writers[name]} and {uid} both have written {entry.version}")
        group = core.residency.index.find(entry.key, entry.version.writer_id, entry.version.counter)
        if group is not None and core.weights.entries[group.weights].weights_id != weights_id(
            self.world.weights_of[uid - 1]
        ):
            self.world.violated("I9", f"{entry.version} of group {uid} is filed under other weights than it has")

    @property
    def is_spilling(self) -> bool:
        """Whether a block is being written to disk."""
        return any(copy.io for group in self.core.residency.index.by_gid.values() for copy in group.copies)

    def has(self, key: bytes, part: Part) -> dict[Version, bool]:
        """Whole versions of a key that have this part here, and whether they are in host slots."""
        index = self.core.residency.index
        return {
            group.version: group.in_host
            for group in index.versions(key)
            if group.complete and any(index.parts[copy.part] == part for copy in group.copies)
        }


class SimTransport:
    """`client.Transport` between a rank and a store: in order, each message after a while."""

    def __init__(self, node: SimNode, rank: SimRank) -> None:
        node.numbers += 1
        self.node, self.rank, self.number = node, rank, node.numbers
        self.incarnation = node.core.incarnation
        self.inbox: deque[Any] = deque()
        self.broken = ""
        self.attached = False
        self._there = self._back = 0  # when the last message arrives
        node.clients[self.number] = self

    def send(self, message: Any, deadline: float) -> None:
        """See `client.Transport`."""
        self.flush()
        message = replace(message, client=self.number)
        if isinstance(message, Attach):
            self.node.step(message)
            return
        world = self.node.world
        self._there = max(self._there, world.now + world.rng.randrange(5, 400))
        world.later(self._there - world.now, lambda: self.node.deliver(message, self.incarnation))

    def receive_later(self, reply: Any) -> None:
        """The store has sent something."""
        if not self.attached:
            self.attached = True
            self.inbox.append(reply)
            return
        world = self.node.world
        self._back = max(self._back, world.now + world.rng.randrange(5, 400))

        def come() -> None:
            self.inbox.append(reply)
            self.arrived()

        world.later(self._back - world.now, come)

    def arrived(self) -> None:
        """The link is to look, if its process runs."""
        self.rank.soon(0, self.rank.advance)

    def receive(self, deadline: float) -> Any:
        """See `client.Transport`."""
        if self.inbox:
            return self.inbox.popleft()
        self.flush()
        return None

    def flush(self) -> None:
        """See `client.Transport`."""
        if self.broken:
            raise StoreUnavailable(self.broken)

    has_unsent = False

    def fileno(self) -> int:
        """Nobody polls."""
        return -1

    def memory(self) -> Any:
        """See `client.Transport`."""
        return self.node.memory

    def close(self) -> None:
        """The pool is unmapped, and the store hears of it, after all that was sent before."""
        self.node.clients.pop(self.number, None)
        delay = max(0, self._there - self.node.world.now) + 1
        self.node.world.later(delay, lambda: self.node.deliver(ClientExited(self.number), self.incarnation))


class SimLanes:
    """What CopyLanes does, a block at a time, each taking a while."""

    def __init__(self, rank: SimRank) -> None:
        self.rank = rank
        self.world = rank.world

    def submit(self, job: CopyDown | CopyUp) -> None:
        """See `CopyLanes`."""
        act = self._down if isinstance(job, CopyDown) else self._up
        self.rank.soon(self._while(), lambda: act(job) if job.claim() else None)

    def _while(self) -> int:
        world = self.world
        return world.rng.randrange(10, 2000) + (world.rng.randrange(300_000) if world.strikes("slow copy", 12) else 0)

    def _down(self, job: Any, place: int = 0) -> None:
        rank, memory = self.rank, job.memory
        job.checksums += [None] * (len(job.blocks) - len(job.checksums))
        if place == len(job.blocks) or job.stop:
            done = sum(found is not None for found in job.checksums)
            rank.emit(Copied(job.number, done * SLOT_BYTES, rank.clock() - job.since))
            rank.job_ended(job)
            return
        lent, block = job.places[place][0], job.blocks[place]
        self._may_write(memory, lent.page, lent.generation)
        memory.scramble(lent.page)

        def end() -> None:
            self._may_write(memory, lent.page, lent.generation)
            if not self.world.strikes("failed copy", 12):
                memory.contents[lent.page] = job.checksums[place] = rank.read_block(block, job.number)
            self._down(job, place + 1)

        rank.soon(self._while() // 4, end)

    def _may_write(self, memory: SimMemory, page: int, generation: int) -> None:
        node = self.rank.node
        if node.up and memory is node.memory:
            slot = node.core.residency.pool.find(page, generation)
            if slot is None or slot.state is not SlotState.LENT:
                self.world.violated("I5", f"rank {self.rank.number} writes into slot {page}, which is not lent to it")

    def _up(self, job: Any) -> None:
        rank, memory = self.rank, job.memory
        if job.good == len(job.blocks) or job.stop:
            self._end_up(job)
            return
        handle, block = job.handles[job.good], job.blocks[job.good]
        if memory.generation(handle.page) != handle.generation:
            self._end_up(job)
            return
        rank.scramble_block(block, job)
        first = memory.contents.get(handle.page, 0)

        def end() -> None:
            rank.write_block(block, job, first)
            if memory.generation(handle.page) != handle.generation:
                self.world.count("generation changed")
                self._end_up(job)
                return
            if memory.contents.get(handle.page) != handle.checksum or first != handle.checksum:
                self.world.count("corrupt block seen")
                job.bad = job.good
                self._end_up(job)
                return
            job.good += 1
            if not job.quiet and job.good < len(job.blocks) and self.world.rng.randrange(2):
                rank.emit(Loaded(job.number, job.good))
            self._up(job)

        rank.soon(self._while() // 4, end)

    def _end_up(self, job: Any) -> None:
        if not job.quiet:
            seconds = self.rank.clock() - job.since
            num_bytes = job.good * SLOT_BYTES
            self.rank.emit(ReadEnded(job.number, job.good, num_bytes, seconds, int(job.bad >= 0)))
        self.rank.job_ended(job)


class SimRank:
    """One process: what StoreLink does around a session, and the device blocks of this rank. part_index: of the parts
    of a block; publishes, local_parts: see `LinkIdentity`.
    """

    def __init__(
        self, group: Group, number: int, node: SimNode, part_index: int, publishes: bool, local_parts: tuple[Part, ...]
    ) -> None:
        self.group, self.world, self.number, self.node = group, group.world, number, node
        self.part_index, self.part = part_index, group.world.parts[part_index]
        self.publishes, self.local_parts = publishes, local_parts
        self.weights = group.weights
        self.own_writer = self.world.rng.getrandbits(64)
        self.blocks: dict[int, int] = {}
        self.alive = True
        self.paused_until = 0
        self.suspended: deque[Callable[[], object]] = deque()  # what it does when it wakes
        self.session: LinkSession | None = None
        self.fetched: dict[int, int] = {}
        self._lanes = SimLanes(self)
        self._heard_at = self._told_at = 0  # when the last message arrives
        self._timer = 0
        self.soon(self.world.rng.randrange(100, 20_000), self._attach)

    def soon(self, delay: int, act: Callable[[], object]) -> None:
        """Do something after a while, when this process runs."""
        self.world.later(delay, act, self)

    def clock(self) -> float:
        """Seconds."""
        return self.world.now / 1e6

    @property
    def credit(self) -> int:
        """Slots that it can write now."""
        return 0 if self.session is None else self.session.attachment.client.credit

    @property
    def granted(self) -> int:
        """Credit that its store gives it: what it asks for, or less when others have much."""
        if self.session is None:
            return 0
        number = cast(Any, self.session.attachment.client)._transport.number
        client = self.node.core.clients.serving(number)
        return 0 if client is None else client.attach.credit

    def wake(self) -> None:
        """It goes on, unless it was stopped again."""
        if self.paused_until > self.world.now:
            self.world.later(self.paused_until - self.world.now, self.wake)
            return
        while self.suspended and self.alive:
            self.suspended.popleft()()

    def kill(self) -> None:
        """The process is gone, which its store hears of soon."""
        self.alive = False
        if self.session is not None:
            for client in self.session.attachment.clients:
                client.close()

    # ---- the link's thread

    def _attach(self) -> None:
        if self.session is not None:
            return
        node, again = self.node, self.world.rng.randrange(2_000, 40_000)
        writer_id, parts = self.group.writer_id, self.local_parts
        if not self.publishes:
            writer_id, parts = self.own_writer, (self.part,)
        identity = Identity(
            self.group.weights_id, "fp32", writer_id, self.part, parts, SLOT_BYTES, self.world.setup.credit
        )
        if not node.up:
            self.soon(again, self._attach)
            return
        try:
            client = StoreClient(SimTransport(node, self), identity, TIMEOUT_S, waits=False)
        except (StoreRefused, StoreUnavailable):
            self.world.count("attach refused")
            self.soon(again, self._attach)
            return
        attachment = Attachment(
            [client], node.status(), self.part, cast(Any, self._lanes), self.emit, self.clock,
            in_group=True, publishes=self.publishes,
        )  # fmt: skip
        self.session = LinkSession(attachment)
        host_bytes = node.memory.num_pages * SLOT_BYTES
        self.emit(Attached(client.incarnation, (client.credit,), SLOT_BYTES, host_bytes))
        self.advance()

    def order(self, order: Order) -> None:
        """An order has arrived."""
        if self.session is None:
            refuse(order, self.emit)
            return
        if not self.session.attachment.over:
            self._check_credit(order)
        self.session.order(order, self.clock())
        self.advance()

    def _check_credit(self, order: Order) -> None:
        """I8: there is a slot for whatever the leader orders down."""
        wanted = len(order.entries) if isinstance(order, Save) and self.publishes else int(isinstance(order, Stash))
        if self.session is not None and wanted > self.session.attachment.client.credit:
            self.world.violated("I8", f"{order} needs {wanted} slots; rank {self.number} has fewer")

    def job_ended(self, job: Job) -> None:
        """A lane tells a job back."""
        if self.session is not None:
            self.session.job_ended(job)
            self.advance()

    def advance(self) -> None:
        """Something has arrived, or it is time for something."""
        session = self.session
        if session is None:
            return
        session.advance()
        if session.ended:
            self.session = None
            for client in session.attachment.clients:
                client.close()
            self.emit(Detached(session.attachment.over))
            self.soon(self.world.rng.randrange(2_000, 40_000), self._attach)
            return
        until = session.next_time()
        if until < float("inf"):
            self._timer += 1
            timer = self._timer
            delay = max(1, int((until - self.clock()) * 1e6) + 1)
            self.soon(delay, lambda: self.advance() if timer == self._timer else None)

    # ---- to and from the leader

    def tell(self, orders: Sequence[Order]) -> None:
        """The leader tells; it arrives after a while, in order."""
        plain = [order if self.number == 0 else order_from_wire(order_to_wire(order)) for order in orders]
        self._told_at = max(self._told_at, self.world.now + self.world.way(self.number))

        def arrive() -> None:
            for order in plain:
                self.order(order)

        self.soon(self._told_at - self.world.now, arrive)

    def emit(self, event: Event) -> None:
        """An event is on its way to the leader, in order."""
        if isinstance(event, Fetched):
            self.fetched[event.read] = event.count
        said = event if self.number == 0 else event_from_wire(event_to_wire(event))
        late = self.world.rng.randrange(200_000) if self.number and self.world.strikes("late rank", 20) else 0
        self._heard_at = max(self._heard_at, self.world.now + self.world.way(self.number) + late)
        self.world.later(self._heard_at - self.world.now, lambda: self.group.hear(self.number, said))
        if self.number and not isinstance(event, UNNUMBERED) and self.world.strikes("said twice", 6):
            again = self._heard_at + self.world.rng.randrange(1, 100_000)
            self.world.later(again - self.world.now, lambda: self.group.hear(self.number, said))

    # ---- device blocks

    def read_block(self, block: int, number: int) -> int:
        """What a copy down reads. I5: the engine has not been told that it is copied."""
        if not self.group.is_held(block, ("save", number), ("stash", number)):
            self.world.violated("I5", f"rank {self.number} copies block {block} down, which the engine has given back")
        return self.blocks[block] & MASK

    def scramble_block(self, block: int, job: CopyUp) -> None:
        """A copy into a block has begun."""
        self.write_block(block, job, -1)

    def write_block(self, block: int, job: CopyUp, value: int) -> None:
        """What a copy up writes. I8: the engine has not been told that it has ended."""
        if not self.group.is_held(block, ("unstash" if job.quiet else "read", job.number)):
            self.world.violated("I8", f"rank {self.number} writes block {block}, which the engine has given back")
        if block in self.group.accepted_early:
            self.world.violated("I8", f"rank {self.number} writes block {block}, which is said to be good already")
        self.blocks[block] = value
