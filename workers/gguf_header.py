"""The header of a GGUF file, read without trusting it: metadata, and where each tensor lies.

Owns the layout of GGUF versions 2 and 3 (little-endian) up to the tensor data; what the fields mean for a model is
gguf_architectures.py's business.

Invariants of a header that is returned:
 1. Nothing was read or allocated on the word of the file alone: every length was first held against a limit and against
    what is left of the file.
 2. Every tensor has 1 to 4 dimensions above zero, a known type whose blocks fill its rows, an aligned offset, and bytes
    that lie inside the file and overlap no other tensor's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tournant.workers.errors import ModelFormatError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_FIELDS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 1 << 10
MAX_STRING_BYTES = 1 << 20
MAX_ITEM_BYTES = 1 << 11  # of a string in an array; the longest tokens, 128 blanks, have 256
MAX_ARRAY_ITEMS = 1 << 20  # of all arrays of strings together; the largest vocabularies with their merges have 0.8 M
MAX_HEADER_BYTES = 64 << 20
MAX_ELEMENTS = 1 << 40
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32
BUFFER_BYTES = 1 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_TENSOR_PLACE = struct.Struct("<IQ")
_FLOAT32 = 6


@dataclass(frozen=True, slots=True)
class ArrayField:
    """An array in the metadata: only its length is kept, and how many bytes its strings have together."""

    length: int
    text_bytes: int = 0


Field = bool | int | float | str | ArrayField


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: shape with the fastest-moving axis last, offset of its first byte in the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata and tensors of one file, by name. The getters raise ModelFormatError naming the field."""

    path: Path
    fields: dict[str, Field]
    tensors: dict[str, GGUFTensor]

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number from low to high; `default` stands for a missing field, None = it must be there."""
        value = self.fields.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self._refuse(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A number from low to high; `default` stands for a missing field, None = it must be there."""
        value = self.fields.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            self._refuse(key, f"a number from {low:g} to {high:g}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; `default` stands for a missing field, None = it must be there."""
        value = self.fields.get(key, default)
        if not isinstance(value, str):
            self._refuse(key, "a string")
        return value

    def array(self, key: str) -> ArrayField:
        """What is kept of an array that must be there."""
        value = self.fields.get(key)
        if not isinstance(value, ArrayField):
            self._refuse(key, "an array")
        return value

    def _refuse(self, key: str, wanted: str) -> NoReturn:
        value = self.fields.get(key)
        found = "is missing" if value is None else f"is {value!r}"[:200]
        raise ModelFormatError(f"{self.path}: field {key} {found}; it must be {wanted}")


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read and check the header of `path`.

    Raises ModelFormatError naming the field or tensor when the file breaks any promise above, and OSError when it
    cannot be read. Takes memory and time for the header alone (some MB, under a second), whatever the file says.
    """
    with path.open("rb", buffering=BUFFER_BYTES) as file:
        cursor = _Cursor(path, file, path.stat().st_size)
        if cursor.take(4, "the magic") != MAGIC:
            raise ModelFormatError(f"{path}: it does not begin with {MAGIC.decode()}, so it is not a GGUF file")
        version = cursor.unpack(_U32, "the version")
        if version not in VERSIONS:
            kind = "big-endian, or damaged" if version & 0xFFFF == 0 else "of another format"
            raise ModelFormatError(f"{path}: GGUF version {version} is {kind}; versions 2 and 3 are known")
        num_tensors = cursor.count(MAX_TENSORS, "the table of tensors")
        num_fields = cursor.count(MAX_FIELDS, "the table of metadata fields")
        fields: dict[str, Field] = {}
        for index in range(num_fields):
            key = cursor.text(MAX_NAME_BYTES, f"the name of metadata field {index}")
            if key in fields:
                raise ModelFormatError(f"{path}: metadata field {key} occurs twice")
            fields[key] = cursor.field(f"field {key}")
        places = [cursor.place(index) for index in range(num_tensors)]
    header = GGUFHeader(path, fields, {})
    alignment = header.whole("general.alignment", 8, MAX_ALIGNMENT, DEFAULT_ALIGNMENT)
    if alignment & (alignment - 1):
        raise ModelFormatError(f"{path}: field general.alignment is {alignment}; it must be a power of two")
    data_start = -(-cursor.position // alignment) * alignment
    for place in places:
        tensor = _checked(path, place, alignment, data_start, cursor.size)
        if tensor.name in header.tensors:
            raise ModelFormatError(f"{path}: tensor {tensor.name} occurs twice")
        header.tensors[tensor.name] = tensor
    _check_overlap(path, header.tensors)
    return header


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor's entry as the file states it."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


class _Cursor:
    """Reads forward through the header; every read is held against the end of the file and the limits."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.size = size
        self.position = 0
        self._file = file
        self._items_left = MAX_ARRAY_ITEMS

    def take(self, num_bytes: int, what: str) -> bytes:
        self._advance(num_bytes, what)
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise ModelFormatError(f"{self.path}: it became shorter while {what} was being read")
        return data

    def _advance(self, num_bytes: int, what: str) -> None:
        left = self.size - self.position
        if num_bytes > left:
            raise ModelFormatError(
                f"{self.path}: {what} needs {num_bytes} bytes at offset {self.position}, but only {left} are left; "
                "the file is truncated or damaged"
            )
        self.position += num_bytes
        if self.position > MAX_HEADER_BYTES:
            raise ModelFormatError(f"{self.path}: the header exceeds {MAX_HEADER_BYTES} bytes at {what}")

    def unpack(self, form: struct.Struct, what: str) -> int:
        value: int = form.unpack(self.take(form.size, what))[0]
        return value

    def count(self, limit: int, what: str) -> int:
        value = self.unpack(_U64, what)
        if value > limit:
            raise ModelFormatError(f"{self.path}: {what} has the length {value}; at most {limit} is allowed")
        return value

    def text(self, limit: int, what: str) -> str:
        data = self.take(self.count(limit, what), what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"{self.path}: {what} is not UTF-8 text: {error}") from error

    def field(self, what: str) -> Field:
        """One metadata value with its type."""
        kind = self.unpack(_U32, f"{what} (its type)")
        if kind in _SCALARS:
            form = _SCALARS[kind]
            value: bool | int | float = form.unpack(self.take(form.size, what))[0]
            # the shortest decimal that is the same float32: 1e-05 instead of 9.999999747378752e-06
            return float(str(np.float32(value))) if kind == _FLOAT32 else value
        if kind == _STRING:
            return self.text(MAX_STRING_BYTES, what)
        if kind == _ARRAY:
            return self._array(what)
        raise ModelFormatError(f"{self.path}: {what} has the unknown type {kind}")

    def _array(self, what: str) -> ArrayField:
        kind = self.unpack(_U32, f"{what} (the type of its items)")
        length = self.unpack(_U64, f"{what} (its length)")
        if kind in _SCALARS:
            num_bytes = length * _SCALARS[kind].size
            self._advance(num_bytes, what)
            self._file.seek(num_bytes, 1)
        elif kind == _STRING:
            if length > self._items_left:
                raise ModelFormatError(
                    f"{self.path}: {what} has {length} strings; all arrays together may have {MAX_ARRAY_ITEMS}"
                )
            self._items_left -= length
            item, start = f"a string of {what}", self.position
            for _ in range(length):
                self.take(self.count(MAX_ITEM_BYTES, item), item)
            return ArrayField(length, self.position - start - length * _U64.size)
        else:
            raise ModelFormatError(f"{self.path}: {what} is an array of type {kind}; arrays hold numbers or strings")
        return ArrayField(length)

    def place(self, index: int) -> _Place:
        """One entry of the tensor table."""
        name = self.text(MAX_NAME_BYTES, f"the name of tensor {index}")
        num_dims = self.unpack(_U32, f"tensor {name} (its number of dimensions)")
        if not 1 <= num_dims <= 4:
            raise ModelFormatError(f"{self.path}: tensor {name} has {num_dims} dimensions; it must have 1 to 4")
        dims = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims, f"tensor {name} (its dimensions)"))
        type_id, offset = _TENSOR_PLACE.unpack(self.take(_TENSOR_PLACE.size, f"tensor {name} (its type and offset)"))
        return _Place(name, dims, type_id, offset)


