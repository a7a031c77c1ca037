"""Frames between links and agents: every message comes back as it left, and nothing else is taken for one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tournant.kvstore.agent_wire import (
    MAX_KEYS,
    MAX_TIMEOUT_MS,
    Bring,
    Brought,
    Locate,
    Located,
    decode_answer,
    decode_question,
    encode,
)
from tournant.kvstore.block import Part
from tournant.kvstore.record import MAX_PAYLOAD_BYTES
from tournant.kvstore.wire import FRAME_HEADER, WireError

KEY, PART = bytes(range(32)), Part(0, 30, 0, 3)
GOLDEN = {
    Locate(7, (KEY,), PART): "95010207c420" + KEY.hex() + "c410000000001e0000000000000003000000",
    Bring(7, "n", (KEY,), 3, PART, b"w" * 32, "bf16", b"t", (4096, 8), 9): (
        "9c020207" "a16e" "c420" + KEY.hex() + "03" "c410000000001e0000000000000003000000" "c420" + "77" * 32
        + "a462663136" "c40174" "c4080010000008000000" "09"
    ),
    Located(7, 1, "n"): "94400701a16e",
    Brought(7, 1, 2, 3, True): "96410701" "0203" "c3",
}  # fmt: skip

u64, u32 = st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 32) - 1)
key, node = st.binary(min_size=32, max_size=32), st.text(max_size=20)
keys = st.lists(key, max_size=8).map(tuple)
part = st.builds(lambda a, b, c, d: Part(a, a + b, c, c + d), *[st.integers(0, 99), st.integers(1, 99)] * 2)
sizes = st.lists(st.integers(1, MAX_PAYLOAD_BYTES), min_size=1, max_size=2).map(tuple)
QUESTIONS = st.one_of(
    st.builds(Locate, u64, keys, part),
    st.builds(
        Bring, u64, node, keys, u32, part, key, st.text(max_size=32), st.binary(max_size=64), sizes,
        st.integers(0, MAX_TIMEOUT_MS),
    ),
)  # fmt: skip
ANSWERS = st.one_of(
    st.builds(Located, u64, st.integers(0, MAX_KEYS), node),
    st.builds(Brought, u64, st.integers(0, MAX_KEYS), u64, u64, st.booleans()),
)


def body_of(message: object) -> bytes:
    return encode(message)[FRAME_HEADER.size :]  # type: ignore[arg-type]


@pytest.mark.parametrize(("message", "golden"), GOLDEN.items(), ids=lambda value: type(value).__name__)
def test_golden_bytes(message: object, golden: str) -> None:
    assert body_of(message).hex() == golden


@given(QUESTIONS)
def test_questions_come_back(message: object) -> None:
    assert decode_question(body_of(message)) == message


@given(ANSWERS)
def test_answers_come_back(message: object) -> None:
    assert decode_answer(body_of(message)) == message


@given(st.one_of(QUESTIONS, ANSWERS), st.randoms(use_true_random=False))
def test_damaged_messages(message: object, rng: random.Random) -> None:
    body = bytearray(body_of(message))
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(body))
        if rng.randrange(3):
            body[place] = rng.randrange(256)
        else:
            del body[place:]
            body.append(rng.randrange(256))
    for decode in (decode_question, decode_answer):
        try:
            found = decode(bytes(body))
        except WireError:
            continue
        assert decode(body_of(found)) == found


@pytest.mark.parametrize(
    "message",
    [
        Locate(-1, (KEY,), PART),
        Locate(1, (KEY,) * (MAX_KEYS + 1), PART),
        Locate(1, (KEY,), Part(0, 1, 2, 2)),
        Bring(1, "n" * 200, (KEY,), 0, PART, b"w" * 32, "f", b"", (1,), 1),
        Bring(1, "n", (KEY,), 0, Part(1, 1, 0, 1), b"w" * 32, "f", b"", (1,), 1),
        Bring(1, "n", (KEY,), 0, PART, b"w", "f", b"", (1,), 1),
        Bring(1, "n", (KEY,), 0, PART, b"w" * 32, "f", b"", (), 1),
        Bring(1, "n", (KEY,), 0, PART, b"w" * 32, "f", b"", (0,), 1),
        Bring(1, "n", (KEY,), 0, PART, b"w" * 32, "f", b"", (1,), MAX_TIMEOUT_MS + 1),
    ],
)
def test_what_is_out_of_range_is_not_written(message: object) -> None:
    with pytest.raises(WireError):
        encode(message)  # type: ignore[arg-type]


def test_another_protocol_is_named() -> None:
    body = bytearray(body_of(Locate(7, (), PART)))
    body[2] = 77
    with pytest.raises(WireError, match=r"protocol .77.; this agent speaks 2"):
        decode_question(bytes(body))
