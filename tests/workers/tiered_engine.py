"""Real engines on M with a real node store below, and the answers that they must give."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.workers.harness import Session, files_of
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.store_process import StoreProcess, start_store
from tournant.workers.config import EngineConfig
from tournant.workers.engine import Engine
from tournant.workers.engine_process import build_engine
from tournant.workers.models.families import describe
from tournant.workers.offload_config import Faults, OffloadConfig

BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * 2 * 2 * 2 * 64 * 4  # of M: layers, K and V, KV heads, head size, fp32
SMALL, TIER_BLOCKS, NVME_BYTES = 64, 128, 64 << 20
TURN_S = 2.0


class Store:
    """A node store process with CASES.md's TIERS. folder: holds socket and NVMe folder, and outlives the process."""

    def __init__(self, folder: Path, host_blocks: int = TIER_BLOCKS, *, nvme: bool = True, **config: Any) -> None:
        self._folder = folder
        self._nvme = nvme
        self._config = {"host_bytes": host_blocks * BLOCK_BYTES} | config
        if nvme:
            self._config = {"nvme_bytes": NVME_BYTES, "segment_bytes": 4 << 20} | self._config
        self.socket = folder / "store" / "socket"
        self.process = self.start()

    def start(self) -> StoreProcess:
        """Run it, again if it has ended."""
        nvme_folder = self._folder / "nvme" if self._nvme else None
        self.process = start_store(
            StoreConfig(**self._config), self.socket, nvme_folder=nvme_folder, nvme=NvmeConfig() if self._nvme else None
        )
        return self.process


@contextmanager
def node_store(folder: Path, host_blocks: int = TIER_BLOCKS, **config: Any) -> Iterator[Store]:
    """A store that ends with the test."""
    store = Store(folder, host_blocks, **config)
    try:
        yield store
    finally:
        store.process.kill()


class TieredSession(Session):
    """Drives an engine whose link wakes it, as the engine's process does."""

    def __init__(self, engine: Engine, woken: threading.Event) -> None:
        super().__init__(engine)
        self._woken = woken

    def turn(self) -> None:
        """Wait until a step can do something, then step."""
        wait_s = self.engine.wait_s()
        if wait_s != 0:
            self._woken.wait(TURN_S if wait_s is None else min(wait_s, TURN_S))
        self._woken.clear()
        self.step()

    def drain(self) -> None:
        """Run until every answer is there."""
        while self.engine.has_work:
            self.turn()

    def settle(self) -> None:
        """Run until nothing is on its way down or left to go."""
        while self.engine.has_work or not self.tiers.is_settled:
            self.turn()
        while self.engine.stats().kv_used:
            self.turn()

    def attach(self) -> None:
        """Wait until the store serves."""
        while not self.engine.stats().tiers.attached:
            self.turn()

    def forget_device(self) -> None:
        """Everything is below, and nothing on the device."""
        self.settle()
        assert self.engine.reset_prefix_cache()

    def ask_window(self, prompts: list[list[int]], window: int = 32, **params: Any) -> list[list[int]]:
        """Answers of all prompts, at most `window` requests at a time."""
        ids: list[int] = []
        for prompt in prompts:
            while len(self.engine._sequences) >= window:
                self.turn()
            ids.append(self.submit(prompt, **params))
        self.drain()
        return [self.tokens(number) for number in ids]

    @property
    def tiers(self) -> Any:
        """The engine's planner."""
        return self.engine._tiers

    def close(self) -> None:
        """End the link."""
        self.engine.close()


def tiered(
    folder: Path,
    socket: Path,
    num_blocks: int = SMALL,
    *,
    faults: Faults | None = None,
    engine: dict[str, Any] | None = None,
    **offload: Any,
) -> TieredSession:
    """An engine on M, fp32 and deterministic, over a store. What is found is loaded unless `offload` says otherwise."""
    fields = {"dtype": "float32", "deterministic": True, "device": "cpu", "num_threads": 1, "max_num_seqs": 32}
    fields |= {"kv_cache_bytes": num_blocks * BLOCK_BYTES} | (engine or {})
    config = OffloadConfig(str(socket), **({"restore": "always", "faults": faults or Faults()} | offload))
    woken = threading.Event()
    writer_id = int.from_bytes(os.urandom(8), "little")
    own = EngineConfig(**fields)  # type: ignore[arg-type]
    model = describe(files_of(folder), own)
    made, _ = build_engine(own, model, writer_id, offload=config, wake=woken.set)
    return TieredSession(made, woken)


def random_prompts(count: int, seed: int, longest: int = 400) -> list[list[int]]:
    """Prompts of all lengths up to `longest`."""
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(20, longest))] for _ in range(count)]
