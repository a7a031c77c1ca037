from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tournant.workers.errors import ModelFormatError
from tournant.workers.model_folder import INDEX_NAME, QUANTIZED_NAME
from tournant.workers.weights import Checkpoint, load_checkpoint

DATA = bytes(range(64))
GOOD = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}


def write(path: Path, header: Any, data: bytes = DATA, length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


@pytest.fixture
def sharded(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of three tensors in two files with an index."""
    random = torch.Generator().manual_seed(1)
    tensors = {
        "a": torch.randn(3, 5, generator=random),
        "b": torch.randn(4, generator=random).bfloat16(),
        "c.rotary_emb.inv_freq": torch.randn(2, generator=random),
    }
    places = {"a": "x-1.safetensors", "b": "x-2.safetensors", "c.rotary_emb.inv_freq": "x-2.safetensors"}
    for file in set(places.values()):
        save_file({name: value for name, value in tensors.items() if places[name] == file}, tmp_path / file)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return tmp_path, tensors


def test_sharded_checkpoint(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, tensors = sharded
    checkpoint = load_checkpoint(folder)
    assert checkpoint.names() == sorted(tensors)
    assert (checkpoint.shape("a"), checkpoint.dtype("a"), checkpoint.dtype("b")) == ((3, 5), "F32", "BF16")
    assert "a" in checkpoint
    assert "z" not in checkpoint
    assert checkpoint.unused() == ["a", "b"]
    assert torch.equal(checkpoint.take("a", (3, 5), torch.float32), tensors["a"])
    assert torch.equal(checkpoint.take("b", (4,), torch.float32), tensors["b"].float())
    assert checkpoint.unused() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_converted_as_torch_does(tmp_path: Path, dtype: torch.dtype) -> None:
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    tensors = {str(kind): torch.randn(33, generator=torch.Generator().manual_seed(2)).to(kind) for kind in kinds}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = load_checkpoint(tmp_path)
    for name, values in tensors.items():
        found = checkpoint.take(name, (33,), dtype)
        assert found.dtype == dtype
        assert torch.equal(found, values.to(dtype))


def test_tensors_outlive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    found = load_checkpoint(tmp_path).take("a", (1000,), torch.float32)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(found, torch.ones(1000))


def test_tensor_that_does_not_fit(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, 5), "ids": torch.ones(4, dtype=torch.int64), "large": torch.full((2,), 1e5)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = load_checkpoint(tmp_path)
    with pytest.raises(ModelFormatError, match=r"tensor b is missing"):
        checkpoint.take("b", (1,), torch.float32)
    with pytest.raises(ModelFormatError, match=r"model.safetensors: tensor a has the shape \[3, 5\];.* it \[5, 3\]"):
        checkpoint.take("a", (5, 3), torch.float32)
    with pytest.raises(ModelFormatError, match=r"tensor ids has the dtype I64; supported are F64, F32, F16, BF16"):
        checkpoint.take("ids", (4,), torch.float32)
    with pytest.raises(ModelFormatError, match=r"tensor large exceeds float16; choose bfloat16 or float32"):
        checkpoint.take("large", (2,), torch.float16)
    assert checkpoint.unused() == ["a", "ids", "large"]


BAD_HEADERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "its header has 0 bytes"),
    "short": (lambda path: path.write_bytes(b"\1\2\3"), "its header has 0 bytes"),
    "header length": (lambda path: write(path, {"a": GOOD}, length=1 << 40), "its header has 1099511627776 bytes"),
    "header beyond the end": (lambda path: write(path, {"a": GOOD}, length=5000), "its header has 5000 bytes"),
    "not JSON": (lambda path: write(path, b'{"a": '), "its header is not JSON"),
    "not UTF-8": (lambda path: write(path, b'{"\xff": 1}'), "its header is not JSON"),
    "deep": (lambda path: write(path, b"[" * 100_000), "its header is not JSON"),
    "list": (lambda path: write(path, [1, 2]), "its header is a list"),
    "tensor twice": (
        lambda path: write(path, b'{"a": %b, "a": %b}' % ((json.dumps(GOOD).encode(),) * 2)),
        "its header is not JSON: a occurs twice",
    ),
    "no dtype": (lambda path: write(path, {"a": {"shape": [4]}}), "tensor a: dtype is missing"),
    "entry": (lambda path: write(path, {"a": 7}), "tensor a: dtype is missing"),
    "shape": (lambda path: write(path, {"a": GOOD | {"shape": [-4, -4]}}), "tensor a: shape is [-4, -4]"),
    "many dimensions": (lambda path: write(path, {"a": GOOD | {"shape": [1] * 9}}), "tensor a: shape is"),
    "shape overflow": (lambda path: write(path, {"a": GOOD | {"shape": [1 << 62, 64]}}), "does not fill its 64 bytes"),
    "other shape": (lambda path: write(path, {"a": GOOD | {"shape": [4, 5]}}), "tensor a: F32 [4, 5] does not fill"),
    "offsets": (lambda path: write(path, {"a": GOOD | {"data_offsets": [64, 0]}}), "a: data_offsets is [64, 0]"),
    "one offset": (lambda path: write(path, {"a": GOOD | {"data_offsets": [64]}}), "tensor a: data_offsets is [64]"),
    "truncated": (lambda path: write(path, {"a": GOOD}, DATA[:50]), "data_offsets end at 64, but the file has 50"),
    "overlap": (lambda path: write(path, {"a": GOOD, "b": GOOD}), "is damaged: Error while deserializing header"),
    "hole": (
        lambda path: write(path, {"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}),
        "is damaged: Error while deserializing header",
    ),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_damaged_file(tmp_path: Path, name: str) -> None:
    build, message = BAD_HEADERS[name]
    path = tmp_path / "model.safetensors"
    build(path)
    with pytest.raises(ModelFormatError) as caught:
        _take_all(load_checkpoint(tmp_path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def _take_all(checkpoint: Checkpoint) -> None:
    for name in checkpoint.names():
        checkpoint.take(name, checkpoint.shape(name), torch.float32)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "x-1.safetensors", "b": "x-9.safetensors"}, "weight_map names x-9.safetensors, which is missing"),
        ({"a": "../x-1.safetensors"}, "weight_map of tensor 'a' is '../x-1.safetensors'"),
        ({"a": "/etc/passwd"}, "weight_map of tensor 'a' is '/etc/passwd'"),
        ({"a": "..\\x-1.safetensors"}, "weight_map of tensor 'a' is"),
        ({"a": "pytorch_model.bin"}, "weight_map of tensor 'a' is 'pytorch_model.bin'"),
        ({"a": ["x-1.safetensors"]}, "weight_map of tensor 'a' is"),
        ({"a": ""}, "weight_map of tensor 'a' is ''"),
        ({}, "weight_map must be an object of file names"),
        (["x-1.safetensors"], "weight_map must be an object of file names"),
        ({"a": "x-2.safetensors", "b": "x-2.safetensors"}, "tensor c.rotary_emb.inv_freq is not where"),
        (
            {"a": "x-1.safetensors", "z": "x-1.safetensors"},
            "weight_map has tensor z, which x-1.safetensors lacks",
        ),
    ],
)
def test_bad_index(sharded: tuple[Path, dict[str, torch.Tensor]], weight_map: Any, message: str) -> None:
    folder, _ = sharded
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelFormatError) as caught:
        load_checkpoint(folder)
    assert message in str(caught.value)
    assert INDEX_NAME in str(caught.value)


def test_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("p.safetensors", "q.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / name)
    with pytest.raises(ModelFormatError, match=r"q.safetensors: tensor a is also in p.safetensors"):
        load_checkpoint(tmp_path)


def test_a_folder_without_index_is_one_file_where_that_is_clear(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    assert torch.equal(load_checkpoint(tmp_path).take("a", (2,), torch.float32), torch.ones(2))


def test_quantised_rows(tmp_path: Path) -> None:
    """Where the folder has them, beside the same tensor in its dtype; taking either counts as use."""
    rows = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    save_file({"a": torch.ones(3, 64), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    assert not load_checkpoint(tmp_path).has_quantized
    save_file({"a.Q4_1": rows}, tmp_path / QUANTIZED_NAME)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.has_quantized
    assert checkpoint.names() == ["a", "b"]
    assert checkpoint.take_quantized("b", (2, 32)) is None
    kind, found = checkpoint.take_quantized("a", (3, 64)) or ("", torch.empty(0))
    assert kind == "Q4_1"
    assert torch.equal(found, rows)
    assert checkpoint.unused() == ["b"]
    for shape in ((3, 32), (4, 64), (3, 65)):
        with pytest.raises(ModelFormatError, match=r"tensor a.Q4_1 is U8 \[3, 40\]; config.json makes it U8"):
            checkpoint.take_quantized("a", shape)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a.Q6_K": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}, "a.Q6_K occurs twice or is of no type"),
        ({"a": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}, "tensor a occurs twice or is of no type of"),
        (
            {
                "a.Q4_0": {"dtype": "U8", "shape": [18], "data_offsets": [0, 18]},
                "a.Q4_1": {"dtype": "U8", "shape": [20], "data_offsets": [18, 38]},
            },
            "tensor a.Q4_1 occurs twice",
        ),
        ({"a.Q4_0": {"dtype": "U8", "shape": [65], "data_offsets": [0, 64]}}, "does not fill its 64 bytes"),
        ({"a.Q4_0": {"dtype": "U8", "shape": [65], "data_offsets": [0, 65]}}, "truncated or damaged"),
    ],
)
def test_damaged_quantised_rows(tmp_path: Path, header: dict[str, Any], message: str) -> None:
    save_file({"a": torch.ones(3, 64)}, tmp_path / "model.safetensors")
    write(tmp_path / QUANTIZED_NAME, header)
    with pytest.raises(ModelFormatError) as caught:
        load_checkpoint(tmp_path)
    assert message in str(caught.value)
    assert QUANTIZED_NAME in str(caught.value)
