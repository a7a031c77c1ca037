"""Routing over three real engines: the same prompts with shared prefixes, sent by three kinds of routers in turn.

The model is random and small, but its prompts take far longer than its tokens; an engine's pool has room for some of
the prefixes, so that what a router knows decides how much is computed. Tokens computed are counted beside the times:
they are the cause, and do not depend on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import BenchmarkError, Cell, Options, Report, Samples, Table, run_main, say
from benchmarks.model_costs import ModelCosts
from benchmarks.routing import Route, kv_aware, power_of_two, round_robin
from tests.helpers.tiny_model import build_tiny_model
from tournant.cluster.router_index import DirectoryCopy
from tournant.cluster.router_scoring import Candidate, Routed
from tournant.kvstore.block import key_chain
from tournant.workers.config import EngineConfig
from tournant.workers.engine_client import ProcessEngineClient
from tournant.workers.messages import EngineRequest, RequestOutput
from tournant.workers.model_files import resolve_model
from tournant.workers.models.families import read_decoder_config
from tournant.workers.sampling_params import SamplingParams

ROUND_S = 600.0  # most for the prompts of one round
SMALL = {"num_layers": 4, "hidden": 384, "num_heads": 6, "num_kv_heads": 2, "intermediate": 1024}  # of a model


@dataclass(frozen=True, slots=True)
class Load:
    """Shared prefixes, each asked for `asked` times with an own end, by so many users at once; held: prefixes that the
    pool of one engine has room for, beside what runs.
    """

    engines: int = 3
    prefixes: int = 12
    prefix_tokens: int = 1024
    own_tokens: int = 32
    new_tokens: int = 4
    asked: int = 4
    users: int = 3
    held: int = 5

    @property
    def least(self) -> int:
        """Prompt tokens that are computed where each prefix is once, by whichever engine."""
        return self.prefixes * (self.prefix_tokens + self.asked * self.own_tokens)


QUICK = Load(engines=2, prefixes=3, prefix_tokens=64, new_tokens=2, asked=2, users=2)


@dataclass(frozen=True, slots=True)
class Served:
    """Of one round. first_s: seconds to the first token, p50; rate: requests per second; computed: prompt tokens."""

    first_s: float
    rate: float
    computed: int


@contextlib.contextmanager
def _folder(options: Options) -> Iterator[Path]:
    """The model of --model, or a random one."""
    if options.model:
        yield resolve_model(options.model, "bfloat16", progress=say).folder
        return
    with tempfile.TemporaryDirectory() as folder:
        yield build_tiny_model(Path(folder), **SMALL)


class Engines:
    """Engine processes of one model on an event loop, without a directory and tiers: the router knows what it sent."""

    def __init__(self, folder: Path, size: Load) -> None:
        self.size = size
        self._vocab = read_decoder_config(folder).vocab_size
        prompt = size.prefix_tokens + size.own_tokens + size.new_tokens
        tokens = size.prefix_tokens * size.held + (prompt + 64) * 2
        config = EngineConfig(
            device="cpu",
            dtype="bfloat16",
            kv_cache_bytes=tokens * ModelCosts.of(folder).kv_token_bytes,
            num_threads=1,
        )
        self._loop = asyncio.new_event_loop()
        self._clients: list[ProcessEngineClient] = []
        self._waiting = [0] * size.engines  # prompt tokens of requests without a first token
        self._running = [0] * size.engines
        files = resolve_model(str(folder), "bfloat16")
        try:
            for _ in range(size.engines):
                self._clients.append(self._loop.run_until_complete(ProcessEngineClient.start(config, files)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the engines."""
        for client in self._clients:
            self._loop.run_until_complete(client.close())
        self._loop.close()

    def prompts(self, seed: int) -> list[list[int]]:
        """In the order in which they are asked."""
        rng, size = random.Random(seed), self.size
        heads = [[rng.randrange(self._vocab) for _ in range(size.prefix_tokens)] for _ in range(size.prefixes)]
        found = [head + [rng.randrange(self._vocab) for _ in range(size.own_tokens)] for head in heads * size.asked]
        rng.shuffle(found)
        return found

    def serve(self, route: Route, prompts: Sequence[list[int]]) -> Served:
        """All prompts; the engines remember nothing of what was before."""
        return self._loop.run_until_complete(asyncio.wait_for(self._serve(route, prompts), ROUND_S))

    async def _serve(self, route: Route, prompts: Sequence[list[int]]) -> Served:
        for client in self._clients:
            while not await client.reset_prefix_cache():  # the last answers' blocks are given back a step later
                await asyncio.sleep(0.01)
        left, waits, computed = iter(prompts), list[float](), 0

        async def user() -> None:
            nonlocal computed
            for prompt in left:
                wait_s, tokens = await self._ask(route, prompt)
                waits.append(wait_s)
                computed += tokens

        start = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(self.size.users)))
        return Served(statistics.median(waits), len(prompts) / (time.perf_counter() - start), computed)

    async def _ask(self, route: Route, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and how many of the prompt were computed."""
        info = self._clients[0].info
        digest = info.namespace.digest()
        keys = key_chain(digest, prompt, info.block_tokens)
        blocks = info.pool_tokens // info.block_tokens
        candidates = [
            Candidate(f"engine-{number}", None, waiting, running, blocks)
            for number, (waiting, running) in enumerate(zip(self._waiting, self._running, strict=True))
        ]
        number = route(time.monotonic(), Routed(keys, len(prompt), info.block_tokens), candidates)
        client, ended = self._clients[number], self._loop.create_future()
        first: list[tuple[float, int]] = []

        def sink(output: RequestOutput) -> None:
            if not first:
                first.append((time.perf_counter() - start, len(prompt) - (output.cached_tokens or 0)))
                self._waiting[number] -= len(prompt)
            if output.finish_reason is not None:
                ended.set_result(output.finish_reason)

        self._waiting[number] += len(prompt)
        self._running[number] += 1
        params = SamplingParams(temperature=0.0, max_tokens=self.size.new_tokens, ignore_eos=True)
        start = time.perf_counter()
        client.submit(EngineRequest(client.new_request_id(), prompt, params, keys, digest), sink)
        reason = await ended
        self._running[number] -= 1
        if reason != "length":
            raise BenchmarkError(f"an answer ended with {reason!r}")
        return first[0]


CONTESTANTS: Mapping[str, Callable[[], Route]] = {
    "KV-aware": lambda: kv_aware(DirectoryCopy(0), 1),
    "power of two": power_of_two,
    "round robin": round_robin,
}


def served(options: Options) -> Table:
    """The same prompts, routed in three ways, in turn."""
    size = QUICK if options.quick else Load()
    found: dict[str, list[Served]] = {name: [] for name in CONTESTANTS}
    say(f"starting {size.engines} engines")
    with _folder(options) as folder, closing(Engines(folder, size)) as engines:
        for turn in range(options.rounds + 1):
            prompts = engines.prompts(turn)
            for name, make in CONTESTANTS.items():
                one = engines.serve(make(), prompts)
                if turn:
                    found[name].append(one)
    firsts, rates, work = (
        {name: Samples(tuple(map(take, rounds))) for name, rounds in found.items()}
        for take in (lambda one: one.first_s * 1e3, lambda one: one.rate, lambda one: float(one.computed))
    )
    other = "power of two"
    rows: list[list[Cell]] = [
        [
            name,
            firsts[name],
            firsts[name].over(firsts[other]),
            rates[name],
            rates[name].over(rates[other]),
            work[name],
            work[name].map(lambda tokens: tokens / size.least),
        ]
        for name in CONTESTANTS
    ]
    total = size.prefixes * size.asked * (size.prefix_tokens + size.own_tokens)
    return Table(
        "routing, real engines with shared prefixes",
        (
            *("router", "first token p50 ms", "/ power of two", "requests/s", "/ power of two's"),
            *("prompt tokens computed", "/ the least"),
        ),
        rows,
        [
            f"{size.engines} engines of one thread; {size.prefixes} prefixes of {size.prefix_tokens:,} tokens, each "
            f"asked for {size.asked} times, with {size.own_tokens} tokens of its own, by {size.users} users at once; "
            f"{size.new_tokens} new tokens; {total:,} prompt tokens, of which at least {size.least:,} are computed. An "
            f"engine has room for {size.held} prefixes."
        ],
    )


def run(options: Options) -> Report:
    """The table."""
    report = Report("Routing, real engines")
    report.add(served(options))
    return report


if __name__ == "__main__":
    run_main(run, __doc__)
