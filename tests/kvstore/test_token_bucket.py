"""A pace is kept over any pieces and any idle times, without a clock of the machine."""

from __future__ import annotations

import random

import pytest

from tournant.kvstore.token_bucket import SLACK_S, Pace, TokenBucket


def test_work_takes_its_time_one_after_another() -> None:
    bucket = TokenBucket(100.0, slack_s=0.0)
    assert bucket.take(50, now=10.0) == pytest.approx(0.5)
    assert bucket.take(50, now=10.1) == pytest.approx(0.9)
    assert bucket.take(10, now=20.0) == pytest.approx(0.1), "idle time is lost"


def test_a_sleep_that_lasted_too_long_is_made_up_for() -> None:
    bucket = TokenBucket(1000.0, slack_s=0.01)
    assert bucket.take(5, now=0.0) == 0.0, "slack counts as work done ahead"
    assert bucket.take(15, now=0.0) == pytest.approx(0.01)
    assert bucket.take(20, now=0.015) == pytest.approx(0.015)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="per_s is 0"):
        TokenBucket(0)


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_is_the_rate(seed: int) -> None:
    rng = random.Random(seed)
    now, slept = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        assert seconds > 0
        slept.append(seconds)
        now += seconds + rng.random() * 0.002  # late, as sleeps are

    pace = Pace(1e6, lambda: now, sleep)
    total = 0
    for _ in range(2000):
        amount = rng.randint(1, 20_000)
        total += amount
        now += rng.random() * 0.001  # what the work itself took
        pace.spend(amount)
    assert total / 1e6 - SLACK_S <= now <= total / 1e6 * 1.02
    assert len(slept) > 100


def test_no_pace_never_sleeps() -> None:
    def fail(seconds: float = 0.0) -> float:
        raise AssertionError

    Pace(0, fail, fail).spend(1 << 40)
