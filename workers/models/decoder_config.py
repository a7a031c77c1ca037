"""Shapes and constants of a decoder, read from a model folder through transformers' own configuration classes.

Owns the translation of a HF configuration into the few numbers the decoder needs, and the RoPE table. Refuses what the
decoder does not implement; which architectures are known at all is model_files.py's business.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tournant.workers.errors import ConfigError, ModelFormatError

MAX_JSON_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A llama-like decoder. Sizes in elements; max_positions in tokens.

    inv_freq: RoPE inverse frequencies float32 [rotary_dim / 2]; attention_scaling multiplies cos and sin.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    tied_embeddings: bool
    inv_freq: torch.Tensor
    attention_scaling: float
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> DecoderConfig:
        """Read config.json (and generation_config.json for the end-of-text tokens). Raises ModelFormatError."""
        try:
            config: Any = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelFormatError(f"config.json in {folder} cannot be used: {error}") from error
        for name in ("attention_bias", "mlp_bias"):
            if getattr(config, name, False):
                raise ModelFormatError(f"config.json sets {name}; biases are not supported for {config.model_type}")
        if config.hidden_act != "silu":
            raise ModelFormatError(f"config.json has hidden_act {config.hidden_act!r}; only 'silu' is supported")
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if config.num_attention_heads % config.num_key_value_heads:
            raise ModelFormatError(
                f"config.json has {config.num_attention_heads} heads and {config.num_key_value_heads} KV heads; "
                "the former must be a multiple of the latter"
            )
        inv_freq, scaling = _rope_frequencies(config, head_size)
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=head_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            rms_eps=config.rms_norm_eps,
            tied_embeddings=bool(config.tie_word_embeddings),
            inv_freq=inv_freq,
            attention_scaling=scaling,
            eos_token_ids=_eos_token_ids(folder, config),
        )

    @property
    def rope_digest(self) -> bytes:
        """SHA-256 of the frequencies and the scaling: part of the layout id of every key."""
        scaling = torch.tensor([self.attention_scaling], dtype=torch.float64)
        return hashlib.sha256(self.inv_freq.numpy().tobytes() + scaling.numpy().tobytes()).digest()

    def limit(self, max_model_len: int | None) -> int:
        """Tokens a sequence may have. Raises ConfigError when more are asked for than the model has positions."""
        if max_model_len is None:
            return self.max_positions
        if max_model_len > self.max_positions:
            raise ConfigError(
                f"max_model_len is {max_model_len}; this model has {self.max_positions} positions: choose at most that"
            )
        return max_model_len

    def rope_table(self, num_positions: int) -> torch.Tensor:
        """cos half | sin half, float32 [num_positions, rotary_dim]."""
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * self.inv_freq[None, :]
        return torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(self.attention_scaling).contiguous()


def _rope_frequencies(config: Any, head_size: int) -> tuple[torch.Tensor, float]:
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, head_size, 2, dtype=torch.float) / head_size
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    if kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
        raise ModelFormatError(f"config.json has rope_type {kind!r}; known are {known}")
    if kind in ("dynamic", "longrope"):
        raise ModelFormatError(f"config.json has rope_type {kind!r}, which is not supported yet")
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inv_freq.float(), float(scaling)


def _eos_token_ids(folder: Path, config: Any) -> tuple[int, ...]:
    found: Any = config.eos_token_id
    generation = folder / "generation_config.json"
    if generation.exists():
        from_file = read_json_object(generation).get("eos_token_id")
        found = from_file if from_file is not None else found
    if found is None:
        return ()
    return tuple(int(token) for token in (found if isinstance(found, list) else [found]))


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file. Raises ModelFormatError when it is not one or larger than 1 MiB."""
    text = path.read_bytes()
    if len(text) > MAX_JSON_BYTES:
        raise ModelFormatError(f"{path} has {len(text)} bytes; at most {MAX_JSON_BYTES} are read")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ModelFormatError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelFormatError(f"{path} does not hold a JSON object")
    return data
