"""Files of keys, and headers that hold one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tournant.deploy.access import Access
from tournant.deploy.access_config import AccessConfig

KEYS = {name: f"tn-{name}-0123456789abcdef" for name in ("ann", "bob", "root")}


def write_secret(path: Path, content: object, mode: int = 0o600) -> Path:
    """A file as it must be; anything but text as JSON. It is exchanged at once."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(content if isinstance(content, str) else json.dumps(content))
    fresh.chmod(mode)
    fresh.rename(path)
    return path


def tenants(*names: str, **fields: Any) -> dict[str, Any]:
    """The content of a file of tenants, each with its key and these fields."""
    return {"tenants": [{"name": name, "keys": [KEYS[name]], **fields} for name in names]}


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


class Clock:
    """Time that stands still until a test moves it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def access_for(folder: Path, content: object, clock: Clock | None = None, **config: Any) -> Access:
    """Access by a file of keys in the folder."""
    path = write_secret(folder / "keys", content)
    return Access(AccessConfig(api_keys_file=str(path), **config), clock or Clock())
