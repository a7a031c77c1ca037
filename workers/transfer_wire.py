"""The msgpack form of orders and events of links, in which a leader and the other ranks of its group send them.

Owns the closed schema and nothing else: an item is a list that begins with its kind, its fields follow in order. What
is read is checked, so that nothing but a whole order or event comes of it; whether it makes sense is the link's
business. How many there may be is the frame's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from tournant.kvstore.block import KEY_BYTES, Version
from tournant.workers.transfer_messages import (
    HOST,
    NUM_KINDS,
    NVME,
    REMOTE,
    Attached,
    Bring,
    Brought,
    Copied,
    Detached,
    DropStash,
    EndRead,
    Event,
    Fetch,
    Fetched,
    Found,
    Leave,
    Lent,
    Load,
    Loaded,
    Lookup,
    Order,
    ReadEnded,
    Refused,
    Save,
    Saved,
    SaveEntry,
    Stash,
    Stashed,
    Unstash,
    Unstashed,
    Used,
)

_T = TypeVar("_T")


def order_to_wire(order: Order) -> list[Any]:
    """An order as a list for msgpack."""
    return _to_wire(_ORDERS, order)


def order_from_wire(data: Any) -> Order:
    """Inverse of `order_to_wire`. Raises ValueError when it is no order."""
    return cast(Order, _from_wire(_ORDERS, data))


def event_to_wire(event: Event) -> list[Any]:
    """An event as a list for msgpack."""
    return _to_wire(_EVENTS, event)


def event_from_wire(data: Any) -> Event:
    """Inverse of `event_to_wire`. Raises ValueError when it is no event."""
    return cast(Event, _from_wire(_EVENTS, data))


# ---- fields


@dataclass(frozen=True, slots=True)
class _Field:
    """write: value to plain value, None when it is one; read: back, raises ValueError."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any] | None = None


def _number(data: Any) -> int:
    if type(data) is not int or not 0 <= data < 1 << 64:
        raise ValueError(f"{data!r} stands where a number of 64 bits must")
    return data


def _kind(data: Any) -> int:
    if _number(data) >= NUM_KINDS:
        raise ValueError(f"there is no kind {data} of blocks")
    return cast(int, data)


def _seconds(data: Any) -> float:
    if type(data) is not float:
        raise ValueError(f"{data!r} stands where seconds must")
    return data


def _bool(data: Any) -> bool:
    if type(data) is not bool:
        raise ValueError(f"{data!r} stands where true or false must")
    return data


def _text(data: Any) -> str:
    if type(data) is not str:
        raise ValueError(f"{data!r} stands where text must")
    return data


def _key(data: Any) -> bytes:
    if type(data) is not bytes or len(data) != KEY_BYTES:
        raise ValueError(f"{data!r} stands where a key must")
    return data


def _tiers(data: Any) -> bytes:
    if type(data) is not bytes or not set(data) <= {HOST, NVME, REMOTE}:
        raise ValueError(f"{data!r} stands where tiers must")
    return data


def _tuple_of(read: Callable[[Any], _T], length: int | None = None) -> Callable[[Any], tuple[_T, ...]]:
    def read_all(data: Any) -> tuple[_T, ...]:
        if not isinstance(data, list | tuple) or (length is not None and len(data) != length):
            raise ValueError(f"{data!r} stands where a list{'' if length is None else f' of {length}'} must")
        return tuple(map(read, data))

    return read_all


_shown = _tuple_of(_number, 3)


def _one_shown(data: Any) -> tuple[int, ...]:
    found = _shown(data)
    if found[2] not in (HOST, NVME):
        raise ValueError(f"there is no tier {found[2]}")
    return found


def _version(data: Any) -> Version:
    return Version(*_tuple_of(_number, 2)(data))


def _entry(data: Any) -> SaveEntry:
    block, key, writer_id, counter, cost_us, depth = _tuple_of(lambda item: item, 6)(data)
    version = Version(_number(writer_id), _number(counter))
    return SaveEntry(_number(block), _key(key), version, _number(cost_us), _number(depth))


def _version_out(version: Version) -> list[int]:
    return [version.writer_id, version.counter]


def _entry_out(entry: SaveEntry) -> list[Any]:
    return [entry.block, entry.key, *_version_out(entry.version), entry.cost_us, entry.depth]


