"""The decoder: embeddings, layers, head. One definition for all families, told its shapes and switches.

Owns weights and the order of operations; KV bytes, block tables and sampling live elsewhere. Rows are tokens of all
sequences of a step, one after another; nothing here knows which row belongs to whom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import embedding

from tournant.kernels import ops
from tournant.kernels.layers import FusedLayers, LayerParts
from tournant.kernels.layout import KVLayout
from tournant.kvstore.errors import InvariantViolation
from tournant.workers.forward_input import ForwardInput
from tournant.workers.models.decoder_config import DecoderConfig
from tournant.workers.models.layer_weights import LayerWeights
from tournant.workers.models.linear import Linear, QuantizedLinear
from tournant.workers.models.split_layers import GatheredLinear, Product, Ranks, SplitEmbedding, SummedLinear
from tournant.workers.weights import Tensors
from tournant.workers.weights_offload import LayerTiers, StreamedLayers

REVISION = "decoder-4"  # part of the numerics tag of keys: changes when the arithmetic of a layer does


class Decoder:
    """A model, or some of its layers, on one device in one dtype. `forward` then `logits`; both are pure but for the KV
    they store.

    packed: weights in the layout that is multiplied fastest; a row's bits then depend on how many there are. native:
    matrices that the checkpoint has quantised are multiplied so, the others as ever. Layers go to the device one by
    one, so that the CPU's memory need not hold them all, or where `tiers`, which need plain weights, take them;
    `placed` says where that is.
    """

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: Tensors,
        dtype: torch.dtype,
        device: torch.device,
        *,
        packed: bool,
        native: bool = False,
        tiers: LayerTiers | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._ropes = [rope.table(config.max_model_len).to(device) for rope in config.ropes]
        self._activation = {"silu": ops.silu_mul, "gelu_tanh": ops.gelu_mul}[config.activation]
        self._embed: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._head: Product | None = None
        self._table: torch.Tensor | None = None
        if config.begins:
            vocab_shape = (config.vocab_size, config.hidden_size)
            self._table = checkpoint.take("model.embed_tokens.weight", vocab_shape, dtype).to(device)
            self._embed = partial(embedding, weight=self._table)
        loader = _LayerLoader(config, checkpoint, dtype, packed, native)
        first, own = config.first_layer, [*self._ropes, *([] if self._table is None else [self._table])]
        if config.ends:
            self._head = head = loader.head(self._table).to(device)
            own += head.matrices
        after = "model.norm" if config.ends else f"model.layers.{first + config.num_layers}.input_layernorm"
        norm = loader.norm(f"{after}.weight", config.hidden_size).to(device)
        layers = (loader.load(first + index) for index in range(config.num_layers))
        self._layers: list[LayerWeights] | StreamedLayers
        if tiers is None:
            self._layers = [layer.to(device) for layer in layers]
        else:
            fixed = {tensor.data_ptr(): tensor.nbytes for tensor in (*own, norm)}
            self._layers = tiers.place(layers, config.num_layers, sum(fixed.values()), first)
        placed = self._layers.peek if isinstance(self._layers, StreamedLayers) else self._layers.__getitem__
        # the norm before each layer, and after the last: the model's last, or that before the layer that follows
        self._norms = [*(placed(index).input_norm for index in range(config.num_layers)), norm]
        self._fused = self._fuse() if native and ops.backend(device) == "c" and not self.streams else None

    @property
    def placed(self) -> StreamedLayers | None:
        """The layers where `tiers` took them; None without."""
        return self._layers if isinstance(self._layers, StreamedLayers) else None

    @property
    def streams(self) -> bool:
        """Whether layers come to the device while it computes, which no graph can hold."""
        return isinstance(self._layers, StreamedLayers) and self._layers.streams

    def join(self, ranks: Ranks) -> None:
        """Compute from now on as one of several ranks, each of which holds a share of heads, inner columns and
        vocabulary: its sums are parts of theirs.
        """

        def summed(layer: LayerWeights) -> LayerWeights:
            return replace(layer, o=SummedLinear(layer.o, ranks), down=SummedLinear(layer.down, ranks))

        self._fused = None
        if isinstance(self._layers, StreamedLayers):
            self._layers.change(summed)
        else:
            self._layers = [summed(layer) for layer in self._layers]
        if self._table is not None:
            self._embed = SplitEmbedding(self._table, ranks)
        if self._head is not None:
            self._head = GatheredLinear(self._head, ranks, self.config.vocab_size)

    def layout(self, block_tokens: int, kv_dtype: torch.dtype | None = None, *, long: bool = False) -> KVLayout:
        """How this model's KV lies in blocks of `block_tokens` tokens, of short or of long sequences. kv_dtype: None =
        the dtype of computing.
        """
        config = self.config
        digest = config.rope_digest(long=long)
        dtype = kv_dtype or self.dtype
        return KVLayout(config.num_layers, config.num_kv_heads, block_tokens, config.head_size, dtype, digest)

    def forward(
        self,
        step: ForwardInput,
        kv_cache: torch.Tensor,
        *,
        kv_scales: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [num_rows, hidden] after the last norm; stores the KV of every row that has a slot.

        kv_scales: of an e4m3 cache, see KVLayout. residual: what `forward` of the layers before returned, where these
        are not the model's first, overwritten. Where they are not its last, returns that for the layers after.
        """
        if residual is None:
            residual = self.embedded(step.input_ids)
        hidden = self.first_norm(residual)
        if self._fused is not None and step.overflow is None:
            ops.decoder_layers(
                self._fused,
                hidden,
                residual,
                kv_cache,
                step.plan,
                step.rope_positions,
                step.slot_mapping,
                kv_scales=kv_scales,
            )
            return hidden if self.config.ends else residual
        for index in range(len(self._layers)):
            hidden = self.layer(index, hidden, residual, step, kv_cache, cache_layer=index, kv_scales=kv_scales)
        if isinstance(self._layers, StreamedLayers):
            self._layers.release()
        return hidden if self.config.ends else residual

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The residual [rows, hidden] that the model's first layer begins with, of int64 token ids [rows]."""
        if self._embed is None:
            raise InvariantViolation("layers that are not the model's first were given no residual")
        residual = self._embed(token_ids)
        if self.config.embedding_scale != 1.0:
            residual.mul_(torch.tensor(self.config.embedding_scale, dtype=self.dtype))
        return residual

    def first_norm(self, residual: torch.Tensor) -> torch.Tensor:
        """What `layer` takes for layer 0: the normed residual."""
        return ops.rms_norm(residual, self._norms[0], self.config.rms_eps)

    def _fuse(self) -> FusedLayers | None:
        """The layers for one call with the same bits; None when one has parts that such a call does not know."""
        config, parts = self.config, []
        for index in range(len(self._layers)):
            kind, weights = config.kind_of(index), self._layers[index]
            qkv, o, gate_up, down = (
                linear.matrix if isinstance(linear, QuantizedLinear) else None
                for linear in (weights.qkv, weights.o, weights.gate_up, weights.down)
            )
            if qkv is None or o is None or gate_up is None or down is None:
                return None
            if weights.q_norm is not None or weights.attention_out_norm is not None:
                return None
            table = None if kind.rope is None else self._ropes[kind.rope]
            norms = (weights.mlp_norm, self._norms[index + 1])
            parts.append(LayerParts(qkv, o, gate_up, down, *norms, table, kind.window))
        return FusedLayers(
            parts,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            eps=config.rms_eps,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            gelu=config.activation == "gelu_tanh",
            dtype=self.dtype,
        )

    def layer(
        self,
        index: int,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        step: ForwardInput,
        kv_cache: torch.Tensor,
        cache_layer: int,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One layer and the norm after it: normed `hidden` in, next layer's normed input out, `residual` updated."""
        eps, weights = self.config.rms_eps, self._layers[index]
        hidden = self._attention(index, hidden, step, kv_cache, cache_layer, kv_scales)
        if weights.attention_out_norm is not None:
            hidden = ops.rms_norm(hidden, weights.attention_out_norm, eps)
        hidden = ops.rms_norm(hidden, weights.mlp_norm, eps, residual)
        gated = self._activation(weights.gate_up(hidden))
        hidden = weights.down(gated)
        if weights.mlp_out_norm is not None:
            hidden = ops.rms_norm(hidden, weights.mlp_out_norm, eps)
        return ops.rms_norm(hidden, self._norms[index + 1], eps, residual)

    def _attention(
        self,
        index: int,
        hidden: torch.Tensor,
        step: ForwardInput,
        kv_cache: torch.Tensor,
        cache_layer: int,
        kv_scales: torch.Tensor | None,
    ) -> torch.Tensor:
        config, kind = self.config, self.config.kind_of(index)
        q = self.queries(index, hidden, step, kv_cache, cache_layer, kv_scales=kv_scales)
        if step.overflow is not None:
            attended = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
            scale, softcap = config.attention_scale, config.attention_softcap
            step.overflow.attend(attended, q, kv_cache, cache_layer, scale, kind.window, softcap)
            return self._layers[index].o(attended.flatten(1))
        attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        ops.paged_attention(
            attended,
            q,
            kv_cache,
            cache_layer,
            step.plan,
            config.attention_scale,
            window=kind.window,
            softcap=config.attention_softcap,
            kv_scales=kv_scales,
        )
        return self._layers[index].o(attended.view(-1, config.num_heads * config.head_size))

    def queries(
        self,
        index: int,
        hidden: torch.Tensor,
        step: ForwardInput,
        kv_cache: torch.Tensor,
        cache_layer: int,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The queries [rows, heads, head_size] of a layer, as they attend, of its normed input; stores its KV."""
        config, weights, kind = self.config, self._layers[index], self.config.kind_of(index)
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        qkv: torch.Tensor = weights.qkv(hidden).view(-1, heads + 2 * kv_heads, size)
        q: torch.Tensor
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q = ops.rms_norm(q.reshape(-1, size), weights.q_norm, config.rms_eps).view(-1, heads, size)
            k = ops.rms_norm(k.reshape(-1, size), weights.k_norm, config.rms_eps).view(-1, kv_heads, size)
        if kind.rope is None:
            ops.store_kv(k, v, kv_cache, cache_layer, step.slot_mapping, kv_scales=kv_scales)
        else:
            table, positions, slots = self._ropes[kind.rope], step.rope_positions, step.slot_mapping
            ops.rope_store_kv(q, k, v, table, positions, kv_cache, cache_layer, slots, kv_scales=kv_scales)
        return q

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab] of hidden states [rows, hidden], where the model's last layer is."""
        if self._head is None:
            raise InvariantViolation("layers that are not the model's last have no logits")
        logits = self._head(hidden).float()
        if self.config.logit_softcap:
            cap = self.config.logit_softcap
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits


class _LayerLoader:
    """Reads layers by their HF names, joining what the decoder multiplies at once."""

    def __init__(
        self, config: DecoderConfig, checkpoint: Tensors, dtype: torch.dtype, packed: bool, native: bool
    ) -> None:
        self._packed = packed
        self._native = native
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

    def head(self, table: torch.Tensor | None) -> Linear | QuantizedLinear:
        """From hidden states to logits; the embedding's table serves where the two are one."""
        config = self._config
        name = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
        shape = (config.vocab_size, config.hidden_size)
        if self._native and (part := self._checkpoint.take_quantized(name, shape)) is not None:
            return QuantizedLinear([part], out_dtype=torch.float32)
        weight = table if table is not None and config.tied_embeddings else None
        if weight is None:
            weight = self._checkpoint.take(name, shape, self._dtype)
        return Linear(weight, None, packed=self._packed)

    def _joined(
        self, prefix: str, names: list[str], rows: list[int], columns: int, biased: bool
    ) -> Linear | QuantizedLinear:
        checkpoint, dtype = self._checkpoint, self._dtype
        shapes = {f"{prefix}{name}.weight": (n, columns) for name, n in zip(names, rows, strict=True)}
        bias = None
        if biased:
            biases = zip(names, rows, strict=True)
            bias = torch.cat([checkpoint.take(f"{prefix}{name}.bias", (n,), dtype) for name, n in biases])
        if self._native:
            quantized = [checkpoint.take_quantized(name, shape) for name, shape in shapes.items()]
            found = [part for part in quantized if part is not None]
            if len(found) == len(shapes):
                return QuantizedLinear(found, bias)
        parts = [checkpoint.take(name, shape, dtype) for name, shape in shapes.items()]
        places = [checkpoint.place(name, shape, dtype) for name, shape in shapes.items()]
        known = [place for place in places if place is not None]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Linear(weight, bias, packed=self._packed, places=known if len(known) == len(places) else None)
