"""The wire form of orders and events of links: round trips through msgpack, refusals."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tournant.kvstore.block import Version
from tournant.workers.transfer_messages import HOST, NVME, REMOTE, Event, Order, SaveEntry
from tournant.workers.transfer_wire import event_from_wire, event_to_wire, order_from_wire, order_to_wire

NUMBERS = st.integers(0, (1 << 64) - 1)
KEYS = st.binary(min_size=32, max_size=32)
VERSIONS = st.builds(Version, NUMBERS, NUMBERS)
SHOWN = st.tuples(NUMBERS, NUMBERS, st.sampled_from((HOST, NVME)))
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "int": NUMBERS,
    "float": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "str": st.text(),
    "bytes": st.lists(st.sampled_from((HOST, NVME, REMOTE))).map(bytes),
    "tuple[int, ...]": st.lists(NUMBERS).map(tuple),
    "tuple[bytes, ...]": st.lists(KEYS).map(tuple),
    "tuple[Version, ...]": st.lists(VERSIONS).map(tuple),
    "tuple[SaveEntry, ...]": st.lists(st.builds(SaveEntry, NUMBERS, KEYS, VERSIONS, NUMBERS, NUMBERS)).map(tuple),
    "tuple[tuple[Shown, ...], ...]": st.lists(st.lists(SHOWN).map(tuple)).map(tuple),
}


def items(union: Any) -> st.SearchStrategy[Any]:
    """Any item of a union of classes, any values in its fields."""
    return st.one_of(
        st.builds(
            made,
            **{
                item.name: st.sampled_from((0, 1)) if item.name == "kind" else BY_TYPE[str(item.type)]
                for item in fields(made)
            },
        )
        for made in get_args(union)
    )


@given(items(Order))
def test_orders_survive(order: Order) -> None:
    assert order_from_wire(msgpack.unpackb(msgpack.packb(order_to_wire(order)))) == order


@given(items(Event))
def test_events_survive(event: Event) -> None:
    assert event_from_wire(msgpack.unpackb(msgpack.packb(event_to_wire(event)))) == event


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 65) | st.floats() | st.text(max_size=3) | st.binary(max_size=33),
    lambda inner: st.lists(inner, max_size=3),
)


@given(items(Order | Event), st.data())
def test_what_is_damaged_is_refused_or_is_an_item_of_its_class(item: Order | Event, data: st.DataObject) -> None:
    """Never anything else than ValueError, and never a value of another type than the field's."""
    is_order = isinstance(item, get_args(Order))
    wire = order_to_wire(item) if is_order else event_to_wire(item)  # type: ignore[arg-type]
    place = data.draw(st.integers(0, len(wire) - 1))
    wire[place] = data.draw(ANYTHING)
    try:
        found = order_from_wire(wire) if is_order else event_from_wire(wire)
    except ValueError:
        return
    again = order_to_wire(found) if is_order else event_to_wire(found)  # type: ignore[arg-type]
    assert msgpack.packb(again) == msgpack.packb(wire)


@pytest.mark.parametrize(
    "data",
    [
        None, [], ["leave", 1], ["drop_stash"], ["end_read", 1, 2], ["end_read", True], ["end_read", -1],
        ["end_read", 1 << 64], ["detached", "x"],
        [["end_read"], 1], ["lookup", 1, [b"short"]], ["used", b"k" * 32], ["fetch", 1, 1, [[1]]],
        ["save", 1, [], 1, 2], ["save", 1, [[1, b"k" * 32, 1, 1, 1]], 1, 0], {"leave": 1},
    ],
)  # fmt: skip
def test_what_is_no_order_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"must|there is no|fields; "):
        order_from_wire(data)


@pytest.mark.parametrize(
    "data",
    [
        ["found", 1, b"\x04", 0.0, []], ["found", 1, b"", 0, []], ["found", 1, b"\x01", 0.0, [[[1, 1, 3]]]],
        ["saved", 1, 1, [], 0], ["detached", b"x"], ["lent", 1, 2], ["leave"], ["stashed", 1, True],
    ],
)  # fmt: skip
def test_what_is_no_event_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"must|there is no|fields; "):
        event_from_wire(data)
