"""Lines between ranks over which steps are told and answered: frames over TCP, one connection for a pair.

Owns how the ends of a line find each other (through the group's store), that both belong to the group, and that no
send waits for its receiver. What is said is rank_group.py's business; tensors of the model go over torch.distributed,
and who is alive is watched over the lines of rank_channel.py.

The leader has a line to every rank; where there are stages, each other rank of the first has one to its like in the
last. Frames are those of messages.py: ["hello", token, rank] and ["welcome", rank] first.

Invariants:
 1. Nobody listens any more once a rank's lines are there. What does not begin with the group's token and an awaited
    rank is closed and never taken for anything.
 2. `send` does not wait, so ranks cannot wait for one another by sending. What a socket does not take at once, at most
    MAX_UNSENT_BYTES, is sent by a thread that lives as long as there is such.
 3. Every other wait is finite. A line that has failed fails again at every call.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tournant.kvstore.errors import InvariantViolation
from tournant.workers.messages import FrameBuffer, pack_frame
from tournant.workers.split import Split

MAX_HELLO_BYTES = 4 << 10
MAX_STRANGERS = 64  # connections that have not said who they are; the oldest one goes when there are more
MAX_UNSENT_BYTES = 256 << 20  # on one line; more than the steps in flight can need
RECEIVE_BYTES = 64 << 10
logger = logging.getLogger("tournant.ranks")
TIME = struct.Struct("@ll")  # seconds and microseconds, as the system takes them


class LineLost(RuntimeError):  # noqa: N818 - a state of the world
    """A line ended, or its other end fell silent. Says which and why."""


class RankLine:
    """One end of a line. name: of the other rank. One thread may receive, several may send. timeout_s: of each wait."""

    def __init__(self, connection: socket.socket, name: str, timeout_s: float) -> None:
        self.name = name
        self._socket = connection
        self._frames = FrameBuffer()
        self._came: deque[list[Any]] = deque()
        self._changed = threading.Condition()  # guards the three below
        self._unsent: deque[memoryview] = deque()
        self._writer: threading.Thread | None = None
        self._failed: str | None = None
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limit(timeout_s)

    def limit(self, timeout_s: float) -> None:
        """Let no wait take longer from now on. By the system: Python's own timeouts cost another call."""
        self._timeout_s = timeout_s
        seconds, rest = divmod(max(1, round(timeout_s * 1e6)), 1_000_000)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, TIME.pack(seconds, rest))

    def send(self, frame: bytes) -> None:
        """Send a frame behind all others; returns before it has arrived. Raises LineLost, also for an earlier one."""
        with self._changed:
            if self._failed is not None:
                raise LineLost(self._failed)
            if not self._unsent:
                try:
                    sent = self._socket.send(frame, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    sent = 0
                except OSError as error:
                    raise self._fail(f"the connection to {self.name} broke: {error}") from error
                if sent == len(frame):
                    return
                frame = frame[sent:]
            if sum(map(len, self._unsent)) + len(frame) > MAX_UNSENT_BYTES:
                raise self._fail(f"{self.name} has left more than {MAX_UNSENT_BYTES} bytes unread")
            self._unsent.append(memoryview(frame))
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, daemon=True, name="rank-line")
                self._writer.start()

    def _write(self) -> None:
        while True:
            with self._changed:
                if not self._unsent:
                    self._writer = None
                    self._changed.notify_all()
                    return
                part = self._unsent[0]
            try:
                self._socket.sendall(part)
            except OSError as error:
                with self._changed:
                    self._fail(f"{self.name} took nothing: {_why(error, self._timeout_s)}")
                    self._unsent.clear()
                continue
            with self._changed:
                if self._unsent:
                    self._unsent.popleft()

    def _fail(self, cause: str) -> LineLost:
        if self._failed is None:
            self._failed = cause
        return LineLost(self._failed)

    def receive(self) -> list[Any]:
        """The next message; waits for it. Raises LineLost, InvariantViolation for what is no frame."""
        while not self._came:
            if self._failed is not None:
                raise LineLost(self._failed)
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except OSError as error:
                with self._changed:
                    raise self._fail(f"{self.name} is not heard: {_why(error, self._timeout_s)}") from error
            if not data:
                with self._changed:
                    raise self._fail(f"{self.name} has ended the connection")
            try:
                self._came.extend(self._frames.feed(data))
            except ValueError as error:
                with self._changed:
                    self._fail(f"{self.name} sent what is no frame: {error}")
                raise InvariantViolation(self._failed) from error
        return self._came.popleft()

    def settle(self) -> None:
        """Return when the system has taken everything sent. Raises LineLost."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._unsent, self._timeout_s):
                raise self._fail(f"{self.name} took nothing for {self._timeout_s:g} s")
            if self._failed is not None:
                raise LineLost(self._failed)

    def close(self) -> None:
        """End the line; what was not taken yet is dropped. Idempotent."""
        with self._changed:
            self._fail("the line is closed")
            writer = self._writer
        with contextlib.suppress(OSError):  # the other end may be gone
            self._socket.shutdown(socket.SHUT_RDWR)
        if writer is not None:
            writer.join()
        self._socket.close()


def _why(error: OSError, timeout_s: float) -> str:
    return f"nothing for {timeout_s:g} s" if isinstance(error, BlockingIOError) else str(error)


def peers_of(split: Split, rank: int) -> tuple[list[int], list[int]]:
    """The ranks to which this one has a line: those that come to it, and those to which it goes."""
    lasts = split.size - split.tensor  # the first of the last stage
    if rank == 0:
        return list(range(1, split.size)), []
    if lasts and rank < split.tensor:
        return [lasts + rank], [0]
    return [], [0, rank - lasts] if lasts and rank > lasts else [0]


def form_lines(
    split: Split,
    rank: int,
    token: bytes,
    address: str,
    put: Callable[[str, str], object],
    get: Callable[[str], str],
    forming_s: float,
    timeout_s: float,
) -> dict[int, RankLine]:
    """The lines of this rank by the rank at their other end; all ranks of a group call this. address: to listen on;
    put, get: a text by its name, in a place that all ranks see; forming_s, timeout_s: longest wait here, and later.

    Raises LineLost when a rank does not come or does not let this one in, OSError when one cannot be reached, and what
    put and get raise; nothing is left open then.
    """
    awaited, wanted = peers_of(split, rank)
    lines: dict[int, RankLine] = {}
    try:
        with contextlib.ExitStack() as listening:
            if awaited:
                door = listening.enter_context(contextlib.closing(_Door(address, token, awaited)))
                put(f"line/{rank}", f"{address} {door.port}")
            for peer in wanted:
                host, port = get(f"line/{peer}").split()
                connection = socket.create_connection((host, int(port)), timeout=forming_s)
                lines[peer] = RankLine(connection, f"rank {peer}", forming_s)
                _enter(lines[peer], rank, token)
            if awaited:
                for peer, connection in door.admit(forming_s).items():
                    lines[peer] = RankLine(connection, f"rank {peer}", forming_s)
    except BaseException:
        for line in lines.values():
            line.close()
        raise
    for line in lines.values():
        line.limit(timeout_s)
    return lines


def _enter(line: RankLine, rank: int, token: bytes) -> None:
    """Say who this is at a new line, and wait until that is believed."""
    try:
        line.send(pack_frame(["hello", token, rank]))
        welcome = line.receive()
    except LineLost as error:
        raise LineLost(f"rank {rank} is not let in: {error}; are both of the same group?") from error
    if welcome != ["welcome", rank]:
        raise InvariantViolation(f"{line.name} welcomes another one than rank {rank}")


class _Door:
    """Where ranks come in."""

    def __init__(self, address: str, token: bytes, awaited: list[int]) -> None:
        self._token = token
        self._missing = set(awaited)
        self._strangers: dict[socket.socket, FrameBuffer] = {}  # oldest first
        self._found: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((address, 0), backlog=len(awaited) + MAX_STRANGERS)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.port: int = self._listener.getsockname()[1]

    def admit(self, forming_s: float) -> dict[int, socket.socket]:
        """The connections of all awaited ranks. Raises LineLost when one does not come in time."""
        deadline = time.monotonic() + forming_s
        while self._missing:
            if (left := deadline - time.monotonic()) <= 0:
                names = ", ".join(map(str, sorted(self._missing)))
                raise LineLost(f"of the awaited ranks {names} did not come within {forming_s:g} s")
            for key, _ in self._selector.select(left):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._strangers:  # else it has just been put out
                    self._hear(key.data)
        found, self._found = self._found, {}
        return found

    def close(self) -> None:
        """Put out everyone who was not asked for."""
        for connection in [*self._strangers, *self._found.values(), self._listener]:
            connection.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it went away while it waited, or there are no descriptors left
            return
        connection.setblocking(False)
        self._strangers[connection] = FrameBuffer(MAX_HELLO_BYTES)
        self._selector.register(connection, selectors.EVENT_READ, connection)
        if len(self._strangers) > MAX_STRANGERS:
            self._put_out(next(iter(self._strangers)))

    def _hear(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(MAX_HELLO_BYTES)
            messages = list(self._strangers[connection].feed(data))
            if data and not messages:
                return
            rank = self._rank_of(messages)
            connection.sendall(pack_frame(["welcome", rank]))
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._put_out(connection)
            return
        self._missing.remove(rank)
        self._found[rank] = self._forget(connection)

    def _rank_of(self, messages: list[list[Any]]) -> int:
        """Who says so, if it is awaited. Raises ValueError."""
        match messages:
            case [["hello", bytes(token), int(rank)]] if rank in self._missing:
                if hmac.compare_digest(token, self._token):
                    return rank
        raise ValueError("a stranger")

    def _forget(self, connection: socket.socket) -> socket.socket:
        self._selector.unregister(connection)
        del self._strangers[connection]
        return connection

    def _put_out(self, connection: socket.socket) -> None:
        logger.warning("a connection was closed that is of no rank of this group")
        self._forget(connection).close()
