"""The bytes of a record: golden, checked to the last one, and never taken for another record."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tournant.kvstore.block import Part, Version
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.record import (
    CODEC_LZ4_PLANES_2,
    CODEC_NONE,
    MAX_PAYLOAD_BYTES,
    CorruptBlock,
    RecordHeader,
    RecordRefused,
    Stored,
    check_trailer,
    checksum,
    pack_header,
    pack_trailer,
    parse_header,
    record_bytes,
    record_pages,
)

HEADER = RecordHeader(
    bytes(range(32)), Version(0x1122334455667788, 7), Part(0, 30, 2, 5), b"\xaa" * 32, "bf16", 5000, 0xDEADBEEF
)
STORED = Stored(CODEC_LZ4_PLANES_2, 4500, 0xFEEDFACE)


def pages(header: RecordHeader = HEADER, stored: Stored = STORED) -> tuple[memoryview, memoryview]:
    first, last = memoryview(bytearray(b"\xff" * PAGE_BYTES)), memoryview(bytearray(b"\xff" * PAGE_BYTES))
    pack_header(first, header, stored, 3, 8192)
    pack_trailer(last, header, stored, 3, 8192)
    return first, last


def sealed(page: memoryview) -> memoryview:
    """The page with the checksum that its bytes need."""
    page[4088:] = checksum(page[:4088]).to_bytes(8, "little")
    return page


def test_golden_bytes() -> None:
    """Files outlive releases: a change here needs a new RECORD_FORMAT."""
    first, last = pages()
    assert first[:48].hex() == "54524e54484541440100000001000000" + bytes(range(32)).hex()
    assert first[48:64].hex() == "88776655443322110700000000000000"
    assert first[64:80].hex() == "000000001e0000000200000005000000"
    assert bytes(first[80:112]) == b"\xaa" * 32
    numbers = [int.from_bytes(first[at : at + 8], "little") for at in range(112, 160, 8)]
    assert numbers == [5000, 4500, 0xDEADBEEF, 0xFEEDFACE, 3, 8192]
    assert bytes(first[160:192]) == b"bf16" + bytes(28)
    assert bytes(first[192:4088]) == bytes(3896)
    assert bytes(last[:16]) == b"TRNTTAIL" + (1).to_bytes(8, "little")
    assert hashlib.sha256(first).hexdigest() == "d70bb66ec1a73b140ac32c0cef2838dd45372dc8d285337a428fe605a6789ef7"
    assert hashlib.sha256(last).hexdigest() == "9e1ef2ae23d4bb42e6f7d47a95f1399199545bff650311880ca64f07d807062f"


def test_what_is_written_is_read() -> None:
    first, last = pages()
    assert parse_header(first, 3, 8192) == (HEADER, STORED)
    check_trailer(last, HEADER, STORED, 3, 8192)


@given(
    key=st.binary(min_size=32, max_size=32),
    numbers=st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=3),
    bounds=st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4),
    form=st.text(min_size=1, max_size=8).filter(lambda text: "\0" not in text),
    length=st.integers(1, MAX_PAYLOAD_BYTES),
)
def test_every_header_survives(key: bytes, numbers: list[int], bounds: list[int], form: str, length: int) -> None:
    layers, heads = sorted(bounds[:2]), sorted(bounds[2:])
    part = Part(layers[0], layers[1] + (layers[0] == layers[1]), heads[0], heads[1] + (heads[0] == heads[1]))
    if max(part.layer_stop, part.head_stop) == 2**32:
        return
    header = RecordHeader(key, Version(*numbers[:2]), part, key[::-1], form, length, numbers[2])
    first, last = pages(header, Stored(CODEC_NONE, length, numbers[2]))
    assert parse_header(first, 3, 8192) == (header, Stored(CODEC_NONE, length, numbers[2]))
    check_trailer(last, header, Stored(CODEC_NONE, length, numbers[2]), 3, 8192)


@pytest.mark.parametrize("bit", [*range(0, 192 * 8, 5), *range(192 * 8, PAGE_BYTES * 8, 997), PAGE_BYTES * 8 - 1])
def test_every_flipped_bit_is_noticed(bit: int) -> None:
    first, last = pages()
    first[bit // 8] ^= 1 << bit % 8
    last[bit // 8] ^= 1 << bit % 8
    with pytest.raises((CorruptBlock, RecordRefused)):
        parse_header(first, 3, 8192)
    with pytest.raises((CorruptBlock, RecordRefused)):
        check_trailer(last, HEADER, STORED, 3, 8192)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (12, 9, "codec"),
        (64, 30, "empty"),
        (112, 0, "length"),
        (112, MAX_PAYLOAD_BYTES + 1, "length"),
        (120, 5001, "stored length"),
        (120, 0, "stored length"),
        (160, 0, "kv_form"),
        (164, 1 << 32, "kv_form"),
        (200, 1, "where none belong"),
    ],
)
def test_fields_are_checked_under_a_right_checksum(at: int, value: int, message: str) -> None:
    first, _ = pages()
    size = 4 if at in (12, 64) else 8
    first[at : at + size] = value.to_bytes(size, "little")
    with pytest.raises(CorruptBlock, match=message):
        parse_header(sealed(first), 3, 8192)


def test_another_format_is_refused_not_damaged() -> None:
    first, _ = pages()
    first[8:12] = (2).to_bytes(4, "little")
    with pytest.raises(RecordRefused, match="format 2"):
        parse_header(sealed(first), 3, 8192)


@pytest.mark.parametrize("place", [(3, 4096), (4, 8192)])
def test_a_record_at_another_place_is_not_taken(place: tuple[int, int]) -> None:
    first, last = pages()
    with pytest.raises(CorruptBlock, match="segment 3 offset 8192"):
        parse_header(first, *place)
    with pytest.raises(CorruptBlock, match="another record"):
        check_trailer(last, HEADER, STORED, *place)


@pytest.mark.parametrize(
    "other",
    [
        replace(HEADER, key=b"k" * 32),
        replace(HEADER, version=Version(1, 7)),
        replace(HEADER, version=Version(0x1122334455667788, 8)),
    ],
)
def test_a_trailer_of_another_record_is_not_taken(other: RecordHeader) -> None:
    _, last = pages()
    with pytest.raises(CorruptBlock, match="another record"):
        check_trailer(last, other, STORED, 3, 8192)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(HEADER, key=b"short"),
        replace(HEADER, weights_id=b""),
        replace(HEADER, kv_form="x" * 33),
        replace(HEADER, length=MAX_PAYLOAD_BYTES + 1),
        replace(HEADER, part=Part(1, 1, 0, 1)),
        replace(HEADER, version=Version(1 << 64, 0)),
        replace(HEADER, checksum=-1),
    ],
)
def test_a_wrong_header_is_never_written(wrong: RecordHeader) -> None:
    with pytest.raises(ValueError, match=r"must|empty"):
        pages(wrong)


def test_sizes() -> None:
    assert [record_bytes(length) for length in (1, PAGE_BYTES, PAGE_BYTES + 1)] == [3 * 4096, 3 * 4096, 4 * 4096]
    assert record_pages(360 << 10) == 92
