"""Layers of a model that stay on the device, and those that stream to it while it computes.

Owns which layer stays, which lies in RAM and which on disk, and the two buffers on the device that those below take
turns in: while one layer is computed, the next one comes. What a layer is made of is models/layer_weights.py's
business, how images are read layer_images.py's.

A step goes through the layers in order, so what comes next is known; after the last one comes the first one of the next
step. Those that stay are spread evenly among the others, so that copies go on under their computing, too.

Invariants:
 1. On the device are at most device_bytes (fixed parts, norms and biases, layers that stay) and two buffers of the
    largest layer that streams; in RAM host_bytes, and on a GPU, where some are on disk, two buffers more.
 2. A buffer is written only after all computing that reads it was given to the device, and read only after its copy.
 3. A layer that cannot be had is an error of the step that needs it; the next step tries anew.

One thread computes, and asks for layers.
"""

from __future__ import annotations

import logging
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tournant.kvstore.disk_io import DiskIO
from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.token_bucket import Pace
from tournant.workers.config import WeightsOffload
from tournant.workers.device import Device, Mark
from tournant.workers.errors import ConfigError
from tournant.workers.host_memory import host_memory, page_aligned
from tournant.workers.layer_images import (
    Bytes,
    DiskImage,
    HostImage,
    ImageReader,
    ModelFile,
    Range,
    WeightsLost,
    pieces_of,
    ranges_of,
)
from tournant.workers.models.layer_weights import ImageForm, LayerWeights
from tournant.workers.spill_file import SpillFile, spill_folder

NUM_BUFFERS = 2
logger = logging.getLogger("tournant.engine")


@dataclass(frozen=True, slots=True)
class WeightsPlaces:
    """Bytes: fixed (embedding, head, norms, biases, tables of rotation), resident layers, buffers on the device; images
    in RAM and on disk, and of these in a spill file. Layers: how many stay, lie in RAM, on disk.
    """

    fixed: int
    resident: int
    buffers: int
    host: int
    disk: int
    spilled: int
    layers: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class BelowLayer:
    """A layer that streams: itself without matrices, how these lie in its image, and where that is."""

    weights: LayerWeights
    form: ImageForm
    image: HostImage | DiskImage


def spread(index: int, count: int, chosen: int) -> bool:
    """Whether `index` is one of `chosen` of `count` that are spread evenly, the last always among them."""
    return (index + 1) * chosen // count > index * chosen // count


