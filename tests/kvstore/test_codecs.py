"""Codecs lose nothing, never make more than they may, and are given up where they do not pay."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tournant.kvstore.block import Part, Version
from tournant.kvstore.codecs import CodecChooser, codec_for, decode, encode, restore
from tournant.kvstore.record import (
    CODEC_LZ4_PLANES_2,
    CODEC_LZ4_PLANES_4,
    CODEC_NONE,
    CorruptBlock,
    RecordHeader,
    Stored,
    checksum,
)

CODECS = (CODEC_LZ4_PLANES_2, CODEC_LZ4_PLANES_4)


def numbers_of_one_size(count: int) -> bytes:
    """fp32 numbers whose signs and exponents are all the same, and whose low mantissa bytes are zero."""
    values = 1 + np.random.default_rng(0).random(count, dtype=np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).tobytes()


@given(data=st.binary(min_size=1, max_size=4096), repeats=st.integers(1, 40), codec=st.sampled_from(CODECS))
def test_nothing_is_lost(data: bytes, repeats: int, codec: int) -> None:
    payload = data * repeats
    packed = encode(codec, memoryview(payload))
    if packed is None:
        return
    assert len(packed) < len(payload)
    target = memoryview(bytearray(b"\xee" * len(payload)))
    decode(codec, memoryview(packed), target)
    assert bytes(target) == payload


@pytest.mark.parametrize(("codec", "least"), [(CODEC_LZ4_PLANES_2, 0.0), (CODEC_LZ4_PLANES_4, 0.6)])
def test_numbers_compress_in_planes(codec: int, least: float) -> None:
    payload = numbers_of_one_size(4096)
    packed = encode(codec, memoryview(payload))
    assert packed is not None
    assert 1 - len(packed) / len(payload) > least


@pytest.mark.parametrize("codec", CODECS)
def test_noise_and_odd_lengths_are_left_alone(codec: int) -> None:
    assert encode(codec, memoryview(np.random.default_rng(1).bytes(8192))) is None
    assert encode(codec, memoryview(bytes(8191))) is None
    assert encode(CODEC_NONE, memoryview(bytes(8192))) is None


@given(junk=st.binary(max_size=300), codec=st.sampled_from([*CODECS, CODEC_NONE, 77]))
def test_rubbish_is_corrupt(junk: bytes, codec: int) -> None:
    target = memoryview(bytearray(4096))
    with pytest.raises(CorruptBlock):
        decode(codec, memoryview(junk), target)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_plane_of_another_length_is_corrupt(change: int) -> None:
    """A bomb decodes to more than is declared, a short one to less."""
    packed = encode(CODEC_LZ4_PLANES_2, memoryview(bytes(8192)))
    assert packed is not None
    with pytest.raises(CorruptBlock):
        decode(CODEC_LZ4_PLANES_2, memoryview(packed), memoryview(bytearray(8192 + 2 * change)))
    lengths = struct.unpack_from("<2I", packed)
    swapped = struct.pack("<2I", lengths[0] + change, lengths[1]) + packed[8:]
    with pytest.raises(CorruptBlock):
        decode(CODEC_LZ4_PLANES_2, memoryview(swapped), memoryview(bytearray(8192)))


def test_restore_checks_what_is_stored_and_what_comes_out() -> None:
    payload = bytes(8192)
    packed = encode(CODEC_LZ4_PLANES_2, memoryview(payload)) or b""
    header = RecordHeader(bytes(32), Version(1, 1), Part(0, 1, 0, 1), bytes(32), "bf16", 8192, checksum(payload))
    stored = Stored(CODEC_LZ4_PLANES_2, len(packed), checksum(packed))
    target = memoryview(bytearray(b"\xee" * 8192))
    restore(header, stored, memoryview(packed), target)
    assert bytes(target) == payload
    with pytest.raises(CorruptBlock, match="stored payload"):
        restore(header, Stored(stored.codec, stored.length, 1), memoryview(packed), target)
    other = RecordHeader(bytes(32), Version(1, 1), Part(0, 1, 0, 1), bytes(32), "bf16", 8192, 1)
    with pytest.raises(CorruptBlock, match="decoded payload"):
        restore(other, stored, memoryview(packed), target)
    with pytest.raises(CorruptBlock, match="checksum of the payload"):
        restore(other, Stored(CODEC_NONE, 8192, checksum(payload)), memoryview(payload), memoryview(payload))


def test_codecs_by_form() -> None:
    assert [codec_for(form) for form in ("bf16", "fp16", "fp32", "fp8_e4m3")] == [1, 1, 2, 0]


def test_a_codec_that_saves_little_is_given_up_and_tried_again() -> None:
    chooser = CodecChooser(CODEC_LZ4_PLANES_2, window=8, retry=20)
    for _ in range(8):
        assert chooser.choose() == CODEC_LZ4_PLANES_2
        chooser.wrote(1000, 910)
    assert "saves 9.0%" in chooser.why_off
    assert [chooser.choose() for _ in range(21)] == [CODEC_NONE] * 20 + [CODEC_LZ4_PLANES_2]
    for _ in range(100):
        chooser.wrote(1000, 890)
    assert chooser.why_off == ""
    chosen = [chooser.choose() for _ in range(160)]
    assert chosen.count(CODEC_NONE) == 10  # the plain ones that it is compared with


@pytest.mark.parametrize(("restore_us", "stays"), [(99, True), (101, False)])
def test_a_codec_that_slows_restoring_is_given_up(restore_us: int, stays: bool) -> None:
    chooser = CodecChooser(CODEC_LZ4_PLANES_2, window=8)
    for _ in range(100):
        chooser.restored(CODEC_LZ4_PLANES_2, 1000, restore_us)
    assert chooser.why_off == ""  # nothing to compare with yet
    chooser.restored(CODEC_NONE, 2000, 200)
    for _ in range(100):
        chooser.restored(CODEC_LZ4_PLANES_2, 1000, restore_us)
    assert (chooser.why_off == "") is stays


def test_old_costs_are_forgotten() -> None:
    chooser = CodecChooser(CODEC_LZ4_PLANES_2, window=8)
    for _ in range(1000):
        chooser.wrote(1000, 100)
    for _ in range(100):
        chooser.wrote(1000, 1000)
    assert chooser.why_off
