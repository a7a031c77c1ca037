"""A model folder of any family written as a GGUF file, the way llama.cpp's converter does it.

Owns the names and conventions of such files, written down apart from the code under test.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, quantize
from safetensors.numpy import load_file
from transformers import AutoConfig

from tests.helpers.tiny_gguf import (
    GEMMA_SPECIALS,
    Fields,
    byte_level_fields,
    paired_rows,
    sentencepiece_fields,
    write_gguf,
)

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
PAIRED = ("llama", "smollm3")
GEMMA = ("gemma2", "gemma3")
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

Arrays = dict[str, npt.NDArray[np.float32]]


def write_family_gguf(
    path: Path,
    folder: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    **changed: tuple[Any, GGUFValueType],
) -> Arrays:
    """Write the fp32 model of `folder` to `path`; return the weights that a right reader must find, if kind is F32.

    kind: type of all matrices; changed: metadata added or replaced, by key, `__` for a dot; the architecture goes
    before all but the tokenizer's.
    """
    config = AutoConfig.from_pretrained(folder)
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found: Arrays = {}
    plain = _rope_tensors(config, head_size)
    for name, weights in load_file(folder / "model.safetensors").items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        stored, found[name] = weights, weights
        if architecture in PAIRED and ("q_proj" in name or "k_proj" in name):
            stored = weights[paired_rows(len(weights), head_size)]
        if architecture in GEMMA and "norm" in name:
            stored = weights + np.float32(1)
            found[name] = stored - np.float32(1)
        plain[_file_name(name, GEMMA_NAMES if architecture in GEMMA else NAMES)] = np.ascontiguousarray(stored)
    fields = {**_fields(config, architecture, head_size), **_rope_fields(config, architecture)}
    for key, item in changed.items():
        prefix = "" if key.startswith("tokenizer__") else f"{architecture}."
        fields[prefix + key.replace("__", ".")] = (*item, None)
    kinds = {name: kind if array.ndim > 1 else GGMLQuantizationType.F32 for name, array in plain.items()}
    write_gguf(path, fields, {name: (quantize(array, kinds[name]), kinds[name]) for name, array in plain.items()})
    return found


def _file_name(name: str, names: dict[str, str]) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.{suffix}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{names[part]}.{suffix}"


def _fields(config: Any, architecture: str, head_size: int) -> Fields:
    u32, f32 = GGUFValueType.UINT32, GGUFValueType.FLOAT32
    values: dict[str, tuple[Any, GGUFValueType]] = {
        "context_length": (config.max_position_embeddings, u32),
        "embedding_length": (config.hidden_size, u32),
        "block_count": (config.num_hidden_layers, u32),
        "feed_forward_length": (config.intermediate_size, u32),
        "attention.head_count": (config.num_attention_heads, u32),
        "attention.head_count_kv": (config.num_key_value_heads, u32),
        "attention.layer_norm_rms_epsilon": (config.rms_norm_eps, f32),
    }
    if head_size * config.num_attention_heads != config.hidden_size or architecture in GEMMA:
        values |= {"attention.key_length": (head_size, u32), "attention.value_length": (head_size, u32)}
    if architecture in PAIRED:
        values |= {"vocab_size": (config.vocab_size, u32), "rope.dimension_count": (head_size, u32)}
    if architecture == "phi3":
        rotary = int(head_size * config.rope_parameters["partial_rotary_factor"])
        original = config.original_max_position_embeddings
        values |= {"rope.dimension_count": (rotary, u32), "rope.scaling.original_context_length": (original, u32)}
    if architecture in ("phi3", *GEMMA) or config.model_type == "mistral":
        windows = "sliding_attention" in getattr(config, "layer_types", ["sliding_attention"])
        values["attention.sliding_window"] = ((config.sliding_window or 0) if windows else 0, u32)
    if architecture in GEMMA:
        softcaps = {name: getattr(config, f"{name}_logit_softcapping") for name in ("attn", "final")}
        values |= {f"{name}_logit_softcapping": (cap, f32) for name, cap in softcaps.items() if cap is not None}
    named = {f"{architecture}.{key}": (*value, None) for key, value in values.items()}
    if architecture in GEMMA:
        tokenizer = sentencepiece_fields(config.vocab_size, GEMMA_SPECIALS)
        tokenizer["tokenizer.ggml.add_space_prefix"] = (False, GGUFValueType.BOOL, None)
    elif config.model_type in ("mistral", "phi3"):
        tokenizer = sentencepiece_fields(config.vocab_size)
    else:
        tokenizer = byte_level_fields(config.vocab_size)
    tokenizer["tokenizer.ggml.padding_token_id"] = (config.pad_token_id, u32, None)
    return {"general.architecture": (architecture, GGUFValueType.STRING, None), **named, **tokenizer}


def _rope_fields(config: Any, architecture: str) -> Fields:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    kind = rope["rope_type"]
    f32 = GGUFValueType.FLOAT32
    values: dict[str, tuple[Any, GGUFValueType]] = {} if architecture == "gemma2" else {
        "freq_base": (rope["rope_theta"], f32)
    }  # fmt: skip
    if kind in ("linear", "yarn"):
        values |= {"scaling.type": (kind, GGUFValueType.STRING), "scaling.factor": (rope["factor"], f32)}
    if kind == "yarn":
        values["scaling.original_context_length"] = (rope["original_max_position_embeddings"], GGUFValueType.UINT32)
        for theirs, ours in (
            ("attn_factor", "attention_factor"),
            ("beta_fast", "beta_fast"),
            ("beta_slow", "beta_slow"),
        ):
            if ours in rope:
                values[f"scaling.yarn_{theirs}"] = (rope[ours], f32)
    if kind == "longrope":
        original = config.original_max_position_embeddings
        factor = math.sqrt(1 + math.log(config.max_position_embeddings / original) / math.log(original))
        values["scaling.attn_factor"] = (factor, f32)
    return {f"{architecture}.rope.{key}": (*value, None) for key, value in values.items()}


def _rope_tensors(config: Any, head_size: int) -> Arrays:
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for place in range(0, head_size, 2):
        turns = original / (2 * math.pi * rope["rope_theta"] ** (place / head_size))  # within the original length
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))  # 1: fast, left as it is; 0: slow, divided by factor
        factors.append(1.0 / ((1.0 - blend) / rope["factor"] + blend))
    return {"rope_freqs.weight": np.array(factors, np.float32)}
