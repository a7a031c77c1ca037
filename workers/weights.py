"""The tensors of a model folder, read one by one out of its safetensors files.

Owns names, shapes, dtypes and bytes as they lie in the files; which tensors a model wants is the model's business. Of a
folder made from a GGUF file, matrices can also be had as that file quantised them (gguf_files.py, QUANTIZED_NAME).

Invariants:
 1. Headers are checked before the files are mapped: a bad one costs neither memory nor time.
 2. A tensor that was taken has memory of its own: the files may change afterwards.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch
from safetensors import SafetensorError, safe_open

from tournant.kernels.quantized import GROUP, KINDS, ROW_BYTES
from tournant.workers.errors import ModelFormatError
from tournant.workers.model_folder import INDEX_NAME, QUANTIZED_NAME, read_index, weight_files

MAX_HEADER_BYTES = 16 << 20
MAX_DIMS = 8
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes that weights may have in a file."""

ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {"U8": 1}

HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)
"""Tensors that old checkpoints carry and no model takes: their values follow from the configuration."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a tensor: ranges of `rows` (its first axis) one after another, of each the range of `columns` (its
    second axis), None for all of them; then `padding` rows of zeros.
    """

    rows: tuple[range, ...]
    columns: range | None = None
    padding: int = 0

    def __post_init__(self) -> None:
        for part in (*self.rows, *(() if self.columns is None else (self.columns,))):
            if part.step != 1 or part.start < 0 or part.stop < part.start:
                raise ValueError(f"{part} is no ascending range of whole numbers")


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Bytes of a file."""

    file: Path
    offset: int
    num_bytes: int


class Tensors(Protocol):
    """What a model takes its weights from. See `Checkpoint`."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def take_quantized(self, name: str, shape: tuple[int, int]) -> tuple[str, torch.Tensor] | None: ...

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> FilePlace | None: ...

    @property
    def has_quantized(self) -> bool: ...

    def unused(self) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Checkpoint:
    """The tensors of a model folder by name, read when they are taken. Made by `load_checkpoint`."""

    def __init__(self, entries: dict[str, _Entry], quantized: dict[str, tuple[str, _Entry]]) -> None:
        self._entries = entries
        self._quantized = quantized
        self._files: dict[Path, Any] = {}
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises ModelFormatError when it is missing."""
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """Dtype of a tensor in its file, as safetensors has it ("BF16"). Raises ModelFormatError when it is missing."""
        return self._entry(name).dtype

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, cut: Cut | None = None) -> torch.Tensor:
        """A tensor of `shape`, or the part of it that `cut` names, as contiguous CPU memory of its own, converted to
        `dtype`. Of a part, no more than its rows' pages are read.

        Raises ModelFormatError naming the tensor when it is missing, of another shape or of a dtype that no weight can
        have, or when float16 cannot hold its values.
        """
        entry = self._entry(name)
        if entry.shape != shape:
            raise ModelFormatError(
                f"{entry.file}: tensor {name} has the shape {list(entry.shape)}; config.json makes it {list(shape)}"
            )
        if entry.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise ModelFormatError(f"{entry.file}: tensor {name} has the dtype {entry.dtype}; supported are {known}")
        stored = self._read(entry.file, name, cut)
        tensor = stored.to(dtype, copy=True)
        if dtype == torch.float16 and stored.dtype != dtype and not torch.isfinite(tensor).all():
            raise ModelFormatError(f"{entry.file}: tensor {name} exceeds float16; choose bfloat16 or float32")
        self._taken.add(name)
        return tensor

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> FilePlace | None:
        """Where a file has the bytes that `take` returns, as long as nobody changes it; None where none has them so."""
        entry = self._entries.get(name)
        if entry is None or entry.shape != shape or DTYPES.get(entry.dtype) is not dtype:
            return None
        return FilePlace(entry.file, entry.offset, prod(shape) * dtype.itemsize)

    @property
    def has_quantized(self) -> bool:
        """Whether any matrix can be had as it is quantised."""
        return bool(self._quantized)

    def take_quantized(
        self, name: str, shape: tuple[int, int], cut: Cut | None = None
    ) -> tuple[str, torch.Tensor] | None:
        """A matrix of `shape`, or the part of it that `cut` names, as its type (of KINDS) and its rows, uint8 [rows,
        bytes of a row], in memory of their own; None when it cannot be had so, as where the cut parts a group of
        columns that share a scale. Raises ModelFormatError naming the tensor when it has another shape.
        """
        columns = None if cut is None else cut.columns
        parts_groups = columns is not None and (columns.start % GROUP or columns.stop % GROUP)
        if name not in self._quantized or parts_groups:
            return None
        kind, entry = self._quantized[name]
        wanted = (shape[0], shape[1] // GROUP * ROW_BYTES[kind])
        if entry.dtype != "U8" or entry.shape != wanted or shape[1] % GROUP:
            raise ModelFormatError(
                f"{entry.file}: tensor {name}.{kind} is {entry.dtype} {list(entry.shape)}; config.json makes it U8 "
                f"{list(wanted)}"
            )
        if cut is not None and columns is not None:
            row_bytes = ROW_BYTES[kind]
            places = range(columns.start // GROUP * row_bytes, columns.stop // GROUP * row_bytes)
            cut = Cut(cut.rows, places, cut.padding)
        rows = self._read(entry.file, f"{name}.{kind}", cut)
        self._taken.add(name)
        return kind, rows.clone() if cut is None else rows

    def unused(self) -> list[str]:
        """Names that were never taken, sorted, without those known to be harmless."""
        return [name for name in self.names() if name not in self._taken and not name.endswith(HARMLESS_SUFFIXES)]

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise ModelFormatError(f"tensor {name} is missing from the checkpoint; config.json and weights do not fit")
        return self._entries[name]

    def _read(self, path: Path, name: str, cut: Cut | None) -> torch.Tensor:
        """A tensor as the file has it: mapped, or, where it is cut, in memory of its own."""
        file = self._open(path)
        if cut is None:
            whole: torch.Tensor = file.get_tensor(name)
            return whole
        source = file.get_slice(name)
        shape = source.get_shape()
        columns = () if cut.columns is None else (slice(cut.columns.start, cut.columns.stop),)
        ends = [part.stop for part in cut.rows] + ([] if cut.columns is None else [cut.columns.stop])
        sizes = [shape[0]] * len(cut.rows) + shape[1:2]
        if any(end > size for end, size in zip(ends, sizes, strict=False)):
            raise ModelFormatError(f"{path}: tensor {name} has the shape {shape}, which {cut} exceeds")
        parts = [source[(slice(part.start, part.stop), *columns)] for part in cut.rows if len(part)]
        width = () if len(shape) == 1 else (shape[1] if cut.columns is None else len(cut.columns),)
        if cut.padding or not parts:
            like = parts[0].dtype if parts else source[(slice(0, 1), *columns)].dtype
            parts.append(torch.zeros((cut.padding, *width), dtype=like))
        return torch.cat(parts)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ModelFormatError(f"{path} is damaged: {error}") from error
        return self._files[path]


def load_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint of a model folder, in one or several files; no tensor is read yet.

    Raises ModelFormatError naming the file and the tensor or field when a header is damaged or truncated, a tensor
    occurs in two files, or the index does not fit the files.
    """
    index = read_index(folder)
    entries: dict[str, _Entry] = {}
    for path in weight_files(folder):
        for name, entry in _read_header(path).items():
            if name in entries:
                raise ModelFormatError(f"{path}: tensor {name} is also in {entries[name].file.name}; remove one")
            if index is not None and index.get(name) != path.name:
                raise ModelFormatError(f"{path}: tensor {name} is not where {INDEX_NAME} has it ({index.get(name)})")
            entries[name] = entry
    for name, file in (index or {}).items():
        if name not in entries:
            raise ModelFormatError(f"{folder / INDEX_NAME}: weight_map has tensor {name}, which {file} lacks")
    return Checkpoint(entries, _quantized_rows(folder / QUANTIZED_NAME))


