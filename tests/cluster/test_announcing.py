"""The pump between a store and the shards of a directory, without Ray: what it does when, and that under faults of the
network, of shards and of the store the directory ends up knowing what the store holds.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kvstore.store_harness import SLOT, keys, write, writer
from tournant.cluster.announcing import ALONE_S, BUSY_S, IDLE_S, MUCH_KEYS, MUCH_S, Announcing, Replies
from tournant.cluster.node_store import StorePlan
from tournant.kvstore import admin_desk
from tournant.kvstore.admin import Announcements, Clear, PollAnnouncements
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.directory import MAX_SHARDS, Announcement, Directory, DirectoryConfig, Heard, shard_of
from tournant.kvstore.errors import StoreConfigError, StoreUnavailable
from tournant.kvstore.local_store import LocalStore
from tournant.kvstore.wire import FRAME_HEADER, decode_answer, decode_request, encode

NODE, NUM_SHARDS = 7, 2
CHAIN = keys(24)
ROUND_US = 300_000
QUIET_ROUNDS = 16  # a heartbeat, a question, everything; what is late then


# -------------------------------------------------------------------- what it does when


class Recorded:
    """Shards that note what they are told."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Announcement]] = []
        self.coming: list[tuple[int, Heard]] = []
        self.left = 0

    def send(self, shard: int, message: Announcement) -> None:
        self.sent.append((shard, message))

    def replies(self) -> Replies:
        found, self.coming = self.coming, []
        return found

    def leave(self) -> None:
        self.left += 1


def told(*messages: tuple[int, Announcement]) -> Announcements:
    return Announcements(messages)


def announcing(
    poll: Callable[[Replies], Announcements], shards: Recorded, is_alone: Callable[[], bool] = lambda: False
) -> Announcing:
    return Announcing(poll, shards, NUM_SHARDS, is_alone)


def test_nothing_is_asked_until_another_node_is_there_and_then_for_good() -> None:
    looks, polls = [True, True, False], []
    pump = announcing(lambda heard: polls.append(heard) or told(), Recorded(), lambda: looks.pop(0))  # type: ignore[func-returns-value]
    assert [pump.round(), pump.round()] == [ALONE_S, ALONE_S]
    assert polls == []
    pump.round()
    pump.round()
    assert (looks, len(polls)) == ([], 2)


def test_messages_go_to_their_shards_and_replies_to_the_store() -> None:
    shards, asked = Recorded(), []
    out = told((1, Announcement(NODE, 1, 1)), (NUM_SHARDS, Announcement(NODE, 1, 1)), (0, Announcement(NODE, 1, 2)))

    def poll(heard: Replies) -> Announcements:
        asked.append(list(heard))
        return out

    pump = announcing(poll, shards)
    pump.round()
    assert [shard for shard, _ in shards.sent] == [1, 0], "there is no third shard"
    shards.coming = [(1, Heard(1, 1, 5))]
    pump.round()
    assert asked == [[], [(1, Heard(1, 1, 5))]]


def test_the_next_round_is_soon_while_something_changes_and_later_each_time_while_nothing_does() -> None:
    answers = [
        told((0, Announcement(NODE, 1, 1, gone=(CHAIN[0],) * MUCH_KEYS))),
        told((0, Announcement(NODE, 1, 2, host=(CHAIN[0],)))),
        told((0, Announcement(NODE, 1, 3, answers=9))),
        told((0, Announcement(NODE, 1, 4))),  # a sign of life
        *[told()] * 3,
        told(*((shard, Announcement(NODE, 1, 5, nvme=(CHAIN[0],))) for shard in range(NUM_SHARDS))),
    ]
    pump = announcing(lambda heard: answers.pop(0), Recorded())
    pauses = [pump.round() for _ in range(len(answers))]
    assert pauses == [MUCH_S, BUSY_S, BUSY_S, 2 * BUSY_S, IDLE_S, IDLE_S, IDLE_S, 2 * BUSY_S]


