"""The pool's bookkeeping by itself: a short last chunk, and slot sizes that compete for chunks."""

from __future__ import annotations

import random

import pytest

from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.slots import Slot, SlotPool, SlotState


def test_all_pages_are_cut_and_none_twice() -> None:
    pool = SlotPool(20 * PAGE_BYTES, 8 * PAGE_BYTES)  # chunks of 8, 8 and 4 pages
    assert [pool.slots_for(pages) for pages in (1, 3, 4, 5, 8, 9)] == [20, 5, 5, 2, 2, 0]
    assert [pool.chunks_for(pages) for pages in (1, 4, 5, 8, 9)] == [3, 3, 2, 2, 0]
    taken = [pool.take(4, SlotState.LENT, 1) for _ in range(6)]
    assert [None if slot is None else slot.page for slot in taken] == [0, 4, 8, 12, 16, None]
    pool.validate()


def test_the_short_chunk_is_left_to_slots_that_fit() -> None:
    pool = SlotPool(20 * PAGE_BYTES, 8 * PAGE_BYTES)
    large = [pool.take(8, SlotState.LENT, 1) for _ in range(3)]
    assert [None if slot is None else slot.page for slot in large] == [0, 8, None]
    assert pool.has_way_to(4)
    assert not pool.has_way_to(5), "every chunk that is large enough has a lent slot"
    small = pool.take(4, SlotState.LENT, 2)
    assert small is not None
    assert small.page == 16
    pool.free(small)
    assert pool.take(8, SlotState.LENT, 1) is None, "a chunk that is too short is not taken apart for it"
    assert pool.chunks_of_other_sizes(8) == []
    for slot in large[:2]:
        assert slot is not None
        pool.move(slot, SlotState.VISIBLE, None)
    assert pool.has_way_to(5), "what is not lent can be evicted"
    pool.validate()


def test_a_chunk_that_is_emptied_goes_to_the_size_that_waits() -> None:
    pool = SlotPool(16 * PAGE_BYTES, 8 * PAGE_BYTES)
    ones = [pool.take(1, SlotState.LENT, 1) for _ in range(16)]
    pool.empty_a_chunk_for(2)
    for slot in ones:
        assert slot is not None
        pool.free(slot)
        pool.validate()
    assert sum(pool.take(1, SlotState.LENT, 1) is not None for _ in range(16)) == 8, "the other chunk is left alone"
    assert sum(pool.take(2, SlotState.LENT, 1) is not None for _ in range(8)) == 4
    pool.empty_a_chunk_for(4)
    assert pool.take(2, SlotState.LENT, 1) is None
    assert not any(map(pool.is_emptying, pool.chunks_of_other_sizes(4))), "no size loses its only chunk"


@pytest.mark.parametrize("seed", range(20))
def test_sizes_that_wait_for_chunks_at_random(seed: int) -> None:
    rng = random.Random(seed)
    pool = SlotPool(40 * PAGE_BYTES, 8 * PAGE_BYTES)
    held: list[Slot] = []
    served = dict.fromkeys((1, 2, 3), 0)
    for _ in range(600):
        size = rng.choice((1, 1, 1, 2, 3))
        if held and rng.randrange(2):
            pool.free(held.pop(rng.randrange(len(held))))
        elif (slot := pool.take(size, SlotState.LENT, 1)) is not None:
            held.append(slot)
            served[size] += 1
        elif rng.randrange(4):
            pool.empty_a_chunk_for(size)
        else:
            pool.empty_no_chunk_for(size)
        pool.validate()
    assert min(served.values()) > 5
