"""Time to the first token of a prompt whose prefix is computed, restored from RAM, or restored from disk.

Every round sends a prompt that nobody has seen (computed), the same again after the device has forgotten it (from RAM),
and one of some rounds ago, which the small host pool has pushed out by then (from disk). Where each came from is
checked before a time counts.
"""

from __future__ import annotations

import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.common import BenchmarkError, Bounds, Cell, Options, Report, Samples, Table, at_most, say
from benchmarks.model_costs import ModelCosts
from benchmarks.offload_engine import BLOCK_TOKENS, Answer, TieredEngine, Tiers, model_of
from tournant.workers.models.families import read_decoder_config

PREFIX, QUICK_PREFIX = 2048, 256
TAIL = 1  # token behind the prefix, which is computed in any case
MAX_OF_RECOMPUTE = {"from RAM": 1 / 50, "from disk": 1 / 10}
EMULATED = (500_000_000, 65_000_000)
DEPTH = 4  # reads of the raw disk at once
AGO = 3  # rounds: the host pool holds fewer prefixes than that
POOL_PREFIXES = 2.5


def restore(options: Options, report: Report) -> None:
    """Over links as fast as they are, and emulated."""
    for title, speeds in (("raw link", (0, 0)), ("emulated link", EMULATED)):
        say(f"restoring over the {title}")
        report.add(_table(title, speeds, options))


def _table(title: str, speeds: tuple[int, int], options: Options) -> Table:
    files = model_of(options)
    prefix = QUICK_PREFIX if options.quick else PREFIX
    costs, bounds = ModelCosts.of(files.folder), Bounds(options.quick)
    num_bytes = prefix * costs.kv_token_bytes
    block_bytes = BLOCK_TOKENS * costs.kv_token_bytes
    tiers = Tiers(
        int(POOL_PREFIXES * num_bytes),
        nvme_bytes=max(64 << 20, 32 * num_bytes),
        host_bytes_per_s=speeds[0],
        nvme_bytes_per_s=speeds[1],
        offload={"restore": "always", "restore_ms": 60_000, "lookup_ms": 1000, "prefetch_share": 1.0},
    )
    seconds: dict[str, list[float]] = {name: [] for name in ("recompute", *MAX_OF_RECOMPUTE)}
    least: dict[str, list[float]] = {name: [] for name in seconds}
    rng, vocab_size = random.Random(20), read_decoder_config(files.folder).vocab_size
    prompts: list[list[int]] = []
    with (
        TieredEngine(files, 2 * prefix, options.threads, tiers, deterministic=True) as engine,
        raw_reads(num_bytes, block_bytes) as disk_s,
    ):
        answers: dict[int, list[int]] = {}
        for number in range(AGO + 1 + options.rounds):
            prompts.append([rng.randrange(vocab_size) for _ in range(prefix + TAIL)])
            old = number - AGO
            places = {"recompute": number, "from RAM": number} | ({"from disk": old} if old >= 0 else {})
            took = {}
            for name, place in places.items():
                answer = _ask(engine, prompts[place], name, prefix)
                if answers.setdefault(place, answer.tokens) != answer.tokens:
                    raise BenchmarkError(f"{name} the answer is {answer.tokens}, computed it was {answers[place]}")
                took[name] = answer.first_s
            if old < 1:
                continue  # the first restore from disk does not count
            copy_s = num_bytes / (speeds[0] or bounds.copy())
            least["recompute"].append(costs.prefill_s(1, prefix + TAIL, bounds.read(), bounds.matmul()))
            least["from RAM"].append(copy_s)
            least["from disk"].append(copy_s + (num_bytes / speeds[1] if speeds[1] else disk_s()))
            for name, value in took.items():
                seconds[name].append(value)
    return _as_table(title, prefix, num_bytes, seconds, least, raw=not speeds[0])


def _ask(engine: TieredEngine, prompt: list[int], name: str, prefix: int) -> Answer:
    """One request whose prefix is to come from `name`. Raises BenchmarkError when it came from elsewhere."""
    engine.forget()
    answer = engine.ask([prompt], 1)[0]
    wanted = tuple(prefix * (name == tier) for tier in ("from the device", *MAX_OF_RECOMPUTE))
    if answer.by_tier != wanted:
        raise BenchmarkError(f"{name}: of device, RAM and disk {wanted} tokens were wanted, {answer.by_tier} came")
    engine.settle()
    return answer


def _as_table(
    title: str,
    prefix: int,
    num_bytes: int,
    seconds: dict[str, list[float]],
    least: dict[str, list[float]],
    *,
    raw: bool,
) -> Table:
    found = {name: Samples(tuple(values)) for name, values in seconds.items()}
    rows: list[list[Cell]] = []
    for name, values in found.items():
        ratio = values.over(found["recompute"])
        bound = Samples(tuple(least[name]))
        judged = raw and name in MAX_OF_RECOMPUTE
        rows.append(
            [
                name,
                values.map(lambda value: value * 1e3),
                "" if name == "recompute" else ratio,
                at_most(MAX_OF_RECOMPUTE[name], ratio) if judged else "",
                bound.map(lambda value: value * 1e3),
                bound.over(values),
            ]
        )
    columns = ("prefix", "first token ms", "this / recompute", "bar", "bound ms", "share of the bound")
    how = "as fast as they are" if raw else f"emulated: RAM {EMULATED[0] / 1e6:g}, disk {EMULATED[1] / 1e6:g} MB/s"
    return Table(
        f"time to first token of a {prefix:,}-token prefix, {title}",
        columns,
        rows,
        (
            f"{num_bytes / 1e6:.0f} MB of KV, and {TAIL} token that is computed each time; links {how}. One request "
            "at a time, blocks are checked on the way; every restored answer equals the computed one.",
            "Bound: matrix products of the prompt; bytes over one large copy; and over direct reads of blocks by "
            f"{DEPTH} threads before that; all measured in the same rounds.",
        ),
    )


@contextmanager
def raw_reads(num_bytes: int, block_bytes: int) -> Iterator[Callable[[], float]]:
    """What reads so many bytes from a file with direct I/O, a block at a time, and returns the seconds."""
    size = -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    count = -(-num_bytes // size)
    with tempfile.TemporaryDirectory(prefix="tournant-bench-") as folder:
        path = Path(folder) / "raw"
        path.write_bytes(np.random.default_rng(5).bytes(count * size))
        targets = [mmap.mmap(-1, size) for _ in range(DEPTH)]
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)

        def read(worker: int) -> None:
            for place in range(worker, count, DEPTH):
                if os.preadv(file, [targets[worker]], place * size) != size:
                    raise BenchmarkError(f"{path} is shorter than it was written")

        def measure() -> float:
            start = time.perf_counter()
            list(workers.map(read, range(DEPTH)))
            return time.perf_counter() - start

        try:
            os.fsync(file)
            with ThreadPoolExecutor(DEPTH) as workers:
                yield measure
        finally:
            os.close(file)
