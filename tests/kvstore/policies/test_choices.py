"""Watermarks, admission to disk, prefetch."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tournant.kvstore.errors import StoreConfigError
from tournant.kvstore.policies import make_admission, make_eviction
from tournant.kvstore.policies.admission import PredictedReuse, SeenTwice
from tournant.kvstore.policies.prefetch import ChainSuccessors
from tournant.kvstore.policies.session_eviction import SessionEviction
from tournant.kvstore.policies.watermarks import Watermarks

SECOND = 1_000_000


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([(0, 70)], [0]),  # at start is not above it
        ([(0, 71)], [1]),
        ([(0, 91)], [4]),
        ([(0, 71), (0, 60), (0, 51), (0, 50), (0, 60)], [1, 1, 1, 0, 0]),  # goes on until stop, then waits for start
        ([(0, 95), (0, 85), (0, 92)], [4, 1, 4]),
        ([(80, 1), (80, 0), (80, 1)], [1, 0, 1]),  # nothing left to copy ends it
        ([(95, 0)], [0]),
    ],
)
def test_watermarks(loads: list[tuple[int, int]], expected: list[int]) -> None:
    watermarks = Watermarks()
    assert [watermarks.copiers(referenced, dirty, 100) for referenced, dirty in loads] == expected


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))))
def test_watermarks_against_the_rule(loads: list[tuple[int, int]]) -> None:
    watermarks, copying = Watermarks(0.6, 0.8, 0.4, 3), False
    for referenced, dirty in loads:
        pressure = (referenced + dirty) / 100
        copying = dirty > 0 and pressure > (0.4 if copying else 0.6)
        expected = 0 if not copying else 3 if pressure > 0.8 else 1
        assert watermarks.copiers(referenced, dirty, 100) == expected


@pytest.mark.parametrize("marks", [(0.5, 0.9, 0.7), (0.7, 0.6, 0.5), (0.7, 1.1, 0.5), (0.7, 0.9, 0.0)])
def test_watermarks_must_rise(marks: tuple[float, float, float]) -> None:
    with pytest.raises(StoreConfigError, match="rise"):
        Watermarks(*marks)


def test_seen_twice() -> None:
    policy = make_admission("seen_twice")
    assert [policy.admit(b"a", 0), policy.admit(b"b", 0), policy.admit(b"a", 0)] == [False, False, True]
    assert policy.admit(b"c", 1)
    assert make_admission("all").admit(b"d", 0)


def test_seen_twice_forgets_the_oldest_first() -> None:
    policy = SeenTwice(capacity=4)
    for number in range(9):  # 0..3 are forgotten when 8 comes
        policy.admit(number, 0)
    assert not policy.admit(3, 0)
    assert policy.admit(8, 0)


def test_predicted_reuse_follows_the_session() -> None:
    """Long prompts never return and are refused after a while; short ones do and are written."""
    policy = make_admission("predicted_reuse")
    assert policy.admit(b"of no request", 0)
    key = now_us = 0
    for _ in range(200):
        short, long = tuple(range(key, key + 4)), tuple(range(key + 10, key + 40))
        policy.begin_request(short, now_us)
        policy.begin_request(long, now_us + SECOND)
        policy.begin_request((*short, key + 50), now_us + 10 * SECOND)
        key += 100
        now_us += 20 * SECOND
    policy.begin_request(range(key, key + 4), now_us)
    policy.begin_request(range(key + 10, key + 40), now_us)
    assert policy.admit(key + 1, 0)
    assert not policy.admit(key + 11, 0)
    assert policy.admit(key + 11, 1)


def test_predicted_reuse_shares_the_predictor_of_the_eviction() -> None:
    eviction = make_eviction("session")
    assert isinstance(eviction, SessionEviction)
    policy = make_admission("predicted_reuse", eviction)
    assert isinstance(policy, PredictedReuse)
    eviction.begin_request((1, 2, 3), 0)
    policy.begin_request((1, 2, 3), 0)  # told twice, counted once
    assert eviction.tracker.begin((1, 2, 3, 4), SECOND)[0].turn == 2


def test_last_successor_wins() -> None:
    table = ChainSuccessors()
    table.observe([b"a", b"b", b"c", b"d"])
    table.observe([b"a", b"b", b"x"])
    assert table.predict(b"a", 2) == [b"b", b"x"]
    assert table.predict(b"c", 5) == [b"d"]
    assert table.predict(b"z", 5) == []


def test_successors_in_a_circle_end() -> None:
    table = ChainSuccessors()
    table.observe([1, 2, 1])
    assert table.predict(1, 10) == [2]


@given(st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=60), st.integers(1, 10))
def test_successors_are_bounded_and_recent_ones_are_right(chains: list[list[int]], capacity: int) -> None:
    table = ChainSuccessors(capacity)
    last: dict[int, int] = {}
    for chain in chains:
        table.observe(chain)
        last.update(pairwise(chain))
        assert len(table) <= 3 * capacity
        for key in last:
            assert table.predict(key, 1) in ([], [last[key]])
        if len(chain) > 1 and chain[-1] != chain[-2]:
            assert table.predict(chain[-2], 1) == [chain[-1]]
