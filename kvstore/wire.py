"""Frames between a node store and its clients: the closed schema of both directions.

Owns bytes <-> messages of events.py and admin.py, and nothing else: no sockets. A frame is a 4-byte little-endian
length and one flat msgpack array: code of the message, then its fields. Runs (keys, entries, slots, versions, rows)
are packed rows of fixed-size little-endian fields in one byte string, never one msgpack object each.

Invariants:
 1. What `decode_*` accepts, `encode` would have written: every field has its type, range and length, and nothing
    follows. (msgpack's longer forms of a number are accepted too.)
 2. Arrays in arrays, maps and extension types are refused while they are being read, so that rubbish costs no memory.
 3. The number of a client never travels: the server knows whose connection it is.
 4. Changing a message changes PROTOCOL; golden bytes in tests/kvstore/test_wire.py hold the schema still.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, cast

import msgpack

from tournant.kvstore.admin import (
    Announcements,
    BlockLine,
    Clear,
    Cleared,
    ListBlocks,
    Listed,
    PollAnnouncements,
    Status,
    StatusQuery,
    VerifiedBlocks,
    VerifyBlocks,
)
from tournant.kvstore.block import KEY_BYTES, Part, Version
from tournant.kvstore.directory import MAX_SHARDS, Announcement, Heard
from tournant.kvstore.events import (
    Attach,
    Attached,
    Bad,
    ClientMessage,
    CloseRead,
    Detach,
    Fetch,
    Fetched,
    Forget,
    HardPin,
    HardPinned,
    HardUnpin,
    Open,
    Opened,
    Refused,
    Reply,
    Report,
    Reported,
    ReportEntry,
    Used,
)
from tournant.kvstore.groups import ROW

PROTOCOL = 4
MAX_REQUEST_BYTES = 2 << 20  # of one frame from a client
MAX_REPLY_BYTES = 64 << 20  # of one frame from the store
MAX_TEXT = 4096
FRAME_HEADER = struct.Struct("<I")

Query = StatusQuery | ListBlocks | VerifyBlocks | Clear | PollAnnouncements
Request = ClientMessage | Detach | Query
Answer = Reply | Status | Listed | VerifiedBlocks | Cleared | Announcements

_PART = struct.Struct("<4I")
_PAIR = struct.Struct("<IQ")  # page, generation
_VERSION = struct.Struct("<QQ")
_REF = struct.Struct("<32sQQ")  # key, version
_ENTRY = struct.Struct("<32sQQIQIQQII")  # key, version, page, generation, length, checksum, cost, kind, depth
_INDEX = struct.Struct("<I")
_LINE = struct.Struct("<32sQQIQIBBIB")  # see BlockLine
_HEARD = struct.Struct("<IQQQ")  # shard, incarnation, seq, question
_ANNOUNCEMENT = struct.Struct("<IQQQQ3I")  # shard, node, incarnation, seq, answers, how many keys host, nvme, gone
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1


class WireError(ValueError):
    """Bytes that are no message of this protocol, or a message that has no form in it."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one field travels. pack: value -> int, bytes, str, bool or None; parse: back, raises ValueError."""

    pack: Callable[[Any], Any]
    parse: Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _bounded(limit: int, least: int = 0) -> _Kind:
    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= limit:
            raise WireError(f"{_short(value)} is no whole number from {least} to {limit}")
        return value

    return _Kind(check, check)


def _constant(wanted: int) -> _Kind:
    def parse(value: Any) -> int:
        if type(value) is not int or value != wanted:
            raise WireError(f"protocol {_short(value)}; this side speaks {wanted}: use the same release on both sides")
        return value

    return _Kind(_same, parse)


def _raw(least: int, most: int, multiple: int = 1) -> _Kind:
    def check(value: Any) -> bytes:
        if type(value) is not bytes or not least <= len(value) <= most or len(value) % multiple:
            raise WireError(f"{_short(value)} is not {least} to {most} bytes in units of {multiple}")
        return value

    return _Kind(check, check)


def _check_text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT:
        raise WireError(f"{_short(value)} is no text of up to {MAX_TEXT} letters")
    return value


def _check_flag(value: Any) -> bool:
    if type(value) is not bool:
        raise WireError(f"{_short(value)} is neither true nor false")
    return value


