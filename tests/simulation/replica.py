"""One replica as the simulator sees it: ranks that write and read, and their leader.

The protocol of clients (STORE.md section 4) as far as the store is concerned; tokens, batches and kernels are left out.
The functions that a mutant breaks are methods of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.memory import Memory, content
from tournant.kvstore.block import BlockRef, Version
from tournant.kvstore.events import (
    Attach,
    Attached,
    Bad,
    CloseRead,
    Fetch,
    Fetched,
    Forget,
    HardPin,
    HardPinned,
    HardUnpin,
    Open,
    Opened,
    Refused,
    Reply,
    Report,
    Reported,
    ReportEntry,
)
from tournant.kvstore.groups import Handle
from tournant.kvstore.read_group import Answer, choose, good_prefix
from tournant.kvstore.write_group import WriteGroup

if TYPE_CHECKING:
    from tests.simulation.world import World

CALL_US = 500_000  # a caller gives up
RESEND_US = 40_000
PIN_WAIT_US = 60_000
SLOT_BYTES = 4096
CREDIT = 2


class Rank:
    """One process. client: number of its connection, 0 while it has none; lent: free slots; busy: being filled."""

    def __init__(self, replica: Replica, number: int) -> None:
        self.replica = replica
        self.world = replica.world
        self.number = number
        self.alive = True
        self.paused_until = 0
        self.client = 0
        self.memory: Memory | None = None
        self.lent: list[tuple[int, int]] = []
        self.busy: set[tuple[int, int]] = set()
        self.done: list[ReportEntry] = []
        self.others: list[ReportEntry] = []  # forged entries for slots that are not its own
        self.seq = 0
        self.unanswered: Report | None = None
        self.hard: dict[int, list[tuple[BlockRef, int, Handle]]] = {}
        self.next_hard = 1
        self.pinned: dict[int, bool] = {}

    def attach(self) -> None:
        """Connect and attach, if the store is up; else later."""
        if not self.alive or self.client:
            return
        if not self.world.store_up:
            self.world.later(20_000, self.attach)
            return
        self.client = self.world.connect(self)
        self.lent, self.busy, self.done, self.seq, self.unanswered, self.hard = [], set(), [], 0, None, {}
        replica = self.replica
        part = replica.parts[self.number]
        self.world.to_store(
            self,
            Attach(
                self.client, replica.weights_id, "fp32", b"check", replica.writer.writer_id, part, replica.parts,
                SLOT_BYTES, CREDIT,
            ),
        )  # fmt: skip

    def lost_connection(self) -> None:
        """The store closed the connection or died: nothing of it counts any more; attach again."""
        self.client = 0
        self.memory = None
        self.replica.writer.credits[self.number] = 0
        if self.alive:
            self.world.later(self.world.rng.randrange(1000, 30_000), self.attach)

    def on_reply(self, reply: Reply) -> None:
        """A message of the store."""
        match reply:
            case Attached(_, lent):
                self.memory = self.world.memory
                self._got_credit(lent)
            case Reported(seq, lent, refused) if self.unanswered is not None and seq == self.unanswered.seq:
                entries, self.unanswered = self.unanswered.entries, None
                self._got_credit(lent)
                own = [
                    (entries[i].page, entries[i].generation)
                    for i in refused
                    if entries[i:] and entries[i] not in self.others
                ]
                self._got_credit(tuple(own))
                self.flush()
            case HardPinned():
                self._hard_pinned(reply)
            case Refused():
                self.world.count("attach refused")
            case Opened() | Fetched():
                self.replica.on_read_reply(reply)
            case _:
                pass

    def _got_credit(self, lent: tuple[tuple[int, int], ...]) -> None:
        self.lent += lent
        self.replica.writer.replied(self.number, len(lent))

    def write(self, ref: BlockRef, context: int) -> None:
        """Copy its part of a sealed block into a lent slot; report it by a later message."""
        memory, client = self.memory, self.client
        if not self.lent or memory is None:
            return
        page, generation = self.lent.pop(0)
        self.busy.add((page, generation))
        if not self.world.may_write(self, memory, page, generation):
            return
        memory.scramble(page)
        self.report_early(ref, page, generation, memory)
        self.world.later(
            self.world.rng.randrange(10, 5000),
            lambda: self._written(ref, context, page, generation, memory, client),
            rank=self,
        )

    def report_early(self, ref: BlockRef, page: int, generation: int, memory: Memory) -> None:
        """Nothing: a block is reported after its copy has ended. A mutant reports it here."""

    def _written(self, ref: BlockRef, context: int, page: int, generation: int, memory: Memory, client: int) -> None:
        if not self.world.may_write(self, memory, page, generation):
            return
        version = (ref.version.writer_id, ref.version.counter)
        value = memory.contents[page] = content(context, version, self.number)
        self.world.meant[value] = (context, ref.version, self.number)
        if client != self.client:
            return
        self.add_entry(ref, page, generation, memory)

    def add_entry(self, ref: BlockRef, page: int, generation: int, memory: Memory) -> None:
        """The part is whole in its slot."""
        if (page, generation) not in self.busy:
            return
        self.busy.discard((page, generation))
        self.done.append(
            ReportEntry(ref.key, ref.version, page, generation, SLOT_BYTES, memory.contents[page] & (1 << 64) - 1)
        )

    def flush(self) -> None:
        """One report at a time; the same one again until it is answered."""
        if self.unanswered is not None or not self.client or self.memory is None:
            return
        released: tuple[tuple[int, int], ...] = ()
        if len(self.lent) > 1 and self.world.rng.randrange(20) == 0:
            pair = self.lent.pop()
            self.replica.writer.credits[self.number] -= 1
            released = (pair,)
        if not self.done and not released and len(self.lent) + len(self.busy) >= CREDIT:
            return
        self.seq += 1
        forged = self._forged() if self.world.strikes("forged report", 6) else ()
        self.unanswered = Report(self.client, self.seq, (*self.done, *forged), released)
        self.done = []
        self._send_report(self.unanswered)

    def _forged(self) -> tuple[ReportEntry, ...]:
        """What a broken client might claim: slots of others, of other generations, or its own block a second time."""
        rng, others = (
            self.world.rng,
            [r for r in self.world.all_ranks() if r is not self and r.lent and r.memory is self.memory],
        )
        choice = rng.randrange(3)
        if choice == 0 and others:
            return (self._foreign(*rng.choice(others).lent[0]),)
        if choice == 1 and self.lent:
            page, generation = self.lent[0]
            return (self._foreign(page, generation - 1),)
        if self.done and len(self.lent) > 1:
            page, generation = self.lent.pop()
            self.replica.writer.credits[self.number] -= 1
            entry = self.done[-1]
            return (ReportEntry(entry.key, entry.version, page, generation, SLOT_BYTES, entry.checksum),)
        return ()

    def _foreign(self, page: int, generation: int) -> ReportEntry:
        version = Version(self.replica.writer.writer_id, 1 << 40)
        self.others.append(ReportEntry(b"f" * 32, version, page, generation, SLOT_BYTES, 1))
        return self.others[-1]

    def _send_report(self, report: Report) -> None:
        if self.unanswered is report and self.client == report.client:
            self.world.to_store(self, report)
            self.world.later(RESEND_US, lambda: self._send_report(report), rank=self)

    # ---- in-place reads

    def hard_pin(self, refs: list[tuple[BlockRef, int]]) -> None:
        """Ask for blocks to stay where they are."""
        if self.client and self.memory is not None:
            request = self.next_hard
            self.next_hard += 1
            self.hard[request] = [(ref, context, Handle(0, 0, 0, 0, 0, 0, 0)) for ref, context in refs]
            client = self.client
            self.world.to_store(self, HardPin(client, request, tuple((r.key, r.version) for r, _ in refs)))
            self.pinned[request] = False
            self.world.later(PIN_WAIT_US, lambda: self._unanswered_pin(request, client), rank=self)

    def _unanswered_pin(self, request: int, client: int) -> None:
        if not self.pinned[request] and self.hard.pop(request, None) is not None and client == self.client:
            self.world.to_store(self, HardUnpin(client, request))

    def _hard_pinned(self, reply: HardPinned) -> None:
        if self.pinned.get(reply.request, True):
            return
        wanted = self.hard.pop(reply.request, None)
        if wanted is None or not reply.pinned:
            return
        self.pinned[reply.request] = True
        self.world.count("hard pin")
        keys = Answer(reply.counts, reply.rows, reply.parts).handles()
        part = self.replica.parts[self.number]
        held = []
        for (ref, context, _), handles in zip(wanted, keys, strict=True):
            held += [(ref, context, h) for h in handles if reply.parts[h.part] == part]
        self.hard[reply.request] = held
        self.world.later(self.world.rng.randrange(100, 50_000), lambda: self._read_in_place(reply.request), rank=self)

    def _read_in_place(self, request: int) -> None:
        held = self.hard.pop(request, None)
        if held is None or self.memory is None or not self.client:
            return
        for ref, context, handle in held:
            found = self.memory.contents.get(handle.page)
            if self.memory.generation(handle.page) != handle.generation:
                self.world.violated("I8", f"slot {handle.page} was reused under a hard pin")
            if found == handle.checksum:
                self.world.accepted(self.replica, ref.key, ref.version, self.number, context, found)
        self.world.to_store(self, HardUnpin(self.client, request))


class Reading:
    """A request's read. contexts, keys: of its chain; good: blocks each rank has verified, -1 = not done."""

    def __init__(self, number: int, contexts: list[int], keys: list[bytes], ranks: int) -> None:
        self.number = number
        self.contexts = contexts
        self.keys = keys
        self.good = [-1] * ranks
        self.values: list[list[int]] = [[] for _ in range(ranks)]
        self.picks: list[Version] = []
        self.fetched = False
        self.over = False


