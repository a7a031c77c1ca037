"""The engine's side of the streams: serves one engine to every frontend that connects.

Owns the listening socket and, for each frontend, which requests it has in the engine; runs on the event loop of the
engine's client. It decides nothing about requests but whether this engine may have them.

Guarantees:
 1. Nothing is done for a connection, and nothing told to it, before it has said the token (compared in constant time).
    It has a limited time for that; of too many such, the oldest goes, so that they keep no frontend out.
 2. All outputs of an engine step for one frontend are one frame; one that does not read is cut off, and so is one that
    sends what is not ours. A frontend that goes away takes its requests with it.
 3. A request for other weights than the engine's, one that comes while it drains, and one beyond what the engine holds
    is not begun: each of its answers is LOST_MOVED at once.
 4. After `drain` no request is in the engine. After `close` nobody is connected.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tournant.workers.engine_client import EngineClient
from tournant.workers.engine_stream import (
    MAX_HELLO_BYTES,
    EngineFacts,
    StreamEnd,
    StreamLimits,
    read_hello,
    read_request,
)
from tournant.workers.errors import EngineDeadError
from tournant.workers.messages import LOST_DEAD, LOST_MOVED, EngineRequest, RequestOutput, StepMessage, step_to_wire

MAX_STREAMS = 256
MAX_STRANGERS = 64  # connections that have not said who they are; the oldest one goes when there are more
logger = logging.getLogger("tournant.engine_server")


class EngineServer:
    """See the module. replica: this engine's name in the application; token: what frontends must know; epoch, model: of
    its weights, see `EngineFacts`.
    """

    def __init__(
        self,
        engine: EngineClient,
        replica: str,
        token: bytes,
        epoch: int = 0,
        limits: StreamLimits | None = None,
        model: str | None = None,
    ) -> None:
        self.engine = engine
        self.replica = replica
        self.epoch = epoch
        self.model = model
        self._token = token
        self._limits = limits or StreamLimits()
        self._server: asyncio.Server | None = None
        self._streams: dict[_Stream, None] = {}  # of frontends
        self._strangers: dict[_Stream, None] = {}  # oldest first
        self._deadline: float | None = None  # of the drain that is under way, by the loop's clock
        self._emptied = asyncio.Event()
        self._closed = self._ends = False

    @property
    def num_answers(self) -> int:
        """Answers of all frontends in the engine."""
        return sum(stream.num_answers for stream in self._streams)

    @property
    def draining(self) -> bool:
        """Whether it takes nothing now."""
        return self._deadline is not None

    @property
    def serving(self) -> bool:
        """Whether it has an engine that takes requests."""
        return not self.draining and not self._closed and self.engine.alive and not self.engine.restarting

    def facts(self) -> EngineFacts:
        """What it says of the engine."""
        return EngineFacts(self.engine.info, self.epoch, self.replica, self.model)

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; the port, one that is free for 0. Raises OSError."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Stream(self, self._limits), host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def drain(self, deadline_s: float) -> None:
        """Take nothing from now on, let what runs finish for so long, and hand back what is left then."""
        self.begin_drain(deadline_s)
        await self.drained()

    def begin_drain(self, deadline_s: float, *, for_good: bool = False) -> None:
        """The first half of `drain`. for_good: `serve_again` does nothing any more."""
        self._ends |= for_good
        self._deadline = asyncio.get_running_loop().time() + deadline_s
        for stream in list(self._streams):
            stream.send(["draining", deadline_s])

    async def drained(self) -> None:
        """The second half of `drain`."""
        try:
            async with asyncio.timeout(self.left_s()):
                while self.num_answers:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            for stream in list(self._streams):
                stream.hand_back(f"the engine of replica {self.replica} drains, and its time is over")

    def serve_again(self, epoch: int, model: str | None = None) -> None:
        """After a drain: take requests, for the engine and weights there are now."""
        if not self._ends:
            self._deadline = None
            self.call(epoch, model)

    def call(self, epoch: int, model: str | None) -> None:
        """What its weights are called from now on; told at once unless it drains."""
        self.epoch, self.model = epoch, model
        if not self.draining:
            for stream in list(self._streams):
                stream.send(self.facts().to_wire("changed"))

    def close(self, why: str) -> None:
        """Tell everybody, and end all streams; what runs is lost to their frontends, who resume it. Idempotent."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        for stream in list(self._streams):
            stream.end(why, last=["bye", why])
        for stranger in list(self._strangers):
            stranger.end(why)

    def refusal(self, request: EngineRequest) -> str:
        """Why this engine may not have a request now, "" if it may."""
        info = self.engine.info
        if not self.serving:
            return f"the engine of replica {self.replica} takes no requests now"
        if request.weights_id not in (b"", info.namespace.weights_id):
            return f"the engine of replica {self.replica} has other weights than the request is for"
        if self.num_answers + request.params.n > info.max_num_seqs + info.max_queued_requests:
            return f"the engine of replica {self.replica} is full"
        return ""

    def came(self, stranger: _Stream) -> None:
        """Somebody has connected; who has been silent for longest makes room."""
        if len(self._strangers) >= MAX_STRANGERS:
            why = "too many others came after it and it had not said who it is"
            logger.warning("a stream is ended: %s", why)
            next(iter(self._strangers)).end(why)
        self._strangers[stranger] = None

    def joined(self, stream: _Stream) -> str:
        """A stranger has said the token: it is a frontend, unless there is a reason against it, which is returned."""
        if self._closed or not self.engine.alive or self.engine.restarting:
            return f"replica {self.replica} has no engine now"
        if len(self._streams) >= MAX_STREAMS:
            return f"replica {self.replica} has streams to {MAX_STREAMS} frontends, and takes no more"
        del self._strangers[stream]
        self._streams[stream] = None
        return ""

    def left(self, stream: _Stream) -> None:
        """A frontend or a stranger is gone."""
        self._streams.pop(stream, None)
        self._strangers.pop(stream, None)
        self.note_end()

    def note_end(self) -> None:
        """An answer is over."""
        self._emptied.set()

    def check_hello(self, message: list[Any]) -> str:
        """The id of a frontend that knows the token. Raises one of NOT_OURS."""
        token, frontend = read_hello(message)
        if not hmac.compare_digest(token, self._token):
            raise ValueError("the token is not this engine's")
        return frontend

    def left_s(self) -> float | None:
        """Seconds until a drain that is under way is over."""
        return None if self._deadline is None else max(0.0, self._deadline - asyncio.get_running_loop().time())


