"""The ring that layers of blocks below the device pass through on their way to attention, and the threads that fill it.

Owns the parts and when each may be filled. What goes through, and in which order, is overflow_attention.py's business.
A part is memory of the CPU; where the device has a link (`Device.has_link`), and memory of the device behind it, to
which blocks in RAM are copied from where they lie, those on disk by way of the first.

Invariants:
 1. A part of the device is written only after all computing that was given to it when the fill began, and is read only
    after `Fill.arrive`.
 2. Memory of the CPU is overwritten only after it was copied to the device.
 3. Copies go over the link one after another, in the order in which what they need is there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from tournant.workers.device import Device, Lane, Mark, Stopwatch
from tournant.workers.host_memory import host_memory
from tournant.workers.overflow_pool import OverflowPool

NUM_PARTS = 3  # one that is read, two that are filled
PART_TOKENS = 4096  # of one layer, so that a copy takes longer than asking for it, and giving it to a GPU
NUM_READERS = 2


@dataclass(slots=True)
class Part:
    """host, device: one layer of blocks, [part_blocks, 1, 2, kv_heads, block_tokens, head_size], the same where there
    is no link; sent: when what lay here has reached the device; coming: of its latest fill.
    """

    host: torch.Tensor
    device: torch.Tensor
    lane: Lane
    sent: Mark
    coming: Future[frozenset[int]] | None = None


@dataclass(slots=True)
class Fill:
    """What a walk needs, on its way to a part. on_cpu: to the part's memory of the CPU."""

    part: Part
    on_cpu: bool
    done: Future[frozenset[int]] = field(default_factory=Future)

    def arrive(self) -> frozenset[int]:
        """Wait until the blocks are there, or their copies begun and computing told to wait. The places that were lost:
        zeros are there instead.
        """
        lost = self.done.result()
        if not self.on_cpu:
            self.part.sent.hold_compute()
        return lost


class OverflowRing:
    """NUM_PARTS parts in turn and one beside them. One per shard."""

    def __init__(self, pool: OverflowPool, device: Device) -> None:
        self.layout = layout = pool.layer_layout
        self.part_blocks = max(PART_TOKENS, layout.block_tokens) // layout.block_tokens
        self.copies: deque[tuple[int, Stopwatch]] = deque()  # bytes that go over the link, and for how long
        self.readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="overflow-reader")
        self._pool = pool
        self._device = device
        self._memory: list[torch.Tensor] = []  # locked as long as these tensors live
        self.parts = [self._part() for _ in range(NUM_PARTS)]
        self.spare = self._part()  # for what was not foreseen
        self._link = threading.Lock()
        self._last = self.spare.sent

    def _part(self) -> Part:
        layout, shape = self.layout, self.layout.shape(self.part_blocks)
        memory = host_memory(self._device.page_lock, self.part_blocks * layout.block_bytes)
        self._memory.append(memory)
        host = memory.view(layout.dtype).view(shape)
        there = host
        if self._device.has_link:
            there = torch.empty(shape, dtype=layout.dtype, device=self._device.torch_device)
        lane = self._device.new_lane()
        return Part(host, there, lane, lane.mark())

    def fill(self, part: Part, layer: int, places: Sequence[int], *, on_cpu: bool) -> Fill:
        """Begin to bring a layer of places to a part, of which nobody but computing given so far has use."""
        if part.coming is not None:
            wait([part.coming])  # of a step that failed
        on_cpu |= not self._device.has_link
        if not on_cpu:
            part.lane.follow_compute()
        part.coming = self.readers.submit(self._bring, part, layer, places, on_cpu)
        return Fill(part, on_cpu, part.coming)

    @torch.inference_mode()
    def _bring(self, part: Part, layer: int, places: Sequence[int], on_cpu: bool) -> frozenset[int]:
        pool = self._pool
        from_disk = list(places) if on_cpu else [place for place in places if pool.is_on_disk(place)]
        lost = frozenset[int]()
        if from_disk:
            if self._device.has_link:
                part.sent.wait()
            lost = pool.read_layer(layer, from_disk, part.host)
        if on_cpu:
            return lost
        watch, num_read = self._device.stopwatch(), 0
        with self._link, part.lane.active():
            self._last.hold_compute()
            for mark in pool.landing(places):
                mark.hold_compute()
            watch.start()
            for start, end in pool.runs(places):
                first, count = places[start], end - start
                if pool.is_on_disk(first):
                    source = part.host[num_read : num_read + count, 0]
                    num_read += count
                else:
                    source = pool.host[first : first + count, layer]
                part.device[start:end, 0].copy_(source, non_blocking=True)
            watch.stop()
            part.sent = self._last = part.lane.mark()
        num_bytes = len(places) * pool.layer_bytes
        self.copies.append((num_bytes, watch))
        pool.host_pace.spend(num_bytes)
        return lost