def _quantized_rows(path: Path) -> dict[str, tuple[str, _Entry]]:
    """Type and place by name of what can be had as it is quantised; nothing when there is no such file."""
    found: dict[str, tuple[str, _Entry]] = {}
    for full_name, entry in _read_header(path).items() if path.is_file() else ():
        name, _, kind = full_name.rpartition(".")
        if kind not in KINDS or name in found:
            raise ModelFormatError(f"{path}: tensor {full_name} occurs twice or is of no type of {', '.join(KINDS)}")
        found[name] = kind, entry
    return found


def _read_header(path: Path) -> dict[str, _Entry]:
    """Every tensor of one file; the bytes of each are known to lie inside the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= MAX_HEADER_BYTES or 8 + length > size:
            raise ModelFormatError(
                f"{path}: its header has {length} bytes (at most {MAX_HEADER_BYTES}) in a file of {size}; it is "
                "truncated or damaged"
            )
        data = file.read(length)
    try:
        header = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelFormatError(f"{path}: its header is a {type(header).__name__}, not an object of tensors by name")
    header.pop("__metadata__", None)
    return {name: _checked(path, name, item, 8 + length, size) for name, item in header.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items: dict[str, Any] = {}
    for name, item in pairs:
        if name in items:
            raise ValueError(f"{name} occurs twice")
        items[name] = item
    return items


def _checked(path: Path, name: str, item: Any, start: int, size: int) -> _Entry:
    """A tensor's entry, of a file of `size` bytes whose tensors begin at `start`."""
    where, data_bytes = f"{path}: tensor {name}", size - start
    if not isinstance(item, dict) or not isinstance(item.get("dtype"), str):
        raise ModelFormatError(f"{where}: dtype is missing")
    shape, offsets = item.get("shape"), item.get("data_offsets")
    if not _is_counts(shape) or len(shape) > MAX_DIMS:
        raise ModelFormatError(f"{where}: shape is {shape!r}; it must be a list of at most {MAX_DIMS} whole numbers")
    if not _is_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1]:
        raise ModelFormatError(f"{where}: data_offsets is {offsets!r}; it must be a start and an end")
    if offsets[1] > data_bytes:
        raise ModelFormatError(
            f"{where}: data_offsets end at {offsets[1]}, but the file has {data_bytes} bytes of tensors; it is "
            "truncated or damaged"
        )
    item_bytes = ITEM_BYTES.get(item["dtype"])
    if item_bytes is not None and prod(shape) * item_bytes != offsets[1] - offsets[0]:
        raise ModelFormatError(f"{where}: {item['dtype']} {shape} does not fill its {offsets[1] - offsets[0]} bytes")
    return _Entry(path, item["dtype"], tuple(shape), start + offsets[0])


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )
