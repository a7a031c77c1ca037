"""Request traces as chains of blocks: loaders of the public ones, and a generator for machines without them.

Owns how a file becomes requests (README of the traces): only full blocks count, an id names its whole prefix. Knows
nothing of caches.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOONCAKE_BLOCK_TOKENS = 512
CLAUDE_BLOCK_TOKENS, CLAUDE_IDS_PER_BLOCK = 256, 4
CLAUDE_SESSIONS, CLAUDE_START_S, CLAUDE_MAX_GAP_S = 60, 30, 600


@dataclass(frozen=True, slots=True)
class Request:
    """keys: the full blocks of the prompt, head first; tokens: what counts in the divisor of a hit ratio."""

    time_us: int
    keys: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of time."""

    name: str
    block_tokens: int
    requests: tuple[Request, ...]

    def halves(self) -> tuple[Trace, Trace]:
        """First and second half by count; each is replayed with an empty cache and an untaught predictor."""
        middle = len(self.requests) // 2
        return (
            Trace(f"{self.name}, first half", self.block_tokens, self.requests[:middle]),
            Trace(f"{self.name}, second half", self.block_tokens, self.requests[middle:]),
        )


def load(name: str, folder: Path) -> Trace:
    """A trace by its name in `LOADERS`. Raises FileNotFoundError, which says what to do, without the files."""
    file, read = LOADERS[name]
    path = folder / file
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; name the folder of the public request traces with --traces, or use the trace "
            "'generated', which needs no files"
        )
    return read(name, path)


def load_anchors(folder: Path) -> dict[str, dict[int, dict[str, float]]]:
    """Published hit ratios: trace -> capacity in blocks -> policy -> share of prompt tokens."""
    anchors: dict[str, dict[int, dict[str, float]]] = {}
    with (folder / "anchors_hit_ratio.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            at = anchors.setdefault(row["trace"], {}).setdefault(int(row["capacity_blocks"]), {})
            at[row["policy"]] = float(row["hit_ratio"])
    return anchors


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        for line in file:
            yield json.loads(line)


def _mooncake(name: str, path: Path) -> Trace:
    requests = []
    for row in _rows(path):
        full = row["input_length"] // MOONCAKE_BLOCK_TOKENS
        requests.append(Request(row["timestamp"] * 1000, tuple(row["hash_ids"][:full]), row["input_length"]))
    return Trace(name, MOONCAKE_BLOCK_TOKENS, tuple(requests))


def _claude_code(name: str, path: Path) -> Trace:
    """The first sessions, one starting every 30 s, with long gaps cut; ids become unlike between sessions."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    for row in _rows(path):
        if row["s"] not in sessions and len(sessions) == CLAUDE_SESSIONS:
            break
        sessions.setdefault(row["s"], []).append(row)
    requests = []
    names: dict[tuple[int, ...], int] = {}
    for number, rows in enumerate(sessions.values()):
        time_s, before = float(CLAUDE_START_S * number), rows[0]["t"]
        for row in rows:
            time_s += min(row["t"] - before, CLAUDE_MAX_GAP_S)
            before = row["t"]
            ids = [first + i for first, count in row["runs"] for i in range(count)]
            groups = (
                (number, *ids[i : i + CLAUDE_IDS_PER_BLOCK])
                for i in range(0, len(ids) - CLAUDE_IDS_PER_BLOCK + 1, CLAUDE_IDS_PER_BLOCK)
            )
            keys = tuple(names.setdefault(group, len(names)) for group in groups)
            requests.append(Request(round(time_s * 1e6), keys, len(keys) * CLAUDE_BLOCK_TOKENS))
    requests.sort(key=lambda request: request.time_us)
    return Trace(name, CLAUDE_BLOCK_TOKENS, tuple(requests))


LOADERS: Mapping[str, tuple[str, Callable[[str, Path], Trace]]] = {
    "mooncake_conversation": ("mooncake_conversation.jsonl.gz", _mooncake),
    "mooncake_synthetic": ("mooncake_synthetic.jsonl.gz", _mooncake),
    "claude_code_first60": ("claude_code_sessions.jsonl.gz", _claude_code),
}


@dataclass(frozen=True, slots=True)
class GeneratorConfig:
    """A mix of short and long conversations. Rates per second, times in seconds, lengths in blocks.

    continue_share: chance of a next turn of the sessions that chat at all; oneshot_share: sessions of one turn only.
    """

    num_requests: int = 2000
    block_tokens: int = 16
    session_rate: float = 1.0
    num_system_prompts: int = 4
    system_blocks: int = 8
    oneshot_share: float = 0.5
    continue_share: float = 0.8
    first_blocks: int = 24
    turn_blocks: int = 6
    think_s: float = 30.0


def generate(seed: int, config: GeneratorConfig | None = None) -> Trace:
    """Sessions that arrive as a Poisson process, share system prompts, think (log-normal) and grow turn by turn.

    The same seed gives the same trace. One-shot sessions are twice as long as the first turn of a conversation, so that
    there is something to predict.
    """
    config = config or GeneratorConfig()
    rng = random.Random(seed)
    systems = [
        tuple(range(i * config.system_blocks, (i + 1) * config.system_blocks)) for i in range(config.num_system_prompts)
    ]
    next_key = config.num_system_prompts * config.system_blocks
    requests: list[Request] = []
    arrival_s = 0.0
    while len(requests) < 2 * config.num_requests:  # the last sessions are cut off below, so that none is half there
        arrival_s += rng.expovariate(config.session_rate)
        oneshot = rng.random() < config.oneshot_share
        keys = systems[rng.randrange(len(systems))]
        time_s, mean = arrival_s, config.first_blocks * (2 if oneshot else 1)
        while True:
            grown = max(1, round(rng.gammavariate(2.0, mean / 2)))
            keys += tuple(range(next_key, next_key + grown))
            next_key += grown
            tokens = len(keys) * config.block_tokens + rng.randrange(config.block_tokens)
            requests.append(Request(round(time_s * 1e6), keys, tokens))
            if oneshot or rng.random() >= config.continue_share:
                break
            time_s += rng.lognormvariate(0.0, 0.7) * config.think_s
            mean = config.turn_blocks
    requests.sort(key=lambda request: request.time_us)
    return Trace("generated", config.block_tokens, tuple(requests[: config.num_requests]))