def _all_out(write: Callable[[Any], list[Any]]) -> Callable[[Sequence[Any]], list[Any]]:
    return lambda items: [write(item) for item in items]


_NUMBER, _SECONDS, _BOOL, _TEXT, _TIERS, _KIND = map(_Field, (_number, _seconds, _bool, _text, _tiers, _kind))
_NUMBERS, _KEYS = _Field(_tuple_of(_number)), _Field(_tuple_of(_key))
_VERSIONS = _Field(_tuple_of(_version), _all_out(_version_out))
_ENTRIES = _Field(_tuple_of(_entry), _all_out(_entry_out))
_SHOWN = _Field(_tuple_of(_tuple_of(_one_shown)))

# ---- items


class _Form:
    """How items of one class are written: its fields in their order."""

    def __init__(self, made: type, *forms: _Field) -> None:
        names = [item.name for item in fields(made)]
        self.made = made
        self.forms = dict(zip(names, forms, strict=True))
        self.values: Callable[[Any], Sequence[Any]] = lambda item: [getattr(item, name) for name in names]


_Schema = dict[str, _Form]
_ORDERS: _Schema = {
    "lookup": _Form(Lookup, _NUMBER, _KEYS),
    "bring": _Form(Bring, _NUMBER, _NUMBER),
    "fetch": _Form(Fetch, _NUMBER, _NUMBER, _VERSIONS),
    "load": _Form(Load, _NUMBER, _NUMBER, _NUMBERS),
    "end_read": _Form(EndRead, _NUMBER),
    "save": _Form(Save, _NUMBER, _ENTRIES, _NUMBER, _KIND),
    "used": _Form(Used, _KEYS),
    "stash": _Form(Stash, _NUMBER, _NUMBER),
    "unstash": _Form(Unstash, _NUMBER, _NUMBER),
    "drop_stash": _Form(DropStash, _NUMBER),
    "leave": _Form(Leave),
}
_EVENTS: _Schema = {
    "attached": _Form(Attached, _NUMBER, _NUMBERS, _NUMBER, _NUMBER),
    "detached": _Form(Detached, _TEXT),
    "refused": _Form(Refused, _TEXT, _BOOL),
    "found": _Form(Found, _NUMBER, _TIERS, _SECONDS, _SHOWN),
    "brought": _Form(Brought, _NUMBER, _SHOWN),
    "fetched": _Form(Fetched, _NUMBER, _NUMBER, _NUMBER, _SECONDS, _NUMBER, _NUMBER, _SECONDS, _BOOL),
    "loaded": _Form(Loaded, _NUMBER, _NUMBER),
    "read_ended": _Form(ReadEnded, _NUMBER, _NUMBER, _NUMBER, _SECONDS, _NUMBER),
    "copied": _Form(Copied, _NUMBER, _NUMBER, _SECONDS),
    "saved": _Form(Saved, _NUMBER, _BOOL, _NUMBERS, _NUMBER),
    "stashed": _Form(Stashed, _NUMBER, _BOOL, _NUMBER),
    "unstashed": _Form(Unstashed, _NUMBER, _BOOL, _NUMBER),
    "lent": _Form(Lent, _NUMBER, _KIND),
}
_NAMES = {form.made: name for schema in (_ORDERS, _EVENTS) for name, form in schema.items()}


def _to_wire(schema: _Schema, item: object) -> list[Any]:
    name = _NAMES[type(item)]
    form = schema[name]
    plain = [
        value if one.write is None else one.write(value)
        for one, value in zip(form.forms.values(), form.values(item), strict=True)
    ]
    return [name, *plain]


def _from_wire(schema: _Schema, data: Any) -> object:
    if not isinstance(data, list | tuple) or not data or not isinstance(data[0], str) or data[0] not in schema:
        raise ValueError(f"an item must be a list that begins with one of {', '.join(schema)}; this is {data!r:.100}")
    form = schema[data[0]]
    if len(data) != len(form.forms) + 1:
        raise ValueError(f"{data[0]!r} has {len(form.forms)} fields; {len(data) - 1} came")
    return form.made(*(one.read(value) for one, value in zip(form.forms.values(), data[1:], strict=True)))
