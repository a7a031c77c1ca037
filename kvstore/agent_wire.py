"""Frames between an engine's link and the agent of its node, which brings blocks that other nodes hold into the node's
store: the closed schema of both directions.

Owns bytes <-> messages, and nothing else. A frame is as in wire.py: a 4-byte little-endian length and one flat msgpack
array, the code of the message and then its fields; keys are packed into one byte string.

Invariants:
 1. What `decode_*` accepts, `encode` would have written.
 2. Changing a message changes AGENT_PROTOCOL, which every question carries.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, cast

import msgpack

from tournant.kvstore.block import KEY_BYTES, Part
from tournant.kvstore.record import MAX_KV_FORM_BYTES, MAX_PAYLOAD_BYTES
from tournant.kvstore.wire import FRAME_HEADER, WireError

AGENT_SOCKET = "agent"  # beside the store's socket
AGENT_PROTOCOL = 2
MAX_KEYS = 1 << 14  # of one question
MAX_FRAME_BYTES = MAX_KEYS * KEY_BYTES + 4096
MAX_NODE_LETTERS = 128
MAX_SIZES = 2  # of the blocks of one engine
MAX_TIMEOUT_MS = 3_600_000
_PART = struct.Struct("<4I")
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Locate:
    """Which other node holds the most leading ones of these keys? part: wanted of them. Answered by `Located`."""

    request: int
    keys: tuple[bytes, ...]
    part: Part


@dataclass(frozen=True, slots=True)
class Bring:
    """Copy blocks of a chain from a node into this node's store, as far as that goes in time. One that has none of them
    in this part is taken for another one that is known to hold the keys. Answered by `Brought`.

    node: as in `Located`; depth: place of the first key in its chain, as far as the asker knows; part, weights_id,
    kv_form, tenant_check: of the asking engine (`client.Identity`); slot_bytes: of its blocks, each size once.
    """

    request: int
    node: str
    keys: tuple[bytes, ...]
    depth: int
    part: Part
    weights_id: bytes
    kv_form: str
    tenant_check: bytes
    slot_bytes: tuple[int, ...]
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Located:
    """A hint: `count` leading keys are with `node`, in RAM or on NVMe; 0 and "" when none is known to be elsewhere. In
    which parts it has them is not known.
    """

    request: int
    count: int
    node: str


@dataclass(frozen=True, slots=True)
class Brought:
    """The first `count` blocks were copied, or were here already; open them to know. num_bytes: that came;
    microseconds: it took; failed: the other node gave up, was late, or gave what was wrong.
    """

    request: int
    count: int
    num_bytes: int
    microseconds: int
    failed: bool


Question = Locate | Bring
AgentAnswer = Located | Brought


def _number(least: int, most: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise WireError(f"{value!r:.60} is no whole number from {least} to {most}")
        return value

    return check


def _text(most: int) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if type(value) is not str or len(value) > most:
            raise WireError(f"{value!r:.60} is no text of up to {most} letters")
        return value

    return check


def _raw(least: int, most: int) -> Callable[[Any], bytes]:
    def check(value: Any) -> bytes:
        if type(value) is not bytes or not least <= len(value) <= most:
            raise WireError(f"{value!r:.60} is not {least} to {most} bytes")
        return value

    return check


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise WireError(f"{value!r:.60} is neither true nor false")
    return value


def _keys(value: Any) -> tuple[bytes, ...]:
    if type(value) is not bytes or len(value) % KEY_BYTES or len(value) > MAX_KEYS * KEY_BYTES:
        raise WireError(f"{value!r:.60} is no run of up to {MAX_KEYS} keys of {KEY_BYTES} bytes")
    return tuple(value[start : start + KEY_BYTES] for start in range(0, len(value), KEY_BYTES))


def _part(value: Any) -> Part:
    if type(value) is not bytes or len(value) != _PART.size:
        raise WireError(f"{value!r:.60} is no part of a block")
    part = Part(*_PART.unpack(value))
    if not (part.layer_start < part.layer_stop and part.head_start < part.head_stop):
        raise WireError(f"{part} is empty or runs backwards")
    return part


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not bytes or len(value) % 4 or not 1 <= len(value) // 4 <= MAX_SIZES:
        raise WireError(f"{value!r:.60} is not 1 to {MAX_SIZES} sizes of blocks")
    check = _number(1, MAX_PAYLOAD_BYTES)
    return tuple(check(size) for size in struct.unpack(f"<{len(value) // 4}I", value))


def _pack(value: Any) -> Any:
    """A field's value as msgpack takes it."""
    if isinstance(value, Part):
        return _PART.pack(value.layer_start, value.layer_stop, value.head_start, value.head_stop)
    if isinstance(value, tuple):
        return b"".join(one if isinstance(one, bytes) else struct.pack("<I", one) for one in value)
    return value


_WIDE, _COUNT, _NODE = _number(0, _U64), _number(0, MAX_KEYS), _text(MAX_NODE_LETTERS)
_SCHEMAS: dict[int, tuple[type, tuple[Callable[[Any], Any], ...]]] = {
    1: (Locate, (_WIDE, _keys, _part)),
    2: (
        Bring,
        (
            _WIDE, _NODE, _keys, _number(0, _U32), _part, _raw(KEY_BYTES, KEY_BYTES), _text(MAX_KV_FORM_BYTES),
            _raw(0, 64), _sizes, _number(0, MAX_TIMEOUT_MS),
        ),
    ),
    64: (Located, (_WIDE, _COUNT, _NODE)),
    65: (Brought, (_WIDE, _COUNT, _WIDE, _WIDE, _flag)),
}  # fmt: skip
_CODES = {cls: code for code, (cls, _) in _SCHEMAS.items()}
_QUESTIONS = (Locate, Bring)


def encode(message: Question | AgentAnswer) -> bytes:
    """The frame of a message, its length in front. Raises WireError when a field is out of its range."""
    code = _CODES[type(message)]
    head = [code, AGENT_PROTOCOL] if isinstance(message, _QUESTIONS) else [code]
    values = [_pack(getattr(message, item.name)) for item in fields(message)]
    for check, value in zip(_SCHEMAS[code][1], values, strict=True):
        check(value)
    body = cast(bytes, msgpack.packb(head + values))
    return FRAME_HEADER.pack(len(body)) + body


def decode_question(body: bytes) -> Question:
    """The message of a link in a frame without its length. Raises WireError."""
    items = _items(body)
    if items[1:2] != [AGENT_PROTOCOL] or type(items[1]) is not int:
        raise WireError(f"protocol {items[1:2]!r:.60}; this agent speaks {AGENT_PROTOCOL}: use the same release")
    return cast(Question, _parsed([items[0], *items[2:]], _QUESTIONS))


def decode_answer(body: bytes) -> AgentAnswer:
    """The message of an agent in a frame without its length. Raises WireError."""
    return cast(AgentAnswer, _parsed(_items(body), (Located, Brought)))


def _items(body: bytes) -> list[Any]:
    try:
        items = msgpack.unpackb(body, max_array_len=16, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"no msgpack array of this protocol: {error}") from None
    if type(items) is not list or not items or type(items[0]) is not int:
        raise WireError("a frame is no array that begins with a code")
    return items


def _parsed(items: list[Any], allowed: tuple[type, ...]) -> object:
    cls, checks = _SCHEMAS.get(items[0], (object, ()))
    if cls not in allowed or len(items) != 1 + len(checks):
        raise WireError(f"code {items[0]} with {len(items) - 1} fields is no message for this side")
    return cls(*(check(item) for check, item in zip(checks, items[1:], strict=True)))
