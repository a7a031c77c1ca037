"""Attention of a step in which some sequences have blocks below the device.

Owns the ring that layers of blocks pass through and the order in which they are brought. Per layer, a long sequence's
keys are walked in pieces (kernels/segments.py): blocks of the device and, in place, blocks in RAM are read where they
are; what lies on disk, and RAM's blocks when they are streamed, comes through the ring, while the walk before it
computes. The order of all reads of a step is known when it begins, so the next layer's are under way before it starts.

Invariant: a part of the ring is filled again only after the walk that read it has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tournant.kernels import block_sparse, ops, segments
from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import PIECE_TOKENS, AttentionPlan
from tournant.kvstore.errors import InvariantViolation
from tournant.workers.config import SparseAttention
from tournant.workers.overflow_choice import OverflowChoice
from tournant.workers.overflow_pool import OverflowPool, page_aligned
from tournant.workers.sparse_choice import SparseCounts, choose_blocks

RING_PARTS = 3  # one that is read, two that are filled
PART_TOKENS = 1024  # of one layer
NUM_READERS = 2


class OverflowLost(RuntimeError):  # noqa: N818 - a state of the world
    """Blocks below the device of a rank are gone: its group ends, and sequences are computed again."""


@dataclass(frozen=True, slots=True)
class LongRows:
    """Rows of a long sequence in a step. entry: its place in the batch; table: int64 [blocks], ids of both halves."""

    entry: int
    rows: slice
    context: int
    table: npt.NDArray[np.int64]


@dataclass(slots=True)
class _Walk:
    """A range of pieces of a sequence in one layer. brought: indices of blocks that come through the ring."""

    plan: AttentionPlan
    brought: list[int]


@dataclass(slots=True)
class _Fill:
    """What a walk needs in its part of the ring. done: the places that were lost."""

    part: int
    done: Future[frozenset[int]]


class OverflowAttention:
    """Makes `OverflowStep`s. One per shard; closes with its engine's process.

    windows: keys a row sees in each layer of this shard, 0 = all before it; choice: in place or streamed; sparse: which
    blocks decode steps read, None = all.
    """

    def __init__(
        self,
        pool: OverflowPool,
        num_device_blocks: int,
        num_heads: int,
        windows: Sequence[int],
        choice: OverflowChoice,
        sparse: SparseAttention | None = None,
    ) -> None:
        self.pool = pool
        self.num_device_blocks = num_device_blocks
        self.num_heads = num_heads
        self.windows = tuple(windows)
        self.choice = choice
        self.sparse = sparse
        self.in_group = False  # other ranks cannot be told that a step means nothing: a loss ends the step
        layout = pool.layout
        self.slice_layout = KVLayout(1, layout.num_kv_heads, layout.block_tokens, layout.head_size, layout.dtype)
        self.part_blocks = max(PART_TOKENS, layout.block_tokens) // layout.block_tokens
        self.ring = [self._part() for _ in range(RING_PARTS + 1)]  # the last is for what was not foreseen
        self._chosen = page_aligned(0)
        self.readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="overflow-reader")

    def _part(self) -> torch.Tensor:
        memory = page_aligned(self.part_blocks * self.slice_layout.block_bytes)
        return memory.view(self.slice_layout.dtype).view(self.slice_layout.shape(self.part_blocks))

    def room_for(self, num_blocks: int) -> torch.Tensor:
        """Memory for one layer of as many blocks, overwritten by the next call."""
        num_bytes = num_blocks * self.slice_layout.block_bytes
        if num_bytes > len(self._chosen):
            self._chosen = page_aligned(num_bytes)
        return self._chosen[:num_bytes].view(self.slice_layout.dtype).view(self.slice_layout.shape(num_blocks))

    def find(self, tables: npt.NDArray[np.int32], num_used: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which sequences of a step have blocks below. tables [S, blocks]; num_used [S], of each row."""
        below = tables >= self.num_device_blocks
        below &= np.arange(tables.shape[1]) < num_used[:, None]
        return np.asarray(below.any(axis=1), dtype=np.bool_)

    def step(self, hot: list[tuple[slice, AttentionPlan]], long: list[LongRows]) -> OverflowStep:
        """The attention of a step whose other rows are those of `hot`."""
        return OverflowStep(self, hot, long)


