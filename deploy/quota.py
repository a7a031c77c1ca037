"""What one tenant may use: requests at once, requests a minute, tokens a minute.

Pure but for the clock, which is given. Counts are those of one process that serves HTTP.

Invariants:
 1. In any minute no more requests begin than twice the limit, and no more over a longer time than the limit says.
 2. Tokens of answers are known only when they are made, so they are booked at the end of a request; what goes beyond
    the limit is a debt, and while there is one nothing new begins. A prompt beyond the limit needs a full bucket.
 3. A request that is refused is not counted. `retry_after_s` is when it could begin if nothing else does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tournant.deploy.errors import QuotaExceeded

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who sends requests. Limits are of answers' requests, None = no limit; share_cache: its cached blocks are shared
    with everybody who does the same, else with itself alone.
    """

    name: str
    max_outstanding: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    share_cache: bool = False


class Bucket:
    """Holds up to `per_minute`, full at first, filled evenly in a minute; may be in debt."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def resize(self, per_minute: int, now: float) -> None:
        """Another limit from now on; a debt stays."""
        self._fill(now)
        self.per_minute = per_minute
        self._level = min(self._level, float(per_minute))

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until it holds the amount, or is full; 0.0 = now."""
        self._fill(now)
        missing = min(amount, self.per_minute) - self._level
        return max(0.0, missing * MINUTE_S / self.per_minute)

    def take(self, amount: int, now: float) -> None:
        """Take the amount, which may leave a debt; a negative one is given back."""
        self._fill(now)
        self._level = min(self._level - amount, float(self.per_minute))

    def _fill(self, now: float) -> None:
        gained = max(0.0, now - self._at) * self.per_minute / MINUTE_S
        self._level = min(self._level + gained, float(self.per_minute))
        self._at = max(self._at, now)


class TenantQuota:
    """What a tenant uses now. clock: seconds, only ever growing."""

    def __init__(self, tenant: Tenant, clock: Callable[[], float]) -> None:
        self.tenant = tenant
        self.outstanding = 0
        self._clock = clock
        self._requests = _bucket(None, tenant.requests_per_minute, clock())
        self._tokens = _bucket(None, tenant.tokens_per_minute, clock())

    def change(self, tenant: Tenant) -> None:
        """Other limits; what was used stays used."""
        now = self._clock()
        self.tenant = tenant
        self._requests = _bucket(self._requests, tenant.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, tenant.tokens_per_minute, now)

    def begin(self) -> TenantRequest:
        """Count a request, which is to be left as a `with` block. Raises QuotaExceeded."""
        tenant, now = self.tenant, self._clock()
        if tenant.max_outstanding is not None and self.outstanding >= tenant.max_outstanding:
            raise QuotaExceeded(
                f"{tenant.name} has {self.outstanding} requests outstanding, of at most {tenant.max_outstanding}; wait "
                "for one to end",
                1,
            )
        for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket is not None and (wait_s := bucket.wait_s(1, now)):
                raise self._exceeded(bucket, what, wait_s)
        if self._requests is not None:
            self._requests.take(1, now)
        self.outstanding += 1
        return TenantRequest(self)

    def _exceeded(self, bucket: Bucket, what: str, wait_s: float) -> QuotaExceeded:
        after = max(1, math.ceil(wait_s))
        return QuotaExceeded(
            f"{self.tenant.name} has used its {bucket.per_minute} {what} a minute; try again in {after} s", after
        )

    def _take_prompt(self, num_tokens: int) -> None:
        bucket, now = self._tokens, self._clock()
        if bucket is not None:
            if wait_s := bucket.wait_s(num_tokens, now):
                raise self._exceeded(bucket, "tokens", wait_s)
            bucket.take(num_tokens, now)

    def _end(self, *, counts: bool, num_tokens: int) -> None:
        now = self._clock()
        self.outstanding -= 1
        if self._requests is not None and not counts:
            self._requests.take(-1, now)
        if self._tokens is not None and num_tokens:
            self._tokens.take(num_tokens, now)


class TenantRequest:
    """One request of a tenant, until its `with` block is left. One that was not accepted by then does not count."""

    def __init__(self, quota: TenantQuota) -> None:
        self.tenant = quota.tenant
        self._quota = quota
        self._accepted = False
        self._prompt_tokens = self._generated_tokens = 0

    def take_prompt(self, num_tokens: int) -> None:
        """Book its prompts. Raises QuotaExceeded, and nothing is booked then."""
        self._quota._take_prompt(num_tokens)
        self._prompt_tokens = num_tokens

    def accept(self) -> None:
        """An engine works on it."""
        self._accepted = True

    def take_generated(self, num_tokens: int) -> None:
        """Tokens of its answers, in all."""
        self._generated_tokens = num_tokens

    def __enter__(self) -> TenantRequest:
        return self

    def __exit__(self, *exc_info: object) -> None:
        num_tokens = self._generated_tokens if self._accepted else -self._prompt_tokens
        self._quota._end(counts=self._accepted, num_tokens=num_tokens)


def _bucket(known: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if known is None:
        return Bucket(per_minute, now)
    known.resize(per_minute, now)
    return known
