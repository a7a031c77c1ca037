"""Frames between store and clients: every message comes back as it left, and nothing else is taken for one."""

from __future__ import annotations

import random
from dataclasses import fields

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tournant.kvstore import wire
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
from tournant.kvstore.block import Part, Version
from tournant.kvstore.directory import MAX_SHARDS, Announcement, Heard
from tournant.kvstore.events import (
    Attach,
    Attached,
    Bad,
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
    Report,
    Reported,
    ReportEntry,
    Used,
)
from tournant.kvstore.groups import ROW
from tournant.kvstore.wire import FRAME_HEADER, FrameBuffer, WireError, decode_answer, decode_request, encode

KEY = bytes(range(32))
PART = Part(0, 30, 0, 3)
ENTRY = ReportEntry(KEY, Version(7, 2), 3, 4, 5, 6, 7, 1, 9)
FOUND = (b"\x01", bytes(range(48)), (PART,))
GOLDEN = {
    Attach(9, b"w" * 32, "bf16", b"t", 7, PART, (PART,), 4096, 5, adopts=True): (
        "9b01" "04" "c420" + "77" * 32 + "a462663136" "c40174" "07"
        "c410000000001e0000000000000003000000" "c410000000001e0000000000000003000000" "cd1000" "05" "c3"
    ),
    Report(9, 1, (ENTRY,), ((3, 4),)): (
        "940201" "c458" + KEY.hex() + "0700000000000000" "0200000000000000" "03000000" "0400000000000000" "05000000"
        "0600000000000000" "0700000000000000" "01000000" "09000000" "c40c" "030000000400000000000000"
    ),
    Open(9, 1, (KEY,)): "930301c420" + KEY.hex(),
    Fetch(9, 1, (Version(7, 2),)): "930401c410" "07000000000000000200000000000000",
    CloseRead(9, 300): "9205cd012c",
    Bad(9, KEY, Version(7, 2), 3, 4): "9506c420" + KEY.hex() + "c410" "07000000000000000200000000000000" "0304",
    Forget(9, KEY, Version(7, 2)): "9307c420" + KEY.hex() + "c410" "07000000000000000200000000000000",
    HardPin(9, 1, ((KEY, Version(7, 2)),)): "930801c430" + KEY.hex() + "07000000000000000200000000000000",
    HardUnpin(9, 1): "920901",
    Used(9, (KEY,)): "920ac420" + KEY.hex(),
    Detach(9): "910b",
    StatusQuery(): "922004",
    ListBlocks(5): "93210405",
    VerifyBlocks(5): "93220405",
    Clear(): "922304",
    PollAnnouncements(5, 2, ((1, Heard(7, 8, 9)),)): (
        "952404" "05" "02" "c41c" "01000000" "0700000000000000" "0800000000000000" "0900000000000000"
    ),
    Attached(1, ((3, 4),)): "934001c40c030000000400000000000000",
    Refused("no"): "9241a26e6f",
    Reported(1, ((3, 4),), (0,)): "944201c40c030000000400000000000000c40400000000",
    Opened(1, *FOUND): "954301c40101c430" + bytes(range(48)).hex() + "c410000000001e0000000000000003000000",
    Fetched(1, *FOUND): "954401c40101c430" + bytes(range(48)).hex() + "c410000000001e0000000000000003000000",
    HardPinned(1, True, *FOUND): (
        "964501c3c40101c430" + bytes(range(48)).hex() + "c410000000001e0000000000000003000000"
    ),
    Listed(7, False, (BlockLine(KEY, 7, 2, 1, 5, 6, 1, 0, 3, 2),)): (
        "946107c2c447" + KEY.hex() + "07000000000000000200000000000000" "01000000" "0500000000000000" "06000000"
        "0100" "03000000" "02"
    ),
    VerifiedBlocks(7, True, 1, 2, 3, 4): "976207c301020304",
    Cleared(3): "926303",
    Announcements(((1, Announcement(5, 7, 8, (KEY,), (), (KEY,), 9)),)): (
        "9264" "c470" "01000000" "0500000000000000" "0700000000000000" "0800000000000000" "0900000000000000"
        "01000000" "00000000" "01000000" + 2 * KEY.hex()
    ),
}  # fmt: skip

