"""The pool's bookkeeping by itself: a short last chunk, and slot sizes that compete for chunks."""

from __future__ import annotations

from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.slots import SlotPool, SlotState


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
