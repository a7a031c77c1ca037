"""What commands share that speak to a running server over HTTP: its address, and the words for what goes wrong."""

from __future__ import annotations

import json

import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
WEIGHTS_PATH = "/admin/weights"
CONNECT_TIMEOUT_S = 5.0


def open_client(url: str, read_timeout_s: float | None) -> httpx.Client:
    """A client of the server at `url`, of which the scheme may be left out and `/v1` may be given."""
    url = url if "://" in url else f"http://{url}"
    timeout = httpx.Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S)
    return httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), timeout=timeout)


def error_text(status: int, body: bytes) -> str:
    """One line about an answer that is an error."""
    try:
        return f"{json.loads(body)['error']['message']} (HTTP {status})"
    except (ValueError, LookupError, TypeError):
        return f"HTTP {status}: {' '.join(body[:200].decode('utf-8', 'replace').split())}"


def unreachable(client: httpx.Client, error: httpx.HTTPError) -> str:
    """One line about a server that did not answer."""
    return f"no answer from {client.base_url}: {error or type(error).__name__}; is `tournant serve` running there?"
