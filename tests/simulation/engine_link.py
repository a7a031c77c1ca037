"""The link to the node store in virtual time: orders of the engine are carried out late, piece by piece, on all ranks.

Keeps the guarantees of workers/transfer_messages.py and nothing more: answers come in any order and after any time,
and the store below loses, refuses and corrupts what it likes. The engine hears of a copy when every rank has ended it;
how many blocks are good is the least that any rank has. What the engine orders is checked here: numbers are new, credit
is there, reads are asked for what they found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tests.simulation.engine_device import SimDevice
from tests.simulation.engine_store import Copying, Payload, Reading, SimStore
from tournant.workers.transfer_messages import (
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
    Stash,
    Stashed,
    Unstash,
    Unstashed,
    Used,
)

if TYPE_CHECKING:
    from tests.simulation.engine_world import EngineWorld

SLOT_BYTES = 4096


class SimLink:
    """See the module."""

    def __init__(self, world: EngineWorld, store: SimStore, credit: int) -> None:
        self.world = world
        self.store = store
        self.credit = credit
        self.free = 0  # lent slots of which the engine has been told, and that no order has taken
        self.owed = 0  # slots that the store lends later
        self.attached = False
        self.engine_knows = False  # the engine has heard of this attachment, so its orders mean it
        self.reads: dict[int, Reading] = {}
        self.copies: dict[int, Copying] = {}
        self.reports: dict[int, Save] = {}  # copied, not answered yet
        self.stashes: dict[int, list[tuple[int, ...]]] = {}
        self.doomed: set[int] = set()  # stashes to be dropped as soon as they are copied
        self.events: list[Event] = []
        self.told_below: set[bytes] = set()  # what the engine was told lies below, since it last heard of a loss
        self._keys: dict[int, tuple[bytes, ...]] = {}  # of lookups, and of saves under their negative number
        self._numbers: set[tuple[bool, int]] = set()
        self._losing = ""
        self.closed = False
        if world.setup.has_tiers:
            world.later(world.rng.uniform(0, 0.02), self._attach)

    # ---- Link

    def submit(self, orders: Sequence[Order]) -> None:
        """See `Link`."""
        for order in orders:
            self.world.note(type(order).__name__, _number(order))
            self.world.count(type(order).__name__)
            match order:
                case Lookup():
                    self._look_up(order)
                case Fetch():
                    self._fetch(order)
                case Load():
                    self._load(order)
                case EndRead(read):
                    self._end_read(read)
                case Save():
                    self._save(order)
                case Stash():
                    self._stash(order)
                case Unstash():
                    self._unstash(order)
                case DropStash(stash):
                    self._drop_stash(stash)
                case Used():
                    self.world.count("used")

    def take_events(self) -> list[Event]:
        """See `Link`. From here on the engine knows, so blocks may be used again."""
        events, self.events = self.events, []
        for event in events:
            self.world.note(type(event).__name__, _number(event))
            if (number := _number(event)) and (hasattr(event, "read"), number) not in self._numbers:
                self.world.violated("I4", f"the engine hears {event}, which answers nothing that it has ordered")
            match event:
                case Attached():
                    self.engine_knows = self.attached
                case Detached():
                    self.told_below.clear()
                case Found(read, tiers):
                    self.told_below.update(self._keys.pop(read)[: len(tiers)])
                case Saved(save, ok):
                    self.told_below.update(self._keys.pop(-save) if ok else ())
                case Loaded() | ReadEnded() | Copied() | Unstashed():
                    self.world.heard(event)
        return events

    def close(self, flush_s: float) -> None:
        """See `Link`. The process ends: what it reads, copies and keeps is gone; what it has told the store is not."""
        del flush_s
        self.closed = True
        for reading in self.reads.values():
            for stored in reading.found or []:
                stored.pins = max(0, stored.pins - 1)
        self.store.lent.pop(id(self), None)

    # ---- the store comes and goes

    def _attach(self) -> None:
        if self._losing or self.attached:
            return
        self.attached, self.free, self.owed = True, self.credit, 0
        self.store.lent[id(self)] = self.credit
        host_bytes = self.store.room[1] * SLOT_BYTES
        self.events.append(Attached(self.store.incarnation, (self.credit,), SLOT_BYTES, host_bytes))
        self.world.count("attached")

    def lose_store(self) -> None:
        """The store is gone: what is open ends, then the engine hears of it, later it is there again."""
        if not self.attached:
            return
        self.world.count("store lost")
        self.attached = self.engine_knows = False
        self._losing = "injected"
        self.stashes.clear()
        self.doomed.clear()
        for reading in list(self.reads.values()):
            reading.ending = True
            if reading.load is None:
                self._cut(reading)
        for number in list(self.reports):
            del self.reports[number]
            self.events.append(Saved(number, False, (), 0))
        self.store.restart(keep=self.world.setup.persistent)
        self._lost_if_over()

    def _lost_if_over(self) -> None:
        """What was open when the store was lost has ended."""
        if self._losing and not self.reads and not self.copies:
            self.events.append(Detached(self._losing))
            self._losing = ""
            self.free = self.owed = 0
            self.world.later(self.world.rng.uniform(0.001, 0.3), self._attach)

    # ---- reads

    def _look_up(self, order: Lookup) -> None:
        self._new_number(order.read, read=True)
        if not order.keys:
            self.world.violated("I4", f"read {order.read} looks up nothing")
        reading = Reading(order.read, order.keys, self.world.now)
        self.reads[order.read] = reading
        self._keys[order.read] = order.keys
        if not self.engine_knows:
            self._cut(reading)
            return
        if self.world.strikes("lookup never answered", 6):
            return
        late = self.world.rng.uniform(0, 0.5) if self.world.strikes("late lookup", 4) else 0.0
        self._soon(reading, late, self._found)

    def _found(self, reading: Reading) -> None:
        reading.found = self.store.find(reading.keys)
        for stored in reading.found:
            stored.pins += 1
        tiers = bytes(stored.tier for stored in reading.found)
        self.events.append(Found(reading.number, tiers, self.world.now - reading.since))
        if not reading.found:
            self._over(reading, 0)

    def _fetch(self, order: Fetch) -> None:
        reading = self._open_read(order.read, order)
        if reading is None:
            return
        if reading.found is None or reading.wanted is not None or not 0 < order.count <= len(reading.found):
            self.world.violated("I4", f"{order} does not fit what was found")
            return
        reading.wanted, reading.since = order.count, self.world.now
        for stored in reading.found[order.count :]:
            stored.pins -= 1
        del reading.found[order.count :]
        late = self.world.rng.uniform(0, 0.6) if self.world.strikes("slow disk", 3) else 0.0
        nvme = sum(stored.tier == NVME for stored in reading.found)
        self._soon(reading, late + nvme * 0.001, self._fetched)

    def _fetched(self, reading: Reading) -> None:
        count = num_bytes = 0
        for stored in reading.found or []:
            was = stored.tier
            if self.world.strikes("lost block", 12):
                self.store.lose(stored)
            if not self.store.promote(stored):
                break
            count += 1
            num_bytes += SLOT_BYTES * (was == NVME)
        reading.fetched = count
        self.events.append(Fetched(reading.number, count, num_bytes, self.world.now - reading.since))

    def _load(self, order: Load) -> None:
        self.world.begin_load(f"read {order.read}", order.blocks)
        reading = self._open_read(order.read, order)
        if reading is None:
            return
        if reading.fetched is None or not order.blocks or order.skip + len(order.blocks) > reading.fetched:
            self.world.violated("I4", f"{order} asks for more than the {reading.fetched} blocks that were fetched")
        if reading.load is not None:
            self.world.violated("I4", f"read {order.read} is loaded twice")
        reading.load, reading.since = order, self.world.now
        reading.progress = [0] * len(self.world.devices)
        reading.busy = len(self.world.devices)
        for device in self.world.devices:
            self._next_piece(reading, device, device.last_end)

    def _next_piece(self, reading: Reading, device: SimDevice, after: float) -> None:
        """Copy the next one to three blocks into a rank's device, once the steps given so far have ended."""
        load = reading.load
        done = reading.progress[device.rank]
        if load is None or reading.ending or done == len(load.blocks):
            self._rank_loaded(reading)
            return
        size = min(self.world.rng.randrange(1, 4), len(load.blocks) - done)
        begin = max(self.world.now, after)
        slow = self.world.rng.uniform(0, 0.3) if self.world.strikes("slow copy", 6) else 0.0

        def end() -> None:
            for place in range(done, done + size):
                if not self._copy_in(reading, load, device, place):
                    self._tell_progress(reading)
                    self._rank_loaded(reading)
                    return
            self._tell_progress(reading)
            self._next_piece(reading, device, 0.0)

        for block in load.blocks[done : done + size]:
            self.world.at(begin, lambda block=block: device.scramble(block))
        self.world.at(begin + slow + self.world.rng.uniform(0.0001, 0.002) * size, end)

    def _copy_in(self, reading: Reading, load: Load, device: SimDevice, place: int) -> bool:
        """One block; False when it is lost or wrong, which ends the prefix."""
        stored = (reading.found or [])[load.skip + place]
        if stored.gone or self.world.strikes("lost block", 40):
            self.world.count("lost while loading")
            return False
        if stored.corrupt or self.world.strikes("corrupt block", 30):
            reading.corrupt += 1
            self.store.lose(stored)
            return False
        if self.world.were_others_between(stored.version.writer_id):
            self.world.count("loaded after going back")
        device.contents[load.blocks[place]] = list(stored.payload[device.rank])
        reading.progress[device.rank] = place + 1
        return True

    def _tell_progress(self, reading: Reading) -> None:
        least = self.good_count(reading)
        if least > reading.told and self.world.rng.randrange(2):
            reading.told = least
            self.events.append(Loaded(reading.number, least))

    def good_count(self, reading: Reading) -> int:
        """The good prefix of a load: the shortest of any rank."""
        return min(reading.progress)

    def _rank_loaded(self, reading: Reading) -> None:
        reading.busy -= 1
        if not reading.busy:
            self._over(reading, self.good_count(reading))

    def _end_read(self, number: int) -> None:
        reading = self.reads.get(number)
        if reading is None or reading.ending:
            return
        reading.ending = True
        if reading.load is None:
            self.world.later(self.world.rng.uniform(0, 0.002), lambda: self._cut(reading))

    def _cut(self, reading: Reading) -> None:
        """End a read that has not begun to load."""
        if reading.number in self.reads:
            if reading.found is None:
                self.events.append(Found(reading.number, b"", self.world.now - reading.since))
            self._over(reading, 0)

    def _over(self, reading: Reading, count: int) -> None:
        del self.reads[reading.number]
        for stored in reading.found or []:
            stored.pins = max(0, stored.pins - 1)
        seconds = self.world.now - reading.since if reading.load else 0.0
        self.events.append(ReadEnded(reading.number, count, count * SLOT_BYTES, seconds, reading.corrupt))
        self._lost_if_over()

    def _soon(self, reading: Reading, late: float, act: Callable[[Reading], None]) -> None:
        """Go on with a read after a while, unless it ended or is to end."""

        def go_on() -> None:
            if reading.number in self.reads and not reading.ending:
                act(reading)

        self.world.later(late + self.world.rng.uniform(0.0001, 0.003), go_on)

    def _open_read(self, number: int, order: Order) -> Reading | None:
        """The read of an order. None: it ended without the engine having heard of that."""
        if (True, number) not in self._numbers:
            self.world.violated("I4", f"{order} belongs to no read")
        reading = self.reads.get(number)
        return None if reading is None or reading.ending else reading

    # ---- saves and stashes

    def _save(self, order: Save) -> None:
        self._new_number(order.save, read=False)
        if not order.entries or order.kind:
            self.world.violated("I4", f"save {order.save} saves nothing, or blocks of a kind that there is not")
        self._keys[-order.save] = tuple(entry.key for entry in order.entries)
        for entry in order.entries:
            self.world.check_sealed(order.save, entry)
        self._begin_down(order, tuple(entry.block for entry in order.entries))

    def _stash(self, order: Stash) -> None:
        self._new_number(order.stash, read=False)
        self._begin_down(order, (order.block,))

    def _begin_down(self, order: Save | Stash, blocks: tuple[int, ...]) -> None:
        number = _number(order)
        self.world.begin_save(f"copy {number}", blocks)
        if self.engine_knows:
            self.free -= len(blocks)
            if self.free < 0:
                self.world.violated("I8", f"order {number} takes {len(blocks)} slots, {-self.free} more than are lent")
        else:
            self.events.append(Copied(number, 0, 0.0))
            self._answer_down(order, False, (), 0)
            return
        copying = Copying(order, blocks, self.world.now, len(self.world.devices), [[] for _ in self.world.devices])
        copying.fails = self.world.strikes("failed copy", 12)
        self.copies[number] = copying
        for device in self.world.devices:
            begin = max(self.world.now, device.booked_end)
            slow = self.world.rng.uniform(0, 0.3) if self.world.strikes("slow copy", 6) else 0.0
            end = begin + slow + self.world.rng.uniform(0.0001, 0.003)
            self.world.at(end, lambda device=device: self._copied_down(copying, device))

    def _copied_down(self, copying: Copying, device: SimDevice) -> None:
        copying.payloads[device.rank] = [tuple(device.contents[block]) for block in copying.blocks]
        copying.busy -= 1
        if copying.busy:
            return
        order, number = copying.order, _number(copying.order)
        del self.copies[number]
        num_bytes = len(copying.blocks) * SLOT_BYTES
        self.events.append(Copied(number, num_bytes, self.world.now - copying.since))
        if self._losing or copying.fails:
            lent = 0 if self._losing else len(copying.blocks)
            self.free += lent
            self._answer_down(order, False, (), lent)
        elif isinstance(order, Stash):
            self._keep_stash(order, [payloads[0] for payloads in copying.payloads])
        elif isinstance(order, Save):
            self.reports[number] = order
            late = self.world.rng.uniform(0, 0.1) if self.world.strikes("late report", 4) else 0.0
            payloads = copying.payloads
            late += self.world.rng.uniform(0.0001, 0.002)
            self.world.later(late, lambda: self._reported(order, payloads), by_store=True)
        self._lost_if_over()

    def _reported(self, order: Save, payloads: list[list[tuple[int, ...]]]) -> None:
        if self.reports.pop(order.save, None) is None:
            return
        refused = []
        for place, entry in enumerate(order.entries):
            payload: Payload = tuple(contents[place] for contents in payloads)
            if not self.store.put(entry.key, entry.version, payload):
                refused.append(place)
                self.world.count("refused")
        if self.closed:
            self.world.count("reported after its engine's end")
            return
        lent = len(order.entries)
        if self.world.strikes("no credit", 4):
            self._owe(lent)
            lent = 0
        self.free += lent
        self._answer_down(order, True, tuple(refused), lent)

    def _owe(self, count: int) -> None:
        """The store has no slots to lend now."""
        self.owed += count

        def pay() -> None:
            count = self.owed
            if self.attached and count:
                self.owed = 0
                self.free += count
                self.events.append(Lent(count))

        self.world.later(self.world.rng.uniform(0.001, 0.2), pay)

    def _answer_down(self, order: Save | Stash, ok: bool, refused: tuple[int, ...], lent: int) -> None:
        if isinstance(order, Save):
            self.events.append(Saved(order.save, ok, refused, lent))
        else:
            self.events.append(Stashed(order.stash, ok, lent))

    def _keep_stash(self, order: Stash, payload: list[tuple[int, ...]]) -> None:
        if order.stash not in self.doomed:
            self.events.append(Stashed(order.stash, True, 0))
            self.stashes[order.stash] = payload
            return
        self.doomed.discard(order.stash)
        if self.world.rng.randrange(2):
            self.free += 1
            self.events.append(Stashed(order.stash, False, 1))
        else:
            self.events.append(Stashed(order.stash, True, 0))
            self._owe(1)

    def _drop_stash(self, stash: int) -> None:
        if self.stashes.pop(stash, None) is not None:
            self._owe(1)
        elif stash in self.copies:
            self.doomed.add(stash)

    def _unstash(self, order: Unstash) -> None:
        self.world.begin_load(f"stash {order.stash}", (order.block,))
        if (False, order.stash) not in self._numbers:
            self.world.violated("I4", f"{order} belongs to no stash")
        payload = self.stashes.pop(order.stash, None)
        if not self.engine_knows or payload is None:
            self.events.append(Unstashed(order.stash, False, 0))
            return
        if order.stash in self.copies:
            self.world.violated("I4", f"{order} comes twice")
        copying = Copying(order, (order.block,), self.world.now, len(self.world.devices), [])
        copying.fails = self.world.strikes("stash lost", 2)
        self.copies[order.stash] = copying
        for device in self.world.devices:
            begin = max(self.world.now, device.last_end)
            self.world.at(begin, lambda device=device: device.scramble(order.block))
            end = begin + self.world.rng.uniform(0.0001, 0.004)
            self.world.at(end, lambda device=device: self._copied_up(copying, device, payload[device.rank]))

    def _copied_up(self, copying: Copying, device: SimDevice, payload: tuple[int, ...]) -> None:
        if not copying.fails:
            device.contents[copying.blocks[0]] = list(payload)
        copying.busy -= 1
        if copying.busy:
            return
        number = _number(copying.order)
        del self.copies[number]
        lent = 0 if self._losing else 1
        self.free += lent
        self.events.append(Unstashed(number, not copying.fails, lent))
        self._lost_if_over()

    def _new_number(self, number: int, *, read: bool) -> None:
        if (read, number) in self._numbers:
            self.world.violated("I4", f"number {number} is used twice")
        self._numbers.add((read, number))

    @property
    def num_lent(self) -> int:
        """Slots that are lent to the engine or will be, those in use included."""
        used = sum(len(c.blocks) for c in self.copies.values())
        return self.free + self.owed + len(self.stashes) + used + sum(len(s.entries) for s in self.reports.values())


def _number(item: Order | Event) -> int:
    """What an order or event belongs to; 0 for those without a number."""
    for name in ("read", "save", "stash", "number"):
        value = getattr(item, name, None)
        if value is not None:
            return int(value)
    return 0
