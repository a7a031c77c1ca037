"""The merge of a group's links by hand: what ranks are told, and what the engine hears, one interleaving at a time."""

from __future__ import annotations

import pytest

from tournant.kvstore.block import Version
from tournant.kvstore.errors import InvariantViolation
from tournant.workers.group_merge import GroupMerge, choose, reach
from tournant.workers.transfer_messages import (
    HOST,
    NVME,
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
    SaveEntry,
    Shown,
    Stash,
    Stashed,
    Unstash,
    Unstashed,
    Used,
)

A, B, C = (7, 1), (7, 2), (9, 1)  # versions
KEYS = (b"a" * 32, b"b" * 32)


class Group:
    """A merge of two ranks, which checks itself after every step."""

    def __init__(self, stores: tuple[str, ...] = ("s", "s"), credit: tuple[int, ...] = (4, 3)) -> None:
        self.merge = GroupMerge(stores)
        self.credit = credit

    def attach(self) -> Group:
        for rank, credit in enumerate(self.credit):
            self.hear(rank, Attached(rank, (credit,), 10, 95))
        return self

    def order(self, *orders: Order) -> list[Event]:
        for order in orders:
            self.merge.order(order)
            self.merge.validate()
        return self.merge.take_events()

    def hear(self, rank: int, *events: Event) -> list[Event]:
        for event in events:
            self.merge.event(rank, event)
            self.merge.validate()
        return self.merge.take_events()

    def told(self) -> list[tuple[tuple[int, ...], Order]]:
        return self.merge.take_orders()


@pytest.fixture
def group() -> Group:
    return Group().attach()


def shown(*keys: list[tuple[tuple[int, int], int]]) -> tuple[tuple[Shown, ...], ...]:
    return tuple(tuple((*version, tier) for version, tier in key) for key in keys)


def found(read: int, *keys: list[tuple[tuple[int, int], int]], seconds: float = 0.0, remote: int = 0) -> Found:
    return Found(read, bytes(key[0][1] for key in keys) + bytes([REMOTE]) * remote, seconds, shown(*keys))


def save(number: int, count: int) -> Save:
    entries = (SaveEntry(block, bytes(32), Version(7, block), 1, 0) for block in range(count))
    return Save(number, tuple(entries))


# ---- attaching


def test_a_group_serves_when_all_are_attached() -> None:
    group = Group(("s", "t", "s"), (4, 3, 9))
    assert group.hear(1, Attached(5, (3,), 10, 1000)) == []
    assert group.hear(0, Attached(6, (4,), 20, 95)) == []
    (attached,) = group.hear(2, Attached(6, (9,), 10, 95))
    # at store s a block takes 30 bytes of 95
    assert attached == Attached(attached.incarnation, (3,), 40, 3 * 40)  # type: ignore[attr-defined]
    again = Group(("s", "t", "s"), (4, 3, 9))
    for rank, incarnation in enumerate((6, 4, 6)):
        events = again.hear(rank, Attached(incarnation, (3,), 10, 1000))
    assert events[0].incarnation != attached.incarnation  # type: ignore[attr-defined]


def test_one_that_detaches_before_the_others_attach_is_waited_for() -> None:
    group = Group()
    assert group.hear(1, Detached("never was")) == []
    group.hear(0, Attached(1, (4,), 10, 100))
    assert group.hear(0, Detached("gone"), Detached("gone again")) == []
    assert group.hear(1, Attached(1, (3,), 10, 100)) == []
    assert group.told() == []
    assert isinstance(group.hear(0, Attached(2, (4,), 10, 100))[0], Attached)


def test_kinds_must_be_alike() -> None:
    group = Group()
    group.merge.event(0, Attached(1, (4, 4), 10, 100))
    with pytest.raises(InvariantViolation, match="unlike kinds"):
        group.merge.event(1, Attached(1, (4,), 10, 100))


def test_credit_lent_before_all_are_attached_counts() -> None:
    group = Group()
    group.hear(0, Attached(1, (1,), 10, 100), Lent(3))
    assert group.hear(1, Attached(1, (3,), 10, 100))[0].credit == (3,)  # type: ignore[attr-defined]


def test_a_refusal_names_its_rank() -> None:
    assert Group().hear(1, Refused("no room", True)) == [Refused("rank 1: no room", True)]


