"""Which blocks are written to disk: all, those seen twice, those whose session is expected back. Spares the drive.

A refused block is not lost: it stays in RAM while there is room, and is asked about again at its next use.

Invariant: what is remembered is bounded; forgetting only delays a block's admission.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from tournant.kvstore.errors import StoreConfigError
from tournant.kvstore.policies.sessions import SessionTracker

MAX_SEEN = 1 << 16
MIN_CHANCE = 0.25


class AdmissionPolicy(Protocol):
    """Asked when a complete block enters RAM and at each later use, until it says yes."""

    def begin_request(self, keys: Sequence[Hashable], now_us: int) -> None:
        """A request asks for the chain `keys`, head first. Comes before its blocks are asked about."""
        return

    def admit(self, key: Hashable, heat: int) -> bool:
        """Whether to write this block. heat: its uses since it was stored, the store of it not counted."""
        ...


class AdmitAll(AdmissionPolicy):
    """Every block."""

    def admit(self, key: Hashable, heat: int) -> bool:
        """See AdmissionPolicy."""
        return True


class SeenTwice(AdmissionPolicy):
    """Blocks used since they were stored, or stored for the second time. Two generations of at most `capacity` keys."""

    def __init__(self, capacity: int = MAX_SEEN) -> None:
        if capacity < 1:
            raise StoreConfigError(f"capacity is {capacity}; it must be 1 or more")
        self._capacity = capacity
        self._young: dict[Hashable, None] = {}
        self._old: dict[Hashable, None] = {}

    def admit(self, key: Hashable, heat: int) -> bool:
        """See AdmissionPolicy."""
        if heat > 0 or key in self._young or key in self._old:
            return True
        if len(self._young) >= self._capacity:
            self._old, self._young = self._young, {}
        self._young[key] = None
        return False


class PredictedReuse(AdmissionPolicy):
    """Blocks used since they were stored, of a session that is likely to return, or of no known session.

    With a tracker given, somebody else tells it of requests; else this policy has its own.
    """

    def __init__(self, tracker: SessionTracker | None = None, min_chance: float = MIN_CHANCE) -> None:
        if not 0 <= min_chance <= 1:
            raise StoreConfigError(f"min_chance is {min_chance}; it must be between 0 and 1")
        self._own = tracker is None
        self._tracker = tracker or SessionTracker()
        self._min_chance = min_chance

    def begin_request(self, keys: Sequence[Hashable], now_us: int) -> None:
        """See AdmissionPolicy."""
        if self._own:
            self._tracker.begin(keys, now_us)

    def admit(self, key: Hashable, heat: int) -> bool:
        """See AdmissionPolicy."""
        if heat > 0:
            return True
        session = self._tracker.session_of(key)
        return session is None or session.chance >= self._min_chance
