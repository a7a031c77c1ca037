"""Least recently used first: the default of the store.

Owns one list of blocks in the order of their last use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.policies.eviction import BlockInfo, EvictionPolicy


class Lru(EvictionPolicy):
    """One list; a use moves a block to its end."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def insert(self, block: int, info: BlockInfo, now_us: int) -> None:
        """See EvictionPolicy."""
        if block in self._order:
            raise InvariantViolation(f"block {block} is inserted twice")
        self._order[block] = None

    def touch_run(self, blocks: Sequence[int], now_us: int) -> None:
        """See EvictionPolicy."""
        move_to_end = self._order.move_to_end
        try:
            for block in blocks:
                move_to_end(block)
        except KeyError as error:
            raise InvariantViolation(f"block {error} is touched and not resident") from error

    def remove(self, block: int) -> None:
        """See EvictionPolicy."""
        try:
            del self._order[block]
        except KeyError as error:
            raise InvariantViolation(f"block {block} is removed and not resident") from error

    def victims(self) -> Iterator[int]:
        """See EvictionPolicy."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def validate(self) -> None:
        """One list has nothing to disagree with."""
