"""The block manager against a naive model, and what `validate` catches."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tournant.kvstore.errors import InvariantViolation
from tournant.workers.block_manager import BlockManager


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


class BlockManagerMachine(RuleBasedStateMachine):
    """A model that knows which tables hold which block, and which block last got which key.

    content: block -> key, as far as it was not given out anew since; it may vanish only while nobody holds the block.
    """

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        """An empty pool."""
        self.num_blocks = num_blocks
        self.manager = BlockManager(num_blocks, 8)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.next_key = 0

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        """New blocks, or none when too few are free."""
        held = {block for table in self.tables for block in table}
        blocks = self.manager.allocate(count)
        assert (blocks is None) == (count > self.num_blocks - len(held))
        if blocks is not None:
            assert not held & set(blocks)
            for block in blocks:
                self.content.pop(block, None)
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A sequence ends."""
        self.manager.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        """A block is full."""
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        if block not in self.content:
            self.next_key += 1
            self.manager.seal(block, key(self.next_key))
            self.content[block] = key(self.next_key)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A sequence begins with a block that is there."""
        block, found = data.draw(st.sampled_from(sorted(self.content.items())))
        assert self.manager.match([found, key(1 << 20)]) == [block]
        self.manager.acquire([block])
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Copy on write: exactly when the block is shared or sealed."""
        table = data.draw(st.sampled_from(self.tables))
        source = table[0]
        shared = sum(other.count(source) for other in self.tables) > 1
        assert self.manager.must_copy(source) == (shared or source in self.content)
        if self.manager.must_copy(source) and (fresh := self.manager.allocate(1)) is not None:
            table[0] = fresh[0]
            self.manager.release([source])
            self.content.pop(table[0], None)

    @invariant()
    def counts_agree(self) -> None:
        """A recount finds nothing."""
        if hasattr(self, "manager"):
            self.manager.validate(self.tables)

    def teardown(self) -> None:
        """Without holders everything is free, and a reset forgets all content."""
        if not hasattr(self, "manager"):
            return
        for table in self.tables:
            self.manager.release(table)
        assert self.manager.reset()
        assert self.manager.num_free == self.num_blocks
        assert all(self.manager.match([found]) == [] for found in self.content.values())


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_least_recently_released_content_goes_first_and_tails_before_heads() -> None:
    manager = BlockManager(4, 8)
    first, second = manager.allocate(2), manager.allocate(2)
    if first is None or second is None:
        raise ValueError("the pool is too small for this test")
    for number, block in enumerate([*first, *second]):
        manager.seal(block, key(number))
    manager.release(first)
    manager.release(second)
    assert manager.allocate(1) == [first[1]]
    assert manager.match([key(0)]) == [first[0]]
    assert manager.match([key(1)]) == []
    assert manager.allocate(2) == [first[0], second[1]]
    assert manager.match([key(2), key(3)]) == [second[0]]


def test_two_blocks_of_one_content_keep_the_first_findable() -> None:
    manager = BlockManager(2, 8)
    table = manager.allocate(2)
    if table is None:
        raise ValueError("the pool is too small for this test")
    manager.seal(table[0], key(1))
    manager.seal(table[1], key(1))
    assert manager.match([key(1)]) == [table[0]]
    assert not manager.must_copy(table[1])
    manager.validate([table])


def test_misuse_is_an_invariant_violation() -> None:
    manager = BlockManager(3, 8)
    table = manager.allocate(2)
    if table is None:
        raise ValueError("the pool is too small for this test")
    with pytest.raises(InvariantViolation, match="differ from the tables"):
        manager.validate([])
    with pytest.raises(InvariantViolation, match="differ from the tables"):
        manager.validate([table, table])
    manager.release(table)
    with pytest.raises(InvariantViolation, match="more often"):
        manager.release(table)
    with pytest.raises(InvariantViolation, match="while free"):
        manager.seal(table[0], key(1))
    with pytest.raises(ValueError, match="at least one block"):
        BlockManager(0, 8)


def test_no_change_when_too_few_blocks_are_free() -> None:
    manager = BlockManager(3, 8)
    table = manager.allocate(2) or []
    assert manager.allocate(2) is None
    assert manager.num_free == 1
    manager.allocate(1)
    assert manager.allocate(1) is None
    manager.validate([table, [2]])
