"""The seam between frontends and engines: what a frontend may ask of an engine, whoever carries it.

`EngineClient` is the protocol; `ProcessEngineClient` speaks it to an engine in a child process over a socket pair.
One message per engine step comes back; outputs of each request go to the sink given at submit, on the event loop. An
engine that makes no progress (engine_watchdog.py) is killed.

Guarantees:
 1. Every submitted request gets exactly one output with a finish_reason per answer, "error" when the engine dies.
 2. Step messages of another writer id are dropped.
 3. The engine process ends with its parent, and so do the other ranks of an engine that has several; once one of them
    has ended, all are killed.
 4. The end of an engine that was ready is one ERROR in the log, with its cause, unless this client was told to end it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from typing import Any, Protocol, cast

from tournant.workers.config import EngineConfig
from tournant.workers.engine_watchdog import LOOK_S, STILL_LOOKS, STILL_LOOKS_OF_RANKS, Watchdog, look_at
from tournant.workers.errors import ConfigError, EngineDeadError, ModelFormatError
from tournant.workers.messages import (
    LOCAL_HOST,
    EngineInfo,
    EngineRequest,
    EngineStats,
    FrameBuffer,
    StartMessage,
    StepMessage,
    info_from_wire,
    pack_frame,
    request_to_wire,
    start_to_wire,
    step_from_wire,
)
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.families import describe
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.open_requests import OpenRequests, Sink
from tournant.workers.rank_launch import GroupPlace, LocalRanks, RankLauncher

OutputSink = Sink
START_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 30.0
EXIT_POLL_S, EXIT_LOOKS = 0.01, 100  # for the exit status of an engine whose connection is gone
LAUNCH_POLL_S = 0.25  # between looks for ranks that ended before they reached the engine
LAUNCH_GRACE_S = 2.0  # for the engine to say it better
ERRORS: dict[str, type[Exception]] = {"ConfigError": ConfigError, "ModelFormatError": ModelFormatError}
logger = logging.getLogger("tournant.engine_client")


class EngineClient(Protocol):
    """One engine as a frontend sees it. All methods are called on the frontend's event loop."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine, known from the moment it is ready."""

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges of the latest step message."""

    @property
    def alive(self) -> bool:
        """False once nothing comes back under this client: the engine process has ended, or it is not started anew."""

    @property
    def restarting(self) -> bool:
        """Whether there is no engine now, but may be one soon; `submit` raises EngineDeadError until then."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens of requests of this client that have no output yet."""

    def new_request_id(self) -> int:
        """A request id never given before by this client."""

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Hand a request over; `sink` is called with each of its outputs. Raises EngineDeadError when not alive."""

    def abort(self, request_ids: Iterable[int]) -> None:
        """Stop requests. Their sinks are not called any more. Unknown or finished ids are ignored."""

    def abort_answer(self, request_id: int, index: int) -> None:
        """Stop one answer of a request; its sink hears no more of it. Unknown or finished ones are ignored."""

    async def reset_prefix_cache(self) -> bool:
        """Forget all reusable blocks. True only if it was done (False while a sequence holds blocks)."""

    async def close(self) -> None:
        """End the engine process and wait for it. Idempotent."""


class ProcessEngineClient(asyncio.Protocol):
    """`EngineClient` over a socket pair to an engine in a child process. Make it with `await start(...)`."""

    def __init__(self, process: subprocess.Popen[bytes], launcher: RankLauncher | None = None) -> None:
        self.process = process
        self.num_finished = 0  # answers that did not end in "error"
        self._launcher = launcher
        self._launching: asyncio.Task[None] | None = None
        self._burying: asyncio.Task[None] | None = None
        self._losing: asyncio.Task[None] | None = None
        self._closing = False
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames = FrameBuffer()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._open = OpenRequests()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._alive = True
        self._watchdog = Watchdog(STILL_LOOKS if launcher is None else STILL_LOOKS_OF_RANKS)
        self._looking: asyncio.TimerHandle | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        files: ModelFiles,
        timeout_s: float = START_TIMEOUT_S,
        offload: OffloadConfig | None = None,
        launcher: RankLauncher | None = None,
    ) -> ProcessEngineClient:
        """Start an engine process and wait until it is ready. offload: its tiers below the device, if it has any;
        launcher: what starts its other ranks, if it has any, None = on this machine.

        Raises ConfigError or ModelFormatError as the engine found, EngineDeadError when it died or took longer than
        `timeout_s`; no process is left then.
        """
        model = (await asyncio.to_thread(describe, files, config)).to_wire()
        ours, theirs = socket.socketpair()
        with theirs:
            # -P keeps the current folder off the module path: a bare `kernels` there would shadow others' packages
            command = [sys.executable, "-P", "-m", "tournant.workers.engine_process", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        if launcher is None and config.num_ranks > 1:
            launcher = LocalRanks()
        client = cls(process, launcher)
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: client, sock=ours)
        try:
            host = LOCAL_HOST if launcher is None else launcher.host
            client._send(start_to_wire(StartMessage(config, model, os.getpid(), offload, host)))
            await asyncio.wait_for(client._until_ready(), timeout_s)
        except TimeoutError:
            await client.close()
            raise EngineDeadError(f"the engine was not ready after {timeout_s:g} s; see its log above") from None
        except BaseException:
            await client.close()
            raise
        return client

    async def _until_ready(self) -> EngineInfo:
        """A rank that ends before it has reached the engine is known to the launcher alone."""
        while not self._ready.done() and self._launcher is not None:
            await asyncio.wait([self._ready], timeout=LAUNCH_POLL_S)
            if not self._ready.done() and (causes := await asyncio.to_thread(self._launcher.causes)):
                await asyncio.wait([self._ready], timeout=LAUNCH_GRACE_S)
                if not self._ready.done():
                    self._ready.set_exception(EngineDeadError(f"ranks could not start: {'; '.join(causes)}"))
        return await self._ready

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine."""
        if self._info is None:
            raise EngineDeadError("the engine is not ready yet")
        return self._info

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges of the latest step message."""
        return self._stats

    @property
    def alive(self) -> bool:
        """False once the engine process has ended, or hung and was killed."""
        return self._alive

    @property
    def restarting(self) -> bool:
        """Never: what has ended does not come back under this client."""
        return False

    @property
    def prefill_tokens(self) -> int:
        """Tokens of requests that have no output yet."""
        return self._open.prefill_tokens

    def new_request_id(self) -> int:
        """A request id never given before by this client."""
        return next(self._ids)

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """See `EngineClient.submit`."""
        if not self._alive:
            raise EngineDeadError("the engine process has ended; this replica must be restarted")
        self._send(request_to_wire(request))  # first: what cannot be sent leaves nothing behind
        self._open.add(request, sink)

    def abort(self, request_ids: Iterable[int]) -> None:
        """See `EngineClient.abort`."""
        if (known := self._open.drop(request_ids)) and self._alive:
            self._send(["abort", known])

    def abort_answer(self, request_id: int, index: int) -> None:
        """See `EngineClient.abort_answer`."""
        if self._open.drop_answer(request_id, index) and self._alive:
            self._send(["abort_answer", request_id, index])

    async def reset_prefix_cache(self) -> bool:
        """See `EngineClient.reset_prefix_cache`. Raises EngineDeadError, or TimeoutError after 30 s."""
        return bool(await self._call("reset"))

    async def validate(self) -> str:
        """Let the engine check all its invariants: "" when they hold, else what is wrong."""
        return str(await self._call("validate"))

    async def wait_ended(self) -> str:
        """Return when the engine has ended: why."""
        return await asyncio.shield(self._ended)

    async def close(self) -> None:
        """End the engine process, and its other ranks, and wait for them. Idempotent; kills what does not end by
        itself.
        """
        self._closing = True
        if self._info is None:  # it reads nothing before it is ready, and has nothing to bring to an end
            self.process.kill()
        elif self._alive and self._transport is not None and not self._transport.is_closing():
            self._send(["close"])
        try:
            await asyncio.to_thread(self.process.wait, CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        if self._transport is not None:
            self._transport.close()
        self._end("the engine was closed")
        if self._losing is not None:
            self._losing.cancel()
        if self._burying is not None:
            await asyncio.shield(self._burying)

    def kill(self) -> None:
        """SIGKILL the engine process and its other ranks, for when no event loop can `close` any more."""
        self._closing = True
        self.process.kill()
        self.process.wait()
        if self._launcher is not None:
            self._launcher.kill()

    async def _bury(self, launcher: RankLauncher) -> None:
        """Kill the other ranks, which end by themselves unless they are stopped."""
        try:
            for cause in await asyncio.to_thread(launcher.causes):
                logger.error("%s", cause)
            await asyncio.to_thread(launcher.kill)
        except RuntimeError:  # at the interpreter's exit no thread can be started
            launcher.kill()

    async def _launch(self, launcher: RankLauncher, place: GroupPlace) -> None:
        try:
            await asyncio.to_thread(launcher.start, place)
        except (OSError, RuntimeError, ValueError) as error:
            if not self._ready.done():
                kind = type(error) if isinstance(error, ConfigError) else EngineDeadError
                self._ready.set_exception(kind(f"the engine's ranks could not be started: {error}"))

    async def _call(self, kind: str) -> Any:
        if not self._alive:
            raise EngineDeadError("the engine process has ended; this replica must be restarted")
        number = next(self._ids)
        self._calls[number] = future = self._loop.create_future()
        self._send([kind, number])
        try:
            return await asyncio.wait_for(future, CALL_TIMEOUT_S)
        finally:
            self._calls.pop(number, None)

    def _send(self, message: list[Any]) -> None:
        if self._transport is None:
            raise EngineDeadError("the connection to the engine is not open")
        self._transport.write(pack_frame(message))

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket pair is connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        """Bytes from the engine: every completed frame is handled at once."""
        try:
            for message in self._frames.feed(data):
                self._handle(message)
        except ValueError:
            logger.exception("the engine sent a frame that is not ours; giving it up")
            self.process.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine's end is gone: everything that waits is told, once it is known how."""
        if self._closing:  # how it ended is no news, and at the interpreter's exit the loop does not live that long
            self._end("the engine was closed")
        elif self._alive:
            self._losing = self._loop.create_task(self._lose())

    async def _lose(self) -> None:
        """The kernel closes the connection of a process that ends just before its exit status is there."""
        for _ in range(EXIT_LOOKS):
            if self.process.poll() is not None:
                break
            await asyncio.sleep(EXIT_POLL_S)
        self._die(f"the engine process {self.process.pid} {_how_it_ended(self.process.poll())}")

    def _handle(self, message: list[Any]) -> None:
        match message[0]:
            case "step":
                self._deliver(step_from_wire(message))
            case "reply":
                future = self._calls.get(message[1])
                if future is not None and not future.done():
                    future.set_result(message[2])
            case "ready":
                self._info = info_from_wire(message)  # now: a step may be behind it in the same read
                self._looking = self._loop.call_later(LOOK_S, self._look)
                if not self._ready.done():
                    self._ready.set_result(self._info)
            case "failed":
                if not self._ready.done():
                    self._ready.set_exception(ERRORS.get(message[1], EngineDeadError)(message[2]))
            case "forming" if self._launcher is not None and self._launching is None:
                place = GroupPlace.from_wire(message[1])
                self._launching = self._loop.create_task(self._launch(self._launcher, place))
            case "dead":
                self._die(str(message[1]))
            case kind:
                raise ValueError(f"unknown message kind {kind!r}")

    def _deliver(self, step: StepMessage) -> None:
        if step.writer_id != self.info.writer_id:
            return
        self._stats = step.stats
        self._watchdog.hear(step.stats.num_steps)
        self.num_finished += self._open.deliver(step.outputs)

    def _look(self) -> None:
        if why := self._watchdog.look(look_at(self.process.pid), has_requests=len(self._open) > 0):
            logger.error("%s; process %d is killed", why, self.process.pid)
            self.process.kill()
            self._end(why)
        elif self._alive:
            self._looking = self._loop.call_later(LOOK_S, self._look)

    def _die(self, why: str) -> None:
        """It has ended by itself, which is news unless its start failed, or it is to end."""
        if self._alive and not self._closing and self._info is not None:
            logger.error("%s", why)
        self._end(why)

    def _end(self, why: str) -> None:
        if not self._alive:
            return
        self._alive = False
        if self._looking is not None:
            self._looking.cancel()
        error = EngineDeadError(why)
        self._ended.set_result(why)
        if self._launcher is not None:
            self._burying = self._loop.create_task(self._bury(self._launcher))
        if not self._ready.done():
            self._ready.set_exception(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._open.lose(str(error))


def _how_it_ended(code: int | None) -> str:
    """code: as of Popen."""
    if code is None:
        return "has closed its connection"
    if code >= 0:
        return f"ended with exit code {code}"
    known = {number.value: f" ({number.name})" for number in signal.Signals}
    return f"ended by signal {-code}{known.get(-code, '')}"
