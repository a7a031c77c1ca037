"""Attention of decode rows over some of their blocks below the device.

Owns which share of blocks is chosen, the reading of those that are not where they can be attended to, and the counts of
what was read. How blocks are chosen and attended to is kernels/block_sparse.py's business; what happens when what was
left out may matter too much is the caller's.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tournant.kernels import block_sparse, segments
from tournant.workers.config import SparseAttention
from tournant.workers.host_memory import page_aligned
from tournant.workers.overflow_pool import OverflowPool
from tournant.workers.overflow_routes import BROUGHT, resident

Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class SparseCounts:
    """Of a row's step: layers that chose; those of them that then read everything; sum of the attention that the
    others missed, estimated, on average over heads; KV heads of layers of blocks that were read in RAM and from disk.
    """

    num_chosen: int = 0
    num_dense: int = 0
    missed: float = 0.0
    num_host: int = 0
    num_disk: int = 0


class SparseReader:
    """Attends single rows over chosen blocks. One per shard.

    first_brought: places from here on are copied to memory of its own first, those before are read in place; readers:
    `num_readers` threads that copy; in_one_call: rows for which nothing is copied choose and attend in one.
    """

    in_one_call = True

    def __init__(
        self,
        pool: OverflowPool,
        settings: SparseAttention,
        num_heads: int,
        first_brought: int,
        readers: ThreadPoolExecutor,
        num_readers: int,
    ) -> None:
        self.pool = pool
        self.settings = settings
        self.num_heads = num_heads
        self.first_brought = first_brought
        self._readers = readers
        self._num_readers = num_readers
        self._memory = page_aligned(0)

    def row(self, table: Array, num_device_blocks: int, context: int) -> SparseRow:
        """One row of a step. table: int64 [blocks], ids of both halves, at least one below; context: its tokens."""
        return SparseRow(self, table, num_device_blocks, context)

    def bring(self, layer: int, places: Array, heads: npt.NDArray[np.bool_]) -> tuple[torch.Tensor, frozenset[int]]:
        """A layer of places, one after another, until the next call; and those that are lost, zeros then. heads:
        [kv_heads, places], which of them to bring; the others hold anything.
        """
        layout = self.pool.layer_layout
        num_bytes = len(places) * layout.block_bytes
        with torch.inference_mode(False):  # the readers' threads write it
            if num_bytes > len(self._memory):
                self._memory = page_aligned(num_bytes)
            room = self._memory[:num_bytes].view(layout.dtype).view(layout.shape(len(places)))
        shares = [share for share in np.array_split(np.arange(len(places)), self._num_readers) if len(share)]
        reads = [
            self._readers.submit(
                self.pool.read_heads, layer, places[share].tolist(), heads[:, share], room[share[0] : share[-1] + 1]
            )
            for share in shares
        ]
        return room, frozenset().union(*(one.result() for one in reads))


class SparseRow:
    """Attention of one row of one step, layer after layer; counts: what it did."""

    def __init__(self, reader: SparseReader, table: Array, num_device_blocks: int, context: int) -> None:
        self._reader = reader
        self._context = context
        self._places = places = table - num_device_blocks
        self._blocks = block_sparse.RowBlocks(places)
        self._sources, self._ids = resident(table, places)
        num_below, layout = self._blocks.num_below, reader.pool.layout
        self._count = max(1, math.ceil(reader.settings.budget * num_below))
        self._num_read = self._count * layout.num_kv_heads
        self._in_one_call = reader.in_one_call and self._blocks.last_place < reader.first_brought
        lengths = np.full(layout.num_kv_heads, len(table) - num_below + self._count)
        self._plan = block_sparse.plan_blocks(lengths, context, 1, layout, reader.num_heads)
        self._direct: block_sparse.RowAttention | None = None
        self.counts = SparseCounts()

    def choose(self, q: torch.Tensor, layer: int, scale: float, softcap: float) -> block_sparse.BlockChoice:
        """The share of blocks below in which the row's queries can score highest, and all blocks of the device.

        q [heads, hs].
        """
        pool = self._reader.pool
        found = block_sparse.score_bounds(q, pool.bounds[layer], self._blocks, scale, softcap)
        return block_sparse.choose_blocks(found, self._blocks, pool.layout.num_kv_heads, self._count)

    def attend(
        self, out: torch.Tensor, q: torch.Tensor, kv_cache: torch.Tensor, layer: int, scale: float, softcap: float
    ) -> tuple[bool, frozenset[int]]:
        """Over the device's blocks and some of those below; the places that are lost. False, and nothing is done, when
        what would be left out probably carries more of the attention, on average over heads, than is allowed.

        out, q [1, heads, hs]; kv_cache: the device's.
        """
        counts, lost = self.counts, frozenset[int]()
        directly = self._in_one_call and out.is_contiguous() and q.is_contiguous()
        counts.num_chosen += 1
        if directly:
            missed = self._direct_of(kv_cache).attend(out, q, layer, scale, softcap)
        else:
            choice = self.choose(q[0].contiguous(), layer, scale, softcap)
            missed = sum(choice.missed.tolist()) / len(choice.missed)
        if 1.0 - missed < self._reader.settings.min_mass:
            counts.num_dense += 1
            return False, lost
        if directly:
            counts.num_host += self._num_read
        else:
            lost = self.read(out, q, kv_cache, layer, choice, scale, softcap)
        counts.missed += missed
        return True, lost

    def _direct_of(self, kv_cache: torch.Tensor) -> block_sparse.RowAttention:
        """For rows for which nothing has to be brought."""
        if self._direct is None:
            reader = self._reader
            places = segments.Places((kv_cache, reader.pool.host), self._sources, self._ids)
            of_row = (self._plan, reader.num_heads, self._count, reader.settings.min_mass)
            self._direct = block_sparse.RowAttention(self._blocks, places, reader.pool.bounds, *of_row)
        return self._direct

    def read(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        choice: block_sparse.BlockChoice,
        scale: float,
        softcap: float,
        lse: torch.Tensor | None = None,
    ) -> frozenset[int]:
        """Attention over a choice's blocks; the places that are lost. lse: as of `block_sparse.attend_blocks`."""
        reader, pool, sources, ids = self._reader, self._reader.pool, self._sources, self._ids
        num_disk, lost = 0, frozenset[int]()
        tensors: tuple[torch.Tensor, ...] = (kv_cache, pool.host)
        if self._blocks.last_place >= reader.first_brought:
            brought = np.flatnonzero(choice.read & (self._places >= reader.first_brought))
            heads = choice.mask[:, brought]
            room, lost = reader.bring(layer, self._places[brought], heads)
            sources, ids, tensors = sources.copy(), ids.copy(), (kv_cache, pool.host, room)
            sources[brought], ids[brought] = BROUGHT, np.arange(len(brought))
            num_disk = int(np.count_nonzero(heads[:, self._places[brought] >= pool.host_blocks]))
        self.counts.num_disk += num_disk
        self.counts.num_host += self._num_read - num_disk
        block_sparse.attend_blocks(
            out,
            q,
            segments.Places(tensors, sources, ids),
            (layer, layer, 0)[: len(tensors)],
            choice.mask,
            self._context,
            pool.layout,
            scale,
            softcap=softcap,
            lse=lse,
            plan=self._plan,
        )
        return lost
