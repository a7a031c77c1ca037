"""Time to first token and between tokens over HTTP at several concurrencies, and what control costs per decode step.

The server is the real one: our HTTP app in uvicorn, the engine in its own process, both on this machine, as is the
client. The control path is measured without a model: scheduler, block manager and input preparation around a forward
pass that does nothing.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from benchmarks.common import (
    BenchmarkError,
    Bounds,
    Cell,
    Options,
    Report,
    Samples,
    Table,
    at_most,
    percentile,
    run_main,
    say,
)
from benchmarks.http_load import Arrivals, ServerProcess, load
from benchmarks.model_costs import ModelCosts
from tournant.kernels.layout import KVLayout
from tournant.kvstore.block import Namespace
from tournant.workers.batch import Batch, StepResult
from tournant.workers.config import EngineConfig
from tournant.workers.device import CpuDevice
from tournant.workers.engine import Engine
from tournant.workers.forward_input import InputBuilder
from tournant.workers.messages import EngineInfo, EngineRequest
from tournant.workers.model_files import resolve_model
from tournant.workers.models.families import read_decoder_config
from tournant.workers.sampling_params import SamplingParams

MAX_CONTROL_MS = 1.0
SMOLLM2_LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, block_tokens=16, head_size=64, dtype=torch.bfloat16)
SMOLLM2_HEADS, SMOLLM2_VOCAB = 9, 49152
CONTROL_PROMPT = 128


@dataclass(frozen=True, slots=True)
class Traffic:
    """(users, requests) pairs; prompts take their lengths in tokens in turn; new tokens of each request."""

    users: Sequence[tuple[int, int]]
    prompts: Sequence[int]
    new: int


TRAFFIC = Traffic(((1, 8), (8, 32), (32, 64)), (32, 128, 512, 1024), 64)
QUICK_TRAFFIC = Traffic(((1, 2), (8, 8), (32, 32)), (8, 24, 40), 4)


def run(options: Options) -> Report:
    """Measure the control path, then the server."""
    report = Report("Latency")
    report.add(_control_path(options))
    report.add(_server(options))
    return report


# -------------------------------------------------------------------- HTTP


@dataclass(slots=True)
class Percentiles:
    """Per round: milliseconds at p50 and p99, by name, and new tokens per second."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def book(self, answers: Sequence[Arrivals], new: int, seconds: float) -> None:
        """Add a round of answers with `new` tokens each; tokens that came in one event have nothing between them.

        Raises BenchmarkError when a stream brought no event.
        """
        if any(not answer.events for answer in answers):
            raise BenchmarkError("a stream ended without an event")
        first = [answer.events[0] - answer.sent for answer in answers]
        gaps = [gap for answer in answers for gap in _gaps(answer.events, new)]
        for name, found in (("first token", first), ("between tokens", gaps)):
            for percent in (50, 99):
                self.values.setdefault(f"{name} p{percent}", []).append(percentile(found, percent) * 1e3)
        self.values.setdefault("tokens/s", []).append(len(answers) * new / seconds)

    def samples(self, name: str) -> Samples:
        """One value per round."""
        return Samples(tuple(self.values[name]))


def _gaps(events: Sequence[float], tokens: int) -> list[float]:
    """Seconds between the tokens of a stream: 0 where an event brought several, or where the text of one waited."""
    found = [b - a for a, b in pairwise(events)]
    return found + [0.0] * (tokens - 1 - len(found))


def _server(options: Options) -> Table:
    files = resolve_model(options.model, "bfloat16", progress=say)
    costs, bounds = ModelCosts.of(files.folder), Bounds(options.quick)
    vocab_size = read_decoder_config(files.folder).vocab_size
    traffic = QUICK_TRAFFIC if options.quick else TRAFFIC
    config = {
        "model": str(files.folder),
        "engine": {"device": "cpu", "dtype": "bfloat16"},
        "advanced": {"num_threads": options.threads},
    }
    found = {users: Percentiles() for users, _ in traffic.users}
    read: list[float] = []
    rng = random.Random(20)

    def bodies(count: int) -> list[tuple[str, bytes]]:
        lengths = [traffic.prompts[place % len(traffic.prompts)] for place in range(count)]
        prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]  # never a cached prefix
        fields = {"model": "m", "max_tokens": traffic.new, "temperature": 0, "ignore_eos": True, "stream": True}
        return [("/v1/completions", json.dumps(fields | {"prompt": prompt}).encode()) for prompt in prompts]

    say("starting a server")
    with closing(ServerProcess("serve_ours.py", {"config": config})) as server:
        for round_number in range(options.rounds + 1):
            say(f"round {round_number} of {options.rounds}" if round_number else "warming up")
            for users, count in traffic.users:
                jobs = bodies(count)
                start = time.perf_counter()
                answers = load(server.port, users, jobs)
                if round_number:
                    found[users].book(answers, traffic.new, time.perf_counter() - start)
            if round_number:
                read.append(bounds.read())
        facts = server.facts
    context = statistics.mean(traffic.prompts) + traffic.new / 2
    rows: list[list[Cell]] = []
    for users, _ in traffic.users:
        least = Samples(tuple(costs.decode_s(users, context, value, float("inf")) * 1e3 for value in read))
        rows.append([str(users), *(found[users].samples(name) for name in found[users].values), least])
    return Table(
        "HTTP streams, milliseconds",
        (
            "concurrency",
            "first token p50",
            "first token p99",
            "between tokens p50",
            "between tokens p99",
            "tokens/s",
            "least between tokens",
        ),
        rows,
        (
            f"Prompts of {', '.join(map(str, traffic.prompts))} random tokens in turn, {traffic.new} new tokens each, "
            f"{', '.join(str(count) for _, count in traffic.users)} requests per round; server: {facts}.",
            f"Least: weights and KV read once per step at {Samples(tuple(read)).map(lambda value: value / 1e9)} GB/s.",
        ),
    )


