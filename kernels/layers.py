"""Decoder layers whose matrices are quantised, to be run in one call of the C back end.

Owns what such layers are made of and the check that they fit together. What a layer does, operation by operation, is
the model's to say: `ops.decoder_layers` gives the same bits as the single operations do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tournant.kernels.quantized import QuantizedMatrix


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer: hidden -> q | k | v -> attention -> o, added; norm; gate | up -> activation -> down, added; norm.

    mlp_norm, next_norm [hidden]: in the dtype of the activations, or float32 (see `ops.rms_norm`); next_norm: of the
    layer after it, or the last norm. cos_sin: as `ops.rope_store_kv` has it, None where nothing is rotated; window: as
    `ops.paged_attention` has it.
    """

    qkv: QuantizedMatrix
    o: QuantizedMatrix
    gate_up: QuantizedMatrix
    down: QuantizedMatrix
    mlp_norm: torch.Tensor
    next_norm: torch.Tensor
    cos_sin: torch.Tensor | None
    window: int


@dataclass(slots=True)
class FusedLayers:
    """Layers 0 to n - 1 of a model and what they share. gelu: gelu_mul instead of silu_mul.

    `native` is what the C back end keeps with it. Raises ValueError when shapes or dtypes do not fit together.
    """

    parts: Sequence[LayerParts]
    num_heads: int
    num_kv_heads: int
    head_size: int
    eps: float
    scale: float
    softcap: float
    gelu: bool
    dtype: torch.dtype
    native: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        hidden, inner = self.hidden_size, self.inner_size
        heads, all_heads = self.num_heads * self.head_size, self.qkv_heads * self.head_size
        wanted = {
            "qkv": (all_heads, hidden),
            "o": (hidden, heads),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        for index, part in enumerate(self.parts):
            for name, shape in wanted.items():
                matrix: QuantizedMatrix = getattr(part, name)
                if (matrix.outputs, matrix.columns) != shape:
                    found = (matrix.outputs, matrix.columns)
                    raise ValueError(f"{name} of layer {index} has the shape {found}; it must be {shape}")
            for norm in (part.mlp_norm, part.next_norm):
                if norm.shape != (hidden,) or norm.dtype not in (self.dtype, torch.float32) or not norm.is_contiguous():
                    raise ValueError(f"a norm of layer {index} is {norm.dtype} {tuple(norm.shape)}, not [{hidden}]")
            table = part.cos_sin
            if table is not None and (
                table.ndim != 2
                or table.dtype != torch.float32
                or not table.is_contiguous()
                or table.shape[1] > self.head_size
                or table.shape[1] % 2
            ):
                raise ValueError(f"the RoPE table of layer {index} is {table.dtype} {tuple(table.shape)}")

    @property
    def hidden_size(self) -> int:
        """Columns of the hidden states."""
        return self.parts[0].qkv.columns

    @property
    def inner_size(self) -> int:
        """Columns between gate_up and down."""
        return self.parts[0].down.columns

    @property
    def qkv_heads(self) -> int:
        """Heads of q, k and v together."""
        return self.num_heads + 2 * self.num_kv_heads
