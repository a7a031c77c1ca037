"""The device's blocks: which are free, who refers to them, which content they hold.

Owns physical block ids, reference counts and the local prefix map (key -> block). Moves no bytes: a copy that a write
needs is returned to the caller as (source, destination). Device blocks belong to this replica alone (STORE.md, 3).

Invariants (checked by `validate`):
 1. A block is free (no references) or referenced, never both; free + referenced = total.
 2. `key -> block` and `block -> key` are inverse; a block that holds a key is never written again.
 3. Reference counts equal the number of tables that list the block.
Free blocks without a key are used first, then keyed ones in the order they were released (least recently used first);
a sequence releases its table from the tail, so that heads of chains, which more requests share, stay longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from tournant.kvstore.errors import InvariantViolation


class BlockManager:
    """Allocation, sharing and reuse of `num_blocks` blocks of `block_tokens` tokens each. Not thread-safe."""

    def __init__(self, num_blocks: int, block_tokens: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; the pool needs at least one block")
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self._references = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))  # a stack; low ids go first
        self._reusable: OrderedDict[int, None] = OrderedDict()  # free, but still holding a key; oldest first

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those that still hold reusable content included."""
        return len(self._free) + len(self._reusable)

    @property
    def num_reusable(self) -> int:
        """Free blocks that still hold content a prefix may hit."""
        return len(self._reusable)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the leading run of `keys` that are resident. Takes no references."""
        blocks: list[int] = []
        if self.enable_prefix_caching:
            for key in keys:
                block = self._block_of.get(key)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free now, so that `acquire` would take them from the free ones."""
        return sum(self._references[block] == 0 for block in blocks)

    def acquire(self, blocks: Sequence[int]) -> None:
        """Take one more reference on each resident block."""
        for block in blocks:
            if self._references[block] == 0:
                del self._reusable[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` fresh blocks with one reference each, or None and no change when fewer are free."""
        if count > self.num_free:
            return None
        blocks: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._reusable.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, table: Sequence[int]) -> None:
        """Give one reference of every block of a table back, last block first."""
        for block in reversed(table):
            if self._references[block] < 1:
                raise InvariantViolation(f"block {block} was released more often than acquired")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._key_of[block] is None:
                    self._free.append(block)
                else:
                    self._reusable[block] = None

    def must_copy(self, block: int) -> bool:
        """True when a write to this block needs a private copy first: somebody else refers to it or it is sealed."""
        return self._references[block] > 1 or self._key_of[block] is not None

    def replace_for_write(self, table: list[int], index: int) -> tuple[int, int] | None:
        """Copy-on-write of entry `index`: puts a fresh block there and returns (source, destination) to copy.

        None when no block is free; nothing has changed then. The source keeps its bytes at least until the step that
        carries the copy has run, because blocks are only ever written by that step or later ones.
        """
        fresh = self.allocate(1)
        if fresh is None:
            return None
        source = table[index]
        table[index] = fresh[0]
        self.release([source])
        return source, fresh[0]

    def seal(self, block: int, key: bytes) -> None:
        """The block is full and its content final: make it findable by `key`.

        When another block already holds the key, that one stays the one that is found and this one remains private.
        """
        if not self.enable_prefix_caching or key in self._block_of:
            return
        if self._references[block] < 1 or self._key_of[block] is not None:
            raise InvariantViolation(f"block {block} is sealed while free or already sealed")
        self._key_of[block] = key
        self._block_of[key] = block

    def reset(self) -> bool:
        """Forget all content. False, and nothing changed, while any block is referenced."""
        if self.num_free != self.num_blocks:
            return False
        for block in list(self._reusable):
            self._forget(block)
            self._free.append(block)
        self._reusable.clear()
        return True

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None

    def validate(self, tables: Iterable[Sequence[int]]) -> None:
        """Recount from scratch against all block tables in use. Raises InvariantViolation."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        if counts != self._references:
            wrong = [b for b in range(self.num_blocks) if counts[b] != self._references[b]]
            raise InvariantViolation(f"reference counts of blocks {wrong[:8]} differ from the tables that list them")
        free = self._free + list(self._reusable)
        if len(set(free)) != len(free) or any(counts[block] for block in free):
            raise InvariantViolation("a free block is listed twice or still referenced")
        if len(free) + sum(count > 0 for count in counts) != self.num_blocks:
            raise InvariantViolation("free and referenced blocks do not add up to the pool")
        for block, key in enumerate(self._key_of):
            if (key is not None and self._block_of.get(key) != block) or (block in self._reusable and key is None):
                raise InvariantViolation(f"block {block} and the prefix map disagree")
        if len(self._block_of) != sum(key is not None for key in self._key_of) or any(
            self._key_of[block] is not None for block in self._free
        ):
            raise InvariantViolation("the prefix map names a block that holds no content")