class LayerTiers:
    """Decides where the layers of a model, or of a rank's share of it, lie, and takes them there."""

    def __init__(self, limits: WeightsOffload, device: Device, disk: DiskIO | None = None) -> None:
        self._limits = limits
        self._device = device
        self._disk = disk
        self._files: dict[Path, ModelFile] = {}
        self._spill: SpillFile | None = None

    def place(self, layers: Iterable[LayerWeights], count: int, fixed_bytes: int, first: int = 0) -> StreamedLayers:
        """Take `count` layers, as they are loaded, where they belong. fixed_bytes: of what is on the device anyway;
        first: number of the first in the model. Raises ConfigError when device_bytes or the disk is too small.
        """
        kept: list[LayerWeights | BelowLayer] = []
        room, host, streaming, on_host = self._limits.device_bytes - fixed_bytes, self._limits.host_bytes, 0, 0
        for index, layer in enumerate(layers):
            form = ImageForm.of(layer.matrices)
            if index == 0:
                room -= count * layer.small_bytes
                fixed_bytes += count * layer.small_bytes
                self._check(room, form.num_bytes, fixed_bytes)
                streaming = max(0, count - room // form.num_bytes)
                on_host = min(streaming, host // form.num_bytes)
            if not spread(index, count, streaming) and form.num_bytes <= room:
                room -= form.num_bytes
                kept.append(layer.to(self._device.torch_device))
                continue
            ordinal = sum(isinstance(item, BelowLayer) for item in kept)
            goes_up = form.num_bytes <= host and spread(ordinal, max(streaming, ordinal + 1), on_host)
            host -= form.num_bytes if goes_up else 0
            left = max(1, streaming - on_host)
            kept.append(self._below(layer, form, first + index, left, goes_up=goes_up))
        found = StreamedLayers(kept, self._device, fixed_bytes, self._spill)
        logger.info(
            "layers of the weights on the device, in RAM, on disk: %d, %d, %d; %s", *found.places.layers, found.places
        )
        if self._spill is not None:
            weakref.finalize(found, self._spill.close).atexit = False
        return found

    def _check(self, room: int, layer_bytes: int, fixed_bytes: int) -> None:
        if room < layer_bytes:
            raise ConfigError(
                f"weights_offload.device_bytes is {self._limits.device_bytes}, but embedding, head and norms take "
                f"{fixed_bytes} bytes, and a layer {layer_bytes}; choose at least {fixed_bytes + layer_bytes}"
            )

    def _below(self, layer: LayerWeights, form: ImageForm, number: int, left: int, *, goes_up: bool) -> BelowLayer:
        """A layer taken to RAM or disk. left: layers for which the disk must have room."""
        memory = host_memory(self._device.page_lock, form.num_bytes) if goes_up else page_aligned(form.num_bytes)
        for view, matrix in zip(form.views(memory), layer.matrices, strict=True):
            view.copy_(matrix)
        image: HostImage | DiskImage = HostImage(memory)
        if not goes_up:
            ranges = self._ranges(layer, form, memory.numpy(), left)
            image = DiskImage(number, pieces_of(memory.numpy(), ranges))
        rest = layer.with_matrices([matrix.new_empty(0) for matrix in layer.matrices])
        return BelowLayer(rest.to(self._device.torch_device), form, image)

    def _ranges(self, layer: LayerWeights, form: ImageForm, data: Bytes, left: int) -> list[Range]:
        """Where files hold an image: those of the model, or one that it is written to."""
        try:
            if layer.places is not None:
                starts = [start for start, _, _ in form.parts]
                return list(ranges_of(layer.places, starts, self._opened))
            spill = self._spill_file(left * form.num_bytes)
            offset = spill.take(form.num_bytes)
            spill.write(offset, data.data)
        except OSError as error:
            raise ConfigError(f"weights_offload needs a file for layers: {error.strerror or error}") from error
        return [(spill, offset, 0, form.num_bytes)]

    def _opened(self, path: Path) -> ModelFile:
        if path not in self._files:
            self._files[path] = ModelFile(path, self._disk)
        return self._files[path]

    def _spill_file(self, wanted: int) -> SpillFile:
        """The file for images, which may become so large."""
        if self._spill is None:
            folder = spill_folder() if self._limits.folder is None else Path(self._limits.folder).expanduser()
            self._spill = SpillFile(folder, self._disk, direct=True)
            if (free := shutil.disk_usage(folder).free) < wanted:
                raise ConfigError(
                    f"weights_offload needs {wanted} bytes of disk for layers, {folder} has {free} free; free some, "
                    "choose another weights_offload.folder, or raise device_bytes or host_bytes"
                )
        return self._spill


class _Buffer:
    """Memory of the device for one streaming layer at a time. staging: what reads from disk go to, on the CPU;
    ordinal: which streaming layer is here or on its way, None for none.
    """

    def __init__(self, device: Device, num_bytes: int, *, staged: bool) -> None:
        on_cpu = not device.has_link
        self.memory = (
            page_aligned(num_bytes) if on_cpu else torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        )
        self.staging = self.memory if on_cpu else host_memory(device.page_lock, num_bytes if staged else 0)
        self.lane = device.new_lane()
        self.sent: Mark = self.lane.mark()
        self.ordinal: int | None = None
        self.coming: Future[Mark] = Future()


class StreamedLayers:
    """The layers of a model by index, each as it is multiplied. Made by `LayerTiers`.

    host_pace, disk_pace: emulate a slower link and drive.
    """

    def __init__(
        self, kept: Sequence[LayerWeights | BelowLayer], device: Device, fixed_bytes: int, spill: SpillFile | None
    ) -> None:
        self.host_pace, self.disk_pace = Pace(0), Pace(0)
        self._on_cpu = not device.has_link
        self._below = [item for item in kept if isinstance(item, BelowLayer)]
        self._ordinals: dict[int, int] = {}
        on_disk = any(isinstance(item.image, DiskImage) for item in self._below)
        biggest = max((item.form.num_bytes for item in self._below), default=0)
        self._buffers = [_Buffer(device, biggest, staged=on_disk) for _ in range(NUM_BUFFERS if self._below else 0)]
        self._layers: list[list[LayerWeights]] = []  # one for all, or one per buffer
        for index, item in enumerate(kept):
            if isinstance(item, BelowLayer):
                self._ordinals[index] = len(self._ordinals)
                views = [item.form.views(buffer.memory) for buffer in self._buffers]
                self._layers.append([item.weights.with_matrices(matrices) for matrices in views])
            else:
                self._layers.append([item])
        self.places = self._count(kept, fixed_bytes, spill)
        self._current: int | None = None
        self._busy: _Buffer | None = None  # read by what is computed now
        self._free = list(self._buffers)
        self._coming: deque[_Buffer] = deque()  # in the order in which they will be needed
        self._next = 0  # ordinal that the next free buffer is for
        self._last: Mark = device.new_lane().mark()
        self._reader = ImageReader()
        self._fetchers = ThreadPoolExecutor(NUM_BUFFERS, thread_name_prefix="weights")  # the drive never rests
        self._begin()

    def _count(
        self, kept: Sequence[LayerWeights | BelowLayer], fixed_bytes: int, spill: SpillFile | None
    ) -> WeightsPlaces:
        stay = [sum(matrix.nbytes for matrix in item.matrices) for item in kept if isinstance(item, LayerWeights)]
        host = [item.form.num_bytes for item in self._below if isinstance(item.image, HostImage)]
        disk = [item.form.num_bytes for item in self._below if isinstance(item.image, DiskImage)]
        return WeightsPlaces(
            fixed_bytes,
            sum(stay),
            sum(buffer.memory.nbytes for buffer in self._buffers),
            sum(host),
            sum(disk),
            0 if spill is None else spill.num_bytes,
            (len(stay), len(host), len(disk)),
        )

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def streams(self) -> bool:
        """Whether any layer does not stay."""
        return bool(self._below)

    def peek(self, index: int) -> LayerWeights:
        """A layer for its norms; its matrices may be those of another."""
        return self._layers[index][0]

    def change(self, change: Callable[[LayerWeights], LayerWeights]) -> None:
        """Replace what every layer multiplies with."""
        self._layers = [[change(weights) for weights in layer] for layer in self._layers]

    def __getitem__(self, index: int) -> LayerWeights:
        """A layer; what was given before may be overwritten as soon as what was computed with it is done.

        Waits until it is there, on a GPU until its copy was begun. Raises WeightsLost.
        """
        ordinal = self._ordinals.get(index)
        if index != self._current:
            self.release()
            if ordinal is not None:
                self._busy = self._arrived(ordinal)
            self._current = index
        return self._layers[index][0 if self._busy is None else self._buffers.index(self._busy)]

    def release(self) -> None:
        """All computing with the layer that was asked for last has been given to the device."""
        self._current = None
        if self._busy is not None:
            self._busy.lane.follow_compute()
            self._free.append(self._busy)
            self._busy = None
            self._begin()

    def _begin(self) -> None:
        """Let free buffers be filled with what comes next."""
        while self._free:
            buffer = next((free for free in self._free if free.ordinal == self._next), self._free[0])
            self._free.remove(buffer)
            if buffer.ordinal != self._next:
                buffer.ordinal = self._next
                before = self._coming[-1].coming if self._coming else None
                buffer.coming = self._fetchers.submit(self._fetch, buffer, self._below[self._next], before)
            self._coming.append(buffer)
            self._next = (self._next + 1) % len(self._below)

    def _arrived(self, ordinal: int) -> _Buffer:
        """The buffer with a layer, for whose copy computing waits. A read that fails is tried once more."""
        for last_try in (False, True):
            if not self._coming or self._coming[0].ordinal != ordinal:
                self._start_at(ordinal)
            buffer = self._coming[0]
            try:
                buffer.coming.result().hold_compute()
            except WeightsLost as error:
                self._start_at(ordinal)
                if last_try:
                    raise
                logger.warning("%s; it is read once more", error)
                continue
            break
        self._coming.popleft()
        return buffer

    def _start_at(self, ordinal: int) -> None:
        """Forget what was on its way and begin with this layer."""
        wait([buffer.coming for buffer in self._coming])
        for buffer in self._coming:
            if buffer.coming.exception() is not None:
                buffer.ordinal = None
        self._free += self._coming
        self._coming.clear()
        self._next = ordinal
        self._begin()

    def _fetch(self, buffer: _Buffer, layer: BelowLayer, before: Future[Mark] | None) -> Mark:
        """Bring a layer to the device; the place in its lane after which it is there. Runs beside computing, and reads
        from disk beside the fetch before it, whose copy comes first.
        """
        size, source = layer.form.num_bytes, buffer.staging
        if isinstance(layer.image, DiskImage):
            buffer.sent.wait()
            self._reader.read(layer.image, source.numpy()[:size])
            self.disk_pace.spend(size)
        if before is not None:
            wait([before])
        if isinstance(layer.image, HostImage):
            source = layer.image.memory
            if self._on_cpu:
                np.copyto(buffer.memory.numpy()[:size], source.numpy())  # without the interpreter's lock
            self.host_pace.spend(size)
        if not self._on_cpu:
            with buffer.lane.active():
                self._last.hold_compute()  # copies go one after another, or the first would be late
                buffer.memory[:size].copy_(source[:size], non_blocking=True)
        buffer.sent = self._last = buffer.lane.mark()
        return buffer.sent

    def validate(self) -> None:
        """Check what is kept of buffers. Raises InvariantViolation."""
        busy = [] if self._busy is None else [self._busy]
        held = [*busy, *self._free, *self._coming]
        if sorted(map(id, held)) != sorted(map(id, self._buffers)):
            raise InvariantViolation(f"{len(held)} buffers are held, of {len(self._buffers)}")
        wanted = [(self._next - back) % len(self._below) for back in range(len(self._coming), 0, -1)]
        if [buffer.ordinal for buffer in self._coming] != wanted:
            raise InvariantViolation(f"{[buffer.ordinal for buffer in self._coming]} are on their way, not {wanted}")
