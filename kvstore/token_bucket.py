"""A pace in bytes per second: emulates slower links and disks, for tests and for figures of other machines.

Owns the arithmetic (`TokenBucket`, pure: the time comes in) and a shell that sleeps (`Pace`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SLACK_S = 0.005  # what a sleep that lasted too long may be made up for


class TokenBucket:
    """Work of n units takes n / per_s seconds, one piece after another. per_s: above 0; slack_s: idle time that counts
    as work done ahead.
    """

    def __init__(self, per_s: float, slack_s: float = SLACK_S) -> None:
        if per_s <= 0:
            raise ValueError(f"per_s is {per_s}; it must be above 0")
        self._per_s = per_s
        self._slack_s = slack_s
        self._free_at = float("-inf")  # when all that was taken is over

    def take(self, amount: int, now: float) -> float:
        """Seconds from now until this much more work is over."""
        self._free_at = max(self._free_at, now - self._slack_s) + amount / self._per_s
        return max(0.0, self._free_at - now)


class Pace:
    """A bucket that several threads share and wait for. per_s: 0 = no limit; clock, sleep: for tests."""

    def __init__(
        self,
        per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._bucket = TokenBucket(per_s) if per_s else None
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()

    def spend(self, amount: int) -> None:
        """Return once this much more would be over at that pace. Called when it was done: it is over then at last."""
        if self._bucket is None:
            return
        with self._lock:
            wait = self._bucket.take(amount, self._clock())
        if wait > 0:
            self._sleep(wait)
