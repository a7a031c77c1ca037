"""Drives an ASGI application without a server, so that a test decides when the client reads and when it goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from tournant.deploy.http_exchange import Scope
from tournant.deploy.http_routes import AsgiApp


@dataclass
class Call:
    """One request in flight. `task` ends with the application's work."""

    task: asyncio.Task[None]
    _gone: asyncio.Event
    _can_send: asyncio.Event
    sent: list[MutableMapping[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def text(self) -> str:
        return b"".join(message["body"] for message in self.sent[1:]).decode()

    @property
    def finished(self) -> bool:
        return len(self.sent) > 1 and not self.sent[-1].get("more_body", False)

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        body = self.json
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
        return dict(body["error"])

    @property
    def events(self) -> list[Any]:
        """Events of a stream, parsed, without the end mark, which must be there."""
        assert self.headers["content-type"].startswith("text/event-stream")
        blocks = self.text.split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]

    def disconnect(self) -> None:
        """The client goes away."""
        self._gone.set()

    def stop_reading(self) -> None:
        """The client's buffers are full: the next send waits."""
        self._can_send.clear()

    def read_on(self) -> None:
        self._can_send.set()


def start(
    app: AsgiApp,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    scope: Mapping[str, Any] | None = None,
    broken: bool = False,
) -> Call:
    """Begin a request. body: bytes as they are, anything else as JSON; broken: sending fails."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    raw = {"content-type": "application/json", "content-length": str(len(data))} | dict(headers or {})
    full: Scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "root_path": "",
        "client": ("127.0.0.1", 1),
        "headers": [(name.encode(), value.encode()) for name, value in raw.items()],
        **(scope or {}),
    }
    gone, can_send = asyncio.Event(), asyncio.Event()
    can_send.set()
    pieces = [data[start : start + 1000] for start in range(0, len(data), 1000)] or [b""]

    async def receive() -> MutableMapping[str, Any]:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        await can_send.wait()
        if broken:
            raise BrokenPipeError
        call.sent.append(message)

    call = Call(asyncio.ensure_future(app(full, receive, send)), gone, can_send)
    return call


async def fetch(
    app: AsgiApp,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    scope: Mapping[str, Any] | None = None,
) -> Call:
    """A whole request."""
    call = start(app, method, path, body, headers, scope)
    await call.task
    return call
