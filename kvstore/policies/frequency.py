"""How often a block was used: LFU with ageing, and two-bit heat counters.

Both keep lists of blocks by a priority that only grows with time, so that what was hot long ago leaves in the end.

Invariants:
 1. Every block is in the list of its priority, the least recently used of equals first.
 2. LFU: priority = uses + age at the last use; age = priority of the last victim.
 3. Heat: priority - epoch, cut to 0..3, is the heat; the epoch advances when as many blocks left as are held.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.policies.eviction import BlockInfo, EvictionPolicy

MAX_HEAT = 3  # two bits


class _Levels:
    """Blocks in lists by an integer level; the lowest level is found in O(log levels)."""

    def __init__(self) -> None:
        self.level: dict[int, int] = {}
        self._lists: dict[int, OrderedDict[int, None]] = {}
        self._heap: list[int] = []  # every level with a list, and some that have lost theirs

    def add(self, block: int, level: int) -> None:
        """A new block, at the end of its level."""
        if block in self.level:
            raise InvariantViolation(f"block {block} is inserted twice")
        self._append(block, level)

    def _append(self, block: int, level: int) -> None:
        self.level[block] = level
        found = self._lists.get(level)
        if found is None:
            found = self._lists[level] = OrderedDict()
            heapq.heappush(self._heap, level)
        found[block] = None

    def move(self, block: int, level: int) -> None:
        """To the end of another or the same level."""
        if self.level[block] == level:
            self._lists[level].move_to_end(block)
        else:
            self.pop(block)
            self._append(block, level)

    def pop(self, block: int) -> int:
        """Take a block out; the level it had."""
        level = self.level.pop(block, None)
        if level is None:
            raise InvariantViolation(f"block {block} is removed and not resident")
        found = self._lists[level]
        del found[block]
        if not found:
            del self._lists[level]
        return level

    def lowest(self) -> int | None:
        """The lowest level that holds a block."""
        while self._heap and self._heap[0] not in self._lists:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def __iter__(self) -> Iterator[int]:
        lowest = self.lowest()
        if lowest is None:
            return
        yield from self._lists[lowest]
        for level in sorted(self._lists)[1:]:
            yield from self._lists[level]

    def validate(self) -> None:
        """Recount. Raises InvariantViolation."""
        listed = {block: level for level, found in self._lists.items() for block in found}
        if listed != self.level or sum(map(len, self._lists.values())) != len(listed):
            raise InvariantViolation(f"{len(self.level)} blocks have a level, the lists hold {len(listed)} others")
        if not all(self._lists.values()) or not set(self._lists) <= set(self._heap):
            raise InvariantViolation("a list is empty, or its level is missing in the heap")


class _ByLevel(EvictionPolicy):
    """What both policies share."""

    def __init__(self) -> None:
        self._levels = _Levels()

    def victims(self) -> Iterator[int]:
        """See EvictionPolicy."""
        return iter(self._levels)

    def __len__(self) -> int:
        return len(self._levels.level)

    def validate(self) -> None:
        """See EvictionPolicy."""
        self._levels.validate()


class Lfu(_ByLevel):
    """Least frequently used first, with dynamic ageing."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, int] = {}
        self._age = 0

    def insert(self, block: int, info: BlockInfo, now_us: int) -> None:
        """See EvictionPolicy."""
        self._levels.add(block, self._age + 1)
        self._uses[block] = 1

    def touch_run(self, blocks: Sequence[int], now_us: int) -> None:
        """See EvictionPolicy."""
        uses, age, move = self._uses, self._age, self._levels.move
        for block in blocks:
            count = uses.get(block)
            if count is None:
                raise InvariantViolation(f"block {block} is touched and not resident")
            uses[block] = count + 1
            move(block, age + count + 1)

    def remove(self, block: int) -> None:
        """See EvictionPolicy. What leaves from the lowest list counts as a victim and ages all others."""
        lowest = self._levels.lowest()
        level = self._levels.pop(block)
        del self._uses[block]
        if level == lowest:
            self._age = max(self._age, level)


class HeatCounters(_ByLevel):
    """Coldest first by two-bit saturating counters that all lose one whenever as many blocks left as are held."""

    def __init__(self) -> None:
        super().__init__()
        self._epoch = 0
        self._left = 0  # blocks removed in this epoch

    def insert(self, block: int, info: BlockInfo, now_us: int) -> None:
        """See EvictionPolicy."""
        self._levels.add(block, self._epoch)

    def touch_run(self, blocks: Sequence[int], now_us: int) -> None:
        """See EvictionPolicy."""
        level, epoch, move = self._levels.level, self._epoch, self._levels.move
        for block in blocks:
            found = level.get(block)
            if found is None:
                raise InvariantViolation(f"block {block} is touched and not resident")
            move(block, min(max(found, epoch) + 1, epoch + MAX_HEAT))

    def remove(self, block: int) -> None:
        """See EvictionPolicy."""
        self._levels.pop(block)
        self._left += 1
        if self._left > len(self):
            self._left = 0
            self._epoch += 1
