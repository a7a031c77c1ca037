"""What a router knows of a request that comes without the keys of its blocks: a chain of hashes over its prompt's head.

Owns these hashes, which name no block of any store: only routers compare them, with those of requests that they sent
before. Two prompts share the leading ones as far as they share their heads, in whole pieces, under the same salt.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from tournant.cluster.router_scoring import Routed
from tournant.kvstore.block import KEY_BYTES

PIECE_TOKENS = 64
PIECE_BYTES = 4 * PIECE_TOKENS  # of text: a token is about four; of token ids, exactly four each
MAX_PIECES = 64  # more of a prompt's head is not looked at
DEFAULT_BLOCK_TOKENS = 16


def head_keys(prompt: object, salt: str = "") -> tuple[list[bytes], int]:
    """Hashes of the full pieces at a prompt's head, each over all before it, and about how many tokens the prompt has.

    prompt: text (bytes too), token ids or chat messages; of anything else nothing is known: no keys, no tokens.
    """
    data = _bytes_of(prompt)
    parent = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()
    keys: list[bytes] = []
    for start in range(0, min(len(data), MAX_PIECES * PIECE_BYTES) - PIECE_BYTES + 1, PIECE_BYTES):
        parent = hashlib.blake2b(parent + data[start : start + PIECE_BYTES], digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys, len(data) // 4


def _bytes_of(prompt: object) -> bytes:
    if isinstance(prompt, bytes):
        return prompt
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    if not isinstance(prompt, Sequence) or not prompt:
        return b""
    try:
        if all(isinstance(part, int) for part in prompt):
            return array("I", prompt).tobytes()
        return "".join(map(json.dumps, prompt)).encode()
    except (TypeError, ValueError, OverflowError):  # the replica says what is wrong with it
        return b""


def routed_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], session: str, block_tokens: int = DEFAULT_BLOCK_TOKENS
) -> Routed:
    """What is known of a call through a handle: `generate` or `stream` of a replica, or an OpenAI request's body.

    block_tokens: that each of `routing_keys` stands for. Anything may be passed; what is not understood is not known.
    """
    keys = kwargs.get("routing_keys")
    if isinstance(keys, Sequence) and keys and all(isinstance(key, bytes) and len(key) == KEY_BYTES for key in keys):
        return Routed(keys, len(keys) * block_tokens, block_tokens, session)
    prompt: object = args[0] if args else kwargs.get("prompt")
    options = kwargs
    if isinstance(prompt, Mapping):  # a body
        options = prompt
        prompt = options.get("prompt", options.get("messages"))
    salt = options.get("cache_salt")
    head, tokens = head_keys(prompt, salt if isinstance(salt, str) else "")
    return Routed(head, tokens, PIECE_TOKENS, session)
