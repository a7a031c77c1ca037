"""Memory for KV and weights: at a page, zeros, in large pages, locked exactly as long as somebody has it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tournant.workers.host_memory import LARGE_PAGE_BYTES, host_memory, page_aligned


def flags_at(address: int) -> list[str]:
    """What the kernel notes of the mapping that holds an address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (bounds := line.split(" ", 1)[0].split("-"))[-1] != bounds[0]:
            here = int(bounds[0], 16) <= address < int(bounds[1], 16)
        elif here and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"{address:#x} is nowhere")


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 100_000, LARGE_PAGE_BYTES, 3 * LARGE_PAGE_BYTES + 5])
def test_zeros_that_begin_at_a_page(num_bytes: int) -> None:
    memory = page_aligned(num_bytes)
    assert (memory.dtype, len(memory)) == (torch.uint8, num_bytes)
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    assert not memory.any()
    memory.fill_(7)
    assert bool((memory == 7).all())


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without large pages")
def test_much_of_it_is_asked_for_in_large_pages() -> None:
    large, small = page_aligned(2 * LARGE_PAGE_BYTES), page_aligned(4 * mmap.PAGESIZE)
    assert "hg" in flags_at(large.data_ptr())
    assert "hg" not in flags_at(small.data_ptr())


def test_locked_while_a_tensor_has_it() -> None:
    events: list[tuple[str, int, int]] = []

    def lock(address: int, num_bytes: int) -> Callable[[], None]:
        events.append(("lock", address, num_bytes))
        return lambda: events.append(("unlock", address, num_bytes))

    memory = host_memory(lock, 8192)
    address = memory.data_ptr()
    assert events == [("lock", address, 8192)]
    del memory
    assert events[1:] == [("unlock", address, 8192)]
    assert not host_memory(lock, 0).any()
    assert len(events) == 2
