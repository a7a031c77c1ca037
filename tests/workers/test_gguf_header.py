from __future__ import annotations

import random
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.helpers.tiny_gguf import build_tiny_gguf
from tournant.workers.errors import ModelFormatError
from tournant.workers.gguf_architectures import read_config, wanted_tensors
from tournant.workers.gguf_files import convert_gguf
from tournant.workers.gguf_header import ArrayField, read_gguf_header

U32, U64, F32, TEXT, ARRAY = 4, 10, 6, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def field(key: bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(
    name: bytes = b"t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, more_dims: int = 0
) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims) + more_dims, *dims, kind, offset)


def raw_gguf(
    fields: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    start: bytes = b"GGUF\3\0\0\0",
    num_fields: int | None = None,
    num_tensors: int | None = None,
    data: int = 0,
) -> bytes:
    """A file made of these pieces; counts as stated, tensor data of `data` zero bytes."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(fields) if num_fields is None else num_fields,
    )
    head = start + struct.pack("<QQ", *counts) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the magic needs 4 bytes at offset 0, but only 0 are left"),
    "magic": (b"PK\3\4" + bytes(64), "does not begin with GGUF"),
    "version 1": (raw_gguf(start=b"GGUF\1\0\0\0"), "GGUF version 1 is of another format"),
    "big-endian": (raw_gguf(start=b"GGUF\0\0\0\3"), "GGUF version 50331648 is big-endian"),
    "only a version": (b"GGUF\3\0\0\0", "the table of tensors needs 8 bytes"),
    "tensor count": (raw_gguf(num_tensors=1 << 63), "the table of tensors has the length 9223372036854775808"),
    "field count": (raw_gguf(num_fields=1 << 40), "the table of metadata fields has the length 1099511627776"),
    "fewer fields than said": (raw_gguf((field(b"a", U32, bytes(4)),), num_fields=9), "metadata field"),
    "key length": (raw_gguf((struct.pack("<Q", 1 << 60),)), "the name of metadata field 0 has the length"),
    "key text": (raw_gguf((field(b"\xff\xfe", U32, bytes(4)),)), "the name of metadata field 0 is not UTF-8"),
    "field type": (raw_gguf((field(b"a.b", 99, bytes(8)),)), "field a.b has the unknown type 99"),
    "field twice": (raw_gguf((field(b"a.b", U32, bytes(4)),) * 2), "field a.b occurs twice"),
    "string length": (raw_gguf((field(b"a.b", TEXT, struct.pack("<Q", 1 << 62)),)), "field a.b has the length"),
    "string beyond the end": (raw_gguf((field(b"a.b", TEXT, struct.pack("<Q", 5000)),)), "field a.b needs 5000 bytes"),
    "number array": (
        raw_gguf((field(b"a.b", ARRAY, struct.pack("<IQ", U64, (1 << 61) + 1)),)),
        "field a.b needs 18446744073709551624 bytes",
    ),
    "string array": (
        raw_gguf((field(b"a.b", ARRAY, struct.pack("<IQ", TEXT, 1 << 40)),)),
        "field a.b has 1099511627776 strings",
    ),
    "string array beyond the end": (
        raw_gguf((field(b"a.b", ARRAY, struct.pack("<IQ", TEXT, 1 << 20)),)),
        "a string of field a.b needs 8 bytes",
    ),
    "string array item": (
        raw_gguf((field(b"a.b", ARRAY, struct.pack("<IQ", TEXT, 1) + text(bytes(3000))),)),
        "a string of field a.b has the length 3000; at most 2048 is allowed",
    ),
    "nested array": (
        raw_gguf((field(b"a.b", ARRAY, struct.pack("<IQ", ARRAY, 1)),)),
        "field a.b is an array of type 9",
    ),
    "tensor name": (raw_gguf(tensors=(struct.pack("<Q", 1 << 50),)), "the name of tensor 0 has the length"),
    "no dimensions": (raw_gguf(tensors=(tensor(dims=()),)), "tensor t has 0 dimensions"),
    "five dimensions": (raw_gguf(tensors=(tensor(dims=(1,) * 5),)), "tensor t has 5 dimensions"),
    "many dimensions": (raw_gguf(tensors=(tensor(more_dims=1 << 31),)), "tensor t has 2147483649 dimensions"),
    "dimensions overflow": (raw_gguf(tensors=(tensor(dims=(1 << 63, 1 << 63)),)), "tensor t has dimensions"),
    "empty dimension": (raw_gguf(tensors=(tensor(dims=(32, 0)),), data=128), "tensor t has dimensions [32, 0]"),
    "tensor type": (raw_gguf(tensors=(tensor(kind=77),), data=128), "tensor t has the unknown type 77"),
    "removed tensor type": (raw_gguf(tensors=(tensor(kind=4),), data=128), "tensor t has the unknown type 4"),
    "row length": (raw_gguf(tensors=(tensor(dims=(48, 2), kind=8),), data=128), "t has rows of 48; Q8_0 needs"),
    "unaligned offset": (raw_gguf(tensors=(tensor(offset=4),), data=256), "tensor t has the offset 4"),
    "offset beyond the end": (raw_gguf(tensors=(tensor(offset=1 << 62),), data=128), "t has 128 bytes at offset 46116"),
    "data beyond the end": (raw_gguf(tensors=(tensor(dims=(1 << 30,)),), data=128), "tensor t has 4294967296 bytes"),
    "overlap": (raw_gguf(tensors=(tensor(b"a"), tensor(b"b", offset=96)), data=256), "tensor b overlaps tensor a"),
    "tensor twice": (raw_gguf(tensors=(tensor(), tensor(offset=128)), data=256), "tensor t occurs twice"),
    "alignment 0": (raw_gguf((field(b"general.alignment", U32, bytes(4)),)), "field general.alignment is 0"),
    "alignment 48": (raw_gguf((field(b"general.alignment", U32, b"\x30\0\0\0"),)), "general.alignment is 48"),
    "alignment type": (raw_gguf((field(b"general.alignment", F32, bytes(4)),)), "field general.alignment is 0.0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFormatError) as caught:
        convert_gguf(path, "bfloat16", tmp_path / "cache")
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "cache" / "converted").exists()


LARGE_HOSTILE = """
import resource, struct, sys
from pathlib import Path
from tournant.workers.errors import ModelFormatError
from tournant.workers.gguf_architectures import read_config, wanted_tensors
from tournant.workers.gguf_files import convert_gguf

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
for path in sys.argv[2:]:
    try:
        convert_gguf(Path(path), "bfloat16", Path(sys.argv[1]))
    except ModelFormatError:
        continue
    sys.exit(f"{path} was accepted")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_hostile_files_take_little_memory(tmp_path: Path) -> None:
    """Files that say they are huge, sparse ones that are, and the largest header that is read at all."""
    for number, (data, _) in enumerate(HOSTILE.values()):
        (tmp_path / f"{number}.gguf").write_bytes(data)
    huge = raw_gguf(tensors=(tensor(dims=(1 << 33,)),))
    with (tmp_path / "sparse.gguf").open("wb") as file:
        file.write(huge)
        file.truncate(len(huge) + (1 << 35))
    strings = struct.pack("<IQ", TEXT, 1 << 20) + text(bytes(50)) * (1 << 20)
    (tmp_path / "strings.gguf").write_bytes(raw_gguf((field(b"tokenizer.ggml.tokens", ARRAY, strings),)))
    result = subprocess.run(
        [sys.executable, "-c", LARGE_HOSTILE, str(tmp_path / "cache"), *map(str, sorted(tmp_path.glob("*.gguf")))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(result.stdout) * unit < 200 << 20


def test_truncation_anywhere_and_flipped_bits(tmp_path: Path) -> None:
    """Whatever is cut off or flipped in a good file: it is read, or it is refused with ModelFormatError."""
    path = tmp_path / "good.gguf"
    build_tiny_gguf(path, kind=Kind.Q8_0)
    good = path.read_bytes()
    tensors = read_gguf_header(path).tensors.values()
    first, last = min(found.offset for found in tensors), max(found.offset + found.num_bytes for found in tensors)
    for end in range(0, last, 499):
        path.write_bytes(good[:end])
        with pytest.raises(ModelFormatError):
            read_gguf_header(path)
    dice = random.Random(3)
    refused = 0
    for _ in range(400):
        data = bytearray(good)
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(first)] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        try:
            header = read_gguf_header(path)
            wanted_tensors(header, read_config(header, "float32"))
        except ModelFormatError:
            refused += 1
    assert 50 < refused < 400


def test_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    build_tiny_gguf(path, kind=Kind.Q4_1)
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    assert [
        (found.name, found.type, found.shape, found.offset, found.num_bytes) for found in header.tensors.values()
    ] == [
        (found.name, found.tensor_type, tuple(found.shape[::-1].tolist()), found.data_offset, found.n_bytes)
        for found in reader.tensors
    ]
    for key, value in header.fields.items():
        contents = reader.fields[key].contents()
        if isinstance(value, ArrayField):
            assert value.length == len(contents)
            assert value.text_bytes == sum(len(item.encode()) for item in contents if isinstance(item, str))
        elif isinstance(value, float):
            assert np.float32(value) == np.float32(contents)
        else:
            assert value == contents