def test_without_a_group_orders_are_answered_at_once() -> None:
    group = Group()
    answers = group.order(Lookup(1, KEYS), save(2, 1), Stash(3, 1), Unstash(3, 1), Used(KEYS), DropStash(3), EndRead(1))
    assert answers == [
        Found(1, b"", 0.0), ReadEnded(1, 0), Copied(2, 0, 0.0), Saved(2, False, (), 0), Copied(3, 0, 0.0),
        Stashed(3, False), Unstashed(3, False),
    ]  # fmt: skip
    assert group.told() == []


# ---- a rank loses its store


def test_when_one_store_is_lost_all_leave_and_the_engine_hears_last(group: Group) -> None:
    group.order(Lookup(1, KEYS), save(2, 1), Unstash(9, 3))
    group.told()
    group.hear(0, Copied(2, 5, 0.0), Saved(2, True, (), 1), Unstashed(9, True, 1))
    assert group.hear(1, Found(1, b"", 0.0), ReadEnded(1, 0), Copied(2, 0, 0.0), Saved(2, False, (), 0)) == [
        Copied(2, 5, 0.0),
        Saved(2, False, (), 0),
    ]
    assert group.hear(1, Unstashed(9, False), Detached("killed")) == [Unstashed(9, False, 0)]
    assert group.told() == [((0, 1), Leave())]
    assert group.order(Lookup(3, KEYS), EndRead(1)) == [Found(3, b"", 0.0), ReadEnded(3, 0)]
    assert group.hear(1, Attached(2, (3,), 10, 95)) == []
    assert group.hear(0, Found(1, b"", 0.0), ReadEnded(1, 0)) == [
        Found(1, b"", 0.0), ReadEnded(1, 0), Detached("rank 1: killed"),
    ]  # fmt: skip
    assert group.hear(0, Detached("left")) == []
    assert group.hear(0, Attached(1, (4,), 10, 95))[0].credit == (3,)  # type: ignore[attr-defined]
    assert group.told() == []


def test_two_that_lose_their_stores_are_one_loss(group: Group) -> None:
    assert group.hear(0, Detached("a")) == [Detached("rank 0: a")]
    assert group.hear(1, Detached("b")) == []
    assert group.told() == [((0, 1), Leave())]


def test_a_loss_during_a_read_ends_it_without_blocks(group: Group) -> None:
    """Also when the engine fetches and loads before it hears of the loss."""
    group.order(Lookup(1, KEYS))
    group.hear(0, found(1, [(A, HOST)]))
    assert group.hear(1, found(1, [(A, HOST)])) == [Found(1, bytes([HOST]), 0.0)]
    group.hear(1, ReadEnded(1, 0), Detached("killed"))
    group.told()
    assert group.order(Fetch(1, 1), Load(1, 0, (5,)), EndRead(1)) == []
    assert group.told() == []
    assert group.hear(0, ReadEnded(1, 0)) == [ReadEnded(1, 0), Detached("rank 1: killed")]


# ---- reads


def test_a_read_from_beginning_to_end(group: Group) -> None:
    group.order(Lookup(1, KEYS))
    assert group.told() == [((0, 1), Lookup(1, KEYS))]
    assert group.hear(1, found(1, [(C, HOST), (A, NVME)], [(B, HOST)], seconds=2.0)) == []
    assert group.hear(0, found(1, [(A, HOST)], [(B, HOST)], seconds=1.0)) == [Found(1, bytes([NVME, HOST]), 2.0)]
    group.order(Fetch(1, 2))
    assert group.told() == [((0, 1), Fetch(1, 2, (Version(*A), Version(*B))))]
    assert group.hear(0, Fetched(1, 2, 0, 1.0)) == []
    assert group.hear(1, Fetched(1, 2, 100, 3.0)) == [Fetched(1, 2, 100, 3.0)]
    group.order(Load(1, 0, (4, 5)))
    assert group.told() == [((0, 1), Load(1, 0, (4, 5)))]
    assert group.hear(0, Loaded(1, 1)) == []
    assert group.hear(1, Loaded(1, 1)) == [Loaded(1, 1)]
    assert group.hear(0, ReadEnded(1, 2, 20, 1.0)) == []
    assert group.hear(1, ReadEnded(1, 1, 10, 4.0, 1)) == [ReadEnded(1, 1, 30, 4.0, 1)]
    late = (Found(1, b"", 0.0), Fetched(1, 2, 0, 0.0), Loaded(1, 2), ReadEnded(1, 2))
    assert group.hear(0, *late) == []
    assert group.order(EndRead(1), Fetch(1, 1), Load(1, 0, (1,))) == []
    assert group.told() == []


