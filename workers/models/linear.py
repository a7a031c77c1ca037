"""Products with weight matrices, in whatever layout this CPU multiplies fastest.

Owns the one use of torch's oneDNN operations with prepacked weights (private to torch, used by its compiler): the plain
call reorders a 16-bit weight every time it is multiplied. Without them, or where bits must not depend on the number of
rows, the plain call serves. Matrices that are multiplied as a GGUF file quantised them go through kernels of our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch

from tournant.kernels import ops
from tournant.kernels.quantized import QuantizedMatrix, pack
from tournant.workers.weights import FilePlace

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
    """x[N, I] -> x times the transpose of weight[O, I], plus bias[O]: a new [N, O]. packed: see `can_pack`; places:
    in files, which one after another hold the weight's bytes, None where there are none.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        packed: bool,
        places: Sequence[FilePlace] | None = None,
    ) -> None:
        self._packed = packed
        self.places = places
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS) if packed else weight
        self._bias = bias

    @property
    def matrices(self) -> list[torch.Tensor]:
        """The weight, as it is multiplied."""
        return [self._weight]

    @property
    def bias_bytes(self) -> int:
        """Bytes of everything else."""
        return 0 if self._bias is None else self._bias.nbytes

    def with_matrices(self, matrices: Sequence[torch.Tensor]) -> Linear:
        """The same product with this weight, on its own device until `to`. Raises ValueError when it is packed."""
        if self._packed:
            raise ValueError("a packed weight cannot be put elsewhere")
        (weight,) = matrices
        return Linear(weight, self._bias, packed=False)

    def to(self, device: torch.device) -> Linear:
        """The same weights on a device; packed ones stay on the CPU. Weights that are there already are shared."""
        if device.type != "cpu":
            self._weight = self._weight.to(device)
            self._bias = None if self._bias is None else self._bias.to(device)
        return self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product; x needs dense rows."""
        if self._packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return product
        return torch.nn.functional.linear(x, self._weight, self._bias)


class QuantizedLinear:
    """As `Linear`, of matrices whose outputs lie side by side, multiplied as they are quantised, on the CPU.

    parts: (type, rows) of each matrix, see `Checkpoint.take_quantized`; bias [all outputs]; out_dtype: of the product,
    None = that of x. A row's bits do not depend on how many there are.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, torch.Tensor]],
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self._matrices: list[QuantizedMatrix] = []
        self._outputs = 0
        self._out_dtype = out_dtype
        for kind, group in groupby(parts, key=lambda part: part[0]):
            rows = torch.cat([part[1] for part in group])
            end = self._outputs + len(rows)
            self._matrices.append(pack(kind, rows, None if bias is None else bias[self._outputs : end]))
            self._outputs = end

    @property
    def matrix(self) -> QuantizedMatrix | None:
        """All of it, where it is one matrix."""
        return self._matrices[0] if len(self._matrices) == 1 else None

    @property
    def matrices(self) -> list[torch.Tensor]:
        """Tiles of each matrix, as they are multiplied."""
        return [matrix.tiles for matrix in self._matrices]

    @property
    def bias_bytes(self) -> int:
        """Bytes of everything else."""
        return sum(matrix.bias.nbytes for matrix in self._matrices if matrix.bias is not None)

    def with_matrices(self, matrices: Sequence[torch.Tensor]) -> QuantizedLinear:
        """The same product with these tiles."""
        other = QuantizedLinear([], out_dtype=self._out_dtype)
        other._outputs = self._outputs
        other._matrices = [
            replace(matrix, tiles=tiles, native=None) for matrix, tiles in zip(self._matrices, matrices, strict=True)
        ]
        return other

    def to(self, device: torch.device) -> QuantizedLinear:
        """Itself: it computes on the CPU alone. Raises ValueError for another device."""
        if device.type != "cpu":
            raise ValueError(f"quantised matrices are multiplied on the CPU; the device is {device}")
        return self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product; x needs dense rows."""
        product = torch.empty((len(x), self._outputs), dtype=self._out_dtype or x.dtype)
        start = 0
        for matrix in self._matrices:
            out = product if len(self._matrices) == 1 else product[:, start : start + matrix.outputs]
            ops.quantized_linear(out, x, matrix)
            start += matrix.outputs
        return product
