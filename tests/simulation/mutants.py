"""Named mutants of the store and of the protocol of its clients: each one breaks a promise that an invariant watches.

A mutant is a set of replaced methods; `killed_by` lists the invariants that may find it. Table: docs/simulation.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tests.simulation.adopter import Adopter
from tests.simulation.disk import Disk
from tests.simulation.replica import Rank, Replica
from tests.simulation.world import World, chain
from tournant.kvstore import node_store as node_store_module
from tournant.kvstore.adoption import Adoption
from tournant.kvstore.block import Version
from tournant.kvstore.disk_events import ReadDone, ReadResult
from tournant.kvstore.events import ClientClosed, ReportEntry, SetGenerations
from tournant.kvstore.groups import Copy, Group, GroupIndex
from tournant.kvstore.hard_pins import HardPins
from tournant.kvstore.loader import Loader
from tournant.kvstore.node_store import NodeStore
from tournant.kvstore.read_group import Answer
from tournant.kvstore.reads import ReadTable
from tournant.kvstore.residency import Residency
from tournant.kvstore.slots import Slot, SlotPool, SlotState

Patch = tuple[Any, str, Any]


@dataclass(frozen=True)
class Mutant:
    """name: what is wrong; faults: those that bring it out; patches: (object, attribute, replacement)."""

    name: str
    killed_by: tuple[str, ...]
    faults: tuple[str, ...]
    patches: tuple[Patch, ...]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The mutant in force."""
        with ExitStack() as stack:
            for target, attribute, replacement in self.patches:
                stack.enter_context(patch.object(target, attribute, replacement))
            yield


def _complete_at_first_part(group: Group, copy: Copy) -> None:
    group.copies.append(copy)
    group.rows = None
    group.complete = True


def _pick_any_version(replica: Replica, answer: Answer) -> list[Version]:
    return [key[0].version for key in answer.handles() if key]


def _ranks_choose(replica: Replica, reading: Any, rank: Rank, keys: Any, answer: Answer) -> None:
    """Each rank takes the version of another block's pick where it finds its part under any version."""
    shifted = keys[:1] * len(keys)
    _COPY(replica, reading, rank, shifted if rank.number else keys, answer)


_COPY = Replica._copy


def _take_without_generation(store: NodeStore, client: Any, writer: Any, entry: ReportEntry) -> bool:
    slot = client.lent.get(entry.page)
    if slot is not None:
        entry = ReportEntry(entry.key, entry.version, entry.page, slot.generation, entry.length, entry.checksum)
    return _TAKE(store, client, writer, entry)


_TAKE = NodeStore._take_entry


def _take_from_anyone(store: NodeStore, client: Any, writer: Any, entry: ReportEntry) -> bool:
    for other in store.clients.by_number.values():
        slot = other.lent.get(entry.page)
        if slot is not None and slot.generation == entry.generation and other is not client:
            client.lent[entry.page] = other.lent.pop(entry.page)
    return _TAKE(store, client, writer, entry)


def _reclaim_at_close(store: NodeStore, event: ClientClosed) -> None:
    client = store.clients.by_number.get(event.client)
    _CLOSED(store, event)
    if client is not None:
        for slot in client.lent.values():
            store.residency.pool.free(slot)
        client.lent = {}


_CLOSED = NodeStore._on_closed


def _keep_at_exit(store: NodeStore, event: Any) -> None:
    client = store.clients.by_number.get(event.client)
    if client is not None:
        client.lent = {}
    _EXITED(store, event)


_EXITED = NodeStore._on_exited


def _deliver_across_restart(world: World, event: Any, incarnation: int) -> None:
    del incarnation
    if world.store_up:
        world.step(event)


def _start_with_old_numbers(world: World) -> None:
    world._next_client = 1
    _START(world)


_START = World._start_store


def _report_early(rank: Rank, ref: Any, page: int, generation: int, memory: Any) -> None:
    rank.add_entry(ref, page, generation, memory)


def _evict_one_part(residency: Residency, group: Group) -> None:
    if len(group.copies) == 1 or not group.on_nvme:
        _EVICT(residency, group)
        return
    residency.num_evicted += 1
    residency.detach_slot(group.copies[0])


_EVICT = Residency.evict


