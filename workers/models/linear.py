"""Products with weight matrices, in whatever layout this CPU multiplies fastest.

Owns the one use of torch's oneDNN operations with prepacked weights (private to torch, used by its compiler): the plain
call reorders a 16-bit weight every time it is multiplied. Without them, or where bits must not depend on the number of
rows, the plain call serves.
"""

from __future__ import annotations

import torch

PACKED_FOR_ROWS = 32  # the number of rows the layout is chosen for; measured best or equal from 1 to 512


def can_pack(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype can be multiplied prepacked on this machine."""
    operations = torch.ops.mkldnn
    return (
        dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(operations, "_reorder_linear_weight")
        and hasattr(operations, "_linear_pointwise")
        and bool(operations._is_mkldnn_bf16_supported())
    )


class Linear:
    """x[N, I] -> x times the transpose of weight[O, I], plus bias[O]: a new [N, O]. packed: see `can_pack`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, packed: bool) -> None:
        self._packed = packed
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS) if packed else weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product; x needs dense rows."""
        if self._packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return product
        return torch.nn.functional.linear(x, self._weight, self._bias)
