"""Rotate q in place, and write rotated k and v to their token slots: one pass over the fused qkv output.

Shapes as in rope and store_kv; q [N, heads, head_size] is changed, k and v are not. A row whose slot lies outside the
pool (-1 by custom) or whose position lies outside the table is left alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tournant.kernels.triton.rope import copy_rest, heads_per_program, rotated, store_halves
from tournant.kernels.triton.store_kv import store_kv


@triton.jit(do_not_specialize=["num_slots", "num_positions", "layer"])
def rope_store_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    positions_ptr,
    kv_ptr,
    slots_ptr,
    layer,
    num_slots,
    num_positions,
    q_stride,
    k_stride,
    v_stride,
    block_stride,
    layer_stride,
    value_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    half: tl.constexpr,
    block_tokens: tl.constexpr,
    block_heads: tl.constexpr,
):
    """One program: a row, a few heads of q or of k and v."""
    row = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots_ptr + row), tl.load(positions_ptr + row).to(tl.int64)
    if (slot < 0) | (slot >= num_slots) | (position < 0) | (position >= num_positions):
        return
    q_programs: tl.constexpr = (heads + block_heads - 1) // block_heads
    lane = tl.arange(0, block_heads)
    if tl.program_id(1) < q_programs:
        head = tl.program_id(1) * block_heads + lane
        places = row * q_stride + head * head_size
        low, high = rotated(q_ptr, places, cos_sin_ptr, position, head < heads, half)
        store_halves(q_ptr, places, low, high, head < heads, half)
    else:
        head = (tl.program_id(1) - q_programs) * block_heads + lane
        valid = head < kv_heads
        kv_ptr += slot // block_tokens * block_stride + layer.to(tl.int64) * layer_stride
        targets = (head * block_tokens + (slot % block_tokens).to(tl.int32)) * head_size
        places = row * k_stride + head * head_size
        low, high = rotated(k_ptr, places, cos_sin_ptr, position, valid, half)
        store_halves(kv_ptr, targets, low, high, valid, half)
        copy_rest(kv_ptr, targets, k_ptr, places, valid, 2 * half, head_size)
        copy_rest(kv_ptr + value_stride, targets, v_ptr, row * v_stride + head * head_size, valid, 0, head_size)


def rope_store_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate q, store rotated k and v, in q's dtype. Programs are (row, group of heads of q, then of k and v)."""
    if not cos_sin.shape[1]:
        store_kv(k, v, kv_cache, layer, slot_mapping)
        return
    rows, heads, head_size = q.shape
    num_blocks, _, _, kv_heads, block_tokens, _ = kv_cache.shape
    block_stride, layer_stride, value_stride = kv_cache.stride()[:3]
    block_heads = heads_per_program(head_size, heads)
    programs = triton.cdiv(heads, block_heads) + triton.cdiv(kv_heads, block_heads)
    rope_store_kv_kernel[(rows, programs)](
        q,
        k,
        v,
        cos_sin,
        positions,
        kv_cache,
        slot_mapping,
        layer,
        num_blocks * block_tokens,
        len(cos_sin),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        block_stride,
        layer_stride,
        value_stride,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        half=cos_sin.shape[1] // 2,
        block_tokens=block_tokens,
        block_heads=block_heads,
        num_warps=4,
        enable_fp_fusion=True,
    )
