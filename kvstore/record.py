"""One block part on disk: a header page, the payload, a trailer page. docs/store.md has the table of offsets.

Owns the bytes of a record and the checks of what was read; no I/O, no decoding of payloads (codecs.py).

Invariants:
 1. A record starts at a page, and every part of it is whole pages: header, payload padded with zeros, trailer.
 2. Header and trailer name their own segment and offset, so that a record found elsewhere is not taken for one.
 3. A parsed header is what `pack_header` would write: checked to the last byte, all lengths within their limits.
 4. Changing the layout changes RECORD_FORMAT; golden bytes in tests/kvstore/test_record.py hold it still.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from tournant.kvstore.block import KEY_BYTES, Part, Version
from tournant.kvstore.config import PAGE_BYTES

RECORD_FORMAT = 1
HEADER_MAGIC, TRAILER_MAGIC = b"TRNTHEAD", b"TRNTTAIL"
WEIGHTS_ID_BYTES = 32
MAX_KV_FORM_BYTES = 32
MAX_PAYLOAD_BYTES = 64 << 20  # the largest slot of a pool: one chunk
MAX_SEGMENT = 1 << 62  # numbers above it are nobody's: there is always a next one
FRAME_BYTES = 2 * PAGE_BYTES  # header and trailer

CODEC_NONE, CODEC_LZ4_PLANES_2, CODEC_LZ4_PLANES_4 = 0, 1, 2
CODEC_NAMES = {CODEC_NONE: "none", CODEC_LZ4_PLANES_2: "lz4, 2 planes", CODEC_LZ4_PLANES_4: "lz4, 4 planes"}

# magic, format, codec, key, writer id, counter, part, weights id, length, stored length, checksum of the payload,
# checksum of the stored payload, segment, offset, kv form
_HEADER = struct.Struct("<8sII32sQQ4I32sQQQQQQ32s")
_TRAILER = struct.Struct("<8sII32sQQQQQ")  # magic, format, 0, key, writer id, counter, stored checksum, segment, offset
_START = struct.Struct("<8sI")
_CHECKSUM = struct.Struct("<Q")
_CHECKED = PAGE_BYTES - _CHECKSUM.size  # a page's own checksum is in its last eight bytes
_ZEROS = bytes(PAGE_BYTES)
_U64 = 1 << 64
_U32 = 1 << 32


class CorruptBlock(Exception):  # noqa: N818 - a state of the world
    """The bytes read are not the record that should be there: torn, damaged, misplaced or another one."""


class RecordRefused(Exception):  # noqa: N818 - the reader said no
    """A record of another format: not damaged, but not ours to read."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record holds.

    key: 32 bytes; weights_id: 32 bytes, so that blocks of unused weights can be told; kv_form: at most 32 bytes of
    UTF-8; length: bytes of payload; checksum: XXH3-64 of the payload as its writer reported it.
    """

    key: bytes
    version: Version
    part: Part
    weights_id: bytes
    kv_form: str
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Stored:
    """How a payload lies on disk. length: bytes after the codec; checksum: XXH3-64 of those bytes."""

    codec: int
    length: int
    checksum: int


def checksum(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of a buffer; runs without the interpreter lock."""
    return xxhash.xxh3_64_intdigest(data)


