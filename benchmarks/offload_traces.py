"""Public traces shrunk to what a small model can serve: one block of a trace stands for one block of the engine.

Owns how a trace becomes prompts and how many of their tokens a cache could have given. 512 tokens of the conversation
trace, and 1,024 of the coding sessions, become 16; what is left over of a prompt shrinks alike and is at least a token,
so that every whole block can be found again.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import say
from benchmarks.trace_replay import PolicyCache
from benchmarks.traces import CLAUDE_MAX_GAP_S, CLAUDE_START_S, LOADERS, GeneratorConfig, Trace, generate, load
from tournant.kvstore.policies import EVICTION

BLOCK = 16
CLAUDE_IDS = 16  # of 64 tokens each, in one block
SESSIONS = 6
CHATS = 600
ENDLESS = 1 << 30


@dataclass(frozen=True, slots=True)
class Prompt:
    """keys: its whole blocks; tail: tokens behind them."""

    keys: tuple[int, ...]
    tail: int

    @property
    def num_tokens(self) -> int:
        """Of the whole prompt."""
        return len(self.keys) * BLOCK + self.tail

    def tokens(self, vocab_size: int) -> list[int]:
        """The same keys give the same tokens, other keys other ones."""
        found: list[int] = []
        for key in self.keys:
            rng = random.Random(key)
            found += (rng.randrange(vocab_size) for _ in range(BLOCK))
        return found + [key % vocab_size for key in range(self.tail)]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts in the order in which they are sent; note: what was cut."""

    name: str
    prompts: tuple[Prompt, ...]
    note: str

    @property
    def num_tokens(self) -> int:
        """Of all prompts."""
        return sum(prompt.num_tokens for prompt in self.prompts)

    def hit_ratio(self, capacity_blocks: int) -> float:
        """Share of prompt tokens that LRU with so many blocks finds."""
        cache = PolicyCache(EVICTION["lru"](), capacity_blocks)
        hits = sum(cache.request(prompt.keys, now) for now, prompt in enumerate(self.prompts))
        return hits * BLOCK / self.num_tokens


def workloads(folder: Path, *, quick: bool) -> list[Workload]:
    """Sessions and chats of the public traces; without their files, or when quick, a generated one."""
    sessions, chats = (folder / LOADERS[name][0] for name in ("claude_code_first60", "mooncake_conversation"))
    if quick:
        small = GeneratorConfig(num_requests=12, system_blocks=2, first_blocks=4, turn_blocks=2, session_rate=0.1)
        return [_generated(small)]
    if not (sessions.is_file() and chats.is_file()):
        say(f"the public traces are not in {folder}: a generated one is used")
        return [_generated(GeneratorConfig(num_requests=CHATS))]
    return [_sessions(sessions), _chats(load("mooncake_conversation", folder))]


def _generated(config: GeneratorConfig) -> Workload:
    prompts = tuple(Prompt(request.keys, 1) for request in generate(1, config).requests)
    return Workload("generated", prompts, "a generated trace")


def _chats(trace: Trace) -> Workload:
    shrink = trace.block_tokens // BLOCK
    prompts = tuple(
        Prompt(request.keys, max(1, request.tokens % trace.block_tokens // shrink))
        for request in trace.requests[:CHATS]
    )
    return Workload("mooncake conversation", prompts, f"first {CHATS} requests, lengths / {shrink}")


def _sessions(path: Path) -> Workload:
    timed: list[tuple[float, Prompt]] = []
    names: dict[tuple[int, ...], int] = {}
    for number, rows in enumerate(_first_sessions(path)):
        time_s, before = float(CLAUDE_START_S * number), rows[0]["t"]
        for row in rows:
            time_s += min(row["t"] - before, CLAUDE_MAX_GAP_S)
            before = row["t"]
            ids = [first + index for first, count in row["runs"] for index in range(count)]
            groups = ((number, *ids[at : at + CLAUDE_IDS]) for at in range(0, len(ids) - CLAUDE_IDS + 1, CLAUDE_IDS))
            keys = tuple(names.setdefault(group, len(names)) for group in groups)
            timed.append((time_s, Prompt(keys, max(1, len(ids) % CLAUDE_IDS))))
    timed.sort(key=lambda each: each[0])
    note = f"first {SESSIONS} sessions, lengths / 64, in order of time"
    return Workload("claude code sessions", tuple(prompt for _, prompt in timed), note)


def _first_sessions(path: Path) -> Iterable[Sequence[dict[str, Any]]]:
    sessions: dict[str, list[dict[str, Any]]] = {}
    with gzip.open(path, "rt") as file:
        for row in map(json.loads, file):
            if row["s"] not in sessions and len(sessions) == SESSIONS:
                break
            sessions.setdefault(row["s"], []).append(row)
    return sessions.values()
