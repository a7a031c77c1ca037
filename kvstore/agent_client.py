"""A link's way to the agent of its node, which brings blocks that other nodes hold (agent_wire.py).

Owns one connection. Never waits: questions go out as far as there is room, answers are taken when they have come.
Deadlines are the caller's business; a client that raised StoreUnavailable is over. One thread owns it.

Invariant: no more answers are taken in than were asked for.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from tournant.kvstore.agent_wire import MAX_FRAME_BYTES, AgentAnswer, Bring, Locate, Question, decode_answer, encode
from tournant.kvstore.block import Part
from tournant.kvstore.errors import StoreUnavailable
from tournant.kvstore.socket_transport import RECEIVE_BYTES, peer_credentials
from tournant.kvstore.wire import FrameBuffer, WireError


class AgentClient:
    """Connects when made. Raises StoreUnavailable when no agent of this user listens at the path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._frames = FrameBuffer(MAX_FRAME_BYTES)
        self._unsent: deque[memoryview] = deque()
        self._last = 0
        self._asked: set[int] = set()  # numbers of questions that were not answered
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        try:
            self._sock.connect(str(path))
            _, uid = peer_credentials(self._sock)
        except OSError as error:
            self._sock.close()
            raise StoreUnavailable(f"no agent can be reached at {path}: {error}") from None
        if uid != os.geteuid():
            self._sock.close()
            raise StoreUnavailable(f"the agent at {path} belongs to user {uid}, not to {os.geteuid()}")

    def fileno(self) -> int:
        """Readable when `take` may have something, writable when it may send what had no room."""
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room in the connection: poll `fileno` for that too, then `take`."""
        return bool(self._unsent)

    @property
    def num_open(self) -> int:
        """Questions that were not answered."""
        return len(self._asked)

    def locate(self, keys: Sequence[bytes], part: Part) -> int:
        """Ask which other node holds the most of these keys; the number of the question. Raises StoreUnavailable."""
        return self._ask(Locate(self._next(), tuple(keys), part))

    def bring(
        self,
        node: str,
        keys: Sequence[bytes],
        depth: int,
        part: Part,
        identity: tuple[bytes, str, bytes],
        slot_bytes: Sequence[int],
        timeout_s: float,
    ) -> int:
        """Ask for blocks of a node to be brought into the store here; the number of the question.

        identity: weights_id, kv_form and tenant_check of the engine; the rest as in `Bring`. Raises StoreUnavailable.
        """
        timeout_ms = max(0, int(timeout_s * 1000))
        sizes = tuple(slot_bytes)
        return self._ask(Bring(self._next(), node, tuple(keys), depth, part, *identity, sizes, timeout_ms))

    def take(self) -> list[AgentAnswer]:
        """What has arrived. Sends what had no room before. Raises StoreUnavailable."""
        self._flush()
        found: list[AgentAnswer] = []
        while data := self._read():
            try:
                found += [self._expected(decode_answer(body)) for body in self._frames.feed(data)]
            except WireError as error:
                raise StoreUnavailable(f"the agent at {self._path} sends rubbish: {error}") from None
        return found

    def close(self) -> None:
        """No more questions; what is under way goes on without anybody who hears of it. Idempotent."""
        self._sock.close()

    def _next(self) -> int:
        self._last += 1
        return self._last

    def _ask(self, question: Question) -> int:
        self._unsent.append(memoryview(encode(question)))
        self._asked.add(question.request)
        self._flush()
        return question.request

    def _expected(self, answer: AgentAnswer) -> AgentAnswer:
        if answer.request not in self._asked:
            raise WireError(f"an answer to question {answer.request}, which is not open")
        self._asked.remove(answer.request)
        return answer

    def _flush(self) -> None:
        while self._unsent:
            left = self._unsent[0]
            try:
                sent = self._sock.send(left)
            except BlockingIOError:
                return
            except OSError as error:
                raise StoreUnavailable(f"the connection to {self._path} broke: {error}") from None
            if sent < len(left):
                self._unsent[0] = left[sent:]
            else:
                self._unsent.popleft()

    def _read(self) -> bytes:
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise StoreUnavailable(f"the connection to {self._path} broke: {error}") from None
        if not data:
            raise StoreUnavailable(f"the agent at {self._path} has closed the connection")
        return data
