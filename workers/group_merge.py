"""The store links of a group of ranks as one: orders to all ranks, and what all have answered as one answer.

Owns what is open with which rank, the choice of the versions that all ranks read, and the credit of each rank. Moves
nothing (group_link.py does) and copies nothing (each rank's own link). Pure: orders and events in; orders for ranks and
events for the engine out, in order. What a rank is told reaches it in order, and so does what it says.

Invariants (checked by `validate`):
 1. The guarantees of transfer_messages.py: an answer is given when every rank has given its own, and says no more than
    the least of them: blocks found, fetched, loaded, slots lent.
 2. All ranks read a block in one version, that every one of them has shown (I1). What some lack and other nodes have
    is brought first, by each for its part; then they show again what they have, and that alone counts.
 3. The engine counts on no more slots than any rank has.
 4. When a rank loses its store, all leave theirs, that one too if it has another by then, and are told nothing else
    before the engine was told and all are attached: no order outlives the attachment that it was meant for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from tournant.kvstore.block import Version
from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.read_group import good_prefix
from tournant.workers.link_session import refuse
from tournant.workers.transfer_messages import (
    HOST,
    REMOTE,
    Attached,
    Bring,
    Brought,
    Copied,
    Detached,
    DropStash,
    EndRead,
    Event,
    Fetch,
    Fetched,
    Found,
    Leave,
    Lent,
    Load,
    Loaded,
    Lookup,
    Order,
    ReadEnded,
    Refused,
    Save,
    Saved,
    Shown,
    Stash,
    Stashed,
    Unstash,
    Unstashed,
    Used,
)

Told = tuple[tuple[int, ...], Order]  # an order and the ranks that it is for


@dataclass(slots=True)
class _Read:
    """A lookup until every rank has ended it. found, fetched, ended: by rank; progress: good blocks of the load, by
    rank; picks: None until every rank has answered; num_local, num_found: blocks that were found in a version that all
    have here, and with those behind them that some have to bring; wanted: blocks that the engine fetches; bringing,
    brought: ranks that have still to say what they have then, and what the others have said; shown: the last that each
    rank has shown; load: waits for them; told: what the engine knows of the progress.
    """

    progress: list[int]
    num_local: int = 0
    num_found: int = 0
    wanted: int = 0
    bringing: set[int] = field(default_factory=set)
    brought: dict[int, Brought] = field(default_factory=dict)
    shown: list[tuple[tuple[Shown, ...], ...]] = field(default_factory=list)
    load: Load | None = None
    found: dict[int, Found] = field(default_factory=dict)
    fetched: dict[int, Fetched] = field(default_factory=dict)
    ended: dict[int, ReadEnded] = field(default_factory=dict)
    picks: tuple[Version, ...] | None = None
    fetching: bool = False
    loading: bool = False
    ending: bool = False
    told: int = 0


@dataclass(slots=True)
class _Down:
    """A save or stash until every rank has answered it. num_slots: that each rank uses for it."""

    order: Save | Stash
    kind: int
    num_slots: int
    copied: dict[int, Copied] = field(default_factory=dict)
    answered: dict[int, Saved | Stashed] = field(default_factory=dict)


class GroupMerge:
    """See the module. stores: by rank, a name of the node store that it uses; equal ones are the same."""

    def __init__(self, stores: Sequence[str]) -> None:
        if not stores:
            raise ValueError("a group of ranks needs at least one")
        self._stores = tuple(stores)
        self._all = tuple(range(len(stores)))
        self._first_of_stores = tuple(stores.index(store) for store in dict.fromkeys(stores))
        self._orders: list[Told] = []
        self._events: list[Event] = []
        self._serving = False
        self._reason = ""  # why the group is over, until the engine is told
        self._attached: dict[int, Attached] = {}
        self._credit: list[list[int]] = [[] for _ in stores]
        self._told: list[int] = []  # credit that the engine counts on, by kind
        self._reads: dict[int, _Read] = {}
        self._down: dict[int, _Down] = {}
        self._up: dict[int, dict[int, Unstashed]] = {}

    def take_orders(self) -> list[Told]:
        """What ranks are to be told, in order, since the last call."""
        orders, self._orders = self._orders, []
        return orders

    def take_events(self) -> list[Event]:
        """What the engine is to be told, in order, since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def has_events(self) -> bool:
        """Whether `take_events` has something."""
        return bool(self._events)

    @property
    def is_saving(self) -> bool:
        """Whether something is on its way down."""
        return bool(self._down)

    def end(self, reason: str) -> None:
        """No rank is heard any more: everything open ends without one."""
        for number, read in self._reads.items():
            if read.picks is None:
                self._emit(Found(number, b"", 0.0))
            self._emit(ReadEnded(number, 0))
        for number, down in self._down.items():
            if len(down.copied) < len(self._all):
                self._emit(Copied(number, 0, 0.0))
            self._emit(Saved(number, False, (), 0) if isinstance(down.order, Save) else Stashed(number, False))
        for number in self._up:
            self._emit(Unstashed(number, False))
        if self._serving or self._reason:
            self._emit(Detached(self._reason or reason))
        self._reads, self._down, self._up = {}, {}, {}
        self._serving, self._reason, self._attached = False, "", {}

    # ---- orders of the engine

    def order(self, order: Order) -> None:
        """Take an order: it is for ranks, or answered at once when there is no group."""
        if not self._serving:
            refuse(order, self._emit)
            return
        match order:
            case Lookup():
                self._reads[order.read] = _Read([0] * len(self._all))
                self._tell(order)
            case Fetch():
                self._fetch(order)
            case Load():
                read = self._reads.get(order.read)
                if read is not None and not read.loading:
                    read.loading = True
                    read.load = order
                    if not read.bringing:
                        self._tell(order)
            case EndRead():
                read = self._reads.get(order.read)
                if read is not None and not read.ending:
                    read.ending = True
                    self._tell(order)
            case Save():
                self._begin_down(order.save, _Down(order, order.kind, len(order.entries)))
            case Stash():
                self._begin_down(order.stash, _Down(order, 0, 1))
            case Unstash():
                self._up[order.stash] = {}
                self._tell(order)
            case DropStash():
                self._tell(order)
            case Used():
                self._tell(order, self._first_of_stores)
            case Bring() | Leave():
                raise InvariantViolation(f"{type(order).__name__} is an order of a group's leader, not of an engine")

    def _fetch(self, order: Fetch) -> None:
        read = self._reads.get(order.read)
        if read is None or read.picks is None or read.fetching or read.ending:
            return
        read.fetching = True
        read.wanted = min(order.count, read.num_found)
        lacking = tuple(rank for rank in self._all if len(read.shown[rank]) < read.wanted)
        if lacking:
            read.bringing = set(lacking)
            self._tell(Bring(order.read, read.wanted), lacking)
        else:
            picks = read.picks[: read.wanted]
            self._tell(Fetch(order.read, len(picks), picks))

    def _begin_down(self, number: int, down: _Down) -> None:
        for credit in (self._told, *self._credit):
            credit[down.kind] -= down.num_slots
        self._down[number] = down
        self._tell(down.order)

    # ---- events of ranks

    def event(self, rank: int, event: Event) -> None:
        """Take in what a rank's link says. What belongs to nothing that is open with this rank is ignored."""
        match event:
            case Attached():
                self._attached[rank] = event
                self._credit[rank] = list(event.credit)
            case Detached():
                self._on_detached(rank, event)
            case Refused(reason, lasting):
                self._emit(Refused(f"rank {rank}: {reason}", lasting))
            case Found():
                self._on_found(rank, event)
            case Brought():
                self._on_brought(rank, event)
            case Fetched():
                self._on_fetched(rank, event)
            case Loaded():
                read = self._reads.get(event.read)
                if read is not None and rank not in read.ended:
                    read.progress[rank] = max(read.progress[rank], event.count)
                    self._tell_progress(event.read, read)
            case ReadEnded():
                self._on_ended(rank, event)
            case Copied():
                self._on_copied(rank, event)
            case Saved() | Stashed():
                self._on_answered(rank, event)
            case Unstashed():
                self._on_unstashed(rank, event)
            case Lent():
                self._lend(rank, event.kind, event.num_lent)
                growth = self._growth(event.kind)
                if growth:
                    self._emit(Lent(growth, event.kind))
        self._settle()

    def _on_detached(self, rank: int, event: Detached) -> None:
        """One store is lost: what all ranks began together they end together."""
        if self._attached.pop(rank, None) is None or not self._serving:
            return
        self._serving, self._reason = False, f"rank {rank}: {event.reason}"
        self._attached.clear()
        self._tell(Leave())

    def _settle(self) -> None:
        """Tell the engine that the group is over, once nothing is open; and that it is one again."""
        if self._reason and not (self._reads or self._down or self._up):
            self._emit(Detached(self._reason))
            self._reason = ""
        if self._serving or self._reason or len(self._attached) < len(self._all):
            return
        said = [self._attached[rank] for rank in self._all]
        if len({len(one.credit) for one in said}) > 1:
            raise InvariantViolation(f"ranks have slots of unlike kinds: {[one.credit for one in said]}")
        self._serving = True
        self._told = self._least_credit()
        slot_bytes = sum(one.slot_bytes for one in said)
        num_blocks = min(self._blocks_of(store) for store in self._stores)
        digest = hashlib.sha256(repr([one.incarnation for one in said]).encode()).digest()
        incarnation = int.from_bytes(digest[:8], "little")
        self._emit(Attached(incarnation, tuple(self._told), slot_bytes, num_blocks * slot_bytes))

    def _blocks_of(self, store: str) -> int:
        """How many blocks, as far as they concern its ranks, a store has room for in its pool."""
        said = [one for rank, one in self._attached.items() if self._stores[rank] == store]
        return min(one.host_bytes for one in said) // sum(one.slot_bytes for one in said)

    # ---- reads

    def _on_found(self, rank: int, event: Found) -> None:
        read = self._reads.get(event.read)
        if read is None or rank in read.found:
            return
        read.found[rank] = event
        if len(read.found) < len(self._all):
            return
        said = [read.found[rank] for rank in self._all]
        read.shown = [one.versions for one in said]
        picks, tiers = choose(read.shown)
        tiers += bytes([REMOTE]) * (reach(said, len(picks)) - len(picks))
        if read.ending:
            picks, tiers = (), b""
        read.picks, read.num_local, read.num_found = picks, len(picks), len(tiers)
        self._emit(Found(event.read, tiers, max(one.seconds for one in said)))
        if not tiers and not read.ending and self._serving:
            read.ending = True
            self._tell(EndRead(event.read))

    def _on_brought(self, rank: int, event: Brought) -> None:
        """A rank has got what it could. When all have, what they have now is fetched."""
        read = self._reads.get(event.read)
        if read is None or rank not in read.bringing:
            return
        read.bringing.remove(rank)
        read.brought[rank] = event
        if read.bringing:
            return
        for other, said in read.brought.items():
            read.shown[other] = said.versions
        read.picks = choose(read.shown)[0][: read.wanted]
        if self._serving and not read.ending:
            self._tell(Fetch(event.read, len(read.picks), read.picks))
            if read.load is not None:
                self._tell(read.load)

    def _on_fetched(self, rank: int, event: Fetched) -> None:
        read = self._reads.get(event.read)
        if read is None or not read.fetching or rank in read.fetched:
            return
        read.fetched[rank] = event
        if len(read.fetched) == len(self._all):
            said = read.fetched.values()
            count = good_prefix(one.count for one in said)
            remote_s = max(one.remote_seconds for one in said)
            self._emit(
                Fetched(
                    event.read,
                    count,
                    sum(one.num_bytes for one in said),
                    remote_s + max(one.seconds - one.remote_seconds for one in said),
                    min(max(one.remote_blocks for one in said), max(0, count - read.num_local)),
                    sum(one.remote_bytes for one in said),
                    remote_s,
                    any(one.remote_failed for one in said),
                )
            )

    def _on_ended(self, rank: int, event: ReadEnded) -> None:
        read = self._reads.get(event.read)
        if read is None or rank in read.ended:
            return
        read.ended[rank] = event
        read.progress[rank] = event.count
        if len(read.ended) < len(self._all):
            self._tell_progress(event.read, read)
            return
        del self._reads[event.read]
        said = read.ended.values()
        self._emit(
            ReadEnded(
                event.read,
                good_prefix(read.progress),
                sum(one.num_bytes for one in said),
                max(one.seconds for one in said),
                sum(one.corrupt for one in said),
            )
        )

    def _tell_progress(self, number: int, read: _Read) -> None:
        good = good_prefix(read.progress)
        if good > read.told:
            read.told = good
            self._emit(Loaded(number, good))

    # ---- saves and stashes

    def _on_copied(self, rank: int, event: Copied) -> None:
        down = self._down.get(event.number)
        if down is None or rank in down.copied:
            return
        down.copied[rank] = event
        if len(down.copied) == len(self._all):
            said = down.copied.values()
            num_bytes, seconds = sum(one.num_bytes for one in said), max(one.seconds for one in said)
            self._emit(Copied(event.number, num_bytes, seconds))

    def _on_answered(self, rank: int, event: Saved | Stashed) -> None:
        number = event.save if isinstance(event, Saved) else event.stash
        down = self._down.get(number)
        if down is None or rank in down.answered or isinstance(down.order, Save) != isinstance(event, Saved):
            return
        down.answered[rank] = event
        self._lend(rank, down.kind, event.num_lent)
        if len(down.answered) < len(self._all):
            return
        del self._down[number]
        said = down.answered
        growth, ok = self._growth(down.kind), all(one.ok for one in said.values())
        if isinstance(down.order, Save):
            refused = {index for one in said.values() if isinstance(one, Saved) for index in one.refused}
            self._emit(Saved(number, ok, tuple(sorted(refused)), growth))
            return
        kept = tuple(rank for rank, one in said.items() if one.ok)
        if kept and not ok and self._serving:
            self._tell(DropStash(number), kept)
        self._emit(Stashed(number, ok, growth))

    def _on_unstashed(self, rank: int, event: Unstashed) -> None:
        said = self._up.get(event.stash)
        if said is None or rank in said:
            return
        said[rank] = event
        self._lend(rank, 0, event.num_lent)
        if len(said) == len(self._all):
            del self._up[event.stash]
            self._emit(Unstashed(event.stash, all(one.ok for one in said.values()), self._growth(0)))

    # ---- credit

    def _lend(self, rank: int, kind: int, num_lent: int) -> None:
        if rank in self._attached:
            self._credit[rank][kind] += num_lent

    def _least_credit(self) -> list[int]:
        return [min(counts) for counts in zip(*self._credit, strict=True)]

    def _growth(self, kind: int) -> int:
        """Slots that every rank has and the engine has not been told of; it is told now."""
        if not self._serving:
            return 0
        growth = self._least_credit()[kind] - self._told[kind]
        self._told[kind] += growth
        return growth

    # ---- out

    def _emit(self, event: Event) -> None:
        self._events.append(event)

    def _tell(self, order: Order, ranks: tuple[int, ...] | None = None) -> None:
        self._orders.append((self._all if ranks is None else ranks, order))

    # ---- checks

    def validate(self) -> None:
        """Recount. Raises InvariantViolation."""
        everyone = len(self._all)
        for number, read in self._reads.items():
            if len(read.ended) == everyone:
                raise InvariantViolation(f"I1: every rank has ended read {number}; it is still open")
            if read.bringing and not (read.fetching and read.bringing.isdisjoint(read.brought)):
                raise InvariantViolation(f"I4: read {number} waits for blocks of other nodes that nobody brings")
            if read.told > min(read.progress):
                raise InvariantViolation(f"I1: the engine counts on {read.told} blocks of read {number}")
            for place, version in enumerate(read.picks or ()):
                name = (version.writer_id, version.counter)
                for rank, shown in enumerate(read.shown):
                    if name not in (one[:2] for key in shown[place : place + 1] for one in key):
                        raise InvariantViolation(f"I1: {version} is picked, which rank {rank} does not have")
        for number, down in self._down.items():
            if len(down.answered) == everyone or not down.copied.keys() >= down.answered.keys():
                raise InvariantViolation(f"I4: save or stash {number} is open, but was answered, or before its copy")
        if self._serving and (self._reason or len(self._attached) < everyone):
            raise InvariantViolation("I4: the group serves although a rank does not")
        if self._reason and not (self._reads or self._down or self._up):
            raise InvariantViolation("I11: the group is over and nothing is open, but the engine was not told")
        if self._serving and (min(self._told) < 0 or any(map(int.__gt__, self._told, self._least_credit()))):
            raise InvariantViolation(f"I8: the engine counts on {self._told} slots; ranks have {self._credit}")


