"""The rotation that a HF configuration asks for.

The frequencies are transformers' own (`ROPE_INIT_FUNCTIONS`); this module decides for which length they are computed,
as rope.py says.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tournant.workers.errors import ModelFormatError
from tournant.workers.models.rope import Rope

KNOWN_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
STRETCHED_TYPES = ("linear", "dynamic")  # config.json gives the unscaled length for these


def position_limit(config: Any) -> int:
    """Tokens a model may hold: its positions, times the factor where the configuration gives the unscaled number.

    Models with a rotation per layer type (Gemma 3) give the scaled number.
    """
    limit, parameters = int(config.max_position_embeddings), config.rope_parameters
    factor = float(parameters.get("factor") or 1.0)
    if parameters.get("rope_type") in STRETCHED_TYPES:
        return int(limit * factor)
    if parameters.get("rope_type") == "yarn" and (original := parameters.get("original_max_position_embeddings")):
        return max(limit, int(original * factor))
    return limit


def make_rope(config: Any, head_size: int, max_model_len: int, layer_type: str | None = None) -> Rope:
    """The rotation of a HF configuration's layers (of one layer type where they differ). Raises ModelFormatError."""
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = parameters.get("rope_type", "default")
    if kind not in KNOWN_TYPES:
        raise ModelFormatError(f"config.json has rope_type {kind!r}; known are {', '.join(KNOWN_TYPES)}")
    theta = parameters.get("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < float("inf"):
        raise ModelFormatError(f"config.json has rope_theta {theta!r}; it must be a number above 0")
    if kind == "default":
        size = int(head_size * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, size, 2, dtype=torch.float) / size
        return Rope(1.0 / (parameters["rope_theta"] ** exponents), 1.0)
    extra = {} if layer_type is None else {"layer_type": layer_type}

    def compute(seq_len: int | None) -> tuple[torch.Tensor, float]:
        try:
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len, **extra)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelFormatError(f"config.json has unusable {kind} RoPE parameters: {error!r}") from error
        return inv_freq.float(), float(scaling)

    if kind == "dynamic":
        return Rope(*compute(max(max_model_len, int(config.max_position_embeddings))))
    if kind != "longrope":
        return Rope(*compute(None))
    switch = int(parameters["original_max_position_embeddings"])
    short, scaling = compute(None)
    if max_model_len <= switch:
        return Rope(short, scaling)
    return Rope(short, scaling, compute(switch + 1)[0], switch)
