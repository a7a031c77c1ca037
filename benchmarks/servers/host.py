"""Runs one ASGI app in a process of its own: uvicorn, one worker, on a free port of this machine.

Says {"port", "facts"} on stdout once it is ready, answers each line on stdin with the CPU seconds of this process, and
ends when stdin does. The first argument is JSON, which `build` gets.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TextIO

import uvicorn

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Hosted:
    """An app ready to be served: how uvicorn serves it, what to tell about it, what to await at the end."""

    config: uvicorn.Config
    facts: str
    close: Callable[[], Awaitable[None]]


Build = Callable[[dict[str, Any]], Awaitable[Hosted]]


async def _serve(build: Build, answers: TextIO) -> None:
    hosted = await build(json.loads(sys.argv[1]))
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it only where a socket names TCP
    server = uvicorn.Server(hosted.config)

    def watch_stdin() -> None:
        for _ in sys.stdin:
            print(json.dumps({"cpu_seconds": time.process_time()}), file=answers)
        server.should_exit = True

    threading.Thread(target=watch_stdin, daemon=True).start()
    facts = f"{hosted.facts}{type(asyncio.get_running_loop()).__module__.split('.')[0]}"
    print(json.dumps({"port": listener.getsockname()[1], "facts": facts}), file=answers)
    await server.serve([listener])
    await hosted.close()


def host(build: Build, *, uvicorn_loop: bool) -> None:
    """Serve until stdin ends. uvicorn_loop: uvicorn's choice of event loop (uvloop where it is), else asyncio's own."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    factory = uvicorn.Config("", log_config=None).get_loop_factory() if uvicorn_loop else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(build, answers))
