"""Attention of a sequence's newest rows over some of its blocks: each KV head over those that its mask names.

Owns the packing of masks into tables, and the bounds by which blocks are chosen. Which blocks are worth reading is the
caller's business: any mask works.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tournant.kernels import ops
from tournant.kernels.checks import refuse
from tournant.kernels.cpu.native import NativeKernels
from tournant.kernels.layout import KVLayout
from tournant.kernels.segments import Places

BoolArray = npt.NDArray[np.bool_]


def key_bounds(blocks: torch.Tensor) -> torch.Tensor:
    """Least and largest value of every channel of a block's keys: [blocks, layers, kv_heads, 2, head_size] in the dtype
    of blocks, a KV tensor.
    """
    keys = blocks[:, :, 0].float()  # [blocks, layers, kv_heads, tokens, size]
    return torch.stack((keys.amin(3), keys.amax(3)), 3).to(blocks.dtype)


def score_bounds(q: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Upper bounds of the products of a row's queries with any key of a block: float32 [heads, blocks].

    q [heads, hs]; bounds [kv_heads, 2, blocks, hs], of `key_bounds`. A product is at most the sum over channels of the
    larger of q times the least and q times the largest value (Tang et al., "Quest", 2024, section 3).
    """
    kv_heads, _, blocks, size = bounds.shape
    grouped = q.float().view(kv_heads, -1, size)
    both = torch.cat((grouped.clamp(max=0), grouped.clamp(min=0)), 2)  # [kv_heads, group, 2 hs]
    least, largest = bounds[:, 0].float(), bounds[:, 1].float()
    found = torch.bmm(both[..., :size], least.transpose(1, 2)) + torch.bmm(both[..., size:], largest.transpose(1, 2))
    return found.view(-1, blocks)


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
) -> None:
    """Attention of the last rows of a sequence over the blocks that `mask` names, on the CPU.

    out, q [num_queries, heads, hs]; places, layers: as of `segments.walk`; mask bool [kv_heads, blocks]: True where a
    head reads a block; every block that holds a query's own key must be named for all heads; context_len: tokens of the
    sequence; lse: float32 [num_queries, heads], as of `ops.paged_attention`. Raises ValueError; nothing changed then.
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
    if heads % kv_heads or out.shape != q.shape or not q.is_cpu or not isinstance(ops.kernels_for(q), NativeKernels):
        raise refuse("q", q, f"[rows, a multiple of {kv_heads}, {size}] on the CPU with the C back end, as out")
    group, lengths = heads // kv_heads, mask.sum(1)
    chosen = np.zeros((kv_heads, int(lengths.max())), np.int64)
    panel = tokens * size * places.tensors[0].itemsize  # of one head
    addresses = places.addresses(layers)
    for head in range(kv_heads):
        chosen[head, : lengths[head]] = addresses[mask[head]] + head * panel
    contexts = context_len - (num_blocks - lengths) * tokens
    one_head = KVLayout(1, 1, tokens, size, layout.dtype)
    tables, starts = np.zeros(chosen.shape, np.int32), np.arange(kv_heads + 1) * count
    plan = ops.plan_attention(tables, starts, contexts, one_head, group, deterministic=True)
    packed = q.view(count, kv_heads, group, size).transpose(0, 1).reshape(kv_heads * count, group, size)
    result = torch.empty_like(packed)
    sums = None if lse is None else torch.empty(kv_heads * count, group)
    ops.kernels_for(q).walk_pieces(result, packed, places.tensors[0], chosen, plan, scale, 0, softcap, None, lse=sums)
    out.copy_(result.view(kv_heads, count, group, size).transpose(0, 1).reshape(q.shape))
    if lse is not None and sums is not None:
        lse.copy_(sums.view(kv_heads, count, group).transpose(0, 1).reshape(count, heads))
