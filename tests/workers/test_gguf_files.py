from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Type
from gguf import dequantize
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers import tiny_gguf
from tests.helpers.reference import _load as load_reference  # stays loaded for all tests of a run
from tests.helpers.tiny_gguf import SMALL, WIDE, build_tiny_gguf
from tournant.kernels.quantized import KINDS
from tournant.workers import gguf_files
from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.gguf_architectures import TENSOR_TYPES
from tournant.workers.gguf_files import convert_gguf
from tournant.workers.model_files import default_model_path
from tournant.workers.model_folder import QUANTIZED_NAME

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def without(*names: str) -> Callable[[Path], Any]:
    return lambda path: build_tiny_gguf(path, without=names)


def with_field(key: str, value: Any, kind: Type) -> Callable[[Path], Any]:
    return lambda path: build_tiny_gguf(path, fields={key: (value, kind)})


def with_values(name: str, value: np.ndarray[Any, Any]) -> Callable[[Path], Any]:
    return lambda path: build_tiny_gguf(path, values={name: value.astype(np.float32)})


BAD_MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no architecture": (without("general.architecture"), "field general.architecture is missing"),
    "architecture": (with_field("general.architecture", "mamba", Type.STRING), "architecture 'mamba' is not supported"),
    "experts": (with_field("llama.expert_count", 8, Type.UINT32), "field llama.expert_count is 8; only 0 is supported"),
    "one of several": (with_field("split.count", 3, Type.UINT16), "it is one of 3 files"),
    "no layers": (without("llama.block_count"), "field llama.block_count is missing"),
    "too many layers": (with_field("llama.block_count", 1 << 31, Type.UINT32), "llama.block_count is 2147483648"),
    "layers as text": (with_field("llama.block_count", "2", Type.STRING), "field llama.block_count is '2'"),
    "no tokens": (without("tokenizer.ggml.tokens"), "field tokenizer.ggml.tokens is missing"),
    "no context": (without("llama.context_length"), "field llama.context_length is missing"),
    "no epsilon": (without("llama.attention.layer_norm_rms_epsilon"), "layer_norm_rms_epsilon is missing"),
    "NaN epsilon": (
        with_field("llama.attention.layer_norm_rms_epsilon", float("nan"), Type.FLOAT32),
        "layer_norm_rms_epsilon is nan",
    ),
    "heads": (with_field("llama.attention.head_count_kv", 3, Type.UINT32), "do not divide evenly over the 3 KV heads"),
    "hidden size": (
        with_field("llama.embedding_length", 66, Type.UINT32),
        "is 66; it must be a multiple of the 4 heads",
    ),
    "no heads": (with_field("llama.attention.head_count", 0, Type.UINT32), "field llama.attention.head_count is 0"),
    "part of a head": (with_field("llama.rope.dimension_count", 8, Type.UINT32), "llama.rope.dimension_count is 8"),
    "end token": (with_field("tokenizer.ggml.eos_token_id", 262, Type.UINT32), "tokenizer.ggml.eos_token_id is 262"),
    "rope": (with_field("llama.rope.scaling.type", "dynamic", Type.STRING), "llama.rope.scaling.type is dynamic"),
    "yarn": (with_field("llama.rope.scaling.type", "yarn", Type.STRING), "field llama.rope.scaling.factor is missing"),
    "missing tensor": (without("blk.1.ffn_up.weight"), "tensor blk.1.ffn_up.weight is missing"),
    "unknown tensor": (
        lambda path: build_tiny_gguf(path, extra={"blk.0.attn_q.bias": np.zeros(64, np.float32)}),
        "tensor blk.0.attn_q.bias is not part of a llama",
    ),
    "shape": (
        with_values("blk.0.attn_v.weight", np.zeros((64, 64))),
        "tensor blk.0.attn_v.weight has the shape [64, 64]; the metadata make it [32, 64]",
    ),
    "tensor type": (
        lambda path: build_tiny_gguf(path, kinds={"blk.0.ffn_gate.weight": Kind.TQ2_0}, shape=WIDE),
        "tensor blk.0.ffn_gate.weight has type TQ2_0; supported are F32, F16, BF16, Q8_0, Q4_0",
    ),
    "norm type": (
        lambda path: build_tiny_gguf(path, kinds={"output_norm.weight": Kind.Q8_0}),
        "tensor output_norm.weight has type Q8_0; supported are F32, F16, BF16",
    ),
    "NaN": (with_values("output_norm.weight", np.full(64, np.nan)), "tensor output_norm.weight holds NaN or infinity"),
    "range": (with_values("output_norm.weight", np.full(64, -3.4e38)), "output_norm.weight holds values up to 3.4e+38"),
    "frequencies": (
        lambda path: build_tiny_gguf(path, extra={"rope_freqs.weight": np.zeros(8, np.float32)}),
        "tensor rope_freqs.weight holds values outside",
    ),
    "frequencies of two types": (
        lambda path: build_tiny_gguf(
            path, extra={f"rope_{name}.weight": np.ones(8, np.float32) for name in ("freqs", "factors_long")}
        ),
        "tensors rope_factors_long.weight, rope_freqs.weight are of different RoPE types",
    ),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_model_that_cannot_be_used(tmp_path: Path, name: str) -> None:
    build, message = BAD_MODELS[name]
    path = tmp_path / "bad.gguf"
    build(path)
    with pytest.raises(ModelFormatError) as caught:
        convert_gguf(path, "bfloat16", tmp_path / "cache")
    assert message in str(caught.value)
    assert [entry.name for entry in (tmp_path / "cache").glob("converted/*")] in ([], ["lock"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", TENSOR_TYPES, ids=lambda kind: kind.name)
def test_tensors_of_every_type(tmp_path: Path, kind: Kind, dtype: str) -> None:
    """What the gguf package dequantises, in the wanted dtype, under Hugging Face names and in their row order."""
    path = tmp_path / "tiny.gguf"
    expected = build_tiny_gguf(path, kind=kind, shape=WIDE)
    folder = convert_gguf(path, dtype, tmp_path)
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], torch.from_numpy(values).to(DTYPES[dtype]), rtol=0, atol=0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == DTYPES[dtype]
    assert torch.equal(model.state_dict()["lm_head.weight"], found["lm_head.weight"])


@pytest.mark.parametrize(("kind", "shape"), [(Kind.Q4_1, SMALL), (Kind.Q6_K, WIDE)])
def test_pieces_join_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, shape: tiny_gguf.Shape
) -> None:
    """Tensors larger than a piece are put together without a seam, heads whole."""
    path = tmp_path / "tiny.gguf"
    expected = build_tiny_gguf(path, kind=kind, shape=shape)
    monkeypatch.setattr(gguf_files, "CHUNK_ELEMENTS", 7 * shape.hidden)
    found = load_file(convert_gguf(path, "float32", tmp_path) / "model.safetensors")
    for name, values in expected.items():
        assert torch.equal(found[name], torch.from_numpy(values))


