"""What the metadata and tensors of a GGUF file mean, for each architecture that is converted.

Owns config.json (as transformers' class of the family reads it) and the list of the folder's tensors: from which tensor
of the file each is made, and what the file's writer did to it. Tensor names are those of the gguf package's tables. Of
the file's data it reads only tensors of RoPE factors.

What llama.cpp's converter does to a model, and what is undone here or when the weights are written:
 1. llama, smollm3: the rows of q and k that RoPE rotates together lie side by side, (i, half) instead of (half, i).
 2. gemma2, gemma3: a norm's weight is stored as 1 + w.
 3. The factors of llama3 and longrope become tensors.
 4. What all models of an architecture have in common is not written: which layers of SmolLM3 rotate nothing, which of
    Gemma's see a window, how Gemma scales attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map

from tournant.workers.errors import ModelFormatError
from tournant.workers.gguf_header import GGUFHeader

PLAIN_TYPES = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
TENSOR_TYPES = (
    *PLAIN_TYPES, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q5_1, GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)  # fmt: skip
"""Exactly the types that matrices may have, each tested against the gguf package; norms and biases: PLAIN_TYPES."""

ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
SLIDING, FULL = "sliding_attention", "full_attention"
GELU = "gelu_pytorch_tanh"
MAX_LAYERS, MAX_POSITIONS = 1 << 12, 1 << 28

YARN_NAMES = {"attn_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
NEUTRAL = {
    "expert_count": 0, "attention.scale": 0.0, "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0,
    "attention.causal": True, "logit_scale": 1.0, "residual_scale": 1.0, "embedding_scale": 1.0,
    "rope.scale_linear": 1.0, "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.0,
}  # fmt: skip
"""Fields that change the arithmetic of a model and are not supported, each with the value that changes nothing."""

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor of the folder. heads: head count when the file holds the rows of each head as (i, half), else 0;
    offset: what the file's values are above the folder's.
    """

    name: str
    shape: tuple[int, ...]
    heads: int = 0
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class _Fields:
    """The header's getters for the fields of its architecture."""

    header: GGUFHeader
    architecture: str

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def has(self, key: str) -> bool:
        return self.name(key) in self.header.fields

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        return self.header.whole(self.name(key), low, high, default)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        return self.header.number(self.name(key), low, high, default)

    def refused(self, key: str, reason: str) -> ModelFormatError:
        value = self.header.fields.get(self.name(key))
        return ModelFormatError(f"{self.header.path}: field {self.name(key)} is {value}; {reason}")


@dataclass(frozen=True, slots=True)
class _Architecture:
    """model_type, class_name: transformers'; details: fields of config.json beside those that all families share.

    paired_rows, offset_norms: points 1 and 2 above; fused: q, k and v are one tensor, gate and up too; qk_norms and
    sandwich_norms: tensors that others lack; qkv_biases: there whatever the configuration says.
    """

    model_type: str
    class_name: str
    details: Callable[[_Fields, Config], Config]
    paired_rows: bool = False
    offset_norms: bool = False
    fused: bool = False
    qk_norms: bool = False
    sandwich_norms: bool = False
    qkv_biases: bool = False


def _biases(fields: _Fields) -> Config:
    tensors = fields.header.tensors
    return {"attention_bias": "blk.0.attn_output.bias" in tensors, "mlp_bias": "blk.0.ffn_down.bias" in tensors}


def _no_window(fields: _Fields, config: Config) -> Config:
    """For families whose windows no file describes: llama.cpp has none for them."""
    if 0 < fields.whole("attention.sliding_window", 0, MAX_POSITIONS, 0) < config["max_position_embeddings"]:
        raise fields.refused("attention.sliding_window", f"windows are not supported for {fields.architecture}")
    return {}


def _gemma(fields: _Fields, config: Config, large_layers: int, softcaps: tuple[float, float]) -> Config:
    heads, large = config["num_attention_heads"], config["num_hidden_layers"] == large_layers
    return {
        "hidden_act": GELU,
        "hidden_activation": GELU,
        "query_pre_attn_scalar": config["hidden_size"] // heads if large else config["head_dim"],
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 0.0, 1e6, softcaps[0]) or None,
        "final_logit_softcapping": fields.number("final_logit_softcapping", 0.0, 1e6, softcaps[1]) or None,
    }


def _layer_types(fields: _Fields, config: Config, period: int) -> list[str]:
    """Every period-th layer sees all tokens."""
    period = fields.whole("attention.sliding_window_pattern", 1, MAX_LAYERS, period)
    return [SLIDING if (layer + 1) % period else FULL for layer in range(config["num_hidden_layers"])]


def _llama(fields: _Fields, config: Config) -> Config:
    window = fields.whole("attention.sliding_window", 0, MAX_POSITIONS, 0)
    if window:
        return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return _biases(fields)


