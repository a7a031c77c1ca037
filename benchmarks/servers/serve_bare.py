"""Bare uvicorn under a few lines of ASGI that echo bodies and send events: what HTTP costs by itself."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import uvicorn
from host import Hosted, host


async def app(scope: Any, receive: Any, send: Any) -> None:
    """/echo returns the body; any other path sends {"events": n, "bytes": size} as events, one per loop turn."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    if scope["path"] == "/echo":
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return
    wanted = json.loads(body)
    event = b"data: " + b"x" * (wanted["bytes"] - 8) + b"\n\n"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for left in range(wanted["events"] - 1, -1, -1):
        await send({"type": "http.response.body", "body": event, "more_body": left > 0})
        await asyncio.sleep(0)


async def _nothing() -> None:
    return


async def build(arguments: dict[str, Any]) -> Hosted:
    """The app without access log, as ours is served; takes no arguments."""
    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, lifespan="off", **arguments)
    return Hosted(config, "", _nothing)


if __name__ == "__main__":
    host(build, uvicorn_loop=True)
