"""A shard of the directory and the announcing side of a store; under faults: tests/simulation/test_directory.py."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kvstore.store_harness import SLOT, Store, keys, write, writer
from tournant.kvstore.admin import Announcements, PollAnnouncements
from tournant.kvstore.announcer import Announcer, AnnouncerConfig
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.directory import Announcement, Directory, DirectoryConfig, Heard, Position, Run, shard_of
from tournant.kvstore.errors import StoreConfigError
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.policies import make_eviction
from tournant.kvstore.residency import Residency
from tournant.kvstore.shell import StoreShell

A, B, C, D = keys(4)
LIFE = 77


def shard(**limits: int) -> Directory:
    """An empty shard."""
    return Directory(DirectoryConfig(**limits), 1000)


def begin(directory: Directory, node: int, host: list[bytes], nvme: list[bytes] | None = None, seq: int = 1) -> None:
    """A store says hello, is asked, and tells everything; its next number is seq + 2."""
    question = directory.announce(0, Announcement(node, LIFE, seq)).question
    assert question
    everything = Announcement(node, LIFE, seq + 1, tuple(host), tuple(nvme or ()), answers=question)
    assert not directory.announce(0, everything).question


def connect(directory: Directory, announcer: Announcer, now_us: int) -> None:
    """Carry messages to and fro until nothing is left to be told."""
    for _ in range(50):
        for number, message in announcer.poll(now_us):
            announcer.heard(number, directory.announce(now_us, message))
    directory.validate()


def test_a_lookup_answers_in_runs_until_nobody_has_a_key() -> None:
    directory = shard()
    begin(directory, 3, [A, B], [C])
    begin(directory, 1, [A, B, D])
    assert directory.lookup([A, B, C, D]) == [Run(2, (1, 3), ()), Run(1, (), (3,)), Run(1, (1,), ())]
    assert directory.lookup([A, b"?" * 32, B]) == [Run(1, (1, 3), ())]
    assert directory.lookup([]) == directory.lookup([b"?" * 32]) == []
    assert directory.nodes == (1, 3)
    assert (directory.stats.looked_up, directory.stats.found) == (8, 5)


def test_a_block_moves_and_goes() -> None:
    directory = shard()
    begin(directory, 1, [A, B])
    directory.announce(0, Announcement(1, LIFE, 3, nvme=(A,), gone=(B, C)))
    assert directory.lookup([A, B]) == [Run(1, (), (1,))]
    directory.announce(0, Announcement(1, LIFE, 4, host=(A,)))
    assert directory.lookup([A]) == [Run(1, (1,), ())]
    assert len(directory) == 1


def test_what_comes_twice_or_late_changes_nothing() -> None:
    directory = shard()
    begin(directory, 1, [A])
    for message in (Announcement(1, LIFE, 3, host=(B,)), Announcement(1, LIFE, 4, gone=(B,))):
        assert not directory.announce(0, message).question
    assert not directory.announce(0, Announcement(1, LIFE, 3, host=(B,))).question
    assert directory.lookup([B]) == []
    assert directory.stats.stale == 1


def test_a_gap_is_asked_about_until_it_is_answered() -> None:
    directory = shard()
    begin(directory, 1, [A])
    first = directory.announce(0, Announcement(1, LIFE, 5, host=(B,))).question
    assert first == directory.announce(0, Announcement(1, LIFE, 6, host=(C,))).question != 0
    assert directory.lookup([A]), "what was known is a hint still"
    assert not directory.lookup([B])
    assert directory.announce(0, Announcement(1, LIFE, 7, host=(D,), answers=first + 1)).question == first
    assert not directory.announce(0, Announcement(1, LIFE, 8, host=(C,), answers=first)).question
    assert [bool(directory.lookup([key])) for key in (A, B, C, D)] == [False, False, True, False]


def test_a_new_life_voids_the_old_one_and_a_dead_store_cannot_come_back() -> None:
    directory = shard()
    begin(directory, 1, [A])
    question = directory.announce(0, Announcement(1, LIFE + 1, 1)).question
    directory.announce(0, Announcement(1, LIFE + 1, 2, host=(B,), answers=question))
    assert [bool(directory.lookup([key])) for key in (A, B)] == [False, True]
    late = directory.announce(0, Announcement(1, LIFE, 2, host=(A,), answers=question))
    assert late.question not in (0, question)
    assert [bool(directory.lookup([key])) for key in (A, B)] == [False, True]
    assert not directory.announce(0, Announcement(1, LIFE + 1, 3, host=(A,))).question


def test_a_lost_or_silent_node_leaves_no_entry() -> None:
    directory = shard(silent_us=100)
    for node in (1, 2, 3):
        begin(directory, node, [A, B][: node % 2 + 1])
    directory.node_lost(1)
    directory.node_lost(9)
    assert directory.lookup([A, B]) == [Run(1, (2, 3), ()), Run(1, (3,), ())]
    directory.announce(90, Announcement(2, LIFE, 3))
    assert directory.expire(101) == (3,)
    assert directory.lookup([A, B]) == [Run(1, (2,), ())]
    directory.validate()
    assert directory.announce(110, Announcement(1, LIFE, 3)).question, "it may announce again"


def test_the_oldest_announced_leave_first() -> None:
    directory = shard(max_keys=2)
    begin(directory, 1, [A, B])
    begin(directory, 2, [A])
    directory.announce(0, Announcement(1, LIFE, 3, host=(C,)))
    assert [bool(directory.lookup([key])) for key in (A, B, C)] == [True, False, True]
    assert directory.stats.evicted == 1


def test_nodes_and_holders_are_bounded() -> None:
    directory = shard(max_nodes=3, max_holders=2)
    for node in (5, 4, 3):
        begin(directory, node, [A])
    assert directory.lookup([A]) == [Run(1, (4, 5), ())]
    begin(directory, 2, [B])
    assert directory.nodes == (2, 4, 5), "of those silent for the same time the lowest number goes"
    directory.validate()


def test_a_router_follows_the_changes() -> None:
    directory = shard(changes=2)
    begin(directory, 1, [A, B, C])
    at = directory.changes_since(Position(5))
    assert at.start_over
    assert [key for key, *_ in at.older] == [C, B], "the newest first, as many as may be told"
    rest = directory.changes_since(at.position)
    assert (rest.start_over, rest.older, rest.position.given) == (False, ((A, (1,), ()),), None)
    at = directory.changes_since(at.position._replace(given=None))
    assert not at.older, "whoever wants no more of them"
    begin(directory, 2, [B])
    directory.announce(0, Announcement(1, LIFE, 3, nvme=(C,), gone=(A,)))
    first = directory.changes_since(at.position)
    assert (first.start_over, first.lost, first.entries) == (False, (), ((B, (1, 2), ()), (C, (), (1,))))
    second = directory.changes_since(first.position)
    assert second.entries == ((A, (), ()),)
    assert directory.changes_since(second.position).position == second.position
    directory.node_lost(1)
    last = directory.changes_since(second.position)
    assert (last.lost, last.entries, last.position.at) == ((1,), (), second.position.at + 1)


def test_a_router_that_fell_behind_or_knew_another_life_starts_over() -> None:
    directory = shard(log_keys=2)
    begin(directory, 1, [A, B, C])
    end = directory.changes_since(Position(0)).position.at
    starts = [directory.changes_since(Position(end - back)).start_over for back in (0, 2, 3, -1)]
    assert starts == [False, False, True, True]


def test_those_who_start_over_at_the_same_time_share_one_list_which_goes_when_it_is_not_read() -> None:
    directory = shard(changes=2, silent_us=100)
    begin(directory, 1, [A, B, C])
    first = directory.changes_since(Position(0))
    directory.announce(0, Announcement(1, LIFE, 3, gone=(C,)))
    second = directory.changes_since(Position(0))
    assert first.position.list_at == second.position.list_at
    assert [key for key, *_ in (*second.entries, *second.older)] == [C, C], "what has changed since is told too"
    directory.expire(90)
    third = directory.changes_since(second.position)
    assert [key for key, *_ in third.older] == [B, A]
    directory.announce(240, Announcement(1, LIFE, 4))
    directory.expire(250)
    directory.validate()
    again = directory.changes_since(second.position)
    assert not again.start_over
    assert [key for key, *_ in again.older] == [B, A], "a new list from its beginning"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pages_of_a_long_index_and_what_changes_between_them_make_a_copy(data: st.DataObject) -> None:
    """Whatever changes while a copy starts over, also when others do so, and when the log does not reach any more."""
    directory = Directory(DirectoryConfig(changes=3, log_keys=12, max_keys=30), 1000)
    pool = keys(40, "pages")
    begin(directory, 1, pool[:20])
    seq = {1: 2, 2: 0}
    begin(directory, 2, [], seq=1)
    seq[2] = 2
    copy: dict[bytes, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    position = Position(0)

    def ask() -> None:
        nonlocal position
        found = directory.changes_since(position)
        position = found.position
        assert len(found.entries) + len(found.older) <= 3
        if found.start_over:
            copy.clear()
        for number in found.lost:
            for key, (host, nvme) in list(copy.items()):
                copy[key] = (tuple(n for n in host if n != number), tuple(n for n in nvme if n != number))
        copy.update({key: (host, nvme) for key, host, nvme in found.entries})
        for key, host, nvme in found.older:
            copy.setdefault(key, (host, nvme))

    for _ in range(data.draw(st.integers(0, 40))):
        match data.draw(st.sampled_from(["ask", "tell", "lose", "another"])):
            case "ask":
                ask()
            case "another":
                directory.changes_since(Position(0))
            case "lose":
                directory.node_lost(2)
            case "tell":
                node = data.draw(st.sampled_from([1, 2]))
                seq[node] += 1
                told = tuple(data.draw(st.lists(st.sampled_from(pool), max_size=4, unique=True)))
                where = data.draw(st.sampled_from(["host", "nvme", "gone"]))
                message = Announcement(node, LIFE, seq[node], **{where: told})  # type: ignore[arg-type]
                if question := directory.announce(0, message).question:
                    seq[node] += 1
                    directory.announce(0, replace(message, seq=seq[node], answers=question))
        directory.validate()
    for _ in range(40):
        ask()
    assert position == directory.changes_since(position).position
    held = {key: places for key, places in copy.items() if any(places)}
    assert held == {key: (one.host, one.nvme) for key, one in directory._index.items()}


def test_limits_are_checked() -> None:
    for name in ("max_keys", "max_holders", "max_nodes", "log_keys", "changes", "silent_us"):
        with pytest.raises(StoreConfigError, match=f"{name} is 0; it must be 1 or more"):
            shard(**{name: 0})
    with pytest.raises(StoreConfigError, match="node is -1; it must be 0 or more"):
        AnnouncerConfig(-1)
    with pytest.raises(StoreConfigError, match="num_shards is 0; it must be 1 or more"):
        AnnouncerConfig(0, 0)


def test_the_end_of_a_key_names_its_shard() -> None:
    assert [shard_of(b"k" * 30 + end, 3) for end in (b"\0\0", b"\1\0", b"\0\1")] == [0, 1, 256 % 3]


def test_an_entry_takes_less_than_400_bytes() -> None:
    """So 10^6 entries stay below 400 MiB; five nodes hold different parts."""
    directory = shard()
    chain = keys(20_000)
    tracemalloc.start()
    try:
        for node in range(5):
            begin(directory, node, [bytes(bytearray(key)) for key in chain[node * 2000 :]])
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used / len(chain) < 400


# ---- the announcing side


def test_a_store_tells_who_polls_it_and_hears_what_shards_reply(store: Store) -> None:
    """Behind a socket or not; replies of shards that are not there, and of other lives, do no harm."""
    store.start()
    directories, chain = [shard(), shard()], keys(8)
    write(store.attach(writer()), chain)
    heard: tuple[tuple[int, Heard], ...] = ((2, Heard(1, 1, 1)), ((1 << 32) - 1, Heard(1, 1, 1)), (0, Heard(1, 1, 1)))
    for _ in range(3):
        found: Announcements = store.ask(PollAnnouncements(4, 2, heard))
        heard = tuple((number, directories[number].announce(0, message)) for number, message in found.messages)
    for key in chain:
        assert directories[shard_of(key, 2)].lookup([key]) == [Run(1, (4,), ())]
    assert not any(message.host for _, message in store.ask(PollAnnouncements(4, 2)).messages), "once"
    (anew,) = store.ask(PollAnnouncements(5, 1)).messages
    assert (anew[0], anew[1].node, anew[1].seq > 1) == (0, 5, True), "another node's is another announcer"
    assert store.status().clients == 1, "who polls is no client"


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Store]:
    """A store in this process that keeps its folder: 32 slots, then NVMe."""
    found = Store("local", tmp_path)
    yield found
    found.close()


def start(store: Store) -> StoreShell:
    """Start it, or start it again."""
    store.start(32 * SLOT, NvmeConfig(persist=True), nvme_bytes=8 << 20, segment_bytes=1 << 20, max_lent_share=0.5)
    assert store.local is not None
    return store.local.shell


def test_a_store_tells_what_came_moved_and_went(local: Store) -> None:
    shell = start(local)
    announcer, directory, chain = shell.announce(AnnouncerConfig(4)), shard(), keys(40)
    rank = local.attach(writer())
    for first in range(0, 40, 8):
        assert write(rank, chain[first : first + 8], first + 1) == 8
        local.wait_for_disk()
    connect(directory, announcer, 0)
    tiers = {key: directory.lookup([key])[0] for key in chain}
    assert tiers[chain[0]] == Run(1, (), (4,)), "the first had to make room"
    assert tiers[chain[-1]] == Run(1, (4,), ())
    version = shell.core.residency.index.by_key[chain[-1]].version
    rank.forget(chain[-1], version)
    local.status()
    connect(directory, announcer, 0)
    assert directory.lookup([chain[-1]]) == []
    shell.core.clear()
    connect(directory, announcer, 0)
    assert len(directory) == announcer.num_changed == 0


def test_a_new_store_tells_what_it_found_in_its_folder(local: Store) -> None:
    shell = start(local)
    directory, chain = shard(), keys(8)
    write(local.attach(writer()), chain)
    connect(directory, shell.announce(AnnouncerConfig(0)), 0)
    assert directory.lookup(chain) == [Run(8, (0,), ())]
    local.close()
    connect(directory, start(local).announce(AnnouncerConfig(0)), 0)
    assert directory.lookup(chain) == [Run(8, (), (0,))]


def test_another_configuration_of_the_same_store_is_heard_too(local: Store) -> None:
    shell, directory = start(local), shard()
    announcer = shell.announce(AnnouncerConfig(4))
    assert shell.announce(AnnouncerConfig(4)) is announcer
    for now_us in range(0, 10_000_000, 2_000_000):
        connect(directory, announcer, now_us)
    write(local.attach(writer()), keys(1))
    connect(directory, shell.announce(AnnouncerConfig(4, batch=7)), 0)
    assert len(directory) == 1


def test_without_a_directory_nothing_is_gathered_and_nobody_who_polls_is_needed(local: Store) -> None:
    shell = start(local)
    assert shell.announcer is shell.core.residency.on_changed is None
    announcer = shell.announce(AnnouncerConfig(0, max_changed=4))
    write(local.attach(writer()), keys(8))
    local.wait_for(lambda _: announcer.stats.overflows > 0)
    assert announcer.num_changed <= 4


def announcer_of(count: int, **limits: int) -> tuple[Announcer, list[bytes]]:
    """An announcer whose store seems to hold `count` keys that changed."""
    residency = Residency(StoreConfig(1 << 20), make_eviction("lru"))
    announcer = Announcer(AnnouncerConfig(0, **limits), LIFE, residency)
    chain = keys(count)
    for key in chain:
        assert residency.on_changed is not None
        residency.on_changed(key)
    return announcer, chain


def test_changes_are_told_in_batches_and_once() -> None:
    announcer, chain = announcer_of(5, batch=2)
    told = [message.gone for _ in range(4) for _, message in announcer.poll(0)]
    assert told == [tuple(chain[:2]), tuple(chain[2:4]), tuple(chain[4:])]
    assert announcer.poll(999_999) == []
    assert [message.seq for _, message in announcer.poll(1_000_000)] == [4], "a sign of life"


def test_each_shard_is_told_its_own_in_its_own_numbers() -> None:
    announcer, chain = announcer_of(20, num_shards=3)
    out = dict(announcer.poll(0))
    assert {number: message.seq for number, message in out.items()} == {0: 1, 1: 1, 2: 1}
    assert sorted(key for message in out.values() for key in message.gone) == sorted(chain)
    assert all(shard_of(key, 3) == number for number, message in out.items() for key in message.gone)


def test_an_overflow_leaves_a_number_out() -> None:
    announcer, _ = announcer_of(5, max_changed=4)
    assert [(message.seq, message.gone) for _, message in announcer.poll(0)] == [(2, ())]
    assert announcer.stats.overflows == 1


def test_late_replies_are_not_heard() -> None:
    announcer, _ = announcer_of(0)
    announcer.poll(0)
    announcer.heard(0, Heard(LIFE + 1, 1, 9))
    assert announcer.poll(1) == []
    announcer.heard(0, Heard(LIFE, 1, 9))
    assert [message.answers for _, message in announcer.poll(2)] == [9]
    announcer.heard(0, Heard(LIFE, 1, 9))
    assert announcer.poll(3) == [], "that question is answered by a later message"
    announcer.heard(0, Heard(LIFE, 2, 10))
    assert [message.answers for _, message in announcer.poll(4)] == [10]
