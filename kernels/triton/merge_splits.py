"""Combine the parts that the splits of one attention call computed: a softmax over their log-sum-exps.

partial float32 [tiles * queries, heads, splits, head_size], each part divided by its own sum; partial_lse float32
[tiles * queries, heads, splits] in units of log2, -inf where a split saw nothing (its part of `partial` is not read);
tiles int32 [tiles, 4] as in plan.Work; out [N, heads, head_size], rows may be strided; lse float32 [N, heads] or None,
natural logarithm. A row that saw nothing gets zeros and -inf. The caller allocates everything.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tournant.kernels.triton.attention_tile import LN2, TILE_FIELDS


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits_kernel(
    out_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    tiles_ptr,
    out_stride,
    num_splits,
    queries: tl.constexpr,
    head_size: tl.constexpr,
    chunk: tl.constexpr,
):
    """One program: a row, a head."""
    place, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    tile_ptr = tiles_ptr + place // queries * TILE_FIELDS
    query = place % queries
    if query >= tl.load(tile_ptr + 2):
        return
    first = (place.to(tl.int64) * heads + head) * num_splits
    dims = tl.arange(0, triton.next_power_of_2(head_size))
    peak = tl.full([1], float("-inf"), tl.float32)
    for start in range(0, num_splits, chunk):
        splits = start + tl.arange(0, chunk)
        part = tl.load(partial_lse_ptr + first + splits, mask=splits < num_splits, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(part, 0))
    base = tl.where(peak > float("-inf"), peak, 0.0)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([triton.next_power_of_2(head_size)], tl.float32)
    for start in range(0, num_splits, chunk):
        splits = start + tl.arange(0, chunk)
        part = tl.load(partial_lse_ptr + first + splits, mask=splits < num_splits, other=float("-inf"))
        weight = tl.exp2(part - base)
        mask = (weight > 0.0)[:, None] & (dims < head_size)[None, :]
        values = tl.load(partial_ptr + (first + splits)[:, None] * head_size + dims[None, :], mask=mask, other=0.0)
        total += tl.sum(weight, 0)
        acc += tl.sum(values * weight[:, None], 0)
    seen = total > 0.0
    acc = acc / tl.where(seen, total, 1.0)
    row = (tl.load(tile_ptr + 1) + query).to(tl.int64)
    out_place = row * out_stride + head * head_size + dims
    tl.store(out_ptr + out_place, acc.to(out_ptr.dtype.element_ty), mask=dims < head_size)
    if lse_ptr is not None:
        lse = tl.where(seen, (peak + tl.log2(tl.where(seen, total, 1.0))) * LN2, float("-inf"))
        tl.store(lse_ptr + row * heads + head + tl.arange(0, 1), lse)


def merge_splits(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    tiles: torch.Tensor,
) -> None:
    """Write the rows of `tiles` into out and lse. One program per row and head; 16 parts are loaded at a time."""
    rows, heads, splits, size = partial.shape
    merge_splits_kernel[(rows, heads)](
        out,
        lse,
        partial,
        partial_lse,
        tiles,
        out.stride(0),
        splits,
        rows // len(tiles),
        size,
        16,
        num_warps=4,
        enable_fp_fusion=True,
    )
