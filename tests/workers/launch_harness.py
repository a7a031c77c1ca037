"""Engines of several rank processes, as tests start them through their client."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.workers.parallel_harness import NUM_NEW, without_near_ties
from tests.workers.test_engine_process import Answer
from tournant.workers.config import EngineConfig
from tournant.workers.engine_client import EngineClient
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.decoder_config import DecoderConfig, LayerKind
from tournant.workers.models.described import DescribedModel
from tournant.workers.models.rope import Rope
from tournant.workers.rank_launch import GroupPlace, LocalRanks

HOST = socket.gethostname()
LENGTHS = (5, 33, 100)
ENDS_S = 10.0  # most time for a process to end by itself


def config_of(tensor: int, pipeline: int, **fields: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 64 * 16 * 2048, "num_threads": 1}
    return EngineConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **defaults | fields)


def described() -> list[Any]:
    """A model that is nowhere, in the form in which processes hear of it."""
    rope = Rope(torch.tensor([1.0, 0.25]), 1.5, torch.tensor([0.5, 0.125]), 64)
    layers = (LayerKind(), LayerKind(window=32, rope=None))
    sizes = {"hidden_size": 8, "num_heads": 6, "num_kv_heads": 2, "head_size": 4, "intermediate_size": 16}
    decoder = DecoderConfig(
        num_layers=2, vocab_size=256, max_positions=128, max_model_len=100, rms_eps=1e-5, tied_embeddings=True,
        eos_token_ids=(2, 3), ropes=(rope,), layers=layers, attention_scale=0.5, **sizes,
    )  # fmt: skip
    return DescribedModel(ModelFiles(Path("/m"), "m", b"w" * 32), decoder).to_wire()


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
