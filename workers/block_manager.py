"""The device's blocks: which are free, who refers to them, which content they hold, which of it lies below as well.

Owns physical block ids, reference counts, the local prefix map (key -> block), and for each sealed block whether a copy
of it was put below. Moves no bytes: a copy that a write needs is returned to the caller as (source, destination).
Device blocks belong to this replica alone (STORE.md, 3).

Invariants (checked by `validate`):
 1. A block is free (no references) or referenced, never both; free + referenced = total.
 2. `key -> block` and `block -> key` are inverse; a block that holds a key is never written again.
 3. Reference counts equal the number of tables and transfers that list the block.
 4. A free block with a key is in the list of its copy state, a referenced dirty one in the list of those.
Free blocks without a key are used first, then clean ones in the order they were released (least recently used first),
then those that are nowhere else; a sequence releases its table from the tail, so that heads of chains, which more
requests share, stay longest.
"""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from tournant.kvstore.errors import InvariantViolation


class CopyState(enum.IntEnum):
    """Of a sealed block: nowhere else, copied but not confirmed, or below as far as is known."""

    DIRTY = 0
    SAVING = 1
    CLEAN = 2


_DROP_ORDER = (CopyState.CLEAN, CopyState.SAVING, CopyState.DIRTY)


class BlockManager:
    """Allocation, sharing and reuse of `num_blocks` blocks of `block_tokens` tokens each. Not thread-safe.

    has_tiers: sealed blocks are to be copied below; without, all of them count as clean.
    """

    def __init__(
        self, num_blocks: int, block_tokens: int, *, enable_prefix_caching: bool = True, has_tiers: bool = False
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; the pool needs at least one block")
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.num_dropped_dirty = 0
        self._has_tiers = has_tiers
        self._references = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._depth_of = [0] * num_blocks
        self._state_of = [CopyState.CLEAN] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))  # a stack; low ids go first
        # free, but still holding a key; oldest first
        self._idle: dict[CopyState, OrderedDict[int, None]] = {state: OrderedDict() for state in CopyState}
        self._dirty_used: OrderedDict[int, None] = OrderedDict()  # referenced, dirty; sealed first first
        self._held: dict[int, int] = {}  # block -> references of transfers among its references

    # ---- numbers

    @property
    def capacity(self) -> int:
        """Blocks of the longest sequence."""
        return self.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those that still hold reusable content included."""
        return len(self._free) + self.num_reusable

    @property
    def num_reusable(self) -> int:
        """Free blocks that still hold content a prefix may hit."""
        return sum(map(len, self._idle.values()))

    @property
    def num_dirty(self) -> int:
        """Sealed blocks that are nowhere else and not on their way."""
        return len(self._idle[CopyState.DIRTY]) + len(self._dirty_used)

    @property
    def num_used_clean(self) -> int:
        """Referenced blocks that are not dirty: those that still grow among them."""
        return self.num_blocks - self.num_free - len(self._dirty_used)

    @property
    def num_coming(self) -> int:
        """Blocks that only transfers hold: they are free as soon as these have ended."""
        return sum(self._references[block] == held for block, held in self._held.items())

    def is_below(self, block: int) -> bool:
        """Whether an id is a place below the device; here none is."""
        return False

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    # ---- references

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
                state = self._state_of[block]
                del self._idle[state][block]
                if state is CopyState.DIRTY:
                    self._dirty_used[block] = None
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` fresh blocks with one reference each, or None and no change when fewer are free."""
        if count > self.num_free:
            return None
        blocks: list[int] = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._drop()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def _drop(self) -> int:
        for state in _DROP_ORDER:
            if self._idle[state]:
                block, _ = self._idle[state].popitem(last=False)
                self.num_dropped_dirty += state is CopyState.DIRTY
                self._forget(block)
                return block
        raise InvariantViolation("no block is free")

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
                    self._dirty_used.pop(block, None)
                    self._idle[self._state_of[block]][block] = None

    def hold(self, blocks: Sequence[int]) -> None:
        """A transfer needs these blocks as they are: one more reference on each."""
        self.acquire(blocks)
        self.become_held(blocks)

    def become_held(self, blocks: Sequence[int]) -> None:
        """References that a table had belong to a transfer from now on."""
        for block in blocks:
            self._held[block] = self._held.get(block, 0) + 1

    def hand_over(self, blocks: Sequence[int]) -> None:
        """References that a transfer had belong to a table from now on."""
        for block in blocks:
            left = self._held[block] - 1
            if left:
                self._held[block] = left
            else:
                del self._held[block]

    def release_held(self, blocks: Sequence[int]) -> None:
        """A transfer has ended: its references go."""
        self.hand_over(blocks)
        self.release(blocks)

    # ---- content

    def must_copy(self, block: int) -> bool:
        """True when a write to this block needs a private copy first: somebody else refers to it or it is sealed."""
        return self._references[block] > 1 or self._key_of[block] is not None

    def seal(self, block: int, key: bytes, depth: int = 0, *, below: bool = False) -> None:
        """The block is full and its content final: make it findable by `key`. depth: its place in a chain; below: a
        copy of it is known to lie there.

        When another block already holds the key, that one stays the one that is found and this one remains private.
        """
        if not self.enable_prefix_caching or key in self._block_of:
            return
        if self._references[block] < 1 or self._key_of[block] is not None:
            raise InvariantViolation(f"block {block} is sealed while free or already sealed")
        self._key_of[block] = key
        self._depth_of[block] = depth
        self._block_of[key] = block
        self._state_of[block] = CopyState.CLEAN if below or not self._has_tiers else CopyState.DIRTY
        if self._state_of[block] is CopyState.DIRTY:
            self._dirty_used[block] = None

    def reset(self) -> bool:
        """Forget all content. False, and nothing changed, while any block is referenced."""
        if self.num_free != self.num_blocks:
            return False
        for blocks in self._idle.values():
            for block in blocks:
                self._forget(block)
                self._free.append(block)
            blocks.clear()
        return True

    def forget(self, block: int) -> None:
        """Nobody finds this block by its key any more; whoever refers to it goes on doing so."""
        if self._key_of[block] is None:
            return
        if self._references[block] == 0:
            del self._idle[self._state_of[block]][block]
            self._free.append(block)
        self._dirty_used.pop(block, None)
        self._forget(block)

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
            self._state_of[block] = CopyState.CLEAN

    # ---- copies below

    def coldest_dirty(self, count: int) -> list[int]:
        """Up to `count` dirty blocks: free ones, least recently used first, then others as they were sealed."""
        return list(itertools.islice(itertools.chain(self._idle[CopyState.DIRTY], self._dirty_used), count))

    def is_dirty(self, block: int) -> bool:
        """Whether a block is sealed, nowhere else, and not on its way."""
        return self._key_of[block] is not None and self._state_of[block] is CopyState.DIRTY

    def content(self, block: int) -> tuple[bytes, int]:
        """(key, depth) of a sealed block."""
        key = self._key_of[block]
        if key is None:
            raise InvariantViolation(f"block {block} is not sealed")
        return key, self._depth_of[block]

    def copy_state(self, key: bytes) -> CopyState | None:
        """Of the block that is found by a key, None without one."""
        block = self._block_of.get(key)
        return None if block is None else self._state_of[block]

    def begin_saving(self, blocks: Sequence[int]) -> None:
        """These dirty blocks are on their way; a transfer holds them until `release_held`."""
        self.hold(blocks)
        for block in blocks:
            if self._state_of[block] is not CopyState.DIRTY:
                raise InvariantViolation(f"block {block} is saved although it is not dirty")
            self._state_of[block] = CopyState.SAVING
            del self._dirty_used[block]

    def end_saving(self, block: int, key: bytes, *, saved: bool) -> None:
        """Whether a copy of the content `key`, which this block had, arrived. Nothing if it has other content now."""
        if self._key_of[block] == key and self._state_of[block] is CopyState.SAVING:
            self._set_state(block, CopyState.CLEAN if saved else CopyState.DIRTY)

    def nothing_is_below(self) -> None:
        """All copies are gone: every sealed block counts as dirty."""
        for block, key in enumerate(self._key_of):
            if key is not None and self._state_of[block] is not CopyState.DIRTY:
                self._set_state(block, CopyState.DIRTY)

    def _set_state(self, block: int, state: CopyState) -> None:
        idle = self._references[block] == 0
        if idle:
            del self._idle[self._state_of[block]][block]
            self._idle[state][block] = None
        elif state is CopyState.DIRTY:
            self._dirty_used[block] = None
        self._state_of[block] = state

    # ---- checks

    def validate(self, tables: Iterable[Sequence[int]], held: Iterable[Sequence[int]] = ()) -> None:
        """Recount from scratch against all block tables in use and all transfers. Raises InvariantViolation."""
        counts, holds = [0] * self.num_blocks, [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        for blocks in held:
            for block in blocks:
                counts[block] += 1
                holds[block] += 1
        if counts != self._references:
            wrong = [b for b in range(self.num_blocks) if counts[b] != self._references[b]]
            raise InvariantViolation(f"reference counts of blocks {wrong[:8]} differ from the tables that list them")
        if {block: count for block, count in enumerate(holds) if count} != self._held:
            raise InvariantViolation("blocks held by transfers differ from what the transfers list")
        free = self._free + [block for blocks in self._idle.values() for block in blocks]
        if len(set(free)) != len(free) or any(counts[block] for block in free):
            raise InvariantViolation("a free block is listed twice or still referenced")
        if len(free) + sum(count > 0 for count in counts) != self.num_blocks:
            raise InvariantViolation("free and referenced blocks do not add up to the pool")
        self._validate_content(counts)

    def _validate_content(self, counts: Sequence[int]) -> None:
        for block, key in enumerate(self._key_of):
            if key is not None and self._block_of.get(key) != block:
                raise InvariantViolation(f"block {block} and the prefix map disagree")
        if len(self._block_of) != sum(key is not None for key in self._key_of) or any(
            self._key_of[block] is not None for block in self._free
        ):
            raise InvariantViolation("the prefix map names a block that holds no content")
        for state, blocks in self._idle.items():
            if any(self._key_of[block] is None or self._state_of[block] is not state for block in blocks):
                raise InvariantViolation(f"a free block is listed as {state.name} and is not")
        dirty = {b for b, count in enumerate(counts) if count and self.is_dirty(b)}
        if dirty != set(self._dirty_used):
            raise InvariantViolation("referenced dirty blocks and their list differ")
