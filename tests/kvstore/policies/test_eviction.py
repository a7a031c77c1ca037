"""Every eviction policy against a naive twin, or against what holds for all of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kvstore.policies.naive import Driver, Naive, NaiveCost, NaiveHeat, NaiveKind, NaiveLfu, NaiveLru
from tournant.kvstore.errors import InvariantViolation, StoreConfigError
from tournant.kvstore.policies import EVICTION, make_admission, make_eviction
from tournant.kvstore.policies.eviction import BlockInfo, Kind
from tournant.kvstore.policies.s3fifo import S3Fifo

TWINS: dict[str, Callable[[], Naive]] = {
    "lru": NaiveLru,
    "lfu": NaiveLfu,
    "cost": NaiveCost,
    "heat": NaiveHeat,
    "kind": NaiveKind,
}
INFOS = (BlockInfo(), BlockInfo(100, 7, Kind.LARGE), BlockInfo(10, 900, Kind.SMALL), BlockInfo(3, 2, Kind.OUTPUT))

# A chain is a path in a small tree of keys, so that chains share prefixes as prompts do.
chains = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(
    lambda path: tuple(hash_free(path[: end + 1]) for end in range(len(path)))
)
requests = st.lists(
    st.tuples(chains, st.sampled_from(INFOS), st.integers(0, 90_000_000), st.integers(0, 3)), max_size=40
)


def hash_free(path: list[int]) -> int:
    """A number for a path of the tree."""
    number = 1
    for step in path:
        number = number * 3 + step
    return number


@pytest.mark.parametrize("name", list(EVICTION))
@given(steps=requests, capacity=st.integers(1, 12))
def test_policy_against_its_twin(
    name: str, steps: list[tuple[tuple[int, ...], BlockInfo, int, int]], capacity: int
) -> None:
    driver = Driver(make_eviction(name), capacity, TWINS[name]() if name in TWINS else None)
    now_us = 0
    for keys, info, pause_us, skip in steps:
        now_us += pause_us
        driver.request(keys, info, now_us, skip)
        if skip == 3 and driver.key_of:  # a block dropped from anywhere
            driver.remove(sorted(driver.key_of)[len(driver.key_of) // 2])
            driver.check()
    for block in sorted(driver.key_of):
        driver.remove(block)
    driver.check()


@pytest.mark.parametrize("name", list(EVICTION))
def test_mistakes_are_told(name: str) -> None:
    policy = make_eviction(name)
    policy.insert(1, BlockInfo(), 0)
    with pytest.raises(InvariantViolation, match="1"):
        policy.insert(1, BlockInfo(), 0)
    with pytest.raises(InvariantViolation, match="2"):
        policy.remove(2)
    with pytest.raises(InvariantViolation, match="2"):
        policy.touch_run([2], 0)


@pytest.mark.parametrize("name", list(EVICTION))
def test_a_request_leaves_tail_first(name: str) -> None:
    driver = Driver(make_eviction(name), 4)
    driver.request((10, 11, 12, 13), BlockInfo(), 0)
    assert [driver.key_of[block] for block in driver.policy.victims()] == [13, 12, 11, 10]


@pytest.mark.parametrize("name", list(EVICTION))
def test_empty_policy_has_no_victim(name: str) -> None:
    assert list(make_eviction(name).victims()) == []


def test_same_calls_same_order_under_any_hash_seed() -> None:
    """Keys are bytes, whose hash differs from process to process."""
    program = """
