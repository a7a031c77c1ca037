"""A model folder: what it must hold, which configurations are supported, and the identity of its weights.

Owns what is known of a folder without any library of models, since every process of an engine looks at it; which folder
a MODEL argument means is model_files.py's business, reading tensors weights.py's.

Invariants:
 1. Nothing of a model is ever executed: only JSON and safetensors files are read.
 2. weights_id depends on the names and bytes of config.json and the weight files alone, never on where they lie.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tournant.workers.errors import ModelFormatError
from tournant.workers.json_files import read_json_object
from tournant.workers.local_cache import default_cache_dir, file_digests

SUPPORTED = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
}
"""Architectures and their model_type; families.py says how each is built."""

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
PHI3_ROPE_TYPES = ("su",)  # an older name of longrope
ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh")

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"
QUANTIZED_NAME = "quantized.rows"  # safetensors by another name, or other programs would load it as weights
MAX_CONFIG_BYTES = 1 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_TOKENIZER_BYTES = 256 << 20
MAX_WEIGHT_FILES = 4096
ID_TAG = b"tournant-weights-1"

_SIZES = {
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 28,
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_OTHER_INPUTS = ("vision_config", "audio_config", "text_config", "speech_config")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model ready to be loaded: `folder` holds config.json, *.safetensors and tokenizer files; `name` is what it is
    served as unless told otherwise; `weights_id` is 32 bytes."""

    folder: Path
    name: str
    weights_id: bytes


