"""The stream between one frontend and one engine on another machine: its messages, and what both ends have in common.

Owns frames, bounds and the heartbeat of an end; what is said is engine_server.py's and stream_client.py's. One TCP
connection; frames are those of messages.py, an array that begins with its kind:

    frontend to engine: hello (version, token, frontend id), submit, abort (ids), abort_answer (id, index),
                        reset (number), beat
    engine to frontend: ready and changed (facts of the engine, epoch and model of its weights, replica id), step (also
                        without outputs, as heartbeat), draining (seconds left), reply (number, bool), refused and bye
                        (why)

Invariants:
 1. An end is over once: by its own will, by the other's, by a frame that is not ours, by silence, or because the other
    does not read what it is sent. Whatever it is, `on_end` is called exactly once, and nothing after it.
 2. What waits to be sent is at most `max_unsent_bytes` and one frame.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import Any, cast

from tournant.kvstore.block import KEY_BYTES
from tournant.workers.messages import (
    MAX_FRAME_BYTES,
    EngineInfo,
    EngineRequest,
    FrameBuffer,
    info_from_wire,
    info_to_wire,
    pack_frame,
    request_from_wire,
)

STREAM_VERSION = 1
MAX_HELLO_BYTES = 4096
MAX_NAME_CHARS = 256
NOT_OURS = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)  # of a message's wrong shape
logger = logging.getLogger("tournant.engine_stream")


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds of one end. beat_s: something is said at least this often; silence_s: without a word for so long the other
    end counts as dead; hello_s: for the first words; max_unsent_bytes: waiting for an end that does not read.
    """

    beat_s: float = 2.0
    silence_s: float = 10.0
    hello_s: float = 10.0
    max_unsent_bytes: int = 8 << 20
    max_frame_bytes: int = MAX_FRAME_BYTES


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine says of itself when it is ready, and when it has other weights. epoch: of its weights; model:
    where they are from, as in the configuration.
    """

    info: EngineInfo
    epoch: int
    replica: str
    model: str | None = None

    def to_wire(self, kind: str) -> list[Any]:
        """["ready" or "changed", map, epoch, replica, model]."""
        return [kind, info_to_wire(self.info)[1], self.epoch, self.replica, self.model]

    @classmethod
    def from_wire(cls, message: list[Any]) -> EngineFacts:
        """Inverse of `to_wire`. Raises one of NOT_OURS."""
        _, info, epoch, replica, model = message
        if not isinstance(epoch, int) or not isinstance(replica, str) or not isinstance(model, str | None):
            raise ValueError("epoch must be a whole number, and the names of replica and model text")
        return cls(info_from_wire(["ready", info]), epoch, replica, model)


def hello(token: bytes, frontend: str) -> list[Any]:
    """The first words of a frontend."""
    return ["hello", STREAM_VERSION, token, frontend]


def read_hello(message: list[Any]) -> tuple[bytes, str]:
    """Token and frontend id. Raises one of NOT_OURS."""
    kind, version, token, frontend = message
    if kind != "hello" or not isinstance(token, bytes) or not isinstance(frontend, str):
        raise ValueError("a stream must begin with a hello")
    if version != STREAM_VERSION:
        raise ValueError(f"the frontend speaks version {version!r:.20} of the stream, this engine {STREAM_VERSION}")
    return token, frontend[:MAX_NAME_CHARS]


def read_request(message: list[Any]) -> EngineRequest:
    """A submitted request, all its fields of the right type. Raises one of NOT_OURS."""
    request = request_from_wire(message)
    whole = (request.request_id, request.priority, request.num_output, request.first_index)
    if any(type(value) is not int for value in whole) or not isinstance(request.cache_salt, str | None):
        raise TypeError("ids, priorities and counts must be whole numbers, a salt text")
    if not isinstance(request.token_ids, list) or set(map(type, request.token_ids)) - {int}:
        raise TypeError("token ids must be a list of whole numbers")
    if not isinstance(request.keys, list) or set(map(type, [*request.keys, request.weights_id])) - {bytes}:
        raise TypeError("keys and weights must be bytes")
    if any(len(key) != KEY_BYTES for key in request.keys) or not isinstance(request.namespace_digest, bytes):
        raise ValueError(f"keys must have {KEY_BYTES} bytes")
    return request


class StreamEnd(asyncio.Protocol):
    """One end. Subclasses say what is done with messages and what is said when there is nothing else to say."""

    def __init__(self, limits: StreamLimits) -> None:
        self.limits = limits
        self.ended = ""  # why
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames = FrameBuffer(limits.max_frame_bytes)
        self._heard = self._said = self._loop.time()
        self._suspected = False
        self._timer: asyncio.TimerHandle | None = None

    def take(self, message: list[Any]) -> None:
        """Called with every message. May raise one of NOT_OURS; then the end is over."""
        raise NotImplementedError

    def beat(self) -> list[Any] | None:
        """What is said when nothing else was for `beat_s`; None = nothing either."""
        return ["beat"]

    def on_end(self, why: str) -> None:
        """Called once, when it is over."""

    def send(self, message: list[Any]) -> None:
        """Say something, unless it is over. Raises ValueError above MAX_FRAME_BYTES; nothing is sent then."""
        if self.ended or self._transport is None:
            return
        frame = pack_frame(message)
        if (unsent := self._transport.get_write_buffer_size()) > self.limits.max_unsent_bytes:
            self.end(f"the other end does not read: {unsent} bytes wait to be sent")
            return
        self._said = self._loop.time()
        self._transport.write(frame)

    def end(self, why: str, *, last: list[Any] | None = None) -> None:
        """Be over, now. last: said before, if the other end still reads."""
        if self.ended:
            return
        if last is not None:
            self.send(last)
        if self.ended:
            return
        self.ended = why
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            if last is not None:
                self._transport.close()
                self._loop.call_later(self.limits.silence_s, self._transport.abort)  # if the last words are not read
            else:
                self._transport.abort()
        self.on_end(why)

    def _tick(self) -> None:
        """Silence counts when it is seen twice: what this loop was too busy to read is read between."""
        now = self._loop.time()
        silent = now - self._heard >= self.limits.silence_s
        if silent and self._suspected:
            self.end(f"nothing was heard for {now - self._heard:.1f} s")
            return
        self._suspected = silent
        if now - self._said >= self.limits.beat_s / 2 and (message := self.beat()) is not None:
            self.send(message)
        if not self.ended:
            self._timer = self._loop.call_later(self.limits.beat_s / 2, self._tick)

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The other end is connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from asyncio's
        if self.ended:
            self._transport.abort()
            return
        raw = self._transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._timer = self._loop.call_later(self.limits.beat_s / 2, self._tick)

    def data_received(self, data: bytes) -> None:
        """Bytes of the other end: every completed frame is taken at once."""
        self._heard, self._suspected = self._loop.time(), False
        try:
            for message in self._frames.feed(data):
                if self.ended:
                    return
                self.take(message)
        except NOT_OURS as error:
            logger.warning("a stream is ended: %s", error, exc_info=logger.isEnabledFor(logging.DEBUG))
            self.end(f"what the other end sent is not ours: {error}")

    def eof_received(self) -> bool:
        """The other end says nothing more."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by whomever."""
        self.end(f"the connection broke: {exc}" if exc is not None else "the other end closed the connection")
