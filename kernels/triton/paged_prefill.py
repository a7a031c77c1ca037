"""Causal attention of many query rows per sequence over paged KV: bound by the tensor cores.

A tile holds the query heads of one KV head for block_m // group consecutive queries. Its KV falls into tiles that every
row sees, which are folded in without masks, and the few at the causal edge (and at the window's), which are masked; the
rows' own KV must have been stored. Few tiles over long contexts (the last chunk of a cached prompt) split KV as decode
does. Shapes and arguments: see paged_decode.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tournant.kernels.triton.attention_launch import launch_attention
from tournant.kernels.triton.attention_tile import (
    NEVER,
    attend,
    load_queries,
    look_up,
    read_tile,
    split_range,
    store_rows,
)
from tournant.kernels.triton.plan import Work


@triton.jit
def seen_by_all(low, high, first, last, window: tl.constexpr, block_n: tl.constexpr):
    """The tiles within low to high that rows at positions first to last all see in full: token range."""
    full_high = tl.minimum(tl.maximum((first + 1) // block_n * block_n, low), high)
    if window > 0:
        full_low = tl.maximum(tl.cdiv(last - window + 1, block_n) * block_n, low)
        full_low = tl.minimum(full_low, high)
        return full_low, tl.maximum(full_low, full_high)
    else:
        return low, full_high


@triton.jit(do_not_specialize=["layer", "table_stride"])
def paged_prefill_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    kv_ptr,
    scales_ptr,
    tables_ptr,
    tiles_ptr,
    layer,
    out_stride,
    q_stride,
    block_stride,
    layer_stride,
    value_stride,
    scale_stride,
    table_stride,
    cap_scale,
    log2_scale,
    window: tl.constexpr,
    softcap: tl.constexpr,
    form: tl.constexpr,
    split: tl.constexpr,
    group: tl.constexpr,
    head_size: tl.constexpr,
    block_tokens: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """One program: a tile of rows, a KV head, a split of the KV."""
    seq, row, num_rows, first = read_tile(tiles_ptr)
    if num_rows == 0:
        return
    q, query = load_queries(q_ptr, q_stride, row, num_rows, form, group, head_size, block_m)
    positions, last = first + query, first + num_rows - 1
    begin = tl.maximum(first - window + 1, 0) // block_n * block_n if window > 0 else 0
    low, high = split_range(begin, last + 1, block_n)
    full_low, full_high = seen_by_all(low, high, first, last, window, block_n)
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    kv_heads = tl.num_programs(1)
    kv_ptr += layer.to(tl.int64) * layer_stride + tl.program_id(1) * (block_tokens * head_size)
    scales_ptr = scales_ptr + layer * 2 * kv_heads + tl.program_id(1) if form == "e4m3" else scales_ptr
    acc = tl.zeros([block_m, q.shape[1]], tl.float32)
    peak, total = tl.full([block_m], NEVER, tl.float32), tl.zeros([block_m], tl.float32)
    block = look_up(table_ptr, low, last, block_tokens, block_n)
    if window > 0:
        for start in range(low, full_low, block_n):
            following = look_up(table_ptr, start + block_n, last, block_tokens, block_n)
            acc, peak, total = attend(
                acc, peak, total, q, positions, kv_ptr, scales_ptr, block, start, last, value_stride, block_stride,
                kv_heads, scale_stride, cap_scale, log2_scale, True, window, softcap, form, head_size, block_tokens,
                block_n,
            )  # fmt: skip
            block = following
    for start in range(full_low, full_high, block_n):
        following = look_up(table_ptr, start + block_n, last, block_tokens, block_n)
        acc, peak, total = attend(
            acc, peak, total, q, positions, kv_ptr, scales_ptr, block, start, last, value_stride, block_stride,
            kv_heads, scale_stride, cap_scale, log2_scale, False, window, softcap, form, head_size, block_tokens,
            block_n,
        )  # fmt: skip
        block = following
    for start in range(full_high, high, block_n):
        following = look_up(table_ptr, start + block_n, last, block_tokens, block_n)
        acc, peak, total = attend(
            acc, peak, total, q, positions, kv_ptr, scales_ptr, block, start, last, value_stride, block_stride,
            kv_heads, scale_stride, cap_scale, log2_scale, True, window, softcap, form, head_size, block_tokens,
            block_n,
        )  # fmt: skip
        block = following
    store_rows(acc, peak, total, out_ptr, lse_ptr, out_stride, row, num_rows, split, group, head_size, block_m)


def paged_prefill(
    out: torch.Tensor,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    work: Work,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    lse: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Attention of the rows in `work.tiles` into out; other rows are left alone. The grid is (tiles, KV heads, splits);
    a tile with 0 rows is skipped, so that a captured graph may hold room for more tiles than a step has.
    """
    launch_attention(
        paged_prefill_kernel, out, q, kv_cache, layer, block_tables, work, scale, window, softcap, lse, kv_scales
    )
