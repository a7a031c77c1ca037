"""The block manager against a naive model, and what `validate` catches."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tournant.kvstore.errors import InvariantViolation
from tournant.workers.block_manager import BlockManager


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


@given(st.integers(0, 1 << 32))
def test_random_use_agrees_with_a_naive_model(seed: int) -> None:
    """The model knows which block last got which key and which tables hold it; content may vanish only when unused."""
    rng = random.Random(seed)
    manager = BlockManager(num_blocks := rng.randint(1, 12), 8)
    tables: list[list[int]] = []
    content: dict[int, bytes] = {}  # block -> key, as far as it was not given out anew since
    for number in range(80):
        action = rng.choice(["allocate", "allocate", "release", "seal", "share", "write"])
        if action == "allocate":
            count = rng.randint(1, 4)
            free = num_blocks - len({block for table in tables for block in table})
            blocks = manager.allocate(count)
            assert (blocks is None) == (count > free)
            if blocks is not None:
                assert not {block for table in tables for block in table} & set(blocks)
                for block in blocks:
                    content.pop(block, None)
                tables.append(blocks)
        elif tables and action == "release":
            manager.release(tables.pop(rng.randrange(len(tables))))
        elif tables and action == "seal":
            block = rng.choice(rng.choice(tables))
            if block not in content:
                manager.seal(block, key(number))
                content[block] = key(number)
        elif content and action == "share":
            block, found = rng.choice(sorted(content.items()))
            assert manager.match([found, key(10_000)]) == [block]
            manager.acquire([block])
            tables.append([block])
        elif tables and action == "write":
            table = rng.choice(tables)
            shared = sum(other.count(table[0]) for other in tables) > 1
            assert manager.must_copy(table[0]) == (shared or table[0] in content)
            source = table[0]
            if manager.must_copy(source) and (pair := manager.replace_for_write(table, 0)) is not None:
                assert pair == (source, table[0])
                content.pop(table[0], None)
        manager.validate(tables)
    for table in tables:
        manager.release(table)
    assert manager.reset()
    assert manager.num_free == num_blocks
    assert all(manager.match([found]) == [] for found in content.values())


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
    manager.acquire(table)
    manager.allocate(1)
    assert manager.replace_for_write(table, 0) is None
    assert table == [0, 1]
