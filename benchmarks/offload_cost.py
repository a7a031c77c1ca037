"""What a store costs that gives nothing: CPU time of store and copies, of the engine's own thread, gaps between tokens.

Two engines, one with a store, decode the same prompts that nobody has seen before, in turn; the one without is measured
twice, which shows what the machine's noise alone does. One compute thread, so that every other thread of the engine
process is a reader or a copier.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.common import BenchmarkError, Cell, Options, Report, Samples, Table, at_most, percentile, say
from benchmarks.offload_engine import TieredEngine, Tiers, model_of
from tournant.workers.models.families import read_decoder_config

MAX_STORE_SHARE, MAX_THREAD = 0.02, 1.05
USERS, PROMPT, NEW = 8, 256, 64
QUICK_USERS, QUICK_PROMPT, QUICK_NEW = 2, 32, 8
OFF, ON, AGAIN = "off", "on", "off again"


@dataclass(frozen=True, slots=True)
class Spent:
    """One round: CPU seconds per token of the engine's own thread; of the whole engine, and of the store and the
    copies, in all; milliseconds between tokens at p99; bytes copied down.
    """

    own_s: float
    engine_s: float
    below_s: float
    p99_ms: float
    num_bytes: int


def idle_cost(options: Options, report: Report) -> None:
    """No prompt is ever seen twice, so nothing is found; everything is copied down all the same."""
    files = model_of(options)
    users, prompt, new = (QUICK_USERS, QUICK_PROMPT, QUICK_NEW) if options.quick else (USERS, PROMPT, NEW)
    vocab_size = read_decoder_config(files.folder).vocab_size
    pool = 4 * users * (prompt + new)
    rounds: dict[str, list[Spent]] = {OFF: [], ON: [], AGAIN: []}
    with ExitStack() as stack:
        off = stack.enter_context(TieredEngine(files, pool, 1, max_num_seqs=users))
        on = stack.enter_context(TieredEngine(files, pool, 1, Tiers(256 << 20), max_num_seqs=users))
        for number in range(options.rounds + 1):
            say(f"store unused, round {number} of {options.rounds}" if number else "store unused, warming up")
            rng = random.Random(number)
            prompts = [[rng.randrange(vocab_size) for _ in range(prompt)] for _ in range(users)]
            tokens = []
            for name, engine in ((OFF, off), (ON, on), (AGAIN, off)):
                engine.forget()
                spent, answers = _round(engine, prompts, new)
                tokens.append(answers)
                if number:
                    rounds[name].append(spent)
            if tokens[0] != tokens[1]:
                raise BenchmarkError("the engine with a store gave other tokens than the one without")
        if on.stats.prefix_hit_tokens or not on.stats.tiers.saved_blocks:
            raise BenchmarkError(f"something was found, or nothing copied down: {on.stats}")
    report.add(_table(rounds, users, prompt, new))


def _round(engine: TieredEngine, prompts: list[list[int]], new: int) -> tuple[Spent, list[list[int]]]:
    cpu, below, saved = engine.engine_cpu(), engine.store_cpu(), engine.stats.tiers.saved_bytes
    answers = engine.ask(prompts, new)
    if engine.stats.tiers.attached:
        engine.settle()
    after = engine.engine_cpu()
    own, others = (after[kind] - cpu[kind] for kind in (True, False))
    gaps = [gap * 1e3 for answer in answers for gap in answer.gaps]
    p99 = percentile(gaps, 99)
    spent = Spent(
        own / (len(prompts) * new),
        own + others,
        engine.store_cpu() - below + others,
        p99,
        engine.stats.tiers.saved_bytes - saved,
    )
    return spent, [answer.tokens for answer in answers]


def _table(rounds: dict[str, list[Spent]], users: int, prompt: int, new: int) -> Table:
    def of(name: str, field: str) -> Samples:
        return Samples(tuple(getattr(spent, field) for spent in rounds[name]))

    share = of(ON, "below_s").over(of(ON, "engine_s"))
    noise = of(AGAIN, "own_s").over(of(OFF, "own_s"))
    own = of(ON, "own_s").over(of(OFF, "own_s"))
    p99, p99_noise = (of(name, "p99_ms").over(of(OFF, "p99_ms")) for name in (ON, AGAIN))
    idle = of(OFF, "below_s").over(of(OFF, "engine_s"))
    rows: list[list[Cell]] = [
        ["CPU of store, link and copies / CPU of the engine", share, at_most(MAX_STORE_SHARE, share), idle],
        ["CPU per token of the engine's own thread, on / off", own, at_most(MAX_THREAD, own), noise],
        ["p99 between tokens, spilling / not", p99, "", p99_noise],
        ["p99 between tokens, spilling, ms", of(ON, "p99_ms"), "", of(OFF, "p99_ms")],
    ]
    copied = of(ON, "num_bytes").map(lambda value: value / 1e6)
    return Table(
        "a store that gives nothing",
        ("what", "value", "bar", "the same without a store"),
        rows,
        (
            f"{users} prompts of {prompt} random tokens at once, {new} new tokens each; {copied} MB copied down; same "
            " tokens with and without a store. One compute thread.",
            "Without a store: its threads that do not compute; the second measurement over the first.",
        ),
    )
