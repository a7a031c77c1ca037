"""Attention of a sequence's newest rows over some of its blocks: each KV head over those that its mask names.

Owns the bounds by which blocks can be chosen, the choice by them, and the attention over whatever mask. Does not own
the bounds' memory, nor whether what was left out matters: `BlockChoice.missed` tells how much that may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tournant.kernels import ops
from tournant.kernels.checks import refuse
from tournant.kernels.cpu.native import NativeKernels
from tournant.kernels.cpu.native_blocks import NativeRow
from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import AttentionPlan
from tournant.kernels.segments import Places

BoolArray = npt.NDArray[np.bool_]
Array = npt.NDArray[np.int64]


def key_bounds(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Least and largest value of every channel of a block's keys: `dtype` [blocks, layers, kv_heads, 2, head_size].

    blocks: a KV tensor; dtype: that of queries, which holds every value of KV exactly.
    """
    keys = blocks[:, :, 0].to(dtype)  # [blocks, layers, kv_heads, tokens, size]
    return torch.stack((keys.amin(3), keys.amax(3)), 3)


@dataclass(slots=True)
class RowBlocks:
    """Blocks among which a row chooses, in any layer. Not for two threads: a layer's results overwrite the last one's.

    places: int64 [blocks], where a block's bounds are, below 0: it has none, is read and not counted; native: what the
    back end keeps with it.
    """

    places: Array
    below: BoolArray = field(init=False)
    num_below: int = field(init=False)
    last_place: int = field(init=False)
    native: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.places = np.ascontiguousarray(self.places)
        self.below = self.places >= 0
        self.num_below = int(self.below.sum())
        self.last_place = int(self.places.max(initial=-1))


def score_bounds(
    q: torch.Tensor, bounds: torch.Tensor, row: RowBlocks, scale: float, softcap: float = 0.0
) -> torch.Tensor:
    """Upper bounds of the scores of a row's queries with any key of a block: float32 [heads, blocks], of `row`.

    q [heads, hs]; bounds [kv_heads, places, 2, hs] of q's dtype, all but the first axis dense, of `key_bounds`; for
    blocks without a place what is returned means nothing; scale, softcap: of the scores, scale >= 0.
    A product is at most the sum over channels of the larger of q times the least and q times the largest value (Tang et
    al., "Quest", 2024, section 3). Raises ValueError.
    """
    kv_heads, num_places, _, size = bounds.shape
    if q.dim() != 2 or len(q) % kv_heads or q.shape[1] != size or q.dtype != bounds.dtype or not q.is_contiguous():
        raise refuse("q", q, f"dense {bounds.dtype} [a multiple of {kv_heads}, {size}]")
    if bounds.stride()[2:] != (size, 1) or (num_places > 1 and bounds.stride(1) != 2 * size):
        raise refuse("bounds", bounds, "dense but for the axis of KV heads")
    if row.last_place >= num_places:
        raise ValueError(f"a block has place {row.last_place}; there are bounds of {num_places}")
    if isinstance(kernels := ops.kernels_for(q), NativeKernels):
        return kernels.blocks.score_bounds(q, bounds, row, scale, softcap)
    there = torch.from_numpy(np.maximum(row.places, 0)).to(q.device)
    known = bounds.index_select(1, there).float()  # [kv_heads, blocks, 2, hs]
    grouped = q.float().view(kv_heads, -1, size)
    found = torch.einsum("hgd,hbd->hgb", grouped.clamp(max=0), known[:, :, 0])
    found += torch.einsum("hgd,hbd->hgb", grouped.clamp(min=0), known[:, :, 1])
    found = found.reshape(len(q), -1) * scale
    return torch.tanh(found / softcap) * softcap if softcap else found


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """Of a `RowBlocks`, until its next choice. mask: bool [kv_heads, blocks], those to read; read: bool [blocks], those
    with places that any head reads; most: float32 [heads], log of the sum over blocks that are not read of the
    exponential of their bound; missed: float32 [heads], what these have of the sum over all blocks with places: an
    estimate of the attention that is missed, since bounds of all blocks are above the truth by about as much.
    """

    mask: BoolArray
    read: BoolArray
    most: npt.NDArray[np.float32]
    missed: npt.NDArray[np.float32]

    def missed_at_most(self, lse: torch.Tensor, block_tokens: int) -> float:
        """Largest share of a head's attention, over all heads, that the blocks left out can carry: certain, but loose.

        lse: float32, `heads` elements, log of the sum of exponentials over what was read. With sums Z of what was read
        and U, at most, of what was not, the share is at most U / (U + Z).
        """
        ratio = math.log(block_tokens) + float((self.most - lse.numpy().reshape(-1)).max())  # log of U / Z
        return 1.0 / (1.0 + math.exp(-ratio)) if ratio > -700.0 else 0.0