def choose(shown: Sequence[Sequence[Sequence[Shown]]]) -> tuple[tuple[Version, ...], bytes]:
    """Per key, in order, a version that every rank has, and the worst tier that one has it in; ends at the first key
    without. Among several, one with more ranks that have it in host slots wins, then the one that rank 0 showed first.
    """
    picks: list[Version] = []
    tiers = bytearray()
    for by_rank in zip(*shown, strict=False):
        tier_of = [{(writer_id, counter): tier for writer_id, counter, tier in versions} for versions in by_rank]
        best: tuple[int, int, Version] | None = None
        for name in tier_of[0]:
            found = [tiers_of[name] for tiers_of in tier_of if name in tiers_of]
            in_host = found.count(HOST)
            if len(found) == len(tier_of) and (best is None or in_host > best[0]):
                best = (in_host, max(found), Version(*name))
        if best is None:
            break
        tiers.append(best[1])
        picks.append(best[2])
    return tuple(picks), bytes(tiers)


def reach(said: Sequence[Found], first: int) -> int:
    """How many leading keys every rank has or is told that another node has; of `first` they have a version in common.
    Ends where no version can be common: those who have the key share none.
    """
    place = first
    while all(place < len(one.tiers) for one in said):
        have = [{shown[:2] for shown in one.versions[place]} for one in said if place < len(one.versions)]
        if have and (len(have) == len(said) or not set.intersection(*have)):
            break
        place += 1
    return place
