"""Byte images of device blocks in host slots: how a block leaves the device and comes back.

Owns the staging memory of both directions on a GPU. Knows bytes only: which block moves, and when, is decided
elsewhere; who may touch a block meanwhile too (rules in block_copies.py).

An image is the block's bytes in the pool, then its scales where the layout has them (`KVLayout.block_bytes`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch

from tournant.workers.block_copies import BlockCopies
from tournant.workers.device import Device

STAGING_BLOCKS = 8  # of one copy on a GPU
_Bytes = npt.NDArray[np.uint8]


class PlainImages:
    """`BlockImages` of a pool as it is. pool: dense, its first axis the block; scales: dense, beside it.

    On the CPU several threads may save or load at once; on a GPU they take turns, one per direction.
    """

    def __init__(
        self,
        device: Device,
        pool: torch.Tensor,
        scales: torch.Tensor | None = None,
        staging_blocks: int = STAGING_BLOCKS,
    ) -> None:
        tensors = [pool] if scales is None else [pool, scales]
        self._sizes = [tensor.stride(0) * tensor.itemsize for tensor in tensors]
        self._slot_bytes = sum(self._sizes)
        self._rows: list[_Bytes] = []
        self._out: _Staged | None = None
        self._in: _Staged | None = None
        if device.kind == "cpu":
            self._rows = [tensor.view(torch.uint8).view(len(tensor), -1).numpy() for tensor in tensors]
        else:
            copies = [BlockCopies(device, tensor, staging_blocks) for tensor in tensors]
            self._out = _Staged(device, copies, self._sizes, staging_blocks)
            self._in = _Staged(device, copies, self._sizes, staging_blocks)

    @property
    def slot_bytes(self) -> int:
        """Bytes of every image."""
        return self._slot_bytes

    def image_bytes(self, depth: int) -> int:
        """The same for every block."""
        return self._slot_bytes

    def save(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        """See `BlockImages`. Raises ValueError for a slot of another length."""
        images = [self._image(slot) for slot in slots]
        if self._out is not None:
            self._out.save(blocks, images)
            return
        for block, image in zip(blocks, images, strict=True):
            for rows, part in zip(self._rows, self._parts(image), strict=True):
                part[:] = rows[block]

    def load(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        """See `BlockImages`. Raises ValueError for a slot of another length."""
        images = [self._image(slot) for slot in slots]
        if self._in is not None:
            self._in.load(images, blocks)
            return
        for block, image in zip(blocks, images, strict=True):
            for rows, part in zip(self._rows, self._parts(image), strict=True):
                rows[block] = part

    def _image(self, slot: memoryview) -> _Bytes:
        if len(slot) != self._slot_bytes:
            raise ValueError(f"a slot has {len(slot)} bytes; an image of these blocks has {self._slot_bytes}")
        return np.frombuffer(slot, np.uint8)

    def _parts(self, image: _Bytes) -> Iterator[_Bytes]:
        """Of the pool, then of the scales."""
        start = 0
        for size in self._sizes:
            yield image[start : start + size]
            start += size


class _Staged:
    """One direction of a GPU: images pass through page-locked memory, from which and to which it copies fast."""

    def __init__(self, device: Device, copies: Sequence[BlockCopies], sizes: Sequence[int], num_blocks: int) -> None:
        self._device = device.torch_device
        self._copies = copies
        self._num_blocks = num_blocks
        self._host = [device.host_buffer((num_blocks, size), torch.uint8) for size in sizes]
        self._bytes: list[_Bytes] = [host.numpy() for host in self._host]
        self._lock = threading.Lock()

    def save(self, blocks: Sequence[int], images: Sequence[_Bytes]) -> None:
        """Device blocks into images."""
        with self._lock, self._active():
            for start in range(0, len(blocks), self._num_blocks):
                ids = blocks[start : start + self._num_blocks]
                marks = [
                    copies.read(ids, host[: len(ids)]) for copies, host in zip(self._copies, self._host, strict=True)
                ]
                for mark in marks:
                    mark.wait()
                for number, image in enumerate(images[start : start + len(ids)]):
                    np.concatenate([rows[number] for rows in self._bytes], out=image)

    def load(self, images: Sequence[_Bytes], blocks: Sequence[int]) -> None:
        """Images into device blocks."""
        with self._lock, self._active():
            for start in range(0, len(blocks), self._num_blocks):
                ids = blocks[start : start + self._num_blocks]
                for number, image in enumerate(images[start : start + len(ids)]):
                    at = 0
                    for rows in self._bytes:
                        rows[number] = image[at : at + rows.shape[1]]
                        at += rows.shape[1]
                marks = [
                    copies.write(host[: len(ids)], ids) for copies, host in zip(self._copies, self._host, strict=True)
                ]
                for mark in marks:
                    mark.wait()

    def _active(self) -> AbstractContextManager[object]:
        """A thread has a current GPU of its own."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
