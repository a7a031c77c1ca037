"""An engine on another machine as a frontend sees it: `EngineClient` over one stream.

Owns the requests that this frontend has in that engine. Where engines are, and which one gets a request, is
deploy/engine_pool.py's. When the stream is over the client is: a new stream is a new client.

Guarantees:
 1. When the stream ends, for whatever reason, every open answer gets an "error" that is LOST_DEAD, after `alive` has
    become false and before anything else happens; nothing of that engine is heard after that.
 2. While it drains `submit` raises, and what was submitted goes on until the engine hands it back.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any

from tournant.workers.engine_stream import EngineFacts, StreamEnd, StreamLimits, hello
from tournant.workers.errors import EngineDeadError
from tournant.workers.messages import EngineInfo, EngineRequest, EngineStats, request_to_wire, step_from_wire
from tournant.workers.open_requests import OpenRequests, Sink

CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 30.0
logger = logging.getLogger("tournant.stream_client")


class StreamEngineClient(StreamEnd):
    """See the module. Make it with `await connect(...)`."""

    def __init__(self, limits: StreamLimits) -> None:
        super().__init__(limits)
        self.on_change: Callable[[], None] = lambda: None  # called when it drains, serves other weights, or is over
        self.draining = False
        self._open = OpenRequests()
        self._facts: EngineFacts | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._stats = EngineStats()
        self._calls: dict[int, asyncio.Future[bool]] = {}
        self._ids = itertools.count(1)
        self._over: asyncio.Future[str] = self._loop.create_future()

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        token: bytes,
        frontend: str,
        limits: StreamLimits | None = None,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> StreamEngineClient:
        """Open a stream and wait for the engine's facts. Raises EngineDeadError when there is none within the time."""
        loop = asyncio.get_running_loop()
        client: StreamEngineClient | None = None
        try:
            async with asyncio.timeout(timeout_s):
                _, client = await loop.create_connection(lambda: cls(limits or StreamLimits()), host, port)
                client.send(hello(token, frontend))
                await client._ready
        except (TimeoutError, OSError) as error:
            why = str(error) or f"it did not answer in {timeout_s:g} s"
            raise EngineDeadError(f"no stream to the engine at {host}:{port}: {why}") from None
        finally:
            if client is not None and client._facts is None:
                client.end("it was given up before the engine was ready")
        return client

    @property
    def facts(self) -> EngineFacts:
        """Engine, epoch of its weights, name of its replica."""
        if self._facts is None:
            raise EngineDeadError("the engine is not ready yet")
        return self._facts

    @property
    def info(self) -> EngineInfo:
        """See `EngineClient.info`."""
        return self.facts.info

    @property
    def stats(self) -> EngineStats:
        """See `EngineClient.stats`; at most a beat old."""
        return self._stats

    @property
    def alive(self) -> bool:
        """False once the stream is over."""
        return not self.ended

    @property
    def restarting(self) -> bool:
        """Never: a stream that is over stays so."""
        return False

    @property
    def serving(self) -> bool:
        """Whether it takes requests."""
        return not self.ended and not self.draining and self._facts is not None

    @property
    def prefill_tokens(self) -> int:
        """Tokens of requests of this frontend that have no output yet."""
        return self._open.prefill_tokens

    @property
    def num_answers(self) -> int:
        """Answers of this frontend that run or wait in the engine."""
        return self._open.num_answers

    def new_request_id(self) -> int:
        """See `EngineClient.new_request_id`."""
        return next(self._ids)

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """See `EngineClient.submit`. Request ids are the caller's; each must be used once."""
        if not self.serving:
            raise EngineDeadError(self.ended or "the engine drains; it takes no requests")
        message = request_to_wire(request)
        self._open.add(request, sink)
        try:
            self.send(message)  # may find that the stream is over, which is told to the sink
        except ValueError:
            self._open.drop([request.request_id])
            raise

    def abort(self, request_ids: Iterable[int]) -> None:
        """See `EngineClient.abort`."""
        if known := self._open.drop(request_ids):
            self.send(["abort", known])

    def abort_answer(self, request_id: int, index: int) -> None:
        """See `EngineClient.abort_answer`."""
        if self._open.drop_answer(request_id, index):
            self.send(["abort_answer", request_id, index])

    async def reset_prefix_cache(self) -> bool:
        """See `EngineClient.reset_prefix_cache`. Raises EngineDeadError, or TimeoutError after 30 s."""
        if self.ended:
            raise EngineDeadError(self.ended)
        number = next(self._ids)
        self._calls[number] = future = self._loop.create_future()
        self.send(["reset", number])
        try:
            return await asyncio.wait_for(future, CALL_TIMEOUT_S)
        finally:
            self._calls.pop(number, None)

    async def wait_ended(self) -> str:
        """Return when the stream is over: why."""
        return await asyncio.shield(self._over)

    async def close(self) -> None:
        """End the stream; the engine lives on. What is open is lost. Idempotent."""
        self.end("the stream was closed")

    # ------------------------------------------------------------ StreamEnd

    def take(self, message: list[Any]) -> None:
        """See `StreamEnd.take`."""
        match message:
            case ["ready", *_] if self._facts is None:
                self._facts = EngineFacts.from_wire(message)
                if not self._ready.done():
                    self._ready.set_result(None)
            case [("refused" | "bye"), str(why)]:
                self.end(why)
            case ["beat"]:
                pass
            case _ if self._facts is None:
                raise ValueError(f"a stream must begin with ready, not with {message[0]!r:.40}")
            case ["step", *_]:
                self._take_step(message)
            case ["draining", float() | int()]:
                self.draining = True
                self._loop.call_soon(self.on_change)
            case ["changed", *_]:
                self._facts, self.draining = EngineFacts.from_wire(message), False
                self._loop.call_soon(self.on_change)
            case ["reply", int(number), bool(done)]:
                future = self._calls.get(number)
                if future is not None and not future.done():
                    future.set_result(done)
            case _:
                raise ValueError(f"unknown message {message[0]!r:.40}")

    def on_end(self, why: str) -> None:
        """Everything that waits is told."""
        error = EngineDeadError(why)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # nobody may be waiting
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._over.set_result(why)
        self._loop.call_soon(self.on_change)
        self._open.lose(why)

    def _take_step(self, message: list[Any]) -> None:
        step = step_from_wire(message)
        self._stats = step.stats
        self._open.deliver(step.outputs)