import random
from tournant.kvstore.policies import EVICTION
from tournant.kvstore.policies.eviction import BlockInfo
for name, make in EVICTION.items():
    policy, rng, resident, log = make(), random.Random(3), {}, []
    chains = [[b"%d-%d" % (max(0, i * (j > 2)), j) for j in range(1, 9)] for i in range(40)]
    for step in range(400):
        keys, now = rng.choice(chains)[: rng.randrange(1, 9)], step * 3_000_000
        policy.begin_request(keys, now)
        policy.touch_run([resident[k] for k in reversed(keys) if k in resident], now)
        for depth in reversed(range(len(keys))):
            if keys[depth] not in resident:
                if len(resident) == 60:
                    victim = next(iter(policy.victims()))
                    policy.remove(victim)
                    log.append(victim)
                    resident = {k: b for k, b in resident.items() if b != victim}
                resident[keys[depth]] = 1000 * step + depth
                policy.insert(1000 * step + depth, BlockInfo(depth=depth, key=keys[depth]), now)
    print(name, log)
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count("[") == len(EVICTION)


def test_lfu_forgets_what_was_hot_long_ago() -> None:
    driver = Driver(make_eviction("lfu"), 2, NaiveLfu())
    for _ in range(5):
        driver.request((1,), BlockInfo(), 0)
    for key in range(100, 110):  # each is used once and pushes the one before it out, ageing the cache by one
        driver.request((key,), BlockInfo(), 0)
    assert 1 not in driver.block_of


def test_cost_aware_keeps_what_is_dear_for_its_size() -> None:
    driver = Driver(make_eviction("cost"), 2)
    driver.request((1,), BlockInfo(size_bytes=100, cost_us=50), 0)
    driver.request((2,), BlockInfo(size_bytes=100, cost_us=10), 0)
    driver.request((3,), BlockInfo(size_bytes=100, cost_us=20), 0)
    assert sorted(driver.block_of) == [1, 3]


def test_heat_saturates_and_cools_down() -> None:
    driver = Driver(make_eviction("heat"), 2, NaiveHeat())
    for _ in range(100):
        driver.request((1,), BlockInfo(), 0)
    for key in range(100, 115):  # three epochs of two removals each, and some
        driver.request((key,), BlockInfo(), 0)
    assert 1 not in driver.block_of


def test_kinds_leave_in_their_order() -> None:
    driver = Driver(make_eviction("kind"), 8)
    for key, kind in enumerate((Kind.SMALL, Kind.PROMPT, Kind.OUTPUT, Kind.LARGE)):
        driver.request((key,), BlockInfo(kind=kind), 0)
    driver.request((3,), BlockInfo(kind=Kind.LARGE), 1)  # a use does not lift a block above its kind
    kinds = [(Kind.SMALL, Kind.PROMPT, Kind.OUTPUT, Kind.LARGE)[driver.key_of[b]] for b in driver.policy.victims()]
    assert kinds == [Kind.LARGE, Kind.OUTPUT, Kind.PROMPT, Kind.SMALL]


def test_s3fifo_lets_a_scan_pass_by() -> None:
    """Ten blocks used twice survive a hundred that are used once; LRU would lose them all."""
    driver = Driver(S3Fifo(), 20)
    for _ in range(3):
        for key in range(10):
            driver.request((key,), BlockInfo(), 0)
    for key in range(100, 200):
        driver.request((key,), BlockInfo(), 0)
    assert sum(key < 10 for key in driver.block_of) == 10


def test_s3fifo_remembers_the_name_of_what_came_back() -> None:
    driver = Driver(S3Fifo(), 3)
    for key in (1, 2, 3, 4, 1):  # 1 leaves for 4, and comes back while its name is known
        driver.request((key,), BlockInfo(), 0)
    for key in (5, 6, 7):
        driver.request((key,), BlockInfo(), 0)
    assert 1 in driver.block_of


def test_names_are_a_closed_list() -> None:
    with pytest.raises(StoreConfigError, match=r"'sesion'.*lru, lfu.*did you mean 'session'"):
        make_eviction("sesion")
    with pytest.raises(StoreConfigError, match=r"'seen_twise'.*did you mean 'seen_twice'"):
        make_admission("seen_twise")
    with pytest.raises(StoreConfigError, match=r"one of lru, [a-z0-9, ]*session$"):
        make_eviction("xyz")
