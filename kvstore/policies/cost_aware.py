"""Cheapest to lose first: recompute cost x heat / size, with ageing.

After the greedy-dual family: value = age at the last use + cost x heat / size; the age is the value of the last victim,
so that a block which nobody uses falls behind in the end.

Invariants:
 1. The heap holds one live entry for every block, at or below its present value; an entry of a block that has left, or
    that came back since, has another stamp.
 2. Dead entries are at most as many as live ones, plus a constant.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.policies.eviction import BlockInfo, EvictionPolicy
from tournant.kvstore.policies.frequency import MAX_HEAT

SCALE = 1 << 20  # cost per byte in microseconds is far below one
_SLACK = 64

_Entry = tuple[int, int, int, int]  # value, order of last use, block, stamp


class _Block:
    """What is known of one block. worth: cost x SCALE / size; order: of the last use, breaks ties."""

    __slots__ = ("heat", "order", "stamp", "value", "worth")

    def __init__(self, worth: int, value: int, order: int) -> None:
        self.worth = worth
        self.heat = 1
        self.value = value
        self.order = order
        self.stamp = order


class CostAware(EvictionPolicy):
    """A heap that is put right only where a victim is looked for; a use changes two numbers."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._heap: list[_Entry] = []
        self._age = 0
        self._order = 0

    def insert(self, block: int, info: BlockInfo, now_us: int) -> None:
        """See EvictionPolicy."""
        if block in self._blocks:
            raise InvariantViolation(f"block {block} is inserted twice")
        self._order += 1
        worth = max(1, info.cost_us * SCALE // max(1, info.size_bytes))
        found = self._blocks[block] = _Block(worth, self._age + worth, self._order)
        heapq.heappush(self._heap, (found.value, found.order, block, found.stamp))

    def touch_run(self, blocks: Sequence[int], now_us: int) -> None:
        """See EvictionPolicy."""
        known, age, order = self._blocks, self._age, self._order
        for block in blocks:
            found = known.get(block)
            if found is None:
                raise InvariantViolation(f"block {block} is touched and not resident")
            if found.heat <= MAX_HEAT:
                found.heat += 1
            order += 1
            found.order = order
            found.value = age + found.worth * found.heat
        self._order = order

    def remove(self, block: int) -> None:
        """See EvictionPolicy. A block that leaves while no other is worth less ages all others."""
        found = self._blocks.pop(block, None)
        if found is None:
            raise InvariantViolation(f"block {block} is removed and not resident")
        self._put_right()
        if not self._heap or found.value <= self._heap[0][0]:
            self._age = max(self._age, found.value)
        if len(self._heap) > 2 * len(self._blocks) + _SLACK:
            self._heap = [(b.value, b.order, block, b.stamp) for block, b in self._blocks.items()]
            heapq.heapify(self._heap)

    def _put_right(self) -> None:
        """Make the top of the heap a live entry at its present value."""
        heap, known = self._heap, self._blocks
        while heap:
            value, _, block, stamp = heap[0]
            found = known.get(block)
            if found is None or found.stamp != stamp:
                heapq.heappop(heap)
            elif found.value != value or found.order != heap[0][1]:
                heapq.heapreplace(heap, (found.value, found.order, block, stamp))
            else:
                return

    def victims(self) -> Iterator[int]:
        """See EvictionPolicy. Walks the heap in order without changing it: O(log k) for the k-th victim."""
        self._put_right()
        heap, known = self._heap, self._blocks
        ahead: list[tuple[_Entry, int]] = [(heap[0], 0)] if heap else []
        while ahead:
            entry, place = heapq.heappop(ahead)
            value, order, block, stamp = entry
            if place >= 0:
                for child in (2 * place + 1, 2 * place + 2):
                    if child < len(heap):
                        heapq.heappush(ahead, (heap[child], child))
            found = known.get(block)
            if found is None or found.stamp != stamp:
                continue
            if found.value != value or found.order != order:
                heapq.heappush(ahead, ((found.value, found.order, block, stamp), -1))
            else:
                yield block

    def __len__(self) -> int:
        return len(self._blocks)

    def validate(self) -> None:
        """See EvictionPolicy."""
        live = {
            block: (value, order)
            for value, order, block, stamp in self._heap
            if block in self._blocks and self._blocks[block].stamp == stamp
        }
        if live.keys() != self._blocks.keys():
            raise InvariantViolation(f"{len(self._blocks)} blocks are held, {len(live)} have an entry in the heap")
        for block, entry in live.items():
            if entry > (self._blocks[block].value, self._blocks[block].order):
                raise InvariantViolation(f"block {block} has an entry above its value")