@dataclass(slots=True)
class _InEngine:
    """A request of a frontend: its id in the engine, and the numbers of its answers that are not over."""

    engine_id: int
    running: set[int]


class _Stream(StreamEnd):
    """One frontend."""

    def __init__(self, server: EngineServer, limits: StreamLimits) -> None:
        super().__init__(replace(limits, max_frame_bytes=MAX_HELLO_BYTES))
        self._full_frame_bytes = limits.max_frame_bytes
        self._server = server
        self._frontend: str | None = None  # None before its hello
        self.num_answers = 0  # in the engine
        self._requests: dict[int, _InEngine] = {}
        self._outputs: list[RequestOutput] = []
        self._flushing = False
        self._step = 0
        self._resetting: asyncio.Task[None] | None = None
        self._hello_timer = self._loop.call_later(limits.hello_s, self._expire)
        server.came(self)

    def _expire(self) -> None:
        self.end("it did not say hello in time")

    def take(self, message: list[Any]) -> None:
        """See `StreamEnd.take`."""
        if self._frontend is None:
            self._greet(message)
            return
        match message:
            case ["submit", *_]:
                self._submit(read_request(message))
            case ["abort", list(request_ids)]:
                self._abort(request_ids)
            case ["abort_answer", int(request_id), int(index)]:
                self._abort_answer(request_id, index)
            case ["reset", int(number)]:
                self._reset(number)
            case ["beat"]:
                pass
            case _:
                raise ValueError(f"unknown message {message[0]!r:.40}")

    def beat(self) -> list[Any] | None:
        """Numbers of the engine; or the end, when there is none any more. Nothing for a stranger."""
        if self._frontend is None:
            return None
        if not self._server.engine.alive or self._server.engine.restarting:
            self._loop.call_soon(self._say_bye)
        return self._step_message([])

    def on_end(self, why: str) -> None:
        """What it has in the engine is stopped."""
        self._hello_timer.cancel()
        if self._frontend is not None:
            logger.info("the stream of frontend %s is over: %s", self._frontend, why)
        self._server.engine.abort([request.engine_id for request in self._requests.values()])
        self._requests.clear()
        self.num_answers = 0
        self._outputs.clear()
        if self._resetting is not None:
            self._resetting.cancel()
        self._server.left(self)

    def hand_back(self, why: str) -> None:
        """Stop everything it has in the engine; it can go on elsewhere."""
        self._server.engine.abort([request.engine_id for request in self._requests.values()])
        for request_id, request in self._requests.items():
            self._lose(request_id, sorted(request.running), why, LOST_MOVED)
        self._requests.clear()
        self.num_answers = 0
        self._server.note_end()

    def _greet(self, message: list[Any]) -> None:
        frontend = self._server.check_hello(message)
        self._hello_timer.cancel()
        if why := self._server.joined(self):
            self.end(why, last=["refused", why])
            return
        self._frontend = frontend
        self._frames.max_bytes = self._full_frame_bytes
        self.send(self._server.facts().to_wire("ready"))
        if (left_s := self._server.left_s()) is not None:
            self.send(["draining", left_s])

    def _submit(self, request: EngineRequest) -> None:
        request_id, indices = request.request_id, request.indices
        if request_id in self._requests:
            raise ValueError(f"request id {request_id} is in use")
        if why := self._server.refusal(request):
            self._lose(request_id, indices, why, LOST_MOVED)
            return
        engine = self._server.engine
        engine_id = engine.new_request_id()
        self._requests[request_id] = _InEngine(engine_id, set(indices))
        self.num_answers += len(indices)
        try:
            engine.submit(replace(request, request_id=engine_id), partial(self._take_output, request_id))
        except EngineDeadError as error:
            self._forget(request_id)
            self._lose(request_id, indices, str(error), LOST_DEAD)

    def _abort(self, request_ids: list[Any]) -> None:
        known = [self._requests[request_id] for request_id in request_ids if request_id in self._requests]
        self._server.engine.abort([request.engine_id for request in known])
        for request_id in request_ids:
            self._forget(request_id)

    def _abort_answer(self, request_id: int, index: int) -> None:
        request = self._requests.get(request_id)
        if request is None or index not in request.running:
            return
        self._server.engine.abort_answer(request.engine_id, index)
        self._end_answer(request_id, request, index)

    def _end_answer(self, request_id: int, request: _InEngine, index: int) -> None:
        request.running.discard(index)
        self.num_answers -= 1
        if not request.running:
            self._forget(request_id)

    def _forget(self, request_id: int) -> None:
        if (request := self._requests.pop(request_id, None)) is not None:
            self.num_answers -= len(request.running)
            self._server.note_end()

    def _reset(self, number: int) -> None:
        if self._resetting is not None and not self._resetting.done():
            self.send(["reply", number, False])
            return
        self._resetting = self._loop.create_task(self._answer_reset(number))

    async def _answer_reset(self, number: int) -> None:
        try:
            done = await self._server.engine.reset_prefix_cache()
        except (EngineDeadError, TimeoutError):
            done = False
        self.send(["reply", number, done])

    def _take_output(self, request_id: int, output: RequestOutput) -> None:
        """The engine's sink of one request."""
        request = self._requests.get(request_id)
        if request is None or output.index not in request.running:
            return
        output.request_id = request_id
        if output.finish_reason is not None:
            self._end_answer(request_id, request, output.index)
        self._say_later(output)

    def _lose(self, request_id: int, indices: Iterable[int], why: str, lost: str) -> None:
        for index in indices:
            self._say_later(RequestOutput(request_id, index, [], "error", error=why, lost=lost))

    def _say_later(self, output: RequestOutput) -> None:
        """With all else that this turn of the loop, which is one step of the engine, has for the frontend."""
        self._outputs.append(output)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        gone = not self._server.engine.alive or self._server.engine.restarting
        outputs, self._outputs = self._outputs, []
        if gone:  # what is lost is told by the end, so that nobody goes on with it here
            outputs = [output for output in outputs if output.lost is None]
        if outputs and not self.ended:
            try:
                self.send(self._step_message(outputs))
            except ValueError:  # too long for one frame
                self._send_one_by_one(outputs)
        if gone:
            self._say_bye()

    def _send_one_by_one(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            try:
                self.send(self._step_message([output]))
            except ValueError as error:
                self._abort_answer(output.request_id, output.index)
                failed = RequestOutput(output.request_id, output.index, [], "error", error=str(error))
                self.send(self._step_message([failed]))

    def _step_message(self, outputs: list[RequestOutput]) -> list[Any]:
        self._step += 1
        engine = self._server.engine
        return step_to_wire(StepMessage(engine.info.writer_id, self._step, outputs, engine.stats))

    def _say_bye(self) -> None:
        why = f"the engine of replica {self._server.replica} is gone"
        self.end(why, last=["bye", why])