def test_what_one_rank_has_ended_counts_as_its_progress(group: Group) -> None:
    group.order(Lookup(1, KEYS), Load(1, 0, (4, 5)))
    group.hear(0, ReadEnded(1, 2))
    assert group.hear(1, Loaded(1, 1)) == [Loaded(1, 1)]
    assert group.hear(0, Loaded(1, 1), ReadEnded(1, 0)) == []


def test_what_no_version_is_everywhere_is_not_found_and_ends(group: Group) -> None:
    group.order(Lookup(1, KEYS))
    group.told()
    group.hear(0, found(1, [(A, HOST)]))
    assert group.hear(1, found(1, [(B, HOST)])) == [Found(1, b"", 0.0)]
    assert group.told() == [((0, 1), EndRead(1))]
    assert group.order(Fetch(1, 1), EndRead(1)) == []
    assert group.told() == []
    group.hear(0, ReadEnded(1, 0))
    assert group.hear(1, ReadEnded(1, 0)) == [ReadEnded(1, 0)]


def test_a_read_that_is_ended_before_it_is_answered(group: Group) -> None:
    """Found comes, once and empty, although ranks may have found something."""
    group.order(Lookup(1, KEYS))
    group.hear(0, found(1, [(A, HOST)]))
    group.order(EndRead(1), EndRead(1))
    assert group.told()[1:] == [((0, 1), EndRead(1))]
    assert group.hear(0, ReadEnded(1, 0)) == []
    assert group.hear(1, found(1, [(A, HOST)]), ReadEnded(1, 0)) == [Found(1, b"", 0.0), ReadEnded(1, 0)]


@pytest.mark.parametrize(
    ("ranks", "picks", "tiers"),
    [
        ([[[(A, NVME), (B, HOST)]], [[(A, NVME), (B, HOST)]]], [B], [HOST]),  # everywhere in host slots
        ([[[(A, HOST), (B, NVME)]], [[(B, HOST), (A, NVME)]]], [A], [NVME]),  # as often: what rank 0 showed first
        ([[[(A, NVME), (B, NVME)]], [[(B, HOST), (A, NVME)]]], [B], [NVME]),
        ([[[(A, HOST)], [(B, HOST)]], [[(A, HOST)]]], [A], [HOST]),  # the shorter one
        ([[[(A, HOST)], [(B, HOST)], [(C, HOST)]], [[(A, HOST)], [(C, HOST)], [(C, HOST)]]], [A], [HOST]),
        ([[], [[(A, HOST)]]], [], []),
    ],
)
def test_choice_of_versions(ranks: list[list[list[tuple[tuple[int, int], int]]]], picks: list, tiers: list) -> None:
    assert choose([shown(*keys) for keys in ranks]) == (tuple(Version(*name) for name in picks), bytes(tiers))


# ---- blocks of other nodes

FOUR = (*KEYS, b"c" * 32, b"d" * 32)
HERE = [(A, HOST)]


def brought(read: int, *keys: list[tuple[tuple[int, int], int]]) -> Brought:
    return Brought(read, shown(*keys))


def test_what_some_lack_is_brought_by_them_and_shown_again(group: Group) -> None:
    """Rank 0 has two blocks, rank 1 three, and each knows of more elsewhere."""
    group.order(Lookup(1, FOUR))
    group.hear(0, found(1, HERE, HERE, remote=2))
    assert group.hear(1, found(1, HERE, HERE, [(B, HOST)], remote=1)) == [
        Found(1, bytes([HOST, HOST, REMOTE, REMOTE]), 0.0)
    ]
    group.told()
    assert group.order(Fetch(1, 3), Load(1, 0, (4, 5, 6))) == []
    assert group.told() == [((0,), Bring(1, 3))], "rank 1 lacks none of three"
    first = found(1, HERE, HERE, remote=2)  # said twice: it is not what comes next
    assert group.hear(0, first, brought(1, HERE, [(A, NVME)], [(C, HOST), (B, HOST)]), brought(1)) == []
    picks = (Version(*A), Version(*A), Version(*B))
    assert group.told() == [((0, 1), Fetch(1, 3, picks)), ((0, 1), Load(1, 0, (4, 5, 6)))]
    group.hear(0, Fetched(1, 3, 10, 5.0, 1, 100, 4.0))
    assert group.hear(1, Fetched(1, 3, 0, 2.0)) == [Fetched(1, 3, 10, 6.0, 1, 100, 4.0)]
    group.hear(0, ReadEnded(1, 3))
    assert group.hear(1, ReadEnded(1, 3)) == [ReadEnded(1, 3)]


