"""What a router knows, and that it does not drift from what the directory knows, whatever happens on the way."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kvstore.store_harness import keys
from tournant.cluster import index_feed
from tournant.cluster.index_feed import ABSENT_S, POLL_S, START, IndexFeed, NoAnswer, shared_feed
from tournant.cluster.router_index import DirectoryCopy, IndexConfig, Prefix, RouterIndex
from tournant.kvstore.directory import Announcement, Changes, Directory, DirectoryConfig, Position, shard_of
from tournant.workers.errors import ConfigError

CHAIN = [key[:-2] + b"\x01\x01" for key in keys(12)]
SHARDS = 2
POOL = [key[:-2] + bytes([number % SHARDS, 0]) for number, key in enumerate(keys(40, "pool"))]
PLENTY, FEW = DirectoryConfig(max_keys=24, log_keys=6, changes=100), DirectoryConfig(max_keys=24, log_keys=9, changes=2)


def copy_with(*entries: tuple[bytes, tuple[int, ...], tuple[int, ...]]) -> DirectoryCopy:
    copy = DirectoryCopy(1)
    copy.apply(0, Changes(Position(1), True, (), entries))
    return copy


# -------------------------------------------------------------------- look-up


def test_leading_blocks_are_counted_by_the_fastest_tier_each_is_in() -> None:
    entries = [(key, (1, 2), ()) for key in CHAIN[:4]] + [(key, (2,), (1,)) for key in CHAIN[4:8]]
    index = RouterIndex(copy_with(*entries))
    index.note("a", CHAIN[:2])
    index.note("c", CHAIN[:10])
    found = index.lookup(CHAIN, [("a", 1), ("b", 2), ("c", 3), ("d", None)])
    assert found == [Prefix(2, 2, 4), Prefix(0, 8, 0), Prefix(10, 0, 0), Prefix()]


def test_a_node_goes_on_where_the_device_ends_and_nothing_counts_behind_a_gap() -> None:
    entries = [(key, (1,), ()) for key in CHAIN[4:6] + CHAIN[7:]]
    index = RouterIndex(copy_with(*entries))
    assert index.lookup(CHAIN, [("a", 1)]) == [Prefix()]
    index.note("a", CHAIN[:4])
    assert index.lookup(CHAIN, [("a", 1), ("b", 1)]) == [Prefix(4, 2, 0), Prefix()]
    assert index.lookup([], [("a", 1)]) == [Prefix()]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[tuple[bytes, tuple[int, ...], tuple[int, ...]]], list[int]]:
    places = st.sampled_from([(), (0,), (1,), (0, 1)])
    entries = []
    for key in CHAIN:
        host = draw(places)
        nvme = tuple(node for node in draw(places) if node not in host)
        if host or nvme:
            entries.append((key, host, nvme))
    return entries, draw(st.lists(st.integers(0, len(CHAIN)), min_size=2, max_size=2))


@given(worlds(), st.integers(1, len(CHAIN)))
def test_a_look_up_is_what_counting_block_by_block_gives(
    world: tuple[list[tuple[bytes, tuple[int, ...], tuple[int, ...]]], list[int]], probes: int
) -> None:
    entries, sent = world
    held = {key: (host, nvme) for key, host, nvme in entries}
    exact, coarse = (RouterIndex(copy_with(*entries), IndexConfig(max_probes=most)) for most in (len(CHAIN), probes))
    for index in (exact, coarse):
        for node, count in enumerate(sent):
            index.note(f"r{node}", CHAIN[:count])
    replicas = [(f"r{node}", node) for node in (0, 1)]
    stride = -(-len(CHAIN) // probes)
    for node, found, rough in zip((0, 1), exact.lookup(CHAIN, replicas), coarse.lookup(CHAIN, replicas), strict=True):
        counts = [sent[node], 0, 0]
        for key in CHAIN[sent[node] :]:
            host, nvme = held.get(key, ((), ()))
            if node not in host and node not in nvme:
                break
            counts[1 if node in host else 2] += 1
        assert found == Prefix(*counts)
        assert rough.device == sent[node] // stride * stride, "whole strides, rounded down"


def test_hints_are_bounded_and_leave_from_the_ends_of_the_oldest_chains() -> None:
    index = RouterIndex(DirectoryCopy(0), IndexConfig(max_hints=16))
    first, second = CHAIN, [key[:-2] + b"\x02\x02" for key in keys(8, "second")]
    index.note("a", first)
    index.note("a", second)
    index.validate()
    ((old, _, _), (new, _, _)) = (index.lookup(chain, [("a", None)])[0] for chain in (first, second))
    assert new == 8
    assert 0 < old <= 8
    index.note("b", first)
    index.validate()
    assert sum(index.lookup(first, [("b", None)])[0]) == 8, "the others make room"
    index.note("b", second, capacity=3)
    assert sum(index.lookup(second, [("b", None)])[0]) == 3
    index.keep(["b"])
    assert index.lookup(second, [("a", None), ("b", None)]) == [Prefix(), Prefix(3)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=30), st.integers(1, 20))
def test_a_hint_has_hints_of_all_before_it(notes: list[tuple[int, int]], most: int) -> None:
    index = RouterIndex(DirectoryCopy(0), IndexConfig(max_hints=most))
    chains = [CHAIN[:4] + [bytes([branch]) + key[1:] for key in CHAIN[4:]] for branch in range(4)]
    for branch, length in notes:
        index.note("a", chains[branch][:length])
        index.validate()
    for chain in chains:
        kept = [sum(index.lookup([key], [("a", None)])[0]) for key in chain]
        assert kept == sorted(kept, reverse=True)


def test_the_copy_keeps_what_was_said_last() -> None:
    copy = DirectoryCopy(1, max_keys=8)
    first, second = (tuple((key, (1,), ()) for key in reversed(part)) for part in (CHAIN[4:8], CHAIN[:4]))
    copy.apply(0, Changes(Position(1), True, (), (), first))
    assert not copy.full(0)
    copy.apply(0, Changes(Position(1), False, (), (), second))
    assert copy.full(0)
    copy.apply(0, Changes(Position(2), False, (), ((CHAIN[8], (1,), ()),)))
    copy.validate()
    assert [sum(run.num_keys for run in copy.runs([key], 0)) for key in CHAIN[:9]] == [0] + [1] * 8


@pytest.mark.parametrize("name", ["max_keys", "max_hints", "max_probes"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} of a router is 0"):
        IndexConfig(**{name: 0})


# -------------------------------------------------------------------- no drift


class Shards:
    """The real shards of a directory, which may be restarted, or not answer."""

    def __init__(self, config: DirectoryConfig) -> None:
        self.config = config
        self.lives = 0
        self.cores = [self._new() for _ in range(SHARDS)]
        self.answers: dict[int, NoAnswer] = {}
        self.asked: list[Mapping[int, Position]] = []
        self._seq: dict[tuple[int, int], int] = {}

    def _new(self) -> Directory:
        self.lives += 1
        return Directory(self.config, self.lives << 40)

    def restart(self, shard: int) -> None:
        self.cores[shard] = self._new()

    def tell(self, shard: int, node: int, where: str, told: Sequence[bytes]) -> None:
        chosen = tuple(key for key in told if shard_of(key, SHARDS) == shard)
        answers = 0
        while True:
            seq = self._seq[shard, node] = self._seq.get((shard, node), 0) + 1
            message = Announcement(node, 1, seq, **{where: chosen}, answers=answers)  # type: ignore[arg-type]
            answers = self.cores[shard].announce(0, message).question
            if not answers:
                return

    def read(self, positions: Mapping[int, Position]) -> Mapping[int, Changes | NoAnswer]:
        self.asked.append(dict(positions))
        return {
            shard: self.answers.get(shard) or self.cores[shard].changes_since(position)
            for shard, position in positions.items()
        }


def known(world: Shards, key: bytes) -> list[tuple[object, object]]:
    return [(run.host, run.nvme) for run in world.cores[shard_of(key, SHARDS)].lookup([key])]


def copied(copy: DirectoryCopy, key: bytes) -> list[tuple[object, object]]:
    return [(run.host, run.nvme) for run in copy.runs([key], 0)]


some_keys = st.lists(st.sampled_from(POOL), max_size=8)
actions = st.one_of(
    st.tuples(
        st.just("tell"), st.integers(0, 1), st.integers(0, 2), st.sampled_from(["host", "nvme", "gone"]), some_keys
    ),
    st.tuples(st.sampled_from(["restart", "dead", "late", "absent", "heal"]), st.integers(0, 1)),
    st.tuples(st.just("lose"), st.integers(0, 1), st.integers(0, 2)),
    st.tuples(st.just("round"), st.floats(0, 5)),
)


def act(world: Shards, feed: IndexFeed, now: list[float], action: tuple[object, ...]) -> None:
    match action:
        case ("tell", int(shard), int(node), str(where), list(told)):
            world.tell(shard, node, where, told)
        case ("restart", int(shard)):
            world.restart(shard)
        case ("lose", int(shard), int(node)):
            world.cores[shard].node_lost(node)
        case ("heal", int(shard)):
            world.answers.pop(shard, None)
        case ("round", float(pause)):
            now[0] += pause
            feed.round()
        case (str(name), int(shard)):
            world.answers[shard] = NoAnswer[name.upper()]


def agree(
    config: DirectoryConfig, history: Sequence[tuple[object, ...]], max_keys: int
) -> tuple[Shards, DirectoryCopy]:
    world, now = Shards(config), [0.0]
    copy = DirectoryCopy(SHARDS, max_keys)
    feed = IndexFeed(world, copy, clock=lambda: now[0])
    for action in history:
        act(world, feed, now, action)
        copy.validate()
    world.answers.clear()
    for _ in range(20):  # pages of 2 changes, of a log of 9
        feed.round()
    for core in world.cores:
        core.validate()
    copy.validate()
    assert not any(copy.silent([key]) for key in POOL)
    return world, copy


@settings(max_examples=100, deadline=None)
@given(st.lists(actions, max_size=40), st.sampled_from([PLENTY, FEW]))
def test_a_copy_agrees_with_the_directory_whatever_has_happened(
    history: list[tuple[object, ...]], config: DirectoryConfig
) -> None:
    world, copy = agree(config, history, 1000)
    for key in POOL:
        assert copied(copy, key) == known(world, key)


@settings(max_examples=100, deadline=None)
@given(st.lists(actions, max_size=40))
def test_what_a_small_copy_has_no_room_for_is_not_known_and_nothing_is_wrong(
    history: list[tuple[object, ...]],
) -> None:
    world, copy = agree(FEW, history, 8)
    for key in POOL:
        assert copied(copy, key) in ([], known(world, key))


def test_all_of_a_long_log_is_read_in_one_round() -> None:
    world = Shards(DirectoryConfig(changes=4))
    feed = IndexFeed(world, DirectoryCopy(SHARDS))
    feed.round()
    for key in POOL[:20]:
        world.tell(0, 1, "host", [key])
    world.asked.clear()
    feed.round()
    assert [copied(feed.copy, key) for key in POOL[:20:2]] == [[((1,), ())]] * 10
    assert [len(asked) for asked in world.asked] == [2, 1, 1, 1], "only who had more to say is asked again"


def test_a_new_router_knows_all_of_a_large_shard_after_a_few_rounds_or_as_much_as_it_has_room_for() -> None:
    count = 20_000
    chains = [number.to_bytes(30, "little") + bytes([0, 0]) for number in range(count)]
    world = Shards(DirectoryConfig(changes=512))
    world.tell(0, 1, "host", chains)
    feeds = [IndexFeed(world, DirectoryCopy(SHARDS, most)) for most in (2 * count + 2000, count)]
    rounds = [0, 0]
    for place, feed in enumerate(feeds):
        while not rounds[place] or feed._positions[0].given is not None:
            feed.round()
            rounds[place] += 1
            feed.copy.validate()
    assert rounds == [-(-count // 512 // 8), -(-count // 2 // 512 // 8)]
    whole, half = (feed.copy for feed in feeds)
    assert len(whole) == count
    room = count // 2
    assert room - room // 64 <= len(half) <= room
    assert all(copied(half, key) for key in chains[-len(half) :]), "what was announced last"


def test_who_finds_no_directory_asks_more_seldom() -> None:
    world = Shards(PLENTY)
    feed = IndexFeed(world, DirectoryCopy(SHARDS))
    assert feed.round() == POLL_S
    world.answers = dict.fromkeys(range(SHARDS), NoAnswer.ABSENT)
    assert feed.round() == ABSENT_S
    world.answers[0] = NoAnswer.DEAD
    assert feed.round() == POLL_S


@pytest.mark.parametrize("answer", list(NoAnswer))
def test_a_shard_that_does_not_answer_takes_its_own_entries_alone(answer: NoAnswer) -> None:
    world, now = Shards(PLENTY), [0.0]
    feed = IndexFeed(world, DirectoryCopy(SHARDS), silent_s=3, clock=lambda: now[0])
    for shard in range(SHARDS):
        world.tell(shard, 1, "host", POOL[:4])
    feed.round()
    world.answers[0] = answer
    mine, other = POOL[0], POOL[1]
    feed.round()
    if answer is NoAnswer.LATE:
        assert copied(feed.copy, mine) == [((1,), ())], "once is not silence"
        now[0] += 3.1
        feed.round()
    assert copied(feed.copy, mine) == []
    assert copied(feed.copy, other) == [((1,), ())]
    assert feed.copy.silent([mine]) is (answer is not NoAnswer.ABSENT)
    assert not feed.copy.silent([other])
    assert not feed.copy.silent([])
    world.asked.clear()
    world.answers.clear()
    feed.round()
    assert world.asked[0][0] == START
    assert copied(feed.copy, mine) == [((1,), ())]
    assert not feed.copy.silent([mine])


class Counting:
    """A reader whose first answers are errors. thread: that reads."""

    def __init__(self, errors: int) -> None:
        self.errors = errors
        self.read_on = threading.Event()
        self.thread = threading.current_thread()

    def read(self, positions: Mapping[int, Position]) -> Mapping[int, Changes | NoAnswer]:
        self.thread = threading.current_thread()
        self.errors -= 1
        if self.errors >= 0:
            raise RuntimeError("a fault")
        self.read_on.set()
        return dict.fromkeys(positions, NoAnswer.DEAD)


def test_the_thread_goes_on_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    reader = Counting(errors=1)
    feed = IndexFeed(reader, DirectoryCopy(1), poll_s=0.001)
    feed.start()
    assert reader.read_on.wait(30)
    feed.stop()
    reader.thread.join(30)
    assert not reader.thread.is_alive()
    assert "reading the directory failed" in caplog.text


def test_the_thread_ends_with_its_last_user() -> None:
    reader = Counting(errors=0)
    feed = IndexFeed(reader, DirectoryCopy(1), poll_s=0.001)
    feed.start()
    assert reader.read_on.wait(30)
    del feed
    gc.collect()
    reader.thread.join(30)
    assert not reader.thread.is_alive()


def test_a_process_has_one_feed_for_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[IndexFeed] = []
    monkeypatch.setattr(IndexFeed, "start", lambda self: started.append(self))
    monkeypatch.setattr(index_feed, "RayReader", lambda app: Shards(PLENTY))
    wanted = (("a", 2), ("a", 2), ("b", 2), ("a", 0))
    first, again, other, none = (shared_feed(app, shards) for app, shards in wanted)
    assert first is again
    assert len({id(one) for one in (first, other, none)}) == 3
    assert started == [first, other], "without a directory there is nothing to ask"