def _qwen3(fields: _Fields, config: Config) -> Config:
    return {**_no_window(fields, config), "attention_bias": _biases(fields)["attention_bias"]}


def _smollm3(fields: _Fields, config: Config) -> Config:
    rotated = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    return {**_no_window(fields, config), **_biases(fields), "no_rope_layers": rotated}


def _phi3(fields: _Fields, config: Config) -> Config:
    rope = config["rope_parameters"]
    if rope["rope_type"] not in ("default", "longrope"):
        raise fields.refused("rope.scaling.type", f"Phi-3 is known with none and longrope, not {rope['rope_type']}")
    return {
        "sliding_window": fields.whole("attention.sliding_window", 0, MAX_POSITIONS, 0) or None,
        "original_max_position_embeddings": rope.get(
            "original_max_position_embeddings", config["max_position_embeddings"]
        ),
    }


def _gemma2(fields: _Fields, config: Config) -> Config:
    """The 27B model alone, which has 46 layers, scales attention by hidden size / heads instead of the head size."""
    return {
        **_gemma(fields, config, large_layers=46, softcaps=(50.0, 30.0)),
        "sliding_window": fields.whole("attention.sliding_window", 1, MAX_POSITIONS, 4096),
        "layer_types": _layer_types(fields, config, 2),
    }


def _gemma3(fields: _Fields, config: Config) -> Config:
    """As Gemma 2 (27B: 62 layers), and layers with a window have a RoPE of their own, never scaled."""
    window = fields.whole("attention.sliding_window", 0, MAX_POSITIONS, 0)
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 1.0, 1e12, 10000.0)}
    return {
        **_gemma(fields, config, large_layers=62, softcaps=(0.0, 0.0)),
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": _layer_types(fields, config, 6) if window else [FULL] * config["num_hidden_layers"],
        "rope_parameters": {FULL: config["rope_parameters"], SLIDING: local},
    }


ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", _llama, paired_rows=True),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", _no_window, qkv_biases=True),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", _qwen3, qk_norms=True),
    "smollm3": _Architecture("smollm3", "SmolLM3ForCausalLM", _smollm3, paired_rows=True),
    "phi3": _Architecture("phi3", "Phi3ForCausalLM", _phi3, fused=True),
    "gemma2": _Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, offset_norms=True, sandwich_norms=True),
    "gemma3": _Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _gemma3, offset_norms=True, sandwich_norms=True, qk_norms=True
    ),
}
"""By general.architecture. A Mistral file says llama."""


def read_config(header: GGUFHeader, dtype: str) -> Config:
    """config.json for the file's metadata. Raises ModelFormatError naming the field that is missing, out of range or
    not supported.
    """
    name = header.text("general.architecture")
    family, fields = ARCHITECTURES.get(name), _Fields(header, name)
    if family is None:
        known = ", ".join(ARCHITECTURES)
        raise ModelFormatError(f"{header.path}: architecture {name!r} is not supported; known for GGUF: {known}")
    _check_whole_and_plain(fields)
    heads, kv_heads, head_size, rotary = _head_sizes(fields)
    vocab_size = fields.whole("vocab_size", 1, 1 << 24, header.array("tokenizer.ggml.tokens").length)
    positions = fields.whole("context_length", 1, MAX_POSITIONS)
    config: Config = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "hidden_size": fields.whole("embedding_length", 1, 1 << 17),
        "intermediate_size": fields.whole("feed_forward_length", 1, 1 << 20),
        "num_hidden_layers": fields.whole("block_count", 1, MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": positions,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        "rope_parameters": _rope_parameters(fields, rotary, head_size, positions),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": dtype,
        **{f"{ours}_token_id": token_id(header, theirs, vocab_size) for ours, theirs in TOKEN_NAMES.items()},
    }
    return config | family.details(fields, config)


TOKEN_NAMES = {"bos": "bos", "eos": "eos", "pad": "padding"}


def token_id(header: GGUFHeader, kind: str, vocab_size: int) -> int | None:
    """The id of a special token, None when the file names none. Raises ModelFormatError when it is out of range."""
    key = f"tokenizer.ggml.{kind}_token_id"
    return header.whole(key, 0, vocab_size - 1) if key in header.fields else None


def _check_whole_and_plain(fields: _Fields) -> None:
    """Raises ModelFormatError for one file of several, and for a field that no architecture here may have."""
    header = fields.header
    if header.whole("split.count", 0, 1 << 16, 0) > 1:
        raise ModelFormatError(
            f"{header.path}: it is one of {header.fields['split.count']} files (field split.count); join them with "
            "llama-gguf-split --merge"
        )
    for key, neutral in NEUTRAL.items():
        if fields.has(key) and header.fields[fields.name(key)] != neutral:
            raise fields.refused(key, f"only {neutral} is supported")


