"""An engine with or without tiers below its device, as the benchmarks of offload run one, and what it cost.

Owns the processes (engine, node store), their folder, an event loop on which requests are sent and timed, and CPU time
by thread. Everything is the real thing: the engine behind its process border, the store behind its socket.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from benchmarks.common import BenchmarkError, Options, say
from benchmarks.model_costs import ModelCosts
from tournant.kvstore.config import PAGE_BYTES, StoreConfig
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.store_process import StoreProcess, start_store
from tournant.workers.config import EngineConfig
from tournant.workers.engine_client import ProcessEngineClient
from tournant.workers.messages import EngineRequest, EngineStats, RequestOutput
from tournant.workers.model_files import resolve_model
from tournant.workers.model_folder import ModelFiles
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.sampling_params import SamplingParams

BLOCK_TOKENS = 16
SETTLE_S, POLL_S = 60.0, 0.005
SEGMENT_BYTES = 16 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tiers:
    """Below the device. Sizes in bytes; nvme_bytes_per_s, host_bytes_per_s: emulated links, 0 = as fast as they are;
    offload: further fields of OffloadConfig.
    """

    host_bytes: int
    nvme_bytes: int = 0
    host_bytes_per_s: int = 0
    nvme_bytes_per_s: int = 0
    offload: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """tokens: the new ones; arrivals: when each came, seconds after the request; by_tier: prompt tokens found on
    the device, in RAM and on disk.
    """

    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    by_tier: tuple[int, int, int] = (0, 0, 0)

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.arrivals[0]

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens, 0 where an output brought several."""
        return [b - a for a, b in pairwise(self.arrivals)]


class TieredEngine:
    """An engine process with a device pool of `pool_tokens` tokens, and a store of its own if there are tiers.

    Closed by `close`, or as a context manager; nothing is left then. Raises what starting either raises.
    """

    def __init__(
        self, files: ModelFiles, pool_tokens: int, threads: int, tiers: Tiers | None = None, **config: Any
    ) -> None:
        self.files = files
        self.block_bytes = ModelCosts.of(files.folder).kv_token_bytes * BLOCK_TOKENS
        self._folder = tempfile.TemporaryDirectory(prefix="tournant-bench-")
        self._loop = asyncio.new_event_loop()
        self._store: StoreProcess | None = None
        self._client: ProcessEngineClient | None = None
        engine = EngineConfig(
            device="cpu",
            dtype="bfloat16",
            block_tokens=BLOCK_TOKENS,
            kv_cache_bytes=-(-pool_tokens // BLOCK_TOKENS) * self.block_bytes,
            num_threads=threads,
            **config,
        )
        try:
            offload = None if tiers is None else self._start_store(tiers)
            self._client = self._run(ProcessEngineClient.start(engine, files, offload=offload))
            if tiers is not None:
                self._run(self._until(self._is_attached, "attach to the store"))
        except BaseException:
            self.close()
            raise

    def _start_store(self, tiers: Tiers) -> OffloadConfig:
        folder = Path(self._folder.name)
        pages = -(-tiers.host_bytes // PAGE_BYTES)
        self._store = start_store(
            StoreConfig(host_bytes=pages * PAGE_BYTES, nvme_bytes=tiers.nvme_bytes, segment_bytes=SEGMENT_BYTES),
            folder / "socket",
            nvme_folder=folder / "nvme" if tiers.nvme_bytes else None,
            nvme=NvmeConfig(bytes_per_s=tiers.nvme_bytes_per_s, persist=False),
            drain_s=0.0,
        )
        return OffloadConfig(str(folder / "socket"), host_bytes_per_s=tiers.host_bytes_per_s, **tiers.offload)

    # ---- requests

    @property
    def client(self) -> ProcessEngineClient:
        """The engine. Raises BenchmarkError after `close`."""
        if self._client is None:
            raise BenchmarkError("the engine is closed")
        return self._client

    @property
    def stats(self) -> EngineStats:
        """Counters of the latest step message."""
        return self.client.stats

    def ask(self, prompts: Sequence[Sequence[int]], new: int) -> list[Answer]:
        """Answers of `new` greedy tokens each to prompts sent together. Raises BenchmarkError when one fails."""
        return self._run(self._ask(prompts, new))

    async def _ask(self, prompts: Sequence[Sequence[int]], new: int) -> list[Answer]:
        return list(await asyncio.gather(*(self._answer(prompt, new) for prompt in prompts)))

    async def _answer(self, prompt: Sequence[int], new: int) -> Answer:
        answer, done = Answer(), asyncio.get_running_loop().create_future()
        start = time.perf_counter()

        def take(output: RequestOutput) -> None:
            answer.arrivals += [time.perf_counter() - start] * len(output.token_ids)
            answer.tokens += output.token_ids
            answer.by_tier = output.cached_by_tier or answer.by_tier
            if output.finish_reason is not None and not done.done():
                done.set_result(output)

        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        self.client.submit(EngineRequest(self.client.new_request_id(), list(prompt), params), take)
        last = await done
        if last.error is not None or not answer.tokens:
            raise BenchmarkError(f"a prompt of {len(prompt)} tokens was not answered: {last.error}")
        return answer

    def settle(self) -> None:
        """Wait until everything on the device lies below as well. Raises BenchmarkError when it does not come there."""
        self._run(self._until(self._is_clean, "copy its blocks down"))

    def forget(self) -> None:
        """Drop what the device has of any prefix, once no copy holds it; lower tiers keep it.

        Raises BenchmarkError when it stays in use.
        """
        self._run(self._until(self.client.reset_prefix_cache, "forget its prefixes"))

    async def _until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        end = time.monotonic() + SETTLE_S
        while not await holds():
            if time.monotonic() > end:
                raise BenchmarkError(f"the engine did not {what} within {SETTLE_S:g} s: {self.stats.tiers}")
            await asyncio.sleep(POLL_S)

    async def _is_attached(self) -> bool:
        await self.client.reset_prefix_cache()  # every call is answered with the latest counters, too
        return self.stats.tiers.attached == 1

    async def _is_clean(self) -> bool:
        return self.stats.tiers.dirty_blocks == 0

    # ---- CPU seconds

    def engine_cpu(self) -> dict[bool, float]:
        """CPU seconds of the engine process so far, of its main thread (True) and of the others together (False)."""
        pid = self.client.process.pid
        found = {True: 0.0, False: 0.0}
        for thread, seconds in thread_cpu(pid).items():
            found[thread == pid] += seconds
        return found

    def store_cpu(self) -> float:
        """CPU seconds of the store process so far, 0 without one."""
        return 0.0 if self._store is None else sum(thread_cpu(self._store.process.pid).values())

    # ---- the end

    def close(self) -> None:
        """End both processes and remove their files. Idempotent."""
        if self._client is not None:
            self._run(self._client.close())
            self._client = None
        if self._store is not None:
            self._store.stop()
            self._store = None
        if not self._loop.is_closed():
            self._loop.close()
        self._folder.cleanup()

    def __enter__(self) -> TieredEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)


def thread_cpu(pid: int) -> dict[int, float]:
    """CPU seconds that each live thread of a process has used, by its id."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    return found


def model_of(options: Options) -> ModelFiles:
    """Files of the model that is measured."""
    return resolve_model(options.model, "bfloat16", progress=say)
