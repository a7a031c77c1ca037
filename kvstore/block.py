"""Identity of KV blocks: namespaces, chained keys, versions.

Owns the byte encoding behind a key (STORE.md section 1) and nothing else: no storage, no I/O.

Invariants:
 1. A key is SHA-256 over a typed, length-prefixed encoding: no two different inputs share an encoding.
 2. The parent of a sequence's first block is its namespace digest, so a key names weights, numerics, layout, tenant
    and every token from the start of the sequence.
 3. All keys of a chain end with the same ROUTE_BYTES, those of its first block's hash: a key alone tells which shard of
    the directory answers for its chain. A namespace digest ends with zeros there, and no key does.
 4. Changing the encoding changes FORMAT_TAG; golden vectors in tests/kvstore/test_block.py hold it still.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

FORMAT_TAG = b"tournant-key-2"
KEY_BYTES = 32
ROUTE_BYTES = 2
MAX_SALT_BYTES = 256

_BYTES, _TOKENS = b"b", b"t"  # type tags of the encoding
_LENGTH = struct.Struct("<Q")


def _framed(tag: bytes, payload: bytes) -> bytes:
    return tag + _LENGTH.pack(len(payload)) + payload


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything but tokens that decides the bytes of a KV block. Two requests share blocks only if all fields agree.

    weights_id: digest of config and weight files; adapter: digest of the adapter's bytes, empty without one;
    kv_form: numeric form of stored KV, for example "bf16"; numerics: compute dtype, weight quantisation, model code
    revision, deterministic or not; layout_id: see `KVLayout.layout_id`; tenant_salt: HMAC of the tenant, empty for the
    single tenant of an embedded server.
    """

    weights_id: bytes
    kv_form: str
    numerics: str
    layout_id: bytes
    adapter: bytes = b""
    tenant_salt: bytes = b""

    def digest(self, client_salt: str | None = None) -> bytes:
        """32 bytes that stand for this namespace under one client salt (`cache_salt` of a request, at most 256 bytes).

        Raises ValueError when the salt is longer.
        """
        salt = b"" if client_salt is None else client_salt.encode("utf-8", "surrogatepass")
        if len(salt) > MAX_SALT_BYTES:
            raise ValueError(f"cache_salt has {len(salt)} bytes; at most {MAX_SALT_BYTES} are allowed")
        hasher = hashlib.sha256(_framed(_BYTES, FORMAT_TAG))
        for field in fields(self):
            value = getattr(self, field.name)
            hasher.update(_framed(_BYTES, field.name.encode()))
            hasher.update(_framed(_BYTES, value.encode() if isinstance(value, str) else value))
        hasher.update(_framed(_BYTES, b"" if client_salt is None else b"\x01" + salt))
        return hasher.digest()[:-ROUTE_BYTES] + _NO_ROUTE


_NO_ROUTE, _ROUTE_OF_ZEROS = bytes(ROUTE_BYTES), b"\xff" * ROUTE_BYTES
_KEY_PREFIX = _framed(_BYTES, FORMAT_TAG) + _BYTES + _LENGTH.pack(KEY_BYTES)


def block_key(parent: bytes, token_ids: Sequence[int] | npt.NDArray[np.int64], inputs: bytes = b"") -> bytes:
    """Key of one full block: SHA-256 of (format, parent key or namespace digest, token ids as u32, non-text digests),
    its last ROUTE_BYTES replaced by those of the chain's first key.

    `inputs` is the concatenated digests (with shapes) of non-text inputs inside the block; empty for text.
    """
    return _block_key(parent, np.asarray(token_ids, dtype="<u4").tobytes(), inputs)


def _block_key(parent: bytes, tokens: bytes, inputs: bytes = b"") -> bytes:
    if len(parent) != KEY_BYTES:
        raise ValueError(f"parent key has {len(parent)} bytes; it must have {KEY_BYTES}")
    key = hashlib.sha256(_KEY_PREFIX + parent + _framed(_TOKENS, tokens) + _framed(_BYTES, inputs)).digest()
    route = parent[-ROUTE_BYTES:]
    if route != _NO_ROUTE:
        return key[:-ROUTE_BYTES] + route
    return key if key[-ROUTE_BYTES:] != _NO_ROUTE else key[:-ROUTE_BYTES] + _ROUTE_OF_ZEROS


def key_chain(namespace_digest: bytes, token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Keys of all full blocks of `token_ids`, in order. A trailing partial block has no key."""
    tokens = np.asarray(token_ids, dtype=np.int64).astype("<u4").tobytes()
    size = 4 * block_tokens  # bytes
    keys: list[bytes] = []
    parent = namespace_digest
    for start in range(0, len(tokens) - size + 1, size):
        parent = _block_key(parent, tokens[start : start + size])
        keys.append(parent)
    return keys


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """What one shard holds of a block: layers [layer_start, layer_stop), KV heads [head_start, head_stop)."""

    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int


@dataclass(frozen=True, slots=True)
class Version:
    """(writer id, counter): names one write of one block by one group of ranks. Compared for equality only."""

    writer_id: int
    counter: int


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A key at a version: what every read and write outside the device names."""

    key: bytes
    version: Version