def check_folder(folder: Path) -> None:
    """Raises ModelFormatError unless config.json is supported, weights are there and no file is beyond its limit."""
    check_supported(read_config(folder))
    weight_files(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"):
        path = folder / name
        if path.is_file() and path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ModelFormatError(f"{path} has {path.stat().st_size} bytes; at most {MAX_TOKENIZER_BYTES} are allowed")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises ModelFormatError when it is missing, too large or not a JSON object."""
    return read_json_object(folder / CONFIG_NAME, MAX_CONFIG_BYTES)


def check_supported(config: dict[str, Any]) -> None:
    """Raises ModelFormatError with a plain reason unless this configuration can be served as it is."""
    names, kind = config.get("architectures"), config.get("model_type")
    if names is not None and (not isinstance(names, list) or not all(isinstance(name, str) for name in names)):
        raise ModelFormatError(f"config.json: architectures is {names!r}; it must be a list of names")
    known = f"known are {', '.join(sorted(SUPPORTED))}"
    for key in _EXPERTS:
        if config.get(key) not in (None, 0, 1):
            raise ModelFormatError(f"config.json: {key} is {config[key]!r}: mixture-of-experts is unsupported; {known}")
    for key in _OTHER_INPUTS:
        if config.get(key) is not None:
            raise ModelFormatError(f"config.json has a {key}; only text-only models are supported; {known}")
    if names and not SUPPORTED.keys() & set(names):
        raise ModelFormatError(f"config.json: architecture {', '.join(names)} is not supported; {known}")
    if not isinstance(kind, str) or kind not in SUPPORTED.values():
        types = ", ".join(sorted(SUPPORTED.values()))
        raise ModelFormatError(f"config.json: model_type is {kind!r}; known are {types}")
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelFormatError(
            f"config.json: weights quantised by {method!r} (quantization_config) are not supported; take the "
            "unquantised model or a GGUF file"
        )
    activation = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ModelFormatError(f"config.json: activation is {activation!r}; known are {', '.join(ACTIVATIONS)}")
    _check_sizes(config)
    _check_rope(config)


def _check_sizes(config: dict[str, Any]) -> None:
    for key, limit in _SIZES.items():
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit):
            raise ModelFormatError(f"config.json: {key} is {value!r}; it must be a whole number from 1 to {limit}")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if config.get(key) is None:
            raise ModelFormatError(f"config.json: {key} is missing")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelFormatError(
            f"config.json: num_attention_heads, {heads}, is no multiple of num_key_value_heads, {kv_heads}"
        )
    if config.get("head_dim") is None and config["hidden_size"] % heads:
        raise ModelFormatError(
            f"config.json: hidden_size, {config['hidden_size']}, is no multiple of num_attention_heads, {heads}"
        )


def _check_rope(config: dict[str, Any]) -> None:
    known = ROPE_TYPES + (PHI3_ROPE_TYPES if config["model_type"] == "phi3" else ())
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise ModelFormatError(f"config.json: {key} is {rope!r}; it must be an object or null")
        sets = [value for value in rope.values() if isinstance(value, dict) and "rope_type" in value] or [rope]
        for parameters in sets:
            kind = parameters.get("rope_type", parameters.get("type", "default"))
            if kind not in known:
                raise ModelFormatError(f"config.json: {key} has the type {kind!r}; known are {', '.join(known)}")
            _check_partial(parameters.get("partial_rotary_factor"), config)
    _check_partial(config.get("partial_rotary_factor"), config)


def _check_partial(factor: Any, config: dict[str, Any]) -> None:
    if factor is None or factor in (1, 1.0):
        return
    if config["model_type"] != "phi3":
        raise ModelFormatError(f"config.json: partial_rotary_factor is {factor!r}; only Phi-3's may differ from 1.0")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 1:
        raise ModelFormatError(f"config.json: partial_rotary_factor is {factor!r}; it must be above 0 and at most 1")


def read_index(folder: Path) -> dict[str, str] | None:
    """File name by tensor name of a sharded checkpoint; None when the folder has no index.

    Raises ModelFormatError naming the index and the entry when that is not the plain name of a safetensors file there.
    """
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    index = read_json_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ModelFormatError(f"{path}: weight_map must be an object of file names by tensor name")
    for tensor, name in index.items():
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ModelFormatError(
                f"{path}: weight_map of tensor {tensor[:200]!r} is {str(name)[:200]!r}; it must be the name of a "
                ".safetensors file in the same folder"
            )
    for name in sorted(set(index.values())):
        if not (folder / name).is_file():
            raise ModelFormatError(f"{path}: weight_map names {name}, which is missing; fetch the model again")
    return index


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, sorted by name: those of the index, else model.safetensors alone,
    else all there are. Raises ModelFormatError when there is none."""
    index = read_index(folder)
    if index is not None:
        files = [folder / name for name in sorted(set(index.values()))]
    elif (folder / WEIGHTS_NAME).is_file():
        files = [folder / WEIGHTS_NAME]
    else:
        files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if not files:
        raise ModelFormatError(f"{folder} has no *.safetensors file (pickled .bin or .pt weights are never loaded)")
    if len(files) > MAX_WEIGHT_FILES:
        raise ModelFormatError(f"{folder} has {len(files)} weight files; at most {MAX_WEIGHT_FILES} are allowed")
    return files


def weights_id(folder: Path, cache_dir: Path) -> bytes:
    """SHA-256 over the name and the SHA-256 of the bytes of config.json and each weight file, in order of name, every
    part with its length before it. Files that have not changed since they were last read are not read again."""
    quantized = [path for path in (folder / QUANTIZED_NAME,) if path.is_file()]
    files = sorted({folder / CONFIG_NAME, *weight_files(folder), *quantized}, key=lambda path: path.name)
    hasher = hashlib.sha256(_framed(ID_TAG))
    for path, digest in zip(files, file_digests(files, cache_dir), strict=True):
        hasher.update(_framed(path.name.encode()) + _framed(digest))
    return hasher.digest()


def check_unchanged(files: ModelFiles, cache_dir: Path | None) -> None:
    """Raises ModelFormatError when a folder has other weights than when it was resolved, or none that can be read as a
    whole, and OSError when the disk fails. cache_dir: as of `resolve_model`.
    """
    found = weights_id(files.folder, cache_dir if cache_dir is not None else default_cache_dir())
    if found != files.weights_id:
        raise ModelFormatError(
            f"{files.folder} was overwritten: its weights are {found.hex()[:12]} now and were "
            f"{files.weights_id.hex()[:12]}; restart to serve what is there now, or give new weights a new path and "
            "run 'tournant weights update'"
        )


def _framed(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data
