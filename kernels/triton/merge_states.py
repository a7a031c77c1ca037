"""Combine two attention results over disjoint KV by their log-sum-exps: cascades, KV in two tiers, split devices.

a, b [N, heads, head_size] of one dtype, heads dense, rows may be strided; lse_a, lse_b float32 [N, heads], dense,
natural logarithm, -inf where a side saw nothing (its row is then not used, whatever it holds). out and lse receive the
result and may be a and lse_a; both are the caller's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def merge_states_kernel(
    out_ptr,
    lse_ptr,
    a_ptr,
    lse_a_ptr,
    b_ptr,
    lse_b_ptr,
    heads,
    out_stride,
    a_stride,
    b_stride,
    head_size: tl.constexpr,
    block_heads: tl.constexpr,
):
    """One program: a row, a few heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    dims = tl.arange(0, triton.next_power_of_2(head_size))
    lse_a = tl.load(lse_a_ptr + row * heads + head, mask=head < heads, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + row * heads + head, mask=head < heads, other=float("-inf"))
    peak = tl.maximum(lse_a, lse_b)
    some = peak > float("-inf")
    base = tl.where(some, peak, 0.0)
    weight_a, weight_b = tl.exp(lse_a - base), tl.exp(lse_b - base)
    total = tl.where(some, weight_a + weight_b, 1.0)
    places = head[:, None] * head_size + dims[None, :]
    mask = (dims < head_size)[None, :] & (head < heads)[:, None]
    a = tl.load(a_ptr + row * a_stride + places, mask=mask & (weight_a > 0.0)[:, None], other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_stride + places, mask=mask & (weight_b > 0.0)[:, None], other=0.0).to(tl.float32)
    merged = a * (weight_a / total)[:, None] + b * (weight_b / total)[:, None]
    tl.store(out_ptr + row * out_stride + places, merged.to(out_ptr.dtype.element_ty), mask=mask)
    lse = tl.where(some, base + tl.log(total), float("-inf"))
    tl.store(lse_ptr + row * heads + head, lse, mask=head < heads)


def merge_states(
    out: torch.Tensor,
    lse: torch.Tensor,
    a: torch.Tensor,
    lse_a: torch.Tensor,
    b: torch.Tensor,
    lse_b: torch.Tensor,
) -> None:
    """out = (a e^lse_a + b e^lse_b) / (e^lse_a + e^lse_b), lse = log of that sum. About 1024 elements a program."""
    rows, heads, size = a.shape
    block_heads = max(1, 1024 // triton.next_power_of_2(size))
    merge_states_kernel[(rows, triton.cdiv(heads, block_heads))](
        out,
        lse,
        a,
        lse_a,
        b,
        lse_b,
        heads,
        out.stride(0),
        a.stride(0),
        b.stride(0),
        size,
        block_heads,
        num_warps=4,
        enable_fp_fusion=True,
    )
