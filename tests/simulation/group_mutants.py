"""Named mutants of the merge of a group's links, of the ranks' links and of the group: each breaks a promise that an
invariant watches.

A mutant is a set of replaced methods, as in mutants.py; `shape` makes its schedules ones that can show it. Table:
docs/simulation.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from tests.simulation.group_ranks import SimNode, SimRank, SimTransport, weights_id
from tests.simulation.group_world import Group, GroupWorld, Setup
from tests.simulation.world import chain
from tournant.kvstore.block import Version
from tournant.kvstore.events import ReportEntry
from tournant.kvstore.groups import Handle
from tournant.kvstore.node_store import NodeStore
from tournant.workers import group_merge, link_reads
from tournant.workers.group_merge import GroupMerge
from tournant.workers.link_reads import LinkReads
from tournant.workers.link_saves import LinkSaves
from tournant.workers.link_session import LinkSession
from tournant.workers.transfer_messages import (
    Copied,
    Detached,
    EndRead,
    Event,
    Found,
    Leave,
    Lent,
    Order,
    ReadEnded,
    Saved,
    Stashed,
    Unstashed,
)

Patch = tuple[Any, str, Any]
WRITERS = {"groups": 2, "ranks": 2}
LONG = {"events": 1500}
SHARED_HEADS = {"ranks": 2, "nodes": 1, "shared_heads": True}


@dataclass(frozen=True)
class GroupMutant:
    """name: what is wrong; faults and shape: those that bring it out; patches: (object, attribute, replacement)."""

    name: str
    killed_by: tuple[str, ...]
    patches: tuple[Patch, ...]
    faults: tuple[str, ...] = ()
    shape: dict[str, Any] = field(default_factory=dict)

    def setup(self, seed: int) -> Setup:
        """A schedule that may show it."""
        setup = Setup.draw(seed)
        return replace(setup, faults=setup.faults.union(self.faults), **self.shape)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The mutant in force."""
        with ExitStack() as stack:
            for target, attribute, replacement in self.patches:
                stack.enter_context(patch.object(target, attribute, replacement))
            yield


# ---- which version


def _each_its_own(shown: Sequence[Sequence[Handle]], picks: Sequence[Version]) -> list[Handle]:
    return [handles[0] for handles, _ in zip(shown, picks, strict=False)]


def _choose_for_the_first(shown: Any) -> Any:
    return _CHOOSE(shown[:1])


def _choose_best_tier(shown: Any) -> Any:
    picks, _ = _CHOOSE(shown)
    names = [(pick.writer_id, pick.counter) for pick in picks]
    return picks, bytes(
        min(tier for by_rank in shown for *one, tier in by_rank[place] if tuple(one) == name)
        for place, name in enumerate(names)
    )


_CHOOSE = group_merge.choose


def _found_at_the_first(merge: GroupMerge, rank: int, event: Found) -> None:
    read = merge._reads.get(event.read)
    if read is not None and not read.found:
        for other in merge._all:
            _FOUND(merge, other, event)


_FOUND = GroupMerge._on_found

# ---- when, and how much


def _for_all(method: str, table: str, number: str, said: str) -> Any:
    """A rank's answer counts as everybody's."""
    original = getattr(GroupMerge, method)

    def take(merge: GroupMerge, rank: int, event: Any) -> None:
        going = getattr(merge, table).get(getattr(event, number, None))
        if not hasattr(event, number):
            original(merge, rank, event)
        answers = getattr(going, said) if said and going is not None else going
        if going is not None and not answers:
            for other in merge._all:
                original(merge, other, event)

    return take


def _saved_by_any(merge: GroupMerge, rank: int, event: Any) -> None:
    first = 0 if rank else len(merge._all)
    down = merge._down.get(event.save) if isinstance(event, Saved) else None
    if down is not None and first == 0:
        event = replace(event, ok=True, refused=())
    _ANSWERED(merge, rank, event)


_ANSWERED = GroupMerge._on_answered


def _brought_back_anyway(merge: GroupMerge, rank: int, event: Unstashed) -> None:
    _UNSTASHED(merge, rank, replace(event, ok=event.ok or rank > 0))


_UNSTASHED = GroupMerge._on_unstashed


def _stashed_anyway(merge: GroupMerge, rank: int, event: Any) -> None:
    _ANSWERED(merge, rank, replace(event, ok=True) if isinstance(event, Stashed) and rank else event)


def _stash_stays(merge: GroupMerge, order: Order, ranks: tuple[int, ...] | None = None) -> None:
    if ranks is None:
        _TELL(merge, order)


_TELL = GroupMerge._tell


def _end_only_the_leaders(merge: GroupMerge, order: Order, ranks: tuple[int, ...] | None = None) -> None:
    _TELL(merge, order, (0,) if isinstance(order, EndRead) else ranks)


