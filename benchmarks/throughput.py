"""Tokens per second beside transformers, vLLM's CPU build and llama.cpp: same prompts, same lengths, one run.

Every contestant is a process of its own that has its model loaded and is stopped while another one works. Tokens are
compared before anything is timed. Rates are of whole jobs (prompts included) as a caller sees them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

from transformers import AutoTokenizer

from benchmarks.common import (
    BenchmarkError,
    Bounds,
    Cell,
    Options,
    Report,
    Samples,
    Table,
    at_least,
    interleave,
    run_main,
    say,
)
from benchmarks.contestant import Contestant
from benchmarks.model_costs import ModelCosts
from tournant.workers.model_files import default_model_path, resolve_model
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.families import read_decoder_config

OURS, TRANSFORMERS, VLLM, LLAMA = "tournant", "transformers", "vllm", "llama.cpp"
FLAGS = {VLLM: "--vllm-python", LLAMA: "--llama-python"}
READ, MATMUL = "read", "matmul"
TEXTS = (  # patterns: what follows is far from a tie, so that rounding alone seldom turns it
    "One, two, three, four, five, six, seven, eight, nine, ten. One, two, three, four, five, six, seven,",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday, Wednesday, Thursday,",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z a b c d e f g h i j k l m",
    "The cat sat on the mat. The dog sat on the mat. The cat sat on the mat. The dog sat on",
    "Paris is the capital of France. Rome is the capital of Italy. Madrid is the capital of Spain. Paris is the",
)
MIN_AGREED = 2  # leading tokens in bfloat16: rounding turns a near tie now and then, a wrong computation every token
MAX_MODEL_LEN = 4096
SEED = 20


@dataclass(frozen=True, slots=True)
class Job:
    """`batch` prompts of `prompt` random tokens, `new` greedy tokens of each; bars: ratio wanted over a peer."""

    title: str
    batch: int
    prompt: int
    new: int
    bars: Mapping[str, float]

    @property
    def counted(self) -> int:
        """Tokens the rate counts: new ones, or those of the prompt when only the first new token is asked for."""
        return self.batch * (self.prompt if self.new == 1 else self.new)


JOBS = (
    Job("decode, batch 1", 1, 32, 128, {VLLM: 1.5, LLAMA: 1.0}),
    Job("decode, batch 32", 32, 32, 128, {VLLM: 2.5}),
    Job("prefill of 2,048 tokens", 1, 2048, 1, {VLLM: 1.2}),
)
QUICK_JOBS = (
    Job("decode, batch 1", 1, 8, 8, {}),
    Job("decode, batch 32", 4, 8, 8, {}),
    Job("prefill of 2,048 tokens", 1, 64, 1, {}),
)


def run(options: Options) -> Report:
    """Start the contestants, compare their tokens, measure every job."""
    report = Report("Throughput")
    files = resolve_model(options.model, "bfloat16", progress=say)
    with ExitStack() as stack:
        contestants = {}
        for name, start in _starters(options, files).items():
            say(f"starting {name}")
            contestants[name] = start()
            stack.callback(contestants[name].close)
        shares = {
            name: contestant.idle_cpu_share(0.2 if options.quick else 2.0) for name, contestant in contestants.items()
        }
        report.add(check_tokens(contestants, shares, files, options))
        vocab_size = read_decoder_config(files.folder).vocab_size
        costs, bounds = ModelCosts.of(files.folder), Bounds(options.quick)
        for job in QUICK_JOBS if options.quick else JOBS:
            say(f"measuring {job.title}")
            report.add(_measure(job, contestants, costs, bounds, vocab_size, options.rounds))
    return report


def _starters(options: Options, files: ModelFiles) -> dict[str, Callable[[], Contestant]]:
    """How to start each contestant that is there to be started."""
    arguments: dict[str, Any] = {
        "folder": str(files.folder),
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "threads": options.threads,
    }
    starters: dict[str, Callable[[], Contestant]] = {
        OURS: partial(Contestant, OURS, sys.executable, "run_tournant.py", arguments),
        TRANSFORMERS: partial(Contestant, TRANSFORMERS, sys.executable, "run_transformers.py", arguments),
    }
    if options.vllm_python is not None:
        starters[VLLM] = partial(Contestant, VLLM, options.vllm_python, "run_vllm.py", arguments)
    if options.llama_python is not None:
        gguf = options.model if options.model is not None else str(default_model_path())
        if not gguf.endswith(".gguf"):
            raise BenchmarkError(f"llama.cpp needs a .gguf file, not {gguf}: leave out --llama-python or --model")
        arguments = arguments | {"gguf": gguf}
        starters[LLAMA] = partial(Contestant, LLAMA, options.llama_python, "run_llama_cpp.py", arguments)
    return starters


def check_tokens(
    contestants: Mapping[str, Contestant], idle: Mapping[str, float], files: ModelFiles, options: Options
) -> Table:
    """Greedy tokens on real text: equal to transformers' in float32, and at the start in every other form.

    Raises BenchmarkError when they are not; nothing is timed then.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(files.folder), local_files_only=True)
    encoded = [tokenizer(text)["input_ids"] for text in TEXTS]
    prompts = [ids[-min(map(len, encoded)) :] for ids in encoded]  # one length: one batch for everyone
    new = 8 if options.quick else 32
    exact = {name: contestants[name].generate(prompts, new, dtype="float32")[0] for name in (OURS, TRANSFORMERS)}
    if exact[OURS] != exact[TRANSFORMERS]:
        raise BenchmarkError(f"in float32 {OURS} answers {exact[OURS]}, but {TRANSFORMERS} {exact[TRANSFORMERS]}")
    wanted = contestants[TRANSFORMERS].generate(prompts, new)[0]
    rows = []
    for name, contestant in contestants.items():
        found = contestant.generate(prompts, new)[0]
        agreed = mean(_common_head(a, b) for a, b in zip(found, wanted, strict=True))
        if agreed < MIN_AGREED:
            raise BenchmarkError(f"{name} answers {found}, but {TRANSFORMERS} in bfloat16 {wanted}")
        rows.append((name, contestant.facts, f"{agreed:g} of {new}", f"{idle[name]:.0%}"))
    return Table(
        "contestants and correctness",
        ("contestant", "what", "leading tokens equal to transformers bfloat16", "CPU of one core while idle"),
        rows,
        (
            f"In float32 all {len(prompts)} x {new} greedy tokens of Tournant equal transformers'.",
            f"Leading tokens are the mean over the prompts, which must be at least {MIN_AGREED}.",
            "Idle contestants are stopped while another one works.",
            *(f"Not measured: {name} (no {flag})." for name, flag in FLAGS.items() if name not in contestants),
        ),
    )


