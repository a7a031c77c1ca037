"""S3-FIFO: a small queue that sifts newcomers, a main queue, and the names of what was sifted out.

After Yang et al., SOSP 2023. New blocks pass a small queue of a tenth of the blocks; those used at least twice there,
and those whose name is still remembered from an earlier try, enter the main queue, where each use buys one more round.

Invariants:
 1. Every block is in exactly one of the two queues and has a count of 0 to 3.
 2. At most as many names are remembered as blocks are held.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.policies.eviction import BlockInfo, EvictionPolicy

SMALL_SHARE = 10  # the small queue holds one block in so many
MAX_COUNT = 3
ENTRY_COUNT = 2  # uses in the small queue that lead to the main queue


class S3Fifo(EvictionPolicy):
    """Two queues and a ghost list. Uses only count; the queues move when a victim is looked for."""

    def __init__(self) -> None:
        self._count: dict[int, int] = {}
        self._small: OrderedDict[int, Hashable] = OrderedDict()  # block -> name
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()

    def insert(self, block: int, info: BlockInfo, now_us: int) -> None:
        """See EvictionPolicy."""
        if block in self._count:
            raise InvariantViolation(f"block {block} is inserted twice")
        self._count[block] = 0
        if info.key in self._ghosts:
            del self._ghosts[info.key]
            self._main[block] = None
        else:
            self._small[block] = info.key

    def touch_run(self, blocks: Sequence[int], now_us: int) -> None:
        """See EvictionPolicy."""
        count = self._count
        for block in blocks:
            found = count.get(block)
            if found is None:
                raise InvariantViolation(f"block {block} is touched and not resident")
            if found < MAX_COUNT:
                count[block] = found + 1

    def remove(self, block: int) -> None:
        """See EvictionPolicy."""
        if self._count.pop(block, None) is None:
            raise InvariantViolation(f"block {block} is removed and not resident")
        if block in self._main:
            del self._main[block]
        else:
            key = self._small.pop(block)
            if key != b"":
                self._ghosts[key] = None
        while len(self._ghosts) > len(self._count):
            self._ghosts.popitem(last=False)

    def victims(self) -> Iterator[int]:
        """See EvictionPolicy. Blocks that earned another round get it now, before the first victim is named."""
        if not self._count:
            return
        first = self._settle()
        yield first
        for queue in (self._small, self._main):
            for block in queue:
                if block != first:
                    yield block

    def _settle(self) -> int:
        """Move blocks on until one that has earned nothing is at the head of the queue whose turn it is."""
        count = self._count
        while True:
            if self._small and (len(self._small) * SMALL_SHARE >= len(count) or not self._main):
                block = next(iter(self._small))
                if count[block] < ENTRY_COUNT:
                    return block
                del self._small[block]
                self._main[block] = None
                count[block] = 0
            else:
                block = next(iter(self._main))
                if not count[block]:
                    return block
                count[block] -= 1
                self._main.move_to_end(block)

    def __len__(self) -> int:
        return len(self._count)

    def validate(self) -> None:
        """See EvictionPolicy."""
        if self._small.keys() & self._main.keys() or self._small.keys() | self._main.keys() != self._count.keys():
            raise InvariantViolation("the queues do not hold every counted block exactly once")
        if not all(0 <= count <= MAX_COUNT for count in self._count.values()):
            raise InvariantViolation(f"a count is outside 0 to {MAX_COUNT}")
        if len(self._ghosts) > len(self._count):
            raise InvariantViolation(f"{len(self._ghosts)} names are remembered for {len(self._count)} blocks")
