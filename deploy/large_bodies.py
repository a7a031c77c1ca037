"""Bodies of requests, whatever their size: large ones are parsed in a thread, after a look at their shape.

Owns how much structure a body may have; what its fields mean is openai_schema.py's. The check costs less than parsing,
which makes a fault for every key that nobody knows and an object for every value.

Invariants:
 1. A body above INLINE_BODY_BYTES is parsed off the event loop, and only if its numbers are within the limits here.
 2. What a small body costs is what `parse_body` costs.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import TypeAdapter

from tournant.deploy.openai_schema import Body, invalid, parse_body
from tournant.workers.sampling_params import MAX_LOGIT_BIAS

INLINE_BODY_BYTES = 64 << 10
MAX_STRINGS = 1 << 16  # names and texts; the longest chat there may be has a quarter of it
MAX_CONTAINERS = 1 << 16
MAX_KEYS = 128  # of one object whose fields are known
ANY_JSON: TypeAdapter[Any] = TypeAdapter(Any)


async def parse_request(kind: type[Body], data: bytes) -> Body:
    """As `parse_body`; the loop goes on meanwhile if the body is large. Raises ApiError for its shape, too."""
    if len(data) <= INLINE_BODY_BYTES:
        return parse_body(kind, data)
    return await asyncio.to_thread(_parse_large, kind, data)


def _parse_large(kind: type[Body], data: bytes) -> Body:
    check_shape(data)
    return parse_body(kind, data)


def check_shape(data: bytes) -> None:
    """Raises ApiError 400 with the number and the limit. What is not JSON passes, or is counted as if it were."""
    # Without pairs of backslashes and escaped quotes, every quote that is left begins or ends a string.
    text = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = text.count(b'"') // 2
    _check(num_strings, MAX_STRINGS, "the body", "strings (names and texts)")
    outside = b"".join(text.split(b'"')[::2])
    _check(outside.count(b"[") + outside.count(b"{"), MAX_CONTAINERS, "the body", "lists and objects")
    if num_strings > MAX_KEYS:
        try:
            body = ANY_JSON.validate_json(data)
        except ValueError:
            return  # parsing says what is wrong
        _check_keys(body)


def _check_keys(body: Any) -> None:
    if not isinstance(body, dict):
        return
    _check(len(body), MAX_KEYS, "the body", "fields")
    bias, messages = body.get("logit_bias"), body.get("messages")
    if isinstance(bias, dict):
        _check(len(bias), MAX_LOGIT_BIAS, "logit_bias", "entries", "logit_bias")
    for place, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _check(len(message), MAX_KEYS, f"messages.{place}", "fields", "messages")


def _check(number: int, limit: int, what: str, of: str, param: str | None = None) -> None:
    if number > limit:
        raise invalid(f"{what} has {number} {of}; at most {limit} are allowed, send fewer", param)
