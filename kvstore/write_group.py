"""The leader's side of a write: which sealed blocks get a version in this step.

Owns the counter of one group of ranks. The version rides in the step's batch; nobody is asked and nobody waits.

Invariants:
 1. (writer id, counter) names one write: the counter only grows, and a re-formed group makes a new `WriteGroup`.
 2. A block is named only where every rank has a lent slot for it; the others are skipped and counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from tournant.kvstore.block import BlockRef, Version


class WriteGroup:
    """Mints versions for one group of `num_ranks` ranks. writer_id: random 64 bits, never used before."""

    def __init__(self, writer_id: int, num_ranks: int) -> None:
        if not 0 <= writer_id < 1 << 64 or num_ranks < 1:
            raise ValueError(f"writer_id is {writer_id}, num_ranks {num_ranks}; 64 bits and at least 1 are needed")
        self.writer_id = writer_id
        self.credits = [0] * num_ranks  # free lent slots per rank, as their last replies told
        self.num_skipped = 0
        self._counter = 0

    def mint(self, keys: Sequence[bytes]) -> list[BlockRef]:
        """Names for the first of these sealed blocks, as many as every rank has credit for."""
        count = min(len(keys), min(self.credits))
        self.num_skipped += len(keys) - count
        self.credits = [credit - count for credit in self.credits]
        refs = []
        for key in keys[:count]:
            self._counter += 1
            refs.append(BlockRef(key, Version(self.writer_id, self._counter)))
        return refs

    def replied(self, rank: int, num_lent: int) -> None:
        """A rank's report was answered: that many more slots are lent to it."""
        self.credits[rank] += num_lent