def _open_pins_again(reads: ReadTable, client: int, counter: int, keys: Any, now_us: int) -> Any:
    read = reads.reads.pop((client, counter), None)
    if read is not None:
        reads._newest[client] = counter - 1
    return _OPEN(reads, client, counter, keys, now_us)


def _open_hides_the_last(reads: ReadTable, client: int, counter: int, keys: Any, now_us: int) -> Any:
    return _OPEN(reads, client, counter, keys[:-1] or keys, now_us)


_OPEN = ReadTable.open


def _write_in_place(rank: Rank, ref: Any, context: int) -> None:
    last = getattr(rank, "last_page", None)
    if last is not None and rank.lent and rank.memory is not None and last[2] is rank.memory:
        rank.world.may_write(rank, rank.memory, last[0], last[1])
    if rank.lent:
        rank.last_page = (*rank.lent[0], rank.memory)  # type: ignore[attr-defined]
    _WRITE(rank, ref, context)


_WRITE = Rank.write


def _may_leave_pinned(group: Group, pages: int) -> bool:
    slot = group.copies[0].slot
    return slot is not None and slot.pages == pages and not any(c.io or c.loading for c in group.copies)


def _evict_whatever(residency: Residency, group: Group) -> None:
    pins, group.pins = group.pins, 0
    if not any(copy.io or copy.loading for copy in group.copies):
        _EVICT(residency, group)
    group.pins = pins


def _may_leave_in_flight(group: Group, pages: int) -> bool:
    slot = group.copies[0].slot
    return slot is not None and slot.pages == pages and not group.pins and not any(c.loading for c in group.copies)


def _evict_in_flight(residency: Residency, group: Group) -> None:
    ios = [copy.io for copy in group.copies]
    for copy in group.copies:
        copy.io = 0
    _EVICT(residency, group)
    for copy, io in zip(group.copies, ios, strict=False):
        copy.io = io


def _constant_writer(replica: Replica) -> int:
    return replica.number + 1


def _chain_without(what: str) -> Callable[[World, int, int, int], tuple[list[bytes], list[int]]]:
    def chain_of(world: World, weights: int, tenant: int, document: int) -> tuple[list[bytes], list[int]]:
        _, contexts = chain(weights, tenant, document)
        keys, _ = chain(weights, 0, document) if what == "tenant" else chain(1, tenant, document)
        return keys, contexts

    return chain_of


def _take_twice(pool: SlotPool, pages: int, state: SlotState, user: object) -> Slot | None:
    slot = _POOL_TAKE(pool, pages, state, user)
    if slot is not None and slot.page == 0 and state is SlotState.LENT and not hasattr(pool, "lent_twice"):
        pool.lent_twice = True  # type: ignore[attr-defined]
        pool._free[pages].append(slot)
    return slot


_POOL_TAKE = SlotPool.take


def _free_keeps_generation(pool: SlotPool, slot: Slot) -> None:
    _FREE(pool, slot)
    slot.generation -= 1
    pool.bumped.pop()


_FREE = SlotPool.free


def _hide_generations(world: World, instruction: Any) -> None:
    if not isinstance(instruction, SetGenerations):
        _CARRY(world, instruction)


_CARRY = World._carry_out


def _close_keeps_pins(reads: ReadTable, client: int, counter: int) -> None:
    reads.reads.pop((client, counter), None)


def _drain_despite_pins(residency: Residency, group: Group) -> None:
    if not group.dead:
        return
    for copy in group.copies:
        if copy.slot is not None and copy.slot.state is SlotState.DRAINING and not copy.io:
            residency.detach_slot(copy)


def _free_late_loads(residency: Residency, copy: Copy) -> None:
    slot = copy.slot
    residency.detach_slot(copy)
    if slot is not None:
        copy.group.rows = None


def _load_done_for_freed(loader: Loader, event: ReadDone, now_us: int) -> None:
    done = loader._ios.flying[event.io]
    if all(copy.slot is slot for copy, slot in zip(done.copies, done.slots, strict=True)):
        _READ_DONE(loader, event, now_us)
    else:
        loader._ios.end(event.io)
        for place in done.places:
            loader._log.segments[place.segment].ios -= 1


_READ_DONE = Loader.read_done


def _any_read_is_good(loader: Loader, event: ReadDone, now_us: int) -> None:
    _READ_DONE(loader, ReadDone(event.io, tuple(ReadResult("ok") for _ in event.results)), now_us)


