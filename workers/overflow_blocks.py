"""Block ids of an engine whose sequences may be larger than its device: places of the device, then places below.

Owns the second half of the ids and how blocks change halves. Ids below `num_blocks` are blocks of the device; id
num_blocks + p is place p of the overflow, which lies in RAM or on disk and is this engine's alone. A block below is
computed, whole, and never written again: attention reads it where it is. Moves no bytes: each method that needs a copy
returns it as (device block, id below).

Invariants, beside those of `BlockManager` for each half (checked by `validate`):
 1. A block that is recycled was referenced by one table alone, and what it held is below.
 2. Content that has a key on the device may have it below as well; both are the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tournant.kvstore.errors import InvariantViolation
from tournant.workers.block_manager import BlockManager


class OverflowBlocks(BlockManager):
    """`num_blocks` blocks of the device and `num_below` places under them. See BlockManager for the rest."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        num_below: int,
        *,
        enable_prefix_caching: bool = True,
        has_tiers: bool = False,
    ) -> None:
        super().__init__(num_blocks, block_tokens, enable_prefix_caching=enable_prefix_caching, has_tiers=has_tiers)
        self.below = BlockManager(num_below, block_tokens, enable_prefix_caching=enable_prefix_caching)

    @property
    def capacity(self) -> int:
        """Blocks of the longest sequence."""
        return self.num_blocks + self.below.num_blocks

    def is_below(self, block: int) -> bool:
        """Whether an id is a place of the overflow."""
        return block >= self.num_blocks

    def _halves(self, blocks: Iterable[int]) -> tuple[list[int], list[int]]:
        above, below = [], []
        for block in blocks:
            if block < self.num_blocks:
                above.append(block)
            else:
                below.append(block - self.num_blocks)
        return above, below

    # ---- as BlockManager, for ids of both halves

    def match_anywhere(self, keys: Sequence[bytes]) -> list[int]:
        """Like `match`, but a block that the device lacks may be one below."""
        blocks: list[int] = []
        for key in keys if self.enable_prefix_caching else ():
            found = self.match([key])
            if not found:
                found = [self.num_blocks + place for place in self.below.match([key])]
            if not found:
                break
            blocks += found
        return blocks

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """Of those of the device."""
        return super().num_unreferenced(self._halves(blocks)[0])

    def num_unreferenced_below(self, blocks: Iterable[int]) -> int:
        """Of those below."""
        return self.below.num_unreferenced(self._halves(blocks)[1])

    def acquire(self, blocks: Sequence[int]) -> None:
        """One more reference on each."""
        above, below = self._halves(blocks)
        super().acquire(above)
        self.below.acquire(below)

    def release(self, table: Sequence[int]) -> None:
        """One reference of each goes, last block first."""
        above, below = self._halves(table)
        super().release(above)
        self.below.release(below)

    def is_dirty(self, block: int) -> bool:
        """As of BlockManager; tiers of a node's store are not given what is below."""
        return not self.is_below(block) and super().is_dirty(block)

    def must_copy(self, block: int) -> bool:
        """As of BlockManager; what is below is always sealed or full."""
        return self.is_below(block) or super().must_copy(block)

    def reset(self) -> bool:
        """Forget all content of both halves, or nothing."""
        return self.below.num_free == self.below.num_blocks and super().reset() and self.below.reset()

    # ---- from one half to the other

    def holders(self, block: int) -> tuple[int, int]:
        """(references of tables, references of transfers) of a block of the device."""
        held = self._held.get(block, 0)
        return self._references[block] - held, held

    def can_go_below(self, block: int) -> bool:
        """Whether `move_below` would find a place for a block of the device."""
        key = self._key_of[block]
        return self.below.num_free > 0 or (key is not None and bool(self.below.match([key])))

    def move_below(self, table: list[int], index: int) -> tuple[int, int] | None:
        """Entry `index` of a table, a block of the device that is computed and whole, becomes one below, with the
        table's reference. The block keeps one reference, the caller's now, which it gives back (`release`) or keeps to
        write other tokens there (`recycle`), after the copy that is returned, if any: None when the content is below.
        """
        block = table[index]
        key, depth = self._key_of[block], self._depth_of[block]
        if key is not None and (found := self.below.match([key])):
            self.below.acquire(found)
            table[index] = self.num_blocks + found[0]
            return None
        places = self.below.allocate(1)
        if places is None:
            raise InvariantViolation("no place is free below; ask can_go_below first")
        if key is not None:
            self.below.seal(places[0], key, depth)
        table[index] = self.num_blocks + places[0]
        return block, table[index]

    def recycle(self, block: int) -> None:
        """The content of a block of the device is below: it becomes a fresh one, of whoever holds its reference."""
        if self._references[block] != 1:
            raise InvariantViolation(
                f"block {block} has {self._references[block]} references; only one's own is recycled"
            )
        self._dirty_used.pop(block, None)
        self._forget(block)

    def forget_below(self, ids: Iterable[int]) -> None:
        """What these places hold is lost: nobody may find it any more."""
        for place in self._halves(ids)[1]:
            self.below.forget(place)

    def validate(self, tables: Iterable[Sequence[int]], held: Iterable[Sequence[int]] = ()) -> None:
        """Recount both halves. Raises InvariantViolation."""
        halves = [self._halves(table) for table in tables]
        super().validate([above for above, _ in halves], held)
        self.below.validate([below for _, below in halves])
