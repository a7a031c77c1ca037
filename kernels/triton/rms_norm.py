"""Root-mean-square norm of rows, with the residual sum before it fused in.

x [N, H] or [N, heads, H] (the norm of each head), last axis dense, rows may be strided, heads are dense; weight [H] in
x's dtype, or in float32, which is multiplied before the only rounding; residual: as x but fully dense; out: dense,
allocated by the wrapper. One program per row of H elements, which it holds in registers: the row is read once.
Arithmetic is float32; the sum with the residual is rounded to the dtype first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["eps"])
def rms_norm_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    residual_ptr,
    eps,
    x_stride,
    heads: tl.constexpr,
    size: tl.constexpr,
):
    """One program: a row."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, triton.next_power_of_2(size))
    mask = dims < size
    x = tl.load(x_ptr + row // heads * x_stride + row % heads * size + dims, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * size + dims, mask=mask, other=0.0)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * size + dims, x, mask=mask)
    wide = x.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0)
    if weight.dtype == x.dtype:
        scaled = scaled.to(x.dtype).to(tl.float32)
    scaled *= weight.to(tl.float32)
    tl.store(out_ptr + row * size + dims, scaled.to(x.dtype), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Normalise, round to the dtype, multiply by weight: a new dense tensor; residual += x happens first, in place."""
    size, heads = x.shape[-1], x.shape[1] if x.ndim == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    warps = min(max(triton.next_power_of_2(size) // 512, 1), 16)  # 16 elements a thread: two 16-byte loads
    rms_norm_kernel[(len(x) * heads,)](
        out, x, weight, residual, eps, x.stride(0), heads, size, num_warps=warps, enable_fp_fusion=True
    )
    return out