def choose_blocks(found: torch.Tensor, row: RowBlocks, kv_heads: int, count: int) -> BlockChoice:
    """The `count` blocks, of those with places, in which a query of each KV head's group can score highest.

    found: of `score_bounds` for `row`, overwritten; count: from 0 to the blocks with places; those without are read and
    not counted. Heads of a group count by how near they may come to the best that they may reach anywhere; of blocks
    that are alike the first is taken. Raises ValueError.
    """
    below = row.below
    if not 0 <= count <= row.num_below or found.shape[1] != len(below) or not found.is_contiguous():
        raise ValueError(f"{count} blocks to choose of dense {tuple(found.shape)}; {row.num_below} can be")
    if isinstance(kernels := ops.kernels_for(found), NativeKernels):
        return BlockChoice(*kernels.blocks.choose_blocks(found, row, kv_heads, count))
    mask = np.broadcast_to(~below, (kv_heads, len(below))).copy()
    if below.any():
        scores = found[:, torch.from_numpy(below)]
        far = (scores.amax(-1, keepdim=True) - scores).view(kv_heads, -1, row.num_below).amin(1)
        order = far.sort(dim=-1, stable=True).indices[:, :count].cpu().numpy()
        np.put_along_axis(mask, np.flatnonzero(below)[order], True, axis=1)
    read = torch.from_numpy(mask).repeat_interleave(len(found) // kv_heads, 0).to(found.device)
    has_bounds = torch.from_numpy(below).to(found.device)
    total = found.masked_fill_(~has_bounds, -math.inf).logsumexp(-1)
    most = found.masked_fill_(read, -math.inf).logsumexp(-1)
    missed = torch.where(most > -math.inf, torch.exp(most - total), 0.0)
    return BlockChoice(mask, below & mask.any(0), most.cpu().numpy(), missed.cpu().numpy())


@dataclass(slots=True)
class BlocksPlan:
    """Masks by which each KV head reads as many blocks, for any layer and row. Not for two threads.

    heads: each KV head is a sequence of it; lengths: [kv_heads], blocks that each reads; native: as of `RowBlocks`.
    """

    heads: AttentionPlan
    lengths: list[int]
    native: Any = field(default=None, repr=False)


def plan_blocks(lengths: npt.ArrayLike, context_len: int, count: int, layout: KVLayout, heads: int) -> BlocksPlan:
    """What `attend_blocks` needs to know of its masks. lengths: int [kv_heads], blocks that each KV head reads, of the
    sequence's; the rest: as of `attend_blocks`.
    """
    tokens, size = layout.block_tokens, layout.head_size
    lengths = np.asarray(lengths)
    contexts = context_len - (-(-context_len // tokens) - lengths) * tokens
    tables, starts = np.zeros((len(lengths), int(lengths.max())), np.int32), np.arange(len(lengths) + 1) * count
    one_head = KVLayout(1, 1, tokens, size, layout.dtype)
    plan = ops.plan_attention(tables, starts, contexts, one_head, heads // len(lengths), deterministic=True)
    return BlocksPlan(plan, lengths.tolist())


def attend_blocks(
    out: torch.Tensor,
    q: torch.Tensor,
    places: Places,
    layers: Sequence[int],
    mask: BoolArray,
    context_len: int,
    layout: KVLayout,
    scale: float,
    *,
    softcap: float = 0.0,
    lse: torch.Tensor | None = None,
    plan: BlocksPlan | None = None,
) -> None:
    """Attention of the last rows of a sequence over the blocks that `mask` names, on the CPU.

    out, q [num_queries, heads, hs]; places, layers: as of `segments.walk`; mask bool [kv_heads, blocks]: True where a
    head reads a block; every block that holds a query's own key must be named for all heads; context_len: tokens of the
    sequence; lse: float32 [num_queries, heads], as of `ops.paged_attention`; plan: of `plan_blocks`, for masks with as
    many blocks, None = made here. Raises ValueError; nothing changed then.
    """
    count, heads, size = q.shape
    kv_heads, tokens = layout.num_kv_heads, layout.block_tokens
    num_blocks, first_own = -(-context_len // tokens), (context_len - count) // tokens
    if mask.shape != (kv_heads, num_blocks) or mask.dtype != np.bool_:
        raise ValueError(f"mask is {mask.dtype} {mask.shape}; it must be bool {(kv_heads, num_blocks)}")
    if not mask[:, first_own:].all():
        raise ValueError(
            f"blocks {first_own} to {num_blocks - 1} hold keys of the query rows; no head may leave one out"
        )
    kernels = ops.kernels_for(q)
    if heads % kv_heads or out.shape != q.shape or not q.is_cpu or not isinstance(kernels, NativeKernels):
        raise refuse("q", q, f"[rows, a multiple of {kv_heads}, {size}] on the CPU with the C back end, as out")
    plan = plan or plan_blocks(mask.sum(1), context_len, count, layout, heads)
    group, form = heads // kv_heads, places.tensors[0]
    chosen, lengths = kernels.blocks.pack_blocks(
        np.ascontiguousarray(mask),
        places.sources,
        places.ids,
        *places.strided(layers),
        plan,
        tokens * size * form.itemsize,
    )
    if lengths != plan.lengths or plan.heads.num_tokens != kv_heads * count:
        raise ValueError(f"the plan is for {plan.lengths} blocks, {count} rows of this mask read {lengths}")
    if count == 1 and out.is_contiguous() and q.is_contiguous() and (lse is None or lse.is_contiguous()):
        of_heads = (kv_heads, group, size)
        kernels.walk_pieces(
            out.view(of_heads), q.view(of_heads), form, chosen, plan.heads, scale, 0, softcap, None, lse=lse
        )
        return
    packed = q.view(count, kv_heads, group, size).transpose(0, 1).reshape(kv_heads * count, group, size)
    result = torch.empty_like(packed)
    sums = None if lse is None else torch.empty(kv_heads * count, group)
    kernels.walk_pieces(result, packed, form, chosen, plan.heads, scale, 0, softcap, None, lse=sums)
    out.copy_(result.view(kv_heads, count, group, size).transpose(0, 1).reshape(q.shape))
    if lse is not None and sums is not None:
        lse.copy_(sums.view(kv_heads, count, group).transpose(0, 1).reshape(count, heads))


@dataclass(slots=True)
class RowAttention:
    """Choice and attention of one row whose blocks lie where they can be read, in any layer, by one call of the C back
    end: as `score_bounds`, `choose_blocks` and `attend_blocks` one after another. Not for two threads.

    row: its blocks; places: the same ones, in tensors of as many layers as `bounds` [layers, kv_heads, places, 2, hs],
    dense but for the first two axes; plan: of `plan_blocks` for heads that read `count` blocks of those with places and
    all others; heads: of the row; least_mass: of the attention that must not be missed, on average over heads, by the
    estimate of `BlockChoice.missed`. The tensors are kept. Raises ValueError.
    """

    row: RowBlocks
    places: Places
    bounds: torch.Tensor
    plan: BlocksPlan
    heads: int
    count: int
    least_mass: float
    _native: NativeRow = field(init=False, repr=False)

    def __post_init__(self) -> None:
        row, places, bounds, plan, count = self.row, self.places, self.bounds, self.plan, self.count
        layers, kv_heads, num_places, _, size = bounds.shape
        kernels = ops.kernels_for(bounds)
        if not bounds.is_cpu or not isinstance(kernels, NativeKernels) or not bounds[0, 0].is_contiguous():
            raise refuse("bounds", bounds, "dense but for layers and KV heads, on the CPU with the C back end")
        if row.last_place >= num_places or not 0 <= count <= row.num_below:
            raise ValueError(f"place {row.last_place} of {num_places}, {count} blocks to choose of {row.num_below}")
        num = len(row.places)
        if plan.lengths != [num - row.num_below + count] * kv_heads or plan.heads.num_tokens != kv_heads:
            raise ValueError(f"the plan is for {plan.lengths} blocks, heads read {num - row.num_below + count}")
        first = places.tensors[0]
        for tensor in places.tensors:
            dense = not len(tensor) or tensor[0, 0].is_contiguous()
            fits = tensor.shape[1:4] == (layers, 2, kv_heads) and tensor.shape[4:] == first.shape[4:]
            if not dense or not fits or tensor.dtype != first.dtype or tensor.shape[5] != size or not tensor.is_cpu:
                raise refuse("a place", tensor, f"{first.dtype} with {layers} layers of {kv_heads} heads of {size}")
        sizes, sources = [len(tensor) for tensor in places.tensors], places.sources
        if len(places.ids) != num or len(sources) != num or sources.min() < 0 or sources.max() >= len(sizes):
            raise ValueError(f"places are not of {num} blocks in {len(sizes)} tensors")
        if (places.ids < 0).any() or (places.ids >= np.asarray(sizes)[sources]).any():
            raise ValueError(f"places name blocks that are not there: tensors have {sizes}")
        self._native = kernels.row_attention(self)

    def attend(self, out: torch.Tensor, q: torch.Tensor, layer: int, scale: float, softcap: float = 0.0) -> float:
        """What is missed, on average over heads; `out` is written unless that leaves less than `least_mass`.

        out, q: dense [1, heads, hs]. Raises ValueError.
        """
        form, dtype = (1, self.heads, self.bounds.shape[4]), self.bounds.dtype
        for name, x in (("q", q), ("out", out)):
            if x.shape != form or x.dtype != dtype or not x.is_contiguous():
                raise refuse(name, x, f"dense {dtype} {form}")
        if not 0 <= layer < len(self.bounds):
            raise ValueError(f"layer is {layer}; there are 0 to {len(self.bounds) - 1}")
        return self._native.attend(out, q, layer, scale, softcap)
