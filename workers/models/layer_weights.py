"""The weights of one decoder layer, and how its matrices lie one after another in memory.

Owns which tensors a layer has, which of them are large (the matrices), and the form of their image. Where layers and
images are kept is another's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from tournant.kernels.quantized import ALIGNMENT
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.errors import InvariantViolation
from tournant.workers.models.linear import Linear, QuantizedLinear
from tournant.workers.models.split_layers import SummedLinear
from tournant.workers.weights import FilePlace

PRODUCTS = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """qkv: hidden to (heads + 2 kv_heads) * head_size, o: heads * head_size to hidden, gate_up: hidden to 2 * inter,
    down: inter to hidden; norms [hidden], q_norm and k_norm [head_size].

    attention_out_norm and mlp_out_norm normalise what is added to the residual (Gemma), None elsewhere.
    """

    qkv: Linear | QuantizedLinear
    o: Linear | QuantizedLinear | SummedLinear
    gate_up: Linear | QuantizedLinear
    down: Linear | QuantizedLinear | SummedLinear
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    attention_out_norm: torch.Tensor | None = None
    mlp_out_norm: torch.Tensor | None = None

    def to(self, device: torch.device) -> LayerWeights:
        """The same weights on a device."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            part = getattr(self, field.name)
            moved[field.name] = None if part is None else part.to(device)
        return LayerWeights(**moved)

    @property
    def _products(self) -> list[Linear | QuantizedLinear]:
        found: list[Linear | QuantizedLinear] = []
        for name in PRODUCTS:
            product = getattr(self, name)
            if isinstance(product, SummedLinear):
                raise InvariantViolation("a layer that was joined to other ranks is asked for its matrices")
            found.append(product)
        return found

    @property
    def matrices(self) -> list[torch.Tensor]:
        """What takes nearly all of its memory, in the order of its image. Not of layers joined to other ranks."""
        return [matrix for product in self._products for matrix in product.matrices]

    @property
    def places(self) -> list[list[FilePlace]] | None:
        """Of each matrix the places in files which, one after another, hold its bytes; None when one has none."""
        found: list[list[FilePlace]] = []
        for product in self._products:
            if not isinstance(product, Linear) or product.places is None:
                return None
            found.append(list(product.places))
        return found

    @property
    def small_bytes(self) -> int:
        """Bytes of norms and biases."""
        norms = [part for field in fields(self) if isinstance(part := getattr(self, field.name), torch.Tensor)]
        return sum(tensor.nbytes for tensor in norms) + sum(product.bias_bytes for product in self._products)

    def with_matrices(self, matrices: Sequence[torch.Tensor]) -> LayerWeights:
        """The same norms and biases, with other matrices of the same shapes, in the order of `matrices`."""
        changed: dict[str, Any] = {}
        start = 0
        for name, product in zip(PRODUCTS, self._products, strict=True):
            count = len(product.matrices)
            changed[name] = product.with_matrices(matrices[start : start + count])
            start += count
        return replace(self, **changed)


@dataclass(frozen=True, slots=True)
class ImageForm:
    """How the matrices of a layer lie in its image: (first byte, shape, dtype) of each; num_bytes: whole pages."""

    parts: tuple[tuple[int, tuple[int, ...], torch.dtype], ...]
    num_bytes: int

    @classmethod
    def of(cls, matrices: Sequence[torch.Tensor]) -> ImageForm:
        """The form for matrices like these."""
        parts, end = [], 0
        for matrix in matrices:
            parts.append((end, tuple(matrix.shape), matrix.dtype))
            end += -(-matrix.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(parts), -(-end // PAGE_BYTES) * PAGE_BYTES)

    def views(self, image: torch.Tensor) -> list[torch.Tensor]:
        """The matrices in an image, uint8 [num_bytes or more] that begins at a multiple of ALIGNMENT."""
        found = []
        for start, shape, dtype in self.parts:
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            found.append(image[start : start + num_bytes].view(dtype).view(shape))
        return found
