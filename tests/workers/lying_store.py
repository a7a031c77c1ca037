"""A store at a real socket that says what a test wants. As long as it is not told to lie it keeps what it is given."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tournant.kvstore.admin import Status, StatusQuery
from tournant.kvstore.block import Part
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.events import Attach, Attached, Fetch, Fetched, Open, Opened, Report, Reported
from tournant.kvstore.groups import ROW
from tournant.kvstore.host_tier import HostMemory
from tournant.kvstore.wire import MAX_REQUEST_BYTES, FrameBuffer, decode_request, encode

SLOT_PAGES = 3
Lie = Callable[[Any, Any], Any]  # (question, honest answer) -> what is said


@dataclass(frozen=True)
class Flood:
    """To be said without end."""

    message: Any


class LyingStore:
    """See the module. lies: by the class of the question; status: of `Status`, where it is not 0; num_attached: times
    it was said yes.
    """

    def __init__(self, path: Path, slots: int = 40) -> None:
        self.lies: dict[type, Lie] = {}
        self.memory = HostMemory.create(slots * SLOT_PAGES * PAGE_BYTES)
        self.status: dict[str, Any] = {"host_pages": self.memory.num_pages, "pages": ()}
        self.status |= {"incarnation": 1, "max_reads": 8, "max_keys": 1000, "max_entries": 100}
        self.passed: Callable[[], list[int]] = lambda: [self.memory.pool_fd, self.memory.generations_fd]
        self.num_attached = 0
        self._parts: tuple[Part, ...] = ()
        self._rows: dict[bytes, bytes] = {}
        self._next_page = 0
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        frames = FrameBuffer(MAX_REQUEST_BYTES)
        with suppress(OSError):
            while True:
                data, fds, _, _ = socket.recv_fds(connection, 1 << 18, 2)
                for fd in fds:
                    os.close(fd)
                if not data:
                    return
                for body in frames.feed(data):
                    self._answer(connection, decode_request(body, 1))

    def _answer(self, connection: socket.socket, question: Any) -> None:
        answer = self._honest(question)
        if (lie := self.lies.get(type(question))) is not None:
            answer = lie(question, answer)
        if isinstance(answer, Attached):
            self.num_attached += 1
            socket.send_fds(connection, [encode(answer)], self.passed())
        elif isinstance(answer, Flood):
            while True:
                connection.sendall(encode(answer.message))
        elif answer is not None:
            connection.sendall(encode(answer))

    def _honest(self, question: Any) -> Any:
        match question:
            case StatusQuery():
                zeros = dict.fromkeys((field.name for field in fields(Status)), 0)
                return Status(**zeros | self.status)
            case Attach():
                self._parts = question.local_parts
                return Attached(1, self._lent(question.credit))
            case Report():
                for one in question.entries:
                    version, place = one.version, (one.page, one.generation)
                    row = ROW.pack(version.writer_id, version.counter, 0, one.length, *place, one.checksum)
                    self._rows[one.key] = row
                return Reported(question.seq, self._lent(len(question.entries)), ())
            case Open():
                rows = [self._rows[key] for key in question.keys if key in self._rows]
                return Opened(question.read, b"\1" * len(rows), b"".join(rows), self._parts)
            case Fetch():
                by_version = {ROW.unpack(row)[:2]: row for row in self._rows.values()}
                rows = [by_version[pick.writer_id, pick.counter] for pick in question.picks]
                return Fetched(question.read, b"\1" * len(rows), b"".join(rows), self._parts)
        return None

    def _lent(self, count: int) -> tuple[tuple[int, int], ...]:
        first, pages = self._next_page, self.memory.num_pages
        self._next_page += count * SLOT_PAGES
        return tuple(((first + number * SLOT_PAGES) % pages, 1) for number in range(count))

    def close(self) -> None:
        """End it and all connections."""
        for one in (self._listener, *self._connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@contextmanager
def lying_store(path: Path) -> Iterator[LyingStore]:
    """A store that ends with the test."""
    found = LyingStore(path)
    try:
        yield found
    finally:
        found.close()


def changed(**new: Any) -> Lie:
    """The honest answer with other fields."""
    return lambda _, answer: replace(answer, **new)
