"""What commands share that speak to a running server over HTTP: its address, and the words for what goes wrong."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Annotated

import httpx
import typer

from tournant.workers.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
WEIGHTS_PATH = "/admin/weights"
CONNECT_TIMEOUT_S = 5.0
KeyFile = Annotated[Path | None, typer.Option("--key-file", help="File that holds the key to send.")]
CAFile = Annotated[Path | None, typer.Option("--ca-file", help="Certificates to trust instead of the system's (PEM).")]


def open_client(
    url: str, read_timeout_s: float | None, key_file: Path | None = None, ca_file: Path | None = None
) -> httpx.Client:
    """A client of the server at `url`, of which the scheme may be left out and `/v1` may be given.

    key_file: holds the key to send, None = none; ca_file: certificates to trust instead of the system's. Raises
    ConfigError for one that cannot be used.
    """
    url = url if "://" in url else f"http://{url}"
    timeout = httpx.Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S)
    headers = {}
    try:
        if key_file is not None:
            headers["authorization"] = f"Bearer {key_file.read_text(encoding='ascii').strip()}"
        verify = True if ca_file is None else ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it does not hold what it must"
        raise ConfigError(f"{key_file if 'authorization' not in headers and key_file else ca_file}: {why}") from None
    return httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), timeout=timeout, headers=headers, verify=verify)


def error_text(status: int, body: bytes) -> str:
    """One line about an answer that is an error."""
    try:
        return f"{json.loads(body)['error']['message']} (HTTP {status})"
    except (ValueError, LookupError, TypeError):
        return f"HTTP {status}: {' '.join(body[:200].decode('utf-8', 'replace').split())}"


def unreachable(client: httpx.Client, error: httpx.HTTPError) -> str:
    """One line about a server that did not answer."""
    return f"no answer from {client.base_url}: {error or type(error).__name__}; is `tournant serve` running there?"
