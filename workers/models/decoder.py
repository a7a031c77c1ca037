"""The decoder: embeddings, layers, head. One definition that is told its shapes and reads its weights by HF names.

Owns weights and the order of operations; KV bytes, block tables and sampling live elsewhere. Rows are tokens of all
sequences of a step, one after another; nothing here knows which row belongs to whom.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, linear

from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.workers.forward_input import ForwardInput
from tournant.workers.models.decoder_config import DecoderConfig
from tournant.workers.weights import Checkpoint

REVISION = "decoder-1"  # part of the numerics tag of keys: changes when the arithmetic of a layer does


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """qkv [(heads + 2 kv_heads) * head_size, hidden], o [hidden, heads * head_size], gate_up [2 * inter, hidden],
    down [hidden, inter], norms [hidden].
    """

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    post_norm: torch.Tensor


class Decoder:
    """A model on one device in one dtype. `forward` then `logits`; both are pure but for the KV they store."""

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint, dtype: torch.dtype, max_model_len: int) -> None:
        self.config = config
        self.dtype = dtype
        self._scale = config.head_size**-0.5
        self._rope = config.rope_table(max_model_len)
        vocab_shape = (config.vocab_size, config.hidden_size)
        self._embedding = checkpoint.take("model.embed_tokens.weight", vocab_shape, dtype)
        self._layers = [_load_layer(config, checkpoint, index, dtype) for index in range(config.num_layers)]
        self._norm = checkpoint.take("model.norm.weight", (config.hidden_size,), dtype)
        self._head = (
            self._embedding if config.tied_embeddings else checkpoint.take("lm_head.weight", vocab_shape, dtype)
        )

    def layout(self, block_tokens: int) -> KVLayout:
        """How this model's KV lies in blocks of `block_tokens` tokens."""
        config = self.config
        return KVLayout(
            config.num_layers, config.num_kv_heads, block_tokens, config.head_size, self.dtype, config.rope_digest
        )

    def forward(self, step: ForwardInput, kv_cache: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_rows, hidden] after the last norm; stores the KV of every row that has a slot."""
        residual = embedding(step.input_ids, self._embedding)
        hidden = ops.rms_norm(residual, self._layers[0].input_norm, self.config.rms_eps)
        for index in range(len(self._layers)):
            hidden = self.layer(index, hidden, residual, step, kv_cache, cache_layer=index)
        return hidden

    def layer(
        self,
        index: int,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        step: ForwardInput,
        kv_cache: torch.Tensor,
        cache_layer: int,
    ) -> torch.Tensor:
        """One layer and the norm after it: normed `hidden` in, next layer's normed input out, `residual` updated."""
        config, weights = self.config, self._layers[index]
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        qkv = linear(hidden, weights.qkv).view(-1, heads + 2 * kv_heads, size)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        ops.rope_store_kv(q, k, v, self._rope, step.positions, kv_cache, cache_layer, step.slot_mapping)
        attended = torch.empty(q.shape, dtype=q.dtype)
        ops.paged_attention(attended, q, kv_cache, cache_layer, step.plan, self._scale)
        hidden = linear(attended.view(-1, heads * size), weights.o)
        hidden = ops.rms_norm(hidden, weights.post_norm, config.rms_eps, residual)
        hidden = linear(ops.silu_mul(linear(hidden, weights.gate_up)), weights.down)
        next_norm = self._layers[index + 1].input_norm if index + 1 < len(self._layers) else self._norm
        return ops.rms_norm(hidden, next_norm, config.rms_eps, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab] of hidden states [rows, hidden]."""
        return linear(hidden, self._head).float()


def _load_layer(config: DecoderConfig, checkpoint: Checkpoint, index: int, dtype: torch.dtype) -> LayerWeights:
    hidden, inter, size = config.hidden_size, config.intermediate_size, config.head_size
    prefix = f"model.layers.{index}."

    def take(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.take(f"{prefix}{name}.weight", shape, dtype)

    kv_rows = config.num_kv_heads * size
    qkv = [
        take("self_attn.q_proj", config.num_heads * size, hidden),
        take("self_attn.k_proj", kv_rows, hidden),
        take("self_attn.v_proj", kv_rows, hidden),
    ]
    gate_up = [take("mlp.gate_proj", inter, hidden), take("mlp.up_proj", inter, hidden)]
    return LayerWeights(
        qkv=torch.cat(qkv),
        o=take("self_attn.o_proj", hidden, config.num_heads * size),
        gate_up=torch.cat(gate_up),
        down=take("mlp.down_proj", hidden, inter),
        input_norm=take("input_layernorm", hidden),
        post_norm=take("post_attention_layernorm", hidden),
    )
