"""The checkpoint of an NVMe folder: its index in one file, so that opening need not scan every segment.

Owns the file's bytes and how it is replaced: written aside, synced, renamed over the old one, folder synced. A damaged
checkpoint is refused as a whole and costs a scan, nothing else. docs/store.md has the table of offsets.

The file is a preamble (magic, format) and chunks (length, XXH3-64, msgpack body). The first chunk is the head: next
segment, number of records, covers, and tables of the values that records share; the others are rows of records.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from tournant.kvstore.block import Part, Version
from tournant.kvstore.config import MAX_SEGMENT_BYTES, PAGE_BYTES
from tournant.kvstore.disk_events import RecordAt, SegmentCover, WriteCheckpoint
from tournant.kvstore.disk_io import DiskIO, opened, read_all, write_all
from tournant.kvstore.record import (
    FRAME_BYTES,
    MAX_KV_FORM_BYTES,
    MAX_SEGMENT,
    WEIGHTS_ID_BYTES,
    RecordHeader,
    check_header,
    checksum,
    record_bytes,
)

CHECKPOINT_NAME, CHECKPOINT_ASIDE = "checkpoint", "checkpoint.new"
CHECKPOINT_FORMAT = 1
MAX_CHUNK_BYTES = 4 << 20
MAX_SEGMENTS = 1 << 16
MAX_RECORDS = 1 << 24
MAX_SHARED = 1 << 14  # different weights, forms or parts
_CHUNK_ROWS = 512  # packed in one go; the interpreter lock is free between chunks
_WRITE_BYTES = 1 << 20

_PREAMBLE = struct.Struct("<8sI4x")
_CHUNK = struct.Struct("<IQ")
_MAGIC = b"TRNTCKPT"
_U64 = (1 << 64) - 1


class CheckpointRefused(Exception):  # noqa: N818 - the reader said no
    """A checkpoint that cannot be used: damaged, of another format or beyond a limit. Opening scans instead."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint says. records are not yet compared with the segments."""

    next_segment: int
    segments: tuple[SegmentCover, ...]
    records: tuple[RecordAt, ...]


# -------------------------------------------------------------------- writing


def write_checkpoint(disk: DiskIO, folder: int, content: WriteCheckpoint) -> None:
    """Replace the checkpoint. Raises OSError; the old one is then still whole and in force."""
    if len(content.segments) > MAX_SEGMENTS or len(content.records) > MAX_RECORDS:
        raise OSError(errno.EFBIG, f"{len(content.segments)} segments and {len(content.records)} records are too many")
    if CHECKPOINT_ASIDE in disk.names(folder):
        disk.unlink(folder, CHECKPOINT_ASIDE)
    with opened(disk, folder, CHECKPOINT_ASIDE, create=True) as file:
        pending = bytearray(_PREAMBLE.pack(_MAGIC, CHECKPOINT_FORMAT))
        offset = 0
        for chunk in _chunks(content):
            pending += chunk
            if len(pending) >= _WRITE_BYTES:
                offset += _append(disk, file, pending, offset)
                pending = bytearray()
        _append(disk, file, pending, offset)
        disk.sync(file)
    disk.rename(folder, CHECKPOINT_ASIDE, CHECKPOINT_NAME)
    disk.sync(folder)


def _append(disk: DiskIO, file: int, data: bytearray, offset: int) -> int:
    done, error = write_all(disk, file, [memoryview(data)], offset)
    if error is not None:
        raise error
    return done


def _chunks(content: WriteCheckpoint) -> Iterator[bytes]:
    """The chunks of a checkpoint, each with its length and checksum."""
    weights: dict[bytes, int] = {}
    forms: dict[str, int] = {}
    parts: dict[Part, int] = {}
    for record in content.records:
        header = record.header
        weights.setdefault(header.weights_id, len(weights))
        forms.setdefault(header.kv_form, len(forms))
        parts.setdefault(header.part, len(parts))
    covers = [[cover.segment, cover.covered] for cover in content.segments]
    areas = [[part.layer_start, part.layer_stop, part.head_start, part.head_stop] for part in parts]
    yield _chunk([content.next_segment, len(content.records), covers, list(weights), list(forms), areas])
    for first in range(0, len(content.records), _CHUNK_ROWS):
        yield _chunk(
            [
                [
                    *(record.segment, record.offset, record.size, record.header.key),
                    *(record.header.version.writer_id, record.header.version.counter),
                    *(weights[record.header.weights_id], forms[record.header.kv_form], parts[record.header.part]),
                    *(record.header.length, record.header.checksum),
                ]
                for record in content.records[first : first + _CHUNK_ROWS]
            ]
        )


def _chunk(value: list[Any]) -> bytes:
    body: bytes = msgpack.packb(value, use_bin_type=True)
    return _CHUNK.pack(len(body), checksum(body)) + body


# -------------------------------------------------------------------- reading


