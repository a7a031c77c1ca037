"""Engines of several rank processes, as tests start them through their client."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.workers.parallel_harness import NUM_NEW, without_near_ties
from tests.workers.test_engine_process import Answer
from tournant.workers.config import EngineConfig
from tournant.workers.engine_client import EngineClient
from tournant.workers.rank_launch import GroupPlace, LocalRanks

HOST = socket.gethostname()
LENGTHS = (5, 33, 100)
ENDS_S = 10.0  # most time for a process to end by itself


def config_of(tensor: int, pipeline: int, **fields: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 64 * 16 * 2048, "num_threads": 1}
    return EngineConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **defaults | fields)


class Ranks(LocalRanks):
    """Local ranks that a test may keep from being killed, or send elsewhere. changes: of the place they are given."""

    def __init__(self, kills: bool = True, **changes: Any) -> None:
        super().__init__()
        self.kills = kills
        self.changes = changes

    def start(self, place: GroupPlace) -> None:
        super().start(replace(place, **self.changes))

    def kill(self) -> None:
        if self.kills:
            super().kill()

    def pid(self, rank: int) -> int:
        return self.processes[rank - 1].process.pid


def listening(pids: list[int]) -> set[str]:
    """Addresses, in the kernel's hexadecimal form, on which processes wait for connections."""
    nodes = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            try:
                nodes.add(os.readlink(path))
            except FileNotFoundError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in nodes:
                found.add(columns[1].partition(":")[0])
    return found


async def check_answers(client: EngineClient, folder: Path) -> None:
    """Equal to those of one process, token by token, cold and from the cache."""
    chosen = without_near_ties(folder, LENGTHS)
    for cached in (0, 96):
        answers = [Answer(client, prompt, max_tokens=NUM_NEW) for prompt in chosen.prompts]
        for answer, want in zip(answers, chosen.answers, strict=True):
            await answer.done.wait()
            assert answer.tokens == want
            assert [len(output.token_ids) for output in answer.outputs] == [1] * NUM_NEW
        assert answers[-1].outputs[0].cached_tokens == cached
