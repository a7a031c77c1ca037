"""Rotary position embedding of rows of heads.

x [N, heads, head_size], heads dense, rows may be strided; cos_sin float32 [max_pos, rotary_dim] = cos half | sin half;
pairs (i, i + rotary_dim / 2) are rotated, the rest of a head is kept; positions int64 or int32 [N], a row outside
[0, max_pos) is left alone; out: as x, may be x itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rotated(x_ptr, places, cos_sin_ptr, position, mask, half: tl.constexpr):
    """Both rotated halves [heads, padded half], float32, of the heads that begin at `places` [heads]."""
    dims = tl.arange(0, triton.next_power_of_2(half))
    inside = mask[:, None] & (dims < half)[None, :]
    cos = tl.load(cos_sin_ptr + position * 2 * half + dims, mask=dims < half, other=1.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * 2 * half + half + dims, mask=dims < half, other=0.0)[None, :]
    low = tl.load(x_ptr + places[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + places[:, None] + half + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def store_halves(out_ptr, places, low, high, mask, half: tl.constexpr):
    """Write both halves to the heads that begin at `places` [heads]."""
    dims = tl.arange(0, triton.next_power_of_2(half))
    inside = mask[:, None] & (dims < half)[None, :]
    out_places = out_ptr + places[:, None] + dims[None, :]
    tl.store(out_places, low.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_places + half, high.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def copy_rest(out_ptr, out_places, x_ptr, places, mask, start: tl.constexpr, size: tl.constexpr):
    """Copy elements start to size of the heads that begin at `places` to those at `out_places`."""
    if start < size:
        dims = start + tl.arange(0, triton.next_power_of_2(size - start))
        inside = mask[:, None] & (dims < size)[None, :]
        rest = tl.load(x_ptr + places[:, None] + dims[None, :], mask=inside, other=0.0)
        tl.store(out_ptr + out_places[:, None] + dims[None, :], rest, mask=inside)


@triton.jit(do_not_specialize=["num_positions"])
def rope_kernel(
    out_ptr,
    x_ptr,
    cos_sin_ptr,
    positions_ptr,
    num_positions,
    out_stride,
    x_stride,
    heads: tl.constexpr,
    head_size: tl.constexpr,
    half: tl.constexpr,
    block_heads: tl.constexpr,
):
    """One program: a row, a few heads."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row).to(tl.int64)
    if (position < 0) | (position >= num_positions):
        return
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    mask = head < heads
    places, out_places = row * x_stride + head * head_size, row * out_stride + head * head_size
    low, high = rotated(x_ptr, places, cos_sin_ptr, position, mask, half)
    store_halves(out_ptr, out_places, low, high, mask, half)
    copy_rest(out_ptr, out_places, x_ptr, places, mask, 2 * half, head_size)


def heads_per_program(head_size: int, num_heads: int) -> int:
    """About 1024 elements: 8 a thread of 4 warps, one 16-byte access each."""
    fitting: int = min(max(1, 1024 // triton.next_power_of_2(head_size)), triton.next_power_of_2(num_heads))
    return fitting


def rope(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """Rotate the rows of x into out."""
    rows, heads, size = x.shape
    half = cos_sin.shape[1] // 2
    if not half:
        out.copy_(x)
        return
    block_heads = heads_per_program(size, heads)
    rope_kernel[(rows, triton.cdiv(heads, block_heads))](
        out,
        x,
        cos_sin,
        positions,
        len(cos_sin),
        out.stride(0),
        x.stride(0),
        heads,
        size,
        half,
        block_heads,
        num_warps=4,
        enable_fp_fusion=True,
    )
