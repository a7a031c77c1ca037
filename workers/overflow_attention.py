"""Attention of a step in which some sequences have blocks below the device.

Owns the order in which layers of blocks are brought, and the way that each sequence's are attended to. Per layer, a
long sequence's keys are walked in pieces (kernels/segments.py): blocks of the device are read where they are, others
come through the ring (overflow_ring.py) while the walk before is computed. The order of all reads of a step is known
when it begins, so the next layer's are under way before it starts.

Blocks in RAM are read in place or come through the ring as well. On a CPU all is one memory, and a step that needs
nothing else reads it by the ordinary calls, all layers in one (`InPlaceStep`). On a device with a link,
in place means that queries go down, the CPU walks all pieces of which nothing is on the device, and the rows' states
come up, from which the device goes on; nothing of that is captured in graphs.

Invariant: what attends reads a part of the ring only between the end of its fill and the begin of the next.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tournant.kernels import ops, segments
from tournant.kernels.plan import PARTIAL_EXTRA, PIECE_TOKENS, AttentionPlan, BlocksBelow
from tournant.workers.config import SparseAttention
from tournant.workers.device import Device
from tournant.workers.overflow_choice import OverflowChoice
from tournant.workers.overflow_pool import OverflowPool
from tournant.workers.overflow_ring import NUM_READERS, Fill, OverflowRing, Part
from tournant.workers.overflow_routes import BROUGHT, cut_pieces, first_piece, resident
from tournant.workers.sparse_attention import SparseReader

Array = npt.NDArray[np.int64]


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
    """A range of pieces of a sequence. brought: places of its blocks that come through the ring, in their order;
    on_cpu: the CPU walks it, though the device has a link; num_below: blocks below in it.
    """

    plan: AttentionPlan
    brought: list[int]
    on_cpu: bool
    num_below: int


@dataclass(frozen=True, slots=True)
class _Route:
    """How a sequence's keys are walked in every layer with one window. sources, ids: of all its blocks, see `Places`,
    0 the device, 1 RAM, 2 the walk's part of the ring; packed: the same for a GPU; num_host, num_disk: blocks below
    that are read; num_streamed: those of num_host that come through the ring.
    """

    walks: list[_Walk]
    sources: Array
    ids: Array
    packed: torch.Tensor | None
    num_host: int
    num_disk: int
    num_streamed: int


@dataclass(frozen=True, slots=True)
class _Layer:
    """Where a layer's KV lies on the device, and how it attends."""

    number: int
    kv_cache: torch.Tensor
    scale: float
    window: int
    softcap: float


