"""The line from every rank of a group to its leader: who is there, what it has to tell, and that it still lives.

Owns the connections (TCP, beside those of torch.distributed) and when a rank counts as lost. What leaders tell ranks
goes over `RankGroup.tell`; a leader sends nothing here, so whatever a rank reads is the leader's end.

Frames, as in messages.py, all from ranks: ["hello", token, rank, host, pid] first, then ["beat"], ["event", ...] and
["failed", kind of error, text].

Guarantees:
 1. What does not begin with the group's token and an awaited rank is closed, after HELLO_S and MAX_HELLO_BYTES at most,
    and is never taken for anything.
 2. The first loss of a rank is reported once: its connection ended, it was silent for too long, sent what is no frame,
    or said that it failed. A rank that failed because another did gives that one LAST_WORDS_S to be heard first.
 3. After `end` has been called nothing is a loss.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tournant.workers.messages import FrameBuffer, pack_frame

SILENCE_S = 30.0  # a rank that is not heard of for so long is lost
BEATS = 6  # of a rank in that time
HELLO_S = 10.0
MAX_HELLO_BYTES = 4 << 10
MAX_STRANGERS = 64  # connections that have not said who they are; the oldest one goes when there are more
LAST_WORDS_S = 1.0
SEND_S = 10.0
RECEIVE_BYTES = 1 << 18
SECONDARY = "RankLost"  # kind of the errors of ranks that miss another
logger = logging.getLogger("tournant.ranks")


@dataclass(slots=True)
class _Line:
    """A connection. rank: None until it has said hello; heard_at: when it was accepted, or said hello or anything
    after it.
    """

    socket: socket.socket
    heard_at: float
    rank: int | None = None
    name: str = ""
    frames: FrameBuffer = field(default_factory=lambda: FrameBuffer(MAX_HELLO_BYTES))
    secondary: bool = False  # it has said that it misses another rank


class RankChannel:
    """The leader's side, with a thread of its own that calls back.

    size: ranks of the group, the leader included; on_event: gets (rank, what it sent); on_lost: gets (kind of error,
    which rank on which host and why), once.
    """

    def __init__(
        self,
        host: str,
        size: int,
        token: bytes,
        on_event: Callable[[int, list[Any]], None],
        on_lost: Callable[[str, str], None],
        silence_s: float = SILENCE_S,
    ) -> None:
        self.size = size
        self._token = token
        self._on_event = on_event
        self._on_lost = on_lost
        self._silence_s = silence_s
        self._lines: list[_Line] = []
        self._suspect: tuple[float, str] | None = None  # when it counts, what a rank that misses another said
        self._lost = False
        self._ending = threading.Event()
        self._closed = False
        self._listener = socket.create_server((host, 0), backlog=size + MAX_STRANGERS)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True, name="rank-channel")
        self._thread.start()

    def end(self) -> None:
        """From now on ranks may go. Idempotent."""
        self._ending.set()
        with contextlib.suppress(OSError):  # the thread has ended
            self._wake.send(b"x")

    def close(self, wait_s: float) -> None:
        """Wait for the ranks to go, for at most so long, and close everything. Idempotent."""
        self.end()
        self._thread.join(wait_s)
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._turn()
        except Exception as error:
            logger.exception("the channel of the ranks failed")
            self._report(type(error).__name__, f"rank 0: {type(error).__name__}: {error}")
        finally:
            for line in list(self._lines):
                self._drop(line)
            self._selector.close()
            self._listener.close()
            self._woken.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._wait_s()):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                self._closed = not self._woken.recv(1)
            else:
                self._read(key.data)
        self._look_for_silence()

    def _is_over(self) -> bool:
        return self._closed or (self._ending.is_set() and not self._lines)

    def _wait_s(self) -> float:
        now = time.monotonic()
        ends = [line.heard_at + self._limit_s(line) for line in self._lines]
        if self._suspect is not None:
            ends.append(self._suspect[0])
        return max(0.0, min([*ends, now + self._silence_s]) - now)

    def _limit_s(self, line: _Line) -> float:
        return HELLO_S if line.rank is None else self._silence_s

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it went away while it waited, or there are no descriptors left
            return
        strangers = [line for line in self._lines if line.rank is None]
        if len(strangers) >= MAX_STRANGERS:  # a rank says at once who it is
            self._gone(strangers[0], "too many others came after it and it had not said who it is")
        connection.setblocking(False)
        line = _Line(connection, time.monotonic())
        self._lines.append(line)
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _read(self, line: _Line) -> None:
        try:
            data = line.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._gone(line, f"the connection broke: {error}")
            return
        if not data:
            self._gone(line, "its process ended")
            return
        if line.rank is not None:  # a stranger has HELLO_S in all
            line.heard_at = time.monotonic()
        try:
            for message in line.frames.feed(data):
                self._handle(line, message)
        except (ValueError, TypeError) as error:
            self._gone(line, f"it sent what is no frame: {error}")

    def _handle(self, line: _Line, message: list[Any]) -> None:
        match message:
            case ["hello", bytes(token), int(rank), str(host), int(pid)] if line.rank is None:
                if not hmac.compare_digest(token, self._token) or not self._awaits(rank):
                    raise ValueError("a stranger")
                line.rank, line.name = rank, f"rank {rank} on {host[:255]} (process {pid})"
                line.frames.max_bytes, line.heard_at = FrameBuffer().max_bytes, time.monotonic()
            case ["beat"] if line.rank is not None:
                return
            case ["event", *data] if line.rank is not None:
                self._on_event(line.rank, data)
            case ["failed", str(kind), str(text)] if line.rank is not None:
                cause = f"{line.name}: {kind}: {text}"
                if kind != SECONDARY:
                    self._report(kind, cause)
                elif self._suspect is None:
                    self._suspect = time.monotonic() + LAST_WORDS_S, cause
                line.secondary = True
            case _:
                raise ValueError(f"nothing begins with {str(message[0])[:20]!r} here")

    def _awaits(self, rank: int) -> bool:
        return 0 < rank < self.size and all(line.rank != rank for line in self._lines)

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        for line in [line for line in self._lines if now >= line.heard_at + self._limit_s(line)]:
            self._gone(line, f"nothing was heard of it for {self._limit_s(line):g} s")
        if self._suspect is not None and now >= self._suspect[0]:
            self._report(SECONDARY, self._suspect[1])

    def _gone(self, line: _Line, why: str) -> None:
        self._drop(line)
        if line.rank is None:
            logger.warning("a connection to the ranks' port was closed: %s", why)
        elif not line.secondary:
            self._report(SECONDARY, f"{line.name}: {why}")

    def _drop(self, line: _Line) -> None:
        self._selector.unregister(line.socket)
        line.socket.close()
        self._lines.remove(line)

    def _report(self, kind: str, cause: str) -> None:
        self._suspect = None
        if not self._lost and not self._ending.is_set():
            self._lost = True
            self._on_lost(kind, cause)


class LeaderLine:
    """A rank's side. Raises OSError when the leader cannot be reached; so do all methods once it is gone."""

    def __init__(self, host: str, port: int, token: bytes, rank: int) -> None:
        self._lock = threading.Lock()
        self._socket = socket.create_connection((host, port), timeout=SEND_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send(["hello", token, rank, socket.gethostname(), os.getpid()])

    def fileno(self) -> int:
        """Readable once the leader is gone."""
        return self._socket.fileno()

    @property
    def address(self) -> str:
        """This machine's, as the leader sees it."""
        found: str = self._socket.getsockname()[0]
        return found

    def beat(self) -> None:
        """Say that this rank lives; to be called BEATS times in SILENCE_S."""
        self._send(["beat"])

    def send_event(self, data: list[Any]) -> None:
        """Plain types for the leader's `on_event`, in order. Safe from several threads."""
        self._send(["event", *data])

    def fail(self, error: BaseException) -> None:
        """Say why this rank ends."""
        self._send(["failed", type(error).__name__, str(error)[:2000]])

    def close(self) -> None:
        """Let the leader know that this rank is gone. Idempotent."""
        self._socket.close()

    def _send(self, message: list[Any]) -> None:
        with self._lock:
            self._socket.sendall(pack_frame(message))
