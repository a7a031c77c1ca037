"""The decoder: embeddings, layers, head. One definition for all families, told its shapes and switches.

Owns weights and the order of operations; KV bytes, block tables and sampling live elsewhere. Rows are tokens of all
sequences of a step, one after another; nothing here knows which row belongs to whom.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.workers.forward_input import ForwardInput
from tournant.workers.models.decoder_config import DecoderConfig
from tournant.workers.models.linear import Linear
from tournant.workers.weights import Checkpoint

REVISION = "decoder-3"  # part of the numerics tag of keys: changes when the arithmetic of a layer does


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """qkv: hidden to (heads + 2 kv_heads) * head_size, o: heads * head_size to hidden, gate_up: hidden to 2 * inter,
    down: inter to hidden; norms [hidden], q_norm and k_norm [head_size].

    attention_out_norm and mlp_out_norm normalise what is added to the residual (Gemma), None elsewhere.
    """

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    attention_out_norm: torch.Tensor | None = None
    mlp_out_norm: torch.Tensor | None = None


class Decoder:
    """A model on one device in one dtype. `forward` then `logits`; both are pure but for the KV they store.

    packed: weights in the layout that is multiplied fastest; a row's bits then depend on how many there are.
    """

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint, dtype: torch.dtype, *, packed: bool) -> None:
        self.config = config
        self.dtype = dtype
        self._ropes = [rope.table(config.max_model_len) for rope in config.ropes]
        self._activation = {"silu": ops.silu_mul, "gelu_tanh": ops.gelu_mul}[config.activation]
        vocab_shape = (config.vocab_size, config.hidden_size)
        self._embedding = checkpoint.take("model.embed_tokens.weight", vocab_shape, dtype)
        loader = _LayerLoader(config, checkpoint, dtype, packed)
        self._layers = [loader.load(index) for index in range(config.num_layers)]
        self._norm = loader.norm("model.norm.weight", config.hidden_size)
        head = self._embedding if config.tied_embeddings else checkpoint.take("lm_head.weight", vocab_shape, dtype)
        self._head = Linear(head, None, packed=packed)

    def layout(self, block_tokens: int, *, long: bool = False) -> KVLayout:
        """How this model's KV lies in blocks of `block_tokens` tokens, of short or of long sequences."""
        config = self.config
        digest = config.rope_digest(long=long)
        return KVLayout(config.num_layers, config.num_kv_heads, block_tokens, config.head_size, self.dtype, digest)

    def forward(self, step: ForwardInput, kv_cache: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_rows, hidden] after the last norm; stores the KV of every row that has a slot."""
        residual = embedding(step.input_ids, self._embedding)
        if self.config.embedding_scale != 1.0:
            residual.mul_(torch.tensor(self.config.embedding_scale, dtype=self.dtype))
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
        eps, weights = self.config.rms_eps, self._layers[index]
        hidden = self._attention(index, hidden, step, kv_cache, cache_layer)
        if weights.attention_out_norm is not None:
            hidden = ops.rms_norm(hidden, weights.attention_out_norm, eps)
        hidden = ops.rms_norm(hidden, weights.mlp_norm, eps, residual)
        gated = self._activation(weights.gate_up(hidden))
        hidden = weights.down(gated)
        if weights.mlp_out_norm is not None:
            hidden = ops.rms_norm(hidden, weights.mlp_out_norm, eps)
        next_norm = self._layers[index + 1].input_norm if index + 1 < len(self._layers) else self._norm
        return ops.rms_norm(hidden, next_norm, eps, residual)

    def _attention(
        self, index: int, hidden: torch.Tensor, step: ForwardInput, kv_cache: torch.Tensor, cache_layer: int
    ) -> torch.Tensor:
        config, weights, kind = self.config, self._layers[index], self.config.layers[index]
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        qkv = weights.qkv(hidden).view(-1, heads + 2 * kv_heads, size)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q = ops.rms_norm(q.reshape(-1, size), weights.q_norm, config.rms_eps).view(-1, heads, size)
            k = ops.rms_norm(k.reshape(-1, size), weights.k_norm, config.rms_eps).view(-1, kv_heads, size)
        if kind.rope is None:
            ops.store_kv(k, v, kv_cache, cache_layer, step.slot_mapping)
        else:
            table = self._ropes[kind.rope]
            ops.rope_store_kv(q, k, v, table, step.rope_positions, kv_cache, cache_layer, step.slot_mapping)
        attended = torch.empty(q.shape, dtype=q.dtype)
        ops.paged_attention(
            attended,
            q,
            kv_cache,
            cache_layer,
            step.plan,
            config.attention_scale,
            window=kind.window,
            softcap=config.attention_softcap,
        )
        return weights.o(attended.view(-1, heads * size))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab] of hidden states [rows, hidden]."""
        logits = self._head(hidden).float()
        if self.config.logit_softcap:
            cap = self.config.logit_softcap
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits


