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
from tournant.workers.overflow_pool import OverflowPool, page_aligned
from tournant.workers.sparse_choice import SparseCounts, choose_blocks

Array = npt.NDArray[np.int64]
DEVICE, RAM, RING = 0, 1, 2  # sources of blocks
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
    table: Array


@dataclass(frozen=True, slots=True)
class _Walk:
    """A range of pieces of a sequence. brought: places of its blocks that come through the ring, in their order."""

    plan: AttentionPlan
    brought: list[int]


@dataclass(frozen=True, slots=True)
class _Route:
    """How a sequence's keys are walked in every layer with one window. sources, ids: of all its blocks, see `Places`,
    0 the device, 1 RAM, 2 the walk's part of the ring; num_host, num_disk: blocks below that are read.
    """

    walks: list[_Walk]
    sources: Array
    ids: Array
    num_host: int
    num_disk: int


@dataclass(frozen=True, slots=True)
class _Layer:
    """Where a layer's KV lies on the device, and how it attends."""

    number: int
    kv_cache: torch.Tensor
    scale: float
    window: int
    softcap: float


@dataclass(slots=True)
class _Fill:
    """What a walk needs in its part of the ring. done: the places that were lost."""

    part: int
    done: Future[frozenset[int]]


class OverflowAttention:
    """Makes `OverflowStep`s. One per shard; closes with its engine's process.

    windows: keys a row sees in each layer of this shard, 0 = all before it; streams: blocks in RAM are copied to the
    device first, else read in place; sparse: which blocks decode steps read, None = all.
    """

    def __init__(
        self,
        pool: OverflowPool,
        num_device_blocks: int,
        num_heads: int,
        windows: Sequence[int],
        sparse: SparseAttention | None = None,
        *,
        streams: bool = False,
    ) -> None:
        self.pool = pool
        self.num_device_blocks = num_device_blocks
        self.num_heads = num_heads
        self.windows = tuple(windows)
        self.first_brought = 0 if streams else pool.host_blocks  # places from here on come through the ring
        self.streams = streams
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
        self._num_host = self._num_disk = 0
        self._places = [rows.table - owner.num_device_blocks for rows in long]  # below 0: on the device
        self._counts = [rows.rows.stop - rows.rows.start for rows in long]
        self._is_sparse = [owner.sparse is not None and count == 1 for count in self._counts]
        size = owner.pool.layout.head_size
        self._states = [segments.new_state(n, owner.num_heads, size, torch.device("cpu")) for n in self._counts]
        self._routes: dict[tuple[int, int], _Route] = {}
        self._order = deque(
            (layer, walk.brought)
            for layer, window in enumerate(owner.windows)
            for index in range(len(long))
            if self._is_foreseen(index, window)
            for walk in self._route(index, window).walks
            if walk.brought
        )
        self._fills: deque[_Fill] = deque()
        for part in range(RING_PARTS):
            self._fill(part)

    def _is_foreseen(self, index: int, window: int) -> bool:
        """Whether it is known before a layer which blocks of a sequence it reads."""
        return bool(window) or not self._is_sparse[index]

    def _resident(self, index: int) -> tuple[Array, Array]:
        """Sources and ids of a sequence's blocks where they lie, those on disk as if they were in RAM."""
        places = self._places[index]
        return np.where(places < 0, DEVICE, RAM), np.where(places < 0, self._long[index].table, places)

    def _route(self, index: int, window: int) -> _Route:
        """A sequence's pieces, cut so that what each walk needs from below fits a part of the ring."""
        if (found := self._routes.get((index, window))) is not None:
            return found
        owner, rows, places, count = self._owner, self._long[index], self._places[index], self._counts[index]
        per_piece, pieces = PIECE_TOKENS // owner.pool.layout.block_tokens, -(-rows.context // PIECE_TOKENS)
        first = max(0, rows.context - count - window + 1) // PIECE_TOKENS if window else 0
        sources, ids = self._resident(index)
        walks: list[_Walk] = []

        def end_walk(begin: int, end: int, brought: list[int]) -> None:
            sources[brought], ids[brought] = RING, np.arange(len(brought))
            layout = owner.slice_layout
            plan = segments.plan_pieces(count, rows.context, layout, owner.num_heads, begin, end)
            walks.append(_Walk(plan, places[brought].tolist()))

        begin, brought = first, list[int]()
        for piece in range(first, pieces):
            start = piece * per_piece
            wanted = (start + np.flatnonzero(places[start : start + per_piece] >= owner.first_brought)).tolist()
            if brought and len(brought) + len(wanted) > owner.part_blocks:
                end_walk(begin, piece, brought)
                begin, brought = piece, []
            brought = brought + wanted
        end_walk(begin, pieces, brought)
        seen = places[first * per_piece :]
        num_disk = int((seen >= owner.pool.host_blocks).sum())
        route = _Route(walks, sources, ids, int((seen >= 0).sum()) - num_disk, num_disk)
        self._routes[(index, window)] = route
        return route

    def _fill(self, part: int) -> None:
        """Begin to bring what the next walk of all needs that is not on its way."""
        if not self._order:
            return
        layer, brought = self._order.popleft()
        owner = self._owner
        self._fills.append(_Fill(part, owner.readers.submit(owner.pool.read_layer, layer, brought, owner.ring[part])))

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
        how = _Layer(layer, kv_cache, scale, window, softcap)
        for index, long in enumerate(self._long):
            own = out[long.rows], q[long.rows]
            if self._is_foreseen(index, window) or not self._attend_sparse(index, *own, how):
                self._attend_long(index, *own, how)

    def _attend_long(self, index: int, out: torch.Tensor, q: torch.Tensor, layer: _Layer) -> None:
        owner, state, route = self._owner, self._states[index], self._route(index, layer.window)
        pool, foreseen = owner.pool, self._is_foreseen(index, layer.window)
        state[..., pool.layout.head_size + 1] = 0.0  # a window may leave out the first piece
        self._num_host += route.num_host
        self._num_disk += route.num_disk
        for walk in route.walks:
            fill = self._fills.popleft() if walk.brought and foreseen else None
            ring = owner.ring[RING_PARTS if fill is None else fill.part]
            if walk.brought:
                self._lose(index, fill.done.result() if fill else pool.read_layer(layer.number, walk.brought, ring))
            segments.walk(
                out,
                q,
                segments.Places((layer.kv_cache, pool.host, ring), route.sources, route.ids),
                (layer.number, layer.number, 0),
                walk.plan,
                layer.scale,
                state,
                window=layer.window,
                softcap=layer.softcap,
            )
            if fill is not None:
                self._fill(fill.part)

    def counts(self) -> dict[str, float]:
        """What was read of the overflow, by names of OverflowStats. Call it when all layers are over."""
        pool, sparse = self._owner.pool, self.sparse
        written, pool.bytes_written = pool.bytes_written, 0
        host_bytes = self._num_host * pool.layer_bytes
        return {
            "written_bytes": written,
            "host_bytes": host_bytes,
            "disk_bytes": self._num_disk * pool.layer_bytes,
            "streamed_bytes": host_bytes if self._owner.streams else 0,
            "lost_blocks": sum(map(len, self.lost.values())),
            "chosen_layers": sparse.num_chosen,
            "dense_layers": sparse.num_dense,
            "missed_mass": sparse.missed,
        }

    def _lose(self, index: int, places: frozenset[int]) -> None:
        if places and self._owner.in_group:
            raise OverflowLost(f"{len(places)} KV blocks below this rank's device could not be read")
        if places:
            entry = self._long[index].entry
            known = self.lost.get(entry, frozenset())
            self.lost[entry] = known | {self._owner.num_device_blocks + place for place in places}

    def _attend_sparse(self, index: int, out: torch.Tensor, q: torch.Tensor, layer: _Layer) -> bool:
        """Over the device's blocks and some of those below. False when these may carry too little of the attention."""
        owner, places = self._owner, self._places[index]
        pool, sparse = owner.pool, owner.sparse
        if sparse is None:
            raise InvariantViolation("sparse attention that was not configured")
        below = places >= 0
        choice = choose_blocks(
            q[0], pool.bounds[layer.number], places[below], sparse.budget, layer.scale, layer.softcap
        )
        mask = np.ones((pool.layout.num_kv_heads, len(places)), np.bool_)
        mask[:, below] = choice.mask
        read = below & mask.any(0)
        num_disk = int((places[read] >= pool.host_blocks).sum())
        self._num_disk += num_disk
        self._num_host += int(read.sum()) - num_disk
        brought = np.flatnonzero(read & (places >= owner.first_brought))
        room = owner.room_for(len(brought))
        shares = [share for share in np.array_split(np.arange(len(brought)), NUM_READERS) if len(share)]
        reads = [
            owner.readers.submit(
                pool.read_layer, layer.number, places[brought[share]].tolist(), room[share[0] : share[-1] + 1]
            )
            for share in shares
        ]
        for one in reads:
            self._lose(index, one.result())
        sources, ids = self._resident(index)
        sources[brought], ids[brought] = RING, np.arange(len(brought))
        lse = torch.empty(1, owner.num_heads)
        block_sparse.attend_blocks(
            out,
            q,
            segments.Places((layer.kv_cache, pool.host, room), sources, ids),
            (layer.number, layer.number, 0),
            mask,
            self._long[index].context,
            pool.layout,
            layer.scale,
            softcap=layer.softcap,
            lse=lse,
        )
        missed = choice.missed(lse[0], pool.layout.block_tokens)
        good = 1.0 - missed >= sparse.min_mass
        self.sparse.add(missed, good=good)
        return good
