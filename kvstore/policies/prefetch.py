"""Which blocks are likely to be asked for next: the last successor of each.

A block's key contains its parent, so most keys have one successor, and the last one seen is right for 95 to 100 % of
reused blocks in public traces; more history adds nothing there.

Invariant: at most `3 * capacity` successors are known; those of the older generation go together.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

from tournant.kvstore.errors import StoreConfigError

CAPACITY = 1 << 16
Key = TypeVar("Key", bound=Hashable)


class ChainSuccessors(Generic[Key]):
    """key -> key that followed it last. Two generations: when the younger is full, the older is forgotten."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise StoreConfigError(f"capacity is {capacity}; it must be 1 or more")
        self._capacity = capacity
        self._young: dict[Key, Key] = {}
        self._old: dict[Key, Key] = {}

    def observe(self, keys: Sequence[Key]) -> None:
        """A request asked for this chain, head first."""
        for start in range(0, len(keys) - 1, self._capacity):
            part = keys[start : start + self._capacity + 1]
            self._young.update(pairwise(part))
            if len(self._young) >= self._capacity:
                self._old, self._young = self._young, {}

    def predict(self, key: Key, count: int) -> list[Key]:
        """Up to `count` keys that followed `key` and one another last time, nearest first."""
        found: list[Key] = []
        seen = {key}
        while len(found) < count:
            following = self._young.get(key)
            if following is None:
                following = self._old.get(key)
            if following is None or following in seen:
                break
            found.append(following)
            seen.add(following)
            key = following
        return found

    def __len__(self) -> int:
        """Successors remembered, those of both generations counted twice."""
        return len(self._young) + len(self._old)
