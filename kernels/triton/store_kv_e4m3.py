"""Write new keys and values to a pool of e4m3 codes, keeping one scale per block, layer, K or V, and head.

k, v, slot_mapping as in store_kv; kv_cache torch.float8_e4m3fn of kernels/layout.py; kv_scales float32 [blocks, layers,
2, kv_heads], dense: value = code * scale. Both are the caller's; a scale is valid once a token was stored at the
block's first slot.

A scale is the least power of two at which the block's largest value so far fits. It begins anew with the block's first
token and grows with later ones; the tokens that are already there are then recoded, which a power of two does without
loss but for values that become subnormal. Rows of one block must lie within block_tokens rows of each other, as rows
of one sequence do. One program serves one head of one block: that of the first of its rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tournant.kernels.triton.fp8 import E4M3_FACTOR, decode, encode

ROWS = 16


@triton.jit
def _power_of_two(largest):
    """The least power of two s with largest <= 448 s; 448 = 1.75 * 2^8. At least 2^-60."""
    exponent = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    return (tl.maximum(exponent, 67) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _recode(codes_ptr, stop, factor, head_size: tl.constexpr, rows: tl.constexpr):
    """Multiply the values of tokens 0 to stop by factor."""
    dims = tl.arange(0, triton.next_power_of_2(head_size))
    for start in range(0, stop, rows):
        token = start + tl.arange(0, rows)
        mask = (token < stop)[:, None] & (dims < head_size)[None, :]
        places = codes_ptr + (token * head_size)[:, None] + dims[None, :]
        values = decode(tl.load(places, mask=mask, other=0), "e4m3").to(tl.float32) * (factor * E4M3_FACTOR)
        tl.store(places, encode(values, "e4m3"), mask=mask)


@triton.jit
def _store_side(x_ptr, x_stride, codes_ptr, scale_ptr, slots_ptr, row, num_rows, block, block_tokens: tl.constexpr,
                head_size: tl.constexpr, rows: tl.constexpr):  # fmt: skip
    """K or V of one head of one block: rows of x from `row` on that belong to the block."""
    dims = tl.arange(0, triton.next_power_of_2(head_size))
    largest, first = 0.0, block_tokens
    for start in range(0, block_tokens, rows):
        at = row + start + tl.arange(0, rows)
        slot = tl.load(slots_ptr + at, mask=at < num_rows, other=-1)
        ours = (slot >= 0) & (slot // block_tokens == block)
        mask = ours[:, None] & (dims < head_size)[None, :]
        x = tl.load(x_ptr + (at * x_stride)[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x)))
        first = tl.minimum(first, tl.min(tl.where(ours, (slot % block_tokens).to(tl.int32), block_tokens)))
    scale = _power_of_two(largest)
    if first > 0:
        before = tl.load(scale_ptr)
        scale = tl.maximum(scale, before)
        if scale > before:
            _recode(codes_ptr, first, before / scale, head_size, rows)
    tl.debug_barrier()  # no thread overwrites the scale before every thread has read it
    tl.store(scale_ptr, scale)
    for start in range(0, block_tokens, rows):
        at = row + start + tl.arange(0, rows)
        slot = tl.load(slots_ptr + at, mask=at < num_rows, other=-1)
        ours = (slot >= 0) & (slot // block_tokens == block)
        mask = ours[:, None] & (dims < head_size)[None, :]
        x = tl.load(x_ptr + (at * x_stride)[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        places = ((slot % block_tokens) * head_size)[:, None] + dims[None, :]
        tl.store(codes_ptr + places, encode(x * (1.0 / scale), "e4m3"), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_slots", "layer"])
def store_kv_e4m3_kernel(
    k_ptr,
    v_ptr,
    kv_ptr,
    scales_ptr,
    slots_ptr,
    layer,
    num_rows,
    num_slots,
    k_stride,
    v_stride,
    block_stride,
    layer_stride,
    value_stride,
    scale_stride,
    head_size: tl.constexpr,
    block_tokens: tl.constexpr,
    rows: tl.constexpr,
):
    """One program: a row, a head, K or V; it works if the row is the first of its block."""
    row, head, kv_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots_ptr + row)
    if (slot < 0) | (slot >= num_slots):
        return
    block = slot // block_tokens
    at = row - 1 - tl.arange(0, block_tokens)
    earlier = tl.load(slots_ptr + at, mask=at >= 0, other=-1)
    if tl.max(((earlier >= 0) & (earlier // block_tokens == block)).to(tl.int32)) > 0:
        return
    kv_ptr += block * block_stride + layer.to(tl.int64) * layer_stride + head * (block_tokens * head_size)
    scales_ptr += block * scale_stride + layer * 2 * kv_heads + head
    if tl.program_id(2) == 0:
        _store_side(k_ptr + head * head_size, k_stride, kv_ptr, scales_ptr, slots_ptr, row, num_rows, block,
                    block_tokens, head_size, rows)  # fmt: skip
    else:
        _store_side(v_ptr + head * head_size, v_stride, kv_ptr + value_stride, scales_ptr + kv_heads, slots_ptr, row,
                    num_rows, block, block_tokens, head_size, rows)  # fmt: skip


def store_kv_e4m3(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
) -> None:
    """Store k and v as codes and keep the scales. Programs are (row, head, K or V); most rows leave at once."""
    num_blocks, _, _, kv_heads, block_tokens, head_size = kv_cache.shape
    block_stride, layer_stride, value_stride = kv_cache.stride()[:3]
    store_kv_e4m3_kernel[(len(k), kv_heads, 2)](
        k,
        v,
        kv_cache.view(torch.uint8),
        kv_scales,
        slot_mapping,
        layer,
        len(k),
        num_blocks * block_tokens,
        k.stride(0),
        v.stride(0),
        block_stride,
        layer_stride,
        value_stride,
        kv_scales.stride(0),
        head_size=head_size,
        block_tokens=block_tokens,
        rows=min(ROWS, block_tokens),
        num_warps=4,
        enable_fp_fusion=True,
    )