# ---- credit


def _credit_of_the_leader(merge: GroupMerge) -> list[int]:
    return list(merge._credit[0])


def _lent_by_any(merge: GroupMerge, rank: int, event: Any) -> None:
    if isinstance(event, Lent) and merge._serving:
        merge._told[event.kind] += event.num_lent
        merge._emit(event)
        merge._lend(rank, event.kind, event.num_lent)
    else:
        _EVENT(merge, rank, event)


_EVENT = GroupMerge.event


def _save_without_an_answer_for_slots(saves: LinkSaves, order: Any, since: float) -> None:
    if saves._at.publishes:
        _SAVE(saves, order, since)
    else:
        saves._at.emit(Copied(order.save, 0, 0.0))
        saves._at.emit(Saved(order.save, True, (), 0))


_SAVE = LinkSaves.save

# ---- the end of a group


def _over_at_once(merge: GroupMerge, rank: int, event: Detached) -> None:
    serving = merge._serving
    _DETACHED(merge, rank, event)
    if serving and merge._reason:
        merge._emit(Detached(merge._reason))
        merge._reason = ""


_DETACHED = GroupMerge._on_detached


def _nobody_leaves(merge: GroupMerge, order: Order, ranks: tuple[int, ...] | None = None) -> None:
    if not isinstance(order, Leave):
        _TELL(merge, order, ranks)


def _others_leave(merge: GroupMerge, rank: int, event: Detached) -> None:
    def tell(merge: GroupMerge, order: Order, ranks: tuple[int, ...] | None = None) -> None:
        others = tuple(other for other in merge._all if other != rank)
        _TELL(merge, order, others if isinstance(order, Leave) else ranks)

    with patch.object(GroupMerge, "_tell", tell):
        _DETACHED(merge, rank, event)


def _others_stay(merge: GroupMerge, rank: int, event: Detached) -> None:
    """The others' attachments count on."""
    others = dict(merge._attached)
    with patch.object(GroupMerge, "_tell", _nobody_leaves):
        _DETACHED(merge, rank, event)
    if merge._reason:
        others.pop(rank)
        merge._attached = others


def _stay(session: LinkSession, order: Order, since: float) -> None:
    if not isinstance(order, Leave):
        _ORDER(session, order, since)


_ORDER = LinkSession.order


def _same_writer(world: GroupWorld, old: Group | None) -> int:
    return world.rng.getrandbits(63) if old is None else old.writer_id


# ---- other weights


def _take_for_the_weights_in_use(store: NodeStore, client: Any, writer: Any, entry: ReportEntry) -> bool:
    """What comes late counts as the work of whoever has attached last for this part."""
    last = [one for one in store.clients.by_number.values() if one.attach.part == client.attach.part][-1]
    own, client.weights = client.weights, last.weights
    taken = _TAKE(store, client, writer, entry)
    client.weights = own
    return taken


_TAKE = NodeStore._take_entry


def _heard_by_the_next(group: Group, rank: int, event: Event) -> None:
    """Who speaks is not compared with who is meant: what an old rank says reaches the group of now."""
    world = group.world
    seats = [seat for seat, uids in world._seats.items() if group.uid in uids]
    _HEAR(world.groups[seats[0]] if seats else group, rank, event)


_HEAR = Group.hear


def _nothing(*_: Any) -> None:
    return None


def _kill_without_exit(rank: SimRank) -> None:
    """The store does not hear that the process is gone."""
    with patch.object(SimTransport, "close", _nothing):
        _KILL(rank)


_KILL = SimRank.kill

# ---- said twice, late, or out of turn


def _counted_twice(method: str, table: str, number: str, said: str) -> Any:
    """What one rank says again stands for a rank that has said nothing yet."""
    original = getattr(GroupMerge, method)

    def take(merge: GroupMerge, rank: int, event: Any) -> None:
        going = getattr(merge, table).get(getattr(event, number, None))
        answers = getattr(going, said) if going is not None else {}
        others = [other for other in merge._all if other not in answers]
        original(merge, others[0] if rank in answers and others else rank, event)

    return take


def _lent_again(merge: GroupMerge, rank: int, event: Any) -> None:
    down = merge._down.get(event.save if isinstance(event, Saved) else event.stash)
    if down is not None:
        down.answered.pop(rank, None)
    _ANSWERED(merge, rank, event)


def _ended_again(merge: GroupMerge, rank: int, event: ReadEnded) -> None:
    was_open = event.read in merge._reads
    _ON_ENDED(merge, rank, event)
    if not was_open:
        merge._emit(event)


_ON_ENDED = GroupMerge._on_ended


