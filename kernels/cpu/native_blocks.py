"""Calls the compiled C kernels by which blocks are chosen and found in memory: packs pointers and strides.

Owns: the binary layout of the structs shared with kernels/cpu/bounds.h. Does not check arguments: block_sparse.py has
done that. Arrays of numpy are dense.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from tournant.kernels.block_sparse import BlocksPlan, RowAttention, RowBlocks

LAYER = struct.Struct("5P7qffq3P2q")  # struct layer of kernels/cpu/attention.h
_BOUNDS = struct.Struct("4P6q2f")  # struct bounds
_CHOICE = struct.Struct("8P4q")  # struct choice
_PACKING = struct.Struct("3P6q2P4q")  # struct packing
Array = npt.NDArray[np.int64]


class _Scratch:
    """Arrays of a choice and their addresses."""

    def __init__(self, row: RowBlocks, heads: int, kv_heads: int) -> None:
        num = len(row.places)
        self.shape = (heads, kv_heads, num)
        self.found = torch.empty((heads, num), dtype=torch.float32)
        far, terms = np.empty((kv_heads, num), np.uint32), np.empty((kv_heads, num), np.float32)
        self.mask, self.read = np.empty((kv_heads, num), np.bool_), np.empty(num, np.bool_)
        self.most, self.missed = np.empty((2, heads), np.float32)
        known = np.where(row.below, 0xFFFFFFFF, 0).astype(np.uint32)
        self._kept = (known, far, terms)
        arrays = (known, far, terms, self.mask, self.read, self.most, self.missed)
        self.pointers = tuple(array.ctypes.data for array in arrays)


def _scratch_of(row: RowBlocks, heads: int, kv_heads: int) -> _Scratch:
    if row.native is None or row.native.shape != (heads, kv_heads, len(row.places)):
        row.native = _Scratch(row, heads, kv_heads)
    scratch: _Scratch = row.native
    return scratch


class NativeRow:
    """`attend` of a `block_sparse.RowAttention`, which owns it and keeps all that it points to but the scratch. What is
    the same in every layer is packed once.

    run: attend_row of the library; packed: struct plan; layer_fields: those of struct layer between `out` and `scale`,
    and those between `softcap` and `addresses`.
    """

    def __init__(
        self,
        run: Any,
        packed: ctypes.Array[ctypes.c_char],
        layer_fields: tuple[tuple[int, ...], tuple[int, ...]],
        one: RowAttention,
    ) -> None:
        row, places, bounds, heads, num = one.row, one.places, one.bounds, one.heads, len(one.row.places)
        _, kv_heads, _, _, size = bounds.shape
        self._scratch = scratch = _scratch_of(row, heads, kv_heads)
        chosen, _, pointers = _chosen_of(one.plan)
        self._run, self._packed, self._fields, self._least_mass = run, packed, layer_fields, one.least_mass
        first = places.tensors[0]
        bases, strides = places.strided([0] * len(places.tensors))
        self._bases = (bounds.data_ptr(), *_three(bases))
        steps = np.asarray([tensor.stride(1) * tensor.itemsize for tensor in places.tensors])
        self._steps = (bounds.stride(0) * bounds.itemsize, *_three(steps))
        threads = torch.get_num_threads()
        found = (row.places.ctypes.data, scratch.found.data_ptr())
        self._bounds = (*found, num, heads, kv_heads, size, bounds.stride(1), threads)
        self._choice = _CHOICE.pack(scratch.found.data_ptr(), *scratch.pointers, num, heads, kv_heads, one.count)
        self._where = (scratch.mask.ctypes.data, places.sources.ctypes.data, places.ids.ctypes.data)
        panel = first.stride(3) * first.itemsize
        self._packing = (*_three(strides), *pointers, num, kv_heads, chosen.shape[1], panel)
        self._addresses = chosen.ctypes.data

    def attend(self, out: torch.Tensor, q: torch.Tensor, layer: int, scale: float, softcap: float) -> float:
        """What is missed, on average over heads."""
        bounds, *bases = (base + layer * step for base, step in zip(self._bases, self._steps, strict=True))
        before, after = self._fields
        at = q.data_ptr()
        missed: float = self._run(
            _BOUNDS.pack(at, bounds, *self._bounds, scale, softcap),
            self._choice,
            _PACKING.pack(*self._where, *bases, *self._packing),
            ctypes.addressof(self._packed),
            LAYER.pack(at, 0, out.data_ptr(), *before, scale, softcap, *after, self._addresses, 0, 0, 0, 0),
            self._least_mass,
        )
        return missed


def _three(of_sources: Array) -> tuple[int, ...]:
    """As struct packing has them."""
    return (*of_sources.tolist(), 0, 0)[:3]


def _chosen_of(plan: BlocksPlan) -> tuple[Array, Array, tuple[int, int]]:
    """Addresses [kv_heads, width] and lengths [kv_heads] of what heads read, kept with the plan; their addresses."""
    if plan.native is None:
        arrays = np.zeros(plan.heads.block_tables.shape, np.int64), np.empty(len(plan.lengths), np.int64)
        plan.native = (*arrays, tuple(array.ctypes.data for array in arrays))
    found: tuple[Array, Array, tuple[int, int]] = plan.native
    return found


class NativeBlocks:
    """score_bounds: by dtype, the others for all; functions of the library that take one packed struct."""

    def __init__(self, score_bounds: Mapping[torch.dtype, Any], choose_blocks: Any, pack_blocks: Any) -> None:
        self._score_bounds = score_bounds
        self._choose_blocks = choose_blocks
        self._pack_blocks = pack_blocks

    def score_bounds(
        self, q: torch.Tensor, bounds: torch.Tensor, row: RowBlocks, scale: float, softcap: float
    ) -> torch.Tensor:
        kv_heads, _, _, size = bounds.shape
        heads, num = len(q), len(row.places)
        found = _scratch_of(row, heads, kv_heads).found
        pointers = (q.data_ptr(), bounds.data_ptr(), row.places.ctypes.data, found.data_ptr())
        threads = torch.get_num_threads()
        packed = _BOUNDS.pack(*pointers, num, heads, kv_heads, size, bounds.stride(0), threads, scale, softcap)
        self._score_bounds[q.dtype](packed)
        return found

    def choose_blocks(
        self, found: torch.Tensor, row: RowBlocks, kv_heads: int, count: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """mask, read, most, missed of `BlockChoice`; overwrites found."""
        heads, num = found.shape
        scratch = _scratch_of(row, heads, kv_heads)
        self._choose_blocks(_CHOICE.pack(found.data_ptr(), *scratch.pointers, num, heads, kv_heads, count))
        return scratch.mask, scratch.read, scratch.most, scratch.missed

    def pack_blocks(
        self,
        mask: npt.NDArray[np.bool_],
        sources: Array,
        ids: Array,
        bases: Array,
        strides: Array,
        plan: BlocksPlan,
        panel: int,
    ) -> tuple[Array, list[int]]:
        """Addresses [kv_heads, width] of the first blocks that each head reads, as many as the plan's head with most
        has, until the next call; how many it reads. bases, strides: of sources, at most three, in bytes; panel: bytes
        from head to head.
        """
        kv_heads, num = mask.shape
        width = plan.heads.block_tables.shape[1]
        chosen, lengths, pointers = _chosen_of(plan)
        places = (mask.ctypes.data, sources.ctypes.data, ids.ctypes.data, *_three(bases), *_three(strides))
        self._pack_blocks(_PACKING.pack(*places, *pointers, num, kv_heads, width, panel))
        return chosen, lengths.tolist()
