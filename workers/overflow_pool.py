"""The bytes below one shard's device: places for whole blocks in RAM and, behind them, on disk.

Owns the memory, the file, its checksums and the threads that write and read it. Which content lies in which place is
`OverflowBlocks`' business, when it is read overflow_attention.py's. Places 0 to host_blocks - 1 are RAM, the rest disk.
On disk, layer l of all blocks lies together: attention reads one layer of many blocks at a time, in their order.

Guarantees:
 1. A read gives what the last `put` of a place put there, or says that it is lost; checksums are of a block's layer.
 2. RAM in use is host_blocks blocks and STAGED_BLOCKS more; `put` waits when as many are on their way to the disk.
 3. The file has mode 0600 and no name: it ends with the process, whatever ends that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from tournant.kernels.block_sparse import key_bounds
from tournant.kernels.layout import KVLayout
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_io import DiskIO, page_buffer
from tournant.kvstore.token_bucket import Pace
from tournant.workers.device import Device
from tournant.workers.errors import ConfigError
from tournant.workers.kv_cache import available_memory_bytes
from tournant.workers.spill_file import SpillError, SpillFile

STAGED_BLOCKS = 16  # on their way to the disk at a time
NUM_WRITERS = 2
logger = logging.getLogger("tournant.engine")


class OverflowPool:
    """`num_blocks` places for blocks of `layout`, ids from 0. Called by one thread; `read_layer` by any.

    folder: of the file; disk: its system calls, for tests; host_pace, disk_pace: emulate a slower link and drive;
    keeps_bounds: note least and largest values of keys for sparse attention, in `bounds` [layers, kv_heads, 2, places,
    head_size].
    Raises ConfigError when the form of KV has scales or the file cannot be made.
    """

    def __init__(
        self,
        layout: KVLayout,
        host_blocks: int,
        disk_blocks: int,
        device: Device,
        folder: Path | None = None,
        disk: DiskIO | None = None,
        host_pace: Pace | None = None,
        disk_pace: Pace | None = None,
        *,
        keeps_bounds: bool = False,
    ) -> None:
        if layout.has_scales:
            raise ConfigError(
                "kv_cache_dtype is 'fp8_e4m3', whose scales stay on the device; with an overflow use fp8_e5m2 or auto"
            )
        self.layout = layout
        self.host_blocks = host_blocks
        self.num_blocks = host_blocks + disk_blocks
        if (wanted := host_blocks * layout.block_bytes) > (free := available_memory_bytes()):
            raise ConfigError(
                f"overflow_host_bytes is {wanted}, but only {free} bytes of memory are free; choose at most "
                f"{free // 2}, or use overflow_disk_bytes"
            )
        self.host = device.host_buffer(layout.shape(host_blocks), layout.dtype)
        self.host_pace = host_pace or Pace(0)
        self._disk_pace = disk_pace or Pace(0)
        shape = (layout.num_layers, layout.num_kv_heads, 2, self.num_blocks if keeps_bounds else 0, layout.head_size)
        exact = layout.dtype if layout.dtype.itemsize > 1 else torch.bfloat16  # every fp8 value is one of these
        self.bounds = torch.zeros(shape, dtype=exact)
        self._keeps_bounds = keeps_bounds
        self.layer_bytes = layout.block_bytes // layout.num_layers
        self.bytes_written = 0
        self._disk_blocks = disk_blocks
        self._sums = np.zeros((disk_blocks, layout.num_layers), np.uint64)
        self._writing: dict[int, Future[None]] = {}
        self._staged = threading.Semaphore(STAGED_BLOCKS)
        self._lock = threading.Lock()
        self._broken: set[int] = set()
        self._warned = False
        if disk_blocks:
            try:
                self._file = SpillFile(folder, disk)
                total = disk_blocks * layout.block_bytes
                self._start = self._file.take(-(-total // PAGE_BYTES) * PAGE_BYTES)
            except OSError as error:
                raise ConfigError(f"overflow_disk_bytes needs a file: {error}") from error
            self._writers = ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="overflow-writer")

    def is_on_disk(self, place: int) -> bool:
        """Whether a place is not in RAM."""
        return place >= self.host_blocks

    def put(self, tensor: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of a device's KV tensor to places: (block, place). The blocks may be written when this returns,
        on a GPU by work that is given to it afterwards.
        """
        for block, place in pairs:
            if self._keeps_bounds:
                self.bounds[:, :, :, place] = key_bounds(tensor[block : block + 1])[0]
            if not self.is_on_disk(place):
                self.host[place].copy_(tensor[block], non_blocking=True)
                continue
            self._staged.acquire()
            staged = tensor[block].to("cpu", copy=True)
            before = self._writing.get(place)
            self._writing[place] = self._writers.submit(self._write, place, staged, before)
        self.bytes_written += len(pairs) * self.layout.block_bytes
        self.host_pace.spend(len(pairs) * self.layout.block_bytes)

    def _write(self, place: int, staged: torch.Tensor, before: Future[None] | None) -> None:
        if before is not None:
            before.result()
        try:
            data = staged.view(torch.uint8).numpy().reshape(self.layout.num_layers, self.layer_bytes)
            row = place - self.host_blocks
            for layer in range(self.layout.num_layers):
                self._sums[row, layer] = xxhash.xxh3_64_intdigest(data[layer])
                self._file.write(self._offset(row, layer), memoryview(data[layer]))
            with self._lock:
                self._broken.discard(place)
            self._disk_pace.spend(data.nbytes)
        except (SpillError, OSError) as error:
            self._fail(place, error)
        finally:
            self._staged.release()

    def _fail(self, place: int, error: OSError) -> None:
        with self._lock:
            self._broken.add(place)
            warned, self._warned = self._warned, True
        if not warned:
            logger.error("the overflow's disk fails, sequences that need it are computed again: %s", error)

    def _offset(self, row: int, layer: int) -> int:
        return self._start + (layer * self._disk_blocks + row) * self.layer_bytes

    def read_layer(self, layer: int, places: Sequence[int], target: torch.Tensor) -> frozenset[int]:
        """Layer `layer` of places into target[i, 0], on the CPU, dense [at least len(places), 1, 2, kv_heads,
        block_tokens, head_size]. Returns the places that are lost; their targets are zeros then.
        """
        rows = target.view(torch.uint8).numpy().reshape(len(target), self.layer_bytes)
        lost: set[int] = set()
        start = 0
        while start < len(places):
            end = start + 1
            on_disk = self.is_on_disk(places[start])
            while end < len(places) and places[end] == places[end - 1] + 1 and self.is_on_disk(places[end]) == on_disk:
                end += 1
            if on_disk:
                lost |= self._read_disk(layer, places[start:end], rows[start:end])
            else:
                target[start:end, 0].copy_(self.host[places[start] : places[start] + end - start, layer])
                self.host_pace.spend((end - start) * self.layer_bytes)
            start = end
        return frozenset(lost)

    def _read_disk(self, layer: int, places: Sequence[int], rows: npt.NDArray[np.uint8]) -> set[int]:
        """Consecutive places of the disk into consecutive rows."""
        for place in places:
            if (writing := self._writing.get(place)) is not None:
                writing.result()
        first = places[0] - self.host_blocks
        try:
            self._file.read(self._offset(first, layer), memoryview(rows.reshape(-1).data))
        except (SpillError, OSError) as error:
            for place in places:
                self._fail(place, error)
            rows[:] = 0
            return set(places)
        self._disk_pace.spend(rows.nbytes)
        lost = set()
        for row, place in zip(rows, places, strict=True):
            good = xxhash.xxh3_64_intdigest(row) == int(self._sums[place - self.host_blocks, layer])
            if place in self._broken or not good:
                lost.add(place)
                row[:] = 0
        return lost

    def close(self) -> None:
        """Wait for what is being written and end the file. Idempotent."""
        if self._disk_blocks:
            self._writers.shutdown()
            self._file.close()


def page_aligned(num_bytes: int) -> torch.Tensor:
    """uint8 memory of the CPU that begins at a page, zeroed, taken from the system when first written."""
    return torch.frombuffer(page_buffer(max(1, -(-num_bytes // PAGE_BYTES))), dtype=torch.uint8)[:num_bytes]