def _brought_back_again(merge: GroupMerge, rank: int, event: Unstashed) -> None:
    merge._up.setdefault(event.stash, {other: event for other in merge._all if other != rank})
    _UNSTASHED(merge, rank, event)


def _say_out_of_turn(rank: SimRank, event: Event) -> None:
    rank._heard_at = 0
    _EMIT(rank, event)


_EMIT = SimRank.emit


def _tell_out_of_turn(rank: SimRank, orders: Sequence[Order]) -> None:
    for order in orders:
        rank._told_at = 0
        _TELL_RANK(rank, [order])


_TELL_RANK = SimRank.tell


def _take_back_from_the_stopped(node: SimNode) -> None:
    """Who has not moved for a while loses what is lent to it."""
    now, core = node.world.now, node.core
    for number, transport in node.clients.items() if node.up else ():
        client = core.clients.by_number.get(number)
        if client is not None and transport.rank.paused_until > now:
            for slot in client.lent.values():
                core.residency.pool.free(slot)
            client.lent = {}
    _TICK(node)


_TICK = SimNode._tick


def _over_although_it_copies(reads: LinkReads, read: Any) -> None:
    """A read ends at once, its copy when it likes."""
    job = read.job
    _END(reads, read)
    if job is not None and read.number in reads._reads:
        reads._at.emit(ReadEnded(read.number, 0))


_END = LinkReads._end


def _ended_while_copying(session: LinkSession) -> bool:
    return bool(session.attachment.over)