def test_all_ranks_bring_and_the_slowest_counts(group: Group) -> None:
    group.order(Lookup(1, FOUR))
    group.hear(0, found(1, remote=4))
    assert group.hear(1, found(1, remote=3)) == [Found(1, bytes([REMOTE]) * 3, 0.0)]
    group.told()
    group.order(Fetch(1, 9))
    assert group.told() == [((0, 1), Bring(1, 3))]
    group.hear(1, brought(1, HERE, HERE))
    assert group.told() == []
    group.hear(0, brought(1, HERE, HERE, HERE))
    assert group.told() == [((0, 1), Fetch(1, 2, (Version(*A),) * 2))]
    group.hear(1, Fetched(1, 2, 0, 3.0, 2, 50, 3.0, True))
    assert group.hear(0, Fetched(1, 2, 0, 1.5, 3, 60, 1.0)) == [Fetched(1, 2, 0, 3.5, 2, 110, 3.0, True)]


def test_another_version_on_another_node_cuts_the_prefix(group: Group) -> None:
    group.order(Lookup(1, FOUR))
    for rank in (0, 1):
        group.hear(rank, found(1, HERE, remote=3))
    group.order(Fetch(1, 4))
    group.told()
    group.hear(0, brought(1, HERE, HERE, HERE, HERE))
    group.hear(1, brought(1, HERE, HERE, [(C, HOST)], HERE))
    assert group.told() == [((0, 1), Fetch(1, 2, (Version(*A),) * 2))]
    group.hear(0, Fetched(1, 2, 0, 1.0, 3, 30, 1.0))
    assert group.hear(1, Fetched(1, 2, 0, 1.0, 3, 30, 1.0)) == [Fetched(1, 2, 0, 1.0, 1, 60, 1.0)]


def test_nothing_comes(group: Group) -> None:
    """Also what was here may be gone by then: it is not fetched."""
    group.order(Lookup(1, FOUR))
    for rank in (0, 1):
        group.hear(rank, found(1, HERE, remote=3))
    group.order(Fetch(1, 4))
    group.told()
    group.hear(0, brought(1))
    group.hear(1, brought(1, HERE))
    assert group.told() == [((0, 1), Fetch(1, 0, ()))]
    for rank in (0, 1):
        events = group.hear(rank, Fetched(1, 0, 0, 0.0, remote_failed=True))
    assert events == [Fetched(1, 0, 0, 0.0, remote_failed=True)]


def test_within_what_is_here_nobody_brings(group: Group) -> None:
    group.order(Lookup(1, FOUR))
    for rank in (0, 1):
        group.hear(rank, found(1, HERE, HERE, remote=2))
    group.told()
    group.order(Fetch(1, 2))
    assert group.told() == [((0, 1), Fetch(1, 2, (Version(*A),) * 2))]


def test_a_read_that_ends_while_blocks_are_brought(group: Group) -> None:
    group.order(Lookup(1, FOUR))
    for rank in (0, 1):
        group.hear(rank, found(1, remote=4))
    group.order(Fetch(1, 4), Load(1, 0, (1, 2, 3, 4)))
    group.hear(0, brought(1, HERE))
    group.told()
    group.order(EndRead(1))
    assert group.told() == [((0, 1), EndRead(1))]
    group.hear(1, brought(1, HERE), ReadEnded(1, 0))
    assert group.told() == []
    assert group.hear(0, ReadEnded(1, 0)) == [ReadEnded(1, 0)]


def test_a_store_that_is_lost_while_blocks_are_brought(group: Group) -> None:
    group.order(Lookup(1, FOUR))
    for rank in (0, 1):
        group.hear(rank, found(1, remote=4))
    group.order(Fetch(1, 4), Load(1, 0, (1, 2, 3, 4)))
    group.hear(1, ReadEnded(1, 0), Detached("killed"))
    group.told()
    group.hear(0, brought(1, HERE))
    assert group.told() == [], "no order outlives the attachment that it was meant for"
    assert group.hear(0, ReadEnded(1, 0)) == [ReadEnded(1, 0), Detached("rank 1: killed")]


