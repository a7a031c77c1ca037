"""HTTP servers in processes of their own, and a client that costs little: plain sockets, kept alive, one per stream.

Owns the server processes (servers/) and what the wire looks like; what is asked and how it is summed up is
latency.py's and ingress.py's.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import BenchmarkError

SERVERS = Path(__file__).parent / "servers"
START_TIMEOUT_S, CLOSE_TIMEOUT_S, LOAD_TIMEOUT_S = 300.0, 15.0, 600.0
LINE_LIMIT = 1 << 20


class ServerProcess:
    """Runs `servers/<script>`. `port` and `facts` are what it says of itself.

    Raises BenchmarkError when it does not start.
    """

    def __init__(self, script: str, arguments: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SERVERS / script), json.dumps(dict(arguments))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            ready = self._read(START_TIMEOUT_S)
        except BaseException:
            self._process.kill()
            raise
        self.port, self.facts = int(ready["port"]), str(ready["facts"])

    def cpu_seconds(self) -> float:
        """CPU seconds of the server process so far, all its threads, without its engine's."""
        if self._process.stdin is None:
            raise BenchmarkError("the server has no stdin")
        self._process.stdin.write("cpu\n")
        self._process.stdin.flush()
        return float(self._read(CLOSE_TIMEOUT_S)["cpu_seconds"])

    def close(self) -> None:
        """End the server and its engine."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            line = "" if self._process.stdout is None else self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise BenchmarkError(f"the server ended with code {self._process.wait()}; see its log above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When a request was sent and its events came, `time.perf_counter()` seconds; body: the last event of a stream."""

    sent: float
    events: Sequence[float]
    body: bytes


class Connection:
    """One kept-alive connection; one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        """A connection to a server of this machine."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=LINE_LIMIT))

    def close(self) -> None:
        """Drop the connection."""
        self._writer.close()

    async def post(self, path: str, body: bytes) -> Arrivals:
        """Send a request and read its whole answer, streamed or not. Raises BenchmarkError unless it is 200."""
        sent = time.perf_counter()
        self._writer.write(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (path.encode(), len(body), body)
        )
        head = await self._reader.readuntil(b"\r\n\r\n")
        status = head.split(b" ", 2)[1]
        lines = head.lower().split(b"\r\n")
        length = next((int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")), None)
        events: list[float] = []
        if length is not None:
            text = await self._reader.readexactly(length)
        else:
            events, text = await self._events()
        if status != b"200":
            raise BenchmarkError(f"{path} answered {status.decode()}: {text.decode(errors='replace')[:500]}")
        return Arrivals(sent, events, text)

    async def _events(self) -> tuple[list[float], bytes]:
        """A chunked body of server-sent events, every chunk of which holds whole lines."""
        times, last = [], b""
        while (line := await self._reader.readline()) != b"0\r\n":
            if not line:
                raise BenchmarkError("the server closed the connection in the middle of a stream")
            if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                times.append(time.perf_counter())
                last = line
        await self._reader.readline()
        return times, last


async def run_load(port: int, users: int, jobs: Sequence[tuple[str, bytes]]) -> list[Arrivals]:
    """Answer all (path, body) jobs by `users` connections, each of which sends its next one when its last is over."""
    waiting = list(reversed(jobs))
    done: list[Arrivals] = []

    async def user() -> None:
        connection = await Connection.open(port)
        try:
            while waiting:
                path, body = waiting.pop()
                done.append(await connection.post(path, body))
        finally:
            connection.close()

    async with asyncio.timeout(LOAD_TIMEOUT_S), asyncio.TaskGroup() as group:
        for _ in range(min(users, len(jobs))):
            group.create_task(user())
    return done


def load(port: int, users: int, jobs: Sequence[tuple[str, bytes]]) -> list[Arrivals]:
    """`run_load` from code without an event loop."""
    return asyncio.run(run_load(port, users, jobs))