u32, u64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
key = st.binary(min_size=32, max_size=32)
version = st.builds(Version, u64, u64)
part = st.builds(
    lambda a, b, c, d: Part(min(a, b), max(a, b) + 1, min(c, d), max(c, d) + 1), *[st.integers(0, 1 << 31)] * 4
)
parts = st.lists(part, max_size=4).map(tuple)
pairs = st.lists(st.tuples(u32, u64), max_size=8).map(tuple)
entry = st.builds(ReportEntry, key, version, u32, u64, u32, u64, u64, u32, u32)
rows = st.binary(max_size=8).map(lambda seed: seed * ROW.size)
found = (st.binary(max_size=20), rows, parts)
line = st.builds(BlockLine, key, u64, u64, u32, u64, u32, *[st.integers(0, 255)] * 2, u32, st.integers(0, 255))
heard = st.builds(Heard, u64, u64, u64)
announcement = st.builds(Announcement, u64, u64, u64, *[st.lists(key, max_size=3).map(tuple)] * 3, u64)
CLIENT = st.just(9)
form = st.text(max_size=32)


def many(one: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(one, max_size=20).map(tuple)


REQUESTS = st.one_of(
    st.builds(Attach, CLIENT, key, form, st.binary(max_size=64), u64, st.none() | part, parts, u64, u32, st.booleans()),
    st.builds(Report, CLIENT, u64, many(entry), pairs),
    st.builds(Open, CLIENT, u64, many(key)),
    st.builds(Fetch, CLIENT, u64, many(version)),
    st.builds(CloseRead, CLIENT, u64),
    st.builds(Bad, CLIENT, key, version, u32, u64),
    st.builds(Forget, CLIENT, key, version),
    st.builds(HardPin, CLIENT, u64, many(st.tuples(key, version))),
    st.builds(HardUnpin, CLIENT, u64),
    st.builds(Used, CLIENT, many(key)),
    st.builds(Detach, CLIENT),
    st.builds(ListBlocks, u64),
    st.builds(VerifyBlocks, u64),
    st.builds(PollAnnouncements, u64, st.integers(1, MAX_SHARDS), many(st.tuples(u32, heard))),
    st.sampled_from([StatusQuery(), Clear()]),
)
STATUS = st.builds(Status, **{f.name: pairs if f.name == "pages" else u64 for f in fields(Status)})
ANSWERS = st.one_of(
    st.builds(Attached, u64, pairs),
    st.builds(Refused, st.text(max_size=200)),
    st.builds(Reported, u64, pairs, many(u32)),
    st.builds(Opened, u64, *found),
    st.builds(Fetched, u64, *found),
    st.builds(HardPinned, u64, st.booleans(), *found),
    STATUS,
    st.builds(Listed, u64, st.booleans(), many(line)),
    st.builds(VerifiedBlocks, u64, st.booleans(), u64, u64, u64, u64),
    st.builds(Cleared, u64),
    st.builds(Announcements, many(st.tuples(u32, announcement))),
)


def body_of(message: object) -> bytes:
    return encode(message)[FRAME_HEADER.size :]  # type: ignore[arg-type]


@pytest.mark.parametrize(("message", "golden"), GOLDEN.items(), ids=lambda value: type(value).__name__)
def test_golden_bytes(message: object, golden: str) -> None:
    assert body_of(message).hex() == golden
    assert FRAME_HEADER.unpack_from(encode(message)) == (len(golden) // 2,)  # type: ignore[arg-type]


def test_every_message_is_held_still() -> None:
    assert {type(message) for message in GOLDEN} | {Status} == set(wire._BY_CLASS)


@given(REQUESTS)
def test_requests_come_back(message: object) -> None:
    assert decode_request(body_of(message), 9) == message


@given(ANSWERS)
def test_answers_come_back(message: object) -> None:
    assert decode_answer(body_of(message)) == message


def taken_or_refused(body: bytes) -> None:
    """Whatever is taken for a message has that very form; everything else is refused with a WireError."""
    for decode in (lambda data: decode_request(data, 9), decode_answer):
        try:
            message = decode(body)
        except WireError:
            continue
        assert decode(body_of(message)) == message


@given(st.one_of(REQUESTS, ANSWERS), st.randoms(use_true_random=False))
def test_damaged_messages(message: object, rng: random.Random) -> None:
    body = bytearray(body_of(message))
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(body))
        match rng.randrange(4):
            case 0:
                body[place] = rng.randrange(256)
            case 1:
                del body[place]
            case 2:
                body.insert(place, rng.randrange(256))
            case _:
                del body[place:]
        body += b"\x00" * (not body)
    taken_or_refused(bytes(body))


scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=100) | st.text()
values = st.recursive(
    scalars | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(st.sampled_from(sorted(wire._BY_CODE)), st.lists(values, max_size=12))
def test_other_types_and_counts(code: int, items: list[object]) -> None:
    taken_or_refused(msgpack.packb([code, *items]))


@given(st.binary(max_size=200))
def test_random_bytes(body: bytes) -> None:
    taken_or_refused(body)


@pytest.mark.parametrize(
    "items",
    [
        [],
        [99],
        ["1"],
        [True, 1],
        [5],
        [5, 1, 1],
        [5, -1],
        [5, 1.0],
        [5, True],
        [5, [1]],
        [3, 1, b"x" * 33],
        [6, KEY, b"v" * 16, 1 << 32, 1],
        [1, 4, b"w" * 32, "bf16", b"", 7, None, b"", 0, 0],
        [1, 3, b"w" * 31, "bf16", b"", 7, None, b"", 0, 0],
        [1, 3, b"w" * 32, b"bf16", b"", 7, None, b"", 0, 0],
        [1, 3, b"w" * 32, "bf16", b"", 7, b"\0" * 16, b"", 0, 0],
        [36, 3, 5, 0, b""],
        [36, 3, 5, 65, b""],
        [36, 3, 5, 1, b"h" * 27],
        [64, 1, b""],
        {"a": 1},
        5,
    ],
    ids=repr,
)
def test_what_is_no_request(items: object) -> None:
    with pytest.raises(WireError):
        decode_request(msgpack.packb(items), 9)


ROW_OF_3 = Announcement(5, 7, 8, (KEY,), (KEY,), (KEY,))


@pytest.mark.parametrize("size", [47, 48, 48 + 95, 48 + 97], ids=str)
def test_an_announcement_with_other_keys_than_it_says_is_refused(size: int) -> None:
    value = wire._pack_announcements([(1, ROW_OF_3), (1, ROW_OF_3)])
    assert decode_answer(msgpack.packb([100, value])) == Announcements(((1, ROW_OF_3),) * 2)
    with pytest.raises(WireError):
        decode_answer(msgpack.packb([100, value[:size]]))


def test_another_protocol_is_named() -> None:
    body = bytearray(body_of(StatusQuery()))
    body[2] = 77
    with pytest.raises(WireError, match="protocol 77; this side speaks 4: use the same release"):
        decode_request(bytes(body), 9)


@pytest.mark.parametrize("inner", [[[]] * 15, [[[1]]], [1, [2]]], ids=repr)
def test_nested_arrays_stop_the_reading(inner: list[object]) -> None:
    with pytest.raises(WireError, match="an array inside an array"):
        decode_request(msgpack.packb([5, *inner]), 9)


def test_what_is_nested_too_deep_to_be_read() -> None:
    with pytest.raises(WireError):
        decode_request(b"\x91" * 100_000 + b"\xc0", 9)


@pytest.mark.parametrize(
    "message",
    [
        Open(0, -1, ()),
        Open(0, 1, (b"short",)),
        Report(0, 1, (ReportEntry(KEY, Version(1 << 64, 0), 0, 0, 0, 0),)),
        Report(0, 1, (ReportEntry(b"short", Version(1, 0), 0, 0, 0, 0),)),
        Forget(0, KEY, Version(-1, 0)),
        Refused("x" * 5000),
        PollAnnouncements(1 << 64, 1),
        PollAnnouncements(0, 0),
        PollAnnouncements(0, 1, ((0, Heard(0, 0, -1)),)),
        Announcements(((0, Announcement(0, 0, 0, (b"short",))),)),
        Open(0, 1, (KEY,) * 100_000),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_has_no_form_is_not_sent(message: object) -> None:
    with pytest.raises(WireError):
        encode(message)  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=40), max_size=8), st.randoms(use_true_random=False))
def test_frames_are_cut_anywhere(bodies: list[bytes], rng: random.Random) -> None:
    stream = b"".join(FRAME_HEADER.pack(len(body)) + body for body in bodies)
    frames, found = FrameBuffer(40), []
    while stream:
        step = rng.randrange(1, 60)
        found += list(frames.feed(stream[:step]))
        stream = stream[step:]
    assert found == bodies


def test_a_frame_over_the_limit_is_refused_before_it_has_come() -> None:
    frames = FrameBuffer(100)
    assert list(frames.feed(FRAME_HEADER.pack(100)[:3])) == []
    with pytest.raises(WireError, match="a frame of 101 bytes; at most 100"):
        list(FrameBuffer(100).feed(FRAME_HEADER.pack(101)))
