"""What a step of a decoder costs at least: bytes that must be read and operations that must be done.

Formulas: a decode step takes at least max((W + k * sum of contexts) / bandwidth, 2 * P * batch / rate); prefill of n
tokens does 2 * P' * n + 2 * L * d * n^2 operations (causal), with P' without embedding and head.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tournant.workers.models.families import read_decoder_config

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Of one decoder in bfloat16: weights of the layers and of the head in elements, KV bytes per token, L * d."""

    layer_weights: int
    head_weights: int
    kv_token_bytes: int
    attention_width: int

    @classmethod
    def of(cls, folder: Path) -> ModelCosts:
        """Costs of the model in a folder."""
        model = read_decoder_config(folder)
        heads, kv_heads, size, hidden = model.num_heads, model.num_kv_heads, model.head_size, model.hidden_size
        layer = hidden * (2 * heads + 2 * kv_heads) * size + 3 * hidden * model.intermediate_size
        return cls(
            layer_weights=model.num_layers * layer,
            head_weights=model.vocab_size * hidden,
            kv_token_bytes=model.num_layers * 2 * kv_heads * size * BF16_BYTES,
            attention_width=model.num_layers * heads * size,
        )

    def decode_s(self, batch: int, context: float, bytes_per_s: float, flops_per_s: float) -> float:
        """Seconds one step of `batch` sequences of `context` tokens takes at least."""
        weights = self.layer_weights + self.head_weights
        num_bytes = BF16_BYTES * weights + self.kv_token_bytes * batch * context
        return max(num_bytes / bytes_per_s, 2 * weights * batch / flops_per_s)

    def prefill_s(self, batch: int, tokens: int, bytes_per_s: float, flops_per_s: float) -> float:
        """Seconds the prompts of `batch` sequences of `tokens` tokens and their first new token take at least."""
        flops = 2 * self.layer_weights * tokens + 2 * self.attention_width * tokens**2 + 2 * self.head_weights
        weights = BF16_BYTES * (self.layer_weights + self.head_weights)
        return max(weights / bytes_per_s, batch * flops / flops_per_s)

    def generate_s(self, batch: int, prompt: int, new: int, bytes_per_s: float, flops_per_s: float) -> float:
        """Seconds a whole job takes at least: prefill, then new - 1 decode steps."""
        step = self.decode_s(batch, prompt + new / 2, bytes_per_s, flops_per_s)
        return self.prefill_s(batch, prompt, bytes_per_s, flops_per_s) + (new - 1) * step