def _common_head(a: list[int], b: list[int]) -> int:
    """Leading tokens that two answers share."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _measure(
    job: Job, contestants: Mapping[str, Contestant], costs: ModelCosts, bounds: Bounds, vocab_size: int, rounds: int
) -> Table:
    """One job on everyone that can do it, and the bounds, in rounds."""

    def contender(contestant: Contestant) -> Callable[[], float]:
        rng = random.Random(SEED)  # the same prompts for everyone, other ones in every round

        def seconds() -> float:
            prompts = [[rng.randrange(vocab_size) for _ in range(job.prompt)] for _ in range(job.batch)]
            return contestant.generate(prompts, job.new)[1]

        return seconds

    able = {name: each for name, each in contestants.items() if name != LLAMA or (job.batch == 1 and job.new > 1)}
    found = interleave(
        {name: contender(each) for name, each in able.items()} | {READ: bounds.read, MATMUL: bounds.matmul}, rounds
    )
    read, matmul = found[READ], found[MATMUL]
    least = Samples(
        tuple(
            costs.generate_s(job.batch, job.prompt, job.new, *each)
            for each in zip(read.values, matmul.values, strict=True)
        )
    )
    rows: list[list[Cell]] = []
    for name in able:
        seconds = found[name]
        ratio = seconds.over(found[OURS])
        rows.append(
            [
                name,
                seconds.map(lambda value: job.counted / value),
                "" if name == OURS else ratio,
                at_least(job.bars[name], ratio) if name in job.bars else "",
                "" if name == LLAMA else least.over(seconds),
            ]
        )
    rows.append(["bound (bfloat16)", least.map(lambda value: job.counted / value), "", "", ""])
    return Table(
        job.title,
        ("contestant", "tokens/s", "Tournant / this", "bar", "share of the bound"),
        rows,
        (
            f"{job.batch} x {job.prompt} prompt tokens, {job.new} new tokens each, greedy, end of text ignored.",
            f"Bound from RAM read {read.map(lambda value: value / 1e9)} GB/s and bfloat16 matrix product "
            f"{matmul.map(lambda value: value / 1e12)} TFLOP/s of the same rounds.",
        ),
    )


if __name__ == "__main__":
    run_main(run, __doc__)