@pytest.mark.parametrize(
    ("ranks", "first", "last"),
    [
        ([([HERE], 3), ([HERE], 2)], 1, 3),
        ([([HERE], 3), ([], 0)], 0, 0),  # one without an agent
        ([([], 2), ([], 2)], 0, 2),
        ([([HERE] * 4, 0), ([HERE], 3)], 1, 4),
        ([([HERE, HERE], 2), ([HERE, [(C, HOST)]], 2)], 1, 1),  # both have it, in no common version
        ([([HERE, HERE], 1), ([HERE, [(C, HOST)]], 1), ([HERE], 2)], 1, 1),  # what the third brings fits one of them
        ([([HERE, HERE, HERE], 1), ([HERE, HERE, [(C, HOST), (A, HOST)]], 1), ([HERE], 3)], 1, 4),
    ],
)
def test_how_far_other_nodes_reach(ranks: list[tuple[list, int]], first: int, last: int) -> None:
    assert reach([found(1, *keys, remote=remote) for keys, remote in ranks], first) == last


def test_what_only_a_leader_orders(group: Group) -> None:
    for order in (Leave(), Bring(1, 2)):
        with pytest.raises(InvariantViolation, match="order of a group's leader"):
            group.order(order)


# ---- saves, stashes, credit


def test_a_save_is_answered_when_all_have_and_refused_by_any(group: Group) -> None:
    group.order(save(1, 3))
    assert group.hear(1, Copied(1, 30, 2.0), Saved(1, True, (2,), 3)) == []
    assert group.hear(0, Copied(1, 30, 1.0)) == [Copied(1, 60, 2.0)]
    assert group.hear(0, Saved(1, True, (0,), 3)) == [Saved(1, True, (0, 2), 3)]


def test_the_least_credit_counts(group: Group) -> None:
    """Of 4 and 3 slots: what rank 0 was lent is of no use before rank 1 has it, too."""
    group.order(save(1, 2), save(2, 1))
    for number in (1, 2):
        group.hear(0, Copied(number, 1, 0.0), Saved(number, True, (), 2))
    assert group.hear(1, Copied(1, 1, 0.0), Saved(1, True, (), 0)) == [Copied(1, 2, 0.0), Saved(1, True, (), 0)]
    assert group.hear(0, Lent(1)) == []
    assert group.hear(1, Lent(2)) == [Lent(2)]
    assert group.hear(1, Copied(2, 1, 0.0), Saved(2, True, (), 3))[-1] == Saved(2, True, (), 3)


def test_more_than_the_credit_is_found_out(group: Group) -> None:
    with pytest.raises(InvariantViolation, match="I8"):
        group.order(save(1, 4))


def test_a_stash_that_one_rank_cannot_keep_is_dropped_by_the_others() -> None:
    group = Group(credit=(3, 3)).attach()
    group.order(Stash(1, 5))
    group.told()
    group.hear(0, Copied(1, 10, 0.0), Stashed(1, True))
    assert group.hear(1, Copied(1, 0, 0.0), Stashed(1, False, 1)) == [Copied(1, 10, 0.0), Stashed(1, False, 0)]
    assert group.told() == [((0,), DropStash(1))]
    assert group.hear(0, Lent(1)) == [Lent(1)]


def test_a_stash_comes_back_when_it_does_to_all(group: Group) -> None:
    group.order(Stash(1, 5))
    for rank in (0, 1):
        events = group.hear(rank, Copied(1, 10, 0.0), Stashed(1, True))
    assert events == [Copied(1, 20, 0.0), Stashed(1, True, 0)]
    group.order(Unstash(1, 6))
    assert group.hear(1, Unstashed(1, False, 1)) == []
    assert group.hear(0, Unstashed(1, True, 1)) == [Unstashed(1, False, 1)]


def test_used_goes_to_each_store_once() -> None:
    group = Group(("s", "t", "s"), (4, 3, 9)).attach()
    group.order(Used(KEYS), DropStash(3))
    assert group.told() == [((0, 1), Used(KEYS)), ((0, 1, 2), DropStash(3))]


def test_the_end_answers_everything(group: Group) -> None:
    group.order(Lookup(1, KEYS), Lookup(2, KEYS), save(3, 1), Stash(4, 1), Unstash(9, 1))
    for rank in (0, 1):
        group.hear(rank, found(2, [(A, HOST)]), Copied(4, 1, 0.0))
    group.merge.end("over")
    assert group.merge.take_events() == [
        Found(1, b"", 0.0), ReadEnded(1, 0), ReadEnded(2, 0), Copied(3, 0, 0.0), Saved(3, False, (), 0),
        Stashed(4, False), Unstashed(9, False), Detached("over"),
    ]  # fmt: skip
    assert group.hear(0, ReadEnded(1, 0), Saved(3, True, (), 1)) == []
    assert group.order(Lookup(5, KEYS)) == [Found(5, b"", 0.0), ReadEnded(5, 0)]
