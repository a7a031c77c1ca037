"""The bytes below one shard's device: places for whole blocks in RAM and, behind them, on disk.

Owns the memory, the file, its checksums and the threads that write and read it. Which content lies in which place is
`OverflowBlocks`' business, when it is read overflow_attention.py's. Places 0 to host_blocks - 1 are RAM, the rest disk.
In both, layer l of all blocks lies together: attention reads one layer of many blocks at a time, in their order.

Over a link (`Device.has_link`) blocks leave in a lane of their own: computing gathers them in a room on the device,
from where they are copied while it goes on. There are two rooms, so it waits only for the copies before the last.

Guarantees:
 1. A read gives what the last `put` of a place put there, or says that it is lost; checksums are of a block's layer,
    and of each KV head of it where heads are read alone.
 2. RAM in use is host_blocks blocks and STAGED_BLOCKS more; `put` waits when as many are on their way to the disk.
 3. The file has mode 0600 and no name: it ends with the process, whatever ends that.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from tournant.kernels import ops
from tournant.kernels.block_sparse import key_bounds
from tournant.kernels.layout import KVLayout
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_io import DiskIO
from tournant.kvstore.token_bucket import Pace
from tournant.workers.device import Device, Mark
from tournant.workers.errors import ConfigError
from tournant.workers.host_memory import host_memory, page_aligned
from tournant.workers.kv_cache import available_memory_bytes
from tournant.workers.spill_file import SpillError, SpillFile, spill_folder

STAGED_BLOCKS = 16  # on their way to the disk at a time
NUM_WRITERS = 2
logger = logging.getLogger("tournant.engine")


@dataclass
class _Room:
    """Memory of the device for blocks that leave it, [slices, 2, kv_heads, block_tokens, head_size]. left: when its
    last copies are over.
    """

    slices: torch.Tensor
    left: Mark


class OverflowPool:
    """`num_blocks` places for blocks of `layout`, ids from 0. Called by one thread; `read_layer` by any.

    host: the RAM part, as `layout` shapes it but with layers outermost in memory, locked where the device has a link;
    folder: of the file; disk: its system calls, for tests; host_pace, disk_pace: emulate a slower link and drive;
    bounds_dtype: that of queries; least and largest values of keys are noted for sparse attention then, in `bounds`
    [layers, kv_heads, places, 2, head_size].
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
        bounds_dtype: torch.dtype | None = None,
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
        self._device = device
        self._memory = host_memory(device.page_lock, wanted)  # locked as long as this tensor lives
        _, num_layers, *slice_shape = layout.shape(0)
        self._layers = self._memory.view(layout.dtype).view(num_layers, host_blocks, *slice_shape)
        self.host = self._layers.transpose(0, 1)
        self.host_pace = host_pace or Pace(0)
        self._disk_pace = disk_pace or Pace(0)
        num_bounds = 0 if bounds_dtype is None else self.num_blocks
        of_bounds = (layout.num_layers, layout.num_kv_heads, num_bounds, 2, layout.head_size)
        bounds = page_aligned(math.prod(of_bounds) * (bounds_dtype or torch.uint8).itemsize)
        self.bounds = bounds.view(bounds_dtype or torch.uint8).view(of_bounds)
        self.layer_layout = replace(layout, num_layers=1)
        self.layer_bytes = layout.block_bytes // layout.num_layers
        self._written = 0
        self._disk_blocks = disk_blocks
        self._sums = np.zeros((disk_blocks, layout.num_layers), np.uint64)
        of_panels = (disk_blocks if num_bounds else 0, layout.num_layers, 2, layout.num_kv_heads)
        self._panel_sums = np.zeros(of_panels, np.uint64)  # of K and V of each head
        self._writing: dict[int, Future[None]] = {}
        self._staged = threading.Semaphore(STAGED_BLOCKS)
        self._lock = threading.Lock()
        self._broken: set[int] = set()
        self._warned = False
        self._landing: dict[int, Mark] = {}
        if device.has_link:
            self._lane = device.new_lane()
            shape = (num_layers * STAGED_BLOCKS, *slice_shape)
            place = device.torch_device
            self._rooms = [_Room(torch.empty(shape, dtype=layout.dtype, device=place), self._lane.mark()) for _ in "ab"]
        if disk_blocks:
            self._open_file(folder or spill_folder(), disk)
            self._writers = ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="overflow-writer")

    def _open_file(self, folder: Path, disk: DiskIO | None) -> None:
        wanted = self._disk_blocks * self.layout.block_bytes
        try:
            self._file = SpillFile(folder, disk)
            free = shutil.disk_usage(folder).free
            self._start = self._file.take(-(-wanted // PAGE_BYTES) * PAGE_BYTES)
        except OSError as error:
            raise ConfigError(f"overflow_disk_bytes needs a file: {error.strerror or error}") from error
        if wanted > free:
            self._file.close()
            raise ConfigError(
                f"overflow_disk_bytes is {wanted}, but {folder} has {free} free; choose less, or another "
                "overflow_folder"
            )

    def take_written(self) -> int:
        """Bytes that were put since the last call."""
        written, self._written = self._written, 0
        return written

    def is_on_disk(self, place: int) -> bool:
        """Whether a place is not in RAM."""
        return place >= self.host_blocks

    def put(self, tensor: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of a device's KV tensor to places: (block, place). The blocks may be written when this returns,
        on a GPU by work that is given to it afterwards.
        """
        if self._device.has_link:
            self._send(tensor, pairs)
        else:
            self._copy(tensor, pairs)
        self._written += len(pairs) * self.layout.block_bytes
        self.host_pace.spend(len(pairs) * self.layout.block_bytes)

    def _copy(self, tensor: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        for block, place in pairs:
            if self.bounds.shape[2]:
                self.bounds[:, :, place] = key_bounds(tensor[block : block + 1], self.bounds.dtype)[0]
            if self.is_on_disk(place):
                self._staged.acquire()
                self._write_behind(place, tensor[block].clone(), None)
            else:
                self.host[place].copy_(tensor[block])

    def _send(self, tensor: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Over a link, see the module."""
        self._landing = {place: mark for place, mark in self._landing.items() if not mark.done()}
        num_layers, slices = self.layout.num_layers, tensor.view(-1, *tensor.shape[2:])
        for start in range(0, len(pairs), STAGED_BLOCKS):
            part = pairs[start : start + STAGED_BLOCKS]
            blocks, places = np.asarray(part, dtype=np.int64).T
            (ids,) = self._device.upload([(blocks * num_layers + np.arange(num_layers)[:, None]).ravel()])
            self._rooms.reverse()
            room = self._rooms[0]
            room.left.hold_compute()
            leaving = room.slices[: len(ids)]
            ops.gather_blocks(slices, ids, leaving)
            leaving = leaving.view(num_layers, len(part), *slices.shape[1:])
            self._lane.follow_compute()
            for first, end in self.runs(places.tolist()):
                self._send_run(leaving[:, first:end], int(places[first]))
            room.left = self._lane.mark()

    def _send_run(self, leaving: torch.Tensor, first: int) -> None:
        """Blocks [layers, blocks, ...] of a room into consecutive places of RAM, or of the disk."""
        if self.is_on_disk(first):
            for index in range(leaving.shape[1]):
                self._staged.acquire()
                image = self._device.host_buffer(leaving[:, index].shape, leaving.dtype)
                with self._lane.active():
                    for layer, target in zip(leaving, image, strict=True):
                        target.copy_(layer[index], non_blocking=True)
                self._write_behind(first + index, image, self._lane.mark())
            return
        with self._lane.active():
            for layer, target in zip(leaving, self._layers, strict=True):  # each dense, so that nothing waits for it
                target[first : first + len(layer)].copy_(layer, non_blocking=True)
        self._landing.update(dict.fromkeys(range(first, first + leaving.shape[1]), self._lane.mark()))

    def landing(self, places: Sequence[int]) -> list[Mark]:
        """What must be over before these places of RAM are read."""
        known = self._landing
        return list({id(known[place]): known[place] for place in places if place in known}.values()) if known else []

    def runs(self, places: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(first index, end) of places that follow one another, all in RAM or all on disk."""
        start = 0
        for end in range(1, len(places) + 1):
            if end == len(places) or places[end] != places[end - 1] + 1 or places[end] == self.host_blocks:
                yield start, end
                start = end

    def _write_behind(self, place: int, image: torch.Tensor, there: Mark | None) -> None:
        """Write a block [layers, 2, kv_heads, block_tokens, head_size] to the disk once it is `there`."""
        before = self._writing.get(place)
        self._writing[place] = self._writers.submit(self._write, place, image, before, there)

    def _write(self, place: int, image: torch.Tensor, before: Future[None] | None, there: Mark | None) -> None:
        try:
            if before is not None:
                wait((before,))  # whatever became of it
            if there is not None:
                there.wait()
            data = image.view(torch.uint8).numpy().reshape(self.layout.num_layers, self.layer_bytes)
            row = place - self.host_blocks
            for layer in range(self.layout.num_layers):
                self._sums[row, layer] = xxhash.xxh3_64_intdigest(data[layer])
                self._file.write(self._offset(row, layer), memoryview(data[layer]))
            if len(self._panel_sums):
                panels = data.reshape(self._panel_sums[row].size, -1)
                self._panel_sums[row].flat = [xxhash.xxh3_64_intdigest(panels[i]) for i in range(len(panels))]
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
        wanted = np.asarray(places, dtype=np.int64)
        on_disk = wanted >= self.host_blocks
        for part in np.split(np.arange(len(wanted)), np.flatnonzero(np.diff(on_disk)) + 1) if len(wanted) else ():
            first, end = int(part[0]), int(part[-1]) + 1
            if not on_disk[first]:
                source = self._layers[layer].view(torch.uint8).view(self.host_blocks, self.layer_bytes)
                out = torch.from_numpy(rows[first:end])
                torch.index_select(source, 0, torch.from_numpy(wanted[first:end]), out=out)
                self.host_pace.spend((end - first) * self.layer_bytes)
                continue
            for start, stop in self.runs(places[first:end]):
                run = slice(first + start, first + stop)
                lost |= self._read_disk(layer, places[run], rows[run])
        return frozenset(lost)

    def _settle(self, places: Sequence[int]) -> None:
        """Wait for what is on its way to places of the disk."""
        for place in places:
            if (writing := self._writing.get(place)) is not None:
                writing.result()

    def read_heads(
        self, layer: int, places: Sequence[int], heads: npt.NDArray[np.bool_], target: torch.Tensor
    ) -> frozenset[int]:
        """As `read_layer`, of each place only some KV heads: bool [kv_heads, len(places)]. What target holds for the
        others stays. For pools that keep bounds.
        """
        panels = target.view(torch.uint8).numpy().reshape(len(target), 2, self.layout.num_kv_heads, -1)
        lost: set[int] = set()
        whole = np.asarray(heads.all(axis=0))
        cuts = np.flatnonzero(np.diff(whole)) + 1
        for part in np.split(np.arange(len(places)), cuts) if places else ():
            if whole[part].all():
                start, end = int(part[0]), int(part[-1]) + 1
                lost |= self.read_layer(layer, places[start:end], target[start:end])
                continue
            for index in part.tolist():
                place, which = places[index], np.flatnonzero(heads[:, index])
                if self.is_on_disk(place):
                    lost |= self._read_panels(layer, place, which, panels[index])
                    continue
                chosen = torch.from_numpy(which)
                target[index, 0][:, chosen] = self._layers[layer, place][:, chosen]
                self.host_pace.spend(len(which) * self.layer_bytes // len(heads))
        return frozenset(lost)

    def _read_panels(
        self, layer: int, place: int, heads: npt.NDArray[np.int64], panels: npt.NDArray[np.uint8]
    ) -> set[int]:
        """K and V of some heads of a place of the disk into panels [2, kv_heads, bytes]."""
        self._settle([place])
        row, panel_bytes = place - self.host_blocks, panels.shape[-1]
        starts = np.r_[0, np.flatnonzero(np.diff(heads) > 1) + 1, len(heads)]
        good = place not in self._broken
        try:
            for kind in range(2):
                for first, end in zip(heads[starts[:-1]], heads[starts[1:] - 1] + 1, strict=True):
                    at = (kind * panels.shape[1] + int(first)) * panel_bytes
                    self._file.read(self._offset(row, layer) + at, memoryview(panels[kind, first:end].reshape(-1).data))
        except (SpillError, OSError) as error:
            self._fail(place, error)
            good = False
        self._disk_pace.spend(2 * len(heads) * panel_bytes)
        sums = self._panel_sums[row, layer]
        good = good and all(xxhash.xxh3_64_intdigest(panels[k, h]) == int(sums[k, h]) for k in range(2) for h in heads)
        if not good:
            panels[:, heads] = 0
        return set() if good else {place}

    def _read_disk(self, layer: int, places: Sequence[int], rows: npt.NDArray[np.uint8]) -> set[int]:
        """Consecutive places of the disk into consecutive rows."""
        self._settle(places)
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
