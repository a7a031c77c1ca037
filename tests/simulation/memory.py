"""The shared memory of one store process as the simulator sees it: what is in each slot, and the generation table.

A slot's content is one integer that stands for its bytes: the oracle's value for what a writer meant to write, or some
garbage. A checksum of content is the content itself, so that "checksum matches" means "bytes are equal".
"""

from __future__ import annotations


class Memory:
    """Contents and generations by page. Outlives its store: clients of a dead store keep their mapping."""

    __slots__ = ("contents", "garbage", "generations", "incarnation")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.contents: dict[int, int] = {}
        self.generations: dict[int, int] = {}
        self.garbage = 0

    def scramble(self, page: int) -> None:
        """A write has begun: the slot holds neither the old nor the new bytes."""
        self.garbage += 1
        self.contents[page] = -self.garbage

    def generation(self, page: int) -> int:
        """As the table says; slots begin at 1."""
        return self.generations.get(page, 1)


def content(context: int, version: tuple[int, int], part: int) -> int:
    """What the writer of `version` puts into its part of the block that `context` (weights, tenant, tokens) names."""
    return hash((context, version, part, 0x5EED)) & (1 << 64) - 1  # of integers only: the same in every process