def read_checkpoint(disk: DiskIO, folder: int) -> Checkpoint | None:
    """The checkpoint of a folder, None when there is none. Raises CheckpointRefused, never takes part of one."""
    try:
        if CHECKPOINT_NAME not in disk.names(folder):
            return None
        size = disk.size(folder, CHECKPOINT_NAME).length
        with opened(disk, folder, CHECKPOINT_NAME) as file:
            return _read(_Reader(disk, file, size))
    except OSError as error:
        raise CheckpointRefused(f"the checkpoint cannot be read: {error}") from None


class _Reader:
    """Bytes of a file from its start on."""

    def __init__(self, disk: DiskIO, file: int, size: int) -> None:
        self._disk, self._file, self._size = disk, file, size
        self._window = b""
        self._next = 0  # offset after the window

    def take(self, count: int) -> bytes:
        """The next `count` bytes. Raises CheckpointRefused at the end of the file."""
        while len(self._window) < count:
            room = min(max(_WRITE_BYTES, count - len(self._window)), self._size - self._next)
            buffer = bytearray(max(0, room))
            got = read_all(self._disk, self._file, [memoryview(buffer)], self._next) if room > 0 else 0
            if got == 0:
                raise CheckpointRefused(f"the checkpoint ends at byte {self._next}, inside a chunk")
            self._window += bytes(memoryview(buffer)[:got])
            self._next += got
        taken, self._window = self._window[:count], self._window[count:]
        return taken

    def at_end(self) -> bool:
        """Whether every byte was taken."""
        return not self._window and self._next >= self._size

    def chunk(self) -> Any:
        """The value of the next chunk: lists, ints, bytes and short strings only."""
        length, digest = _CHUNK.unpack(self.take(_CHUNK.size))
        if length > MAX_CHUNK_BYTES:
            raise CheckpointRefused(f"a chunk of {length} bytes exceeds the limit of {MAX_CHUNK_BYTES}")
        body = self.take(length)
        if checksum(body) != digest:
            raise CheckpointRefused("the checksum of a chunk does not match")
        try:
            return msgpack.unpackb(
                body,
                max_array_len=MAX_SEGMENTS,
                max_bin_len=WEIGHTS_ID_BYTES,
                max_str_len=MAX_KV_FORM_BYTES,
                max_map_len=0,
                max_ext_len=0,
            )
        except (ValueError, RecursionError, msgpack.UnpackException) as error:
            raise CheckpointRefused(f"a chunk is not msgpack: {error}") from None


def _read(reader: _Reader) -> Checkpoint:
    magic, number = _PREAMBLE.unpack(reader.take(_PREAMBLE.size))
    if magic != _MAGIC or number != CHECKPOINT_FORMAT:
        raise CheckpointRefused(f"the checkpoint has magic {magic.hex()} and format {number}")
    try:
        return _parse(reader)
    except (TypeError, ValueError, IndexError) as error:
        raise CheckpointRefused(f"the checkpoint does not follow its schema: {error}") from None


def _parse(reader: _Reader) -> Checkpoint:
    """Values of all chunks. Raises TypeError, ValueError or IndexError for what is not in the schema."""
    next_segment, count, covers, weights, forms, areas = reader.chunk()
    if _number(count) > MAX_RECORDS or max(len(weights), len(forms), len(areas)) > MAX_SHARED:
        raise ValueError(f"{count} records, {len(weights)} weights, {len(forms)} forms, {len(areas)} parts")
    if _number(next_segment) > MAX_SEGMENT:
        raise ValueError(f"the next segment is {next_segment}")
    parts = [Part(*(_number(bound) for bound in area)) for area in areas]
    segments = tuple(SegmentCover(_number(segment), _number(covered)) for segment, covered in covers)
    records: list[RecordAt] = []
    while len(records) < count:
        rows = reader.chunk()
        if not rows:
            raise ValueError(f"{len(records)} of {count} records")
        records += (_record(row, weights, forms, parts) for row in rows)
    if len(records) != count or not reader.at_end():
        raise ValueError(f"more than the {count} records of the head")
    return Checkpoint(next_segment, segments, tuple(records))


def _record(row: Sequence[Any], weights: Sequence[Any], forms: Sequence[Any], parts: Sequence[Part]) -> RecordAt:
    segment, offset, size, key, writer_id, counter, weight, form, part, length, digest = row
    for value in (segment, offset, size, writer_id, counter, weight, form, part, length, digest):
        _number(value)
    if type(key) is not bytes or type(weights[weight]) is not bytes or type(forms[form]) is not str:
        raise TypeError("a key, weights id or form of another type")
    header = RecordHeader(key, Version(writer_id, counter), parts[part], weights[weight], forms[form], length, digest)
    check_header(header)
    if offset % PAGE_BYTES or size % PAGE_BYTES or not FRAME_BYTES < size <= record_bytes(length):
        raise ValueError(f"a record of {length} bytes at {offset} with {size} bytes")
    if offset + size > MAX_SEGMENT_BYTES:
        raise ValueError(f"a record ends at {offset + size}, beyond {MAX_SEGMENT_BYTES}")
    return RecordAt(segment, offset, size, header)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _U64:
        raise TypeError(f"{value!r:.40} is no 64-bit number")
    return value