def _rows(
    row: struct.Struct, make: Callable[[Iterator[Any]], Iterable[Any]], split: Callable[[Any], Any] | None = None
) -> _Kind:
    """A tuple of values as packed rows. make: rows -> values; split: value -> row, None when it is one."""

    def pack(values: Any) -> bytes:
        try:
            return b"".join([row.pack(*(value if split is None else split(value))) for value in values])
        except struct.error as error:
            raise WireError(str(error)) from None

    def parse(value: Any) -> tuple[Any, ...]:
        if type(value) is not bytes or len(value) % row.size:
            raise WireError(f"{_short(value)} is no run of rows of {row.size} bytes")
        return tuple(make(row.iter_unpack(value)))

    return _Kind(pack, parse)


def _part(*numbers: int) -> Part:
    part = Part(*numbers)
    if not (part.layer_start < part.layer_stop and part.head_start < part.head_stop):
        raise WireError(f"{part} is empty or runs backwards")
    return part


def _part_fields(part: Part) -> tuple[int, ...]:
    return part.layer_start, part.layer_stop, part.head_start, part.head_stop


def _pack_keys(keys: Any) -> bytes:
    if not set(map(len, keys)) <= {KEY_BYTES}:
        raise WireError(f"a key does not have {KEY_BYTES} bytes")
    return b"".join(keys)


