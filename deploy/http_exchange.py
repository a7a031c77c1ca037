"""One HTTP request and its response over ASGI: body with limits, headers, request id, log line.

Owns what is sent and in which state the response is; what a route does is http_server.py's. Nothing here buffers more
than one body.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from tournant.deploy.http_client import WEIGHTS_PATH
from tournant.deploy.openai_convert import DONE, error_event
from tournant.deploy.openai_schema import ApiError
from tournant.deploy.quota import TenantQuota

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Iterable[tuple[str, str]]

BODY_TIMEOUT_S = 60.0
CLIENT_GONE = 499  # status in logs and metrics of a request whose client went away before the response began
LOGGED_PATH_CHARS = 100
POLLED_PATHS = ("/health", "/metrics", WEIGHTS_PATH)
SANE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}\Z")

logger = logging.getLogger("tournant.http")


class ClientGone(Exception):  # noqa: N818 - a fact about the client, not a fault
    """The client went away; there is nobody to answer."""


class Exchange:
    """One request and its response."""

    __slots__ = (
        "_receive",
        "_scope",
        "_send",
        "_send_request_id",
        "_streaming",
        "completion_tokens",
        "error",
        "finished",
        "host",
        "method",
        "path",
        "prompt_tokens",
        "request_id",
        "route",
        "started_at",
        "status",
        "tenant",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, send_request_id: bool = True) -> None:
        self._send_request_id = send_request_id
        self._scope, self._receive, self._send = scope, receive, send
        self._streaming = False
        self.method: str = scope["method"]
        self.host = str((scope.get("client") or ("",))[0])  # of the client, "" where the server does not say
        path: str = scope["path"]
        root: str = scope.get("root_path", "")
        self.path = path[len(root) :] if root and path.startswith(root) else path
        given = self.header(b"x-request-id")
        self.request_id = given.decode() if SANE_REQUEST_ID.match(given) else secrets.token_hex(16)
        self.route = "other"
        self.started_at = time.perf_counter()
        self.status = 0  # 0 until the response has begun
        self.finished = False
        self.error = ""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.tenant: TenantQuota | None = None  # whose key it came with

    def header(self, name: bytes) -> bytes:
        """Value of a request header, empty when it is missing. `name` in lower case."""
        for key, value in self._scope["headers"]:
            if key == name:
                return bytes(value)
        return b""

    def has_header(self, name: bytes) -> bool:
        """Whether a request header is there, be it empty. `name` in lower case."""
        return any(key == name for key, _ in self._scope["headers"])

    async def body(self, max_bytes: int) -> bytes:
        """The whole body. Raises ApiError (413 when it is too long, 415 unless JSON, 408 too slow) and ClientGone."""
        kind = self.header(b"content-type")
        if kind and b"json" not in kind.split(b";")[0].lower():
            raise ApiError(415, f"content-type is {kind[:80].decode('latin-1')!r}; it must be application/json")
        declared = self.header(b"content-length")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
            raise _too_long(max_bytes)
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > max_bytes:
                        raise _too_long(max_bytes)
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error

    async def watch_disconnect(self, on_gone: Callable[[], None]) -> None:
        """Wait until the client is gone, then call `on_gone`. To be run as a task after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        on_gone()

    async def respond(
        self, status: int, body: bytes, content_type: str = "application/json", headers: Headers = ()
    ) -> None:
        """Send a whole response."""
        await self._start(status, [("content-type", content_type), ("content-length", str(len(body))), *headers])
        self.finished = True
        await self._emit({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def respond_json(self, value: object, status: int = 200) -> None:
        """Send a whole JSON response."""
        await self.respond(status, json.dumps(value).encode())

    async def start_events(self, headers: Headers = ()) -> None:
        """Begin a stream of server-sent events."""
        self._streaming = True
        await self._start(
            200,
            [
                ("content-type", "text/event-stream; charset=utf-8"),
                ("cache-control", "no-cache"),
                ("x-accel-buffering", "no"),
                *headers,
            ],
        )

    async def send_events(self, text: str, last: bool) -> None:
        """Send text that holds whole events; returns when the socket takes more, so a slow client slows its reader."""
        self.finished = last
        await self._emit({"type": "http.response.body", "body": text.encode(), "more_body": not last})

    async def fail(self, error: ApiError) -> None:
        """Tell the client about an error, in whatever state the response is."""
        if self.finished:
            return
        if not self.status:
            await self.respond(error.status, error.body(), headers=error.headers)
        elif self._streaming:
            self.error = error.code or "error"  # which the status, sent already, does not tell
            await self.send_events(error_event(error.body()) + DONE, last=True)

    def log(self) -> None:
        """One line of JSON about this exchange: no prompt, no answer, no query string."""
        level = logging.DEBUG if self.method == "GET" and self.path in POLLED_PATHS else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(
                level,
                json.dumps(
                    {
                        "event": "request",
                        "request_id": self.request_id,
                        "method": self.method,
                        "path": self.path[:LOGGED_PATH_CHARS],
                        "status": self.status or CLIENT_GONE,
                        "ms": round((time.perf_counter() - self.started_at) * 1000, 2),
                        "prompt_tokens": self.prompt_tokens,
                        "completion_tokens": self.completion_tokens,
                        "complete": self.finished and not self.error,
                        **({"error": self.error} if self.error else {}),
                        **({} if self.tenant is None else {"tenant": self.tenant.tenant.name}),
                    }
                ),
            )

    async def _emit(self, message: MutableMapping[str, Any]) -> None:
        try:
            await self._send(message)
        except OSError as error:  # what servers may raise for a closed connection; others only say http.disconnect
            raise ClientGone from error

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        raw = [(name.encode(), value.encode()) for name, value in headers]
        if self._send_request_id:
            raw.append((b"x-request-id", self.request_id.encode()))
        await self._emit({"type": "http.response.start", "status": status, "headers": raw})


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than the limit of {max_bytes} bytes", None, "body_too_large")