def _no_room_for_version(store: NodeStore, key: bytes) -> None:
    del store, key


def _forget_in_index_only(residency: Residency, group: Group) -> None:
    if group.dead:
        return
    residency.leaves_policy(group)
    residency.on_places_lost(group)
    residency.index.remove(group)


def _hard_pins_stay(pins: HardPins, client: Any) -> None:
    del pins
    client.hard.clear()


def _report_again(store: NodeStore, event: Any) -> None:
    client = store.clients.by_number.get(event.client)
    if client is not None and event.seq == client.seq:
        client.seq -= 1
    _REPORT(store, event)


_REPORT = NodeStore._on_report


def _no_expiry(reads: ReadTable, now_us: int) -> list[Any]:
    return [read for read in reads.reads.values() if read.waiting and read.deadline_us <= now_us]


def _true(*_: object) -> bool:
    return True


def _false(*_: object) -> bool:
    return False


def _find_by_key(index: GroupIndex, key: bytes, writer_id: int, counter: int) -> Group | None:
    del writer_id, counter
    return index.by_key.get(key)


def _handlers(event: type, handler: Any) -> Patch:
    return (node_store_module, "_HANDLERS", {**node_store_module._HANDLERS, event: handler})


def _pick_only_key(reads: ReadTable, read: Any, versions: tuple[Version, ...]) -> None:
    shown = [Version(groups[0].writer_id, groups[0].counter) for groups in read.groups]
    _PICK(reads, read, tuple(shown[: len(versions)]))


_PICK = ReadTable.pick


def _adopt_into_anything(adoption: Adoption, entry: ReportEntry, part: int, weights: int, slot: Slot, now: int) -> bool:
    group = adoption._residency.index.find(entry.key, entry.version.writer_id, entry.version.counter)
    if group is None or group.copy_of(part) is None:
        return _TAKE_OVER(adoption, entry, part, weights, slot, now)
    adoption._residency.pool.move(slot, SlotState.VISIBLE, group.copies[0])
    return True


_TAKE_OVER = Adoption.take_over


def _take_back_from_the_stopped(world: World) -> None:
    """Who has not moved for a while loses what is lent to it."""
    clients = world.core.clients.by_number
    for client in [clients[number] for number, rank in world._ranks.items() if number in clients and world.store_up]:
        if world._ranks[client.attach.client].paused_until > world.now:
            for slot in client.lent.values():
                world.core.residency.pool.free(slot)
            world._lent[client.attach.client] = {}
            client.lent = {}
    _TICK(world)


_TICK = World._tick

KILLS = ("rank killed", "eof lies", "store killed")