class Replica:
    """Ranks and their leader, which is in the process of rank 0."""

    def __init__(self, world: World, number: int, parts: tuple, weights: int) -> None:
        self.world = world
        self.number = number
        self.parts = parts
        self.weights = weights
        self.reading: dict[int, Reading] = {}
        self.sealed: list[tuple[bytes, int]] = []
        self.form()

    @property
    def weights_id(self) -> bytes:
        """Digest of its weights."""
        return bytes([self.weights]) * 32

    def form(self) -> None:
        """A new group of ranks under a new writer id."""
        self.writer = WriteGroup(self.new_writer_id(), len(self.parts))
        self.next_read = 1
        self.ranks = [Rank(self, number) for number in range(len(self.parts))]
        for rank in self.ranks:
            rank.attach()

    def new_writer_id(self) -> int:
        """Random 64 bits, never seen before. A mutant uses the replica's number."""
        return self.world.rng.getrandbits(64)

    def fail(self) -> None:
        """One rank died or hangs: the parent kills all (works on stopped ones too) and forms the group again."""
        old = self.ranks
        for rank in old:
            rank.alive = False
            self.world.killed(rank)
        self.give_up_reads()
        self.sealed = []
        self.form()

    def update_weights(self, weights: int) -> None:
        """Other weights: another key space, another writer id."""
        self.weights = weights
        self.world.count("weights update")
        self.fail()

    def give_up_reads(self) -> None:
        """Requests of a failed group restart elsewhere; here they end."""
        for reading in list(self.reading.values()):
            self._end(reading, 0)

    # ---- writing

    def publish(self) -> None:
        """A later step: name sealed blocks and let every rank copy its part."""
        refs = self.writer.mint([key for key, _ in self.sealed])
        for ref, (_, context) in zip(refs, self.sealed, strict=False):
            for rank in self.ranks:
                rank.write(ref, context)
        self.sealed = self.sealed[len(refs) :]
        for rank in self.ranks:
            rank.flush()

    # ---- reading

    def request(self, contexts: list[int], keys: list[bytes]) -> None:
        """A request with this chain arrives."""
        asker = self.ranks[0]
        if not asker.client or asker.memory is None:
            return
        reading = Reading(self.next_read, contexts, keys, len(self.ranks))
        self.next_read += 1
        self.reading[reading.number] = reading
        self.world.num_requests += 1
        self._ask(reading, Open(asker.client, reading.number, tuple(keys)))
        self.world.later(CALL_US, lambda: self._late(reading))

    def _ask(self, reading: Reading, message: Open | Fetch) -> None:
        asker = self.ranks[0]
        if reading.over or reading.fetched != isinstance(message, Fetch) or asker.client != message.client:
            return
        if isinstance(message, Fetch) and reading.good[0] != -1:
            return
        self.world.to_store(asker, message)
        self.world.later(RESEND_US, lambda: self._ask(reading, message), rank=asker)

    def _late(self, reading: Reading) -> None:
        if not reading.over:
            self.world.count("read deadline")
            self._end(reading, 0)

    def cancel(self) -> None:
        """A client gives up: whatever the state of its read, it ends."""
        for reading in list(self.reading.values())[:1]:
            self.world.count("cancel")
            self._end(reading, 0)

    def on_read_reply(self, reply: Opened | Fetched) -> None:
        """The node store's answer, relayed to the leader."""
        reading = self.reading.get(reply.read)
        if reading is None or reading.over or isinstance(reply, Fetched) != reading.fetched or reading.good[0] != -1:
            return
        answer = Answer(reply.counts, reply.rows, reply.parts)
        if isinstance(reply, Opened):
            self.world.num_opens += 1
            picks = self.pick(answer)
            if not picks:
                self._end(reading, 0)
                return
            reading.picks = picks
            reading.fetched = True
            self._ask(reading, Fetch(self.ranks[0].client, reading.number, tuple(picks)))
            return
        keys = answer.handles()
        for rank in self.ranks:
            reading.good[rank.number] = -2
            self._copy(reading, rank, keys, answer)

    def pick(self, answer: Answer) -> list[Version]:
        """The leader's choice."""
        return [pick.version for pick in choose([answer], self.parts)]

    def _copy(self, reading: Reading, rank: Rank, keys: list[list[Handle]], answer: Answer) -> None:
        """Check, copy, wait for the copy, check the generation again: block after block of this rank's part."""
        memory, world = rank.memory, self.world
        part = self.parts[rank.number]
        handles = [next((h for h in key if answer.parts[h.part] == part), None) for key in keys]
        if memory is None or memory.incarnation != world.memory.incarnation:
            self._copied(reading, rank, 0, [])
            return
        wanted: list[Handle] = []
        for handle, version in zip(handles, reading.picks, strict=False):
            if handle is None or not handle.generation or not self.header_matches(handle, version):
                break
            if not self.checksum_matches(memory, handle):
                world.to_store(
                    rank, Bad(rank.client, reading.keys[len(wanted)], version, handle.page, handle.generation)
                )
                world.count("bad block seen")
                break
            wanted.append(handle)
        pages = [handle.page for handle in wanted]
        world.copying += pages
        world.later(world.rng.randrange(5, 3000), lambda: self._copying(reading, rank, memory, wanted), rank=rank)

    def _copying(self, reading: Reading, rank: Rank, memory: Memory, wanted: list[Handle]) -> None:
        first = [memory.contents.get(handle.page, 0) for handle in wanted]
        delay = self.world.rng.randrange(5, 3000)
        if self.world.strikes("slow copy", 8):
            delay += 300_000
        self.world.later(delay, lambda: self._check_copied(reading, rank, memory, wanted, first), rank=rank)

    def _check_copied(
        self, reading: Reading, rank: Rank, memory: Memory, wanted: list[Handle], first: list[int]
    ) -> None:
        values = []
        for handle in wanted:
            self.world.copying.remove(handle.page)
        for handle, value in zip(wanted, first, strict=True):
            now = memory.contents.get(handle.page, 0)
            if not self.generation_matches(memory, handle):
                self.world.count("generation changed")
                break
            values.append(value if value == now else -(1 << 70))  # torn: half of each
        self._copied(reading, rank, len(values), values)

    def header_matches(self, handle: Handle, version: Version) -> bool:
        """The handle is of the picked version."""
        return handle.version == version

    def checksum_matches(self, memory: Memory, handle: Handle) -> bool:
        """The slot holds what the writer reported."""
        return memory.contents.get(handle.page) == handle.checksum

    def generation_matches(self, memory: Memory, handle: Handle) -> bool:
        """The slot was not reused meanwhile."""
        return memory.generation(handle.page) == handle.generation

    def _copied(self, reading: Reading, rank: Rank, good: int, values: list[int]) -> None:
        if reading.over or not rank.alive:
            return
        reading.good[rank.number] = good
        reading.values[rank.number] = values
        if min(reading.good) >= 0:
            prefix = good_prefix(reading.good)
            for place in range(prefix):
                for each in self.ranks:
                    self.world.accepted(
                        self, reading.keys[place], self.version_of(reading, place), each.number,
                        reading.contexts[place], reading.values[each.number][place],
                    )  # fmt: skip
            self.world.num_verified += prefix > 0
            self._end(reading, prefix)

    def version_of(self, reading: Reading, place: int) -> Version:
        """The version that was picked for a block."""
        return reading.picks[place]

    def _end(self, reading: Reading, prefix: int) -> None:
        reading.over = True
        self.reading.pop(reading.number, None)
        self.world.num_ended += 1
        asker = self.ranks[0]
        if asker.client:
            self.world.to_store(asker, CloseRead(asker.client, reading.number))
        rng = self.world.rng
        again = 0 if rng.randrange(4) == 0 else prefix  # sometimes what was there is computed and published anyway
        for key, context in list(zip(reading.keys, reading.contexts, strict=True))[again:]:
            if len(self.sealed) < 12:
                self.sealed.append((key, context))
        if prefix and rng.randrange(6) == 0:
            refs = [(BlockRef(k, self.version_of(reading, i)), reading.contexts[i]) for i, k in
                    enumerate(reading.keys[:prefix])]  # fmt: skip
            self.world.rng.choice(self.ranks).hard_pin(refs[:2])
        if prefix and asker.client and self.world.strikes("forget", 12):
            self.world.to_store(asker, Forget(asker.client, reading.keys[0], reading.picks[0]))
