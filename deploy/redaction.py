"""Which values of a configuration are secrets, and how they are shown: not at all.

Judged by the declared type (pydantic's SecretStr and SecretBytes) or else by the name of the key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import SecretBytes, SecretStr

REDACTED = "(redacted)"
_SECRET_WORDS = frozenset({"key", "keys", "token", "tokens", "secret", "secrets", "password", "passwords"}) | {
    "passwd",
    "credential",
    "credentials",
    "apikey",
    "apikeys",
}
_PLACES = frozenset({"file", "keyfile", "path", "folder", "dir", "name"})  # a secret's place is none
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def is_secret(name: str) -> bool:
    """Whether text under this key is a secret: `api_key`, `HF_TOKEN`, `ssl_keyfile_password`, but not `ssl_keyfile`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").split("_")
    return not _SECRET_WORDS.isdisjoint(words) and words[-1] not in _PLACES


def redacted(value: Any, name: str = "") -> Any:
    """The value that stands under a key, with secrets in it replaced. Numbers, true, false and null are none."""
    if isinstance(value, SecretStr | SecretBytes):
        return REDACTED
    if value is None or isinstance(value, bool | int | float):
        return value
    if is_secret(name):
        return REDACTED
    if isinstance(value, Mapping):
        return {key: redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return _IN_URL.sub(REDACTED, value) if isinstance(value, str) else value
