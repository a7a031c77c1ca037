"""One engine client for a replica's life, over engines on one set of weights after another.

Owns which engine there is, and that the old one is gone before the new one begins: their memory is never held together.
When requests may be given to it, and what becomes of those of the old engine, is the frontend's (admission_gate.py).

Invariants:
 1. `info`, `stats` and `files` are those of the engine that runs, during a swap those of the one before.
 2. A swap that fails starts the old weights again; only if that fails too is there no engine.
 3. Request ids are never given twice, whatever engine they are for.
 4. After `close` no engine runs, also when it is called during a swap.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable

from tournant.workers.engine_client import EngineClient, OutputSink
from tournant.workers.errors import ConfigError, EngineDeadError, ModelFormatError
from tournant.workers.messages import EngineInfo, EngineRequest, EngineStats
from tournant.workers.model_folder import ModelFiles

StartEngine = Callable[[ModelFiles], Awaitable[EngineClient]]
START_ERRORS = (ConfigError, ModelFormatError, EngineDeadError, OSError)


class SwapFailed(RuntimeError):  # noqa: N818 - names the fact
    """The new weights could not be loaded. serving: whether an engine on the old ones runs again."""

    def __init__(self, message: str, serving: bool) -> None:
        super().__init__(message, serving)
        self.message = message
        self.serving = serving

    def __str__(self) -> str:
        return self.message


class EngineSwap:
    """`EngineClient` whose weights can be changed. Make it with `await start(...)`."""

    def __init__(self, start_engine: StartEngine, files: ModelFiles, engine: EngineClient) -> None:
        self.files = files
        self._start_engine = start_engine
        self._engine = engine
        self._ids = itertools.count(1)
        self._lock = asyncio.Lock()  # held during a swap
        self._starting: asyncio.Task[EngineClient] | None = None
        self._closed = False

    @classmethod
    async def start(cls, start_engine: StartEngine, files: ModelFiles) -> EngineSwap:
        """Start the first engine. start_engine: starts one and returns when it is ready; its errors are raised."""
        return cls(start_engine, files, await start_engine(files))

    async def swap(self, files: ModelFiles) -> None:
        """End the engine and start another one on other weights.

        Raises SwapFailed when it cannot be started; the old weights are loaded again then. Raises EngineDeadError when
        it is closed meanwhile, RuntimeError when a swap is under way.
        """
        if self._lock.locked():
            raise RuntimeError("the engine is being swapped already")
        async with self._lock:
            await self._engine.close()
            try:
                await self._begin(files)
            except START_ERRORS as error:
                if self._closed:
                    raise
                try:
                    await self._begin(self.files)
                except START_ERRORS as again:
                    raise SwapFailed(
                        f"{error}; and the weights from before cannot be loaded again: {again}", serving=False
                    ) from error
                raise SwapFailed(str(error), serving=True) from error

    async def _begin(self, files: ModelFiles) -> None:
        if self._closed:
            raise EngineDeadError("the engine was closed")
        self._starting = asyncio.ensure_future(self._start_engine(files))
        try:
            self._engine = await self._starting
        except asyncio.CancelledError:
            if self._closed:
                raise EngineDeadError("the engine was closed") from None
            raise
        finally:
            self._starting = None
        self.files = files

    @property
    def engine(self) -> EngineClient:
        """The engine that runs, during a swap the one before."""
        return self._engine

    @property
    def swapping(self) -> bool:
        """Whether there is no engine now, because its weights are being changed."""
        return self._lock.locked() and not self._engine.alive

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine."""
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges of the engine's latest step."""
        return self._engine.stats

    @property
    def alive(self) -> bool:
        """False once there is no engine and none is being started."""
        return not self._closed and (self._lock.locked() or self._engine.alive)

    @property
    def restarting(self) -> bool:
        """See `EngineClient.restarting`."""
        return self._engine.restarting

    @property
    def prefill_tokens(self) -> int:
        """See `EngineClient.prefill_tokens`."""
        return self._engine.prefill_tokens

    def new_request_id(self) -> int:
        """A request id never given before by this client."""
        return next(self._ids)

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """See `EngineClient.submit`. Raises EngineDeadError also during a swap."""
        if self.swapping:
            raise EngineDeadError("the weights are being changed; try again")
        self._engine.submit(request, sink)

    def abort(self, request_ids: Iterable[int]) -> None:
        """See `EngineClient.abort`."""
        self._engine.abort(request_ids)

    def abort_answer(self, request_id: int, index: int) -> None:
        """See `EngineClient.abort_answer`."""
        self._engine.abort_answer(request_id, index)

    async def reset_prefix_cache(self) -> bool:
        """See `EngineClient.reset_prefix_cache`."""
        if self.swapping:
            raise EngineDeadError("the weights are being changed; try again")
        return await self._engine.reset_prefix_cache()

    async def close(self) -> None:
        """End the engine, or its start, and wait for it. Idempotent."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
        async with self._lock:
            await self._engine.close()