@pytest.mark.parametrize("kind", TENSOR_TYPES, ids=lambda kind: kind.name)
def test_rows_as_they_are_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    """Beside the dequantised weights, in the same order of rows; only matrices of types that can be multiplied so."""
    monkeypatch.setattr(gguf_files, "CHUNK_ELEMENTS", 7 * WIDE.hidden)
    path = tmp_path / "tiny.gguf"
    expected = build_tiny_gguf(path, kind=kind, kinds={"blk.1.ffn_up.weight": Kind.F16}, shape=WIDE)
    found = convert_gguf(path, "float32", tmp_path) / QUANTIZED_NAME
    if kind.name not in KINDS:
        assert not found.exists()
        return
    rows = load_file(found)
    matrices = {name for name, values in expected.items() if values.ndim == 2} - {"model.layers.1.mlp.up_proj.weight"}
    assert rows.keys() == {f"{name}.{kind.name}" for name in matrices}
    for name in matrices:
        assert np.array_equal(dequantize(rows[f"{name}.{kind.name}"].numpy(), kind), expected[name]), name


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    build_tiny_gguf(path, values={"output_norm.weight": np.full(64, 1e5, np.float32)})
    assert convert_gguf(path, "bfloat16", tmp_path).is_dir()
    with pytest.raises(ModelFormatError, match=r"output_norm.weight holds values up to 100000; float16 ends at 65504"):
        convert_gguf(path, "float16", tmp_path)