def test_a_store_that_is_not_there_is_asked_again() -> None:
    def poll(heard: Replies) -> Announcements:
        raise StoreUnavailable("it starts")

    assert announcing(poll, Recorded()).round() == IDLE_S


@pytest.fixture
def ended() -> Iterator[list[Announcing]]:
    """Pumps that end with the test."""
    pumps: list[Announcing] = []
    yield pumps
    for pump in pumps:
        pump.stop()


def test_the_thread_goes_on_whatever_fails_and_says_goodbye_once(
    ended: list[Announcing], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tournant.cluster.announcing.IDLE_S", 0.0)
    failures, enough, shards = [ValueError("broken"), KeyError("too")], threading.Event(), Recorded()

    def poll(heard: Replies) -> Announcements:
        if failures:
            raise failures.pop()
        enough.set()
        return told()

    pump = announcing(poll, shards)
    ended.append(pump)
    pump.start()
    assert enough.wait(30)
    assert caplog.text.count("announcing to the directory failed") == 2
    pump.stop()
    pump.stop()
    assert shards.left == 1


def test_stop_does_not_wait_for_a_store_that_hangs(ended: list[Announcing], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tournant.cluster.announcing.STOP_S", 0.01)
    asked, goes_on, shards = threading.Event(), threading.Event(), Recorded()

    def poll(heard: Replies) -> Announcements:
        asked.set()
        goes_on.wait(30)
        return told((0, Announcement(NODE, 1, 1)))

    pump = announcing(poll, shards)
    pump.start()
    assert asked.wait(30)
    pump.stop()
    assert shards.left == 1
    goes_on.set()


def test_a_node_that_was_alone_says_no_goodbye() -> None:
    shards = Recorded()
    pump = announcing(lambda heard: told(), shards, lambda: True)
    pump.round()
    pump.stop()
    assert shards.left == 0


@pytest.mark.parametrize("count", [-1, MAX_SHARDS + 1])
def test_the_number_of_shards_has_limits(count: int) -> None:
    with pytest.raises(StoreConfigError, match=rf"directory_shards is {count}; it must be 0 to {MAX_SHARDS}"):
        StorePlan(StoreConfig(1 << 20), directory_shards=count)


# -------------------------------------------------------------------- under faults


class World:
    """A store in this process, shards, and a network that drops, repeats, delays and reorders what goes either way."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_us = 1_000_000_000
        self.faults = True
        self.lives = self.written = 0
        self._requests: list[tuple[int, int, Announcement]] = []  # rounds until it arrives, shard, message
        self._replies: list[tuple[int, int, Heard]] = []
        self.shards = [self._new_shard() for _ in range(NUM_SHARDS)]
        self.store = self._new_store()
        self.pump = Announcing(self._poll, self, NUM_SHARDS, lambda: False)

    # ---- the network, see announcing.Shards

    def send(self, shard: int, message: Announcement) -> None:
        for delay in self._copies():
            self._requests.append((delay, shard, message))

    def replies(self) -> Replies:
        for _, shard, message in self._due(self._requests):
            reply = self.shards[shard].announce(self.now_us, message)
            for delay in self._copies():
                self._replies.append((delay, shard, reply))
        return tuple((shard, reply) for _, shard, reply in self._due(self._replies))

    def leave(self) -> None:
        for shard in self.shards:
            shard.node_lost(NODE)

    def _copies(self) -> list[int]:
        """After how many rounds each copy of a message arrives; none when it is lost."""
        chance = self.rng.randrange(8) if self.faults else 9
        if chance == 0:
            return []
        late = self.rng.randrange(1, 5) if chance == 1 else 0
        return [late, self.rng.randrange(4)] if chance == 2 else [late]

    def _due(self, waiting: list[tuple[int, int, object]] | list) -> list:  # type: ignore[type-arg]
        """Take out what arrives now, in any order."""
        due = [one for one in waiting if one[0] <= 0]
        waiting[:] = [(one[0] - 1, *one[1:]) for one in waiting if one[0] > 0]
        if self.faults:
            self.rng.shuffle(due)
        return due

    # ---- the store

    def _new_store(self) -> LocalStore:
        self.lives += 1
        store = LocalStore(StoreConfig(16 * SLOT, max_lent_share=0.5))
        self.rank = store.attach(writer(credit=4))
        return store

    def _poll(self, heard: Replies) -> Announcements:
        """As over the socket."""
        if self.faults and self.rng.randrange(10) == 0:
            raise StoreUnavailable("not now")
        query = decode_request(encode(PollAnnouncements(NODE, NUM_SHARDS, tuple(heard)))[FRAME_HEADER.size :], 0)
        answer = self.store.ask(cast(PollAnnouncements, query))
        return cast(Announcements, decode_answer(encode(answer)[FRAME_HEADER.size :]))

    @staticmethod
    def _new_shard() -> Directory:
        return Directory(DirectoryConfig(), random.getrandbits(64))

    # ---- what happens

    def step(self, event: int) -> None:
        """Something happens, and a round."""
        if event < 5:
            first = self.rng.randrange(len(CHAIN) - 4)
            self.written += write(self.rank, CHAIN[first : first + 4], self.written + 1)
        elif event == 5:
            for key, group in list(self.store.shell.core.residency.index.by_key.items())[:3]:
                self.rank.forget(key, group.version)
        elif event == 6:
            self.store.ask(Clear())
        elif event == 7:
            self.store.close(0)
            self.store = self._new_store()
        elif event == 8:
            self.shards[self.rng.randrange(NUM_SHARDS)] = self._new_shard()
        else:
            self.shards[self.rng.randrange(NUM_SHARDS)].node_lost(NODE)
        self.round()

    def round(self) -> None:
        self.now_us += ROUND_US
        self.pump.round()

    def held(self) -> set[bytes]:
        """What can be read from the store."""
        index = self.store.shell.core.residency.index
        return {key for key, group in index.by_key.items() if group.complete and group.in_host}

    def listed(self) -> set[bytes]:
        found = set()
        for key in CHAIN:
            for run in self.shards[shard_of(key, NUM_SHARDS)].lookup([key]):
                assert (run.host, run.nvme) == ((NODE,), ())
                found.add(key)
        return found


@given(st.integers(0, 1 << 32), st.lists(st.integers(0, 9), max_size=25))
def test_after_a_while_without_faults_the_directory_knows_what_the_store_holds(seed: int, events: list[int]) -> None:
    world = World(seed)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(admin_desk, "now_us", lambda: world.now_us)
            for event in events:
                world.step(event)
            world.faults = False
            for _ in range(QUIET_ROUNDS):
                world.round()
        assert world.listed() == world.held()
        assert sum(map(len, world.shards)) == len(world.held())
        for shard in world.shards:
            shard.validate()
    finally:
        world.store.close(0)


def test_the_faults_of_that_world_are_seen_by_its_shards() -> None:
    """Else the property above would say nothing: messages get lost, come twice, and are asked for again."""
    world = World(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(admin_desk, "now_us", lambda: world.now_us)
            for _ in range(60):
                world.step(world.rng.randrange(7))
    finally:
        world.store.close(0)
    assert sum(shard.stats.questions for shard in world.shards) > 4
    assert sum(shard.stats.stale for shard in world.shards) > 4


def test_a_goodbye_empties_the_directory() -> None:
    world = World(2)
    try:
        world.faults = False
        write(world.rank, CHAIN[:4])
        for _ in range(3):
            world.round()
        assert world.listed() == set(CHAIN[:4])
        world.pump.stop()
        assert world.listed() == set()
    finally:
        world.store.close(0)