GROUP_MUTANTS = (
    GroupMutant("every rank picks for itself", ("I1",), ((link_reads, "named", _each_its_own),), (), WRITERS),
    GroupMutant("a version is picked that the leader's rank has, whether the others have it or not", ("I1",),
                ((group_merge, "choose", _choose_for_the_first),), ("evictions",), WRITERS),
    GroupMutant("what the first rank found counts for all", ("I1", "I13"),
                ((GroupMerge, "_on_found", _found_at_the_first),), ("evictions",), WRITERS),
    GroupMutant("the best tier is told, not the worst", ("I13",),
                ((group_merge, "choose", _choose_best_tier),), (), {"nvme": True, "ranks": 2, "nodes": 2, "slots": 40}),
    GroupMutant("a read has ended when the first rank has ended it", ("I8", "I2", "I4"),
                ((GroupMerge, "_on_ended", _for_all("_on_ended", "_reads", "read", "ended")),), ("slow copy",)),
    GroupMutant("the most of the ranks' blocks count, not the least", ("I2", "I1", "I4", "I8"),
                ((group_merge, "good_prefix", max),), ("host bit flip", "slow copy")),
    GroupMutant("fetched is what the first rank has fetched", ("I4", "I11", "I2"),
                ((GroupMerge, "_on_fetched", _for_all("_on_fetched", "_reads", "read", "fetched")),
                 ), ("evictions",)),
    GroupMutant("device blocks are given back when the first rank has copied them", ("I5",),
                ((GroupMerge, "_on_copied", _for_all("_on_copied", "_down", "number", "copied")),), ("slow copy",)),
    GroupMutant("a save counts when the first rank has answered it", ("I13", "I4"),
                ((GroupMerge, "_on_answered", _for_all("_on_answered", "_down", "save", "answered")),),
                ("failed copy",)),
    GroupMutant("what other ranks could not save counts as saved", ("I13",),
                ((GroupMerge, "_on_answered", _saved_by_any),), ("failed copy",)),
    GroupMutant("a stash counts as kept when the leader's rank keeps it", ("I2", "I11", "I8"),
                ((GroupMerge, "_on_answered", _stashed_anyway),
                 (GroupMerge, "_on_unstashed", _brought_back_anyway)), ("failed copy",), LONG),
    GroupMutant("the others keep a stash that one rank could not keep", ("I11",),
                ((GroupMerge, "_tell", _stash_stays),), ("failed copy",)),
    GroupMutant("other ranks are not told that a read is over", ("I11",),
                ((GroupMerge, "_tell", _end_only_the_leaders),)),
    GroupMutant("the leader's credit counts for all", ("I8", "I11"),
                ((GroupMerge, "_least_credit", _credit_of_the_leader),), ("slow copy", "late rank", "failed copy")),
    GroupMutant("a slot that one rank was lent counts for all", ("I8",),
                ((GroupMerge, "event", _lent_by_any),), ("failed copy",)),
    GroupMutant("a rank that publishes nothing does not give its slots back", ("I11", "I8"),
                ((LinkSaves, "save", _save_without_an_answer_for_slots),), (), SHARED_HEADS),
    GroupMutant("the engine hears that the store is lost before everything has ended", ("I4",),
                ((GroupMerge, "_on_detached", _over_at_once),), ("store killed", "slow copy")),
    GroupMutant("other ranks are not told to leave their stores", ("I11",),
                ((GroupMerge, "_tell", _nobody_leaves),), ("store killed",), {"ranks": 2, "nodes": 2}),
    GroupMutant("a rank does not leave its store", ("I11",),
                ((LinkSession, "order", _stay),), ("store killed",), {"ranks": 2, "nodes": 2}),
    GroupMutant("the rank that has lost its store need not leave the next one", ("I8", "I11"),
                ((GroupMerge, "_on_detached", _others_leave),), ("store killed", "late order", "late rank"),
                {"ranks": 2, "nodes": 2, **LONG}),
    GroupMutant("other ranks keep what they have when one has lost its store", ("I11", "I8", "I4"),
                ((GroupMerge, "_on_detached", _others_stay),), ("store killed",), {"ranks": 2, "nodes": 2}),
    GroupMutant("a group that is formed anew keeps its writer id", ("I1", "I2", "I3"),
                ((GroupWorld, "new_writer", _same_writer),), ("group formed anew", "old rank lives on", "evictions"),
                {"ranks": 2, "nodes": 2, "groups": 1, **LONG}),
    GroupMutant("a group on other weights keeps its writer id", ("I3",),
                ((GroupWorld, "new_writer", _same_writer),), ("weights update",), LONG),
    GroupMutant("a group on other weights tells its stores the weights_id from before", ("I9",),
                ((Group, "weights_id", property(lambda group: weights_id(1))),), ("weights update",)),
    GroupMutant("a group on other weights makes its keys with the weights_id from before", ("I9",),
                ((Group, "chain", lambda group, document: chain(1, 0, document)),), ("weights update",), LONG),
    GroupMutant("ranks do not compare their weights when the group forms", ("I9",),
                ((Group, "is_of_one_mind", True),), ("weights update", "rank on old weights"), LONG),
    GroupMutant("a late save of the old engine is taken under the identity of the new one", ("I9",),
                ((NodeStore, "_take_entry", _take_for_the_weights_in_use),),
                ("weights update", "old rank lives on", "stalled rank"), {"groups": 1, **LONG}),
    GroupMutant("what a rank of the old group says is heard by the new leader", ("I4", "I8", "I11"),
                ((Group, "hear", _heard_by_the_next),), ("weights update", "old rank lives on", "stalled rank"), LONG),
    GroupMutant("the change of weights does not end what is under way", ("I11",),
                ((GroupMerge, "end", _nothing),), ("weights update",)),
    GroupMutant("what is lent to the ranks of the old engine stays lent", ("I11",),
                ((SimRank, "kill", _kill_without_exit),), ("weights update",)),
    GroupMutant("what is said twice counts as said by two: loads", ("I8", "I2", "I4"),
                ((GroupMerge, "_on_ended", _counted_twice("_on_ended", "_reads", "read", "ended")),),
                ("said twice", "slow copy", "late rank"), LONG),
    GroupMutant("what is said twice counts as said by two: copies", ("I5",),
                ((GroupMerge, "_on_copied", _counted_twice("_on_copied", "_down", "number", "copied")),),
                ("said twice", "slow copy", "late rank"), LONG),
    GroupMutant("slots that are lent back in an answer that is said twice count twice", ("I8",),
                ((GroupMerge, "_on_answered", _lent_again),), ("said twice", "late rank"), LONG),
    GroupMutant("a read that has ended ends again when a rank says so again", ("I4",),
                ((GroupMerge, "_on_ended", _ended_again),), ("said twice",)),
    GroupMutant("a stash that is back comes back again when a rank says so again", ("I4",),
                ((GroupMerge, "_on_unstashed", _brought_back_again),), ("said twice",), LONG),
    GroupMutant("what a rank says overtakes what it has said before", ("I4", "I8", "I11"),
                ((SimRank, "emit", _say_out_of_turn),), ("late rank",)),
    GroupMutant("what a rank is told overtakes what it was told before", ("I4", "I8", "I11"),
                ((SimRank, "tell", _tell_out_of_turn),), ("late order",)),
    GroupMutant("what is lent to a stopped rank is taken back", ("I5", "I11"),
                ((SimNode, "_tick", _take_back_from_the_stopped),), ("stalled rank", "slow copy")),
    GroupMutant("a read is over although its copy goes on", ("I8", "I4"),
                ((LinkReads, "_end", _over_although_it_copies),), ("cancel", "slow copy"), LONG),
    GroupMutant("a store is left although copies into it go on", ("I4", "I5", "I8", "I11"),
                ((LinkSession, "ended", property(_ended_while_copying)),), ("store killed", "slow copy")),
)  # fmt: skip
