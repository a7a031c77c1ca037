"""Calls the compiled C kernels by which blocks are chosen and found in memory: packs pointers and strides.

Owns: the binary layout of the structs shared with kernels/cpu/bounds.h. Does not check arguments: block_sparse.py has
done that. Arrays of numpy are dense.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_BOUNDS = struct.Struct("4P6q2f")  # struct bounds
_CHOICE = struct.Struct("8P4q")  # struct choice
_PACKING = struct.Struct("7P4q")  # struct packing
Array = npt.NDArray[np.int64]


class NativeBlocks:
    """score_bounds: by dtype, the others for all; functions of the library that take one packed struct."""

    def __init__(self, score_bounds: Mapping[torch.dtype, Any], choose_blocks: Any, pack_blocks: Any) -> None:
        self._score_bounds = score_bounds
        self._choose_blocks = choose_blocks
        self._pack_blocks = pack_blocks

    def score_bounds(
        self, q: torch.Tensor, bounds: torch.Tensor, places: Array, scale: float, softcap: float
    ) -> torch.Tensor:
        kv_heads, _, _, size = bounds.shape
        heads, num = len(q), len(places)
        found = torch.empty((heads, num), dtype=torch.float32)
        pointers = (q.data_ptr(), bounds.data_ptr(), places.ctypes.data, found.data_ptr())
        threads = torch.get_num_threads()
        packed = _BOUNDS.pack(*pointers, num, heads, kv_heads, size, bounds.stride(0), threads, scale, softcap)
        self._score_bounds[q.dtype](packed)
        return found

    def choose_blocks(
        self, found: torch.Tensor, places: Array, kv_heads: int, count: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """mask, read, most, missed of `BlockChoice`; overwrites found."""
        heads, num = found.shape
        far, terms = np.empty((kv_heads, num), np.uint32), np.empty((kv_heads, num), np.float32)
        mask = np.empty((kv_heads, num), np.bool_)
        read, (most, missed) = np.zeros(num, np.bool_), np.empty((2, heads), np.float32)
        pointers = (array.ctypes.data for array in (places, far, terms, mask, read, most, missed))
        self._choose_blocks(_CHOICE.pack(found.data_ptr(), *pointers, num, heads, kv_heads, count))
        return mask, read, most, missed

    def pack_blocks(
        self,
        mask: npt.NDArray[np.bool_],
        sources: Array,
        ids: Array,
        bases: Array,
        strides: Array,
        width: int,
        panel: int,
    ) -> tuple[Array, Array]:
        """Addresses [kv_heads, width] of the first `width` blocks that each head reads, zeros behind; how many it
        reads. bases, strides: of sources, in bytes; panel: bytes from head to head.
        """
        kv_heads, num = mask.shape
        chosen, lengths = np.zeros((kv_heads, width), np.int64), np.empty(kv_heads, np.int64)
        pointers = (array.ctypes.data for array in (mask, sources, ids, bases, strides, chosen, lengths))
        self._pack_blocks(_PACKING.pack(*pointers, num, kv_heads, width, panel))
        return chosen, lengths
