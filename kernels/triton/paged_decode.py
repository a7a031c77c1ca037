"""Attention of few query rows over long KV, as decoding needs it: bound by the bytes of KV, which are read once.

All query heads of a KV head form one tile, so each KV byte is loaded once per sequence; a sequence's KV is split over
programs so that the whole card reads, and merge_splits combines the parts. There is one loop, masked throughout: the
mask costs a few instructions per 16 KiB loaded, while a separate last tile would cost a round trip to memory.

Shapes, for this and for paged_prefill: out and q [N, heads, head_size], heads dense, rows may be strided; kv_cache
[blocks, layers, 2, kv_heads, block_tokens, head_size] of kernels/layout.py in q's dtype, torch.float8_e5m2 or
torch.float8_e4m3fn; kv_scales float32 [blocks, layers, 2, kv_heads], dense, what codes of e4m3 are multiplied by, else
None; block_tables int32 [S, max_blocks]; lse float32 [N, heads], dense, receives the natural log-sum-exp of each row's
scaled scores, or None; window: how many positions a row sees, itself included, 0 for all; softcap: scores become
softcap * tanh(score / softcap), 0 for none. With fp8 KV the products are computed in float16, where fp8 is exact (in
float32 for a float32 q). The caller allocates everything; a padding row (position -1) gets zeros and an lse of -inf.
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


@triton.jit(do_not_specialize=["layer", "table_stride"])
def paged_decode_kernel(
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
    positions = first + query
    end = first + num_rows
    begin = tl.maximum(first - window + 1, 0) // block_n * block_n if window > 0 else 0
    low, high = split_range(begin, end, block_n)
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    kv_heads = tl.num_programs(1)
    kv_ptr += layer.to(tl.int64) * layer_stride + tl.program_id(1) * (block_tokens * head_size)
    scales_ptr = scales_ptr + layer * 2 * kv_heads + tl.program_id(1) if form == "e4m3" else scales_ptr
    acc = tl.zeros([block_m, q.shape[1]], tl.float32)
    peak, total = tl.full([block_m], NEVER, tl.float32), tl.zeros([block_m], tl.float32)
    block = look_up(table_ptr, low, end - 1, block_tokens, block_n)
    for start in range(low, high, block_n):
        following = look_up(table_ptr, start + block_n, end - 1, block_tokens, block_n)
        acc, peak, total = attend(
            acc, peak, total, q, positions, kv_ptr, scales_ptr, block, start, end - 1, value_stride, block_stride,
            kv_heads, scale_stride, cap_scale, log2_scale, True, window, softcap, form, head_size, block_tokens,
            block_n,
        )  # fmt: skip
        block = following
    store_rows(acc, peak, total, out_ptr, lse_ptr, out_stride, row, num_rows, split, group, head_size, block_m)


def paged_decode(
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
    """Attention of the rows in `work.tiles` into out; other rows are left alone. The grid is (tiles, KV heads, splits):
    it depends on `work`'s shapes, not on its contents.
    """
    launch_attention(
        paged_decode_kernel, out, q, kv_cache, layer, block_tables, work, scale, window, softcap, lse, kv_scales
    )
