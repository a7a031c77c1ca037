"""Dense attention problems with gradients, and what a materialised float64 attention makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tournant.kernels.flash_attention import flash_attention

NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Dense:
    """One call. Lengths are chosen so that tiles of the twin and of the kernels are filled, cut and skipped."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    size: int
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    scale: float | None = None

    def inputs(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """q, k, v as a model has them: slices of rows of one projection, seen head by head; random out-gradient."""
        fused = torch.randn(self.batch, self.keys, self.heads + 2 * self.kv_heads, self.size, dtype=torch.float64)
        q, k, v = fused.to(dtype).split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        tensors = [q[:, self.keys - self.queries :] if self.queries <= self.keys else q, k, v]
        if self.queries > self.keys:
            tensors[0] = torch.randn(self.batch, self.queries, self.heads, self.size, dtype=torch.float64).to(dtype)
        dout = torch.randn(self.batch, self.queries, self.heads, self.size, dtype=torch.float64).to(dtype)
        return [x.transpose(1, 2).detach().requires_grad_(x is not dout) for x in (*tensors, dout)]

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
        """out, dq, dk, dv through the tiles."""
        options: dict[str, Any] = {"causal": self.causal, "window": self.window, "softcap": self.softcap}
        out = flash_attention(q, k, v, scale=self.scale, **options)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    def expected(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The same from whole matrices, in float64, by torch's own differentiation."""
        q, k, v, dout = (x.detach().double().requires_grad_() for x in tensors)
        out = self.materialised(q, k, v)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    def materialised(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = self.heads // self.kv_heads
        own_k, own_v = (x.repeat_interleave(group, 1) for x in (k, v))
        s = q @ own_k.mT * (self.size**-0.5 if self.scale is None else self.scale)
        s = self.softcap * torch.tanh(s / self.softcap) if self.softcap else s
        positions = torch.arange(self.keys - self.queries, self.keys)[:, None]
        places = torch.arange(self.keys)
        hidden = (places > positions) & self.causal
        hidden |= (places <= positions - self.window) & bool(self.window)
        return s.masked_fill(hidden, float("-inf")).softmax(-1) @ own_v


def differences(case: Dense, dtype: torch.dtype) -> dict[str, float]:
    """The largest difference of each result from the expected one, and of any NaN, infinity."""
    tensors = case.inputs(dtype)
    pairs = zip(NAMES, case.run(*tensors), case.expected(*tensors), strict=True)
    return {name: float((got.double() - wanted).abs().nan_to_num(torch.inf).max()) for name, got, wanted in pairs}


def wrong(cases: Sequence[Dense], dtype: torch.dtype, tolerance: float) -> list[tuple[Dense, dict[str, float]]]:
    """The cases with a result that is further off than `tolerance`."""
    found = [(case, differences(case, dtype)) for case in cases]
    return [(case, off) for case, off in found if max(off.values()) > tolerance]