# -------------------------------------------------------------------- control path


class ControlPath:
    """`num_seqs` decoding sequences in SmolLM2's shapes, and a runner that prepares the input and makes tokens up."""

    num_in_flight = 1

    def __init__(self, num_seqs: int, max_tokens: int) -> None:
        tokens = CONTROL_PROMPT + max_tokens
        blocks_each = -(-tokens // SMOLLM2_LAYOUT.block_tokens)
        info = EngineInfo(
            writer_id=1,
            pid=0,
            max_model_len=tokens,
            pool_tokens=num_seqs * blocks_each * SMOLLM2_LAYOUT.block_tokens,
            block_tokens=SMOLLM2_LAYOUT.block_tokens,
            max_num_seqs=num_seqs,
            max_queued_requests=0,
            vocab_size=SMOLLM2_VOCAB,
            eos_token_ids=(),
            dtype="bfloat16",
            device="cpu",
            namespace=Namespace(b"w" * 32, "bf16", "null", b"l" * 32),
        )
        self._rng = random.Random(20)
        self._inputs = InputBuilder(
            SMOLLM2_LAYOUT, SMOLLM2_HEADS, num_seqs, blocks_each, CpuDevice(), deterministic=False
        )
        self._engine = Engine(EngineConfig(max_num_seqs=num_seqs), self, info)
        self._num_tokens = 0
        self._times = (0.0, 0.0, 0.0)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for number in range(num_seqs):
            prompt = [self._rng.randrange(SMOLLM2_VOCAB) for _ in range(CONTROL_PROMPT)]
            self._engine.add_request(EngineRequest(number, prompt, params))
        while self._num_tokens != num_seqs:  # until every sequence decodes
            self._engine.step()

    def run(self, batch: Batch) -> StepResult:
        """The runner's part of a step; notes when it began, when the input was ready, and when it gave the result."""
        began = time.perf_counter()
        self._inputs.build(batch)
        built = time.perf_counter()
        result = StepResult([self._rng.randrange(SMOLLM2_VOCAB) for _ in batch.sampling])
        self._num_tokens = batch.num_tokens
        self._times = (began, built, time.perf_counter())
        return result

    def step(self) -> tuple[float, float, float]:
        """Seconds of schedule, build and postprocess of one step. Raises BenchmarkError when nothing is left to do."""
        if not self._engine.has_work:
            raise BenchmarkError("the control path ran out of tokens to decode")
        start = time.perf_counter()
        self._engine.step()
        end = time.perf_counter()
        began, built, given = self._times
        return began - start, built - began, end - given


def _control_path(options: Options) -> Table:
    num_seqs, steps = 16, 32 if options.quick else 400
    parts: dict[str, list[float]] = {name: [] for name in ("schedule", "build input", "postprocess", "sum")}
    path = ControlPath(num_seqs, steps * (options.rounds + 1) + 64)
    for round_number in range(options.rounds + 1):
        times = [path.step() for _ in range(steps)]
        if round_number:
            for place, name in enumerate(("schedule", "build input", "postprocess")):
                parts[name].append(statistics.median(time[place] for time in times) * 1e3)
            parts["sum"].append(statistics.median(map(sum, times)) * 1e3)
    found = {name: Samples(tuple(values)) for name, values in parts.items()}
    return Table(
        "control path per decode step, milliseconds",
        ("part", "median step", "bar"),
        [(name, value, at_most(MAX_CONTROL_MS, value) if name == "sum" else "") for name, value in found.items()],
        (f"{num_seqs} decoding sequences, prefix caching on, {options.rounds} x {steps} steps with an empty forward.",),
    )


if __name__ == "__main__":
    run_main(run, __doc__)