def test_configuration(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    build_tiny_gguf(path, fields={"tokenizer.ggml.eot_token_id": (0, Type.UINT32)})
    folder = convert_gguf(path, "float16", tmp_path)
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == ["LlamaForCausalLM"]
    sizes = (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size)
    assert sizes == (SMALL.hidden, SMALL.inner, SMALL.layers, tiny_gguf.VOCAB_SIZE)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert heads == (SMALL.heads, SMALL.kv_heads, SMALL.head_size)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 50000.0}
    assert (config.rms_norm_eps, config.max_position_embeddings, config.tie_word_embeddings) == (1e-5, 512, False)
    assert (config.bos_token_id, config.eos_token_id, config.dtype) == (1, 2, torch.float16)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0]}


def test_output_left_out_means_tied_embeddings(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    expected = build_tiny_gguf(path, without=("output.weight",))
    model = AutoModelForCausalLM.from_pretrained(convert_gguf(path, "float32", tmp_path))
    assert model.config.tie_word_embeddings
    assert torch.equal(model.lm_head.weight, torch.from_numpy(expected["model.embed_tokens.weight"]))


def test_a_file_is_converted_once(tmp_path: Path) -> None:
    """Two at once and one afterwards; what a killed conversion left is swept, and nobody else can read the folder."""
    path, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    build_tiny_gguf(path)
    leftover = cache / "converted" / "tmp-killed"
    leftover.mkdir(parents=True, mode=0o700)
    (leftover / "model.safetensors").write_bytes(b"half")
    lines: list[str] = []
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(convert_gguf(path, "float16", cache, lines.append)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    folders.append(convert_gguf(path, "float16", cache, lines.append))
    assert len(set(folders)) == 1
    assert lines.count("converting tiny.gguf to float16 (once)") == 1
    assert "converting tiny.gguf to float16 (once): 100 %" in lines
    assert sorted(entry.name for entry in (cache / "converted").iterdir()) == sorted([folders[0].name, "lock"])
    assert folders[0].stat().st_mode & 0o777 == 0o700
    assert {entry.name for entry in folders[0].iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_other_bytes_and_other_dtypes_get_other_folders(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    build_tiny_gguf(path)
    folders = {convert_gguf(path, "float16", tmp_path), convert_gguf(path, "bfloat16", tmp_path)}
    build_tiny_gguf(path, values={"output_norm.weight": np.ones(64, np.float32)})
    folders.add(convert_gguf(path, "float16", tmp_path))
    assert len(folders) == 3
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        convert_gguf(path, "int8", tmp_path)


def test_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    build_tiny_gguf(path)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_files, "_write_weights", no_space)
    with pytest.raises(OSError, match="No space left"):
        convert_gguf(path, "float16", tmp_path)
    assert [entry.name for entry in (tmp_path / "converted").iterdir()] == ["lock"]
    monkeypatch.setattr(gguf_files, "SPARE_BYTES", 1 << 60)
    with pytest.raises(ConfigError, match=r"has \d+ bytes free, this model needs 11529\d+"):
        convert_gguf(path, "float16", tmp_path)


def test_file_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    build_tiny_gguf(path)
    write = gguf_files._write_weights

    def write_and_touch(*arguments: Any) -> None:
        write(*arguments)
        path.write_bytes(path.read_bytes())

    monkeypatch.setattr(gguf_files, "_write_weights", write_and_touch)
    with pytest.raises(ModelFormatError, match="changed while it was being converted"):
        convert_gguf(path, "float16", tmp_path)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_gguf(default_model_path(), "float32", tmp_path_factory.mktemp("smollm2"))


def test_smollm2_weights_are_those_of_transformers(smollm2: Path) -> None:
    reference = load_reference(default_model_path().resolve())
    found = load_file(smollm2 / "model.safetensors")
    expected = dict(reference.state_dict())
    assert expected.pop("lm_head.weight").data_ptr() == expected["model.embed_tokens.weight"].data_ptr()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
    config, other = AutoConfig.from_pretrained(smollm2), reference.config
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for key in (*sizes, "head_dim", "vocab_size", "max_position_embeddings", "rope_parameters", "tie_word_embeddings"):
        assert getattr(config, key) == getattr(other, key), key
    assert np.float32(config.rms_norm_eps) == np.float32(other.rms_norm_eps)