def _head_sizes(fields: _Fields) -> tuple[int, int, int, int]:
    """Heads, KV heads, head size and how much of a head is rotated, which must go into each other."""
    hidden = fields.whole("embedding_length", 1, 1 << 17)
    heads = fields.whole("attention.head_count", 1, 1 << 12)
    kv_heads = fields.whole("attention.head_count_kv", 1, heads, heads)
    head_size = fields.whole("attention.key_length", 2, 1 << 12, max(2, hidden // heads))
    rotary = fields.whole("rope.dimension_count", 2, 1 << 12, head_size)
    if fields.whole("attention.value_length", 1, 1 << 12, head_size) != head_size:
        raise fields.refused("attention.value_length", f"only the head size, {head_size}, is supported")
    if rotary != head_size and (fields.architecture != "phi3" or rotary > head_size or rotary % 2):
        raise fields.refused("rope.dimension_count", f"only the head size, {head_size}, is supported")
    if hidden % heads:
        raise fields.refused("embedding_length", f"it must be a multiple of the {heads} heads")
    if heads % kv_heads or head_size % 2:
        raise ModelFormatError(
            f"{fields.header.path}: {heads} heads of size {head_size} do not divide evenly over the {kv_heads} KV "
            f"heads of field {fields.name('attention.head_count_kv')}, or into two halves"
        )
    return heads, kv_heads, head_size, rotary


def _rope_parameters(fields: _Fields, rotary: int, head_size: int, positions: int) -> Config:
    """RoPE as transformers writes it."""
    base: Config = {"rope_theta": fields.number("rope.freq_base", 1.0, 1e12, 10000.0)}
    if rotary != head_size:
        base["partial_rotary_factor"] = rotary / head_size
        if int(head_size * base["partial_rotary_factor"]) != rotary:
            raise fields.refused("rope.dimension_count", f"that is no exact fraction of the head size, {head_size}")
    header = fields.header
    kind = header.text(fields.name("rope.scaling.type"), "linear" if fields.has("rope.scaling.factor") else "none")
    found = header.tensors.keys() & {ROPE_FREQS, ROPE_LONG, ROPE_SHORT}
    if ROPE_FREQS in found and len(found) > 1:
        raise ModelFormatError(f"{header.path}: tensors {', '.join(sorted(found))} are of different RoPE types")
    if kind == "longrope" or found:
        if kind not in ("none", "longrope"):
            raise fields.refused("rope.scaling.type", "with a tensor of RoPE factors it must be none or longrope")
        return {"rope_type": "longrope", **_factors(fields, rotary, positions), **base}
    if kind == "none":
        return {"rope_type": "default", **base}
    if kind not in ("linear", "yarn"):
        raise fields.refused("rope.scaling.type", "known are none, linear, yarn and longrope")
    if fields.number("rope.scaling.attn_factor", 0.0, 1e4, 1.0) != 1.0:
        raise fields.refused("rope.scaling.attn_factor", f"only 1.0 is supported with {kind}")
    scaling: Config = {"rope_type": kind, "factor": fields.number("rope.scaling.factor", 1.0, 1e4), **base}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.whole(
            "rope.scaling.original_context_length", 1, MAX_POSITIONS, positions
        )
        for theirs, ours in YARN_NAMES.items():
            if fields.has(f"rope.scaling.yarn_{theirs}"):
                scaling[ours] = fields.number(f"rope.scaling.yarn_{theirs}", 1e-3, 1e4)
    return scaling


def _factors(fields: _Fields, rotary: int, positions: int) -> Config:
    """longrope with the file's factors. The single set that stands for llama3 (each frequency has its factor, whatever
    the length) is longrope with the same factors twice, and no scaling of attention.
    """
    if ROPE_FREQS in fields.header.tensors:
        shared = _read_factors(fields.header, ROPE_FREQS, rotary // 2)
        return {
            "short_factor": shared, "long_factor": shared, "factor": 1.0, "attention_factor": 1.0,
            "original_max_position_embeddings": positions,
        }  # fmt: skip
    short, long = (_read_factors(fields.header, name, rotary // 2) for name in (ROPE_SHORT, ROPE_LONG))
    original = fields.whole("rope.scaling.original_context_length", 2, positions)
    found: Config = {
        "short_factor": short,
        "long_factor": long,
        "factor": positions / original,
        "original_max_position_embeddings": original,
    }
    if fields.has("rope.scaling.attn_factor"):
        found["attention_factor"] = fields.number("rope.scaling.attn_factor", 1e-3, 1e4)
    return found


def _read_factors(header: GGUFHeader, name: str, count: int) -> list[float]:
    tensor = header.tensors.get(name)
    if tensor is None:
        raise ModelFormatError(f"{header.path}: tensor {name} is missing")
    if tensor.type != GGMLQuantizationType.F32 or tensor.shape != (count,):
        raise ModelFormatError(
            f"{header.path}: tensor {name} is {tensor.type.name} {list(tensor.shape)}; it must be F32 [{count}]"
        )
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        values = np.frombuffer(file.read(tensor.num_bytes), dtype="<f4")
    if len(values) != count or not (values >= 1e-3).all() or not (values <= 1e6).all():
        raise ModelFormatError(f"{header.path}: tensor {name} holds values outside 0.001 to 1000000")
    return [float(str(value)) for value in values]


def wanted_tensors(header: GGUFHeader, config: Config) -> dict[str, Wanted]:
    """What the folder's weights are made of, by name in the file. Raises ModelFormatError naming a tensor of the file
    that is missing, of another shape or type, or not part of such a model.
    """
    name = header.text("general.architecture")
    family = ARCHITECTURES[name]
    names = get_tensor_name_map(next(key for key, value in MODEL_ARCH_NAMES.items() if value == name), 1)

    def source(ours: str) -> str:
        stem, _, suffix = ours.rpartition(".")
        return f"{names.get_name(stem)}.{suffix}"

    hidden, offset = config["hidden_size"], float(family.offset_norms)
    vocabulary = (config["vocab_size"], hidden)
    wanted = {source("model.embed_tokens.weight"): Wanted("model.embed_tokens.weight", vocabulary)}
    block = [(source(tensor.name), tensor) for tensor in _block(family, config)]
    for layer in range(config["num_hidden_layers"]):
        for theirs, tensor in block:
            ours = tensor.name.replace(".0.", f".{layer}.", 1)
            wanted[theirs.replace(".0.", f".{layer}.", 1)] = replace(tensor, name=ours)
    wanted[source("model.norm.weight")] = Wanted("model.norm.weight", (hidden,), offset=offset)
    if not config["tie_word_embeddings"]:
        wanted[source("lm_head.weight")] = Wanted("lm_head.weight", vocabulary)
    _check_tensors(header, wanted, f"{name} of {config['num_hidden_layers']} layers")
    return wanted


def _block(family: _Architecture, config: Config) -> Iterator[Wanted]:
    """The tensors of layer 0."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query, kv = heads * size, kv_heads * size
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    qkv_bias = family.qkv_biases or attention_bias
    paired = (heads, kv_heads) if family.paired_rows else (0, 0)
    if family.fused:
        inputs = [("self_attn.qkv_proj", query + 2 * kv, qkv_bias, 0), ("mlp.gate_up_proj", 2 * inner, mlp_bias, 0)]
    else:
        inputs = [
            ("self_attn.q_proj", query, qkv_bias, paired[0]),
            ("self_attn.k_proj", kv, qkv_bias, paired[1]),
            ("self_attn.v_proj", kv, qkv_bias, 0),
            ("mlp.gate_proj", inner, mlp_bias, 0),
            ("mlp.up_proj", inner, mlp_bias, 0),
        ]
    matrices = [(name, rows, hidden, biased, pairs) for name, rows, biased, pairs in inputs]
    matrices += [("self_attn.o_proj", hidden, query, attention_bias, 0), ("mlp.down_proj", hidden, inner, mlp_bias, 0)]
    for name, rows, columns, biased, pairs in matrices:
        yield Wanted(f"model.layers.0.{name}.weight", (rows, columns), pairs)
        if biased:
            yield Wanted(f"model.layers.0.{name}.bias", (rows,), pairs)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if family.sandwich_norms:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if family.qk_norms:
        norms |= {"self_attn.q_norm": size, "self_attn.k_norm": size}
    for name, width in norms.items():
        yield Wanted(f"model.layers.0.{name}.weight", (width,), offset=float(family.offset_norms))


def _check_tensors(header: GGUFHeader, wanted: dict[str, Wanted], model: str) -> None:
    for name, tensor in wanted.items():
        found = header.tensors.get(name)
        if found is None:
            raise ModelFormatError(f"{header.path}: tensor {name} is missing")
        if found.shape != tensor.shape:
            raise ModelFormatError(
                f"{header.path}: tensor {name} has the shape {list(found.shape)}; the metadata make it "
                f"{list(tensor.shape)}"
            )
        types = TENSOR_TYPES if len(tensor.shape) > 1 else PLAIN_TYPES
        if found.type not in types:
            known = ", ".join(kind.name for kind in types)
            raise ModelFormatError(f"{header.path}: tensor {name} has type {found.type.name}; supported are {known}")
    for name in header.tensors:
        if name not in wanted and name not in (ROPE_FREQS, ROPE_LONG, ROPE_SHORT):
            raise ModelFormatError(f"{header.path}: tensor {name} is not part of a {model}")