def _parse_keys(value: Any) -> tuple[bytes, ...]:
    if type(value) is not bytes or len(value) % KEY_BYTES:
        raise WireError(f"{_short(value)} is no run of keys of {KEY_BYTES} bytes")
    return struct.unpack(f"{KEY_BYTES}s" * (len(value) // KEY_BYTES), value)


def _entries(rows: Iterator[Any]) -> list[ReportEntry]:
    return [ReportEntry(key, Version(writer, counter), *rest) for key, writer, counter, *rest in rows]


def _entry_fields(entry: ReportEntry) -> tuple[Any, ...]:
    version = _key_version(entry.key, entry.version)
    place = (entry.page, entry.generation, entry.length, entry.checksum)
    return (*version, *place, entry.cost_us, entry.kind, entry.depth)


def _key_version(key: bytes, version: Version) -> tuple[bytes, int, int]:
    if len(key) != KEY_BYTES:
        raise WireError(f"a key has {len(key)} bytes; it must have {KEY_BYTES}")
    return key, version.writer_id, version.counter


def _pack_announcements(messages: Any) -> bytes:
    """Each as a row of fixed size and then its keys."""
    pieces = []
    for shard, one in messages:
        runs = (one.host, one.nvme, one.gone)
        numbers = (shard, one.node, one.incarnation, one.seq, one.answers, *map(len, runs))
        pieces += [_pack_one(_ANNOUNCEMENT, numbers), *map(_pack_keys, runs)]
    return b"".join(pieces)


def _parse_announcements(value: Any) -> tuple[tuple[int, Announcement], ...]:
    if type(value) is not bytes:
        raise WireError(f"{_short(value)} is no run of announcements")
    found, start = [], 0
    while start < len(value):
        row = value[start : start + _ANNOUNCEMENT.size]
        shard, node, incarnation, seq, answers, *counts = _parse_one(_ANNOUNCEMENT, row)
        start += _ANNOUNCEMENT.size
        if start + sum(counts) * KEY_BYTES > len(value):
            raise WireError(f"{sum(counts)} keys are announced; {len(value) - start} bytes follow")
        runs = []
        for count in counts:
            runs.append(_parse_keys(value[start : start + count * KEY_BYTES]))
            start += count * KEY_BYTES
        host, nvme, gone = runs
        found.append((shard, Announcement(node, incarnation, seq, host, nvme, gone, answers)))
    return tuple(found)


def _pack_one(row: struct.Struct, values: tuple[Any, ...]) -> bytes:
    try:
        return row.pack(*values)
    except struct.error as error:
        raise WireError(str(error)) from None


def _parse_one(row: struct.Struct, value: Any) -> tuple[Any, ...]:
    if type(value) is not bytes or len(value) != row.size:
        raise WireError(f"{_short(value)} is no row of {row.size} bytes")
    return row.unpack(value)


def _short(value: Any) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)[:60]


_PARTS = _rows(_PART, lambda rows: [_part(*one) for one in rows], _part_fields)
_OPTIONAL_PART = _Kind(
    lambda part: None if part is None else _pack_one(_PART, _part_fields(part)),
    lambda value: None if value is None else _part(*_parse_one(_PART, value)),
)
_ONE_VERSION = _Kind(
    lambda version: _pack_one(_VERSION, (version.writer_id, version.counter)),
    lambda value: Version(*_parse_one(_VERSION, value)),
)
_NUMBER, _WIDE = _bounded(_U32), _bounded(_U64)
_KEY, _PACKED_KEYS = _raw(KEY_BYTES, KEY_BYTES), _Kind(_pack_keys, _parse_keys)
_TEXT, _FLAG = _Kind(_check_text, _check_text), _Kind(_check_flag, _check_flag)
_PAIRS = _rows(_PAIR, _same)
_VERSIONS = _rows(
    _VERSION, lambda rows: [Version(*one) for one in rows], lambda version: (version.writer_id, version.counter)
)
_REFS = _rows(_REF, lambda rows: [(key, Version(*one)) for key, *one in rows], lambda ref: _key_version(*ref))
_ENTRIES = _rows(_ENTRY, _entries, _entry_fields)
_INDEXES = _rows(_INDEX, lambda rows: [index for (index,) in rows], lambda index: (index,))
_COUNTS, _HANDLES = _raw(0, MAX_REPLY_BYTES), _raw(0, MAX_REPLY_BYTES, ROW.size)
_LINES = _rows(
    _LINE,
    lambda rows: [BlockLine(*one) for one in rows],
    lambda line: tuple(getattr(line, field.name) for field in fields(BlockLine)),
)
_HEARD_REPLIES = _rows(
    _HEARD,
    lambda rows: [(shard, Heard(*rest)) for shard, *rest in rows],
    lambda reply: (reply[0], reply[1].incarnation, reply[1].seq, reply[1].question),
)
_FOUND = (("counts", _COUNTS), ("rows", _HANDLES), ("parts", _PARTS))


@dataclass(frozen=True, slots=True)
class _Schema:
    """One message. code: its number; fields: names in order with their kinds, the client's number left out."""

    code: int
    cls: type
    fields: tuple[tuple[str, _Kind], ...]
    from_client: bool = True


_ATTACH = (
    ("weights_id", _KEY),
    ("kv_form", _TEXT),
    ("tenant_check", _raw(0, 64)),
    ("writer_id", _WIDE),
    ("part", _OPTIONAL_PART),
    ("local_parts", _PARTS),
    ("slot_bytes", _WIDE),
    ("credit", _NUMBER),
    ("adopts", _FLAG),
)
_NAMED = (("key", _KEY), ("version", _ONE_VERSION))
_STATUS = tuple((field.name, _PAIRS if field.name == "pages" else _WIDE) for field in fields(Status))
_SCHEMAS = (
    _Schema(1, Attach, (("protocol", _constant(PROTOCOL)), *_ATTACH)),
    _Schema(2, Report, (("seq", _WIDE), ("entries", _ENTRIES), ("released", _PAIRS))),
    _Schema(3, Open, (("read", _WIDE), ("keys", _PACKED_KEYS))),
    _Schema(4, Fetch, (("read", _WIDE), ("picks", _VERSIONS))),
    _Schema(5, CloseRead, (("read", _WIDE),)),
    _Schema(6, Bad, (*_NAMED, ("page", _NUMBER), ("generation", _WIDE))),
    _Schema(7, Forget, _NAMED),
    _Schema(8, HardPin, (("request", _WIDE), ("refs", _REFS))),
    _Schema(9, HardUnpin, (("request", _WIDE),)),
    _Schema(10, Used, (("keys", _PACKED_KEYS),)),
    _Schema(11, Detach, ()),
    _Schema(32, StatusQuery, (("protocol", _constant(PROTOCOL)),)),
    _Schema(33, ListBlocks, (("protocol", _constant(PROTOCOL)), ("after", _WIDE))),
    _Schema(34, VerifyBlocks, (("protocol", _constant(PROTOCOL)), ("after", _WIDE))),
    _Schema(35, Clear, (("protocol", _constant(PROTOCOL)),)),
    _Schema(
        36,
        PollAnnouncements,
        (
            ("protocol", _constant(PROTOCOL)),
            ("node", _WIDE),
            ("num_shards", _bounded(MAX_SHARDS, least=1)),
            ("heard", _HEARD_REPLIES),
        ),
    ),
    _Schema(64, Attached, (("incarnation", _WIDE), ("lent", _PAIRS)), from_client=False),
    _Schema(65, Refused, (("message", _TEXT),), from_client=False),
    _Schema(66, Reported, (("seq", _WIDE), ("lent", _PAIRS), ("refused", _INDEXES)), from_client=False),
    _Schema(67, Opened, (("read", _WIDE), *_FOUND), from_client=False),
    _Schema(68, Fetched, (("read", _WIDE), *_FOUND), from_client=False),
    _Schema(69, HardPinned, (("request", _WIDE), ("pinned", _FLAG), *_FOUND), from_client=False),
    _Schema(96, Status, _STATUS, from_client=False),
    _Schema(97, Listed, (("after", _WIDE), ("more", _FLAG), ("lines", _LINES)), from_client=False),
    _Schema(
        98,
        VerifiedBlocks,
        (("after", _WIDE), ("more", _FLAG), *((n, _WIDE) for n in ("host_good", "host_bad", "nvme_good", "nvme_bad"))),
        from_client=False,
    ),
    _Schema(99, Cleared, (("blocks", _WIDE),), from_client=False),
    _Schema(
        100,
        Announcements,
        (("messages", _Kind(_pack_announcements, _parse_announcements)),),
        from_client=False,
    ),
)
_BY_CLASS = {schema.cls: schema for schema in _SCHEMAS}
_BY_CODE = {schema.code: schema for schema in _SCHEMAS}
_MOST_FIELDS = 1 + max(len(schema.fields) for schema in _SCHEMAS)
_OF_CLIENTS = (Attach, Report, Open, Fetch, Used, CloseRead, Bad, Forget, HardPin, HardUnpin, Detach)


def encode(message: Request | Answer) -> bytes:
    """The frame of a message, its length in front. Raises WireError when a field is out of its range."""
    schema = _BY_CLASS[type(message)]
    values: list[Any] = [schema.code]
    for name, kind in schema.fields:
        values.append(PROTOCOL if name == "protocol" else kind.pack(getattr(message, name)))
    body = cast(bytes, msgpack.packb(values))
    limit = MAX_REQUEST_BYTES if schema.from_client else MAX_REPLY_BYTES
    if len(body) > limit:
        raise WireError(f"{type(message).__name__} takes {len(body)} bytes; a frame may have {limit}")
    return FRAME_HEADER.pack(len(body)) + body


def decode_request(body: bytes, client: int) -> Request:
    """The message of a client in a frame without its length. Raises WireError."""
    schema, values = _decode(body, from_client=True)
    return cast(Request, schema.cls(client, *values) if schema.cls in _OF_CLIENTS else schema.cls(*values))


def decode_answer(body: bytes) -> Answer:
    """The message of a store in a frame without its length. Raises WireError."""
    schema, values = _decode(body, from_client=False)
    return cast(Answer, schema.cls(*values))


def _decode(body: bytes, *, from_client: bool) -> tuple[_Schema, list[Any]]:
    flat = _OneArray()
    try:
        items = msgpack.unpackb(
            body,
            list_hook=flat.ended,
            max_array_len=_MOST_FIELDS,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"no msgpack array of this protocol: {error}") from None
    if type(items) is not list or not items or type(items[0]) is not int:
        raise WireError(f"{_short(items)} is no array that begins with a code")
    schema = _BY_CODE.get(items[0])
    if schema is None or schema.from_client is not from_client or len(items) != 1 + len(schema.fields):
        raise WireError(f"code {items[0]} with {len(items) - 1} fields is no message for this side")
    values = [kind.parse(item) for (_, kind), item in zip(schema.fields, items[1:], strict=True)]
    return schema, values[1:] if schema.fields and schema.fields[0][0] == "protocol" else values


class _OneArray:
    """Counts the arrays of a frame while they end: an inner one ends first, so the second is one too many."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def ended(self, items: list[Any]) -> list[Any]:
        self.count += 1
        if self.count > 1:
            raise WireError("an array inside an array")
        return items


class FrameBuffer:
    """Cuts a byte stream into frames. Holds less than one frame beyond what it has given out. limit: bytes of a
    frame.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = b""
        self._wanted = 0  # bytes until a frame may be whole
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Bodies of the frames that are whole now. Raises WireError on a frame over the limit."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size < self._wanted:
            return
        buffer = data if len(self._pieces) == 1 else b"".join(self._pieces)
        start = 0
        self._wanted = FRAME_HEADER.size
        while len(buffer) - start >= FRAME_HEADER.size:
            (length,) = FRAME_HEADER.unpack_from(buffer, start)
            if length > self._limit:
                raise WireError(f"a frame of {length} bytes; at most {self._limit} may be sent")
            end = start + FRAME_HEADER.size + length
            if end > len(buffer):
                self._wanted = end - start
                break
            yield buffer[start + FRAME_HEADER.size : end]
            start = end
        rest = buffer[start:]
        self._pieces, self._size = [rest] if rest else [], len(rest)
