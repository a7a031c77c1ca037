"""Random-weight models of 2 to 4 layers of every family that is served, saved as folders.

Owns one HF configuration per family and per RoPE type, small enough for a test and odd enough to notice mistakes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 24

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**COMMON, head_dim=32),
    "llama_biases": LlamaConfig(**COMMON, head_dim=16, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**COMMON, head_dim=32, sliding_window=WINDOW),
    "mistral_full": MistralConfig(**COMMON, sliding_window=None),
    "qwen2": Qwen2Config(**COMMON),
    "qwen2_windows": Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**COMMON, head_dim=32),
    "smollm3": SmolLM3Config(**(COMMON | {"num_hidden_layers": 4}), no_rope_layer_interval=2),
    "phi3": Phi3Config(**COMMON, sliding_window=WINDOW),
    "phi3_partial": Phi3Config(**(COMMON | {"hidden_size": 192}), partial_rotary_factor=0.5, sliding_window=None),
    "gemma2": Gemma2Config(
        **(COMMON | {"num_hidden_layers": 4}), head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=24,
        attn_logit_softcapping=20.0, final_logit_softcapping=15.0,
    ),
    "gemma3": Gemma3TextConfig(
        **(COMMON | {"num_hidden_layers": 4}), head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    ),
}  # fmt: skip

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)],
    },
}  # fmt: skip


def rope_config(kind: str) -> PreTrainedConfig:
    """A llama (a Phi-3 for longrope) with this RoPE type."""
    if kind == "longrope":
        original = ROPES[kind]["original_max_position_embeddings"]
        return Phi3Config(
            **COMMON, sliding_window=None, original_max_position_embeddings=original, rope_parameters=dict(ROPES[kind])
        )
    return LlamaConfig(**COMMON, head_dim=32, rope_parameters=dict(ROPES[kind]))


def build_family(config: PreTrainedConfig, folder: Path, seed: int = 0) -> Path:
    """Save a model of this configuration with random fp32 weights whose greedy output keeps changing."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**config.to_dict())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.add_(0.1 * torch.randn_like(tensor))
            elif "embed" in name or "lm_head" in name:
                tensor.normal_(0, 0.05 if config.model_type.startswith("gemma") else 1.0)  # Gemma scales them up
            else:
                tensor.normal_(0, 1.5 * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.5)
    model.save_pretrained(folder)
    return folder