class OverflowStep:
    """Attention of one step, layer after layer. lost: by batch entry, ids below that could not be read; sparse: what
    sparse attention did.
    """

    def __init__(self, owner: OverflowAttention, hot: list[tuple[slice, AttentionPlan]], long: list[LongRows]) -> None:
        self._owner = owner
        self._hot = hot
        self._long = long
        self.lost: dict[int, frozenset[int]] = {}
        self.sparse = SparseCounts()
        self._num_host = self._num_disk = self._num_streamed = 0
        self._is_sparse = [owner.sparse is not None and rows.rows.stop - rows.rows.start == 1 for rows in long]
        self._streams = [owner.choice.streams(rows.rows.stop - rows.rows.start, rows.context) for rows in long]
        layout = owner.pool.layout
        self._states = [
            segments.new_state(rows.rows.stop - rows.rows.start, owner.num_heads, layout.head_size, torch.device("cpu"))
            for rows in long
        ]
        self._plans: dict[tuple[int, int, int], AttentionPlan] = {}
        self._walks: dict[tuple[int, int], list[_Walk]] = {}
        self._order = deque(
            (layer, index, walk)
            for layer in range(len(owner.windows))
            for index in range(len(long))
            if owner.windows[layer] or not self._is_sparse[index]
            for walk in self._walks_of(index, owner.windows[layer])
            if walk.brought
        )
        self._fills: deque[_Fill] = deque()
        for part in range(RING_PARTS):
            self._fill(part)

    def _walks_of(self, index: int, window: int) -> list[_Walk]:
        """A sequence's pieces, cut so that what each walk needs from below fits a part of the ring."""
        if (found := self._walks.get((index, window))) is not None:
            return found
        owner, rows = self._owner, self._long[index]
        pool, tokens = owner.pool, owner.pool.layout.block_tokens
        places = rows.table - owner.num_device_blocks
        comes = places >= (0 if self._streams[index] else pool.host_blocks)
        per_piece = PIECE_TOKENS // tokens
        count = rows.rows.stop - rows.rows.start
        pieces = -(-rows.context // PIECE_TOKENS)
        first = max(0, rows.context - count - window + 1) // PIECE_TOKENS if window else 0
        walks: list[_Walk] = []
        begin, brought = first, list[int]()
        for piece in range(first, pieces):
            start = piece * per_piece
            wanted = [block for block in range(start, min(start + per_piece, len(places))) if comes[block]]
            if brought and len(brought) + len(wanted) > owner.part_blocks:
                walks.append(_Walk(self._plan(index, begin, piece), brought))
                begin, brought = piece, []
            brought = brought + wanted
        walks.append(_Walk(self._plan(index, begin, pieces), brought))
        self._walks[(index, window)] = walks
        return walks

    def _plan(self, index: int, begin: int, end: int) -> AttentionPlan:
        key, rows, owner = (index, begin, end), self._long[index], self._owner
        if key not in self._plans:
            count = rows.rows.stop - rows.rows.start
            self._plans[key] = segments.plan_pieces(
                count, rows.context, owner.slice_layout, owner.num_heads, begin, end
            )
        return self._plans[key]

    def _fill(self, part: int) -> None:
        """Begin to bring what the next walk of all needs that is not on its way."""
        if not self._order:
            return
        layer, index, walk = self._order.popleft()
        owner = self._owner
        places = [int(self._long[index].table[block]) - owner.num_device_blocks for block in walk.brought]
        self._fills.append(_Fill(part, owner.readers.submit(owner.pool.read_layer, layer, places, owner.ring[part])))

    def attend(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> None:
        """As `ops.paged_attention` for the rows of this step. Layers must come in their order, each once."""
        for rows, plan in self._hot:
            ops.paged_attention(out[rows], q[rows], kv_cache, layer, plan, scale, window=window, softcap=softcap)
        for index in range(len(self._long)):
            self._attend_long(index, out, q, kv_cache, layer, scale, window, softcap)

    def _attend_long(
        self,
        index: int,
        out: torch.Tensor,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> None:
        foreseen = bool(window) or not self._is_sparse[index]
        if not foreseen and self._attend_sparse(index, out, q, kv_cache, layer, scale, softcap):
            return
        owner, rows, state = self._owner, self._long[index], self._states[index]
        pool, walks = owner.pool, self._walks_of(index, window)
        state[..., pool.layout.head_size + 1] = 0.0  # a window may leave out the first piece
        places = rows.table - owner.num_device_blocks
        sources = np.where(places < 0, 0, 1)
        ids = np.where(places < 0, rows.table, np.minimum(places, max(0, pool.host_blocks - 1)))
        seen = places[walks[0].plan.pieces[0] * PIECE_TOKENS // pool.layout.block_tokens :]
        self._count(seen[seen >= 0], streamed=self._streams[index])
        for walk in walks:
            fill = self._fills.popleft() if walk.brought and foreseen else None
            ring = owner.ring[RING_PARTS if fill is None else fill.part]
            if walk.brought:
                self._lose(
                    rows, fill.done.result() if fill else pool.read_layer(layer, places[walk.brought].tolist(), ring)
                )
                sources[walk.brought] = 2
                ids[walk.brought] = np.arange(len(walk.brought))
            where = segments.Places((kv_cache, pool.host, ring), sources, ids)
            segments.walk(
                out[rows.rows],
                q[rows.rows],
                where,
                (layer, layer, 0),
                walk.plan,
                scale,
                state,
                window=window,
                softcap=softcap,
            )
            if fill is not None:
                self._fill(fill.part)

    def counts(self) -> dict[str, float]:
        """What was read of the overflow, by names of OverflowStats. Call it when all layers are over."""
        pool, sparse = self._owner.pool, self.sparse
        written, pool.bytes_written = pool.bytes_written, 0
        return {
            "written_bytes": written,
            "host_bytes": self._num_host * pool.layer_bytes,
            "disk_bytes": self._num_disk * pool.layer_bytes,
            "streamed_bytes": self._num_streamed * pool.layer_bytes,
            "lost_blocks": sum(map(len, self.lost.values())),
            "chosen_layers": sparse.num_chosen,
            "dense_layers": sparse.num_dense,
            "missed_mass": sparse.missed,
        }

    def _count(self, places: npt.NDArray[np.int64], *, streamed: bool) -> None:
        """Places below of which one layer is read."""
        num_disk = int((places >= self._owner.pool.host_blocks).sum())
        self._num_disk += num_disk
        self._num_host += len(places) - num_disk
        self._num_streamed += (len(places) - num_disk) * streamed

    def _lose(self, rows: LongRows, places: frozenset[int]) -> None:
        if places and self._owner.in_group:
            raise OverflowLost(f"{len(places)} KV blocks below this rank's device could not be read")
        if places:
            known = self.lost.get(rows.entry, frozenset())
            self.lost[rows.entry] = known | {self._owner.num_device_blocks + place for place in places}

    def _attend_sparse(
        self,
        index: int,
        out: torch.Tensor,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        scale: float,
        softcap: float,
    ) -> bool:
        """Over the device's blocks and some of those below. False when these may carry too little of the attention."""
        owner, rows = self._owner, self._long[index]
        pool, sparse = owner.pool, owner.sparse
        if sparse is None:
            raise InvariantViolation("sparse attention that was not configured")
        places = rows.table - owner.num_device_blocks
        below = places >= 0
        choice = choose_blocks(q[rows.rows][0], pool.bounds[layer], places[below], sparse.budget, scale, softcap)
        mask = np.ones((pool.layout.num_kv_heads, len(places)), np.bool_)
        mask[:, below] = choice.mask
        comes = below & mask.any(0) & (places >= (0 if self._streams[index] else pool.host_blocks))
        brought = np.flatnonzero(comes)
        self._count(places[below & mask.any(0)], streamed=self._streams[index])
        room = owner.room_for(len(brought))
        shares = np.array_split(np.arange(len(brought)), min(NUM_READERS, max(1, len(brought))))
        reads = [
            owner.readers.submit(
                pool.read_layer, layer, places[brought[share]].tolist(), room[share[0] : share[-1] + 1]
            )
            for share in shares
            if len(share)
        ]
        for read in reads:
            self._lose(rows, read.result())
        sources, ids = np.where(below, 1, 0), np.where(below, places, rows.table)
        sources[brought], ids[brought] = 2, np.arange(len(brought))
        where = segments.Places((kv_cache, pool.host, room), sources, ids)
        lse = torch.empty(1, owner.num_heads)
        block_sparse.attend_blocks(
            out[rows.rows],
            q[rows.rows],
            where,
            (layer, layer, 0),
            mask,
            rows.context,
            pool.layout,
            scale,
            softcap=softcap,
            lse=lse,
        )
        missed = choice.missed(lse[0], pool.layout.block_tokens)
        good = 1.0 - missed >= sparse.min_mass
        self.sparse.add(missed, good=good)
        return good