class _LayerLoader:
    """Reads layers by their HF names, joining what the decoder multiplies at once."""

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint, dtype: torch.dtype, packed: bool) -> None:
        self._packed = packed
        self._config = config
        self._checkpoint = checkpoint
        self._dtype = dtype

    def load(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        hidden, inter, size = config.hidden_size, config.intermediate_size, config.head_size
        rows = [config.num_heads * size, config.num_kv_heads * size, config.num_kv_heads * size]
        if config.fused_projections:
            qkv = self._joined(prefix + "self_attn.", ["qkv_proj"], [sum(rows)], hidden, config.qkv_bias)
            gate_up = self._joined(prefix + "mlp.", ["gate_up_proj"], [2 * inter], hidden, config.mlp_bias)
        else:
            names = ["q_proj", "k_proj", "v_proj"]
            qkv = self._joined(prefix + "self_attn.", names, rows, hidden, config.qkv_bias)
            names = ["gate_proj", "up_proj"]
            gate_up = self._joined(prefix + "mlp.", names, [inter, inter], hidden, config.mlp_bias)
        o = self._joined(prefix + "self_attn.", ["o_proj"], [hidden], rows[0], config.o_bias)
        down = self._joined(prefix + "mlp.", ["down_proj"], [hidden], inter, config.mlp_bias)
        sandwich = config.sandwich_norms
        mlp_norm = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        return LayerWeights(
            qkv=qkv,
            o=o,
            gate_up=gate_up,
            down=down,
            input_norm=self.norm(prefix + "input_layernorm.weight", hidden),
            mlp_norm=self.norm(prefix + mlp_norm + ".weight", hidden),
            q_norm=self.norm(prefix + "self_attn.q_norm.weight", size) if config.qk_norm else None,
            k_norm=self.norm(prefix + "self_attn.k_norm.weight", size) if config.qk_norm else None,
            attention_out_norm=self.norm(prefix + "post_attention_layernorm.weight", hidden) if sandwich else None,
            mlp_out_norm=self.norm(prefix + "post_feedforward_layernorm.weight", hidden) if sandwich else None,
        )

    def norm(self, name: str, size: int) -> torch.Tensor:
        """A norm's factor. In float32 (and 1 + weight) where the family multiplies before it rounds."""
        if self._config.offset_norms:
            return self._checkpoint.take(name, (size,), torch.float32) + 1.0
        return self._checkpoint.take(name, (size,), self._dtype)

    def _joined(self, prefix: str, names: list[str], rows: list[int], columns: int, biased: bool) -> Linear:
        take, dtype = self._checkpoint.take, self._dtype
        parts = [take(f"{prefix}{name}.weight", (n, columns), dtype) for name, n in zip(names, rows, strict=True)]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        bias = None
        if biased:
            bias = torch.cat([take(f"{prefix}{name}.bias", (n,), dtype) for name, n in zip(names, rows, strict=True)])
        return Linear(weight, bias, packed=self._packed)