def padded(length: int) -> int:
    """`length` rounded up to whole pages, bytes."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


def record_bytes(stored_length: int) -> int:
    """Bytes that a record with this much stored payload takes in its segment."""
    return FRAME_BYTES + padded(stored_length)


def record_pages(stored_length: int) -> int:
    """Pages that a record with this much stored payload takes in its segment."""
    return record_bytes(stored_length) // PAGE_BYTES


def check_header(header: RecordHeader) -> None:
    """Raises ValueError when a field of a header is out of its limits."""
    for name, value, length in (("key", header.key, KEY_BYTES), ("weights_id", header.weights_id, WEIGHTS_ID_BYTES)):
        if len(value) != length:
            raise ValueError(f"{name} has {len(value)} bytes; it must have {length}")
    form = header.kv_form.encode()
    if not 0 < len(form) <= MAX_KV_FORM_BYTES or b"\0" in form:
        raise ValueError(
            f"kv_form is {header.kv_form!r}; it must have 1 to {MAX_KV_FORM_BYTES} bytes, none of them zero"
        )
    if not 0 < header.length <= MAX_PAYLOAD_BYTES:
        raise ValueError(f"length is {header.length}; it must be 1 to {MAX_PAYLOAD_BYTES}")
    part = header.part
    if not (0 <= part.layer_start < part.layer_stop < _U32 and 0 <= part.head_start < part.head_stop < _U32):
        raise ValueError(f"{part} is empty, runs backwards or exceeds 32 bits")
    for name, number in (
        ("writer_id", header.version.writer_id),
        ("counter", header.version.counter),
        ("checksum", header.checksum),
    ):
        if not 0 <= number < _U64:
            raise ValueError(f"{name} is {number}; it must fit in 64 bits")


def pack_header(page: memoryview, header: RecordHeader, stored: Stored, segment: int, offset: int) -> None:
    """Fill a page with the header of a record that lies at `offset` of `segment`. Raises ValueError on bad fields."""
    check_header(header)
    _check_stored(stored, header.length)
    version, part = header.version, header.part
    _HEADER.pack_into(
        page,
        0,
        HEADER_MAGIC,
        RECORD_FORMAT,
        stored.codec,
        header.key,
        version.writer_id,
        version.counter,
        part.layer_start,
        part.layer_stop,
        part.head_start,
        part.head_stop,
        header.weights_id,
        header.length,
        stored.length,
        header.checksum,
        stored.checksum,
        segment,
        offset,
        header.kv_form.encode(),
    )
    _seal(page, _HEADER.size)


def pack_trailer(page: memoryview, header: RecordHeader, stored: Stored, segment: int, offset: int) -> None:
    """Fill a page with the trailer of the record that begins at `offset` of `segment`."""
    version = header.version
    fields = (header.key, version.writer_id, version.counter, stored.checksum, segment, offset)
    _TRAILER.pack_into(page, 0, TRAILER_MAGIC, RECORD_FORMAT, 0, *fields)
    _seal(page, _TRAILER.size)


def parse_header(page: memoryview, segment: int, offset: int) -> tuple[RecordHeader, Stored]:
    """The header in a page read at `offset` of `segment`.

    Raises RecordRefused for another format and CorruptBlock for everything else that is not such a header.
    """
    _open(page, HEADER_MAGIC, _HEADER.size)
    fields = _HEADER.unpack_from(page)
    _, _, codec, key, writer_id, counter, *part, weights_id, length = fields[:12]
    stored_length, digest, stored_digest, found_segment, found_offset, form = fields[12:]
    if (found_segment, found_offset) != (segment, offset):
        raise CorruptBlock(
            f"segment {segment} offset {offset} holds the record of segment {found_segment} offset {found_offset}"
        )
    stored = Stored(codec, stored_length, stored_digest)
    try:
        kv_form = form.rstrip(b"\0").decode()
        header = RecordHeader(key, Version(writer_id, counter), Part(*part), weights_id, kv_form, length, digest)
        check_header(header)
        _check_stored(stored, length)
    except ValueError as error:
        raise CorruptBlock(f"segment {segment} offset {offset}: {error}") from None
    return header, stored


def check_trailer(page: memoryview, header: RecordHeader, stored: Stored, segment: int, offset: int) -> None:
    """Raises CorruptBlock unless a page is the trailer of the record with this header at `offset` of `segment`."""
    _open(page, TRAILER_MAGIC, _TRAILER.size)
    version = header.version
    wanted = (0, header.key, version.writer_id, version.counter, stored.checksum, segment, offset)
    if _TRAILER.unpack_from(page)[2:] != wanted:
        raise CorruptBlock(f"segment {segment} offset {offset}: the trailer belongs to another record")


def starts_like_a_record(page: memoryview) -> bool:
    """Whether a page begins with the magic of a header, of whatever format."""
    return page[: len(HEADER_MAGIC)] == HEADER_MAGIC


def _check_stored(stored: Stored, length: int) -> None:
    if stored.codec not in CODEC_NAMES:
        raise ValueError(f"codec is {stored.codec}; known are {sorted(CODEC_NAMES)}")
    if not 0 < stored.length <= length or (stored.codec == CODEC_NONE and stored.length != length):
        raise ValueError(f"stored length is {stored.length} with codec {stored.codec} for a payload of {length} bytes")


def _seal(page: memoryview, used: int) -> None:
    page[used:_CHECKED] = _ZEROS[used:_CHECKED]
    _CHECKSUM.pack_into(page, _CHECKED, checksum(page[:_CHECKED]))


def _open(page: memoryview, magic: bytes, used: int) -> None:
    found, number = _START.unpack_from(page)
    if found != magic:
        raise CorruptBlock(f"a page begins with {found.hex()}, not with {magic.decode()}")
    if number != RECORD_FORMAT:
        raise RecordRefused(f"a record of format {number}; this store reads format {RECORD_FORMAT}")
    if _CHECKSUM.unpack_from(page, _CHECKED)[0] != checksum(page[:_CHECKED]):
        raise CorruptBlock(f"the checksum of a {magic.decode()} page does not match")
    if bytes(page[used:_CHECKED]) != _ZEROS[used:_CHECKED]:
        raise CorruptBlock(f"a {magic.decode()} page has bytes where none belong")
