"""Versions of what an engine publishes, and its credit, for each kind of block.

Owns one `WriteGroup` per kind, and which kind a block is. Whose blocks go down, and when, is tiering.py's. Pure.

Invariants (1 and 2 are WriteGroup's):
 1. A version names one write, over all attachments.
 2. A block is named only when there is credit of its kind.
 3. There is credit only while a store is attached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tournant.kvstore.block import BlockRef
from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.write_group import WriteGroup
from tournant.workers.transfer_messages import NUM_KINDS, writer_of


class WriteCredit:
    """See the module. first_coded: place in a chain from which on blocks are of kind 1, where a store has two kinds."""

    def __init__(self, writer_id: int, first_coded: int) -> None:
        self._groups = [WriteGroup(writer_of(writer_id, kind), num_ranks=1) for kind in range(NUM_KINDS)]
        self._first_coded = first_coded
        self._num_kinds = 1

    @property
    def credits(self) -> list[int]:
        """Free lent slots of each kind that there is."""
        return [group.credits[0] for group in self._groups[: self._num_kinds]]

    def attached(self, credits: Sequence[int]) -> None:
        """A store lends so many slots of each kind."""
        self._num_kinds = len(credits)
        for group, credit in zip(self._groups, credits, strict=False):
            group.credits[0] = credit

    def detached(self) -> None:
        """Nothing is lent any more."""
        for group in self._groups:
            group.credits[0] = 0

    def kind(self, depth: int) -> int:
        """Of a block at a place of its chain."""
        return int(self._num_kinds > 1 and depth >= self._first_coded)

    def mint(self, kind: int, keys: Sequence[bytes]) -> list[BlockRef]:
        """Names for blocks of a kind; takes the credit. Raises InvariantViolation when that does not suffice."""
        refs = self._groups[kind].mint(keys)
        if len(refs) != len(keys):
            raise InvariantViolation(f"{len(keys)} blocks of kind {kind} are to be saved with credit for {len(refs)}")
        return refs

    def take_one(self) -> None:
        """A slot of kind 0 is used for something without a name."""
        self._groups[0].credits[0] -= 1

    def replied(self, kind: int, num_lent: int) -> None:
        """So many more slots are lent."""
        self._groups[kind].replied(0, num_lent)

    def within(self, blocks: Iterable[int], depth_of: Callable[[int], int], most: int) -> list[list[int]]:
        """The first `most` of these blocks that there is credit for, by kind."""
        left = self.credits
        chosen: list[list[int]] = [[] for _ in left]
        for block in blocks:
            if most <= 0 or not any(left):
                break
            kind = self.kind(depth_of(block))
            if left[kind]:
                left[kind] -= 1
                most -= 1
                chosen[kind].append(block)
        return chosen

    def validate(self) -> None:
        """Raises InvariantViolation when more was ordered down than there was credit for."""
        for kind, group in enumerate(self._groups):
            if group.credits[0] < 0:
                raise InvariantViolation(
                    f"{-group.credits[0]} more blocks of kind {kind} were ordered down than there was credit for"
                )