def _checked(path: Path, place: _Place, alignment: int, data_start: int, size: int) -> GGUFTensor:
    """The tensor of a table entry whose type, shape and place hold."""
    where = f"{path}: tensor {place.name}"
    if not 1 <= prod(place.dims) <= MAX_ELEMENTS:
        raise ModelFormatError(f"{where} has dimensions {list(place.dims)}; it must have 1 to {MAX_ELEMENTS} elements")
    try:
        kind = GGMLQuantizationType(place.type_id)
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ModelFormatError(f"{where} has the unknown type {place.type_id}") from None
    if place.dims[0] % block_size:
        raise ModelFormatError(f"{where} has rows of {place.dims[0]}; {kind.name} needs a multiple of {block_size}")
    if place.offset % alignment:
        raise ModelFormatError(f"{where} has the offset {place.offset}; it must be a multiple of {alignment}")
    num_bytes = prod(place.dims) // block_size * block_bytes
    start = data_start + place.offset
    if start + num_bytes > size:
        raise ModelFormatError(
            f"{where} has {num_bytes} bytes at offset {start}, but the file ends at {size}; it is truncated or damaged"
        )
    return GGUFTensor(place.name, place.dims[::-1], kind, start, num_bytes)


def _check_overlap(path: Path, tensors: dict[str, GGUFTensor]) -> None:
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise ModelFormatError(f"{path}: tensor {tensor.name} overlaps tensor {before}")
        end, before = tensor.offset + tensor.num_bytes, tensor.name
