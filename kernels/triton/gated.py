"""Gated activations: act(gate) * up in one pass over gate_up [N, 2I] = gate | up, rows may be strided.

out [N, I], dense, is allocated by the wrapper. Arithmetic is float32, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # 8 elements a thread: one 16-byte load each of gate and up
SQRT_2_OVER_PI: tl.constexpr = tl.constexpr(0.7978845608028654)


@triton.jit
def gated_kernel(out_ptr, x_ptr, size, x_stride, gelu: tl.constexpr, block: tl.constexpr):
    """One program: a row, a chunk of its columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    mask = columns < size
    gate = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + size + columns, mask=mask, other=0.0).to(tl.float32)
    if gelu:
        inner = 2.0 * SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)  # (1 + tanh(y)) / 2 = 1 / (1 + e^-2y)
    else:
        inner = gate
    active = gate / (1.0 + tl.exp(-inner))
    tl.store(out_ptr + row * size + columns, (active * up).to(out_ptr.dtype.element_ty), mask=mask)


def _launch(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    gated_kernel[(rows, triton.cdiv(size, BLOCK))](
        out, gate_up, size, gate_up.stride(0), gelu, BLOCK, num_warps=4, enable_fp_fusion=True
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return _launch(gate_up, gelu=False)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the tanh approximation of gelu."""
    return _launch(gate_up, gelu=True)
