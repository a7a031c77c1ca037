"""The node store core: who is attached, what is lent, what is reported, opened and forgotten. Pure: events in, out come
instructions; no clock, I/O, thread or randomness (STORE.md sections 3 to 6).

Owns the order of events and what follows from each. Who is attached is clients.py's, in-place pins are hard_pins.py's;
slots, groups and eviction are residency.py's, reads reads.py's, NVMe is tier_manager.py's.

Invariants (I1-I13 of STORE.md are checked by the simulator; these are what this file adds):
 1. A report for a slot that is not lent to that client at that generation changes nothing (I4).
 2. A version is written once: an entry for a (key, part, version) that is held changes nothing (I3). What a client
    that adopts reports is a copy of what was written elsewhere, under its writer's version.
 3. A lent slot comes back only by report, by release or by the client's exit (I8).
 4. Lent and hard-pinned slots together stay within `max_lent_share` of the pool.
 5. Generations that readers must see are in the output before any reply of the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tournant.kvstore.adoption import Adoption
from tournant.kvstore.clients import Client, ClientTable, Writer
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.disk_events import DiskEvent, DiskInstruction, Recovery
from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.events import (
    Adopt,
    Attach,
    Attached,
    Bad,
    ClientClosed,
    ClientExited,
    CloseRead,
    Disconnect,
    Drain,
    Drained,
    Fetch,
    Fill,
    Forget,
    GaveWay,
    HardPin,
    HardPinned,
    HardUnpin,
    Open,
    Refused,
    Report,
    Reported,
    ReportEntry,
    Send,
    SetGenerations,
    Tick,
    Used,
    Verified,
    Verify,
)
from tournant.kvstore.groups import Copy, Group
from tournant.kvstore.hard_pins import HardPins
from tournant.kvstore.policies import make_admission, make_eviction
from tournant.kvstore.policies.prefetch import ChainSuccessors
from tournant.kvstore.reads import ReadTable
from tournant.kvstore.residency import Residency
from tournant.kvstore.slots import SlotState
from tournant.kvstore.stats import StoreStats
from tournant.kvstore.tier_manager import TierManager
from tournant.kvstore.weights import WeightsTable

Event = (
    Attach | Report | Open | Fetch | Used | CloseRead | Bad | Forget | HardPin | HardUnpin | ClientClosed | ClientExited
    | Adopt | Tick | Verified | Drain | DiskEvent
)  # fmt: skip
Instruction = SetGenerations | Fill | Send | Disconnect | Verify | GaveWay | Drained | DiskInstruction

MAX_LOADING = 0.125  # share of the pool that loads may hold before nothing is prefetched
MAX_VERSIONS = 2  # per key, STORE.md section 4


class NodeStore:
    """One node's store. `incarnation`: random 64 bits, new at every start; tenant_check: what clients must present."""

    def __init__(self, config: StoreConfig, incarnation: int, tenant_check: bytes) -> None:
        self.config = config
        self.incarnation = incarnation
        self.weights = WeightsTable()
        policy = make_eviction(config.eviction)
        self.residency = Residency(config, policy)
        admission = make_admission(config.admission, policy)
        self.tiers = TierManager(config, self.residency, admission, self.weights)
        self.adoption = Adoption(self.residency, self.tiers, self.weights, self._make_room_for_version)
        self.reads = ReadTable(self.residency)
        self.clients = ClientTable(config, self.residency, self.weights, tenant_check)
        self.hard_pins = HardPins(self.residency)
        self._successors: ChainSuccessors[bytes] | None = (
            ChainSuccessors() if config.prefetch_blocks and config.nvme_bytes else None
        )
        self._draining = False
        self._clock_us = 0  # advances with `now_us`, never goes back
        self._last_now_us: int | None = None
        self._out: list[Instruction] = []
        self.stats = StoreStats()

    # ---- the step

    def step(self, now_us: int, event: Event) -> list[Instruction]:
        """Take one event; what the shell has to do now, in this order. now_us: any clock; jumps back do no harm."""
        if self._last_now_us is not None:
            self._clock_us += max(0, now_us - self._last_now_us)
        self._last_now_us = now_us
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)
        elif isinstance(event, DiskEvent):
            self.tiers.on_event(event, self._clock_us)
        self._settle()
        self.tiers.pump(self._clock_us, idle=isinstance(event, Tick))
        out: list[Instruction] = []
        pool = self.residency.pool
        if pool.bumped:
            out.append(SetGenerations(tuple(pool.bumped)))
            pool.bumped.clear()
        out += self._out
        out += self.tiers.ios.checks
        out += self.tiers.ios.out
        self._out.clear()
        self.tiers.ios.checks.clear()
        self.tiers.ios.out.clear()
        return out

    def recover(self, recovery: Recovery) -> None:
        """Adopt what an opened folder holds. Before the first step."""
        self.adoption.recover(recovery)
        self.stats.adopted = self.adoption.num_adopted
        self.stats.refused_records = recovery.refused
        self.stats.corrupt_records = recovery.corrupt

    def _send(self, client: int, reply: Attached | Refused | Reported | HardPinned) -> None:
        self._out.append(Send(client, reply))

    def _settle(self) -> None:
        """Loads that have ended: answer the fetches that waited for them."""
        settled = self.tiers.loader.settled
        if not settled:
            return
        groups = list(settled)
        settled.clear()
        for group in groups:
            for read in self.reads.loaded(group):
                self._out.append(Send(read.client, self.reads.answer(read)))

    # ---- attach, exit

    def _on_attach(self, event: Attach) -> None:
        problem = "the store is shutting down" if self._draining else self.clients.problem(event, self.hard_pins.pages)
        if problem is not None:
            self._send(event.client, Refused(problem))
            self._out.append(Disconnect(event.client, problem))
            return
        dropped = self.adoption.give_way(event.weights_id, event.kv_form)
        if dropped is not None:
            self.stats.refused_records += dropped.records
            self._out.append(dropped)
        client = self.clients.admit(event)
        self._send(event.client, Attached(self.incarnation, self._lend(client)))

    def _lend(self, client: Client) -> tuple[tuple[int, int], ...]:
        """Fill the client's credit as far as there are slots."""
        lent: list[tuple[int, int]] = []
        while client.open and len(client.lent) < client.attach.credit:
            slot = self.residency.take_slot(client.pages, SlotState.LENT, client.attach.client)
            if slot is None:
                self.stats.credit_short += 1
                self.residency.pool.empty_a_chunk_for(client.pages)
                break
            client.lent[slot.page] = slot
            lent.append((slot.page, slot.generation))
        return tuple(lent)

    def _on_closed(self, event: ClientClosed) -> None:
        client = self.clients.by_number.get(event.client)
        if client is not None and client.open:
            client.open = False
            self.reads.close_client(event.client)
            if client.attach.part is None and not client.hard:  # it can touch nothing any more
                self._forget_client(client)

    def _on_exited(self, event: ClientExited) -> None:
        self._on_closed(ClientClosed(event.client))
        client = self.clients.by_number.get(event.client)
        if client is not None:
            self._forget_client(client)

    def _forget_client(self, client: Client) -> None:
        del self.clients.by_number[client.attach.client]
        for slot in client.lent.values():
            self.residency.pool.free(slot)
        self.hard_pins.unpin_all(client)
        self.residency.use_count[client.weights] -= not client.attach.adopts
        if all(other.pages != client.pages for other in self.clients.by_number.values()):
            self.residency.pool.empty_no_chunk_for(client.pages)
        writer = self.clients.writers.get(client.attach.writer_id)
        if client.attach.part is None or client.attach.adopts or writer is None:
            return
        writer.clients -= 1
        for group in list(writer.incomplete.values()):  # its missing part may be the one that never comes
            if group.copy_of(client.part) is None or not writer.clients:
                self._drop_incomplete(writer, group)
        if not writer.clients:
            del self.clients.writers[client.attach.writer_id]

    def _drop_incomplete(self, writer: Writer, group: Group) -> None:
        del writer.incomplete[group.gid]
        self.stats.dropped_incomplete += 1
        self.residency.drop(group)

    # ---- reports

    def _on_report(self, event: Report) -> None:
        client = self.clients.serving(event.client)
        if client is None or client.attach.part is None:
            self._out.append(Disconnect(event.client, "a report needs an attached client that stores a part"))
            return
        if event.seq == client.seq and client.reply is not None:
            self._send(event.client, client.reply)
            return
        if event.seq != client.seq + 1 or len(event.entries) > self.config.max_entries:
            if event.seq > client.seq:
                self._disconnect(event.client, f"report {event.seq} of {len(event.entries)} entries after {client.seq}")
            return  # an older one was answered long ago
        client.seq = event.seq
        if client.attach.adopts:
            refused = [i for i, entry in enumerate(event.entries) if not self._take_adopted(client, entry)]
            self.stats.adopted += len(event.entries) - len(refused)
        else:
            refused = self._take_report(event, client)
            self.stats.reported += len(event.entries) - len(refused)
        for page, generation in event.released:
            self._release(client, page, generation)
        client.reply = Reported(event.seq, self._lend(client), tuple(refused))
        self.stats.refused_entries += len(refused)
        self._send(event.client, client.reply)

    def _disconnect(self, client: int, reason: str) -> None:
        self._out.append(Disconnect(client, reason))
        self._on_closed(ClientClosed(client))

    def _take_report(self, event: Report, client: Client) -> list[int]:
        """What a writer's rank has written; indexes of the entries that changed nothing."""
        writer = self.clients.writers[client.attach.writer_id]
        writer.reports = max(writer.reports, event.seq)
        refused = [i for i, entry in enumerate(event.entries) if not self._take_entry(client, writer, entry)]
        self._drop_old_incomplete(writer)
        return refused

    def _take_adopted(self, client: Client, entry: ReportEntry) -> bool:
        """A copy of what another node holds. Nothing changes when it is here already, or no engine wants it."""
        slot = client.slot_of(entry)
        if slot is None or not self.residency.use_count.get(client.weights):
            return False
        if not self.adoption.take_over(entry, client.part, client.weights, slot, self._clock_us):
            return False
        del client.lent[entry.page]
        return True

    def _take_entry(self, client: Client, writer: Writer, entry: ReportEntry) -> bool:
        slot, version = client.slot_of(entry), entry.version
        if slot is None or version.writer_id != client.attach.writer_id:
            return False
        index, residency = self.residency.index, self.residency
        group = index.find(entry.key, version.writer_id, version.counter)
        if group is not None and (group.gid not in writer.incomplete or group.copy_of(client.part) is not None):
            return False
        del client.lent[entry.page]
        if group is None:
            self._make_room_for_version(entry.key)
            group = index.create(entry.key, version, client.weights, writer.local_parts)
            group.born = writer.reports
            group.cost_us, group.kind, group.depth = entry.cost_us, entry.kind, entry.depth
            writer.incomplete[group.gid] = group
        copy = Copy(group, client.part, entry.length, entry.checksum)
        group.add(copy)
        residency.pool.move(slot, SlotState.VISIBLE, copy)
        residency.attach_slot(copy, slot)
        if group.complete:
            if writer.incomplete.pop(group.gid, None) is None:
                raise InvariantViolation(f"I6: group {group.gid} is completed by a writer that does not list it")
            residency.entered(group, self._clock_us)
            self.tiers.entered(group)
        return True

    def _make_room_for_version(self, key: bytes) -> None:
        """At most two versions per key: the incomplete one leaves first, then the older."""
        versions = list(self.residency.index.versions(key))
        if len(versions) >= MAX_VERSIONS:
            self._forget(next((g for g in versions if not g.complete), versions[-1]))

    def _drop_old_incomplete(self, writer: Writer) -> None:
        limit = writer.reports - self.config.incomplete_reports
        while writer.incomplete:
            group = next(iter(writer.incomplete.values()))
            if group.born > limit:
                break
            self._drop_incomplete(writer, group)

    def _release(self, client: Client, page: int, generation: int) -> None:
        slot = client.lent.get(page)
        if slot is not None and slot.generation == generation:
            del client.lent[page]
            self.residency.pool.free(slot)

    # ---- reads

    def _on_open(self, event: Open) -> None:
        if self.clients.serving(event.client) is None:
            self._out.append(Disconnect(event.client, "a read needs an attached client"))
            return
        if len(event.keys) > self.config.max_keys or self.reads.open_reads(event.client) >= self.config.max_reads:
            self._disconnect(event.client, f"read {event.read} of {len(event.keys)} keys exceeds the limits")
            return
        self.tiers.begin_request(event.keys, self._clock_us)
        reply = self.reads.open(event.client, event.read, event.keys, self._clock_us)
        self.stats.opened += 1
        self.stats.keys_asked += len(event.keys)
        self.stats.keys_found += len(reply.counts)
        read = self.reads.find(event.client, event.read)
        if read is not None and self.tiers.enabled:
            self.tiers.touched([shown[0] for shown in read.groups])
        if self._successors is not None:
            self._prefetch(self._successors, event.keys, len(reply.counts))
        self._out.append(Send(event.client, reply))

    def _prefetch(self, successors: ChainSuccessors[bytes], keys: tuple[bytes, ...], shown: int) -> None:
        """Load what followed this chain last time, while loads take at most MAX_LOADING of the pool."""
        successors.observe(keys)
        pool = self.residency.pool
        if shown < len(keys) or not keys or pool.pages[SlotState.LOADING] > MAX_LOADING * pool.num_pages:
            return  # behind a hole nothing is of use
        index = self.residency.index.by_key
        found = [index.get(key) for key in successors.predict(keys[-1], self.config.prefetch_blocks)]
        groups = [group for group in found if group is not None and group.on_nvme and not group.in_host]
        self.stats.prefetched += len(self.tiers.loader.load(groups, self._clock_us))

    def _on_fetch(self, event: Fetch) -> None:
        read = self.reads.find(event.client, event.read)
        if read is None:
            self._out.append(Send(event.client, self.reads.over(event.read)))
            return
        if read.waiting is not None:  # the same message again
            if read.answered is not None and not read.waiting:
                self._out.append(Send(event.client, read.answered))
            return
        self.reads.pick(read, event.picks)
        missing = [group for group in read.picks if not group.in_host]
        self.stats.nvme_hits += len(missing)
        self.stats.host_hits += len(read.picks) - len(missing)
        for group in self.tiers.loader.load(missing, self._clock_us):
            self.reads.wait(read, group)
        if read.waiting:
            read.deadline_us = self._clock_us + self.config.fetch_us
        else:
            self._out.append(Send(event.client, self.reads.answer(read)))

    def _on_used(self, event: Used) -> None:
        if event.client in self.clients.by_number and len(event.keys) <= self.config.max_keys:
            find = self.residency.index.by_key.get
            found = [group for group in map(find, event.keys) if group is not None]
            self.residency.touched(found, self._clock_us)
            self.tiers.touched(found)

    def _on_adopt(self, event: Adopt) -> None:
        self._out.append(Fill(self.adoption.adopt(event.entries, self._clock_us)))

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading keys have a complete version here now. A hint: pins nothing, touches nothing."""
        get = self.residency.index.by_key.get
        for count, key in enumerate(keys):
            group = get(key)
            if group is None or not (group.complete or (group.older is not None and group.older.complete)):
                return count
        return len(keys)

    def _on_close_read(self, event: CloseRead) -> None:
        if event.client in self.clients.by_number:
            self.reads.close(event.client, event.read)

    def _on_bad(self, event: Bad) -> None:
        """Check again what a reader found bad; only then is it dropped, so that nobody can drop what is good."""
        if event.client not in self.clients.by_number:
            return
        group = self.residency.index.find(event.key, event.version.writer_id, event.version.counter)
        for copy in group.copies if group is not None else ():
            slot = copy.slot
            if slot is not None and (slot.page, slot.generation) == (event.page, event.generation) and not copy.io:
                self.tiers.verify(copy, self._clock_us)

    def _on_forget(self, event: Forget) -> None:
        group = self.residency.index.find(event.key, event.version.writer_id, event.version.counter)
        if event.client in self.clients.by_number and group is not None:
            self._forget(group)

    def _forget(self, group: Group) -> None:
        writer = self.clients.writers.get(group.writer_id)
        if writer is not None and group.gid in writer.incomplete:
            self._drop_incomplete(writer, group)
        else:
            self.residency.drop(group)

    def clear(self) -> int:
        """Forget every block on every tier; returns how many. What follows is in the output of the next step."""
        groups = list(self.residency.index.by_gid.values())
        for group in groups:
            self._forget(group)
        self.tiers.clear(self._clock_us)
        return len(groups)

    def check(self, copy: Copy) -> None:
        """Have a host slot checked that somebody found bad. What follows from it is in the output of the next step."""
        self.tiers.verify(copy, self._clock_us)

    # ---- reading in place

    def _on_hard_pin(self, event: HardPin) -> None:
        client = self.clients.serving(event.client)
        if client is not None:
            self._send(event.client, self.hard_pins.pin(client, event, self.clients.credit_pages()))

    def _on_hard_unpin(self, event: HardUnpin) -> None:
        client = self.clients.by_number.get(event.client)
        if client is not None:
            self.hard_pins.unpin(client, event.request)

    # ---- time and ends

    def _on_tick(self, _: Tick) -> None:
        for read in self.reads.expired(self._clock_us):
            if read.waiting:
                self.stats.late_fetches += 1
                self._out.append(Send(read.client, self.reads.answer(read)))
                read.deadline_us = self._clock_us + self.config.pin_us
            else:
                self.stats.expired_reads += 1
                self.reads.close(read.client, read.counter)
        self.tiers.tick(self._clock_us)
        if self._draining and self.tiers.drained(self._clock_us):
            self._draining = False
            self._out.append(Drained())

    def _on_drain(self, _: Drain) -> None:
        self._draining = True
        self.tiers.drain()

    def _on_verified(self, event: Verified) -> None:
        self.tiers.verified(event.io, event.good)

    def validate(self) -> None:
        """Recount everything from scratch. Raises InvariantViolation."""
        self.residency.validate()
        self.tiers.validate()
        pins = self.reads.pin_counts()
        for client in self.clients.by_number.values():
            for groups in client.hard.values():
                for group in groups:
                    pins[group.gid] = pins.get(group.gid, 0) + 1
        for group in (*self.residency.index.by_gid.values(), *self.residency.dead_groups()):
            if group.pins != pins.get(group.gid, 0):
                raise InvariantViolation(
                    f"I7: group {group.gid} counts {group.pins} pins; {pins.get(group.gid, 0)} holders are listed"
                )
        count = 0
        for client in self.clients.by_number.values():
            for page, slot in client.lent.items():
                count += 1
                if slot.page != page or slot.state is not SlotState.LENT or slot.user != client.attach.client:
                    raise InvariantViolation(f"I8: slot {page} is listed as lent to {client.attach.client}; it is not")
        lent = len([slot for slot in self.residency.pool.all_slots() if slot.state is SlotState.LENT])
        if lent != count:
            raise InvariantViolation(f"I8: {lent} slots are LENT, clients list {count}")
        incomplete = {gid for writer in self.clients.writers.values() for gid in writer.incomplete}
        if incomplete != {g.gid for g in self.residency.index.by_gid.values() if not g.complete}:
            raise InvariantViolation("I6: the incomplete groups are not those that their writers list")


_HANDLERS: dict[type, Callable[..., None]] = {
    Attach: NodeStore._on_attach,
    Report: NodeStore._on_report,
    Open: NodeStore._on_open,
    Fetch: NodeStore._on_fetch,
    Used: NodeStore._on_used,
    Adopt: NodeStore._on_adopt,
    CloseRead: NodeStore._on_close_read,
    Bad: NodeStore._on_bad,
    Forget: NodeStore._on_forget,
    HardPin: NodeStore._on_hard_pin,
    HardUnpin: NodeStore._on_hard_unpin,
    ClientClosed: NodeStore._on_closed,
    ClientExited: NodeStore._on_exited,
    Tick: NodeStore._on_tick,
    Verified: NodeStore._on_verified,
    Drain: NodeStore._on_drain,
}
