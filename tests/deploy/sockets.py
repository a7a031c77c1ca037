"""An application under uvicorn on the loop of the test, and requests whose answers the test reads when it wants to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator, Mapping

import uvicorn

from tournant.deploy.http_routes import AsgiApp
from tournant.deploy.http_server import uvicorn_config

READ_BYTES = 1 << 12  # that wait in a reader, and about as many in its socket


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: AsgiApp) -> AsyncIterator[int]:
    """Serve on a free port of this machine; gives the port."""
    server = _Server(uvicorn_config(app, "127.0.0.1", 0))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.001)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def ask(
    port: int, path: str, body: object, headers: Mapping[str, str] | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request. Of its answer no more is taken in than fits into small buffers, until the test reads it."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
    found.setblocking(False)
    await asyncio.get_running_loop().sock_connect(found, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=found, limit=READ_BYTES)
    data = json.dumps(body).encode()
    lines = {"host": "x", "connection": "close", "content-length": str(len(data)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
    return reader, writer
