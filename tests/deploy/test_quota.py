from __future__ import annotations

from copy import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tournant.deploy.errors import QuotaExceeded
from tournant.deploy.quota import MINUTE_S, Bucket, Tenant, TenantQuota


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def quota(**limits: int) -> tuple[TenantQuota, Clock]:
    clock = Clock()
    return TenantQuota(Tenant("a", **limits), clock), clock


def one(found: TenantQuota, prompt: int = 1, generated: int = 0) -> None:
    """A whole request."""
    with found.begin() as use:
        use.take_prompt(prompt)
        use.accept()
        use.take_generated(generated)


def refused(found: TenantQuota, prompt: int = 1) -> int:
    """Seconds that a request is told to wait."""
    with pytest.raises(QuotaExceeded) as error:
        one(found, prompt)
    return error.value.retry_after_s


def test_requests_a_minute() -> None:
    found, clock = quota(requests_per_minute=6)
    for _ in range(6):
        one(found)
    assert refused(found) == 10
    clock.now = 9.9
    assert refused(found) == 1
    clock.now = 10.0
    one(found)
    assert refused(found) == 10


def test_tokens_of_answers_are_a_debt_that_is_paid_first() -> None:
    found, clock = quota(tokens_per_minute=60)
    one(found, prompt=10, generated=90)  # 40 too many
    assert refused(found) == 41
    clock.now = 40.5
    assert refused(found) == 1
    clock.now = 41.0
    one(found)


def test_a_long_prompt_waits_until_there_is_enough_for_it() -> None:
    found, clock = quota(tokens_per_minute=60)
    one(found, prompt=50)
    assert refused(found, prompt=30) == 20
    one(found, prompt=10)  # what was refused took nothing
    clock.now = 60.0
    one(found, prompt=600)  # longer than any bucket: it needs a full one
    assert refused(found) == 541


def test_outstanding_requests() -> None:
    found, _ = quota(max_outstanding=2)
    with found.begin(), found.begin():
        assert (refused(found), found.outstanding) == (1, 2)
    assert found.outstanding == 0
    one(found)


def test_what_was_not_accepted_does_not_count() -> None:
    found, _ = quota(requests_per_minute=1, tokens_per_minute=60)
    for _ in range(5):
        with found.begin() as use:
            use.take_prompt(60)  # and then nobody takes it
    one(found, prompt=60)
    assert refused(found) == 60


def test_limits_that_change_keep_what_was_used() -> None:
    found, clock = quota(requests_per_minute=2, tokens_per_minute=60)
    one(found, prompt=60, generated=60)
    found.change(Tenant("a", requests_per_minute=1, tokens_per_minute=600))
    assert refused(found) == 7  # 60 tokens of debt and the one it needs, at 10 a second
    clock.now = 100.0
    one(found)
    assert refused(found) == 60
    found.change(Tenant("a"))
    for _ in range(100):
        one(found, prompt=1000)


@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=200),
)
def test_over_any_time_no_more_is_taken_than_the_limit_and_one_bucket(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    bucket, now, taken = Bucket(per_minute, 0.0), 0.0, 0
    for wait, amount in steps:
        now += wait
        if amount <= per_minute and not bucket.wait_s(amount, now):
            bucket.take(amount, now)
            taken += amount
        assert taken <= per_minute * (1 + now / MINUTE_S) + 1e-6
        later = copy(bucket)
        assert later.wait_s(amount, now + later.wait_s(amount, now)) < 1e-6  # it is a time at which it can begin
