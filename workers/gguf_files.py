"""One .gguf file made into a model folder (config.json, model.safetensors, tokenizer files), once per machine.

Beside the weights in the folder's dtype, rows that can be multiplied as they are quantised lie in QUANTIZED_NAME, as
the file has them but in the folder's order: uint8 [rows, bytes of a row], under the tensor's name, a dot and the type.

Owns the converted folders of the cache and how weights get into them. The bytes of the header are gguf_header.py's,
what they mean for a model gguf_architectures.py's, and for its tokenizer gguf_tokenizer.py's.

Invariants:
 1. A converted folder is complete or absent: it is written aside under a lock, synced and renamed. What a killed
    conversion left behind is swept by the next one.
 2. The folder's name holds the digest of the file, the dtype and FORMAT_VERSION: change what is written, change that.
 3. Memory stays bounded by the header, CHUNK_ELEMENTS and the tokenizer, whatever the size of the model.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from gguf import dequantize

from tournant.kernels.quantized import can_pack
from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.gguf_architectures import Wanted, read_config, wanted_tensors
from tournant.workers.gguf_header import GGUFHeader, GGUFTensor, read_gguf_header
from tournant.workers.gguf_tokenizer import write_tokenizer
from tournant.workers.local_cache import exclusive, file_digests, file_stamp, private_folder
from tournant.workers.model_folder import QUANTIZED_NAME

FORMAT_VERSION = 3
LARGEST = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0, "float32": 3.4028234663852886e38}
"""Dtypes a folder can have, each with its largest finite value."""

CHUNK_ELEMENTS = 1 << 21
LOCK_WAIT_S = 1800.0
SPARE_BYTES = 256 << 20  # left free on the disk beside a conversion

_DTYPE_TAGS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

Progress = Callable[[str], None]


def convert_gguf(path: Path, dtype: str, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The folder that holds the model of `path` with weights in `dtype`; converts on first use.

    dtype: "bfloat16", "float16" or "float32". progress: called with a line of text before and during long work.
    Raises ModelFormatError naming the tensor or field when the file is damaged or of an unknown kind, ConfigError when
    the disk is too full, OSError when a file cannot be read or written (TimeoutError: the lock is not free within 30
    minutes). On failure nothing of the conversion is left behind.
    """
    if dtype not in LARGEST:
        raise ConfigError(f"dtype is {dtype!r}; a GGUF file can be converted to {', '.join(LARGEST)}")
    tell = progress or (lambda line: None)
    stamp = file_stamp(path.stat())
    header = read_gguf_header(path)
    config = read_config(header, dtype)
    tensors = wanted_tensors(header, config)
    (digest,) = file_digests([path], cache_dir)
    root = private_folder(cache_dir / "converted")
    target = root / f"{digest.hex()}-{dtype}-{FORMAT_VERSION}"
    if target.is_dir():
        return target
    with exclusive(root / "lock", LOCK_WAIT_S, lambda: tell("waiting for another process that converts a model")):
        for leftover in root.glob("tmp-*"):
            shutil.rmtree(leftover)
        if target.is_dir():
            return target
        _check_space(root, header, tensors, dtype)
        folder = Path(tempfile.mkdtemp(prefix="tmp-", dir=root))  # mode 0700
        try:
            tell(f"converting {path.name} to {dtype} (once)")
            ends = write_tokenizer(header, config, folder)
            _write_weights(header, tensors, dtype, folder / "model.safetensors", tell)
            _write_quantized(header, tensors, folder / QUANTIZED_NAME)
            _write_json(folder / "config.json", config)
            _write_json(folder / "generation_config.json", _generation_config(config, ends))
            if file_stamp(path.stat()) != stamp:
                raise ModelFormatError(f"{path} changed while it was being converted; start again when it is complete")
            _sync(folder)
            os.rename(folder, target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return target


def _write_weights(header: GGUFHeader, tensors: dict[str, Wanted], dtype: str, target: Path, tell: Progress) -> None:
    """All tensors in `dtype`."""
    entries = {
        name: (tensor.name, _DTYPE_TAGS[dtype], tensor.shape, int(np.prod(tensor.shape)) * _ITEM_BYTES[dtype])
        for name, tensor in tensors.items()
    }
    end = sum(num_bytes for *_, num_bytes in entries.values())
    written, told = 0, 0
    with header.path.open("rb") as source, target.open("wb") as sink:
        sink.write(_safetensors_head(entries.values()))
        for name, tensor in tensors.items():
            for values in _pieces(source, header.tensors[name], tensor):
                piece = _encode(values, dtype, f"{header.path}: tensor {name}")
                sink.write(piece.data)
                written += piece.nbytes
            if written * 10 // end > told:
                told = written * 10 // end
                tell(f"converting {header.path.name} to {dtype} (once): {told * 10} %")


def _write_quantized(header: GGUFHeader, tensors: dict[str, Wanted], target: Path) -> None:
    """The rows of the tensors that `_is_packable`; no file when there are none."""
    chosen = {name: tensor for name, tensor in tensors.items() if _is_packable(header.tensors[name], tensor)}
    entries = []
    for name, tensor in chosen.items():
        found = header.tensors[name]
        shape = (found.shape[0], found.num_bytes // found.shape[0])
        entries.append((f"{tensor.name}.{found.type.name}", "U8", shape, found.num_bytes))
    if not entries:
        return
    with header.path.open("rb") as source, target.open("wb") as sink:
        sink.write(_safetensors_head(entries))
        for name, tensor in chosen.items():
            for rows in _raw_pieces(source, header.tensors[name], tensor):
                sink.write(np.ascontiguousarray(rows).data)


def _is_packable(found: GGUFTensor, wanted: Wanted) -> bool:
    return len(found.shape) == 2 and not wanted.offset and can_pack(found.type.name, found.shape[1])


def _safetensors_head(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """What precedes the bytes of tensors (name, dtype, shape, bytes): 8 bytes of length and a JSON header."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tag, shape, num_bytes in tensors:
        start, end = end, end + num_bytes
        entries[name] = {"dtype": tag, "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head


def _pieces(source: BinaryIO, tensor: GGUFTensor, wanted: Wanted) -> Iterator[npt.NDArray[np.float32]]:
    """The tensor's values as float32 [rows, columns], some rows at a time, in the order of the folder's weights."""
    for raw in _raw_pieces(source, tensor, wanted):
        with np.errstate(all="ignore"):  # what is not finite is refused by _encode
            values = dequantize(raw, tensor.type).reshape(len(raw), -1)
            yield values - np.float32(wanted.offset) if wanted.offset else values


def _raw_pieces(source: BinaryIO, tensor: GGUFTensor, wanted: Wanted) -> Iterator[npt.NDArray[np.uint8]]:
    """The tensor's bytes [rows, bytes of a row], some rows at a time, in the order of the folder's weights."""
    heads = wanted.heads
    rows = tensor.shape[0] if len(tensor.shape) > 1 or heads else 1  # a bias in heads: rows of one element
    columns = int(np.prod(tensor.shape)) // rows
    row_bytes = tensor.num_bytes // rows
    unit = rows // heads if heads else 1  # the rows of a head stay together
    step = max(1, CHUNK_ELEMENTS // (columns * unit)) * unit
    source.seek(tensor.offset)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        raw = np.frombuffer(source.read(count * row_bytes), dtype=np.uint8)
        if raw.size != count * row_bytes:
            raise ModelFormatError(f"{source.name}: it became shorter while tensor {tensor.name} was being read")
        raw = raw.reshape(count, row_bytes)
        if heads:  # GGUF: rows (i, half) of a head; here: rows (half, i), i = 0 .. head size / 2
            raw = raw.reshape(-1, unit // 2, 2, row_bytes).swapaxes(1, 2).reshape(count, row_bytes)
        yield raw


def _encode(values: npt.NDArray[np.float32], dtype: str, where: str) -> npt.NDArray[Any]:
    """`values` in `dtype` (bfloat16 as its bits), rounded to nearest even. Raises ModelFormatError beyond its range."""
    peak = np.maximum(values.max(), -values.min())  # NaN when one is among them
    if not peak <= LARGEST[dtype]:
        found = f"values up to {peak:g}" if np.isfinite(peak) else "NaN or infinity"
        raise ModelFormatError(f"{where} holds {found}; {dtype} ends at {LARGEST[dtype]:g}")
    if dtype == "float32":
        return np.ascontiguousarray(values)
    if dtype == "float16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def _generation_config(config: dict[str, Any], ends: list[int]) -> dict[str, Any]:
    others = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config[key] is not None}
    return {**others, "eos_token_id": ends}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _check_space(root: Path, header: GGUFHeader, tensors: dict[str, Wanted], dtype: str) -> None:
    needed = sum(int(np.prod(tensor.shape)) for tensor in tensors.values()) * _ITEM_BYTES[dtype] + SPARE_BYTES
    needed += sum(
        header.tensors[name].num_bytes for name, tensor in tensors.items() if _is_packable(header.tensors[name], tensor)
    )
    free = shutil.disk_usage(root).free
    if free < needed:
        raise ConfigError(f"the cache folder {root} has {free} bytes free, this model needs {needed}; choose another")


def _sync(folder: Path) -> None:
    """Force the folder's files to disk, so that after a power cut the renamed folder is not full of holes."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
