"""Identity of blocks: golden vectors hold the encoding still, every field and every token matters."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tournant.kvstore.block import KEY_BYTES, MAX_SALT_BYTES, Namespace, block_key, key_chain

SPACE = Namespace(
    weights_id=b"\x11" * 32,
    kv_form="bf16",
    numerics="bfloat16/decoder-1/c/fast",
    layout_id=b"\x22" * 32,
    adapter=b"\x33" * 32,
    tenant_salt=b"\x44" * 32,
)


def test_golden_vectors() -> None:
    """Keys outlive processes and versions: a change here needs a new FORMAT_TAG."""
    assert SPACE.digest().hex() == "a1130cf80e9df0ed7a15f4a1a5ca931ffd971ee564a53f7727e1776bb9ea20e7"
    assert SPACE.digest("salt").hex() == "1a4191080d04335ff858547cbdf664acd0051d371f9c239f6abf12b3b3d1803f"
    keys = key_chain(SPACE.digest(), range(40), 16)
    assert [key.hex() for key in keys] == [
        "f55c13596a7f15a3c7d8a9addb3ec6d8dc6a8b3038eb5731a24f891e617c00fe",
        "761d1822d4dfcaba4489eb314d2c095ab6fbf10d158b6c1c91d779616d9e70a6",
    ]


def test_the_encoding_is_what_the_docstring_says() -> None:
    def framed(tag: bytes, payload: bytes) -> bytes:
        return tag + len(payload).to_bytes(8, "little") + payload

    parent = SPACE.digest()
    tokens = b"".join(token.to_bytes(4, "little") for token in range(16))
    encoding = framed(b"b", b"tournant-key-1") + framed(b"b", parent) + framed(b"t", tokens) + framed(b"b", b"")
    assert block_key(parent, range(16)) == hashlib.sha256(encoding).digest()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Namespace)])
def test_every_field_separates(field: str) -> None:
    value = getattr(SPACE, field)
    other = dataclasses.replace(SPACE, **{field: value + "x" if isinstance(value, str) else value + b"x"})
    assert other.digest() != SPACE.digest()


def test_neighbouring_fields_cannot_trade_bytes() -> None:
    one = dataclasses.replace(SPACE, kv_form="ab", numerics="c")
    two = dataclasses.replace(SPACE, kv_form="a", numerics="bc")
    assert one.digest() != two.digest()


def test_salts() -> None:
    digests = {SPACE.digest(salt) for salt in (None, "", "a", "b", "\udc80")}
    assert len(digests) == 5
    with pytest.raises(ValueError, match=f"at most {MAX_SALT_BYTES}"):
        SPACE.digest("x" * (MAX_SALT_BYTES + 1))


def test_a_key_names_everything_before_it() -> None:
    tokens = list(range(64))
    keys = key_chain(SPACE.digest(), tokens, 16)
    changed = key_chain(SPACE.digest(), [99, *tokens[1:]], 16)
    assert not set(keys) & set(changed)
    assert key_chain(SPACE.digest(), [*tokens[:-1], 99], 16)[:3] == keys[:3]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=70), st.sampled_from([8, 16, 32]))
def test_chains_are_prefix_closed(tokens: list[int], block_tokens: int) -> None:
    keys = key_chain(SPACE.digest(), tokens, block_tokens)
    assert len(keys) == len(tokens) // block_tokens
    assert all(len(key) == KEY_BYTES for key in keys)
    half = len(tokens) // 2
    assert key_chain(SPACE.digest(), tokens[:half], block_tokens) == keys[: half // block_tokens]


def test_wrong_parent_length_is_refused() -> None:
    with pytest.raises(ValueError, match="31 bytes; it must have 32"):
        block_key(b"x" * 31, [1])
