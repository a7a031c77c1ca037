"""Growing blocks of preempted sequences, kept in lent slots below until the sequences go on.

Owns the stash of each preempted sequence, the orders for it and the device block that its copies touch. Pure.

Invariant: a device block that is copied from or to is held until the link's answer, whatever happened to its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tournant.workers.block_manager import BlockManager
from tournant.workers.sequence import Sequence as Answer
from tournant.workers.transfer_messages import DropStash, Order, Stash, Stashed, Unstash, Unstashed


@dataclass(eq=False, slots=True)
class _Kept:
    """tokens: computed tokens of the sequence, the last of them in the stash; block: held by a copy, -1 without one;
    back: what the link said of the way back.
    """

    number: int
    tokens: int
    block: int
    answer: Answer | None
    on_its_way: bool = False
    back: bool | None = None


class Stashes:
    """See the module. orders: where orders go; numbers: of stashes, and of whatever else `Copied` speaks."""

    def __init__(self, blocks: BlockManager, orders: list[Order], numbers: Iterator[int]) -> None:
        self._blocks = blocks
        self._orders = orders
        self._numbers = numbers
        self._of: dict[Answer, _Kept] = {}
        self._copies: dict[int, _Kept] = {}  # copies under way, by number

    def keep(self, answer: Answer, block: int, tokens: int) -> None:
        """Put a sequence's last, growing block away. Takes one of the credit."""
        kept = _Kept(next(self._numbers), tokens, block, answer)
        self._blocks.hold([block])
        self._of[answer] = self._copies[kept.number] = kept
        self._orders.append(Stash(kept.number, block))

    def tokens(self, answer: Answer) -> int:
        """Computed tokens of a sequence of which a stash holds the last; 0 without one that can be had."""
        kept = self._of.get(answer)
        return kept.tokens if kept is not None and kept.number not in self._copies else 0

    def bring_back(self, answer: Answer, block: int) -> None:
        """Copy the stash into a fresh block, whose reference becomes the copy's."""
        kept = self._of[answer]
        kept.block, kept.on_its_way = block, True
        self._blocks.become_held([block])
        self._copies[kept.number] = kept
        self._orders.append(Unstash(kept.number, block))

    def is_coming(self, answer: Answer) -> bool:
        """Whether a stash is on its way back."""
        kept = self._of.get(answer)
        return kept is not None and kept.on_its_way and kept.back is None

    def take(self, answer: Answer) -> int | None:
        """The block with the stash, whose reference becomes the table's; None without one. The stash is gone then."""
        kept = self._of.get(answer)
        if kept is None or not kept.back:
            self.drop(answer)
            return None
        del self._of[answer]
        self._blocks.hand_over([kept.block])
        return kept.block

    def drop(self, answer: Answer) -> None:
        """A stash is of no use any more."""
        kept = self._of.pop(answer, None)
        if kept is None:
            return
        kept.answer = None
        if kept.back is not None:
            self._blocks.release_held([kept.block])
        elif not kept.on_its_way:
            self._orders.append(DropStash(kept.number))

    def on_copied(self, number: int) -> None:
        """The block that is put away is not read any more."""
        kept = self._copies.get(number)
        if kept is not None and not kept.on_its_way and kept.block >= 0:
            self._blocks.release_held([kept.block])
            kept.block = -1

    def on_stashed(self, event: Stashed) -> None:
        """It is put away, or could not be."""
        kept = self._copies.pop(event.stash)
        if not event.ok and kept.answer is not None:
            del self._of[kept.answer]

    def on_unstashed(self, event: Unstashed) -> None:
        """It is back, or lost."""
        kept = self._copies.pop(event.stash)
        kept.back = event.ok
        if kept.answer is None:
            self._blocks.release_held([kept.block])

    def lost(self) -> None:
        """The store is gone, and everything in it."""
        for answer, kept in list(self._of.items()):
            if not kept.on_its_way:
                kept.answer = None
                del self._of[answer]

    def held(self) -> Iterator[list[int]]:
        """Blocks of all copies."""
        for kept in {*self._copies.values(), *self._of.values()}:
            if kept.block >= 0:
                yield [kept.block]

    def __len__(self) -> int:
        return len(self._of)
