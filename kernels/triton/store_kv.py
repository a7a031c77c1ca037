"""Write new keys and values to their token slots.

k, v [N, kv_heads, head_size], heads dense, rows may be strided; kv_cache of kernels/layout.py in the same dtype or
torch.float8_e5m2; slot_mapping int64 [N]: a slot outside the pool, -1 by custom, marks a padding row. The caller
allocates everything. e4m3 needs scales and has its own kernel (store_kv_e4m3).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tournant.kernels.triton.fp8 import as_bytes, encode, form_of
from tournant.kernels.triton.rope import heads_per_program


@triton.jit(do_not_specialize=["num_slots", "layer"])
def store_kv_kernel(
    k_ptr,
    v_ptr,
    kv_ptr,
    slots_ptr,
    layer,
    num_slots,
    k_stride,
    v_stride,
    block_stride,
    layer_stride,
    value_stride,
    heads: tl.constexpr,
    head_size: tl.constexpr,
    block_tokens: tl.constexpr,
    form: tl.constexpr,
    block_heads: tl.constexpr,
):
    """One program: a row, a few heads of k and v."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if (slot < 0) | (slot >= num_slots):
        return
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    dims = tl.arange(0, triton.next_power_of_2(head_size))
    mask = (head < heads)[:, None] & (dims < head_size)[None, :]
    places = (head * head_size)[:, None] + dims[None, :]
    k = tl.load(k_ptr + row * k_stride + places, mask=mask, other=0.0)
    v = tl.load(v_ptr + row * v_stride + places, mask=mask, other=0.0)
    if form == "e5m2":
        k, v = encode(k.to(tl.float32), form), encode(v.to(tl.float32), form)
    kv_ptr += slot // block_tokens * block_stride + layer.to(tl.int64) * layer_stride
    token = (slot % block_tokens).to(tl.int32)
    out_places = ((head * block_tokens + token) * head_size)[:, None] + dims[None, :]
    tl.store(kv_ptr + out_places, k, mask=mask)
    tl.store(kv_ptr + value_stride + out_places, v, mask=mask)


def store_kv(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor) -> None:
    """Write k and v to their slots of one layer. About 1024 elements of each a program: 16 bytes a thread."""
    num_blocks, _, _, kv_heads, block_tokens, head_size = kv_cache.shape
    block_stride, layer_stride, value_stride = kv_cache.stride()[:3]
    block_heads = heads_per_program(head_size, kv_heads)
    store_kv_kernel[(len(k), triton.cdiv(kv_heads, block_heads))](
        k,
        v,
        as_bytes(kv_cache),
        slot_mapping,
        layer,
        num_blocks * block_tokens,
        k.stride(0),
        v.stride(0),
        block_stride,
        layer_stride,
        value_stride,
        heads=kv_heads,
        head_size=head_size,
        block_tokens=block_tokens,
        form=form_of(kv_cache),
        block_heads=block_heads,
        num_warps=4,
        enable_fp_fusion=True,
    )
