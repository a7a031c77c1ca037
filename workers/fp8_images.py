"""fp8 images of device blocks whose own KV is not fp8: lossy, for tiers below the device.

Owns the choice between the two forms of an image, by a block's place in its chain, and the staging memory of fp8 ones
on a GPU. Bytes of the other form are `PlainImages`' business; codes and scales are the kernels' (`ops.encode_blocks`).

Invariants:
 1. A block is coded when it is full, all tokens at once: its image depends on its bytes alone.
 2. An image's form follows from its length; the two forms have different lengths.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.workers.block_images import STAGING_BLOCKS, PlainImages
from tournant.workers.device import Device
from tournant.workers.errors import ConfigError
from tournant.workers.kv_cache import KV_CACHE_DTYPES, KVCache
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.transfer_messages import BlockImages


def lower_kv_form(layout: KVLayout, offload: OffloadConfig) -> str:
    """Numeric form of KV for the namespace of an engine with tiers: that of the device where they hold the same, else
    both and where the lower one begins, such as "bf16/fp8_e4m3@1024".

    Blocks of engines that differ in any of it are never taken for each other: what was loaded has been rounded.
    """
    if not _is_lossy(layout, offload):
        return layout.kv_form
    return f"{layout.kv_form}/{offload.lower_kv_dtype}@{offload.lower_kv_dtype_from}"


def make_images(device: Device, cache: KVCache, offload: OffloadConfig, *, deterministic: bool) -> BlockImages:
    """The images that a configuration asks for.

    Raises ConfigError for a form that loses bits in deterministic mode, or below a device whose KV is fp8 of the other
    form.
    """
    layout = cache.layout
    if not _is_lossy(layout, offload):
        return PlainImages(device, cache.tensor, cache.scales)
    if deterministic:
        raise ConfigError(
            f"deterministic is true and lower_kv_dtype {offload.lower_kv_dtype!r}, but KV on the device is "
            f"{layout.kv_form}: tokens would depend on what came from the cache; use 'same'"
        )
    if layout.dtype.itemsize == 1:
        raise ConfigError(
            f"lower_kv_dtype is {offload.lower_kv_dtype!r}, but KV on the device is {layout.kv_form} already, which is "
            "as small; use 'same'"
        )
    return Fp8Images(device, cache, KV_CACHE_DTYPES[offload.lower_kv_dtype], offload.lower_kv_dtype_from)


def _is_lossy(layout: KVLayout, offload: OffloadConfig) -> bool:
    return offload.lower_kv_dtype not in ("same", layout.kv_form)


class Fp8Images:
    """`BlockImages` of a pool that is not fp8: blocks that begin at token `from_token` of their chain or later have the
    image that a pool of `dtype` would give them (codes, then the scales of e4m3), the others their own.

    On the CPU several threads may save or load at once; on a GPU they take turns, one per direction.
    """

    def __init__(
        self,
        device: Device,
        cache: KVCache,
        dtype: torch.dtype,
        from_token: int = 0,
        staging_blocks: int = STAGING_BLOCKS,
    ) -> None:
        layout = cache.layout
        self._pool = cache.tensor
        self._dtype = dtype
        self._coded_bytes, self._plain_bytes = replace(layout, dtype=dtype).block_bytes, layout.block_bytes
        self._first_coded = -(-from_token // layout.block_tokens)
        self._plain = PlainImages(device, cache.tensor, cache.scales, staging_blocks)
        self._out, self._in = (
            None if device.kind == "cpu" else _Staged(device, self._pool, dtype, staging_blocks, self._coded_bytes)
            for _ in range(2)
        )

    @property
    def slot_bytes(self) -> int:
        """Of a plain image, unless all are fp8."""
        return self._plain_bytes if self._first_coded else self._coded_bytes

    def image_bytes(self, depth: int) -> int:
        """See `BlockImages`."""
        return self._coded_bytes if depth >= self._first_coded else self._plain_bytes

    def save(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        """See `BlockImages`. Raises ValueError for a slot of another length than the two."""
        coded, plain = self._split(blocks, slots)
        if plain:
            self._plain.save([block for block, _ in plain], [slot for _, slot in plain])
        if self._out is not None:
            self._out.save(coded)
            return
        for block, slot in coded:
            ops.encode_blocks(self._pool, torch.tensor([block]), _row(slot), self._dtype)

    def load(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        """See `BlockImages`. Raises ValueError for a slot of another length than the two."""
        coded, plain = self._split(blocks, slots)
        if plain:
            self._plain.load([slot for _, slot in plain], [block for block, _ in plain])
        if self._in is not None:
            self._in.load(coded)
            return
        for block, slot in coded:
            ops.decode_blocks(_row(slot), self._dtype, torch.tensor([block]), self._pool)

    def _split(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> tuple[list[_Image], list[_Image]]:
        """fp8 and plain images."""
        found: dict[int, list[_Image]] = {self._coded_bytes: [], self._plain_bytes: []}
        for block, slot in zip(blocks, slots, strict=True):
            if len(slot) not in found:
                raise ValueError(
                    f"a slot has {len(slot)} bytes; an image has {self._coded_bytes} (fp8) or {self._plain_bytes}"
                )
            found[len(slot)].append((block, slot))
        return found[self._coded_bytes], found[self._plain_bytes]


_Image = tuple[int, memoryview]


def _row(slot: memoryview) -> torch.Tensor:
    """A slot as uint8 [1, bytes]: its own memory, but for one that may only be read."""
    image = np.frombuffer(slot, np.uint8)
    return torch.from_numpy(image.copy() if slot.readonly else image).view(1, -1)


class _Staged:
    """One direction of a GPU: images are made there and pass through page-locked memory."""

    def __init__(
        self, device: Device, pool: torch.Tensor, dtype: torch.dtype, num_blocks: int, image_bytes: int
    ) -> None:
        self._device, self._pool, self._dtype = device, pool, dtype
        self._lane = device.new_lane()
        self._images = torch.empty((num_blocks, image_bytes), dtype=torch.uint8, device=pool.device)
        self._host = device.host_buffer((num_blocks, image_bytes), torch.uint8)
        self._lock = threading.Lock()

    def save(self, images: Sequence[_Image]) -> None:
        """Device blocks into images."""
        with self._lock, self._active():
            for part in self._pieces(images):
                self._lane.follow_compute()
                with self._lane.active():
                    ops.encode_blocks(self._pool, self._ids(part), self._images[: len(part)], self._dtype)
                    self._host[: len(part)].copy_(self._images[: len(part)], non_blocking=True)
                self._lane.mark().wait()
                for row, (_, slot) in zip(self._host.numpy(), part, strict=False):
                    np.frombuffer(slot, np.uint8)[:] = row

    def load(self, images: Sequence[_Image]) -> None:
        """Images into device blocks."""
        with self._lock, self._active():
            for part in self._pieces(images):
                for row, (_, slot) in zip(self._host.numpy(), part, strict=False):
                    row[:] = np.frombuffer(slot, np.uint8)
                self._lane.follow_compute()
                with self._lane.active():
                    self._images[: len(part)].copy_(self._host[: len(part)], non_blocking=True)
                    ops.decode_blocks(self._images[: len(part)], self._dtype, self._ids(part), self._pool)
                self._lane.mark().wait()

    def _pieces(self, images: Sequence[_Image]) -> Iterator[Sequence[_Image]]:
        return (images[start : start + len(self._host)] for start in range(0, len(images), len(self._host)))

    def _ids(self, images: Sequence[_Image]) -> torch.Tensor:
        (ids,) = self._device.upload([np.asarray([block for block, _ in images], dtype=np.int64)])
        return ids

    def _active(self) -> AbstractContextManager[object]:
        """A thread has a current GPU of its own."""
        device = self._device.torch_device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
