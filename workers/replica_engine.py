"""An engine that comes back: one client for a replica's life, over engines of several ranks that may die.

Owns when an engine is started anew, and what frontends see meanwhile. What it starts, and how its processes end, is
engine_client.py's and rank_launch.py's.

What it says of itself:
- `alive` until it has given up or was closed: false means what it means for every client, that nothing comes back.
  `restarting` while there is no engine; then `submit` and `reset_prefix_cache` raise EngineDeadError at once, because
  a queue here would hide that the replica is full, and could hold requests for minutes.
- `info` of the latest engine, also while there is none: limits and namespace of the next one are the same, since
  configuration and files are, unless its GPU has less memory to spare. Only the writer id tells engines apart.
- `stats` of the latest engine; while there is none nothing runs and nothing is held, so its gauges are zero and only
  its counters stay, for whoever has not read them yet. Counters of the next engine begin at 0, with fewer steps than
  before: that is how those who add them up know it.

Guarantees:
 1. A request's sink hears of one engine only; requests of a dead one end with "error" before another is started.
 2. An engine is started only when all processes of the one before are gone.
 3. After MAX_DEATHS deaths without a finished answer between, failed starts included, it gives up.
 4. No engine answers from files that are not what they were when they were resolved: when it is to be started anew on
    such, it gives up at once.
 5. `close` ends whatever there is, also a start that is under way; no process is left.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tournant.workers.config import EngineConfig
from tournant.workers.engine_client import START_TIMEOUT_S, EngineClient, OutputSink, ProcessEngineClient
from tournant.workers.errors import ConfigError, EngineDeadError, ModelFormatError
from tournant.workers.messages import EngineInfo, EngineRequest, EngineStats
from tournant.workers.model_folder import ModelFiles, check_unchanged
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.rank_launch import LocalRanks, RankLauncher

MAX_DEATHS = 3
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # before a new start; doubled with every death
Engine = TypeVar("Engine", bound=EngineClient)
logger = logging.getLogger("tournant.replica_engine")


async def start_unchanged(files: ModelFiles, cache_dir: Path | None, start: Callable[[], Awaitable[Engine]]) -> Engine:
    """What `start` starts on `files`, if these are the same before and after it has read them. cache_dir: as of
    `resolve_model`. Raises ModelFormatError when they are not, OSError, and what start raises; no engine is left then.
    """
    await asyncio.to_thread(check_unchanged, files, cache_dir)
    engine = await start()
    try:
        await asyncio.to_thread(check_unchanged, files, cache_dir)
    except BaseException:
        await engine.close()
        raise
    return engine


class ReplicaEngine:
    """`EngineClient` over one engine after another. Make it with `await start(...)`."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        timeout_s: float = START_TIMEOUT_S,
        offload: OffloadConfig | None = None,
        make_launcher: Callable[[], RankLauncher] = LocalRanks,
        first_wait_s: float = FIRST_WAIT_S,
        cache_dir: Path | None = None,
    ) -> None:
        self._config = config
        self._files = files
        self._timeout_s = timeout_s
        self._offload = offload
        self._make_launcher = make_launcher
        self._first_wait_s = first_wait_s
        self._cache_dir = cache_dir
        self._client: ProcessEngineClient | None = None
        self._info: EngineInfo | None = None
        self._stats = EngineStats()  # of the latest engine that has ended
        self._ids = itertools.count(1)
        self._deaths = 0  # since an answer was finished
        self._why = ""
        self._alive = True
        self._keeping: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        files: ModelFiles,
        timeout_s: float = START_TIMEOUT_S,
        offload: OffloadConfig | None = None,
        make_launcher: Callable[[], RankLauncher] = LocalRanks,
        first_wait_s: float = FIRST_WAIT_S,
        cache_dir: Path | None = None,
    ) -> ReplicaEngine:
        """Start the first engine and wait until it is ready. make_launcher: of the ranks of each engine; first_wait_s:
        from a first death to the next start; cache_dir: as of `start_unchanged`; the rest as of
        `ProcessEngineClient.start`. Raises what both raise.
        """
        engine = cls(config, files, timeout_s, offload, make_launcher, first_wait_s, cache_dir)
        await engine._start()
        engine._keeping = asyncio.get_running_loop().create_task(engine._keep())
        return engine

    @property
    def info(self) -> EngineInfo:
        """Facts about the latest engine."""
        if self._info is None:
            raise EngineDeadError("the engine is not ready yet")
        return self._info

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges of the latest engine; gauges are zero while there is none."""
        latest = self._stats if self._client is None else self._client.stats
        if self._client is not None and self._client.alive:
            return latest
        tiers = replace(latest.tiers, attached=0, dirty_blocks=0, pressure=0.0)
        overflow = replace(latest.overflow, used_blocks=0, total_blocks=0)
        names = ("num_running", "num_waiting", "kv_used", "kv_total", "kv_cached", "num_restoring", "queued_tokens")
        gauges: dict[str, Any] = dict.fromkeys(names, 0)
        return replace(latest, tiers=tiers, overflow=overflow, **gauges)

    @property
    def alive(self) -> bool:
        """False once it has given up or was closed; true during a restart."""
        return self._alive

    @property
    def restarting(self) -> bool:
        """Whether there is no engine now, but may be one soon."""
        return self._alive and not self._serves

    @property
    def prefill_tokens(self) -> int:
        """Tokens of requests that have no output yet."""
        return 0 if self._client is None else self._client.prefill_tokens

    @property
    def _serves(self) -> bool:
        return self._client is not None and self._client.alive

    def new_request_id(self) -> int:
        """A request id never given before by this client, whatever engine it is for."""
        return next(self._ids)

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """See `EngineClient.submit`."""
        self._present().submit(request, sink)

    def abort(self, request_ids: Iterable[int]) -> None:
        """See `EngineClient.abort`."""
        if self._client is not None:
            self._client.abort(request_ids)

    def abort_answer(self, request_id: int, index: int) -> None:
        """See `EngineClient.abort_answer`."""
        if self._client is not None:
            self._client.abort_answer(request_id, index)

    async def reset_prefix_cache(self) -> bool:
        """See `EngineClient.reset_prefix_cache`. Raises EngineDeadError, or TimeoutError after 30 s."""
        return await self._present().reset_prefix_cache()

    @property
    def last_end(self) -> str:
        """Why the engine before the present one ended, or could not be started; "" while there was none."""
        return self._why

    async def wait_ready(self) -> None:
        """Return once there is an engine. Raises EngineDeadError when there will be none."""
        while not self._serves:
            if not self._alive:
                raise EngineDeadError(self._why)
            self._ready.clear()
            await self._ready.wait()

    async def close(self) -> None:
        """End the engine, or its start, and wait for it. Idempotent."""
        if self._alive:
            self._end("the engine was closed")
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def kill(self) -> None:
        """SIGKILL all processes there are, for when no event loop can `close` any more."""
        self._alive = False
        if self._client is not None:
            self._client.kill()

    def _present(self) -> ProcessEngineClient:
        if self._client is not None and self._client.alive:
            return self._client
        if not self._alive:
            raise EngineDeadError(f"{self._why}; this replica must be restarted")
        raise EngineDeadError("the engine is being started anew; try again")

    async def _start(self) -> None:
        self._client = await start_unchanged(self._files, self._cache_dir, self._start_one)
        self._info = self._client.info
        self._ready.set()

    async def _start_one(self) -> ProcessEngineClient:
        launcher = self._make_launcher()
        return await ProcessEngineClient.start(self._config, self._files, self._timeout_s, self._offload, launcher)

    async def _keep(self) -> None:
        try:
            while self._alive:
                await self._keep_one()
        except Exception as error:
            logger.exception("the engine is not started anew any more")
            self._end(f"it could not be kept: {type(error).__name__}: {error}")

    async def _keep_one(self) -> None:
        """Wait for the present engine's end, then try once to start another, or give up."""
        if self._client is not None:
            why = await self._client.wait_ended()
            self._stats = self._client.stats
            self._died(why, self._client.num_finished)
            await self._client.close()
            self._client = None
        if self._deaths >= MAX_DEATHS:
            self._end(f"the engine died {self._deaths} times without an answer between; the last time: {self._why}")
            return
        await asyncio.sleep(min(self._first_wait_s * 2 ** (self._deaths - 1), LONGEST_WAIT_S))
        try:
            await self._start()
            logger.info("the engine is back as writer %016x", self.info.writer_id)
        except ModelFormatError as error:  # it was loaded before: these are other files
            logger.error("the engine is not started anew: %s", error)
            self._end(f"the engine is not started anew: {error}")
        except (ConfigError, EngineDeadError, OSError, RuntimeError) as error:
            logger.error("the engine could not be started anew: %s", error)
            self._died(f"it could not be started: {error}", 0)

    def _died(self, why: str, num_finished: int) -> None:
        self._deaths = 1 if num_finished else self._deaths + 1
        self._why = why

    def _end(self, why: str) -> None:
        self._alive = False
        self._why = why
        self._ready.set()
