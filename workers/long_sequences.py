"""Sequences that do not fit the device: which of their blocks stay on it, and how they get room for the next tokens.

Owns the policy and its bookkeeping in a batch; `Scheduler` asks, `OverflowBlocks` knows the ids. A sequence is long
from the moment its tokens need more blocks than the device has. Then it keeps a window of blocks there, its newest, and
the older ones go below as it needs room: each is copied below at the head of the step that writes other tokens to it,
so nothing ever waits for a free block, and one block is enough to go on.

Invariant: a block leaves the device only when no batch in flight still writes to it.
"""

from __future__ import annotations

from tournant.workers.batch import Batch, StepResult
from tournant.workers.messages import OverflowStats
from tournant.workers.overflow_blocks import OverflowBlocks
from tournant.workers.sequence import Sequence
from tournant.workers.tier_counts import add_counts

WINDOW_SHARE = 2  # a long sequence that is not alone keeps at most the pool divided by this


class LongSequences:
    """Gives long sequences of one engine their room. Not thread-safe."""

    def __init__(self, blocks: OverflowBlocks) -> None:
        self._blocks = blocks
        self._counts: dict[str, float] = {}

    def observe(self, result: StepResult) -> None:
        """A step is over. What it could not read is found no more, whatever became of the sequence that read it."""
        for ids in result.lost.values():
            self._blocks.forget_below(ids)
        add_counts(self._counts, result.overflow)

    def stats(self) -> OverflowStats:
        """Counters and gauges."""
        below = self._blocks.below
        used = below.num_blocks - below.num_free
        return OverflowStats(used_blocks=used, total_blocks=below.num_blocks, **self._counts)  # type: ignore[arg-type]

    def is_long(self, sequence: Sequence) -> bool:
        """Whether it has more tokens than the device has room for."""
        return self._blocks.blocks_for(sequence.num_tokens) > self._blocks.num_blocks

    def match(self, keys: list[bytes]) -> list[int]:
        """Blocks of the leading run of `keys` that are on the device or below."""
        return self._blocks.match_anywhere(keys)

    def forget_all(self) -> None:
        """Batches failed or were dropped, so copies may be missing below: nothing there is found any more."""
        self._blocks.below.reset()

    def admission_blocks(self, needed: int, shared: list[int]) -> int:
        """Free blocks that a long sequence starts with, of those it would need were it short. shared: what it shares,
        of which it can move below what nobody else uses.
        """
        blocks = self._blocks
        movable = min(blocks.num_unreferenced(shared), blocks.below.num_free - blocks.num_unreferenced_below(shared))
        return max(0, min(needed, max(1, blocks.num_blocks // WINDOW_SHARE)) - max(0, movable))

    def _resident(self, sequence: Sequence) -> list[int]:
        """Indices of its blocks on the device, oldest first."""
        table, blocks = sequence.block_table, self._blocks
        while sequence.num_below < len(table) and blocks.is_below(table[sequence.num_below]):
            sequence.num_below += 1
        return [index for index in range(sequence.num_below, len(table)) if not blocks.is_below(table[index])]

    def _movable(self, sequence: Sequence, resident: list[int]) -> list[int]:
        """Those that could be written anew once they are below: whole, computed, and no one else's."""
        whole = sequence.num_computed // self._blocks.block_tokens
        return [i for i in resident if i < whole and self._blocks.holders(sequence.block_table[i]) == (1, 0)]

    def _from_free(self, resident: list[int], others: int) -> int:
        """Free blocks that it may take now. others: sequences beside it, which need one each for their next token."""
        blocks = self._blocks
        window = blocks.num_blocks // WINDOW_SHARE if others else blocks.num_blocks
        return max(0, min(blocks.num_free - others, window - len(resident)))

    def room(self, sequence: Sequence, others: int) -> int:
        """Tokens that its next step may have, at least one."""
        blocks, table = self._blocks, sequence.block_table
        resident = self._resident(sequence)
        movable = min(len(self._movable(sequence, resident)), blocks.below.num_free)
        slack = len(table) * blocks.block_tokens - sequence.num_scheduled
        return max(1, slack + (self._from_free(resident, others) + movable) * blocks.block_tokens)

    def make_room(self, sequence: Sequence, count: int, others: int, batch: Batch) -> list[int] | None:
        """`count` blocks for it to write to, with a reference each: free ones within its window, then its own oldest,
        whose content goes below at the head of the batch. None, and nothing has changed, when there are too few.
        """
        blocks, table = self._blocks, sequence.block_table
        resident = self._resident(sequence)
        movable = self._movable(sequence, resident)
        num_free = min(count, self._from_free(resident, others))
        if num_free + min(len(movable), blocks.below.num_free) < count:
            num_free = min(count, blocks.num_free)  # the window yields before another sequence has to go
        if num_free + min(len(movable), blocks.below.num_free) < count:
            return None
        found = blocks.allocate(num_free) or []
        for index in movable[: count - num_free]:
            block = table[index]
            self._move(sequence, index, batch)
            blocks.recycle(block)
            found.append(block)
        return found

    def shrink(self, sequence: Sequence, others: int, batch: Batch) -> list[int]:
        """With others about, what it has beyond its window goes below; so do blocks that it shares with its forks, who
        could not move them either. Returns the blocks that it gives back when the batch is booked, and not before.
        """
        blocks, table = self._blocks, sequence.block_table
        resident = self._resident(sequence)
        whole = sequence.num_computed // blocks.block_tokens
        excess = len(resident) - blocks.num_blocks // WINDOW_SHARE if others else 0
        given: list[int] = []
        for index in resident:
            block = table[index]
            tables, held = blocks.holders(block)
            if index >= whole or held or not (tables > 1 or excess > len(given)) or not blocks.can_go_below(block):
                continue
            self._move(sequence, index, batch)
            given.append(block)
        return given

    def _move(self, sequence: Sequence, index: int, batch: Batch) -> None:
        copy = self._blocks.move_below(sequence.block_table, index)
        if copy is not None:
            batch.demotions.append(copy)
        batch.block_updates.append((sequence.row, index, [sequence.block_table[index]]))