MUTANTS = (
    Mutant("an incomplete group is shown", ("I1", "I2", "I6"), (), ((Group, "add", _complete_at_first_part),)),
    Mutant("a reader takes the part of another block", ("I1", "I2", "I9"), (),
           ((Replica, "_copy", _ranks_choose), (Replica, "header_matches", _true))),
    Mutant("the store fetches another version than picked, and the rank does not compare it", ("I1", "I2"), (),
           ((ReadTable, "pick", _pick_only_key), (Replica, "header_matches", _true),
            (Replica, "pick", lambda r, a: [k[-1].version for k in a.handles() if k]))),
    Mutant("a report's generation is ignored", ("I4",), ("forged report",),
           ((NodeStore, "_take_entry", _take_without_generation),)),
    Mutant("a report for a slot of another client is taken", ("I4",), ("forged report",),
           ((NodeStore, "_take_entry", _take_from_anyone),)),
    Mutant("lent slots come back when the connection ends", ("I5", "I8"), KILLS,
           (_handlers(ClientClosed, _reclaim_at_close), (NodeStore, "_on_closed", _reclaim_at_close))),
    Mutant("lent slots do not come back at the exit", ("I8", "I11"), KILLS,
           (_handlers(node_store_module.ClientExited, _keep_at_exit),)),
    Mutant("messages are taken across a restart of the store", ("I2", "I3", "I4", "I5", "I8", "I11"),
           ("store killed", "late message", "duplicated message"),
           ((World, "_deliver", _deliver_across_restart), (World, "_start_store", _start_with_old_numbers))),
    Mutant("a block is reported by the step that still fills it", ("I5",), (),
           ((Rank, "report_early", _report_early),)),
    Mutant("one part is evicted alone", ("I6",), (), ((Residency, "evict", _evict_one_part),)),
    Mutant("open is not idempotent", ("I7",), ("duplicated message", "dropped message"),
           ((ReadTable, "open", _open_pins_again),)),
    Mutant("a slot is written in place", ("I5",), (), ((Rank, "write", _write_in_place),)),
    Mutant("eviction ignores pins", ("I2", "I7", "I8"), (),
           ((Residency, "_may_leave", staticmethod(_may_leave_pinned)), (Residency, "evict", _evict_whatever))),
    Mutant("eviction ignores a write in flight", ("I6", "I8"), ("slow disk",),
           ((Residency, "_may_leave", staticmethod(_may_leave_in_flight)), (Residency, "evict", _evict_in_flight))),
    Mutant("no check of the generation after the copy", ("I1", "I2", "I9"), ("slow copy",),
           ((Replica, "generation_matches", _true),)),
    Mutant("a writer id is used again", ("I1", "I2", "I3", "I9"), KILLS,
           ((Replica, "new_writer_id", _constant_writer),)),
    Mutant("a record's header is not compared", ("I10",), ("swapped records",), ((Disk, "header_matches", _true),)),
    Mutant("no checksum on reload", ("I10",), ("bit flip",), ((Disk, "checksum_matters", _false),)),
    Mutant("no checksum in the host slot", ("I2",), ("host bit flip",), ((Replica, "checksum_matches", _true),)),
    Mutant("a failed read counts as loaded", ("I10",), ("read error",),
           ((Loader, "read_done", _any_read_is_good),)),
    Mutant("the tenant is left out of the key", ("I9",), (), ((World, "chain_of", _chain_without("tenant")),)),
    Mutant("the weights are left out of the key", ("I9",), ("weights update",),
           ((World, "chain_of", _chain_without("weights")),)),
    Mutant("a slot is lent twice", ("I4", "I6", "I8"), (), ((SlotPool, "take", _take_twice),)),
    Mutant("a freed slot keeps its generation", ("I4", "I2"), (), ((SlotPool, "free", _free_keeps_generation),)),
    Mutant("generations are not published", ("I2", "I15"), (), ((World, "_carry_out", _hide_generations),)),
    Mutant("closing a read keeps its pins", ("I7",), (), ((ReadTable, "close", _close_keeps_pins),)),
    Mutant("a draining slot is freed under a pin", ("I2", "I7", "I8"), ("forget",),
           ((Residency, "drain", _drain_despite_pins),)),
    Mutant("the slot of a late load is freed at once", ("I5",), ("hung disk",),
           ((Residency, "quarantine", _free_late_loads), (Loader, "read_done", _load_done_for_freed))),
    Mutant("any number of versions of a key", ("I6",), (),
           ((NodeStore, "_make_room_for_version", _no_room_for_version),)),
    Mutant("a dropped block keeps its slots", ("I6", "I8"), (), ((Residency, "drop", _forget_in_index_only),)),
    Mutant("hard pins outlive their client", ("I7",), KILLS, ((HardPins, "unpin_all", _hard_pins_stay),)),
    Mutant("a report that is sent again is taken again", ("I4", "I5", "I8", "I11"),
           ("dropped message", "duplicated message"),
           (_handlers(node_store_module.Report, _report_again),)),
    Mutant("pins have no time limit", ("I11",), ("dropped message",), ((ReadTable, "expired", _no_expiry),)),
    Mutant("a complete block is not shown", ("I13",), (), ((ReadTable, "open", _open_hides_the_last),)),
    Mutant("a version is looked up by its key alone", ("I1", "I3", "I6"), (), ((GroupIndex, "find", _find_by_key),)),
    Mutant("what came from another node is not compared with its checksum", ("I2",), ("corrupt transfer",),
           ((Adopter, "checked", lambda adopter, told, came: came),)),
    Mutant("what was adopted gets a version of its own", ("I3",), (),
           ((Adopter, "version_of", lambda adopter, version: Version(7, version.counter)),)),
    Mutant("a part that is here is adopted again", ("I6",), (), ((Adoption, "take_over", _adopt_into_anything),)),
    Mutant("what is lent to a stopped writer is taken back", ("I5", "I8", "I11"), ("stalled rank", "slow copy"),
           ((World, "_tick", _take_back_from_the_stopped),)),
)  # fmt: skip
