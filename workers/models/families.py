"""How each architecture sets the decoder's switches.

Owns one small function per family, from a HF configuration to `DecoderConfig` fields; `read_decoder_config` puts the
common part around it. Anything a family can say that the decoder does not do is refused here by name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.decoder_config import DecoderConfig, LayerKind, check_limit, read_eos_token_ids
from tournant.workers.models.described import DescribedModel
from tournant.workers.models.rope import Rope
from tournant.workers.models.rope_config import make_rope, position_limit

SLIDING, FULL = "sliding_attention", "full_attention"
MAX_POSITIONS = 1 << 22  # bounds the RoPE table
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

Fields = dict[str, Any]


def _llama(config: Any) -> Fields:
    biased = bool(getattr(config, "attention_bias", False))
    return {"qkv_bias": biased, "o_bias": biased, "mlp_bias": bool(getattr(config, "mlp_bias", False))}


def _mistral(config: Any) -> Fields:
    return {"layers": _windows(config, [SLIDING] * config.num_hidden_layers)}


def _qwen2(config: Any) -> Fields:
    return {"qkv_bias": True, "layers": _windows(config, config.layer_types)}


def _qwen3(config: Any) -> Fields:
    return {**_llama(config), "qk_norm": True, "layers": _windows(config, config.layer_types)}


def _smollm3(config: Any) -> Fields:
    types = config.layer_types if config.use_sliding_window else [FULL] * config.num_hidden_layers
    kinds = _windows(config, types)
    rotated = [bool(flag) for flag in config.no_rope_layers]
    layers = tuple(LayerKind(kind.window, 0 if flag else None) for kind, flag in zip(kinds, rotated, strict=True))
    return {**_llama(config), "layers": layers}


def _phi3(config: Any) -> Fields:
    return {"fused_projections": True, "layers": _windows(config, [SLIDING] * config.num_hidden_layers)}


def _gemma2(config: Any) -> Fields:
    return {
        **_llama(config),
        "layers": _windows(config, config.layer_types),
        "offset_norms": True,
        "sandwich_norms": True,
        "embedding_scale": config.hidden_size**0.5,
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "attention_softcap": float(config.attn_logit_softcapping or 0.0),
        "logit_softcap": float(config.final_logit_softcapping or 0.0),
    }


def _gemma3(config: Any) -> Fields:
    if getattr(config, "use_bidirectional_attention", False):
        raise ModelFormatError("config.json sets use_bidirectional_attention; only causal decoders are supported")
    kinds = _windows(config, config.layer_types)
    layers = tuple(
        LayerKind(kind.window, 1 if name == SLIDING else 0)
        for kind, name in zip(kinds, config.layer_types, strict=True)
    )
    return {**_gemma2(config), "qk_norm": True, "layers": layers}


FAMILIES: dict[str, Callable[[Any], Fields]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}


def describe(files: ModelFiles, config: EngineConfig) -> DescribedModel:
    """What an engine of this configuration is told of a model. Raises what `read_decoder_config` does."""
    return DescribedModel(files, read_decoder_config(files.folder, config.max_model_len))


def read_decoder_config(folder: Path, max_model_len: int | None = None) -> DecoderConfig:
    """Read config.json and generation_config.json of a model folder.

    max_model_len: tokens a sequence may have, None = the model's limit. Raises ModelFormatError for what cannot be
    used, ConfigError when max_model_len exceeds the model's limit.
    """
    try:
        return _read_decoder_config(folder, max_model_len)
    except (ConfigError, ModelFormatError):
        raise
    except Exception as error:  # transformers and arithmetic raise whatever a wrong value leads them to
        reason = " ".join(str(error).split())[:300]
        raise ModelFormatError(f"config.json in {folder} cannot be used: {type(error).__name__}: {reason}") from error


def _read_decoder_config(folder: Path, max_model_len: int | None) -> DecoderConfig:
    config: Any = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ModelFormatError(f"config.json has model_type {config.model_type!r}; known are {', '.join(FAMILIES)}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ModelFormatError(
            f"config.json has {heads} heads and {kv_heads} KV heads; the former must be a multiple of the latter"
        )
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    positions = position_limit(config)
    if not 0 < positions <= MAX_POSITIONS:
        raise ModelFormatError(f"config.json gives the model {positions} positions; they must be 1 to {MAX_POSITIONS}")
    if not 0 <= config.rms_norm_eps < 1:  # also NaN
        raise ModelFormatError(f"config.json has rms_norm_eps {config.rms_norm_eps!r}; it must be from 0 to below 1")
    limit = check_limit(max_model_len, positions)
    fields: Fields = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": head_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_positions": positions,
        "max_model_len": limit,
        "rms_eps": config.rms_norm_eps,
        "tied_embeddings": bool(config.tie_word_embeddings),
        "eos_token_ids": read_eos_token_ids(folder, config),
        "ropes": _ropes(config, head_size, limit),
        "layers": (LayerKind(),) * config.num_hidden_layers,
        "attention_scale": head_size**-0.5,
        "activation": _activation(config),
    }
    return DecoderConfig(**(fields | family(config)))


def _ropes(config: Any, head_size: int, max_model_len: int) -> tuple[Rope, ...]:
    if FULL in config.rope_parameters:
        return tuple(make_rope(config, head_size, max_model_len, layer_type) for layer_type in (FULL, SLIDING))
    return (make_rope(config, head_size, max_model_len),)


def _activation(config: Any) -> str:
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if name not in ACTIVATIONS:
        raise ModelFormatError(f"config.json has activation {name!r}; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _windows(config: Any, types: list[str]) -> tuple[LayerKind, ...]:
    window = config.sliding_window or 0
    if isinstance(window, bool) or not isinstance(window, int) or window < 0:
        raise ModelFormatError(f"config.json has sliding_window {window!r}; it must be a whole number above 0, or null")
    for name in types:
        if name not in (SLIDING, FULL):
            raise ModelFormatError(f"config.json has layer type {name!r}; known are {SLIDING}, {FULL}")
    return tuple(LayerKind(window if name == SLIDING else 0) for name in types)