class OverflowAttention:
    """Makes `OverflowStep`s. One per shard; closes with its engine's process.

    windows: keys a row sees in each layer of this shard, 0 = all before it; way: "in_place", "streamed" or "auto", see
    EngineConfig.overflow_attention; deterministic: "auto" may not depend on time; sparse: which blocks decode steps
    read, None = all, on a device without a link.
    """

    def __init__(
        self,
        pool: OverflowPool,
        device: Device,
        num_device_blocks: int,
        num_heads: int,
        windows: Sequence[int],
        sparse: SparseAttention | None = None,
        *,
        way: str = "auto",
        deterministic: bool = False,
    ) -> None:
        self.pool = pool
        self.device = device
        self.num_device_blocks = num_device_blocks
        self.num_heads = num_heads
        self.windows = tuple(windows)
        if way == "auto" and not device.has_link:
            way = "in_place"
        elif way == "auto" and deterministic:
            way = "streamed"
        self.way = way
        self.choice = OverflowChoice()
        self.in_group = False  # other ranks cannot be told that a step means nothing: a loss ends the step
        self.ring = OverflowRing(pool, device)
        self.sparse: SparseReader | None = None
        if sparse is not None:
            first = pool.host_blocks if way == "in_place" else 0
            self.sparse = SparseReader(pool, sparse, num_heads, first, self.ring.readers, NUM_READERS)

    def is_in_place(self, rows: int, num_host: int) -> bool:
        """Whether a sequence's blocks in RAM, `num_host`, are read where they lie in a step with so many rows of it."""
        if self.way != "auto" or not num_host:
            return self.way == "in_place"
        return self.choice.is_in_place(rows, num_host * self.pool.layer_bytes, time.monotonic())

    def observe(self) -> None:
        """Learn from copies that are over."""
        copies, now = self.ring.copies, time.monotonic()
        while copies and (seconds := copies[0][1].seconds()) is not None:
            self.choice.observe_copy(copies.popleft()[0], seconds, now)

    def find(self, tables: npt.NDArray[np.int32], context_lens: Array) -> npt.NDArray[np.bool_]:
        """Which blocks of a step's sequences are below. tables [S, blocks]; context_lens [S]."""
        num_used = -(-context_lens // self.pool.layout.block_tokens)
        used = np.arange(tables.shape[1]) < num_used[:, None]
        return np.asarray((tables >= self.num_device_blocks) & used, dtype=np.bool_)

    def in_place(
        self, tables: npt.NDArray[np.int32], below: npt.NDArray[np.bool_], context_lens: Array, counts: Array
    ) -> InPlaceStep | None:
        """A step that reads all of its blocks below where they lie; None where it cannot.

        tables [S, blocks], below: of `find`; context_lens, counts [S]: tokens, and rows among them.
        """
        is_on_disk = below & (tables >= self.num_device_blocks + self.pool.host_blocks)
        if self.way != "in_place" or self.device.has_link or self.sparse is not None or is_on_disk.any():
            return None
        if ops.backend(self.device.torch_device) == "triton":
            return None
        per_piece, num_read = PIECE_TOKENS // self.pool.layout.block_tokens, 0
        for window, num_layers in Counter(self.windows).items():
            for own, context, count in zip(below, context_lens.tolist(), counts.tolist(), strict=True):
                num_read += num_layers * int(own[first_piece(context, count, window) * per_piece :].sum())
        return InPlaceStep(self, num_read)

    def step(self, hot: list[tuple[slice, AttentionPlan]], long: list[LongRows]) -> OverflowStep:
        """The attention of a step whose other rows are those of `hot`."""
        return OverflowStep(self, hot, long)


class InPlaceStep:
    """A step whose blocks below are read where they lie, by what reads those of the device. below: for its plan;
    num_read: layers of blocks; lost: as of OverflowStep, RAM loses none.
    """

    def __init__(self, owner: OverflowAttention, num_read: int) -> None:
        self.below = BlocksBelow(owner.num_device_blocks, owner.pool.host)
        self.lost: dict[int, frozenset[int]] = {}
        self._pool = owner.pool
        self._num_read = num_read

    def counts(self) -> dict[str, float]:
        """As of OverflowStep."""
        return {"written_bytes": self._pool.take_written(), "host_bytes": self._num_read * self._pool.layer_bytes}


class OverflowStep:
    """Attention of one step, layer after layer. lost: by batch entry, ids below that could not be read."""

    def __init__(self, owner: OverflowAttention, hot: list[tuple[slice, AttentionPlan]], long: list[LongRows]) -> None:
        self._owner = owner
        self._hot = hot
        self._long = long
        self.lost: dict[int, frozenset[int]] = {}
        self._num_host = self._num_disk = self._num_streamed = 0
        self._places = [rows.table - owner.num_device_blocks for rows in long]  # below 0: on the device
        self._counts = [rows.rows.stop - rows.rows.start for rows in long]
        self._sparse_rows = {
            index: owner.sparse.row(rows.table, owner.num_device_blocks, rows.context)
            for index, rows in enumerate(long)
            if owner.sparse is not None and self._counts[index] == 1
        }
        is_below = [places[places >= 0] for places in self._places]
        self._in_place = [
            owner.is_in_place(count, int((below < owner.pool.host_blocks).sum()))
            for count, below in zip(self._counts, is_below, strict=True)
        ]
        device, size = owner.device, owner.pool.layout.head_size
        self._states = [segments.new_state(n, owner.num_heads, size, device.torch_device) for n in self._counts]
        self._host_states: dict[int, torch.Tensor] = {}
        self._routes: dict[tuple[int, int], _Route] = {}
        self._order = deque(
            (layer, walk)
            for layer, window in enumerate(owner.windows)
            for index in range(len(long))
            if self._is_foreseen(index, window)
            for walk in self._route(index, window).walks
            if walk.brought
        )
        self._fills: deque[Fill] = deque()
        for part in owner.ring.parts:
            self._fill(part)

    def _is_foreseen(self, index: int, window: int) -> bool:
        """Whether it is known before a layer which blocks of a sequence it reads."""
        return bool(window) or index not in self._sparse_rows

    def _route(self, index: int, window: int) -> _Route:
        """A sequence's pieces, cut so that what each walk needs from below fits a part of the ring."""
        if (found := self._routes.get((index, window))) is not None:
            return found
        owner, rows, places, count = self._owner, self._long[index], self._places[index], self._counts[index]
        linked, in_place, num_host = owner.device.has_link, self._in_place[index], owner.pool.host_blocks
        per_piece, pieces = PIECE_TOKENS // owner.pool.layout.block_tokens, -(-rows.context // PIECE_TOKENS)
        first = first_piece(rows.context, count, window)
        sources, ids = resident(rows.table, places)
        cuts = cut_pieces(
            places,
            per_piece,
            range(first, pieces),
            owner.ring.part_blocks,
            0 if linked or not in_place else num_host,
            num_host if linked and in_place else None,
        )
        walks: list[_Walk] = []
        for cut in cuts:
            brought = np.asarray(cut.brought, dtype=np.int64)
            brought = brought[np.argsort(places[brought])]  # neighbours below come in one piece
            sources[brought], ids[brought] = BROUGHT, np.arange(len(brought))
            layout, heads = owner.ring.layout, owner.num_heads
            plan = segments.plan_pieces(count, rows.context, layout, heads, cut.begin, cut.end)
            num_below = int((places[cut.begin * per_piece : cut.end * per_piece] >= 0).sum())
            walks.append(_Walk(plan, places[brought].tolist(), cut.on_cpu, num_below))
        seen = places[first * per_piece :]
        num_disk = int((seen >= num_host).sum())
        num_streamed = sum(sum(place < num_host for place in walk.brought) for walk in walks)
        packed = segments.pack_table(sources, ids, owner.device.torch_device) if linked else None
        route = _Route(walks, sources, ids, packed, int((seen >= 0).sum()) - num_disk, num_disk, num_streamed)
        self._routes[(index, window)] = route
        return route

    def _fill(self, part: Part) -> None:
        """Begin to bring what the next walk of all needs that is not on its way."""
        if self._order:
            layer, walk = self._order.popleft()
            self._fills.append(self._owner.ring.fill(part, layer, walk.brought, on_cpu=walk.on_cpu))

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
        route, state = self._route(index, layer.window), self._states[index]
        self._num_host += route.num_host
        self._num_disk += route.num_disk
        self._num_streamed += route.num_streamed
        state[..., -PARTIAL_EXTRA + 1] = 0.0  # a window may leave out the first piece
        below = [walk for walk in route.walks if walk.on_cpu]
        if below:
            self._walk_below(index, below, q, layer)
        for walk in route.walks[len(below) :]:
            self._walk(index, walk, out, q, layer, state, goes_on=bool(below))

    def _walk_below(self, index: int, walks: list[_Walk], q: torch.Tensor, layer: _Layer) -> None:
        """The CPU's walks of a layer: from the device's queries to its states."""
        owner, rows = self._owner, self._counts[index]
        state = self._host_states.get(index)
        if state is None:
            state = owner.device.host_buffer(self._states[index].shape, torch.float32)
            self._host_states[index] = state
            for mark in owner.pool.landing(self._places[index].tolist()):
                mark.wait()
        (queries,) = owner.device.download([q])()  # after it, the copy of the layer before out of `state` is over, too
        state[..., -PARTIAL_EXTRA + 1] = 0.0
        for walk in walks:
            seconds = self._walk(index, walk, torch.empty_like(queries), queries, layer, state, goes_on=False)
            owner.choice.observe_in_place(rows, walk.num_below * owner.pool.layer_bytes, seconds, time.monotonic())
        self._states[index].copy_(state, non_blocking=True)

    def _walk(
        self,
        index: int,
        walk: _Walk,
        out: torch.Tensor,
        q: torch.Tensor,
        layer: _Layer,
        state: torch.Tensor,
        *,
        goes_on: bool,
    ) -> float:
        """One walk and what it needs. Returns the seconds that the CPU spent on it."""
        owner, route = self._owner, self._route(index, layer.window)
        pool, part, fill = owner.pool, owner.ring.spare, None
        if walk.brought and self._is_foreseen(index, layer.window):
            fill = self._fills.popleft()
            part = fill.part
            self._lose(index, fill.arrive())
        elif walk.brought:
            self._lose(index, pool.read_layer(layer.number, walk.brought, part.device))
        if walk.on_cpu:
            tensors = (pool.host, pool.host, part.host)
        else:  # over a link all comes through the ring
            tensors = (layer.kv_cache, layer.kv_cache if owner.device.has_link else pool.host, part.device)
        began = time.perf_counter()
        segments.walk(
            out,
            q,
            segments.Places(tensors, route.sources, route.ids, route.packed),
            (layer.number, layer.number, 0),
            walk.plan,
            layer.scale,
            state,
            window=layer.window,
            softcap=layer.softcap,
            goes_on=goes_on,
            on_cpu=walk.on_cpu,
        )
        seconds = time.perf_counter() - began
        if fill is not None:
            self._fill(fill.part)
        return seconds

    def counts(self) -> dict[str, float]:
        """What was read of the overflow, by names of OverflowStats. Call it when all layers are over."""
        pool, sparse = self._owner.pool, [row.counts for row in self._sparse_rows.values()]
        self._owner.observe()
        head_bytes = pool.layer_bytes // pool.layout.num_kv_heads
        sparse_bytes = sum(row.num_host for row in sparse) * head_bytes
        streamed_bytes = sparse_bytes if self._owner.way == "streamed" else 0
        return {
            "written_bytes": pool.take_written(),
            "host_bytes": self._num_host * pool.layer_bytes + sparse_bytes,
            "disk_bytes": self._num_disk * pool.layer_bytes + sum(row.num_disk for row in sparse) * head_bytes,
            "streamed_bytes": self._num_streamed * pool.layer_bytes + streamed_bytes,
            "lost_blocks": sum(map(len, self.lost.values())),
            "chosen_layers": sum(row.num_chosen for row in sparse),
            "dense_layers": sum(row.num_dense for row in sparse),
            "missed_mass": sum(row.missed for row in sparse),
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
        row = self._sparse_rows[index]
        good, lost = row.attend(out, q, layer.kv_cache, layer.number, layer.scale, layer.softcap)
        self._lose(index, lost)
        return good
