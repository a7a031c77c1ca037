"""Identity of blocks: golden vectors hold the encoding still, every field and every token matters."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tournant.kvstore.block import KEY_BYTES, MAX_SALT_BYTES, ROUTE_BYTES, Namespace, block_key, key_chain

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
    assert SPACE.digest().hex() == "2ff2598b67cbe6d8d84aceb0ba34dc45f77252ee59ab12374d234529790a0000"
    assert SPACE.digest("salt").hex() == "c300e6cead8639894368fdecbc475c4b03b5f8e7a7119a8e7e7c82598bfe0000"
    keys = key_chain(SPACE.digest(), range(40), 16)
    assert [key.hex() for key in keys] == [
        "08a1ee5c7276bbba9288a8c6cc2e66f72fea60872bbc65535f0923d27613e41a",
        "d48a5a6f5fd685e410ee140b020f168ec25f8306750a8fd4236ff10234e9e41a",
    ]


def test_the_encoding_is_what_the_docstring_says() -> None:
    def framed(tag: bytes, payload: bytes) -> bytes:
        return tag + len(payload).to_bytes(8, "little") + payload

    parent = SPACE.digest()
    tokens = b"".join(token.to_bytes(4, "little") for token in range(16))
    encoding = framed(b"b", b"tournant-key-2") + framed(b"b", parent) + framed(b"t", tokens) + framed(b"b", b"")
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


def test_a_key_names_the_route_of_its_chain() -> None:
    for document in range(50):
        keys = key_chain(SPACE.digest(), [document, *range(47)], 16)
        assert {key[-ROUTE_BYTES:] for key in keys} == {keys[0][-ROUTE_BYTES:]} != {bytes(ROUTE_BYTES)}
    assert SPACE.digest()[-ROUTE_BYTES:] == bytes(ROUTE_BYTES)


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
