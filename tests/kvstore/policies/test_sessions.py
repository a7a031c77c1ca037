"""Recognising sessions, predicting their return, and ranking blocks by it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kvstore.policies.naive import Driver
from tournant.kvstore.errors import StoreConfigError
from tournant.kvstore.policies.eviction import BlockInfo
from tournant.kvstore.policies.return_index import (
    NUM_BUCKETS,
    at_risk,
    bucket_begin_us,
    bucket_of,
    hazards_counted,
    hazards_of_chance,
    return_index,
)
from tournant.kvstore.policies.session_eviction import SessionEviction
from tournant.kvstore.policies.sessions import ReturnPredictor, SessionConfig, SessionTracker

SECOND = 1_000_000


# ---- idle times and the index


@given(st.integers(0, 1 << 45))
def test_bucket_holds_its_time(idle_us: int) -> None:
    bucket = bucket_of(idle_us)
    assert bucket_begin_us(bucket) <= idle_us
    assert bucket == NUM_BUCKETS - 1 or idle_us < bucket_begin_us(bucket + 1)


def test_hazards_of_chance_give_the_chance_back() -> None:
    gaps = [0.0] * NUM_BUCKETS
    gaps[5], gaps[9], gaps[20] = 1.0, 2.0, 1.0
    away = 1.0
    for hazard in hazards_of_chance(0.3, gaps):
        away *= 1.0 - hazard
    assert away == pytest.approx(0.7)


def test_index_of_a_sure_return() -> None:
    """Certain to return in bucket 10: at its begin the index is one hit in half the bucket; earlier it waits longer."""
    hazards = [0.0] * NUM_BUCKETS
    hazards[10] = 1.0
    index = return_index(hazards)
    half_s = (bucket_begin_us(11) - bucket_begin_us(10)) / 2e6
    assert index[10] == pytest.approx(1 / half_s)
    assert index[0] == pytest.approx(1 / (bucket_begin_us(10) / 1e6 + half_s))
    assert index[11] == 0.0
    assert index[:11] == sorted(index[:11])


def test_falling_hazard_ranks_as_lru() -> None:
    index = return_index([0.1] * NUM_BUCKETS)  # the same per bucket, and buckets grow
    assert index[2:] == sorted(index[2:], reverse=True)


def test_at_risk_counts_by_hand() -> None:
    returned, censored = [0.0] * NUM_BUCKETS, [0.0] * NUM_BUCKETS
    returned[1], returned[3], censored[2] = 4.0, 1.0, 2.0
    risk = at_risk(returned, censored)
    assert risk[:5] == [7.0, 7.0, 2.0, 1.0, 0.0]
    hazards = hazards_counted(returned, risk, [0.0] * NUM_BUCKETS)
    assert hazards[1] == pytest.approx(4 / 15)


# ---- sessions


def test_turns_are_recognised_by_the_prompt_before() -> None:
    tracker = SessionTracker()
    first, none = tracker.begin((1, 2, 3), 0)
    other, _ = tracker.begin((7, 8), SECOND)
    second, previous = tracker.begin((1, 2, 3, 4, 5), 9 * SECOND)
    assert (none, first.turn, other.turn) == (None, 1, 1)
    assert (previous, second.turn) == (first, 2)
    assert first.returned
    assert not other.returned
    assert tracker.session_of(2) is second
    assert tracker.session_of(8) is other
    assert tracker.session_of(99) is None
    tracker.validate()


def test_a_replaced_last_block_does_not_hide_the_session() -> None:
    """The end of a prompt may be a template that the next turn does not repeat."""
    tracker = SessionTracker()
    first, _ = tracker.begin((1, 2, 3), 0)
    _, previous = tracker.begin((1, 2, 30, 40), SECOND)
    assert previous is first


def test_a_turn_is_continued_once() -> None:
    tracker = SessionTracker()
    tracker.begin((1, 2, 3), 0)
    tracker.begin((1, 2, 3, 4, 5), SECOND)
    fork, previous = tracker.begin((1, 2, 3, 9, 10), 2 * SECOND)
    assert previous is None
    assert fork.turn == 1


def test_shared_keys_are_no_anchors() -> None:
    tracker = SessionTracker(shared=lambda key: key == 1)
    tracker.begin((1,), 0)
    _, previous = tracker.begin((1, 2), SECOND)
    assert previous is None


def test_memory_is_bounded() -> None:
    tracker = SessionTracker(SessionConfig(max_sessions=10, max_expected=50))
    for number in range(1000):
        tracker.begin(tuple(range(number * 4, number * 4 + 4)), number * SECOND)
        tracker.validate()
    assert tracker.session_of(3999) is not None
    assert tracker.session_of(0) is None
    assert tracker.begin((0, 1, 2, 3, 4000), 1000 * SECOND)[1] is None  # forgotten


def test_nothing_is_learnt_before_it_is_known() -> None:
    """The prediction for a request is the same whatever comes after it, and changes with what came before."""
    rng = random.Random(5)
    chains = [tuple(range(i * 10, i * 10 + rng.randrange(1, 9))) for i in range(300)]
    futures = [
        [(number * SECOND, chains[number]) for number in range(200, 300)],
        [(number * SECOND, (*chains[number - 200], 90_000 + number)) for number in range(200, 300)],
    ]
    seen = []
    for future in futures:
        tracker = SessionTracker()
        chances = [tracker.begin(chain, number * SECOND)[0].chance for number, chain in enumerate(chains[:200])]
        later = [tracker.begin(chain, now)[0].chance for now, chain in future]
        seen.append((chances, later))
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] != seen[1][1]


def test_predictor_learns_who_returns() -> None:
    """Short first turns return after 10 s, long ones never do."""
    tracker = SessionTracker()
    key, now_us = 0, 0
    for _ in range(200):
        short, long = tuple(range(key, key + 4)), tuple(range(key + 10, key + 40))
        key += 100
        tracker.begin(short, now_us)
        tracker.begin(long, now_us + SECOND)
        tracker.begin((*short, key - 1), now_us + 10 * SECOND)
        now_us += 20 * SECOND
    chance = tracker.predictor.chance
    features = ReturnPredictor.features
    assert chance(features(1, 0, 4, 0)) > 0.8
    assert chance(features(1, 0, 30, 0)) < 0.2


def test_gone_sessions_that_return_after_all_are_learnt_too() -> None:
    tracker = SessionTracker()
    before = tracker.predictor.chance(ReturnPredictor.features(1, 0, 3, 0))
    first, _ = tracker.begin((1, 2, 3), 0)
    tracker.begin((50,), 3600 * SECOND)  # long past the time to count as gone
    gone = tracker.predictor.chance(first.features)
    tracker.begin((1, 2, 3, 4), 3700 * SECOND)
    assert gone < before
    assert tracker.predictor.chance(first.features) > gone


@pytest.mark.parametrize(
    ("field", "value"), [("learning_rate", 0.0), ("num_chances", 0), ("max_sessions", 0), ("gone_after_medians", -1.0)]
)
def test_config_is_checked(field: str, value: float) -> None:
    with pytest.raises(StoreConfigError, match=field):
        SessionConfig(**{field: value})  # type: ignore[arg-type]


# ---- eviction


def keys_by_order(driver: Driver) -> list[int]:
    return [driver.key_of[block] for block in driver.policy.victims()]


def test_blocks_leave_by_depth_however_they_came() -> None:
    """An engine stores blocks as it computes them, head first, over several steps."""
    for order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 3, 0, 1, 4), (3, 4, 0, 1, 2)):
        driver = Driver(SessionEviction(), 10)
        keys = tuple(range(100, 105))
        driver.policy.begin_request(keys, 0)
        driver.policy.touch_run([], 0)
        for depth in order:
            driver.insert(keys[depth], depth, BlockInfo(), depth)
        driver.check()
        assert keys_by_order(driver) == [104, 103, 102, 101, 100]


def test_blocks_that_come_late_join_their_own_session() -> None:
    driver = Driver(SessionEviction(), 10)
    driver.request((1, 2), BlockInfo(), 0)
    driver.policy.begin_request((50, 51), SECOND)
    driver.policy.begin_request((1, 2, 3), 9 * SECOND)
    driver.policy.touch_run([driver.block_of[2], driver.block_of[1]], 9 * SECOND)
    driver.insert(51, 1, BlockInfo(), 10 * SECOND)
    driver.insert(50, 0, BlockInfo(), 10 * SECOND)
    driver.insert(3, 2, BlockInfo(), 11 * SECOND)
    driver.check()
    order = keys_by_order(driver)
    assert order in ([51, 50, 3, 2, 1], [3, 2, 1, 51, 50])


def test_blocks_without_a_request_are_kept_too() -> None:
    """Reloads and adopted blocks come with no request that is remembered."""
    driver = Driver(SessionEviction(), 10)
    driver.insert(1, 0, BlockInfo(), 0)
    driver.insert(2, 1, BlockInfo(), 0)
    driver.policy.touch_run([driver.block_of[2], driver.block_of[1]], SECOND)
    driver.check()
    driver.request((1, 2, 3), BlockInfo(), 2 * SECOND)
    assert keys_by_order(driver) == [3, 2, 1]


def test_what_sessions_share_outlives_a_session_that_is_not_expected_back() -> None:
    """One-shot requests under one system prompt, among which some conversations return."""
    rng = random.Random(1)
    driver = Driver(SessionEviction(), 150)
    key, now_us, chats = 1000, 0, list[tuple[int, ...]]()
    for step in range(600):
        now_us += 2 * SECOND
        if step % 3 or not chats:
            chain = (1, 2, 3, *range(key, key + 20))
            key += 20
            if step % 3 == 1:
                chain = chain[:8]
                chats.append(chain)
        else:
            chain = (*chats.pop(0), key)
            key += 1
            if rng.random() < 0.8:
                chats.append(chain)
        driver.request(chain, BlockInfo(), now_us)
        assert {1, 2, 3} <= driver.block_of.keys()


def test_likely_sessions_are_kept_longer_than_lru_would() -> None:
    """Short prompts return after a minute, long ones never: the short ones stay though newer long ones came."""
    driver = Driver(SessionEviction(), 130)
    key, now_us, hits, asked = 0, 0, 0, 0
    waiting: list[tuple[int, tuple[int, ...]]] = []
    for step in range(600):
        now_us += 3 * SECOND
        while waiting and waiting[0][0] <= now_us:
            _, chain = waiting.pop(0)
            if step > 300:
                asked += 1
                hits += chain[0] in driver.block_of
            driver.request((*chain, key), BlockInfo(), now_us)
            key += 1
        size = 4 if step % 2 else 40
        chain = tuple(range(key, key + size))
        key += size
        driver.request(chain, BlockInfo(), now_us)
        if size == 4:
            waiting.append((now_us + 60 * SECOND, chain))
    assert asked > 100
    assert hits == asked  # LRU keeps 130 blocks for about 18 s and would hit none


def test_a_run_is_as_old_as_its_first_block_not_as_its_request() -> None:
    """Blocks are stored some steps after their request began; others came meanwhile."""
    policy = SessionEviction()
    policy.begin_request([b"a"], 1 * SECOND)
    policy.begin_request([b"b"], 2 * SECOND)
    policy.insert(1, BlockInfo(key=b"b"), 3 * SECOND)
    policy.insert(2, BlockInfo(key=b"a"), 4 * SECOND)
    policy.validate()
    assert sorted(policy.victims()) == [1, 2]
