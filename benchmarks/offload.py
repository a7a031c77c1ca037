"""Tiers below the device: load or recompute, a pool that overflows, restoring a prefix, and what an unused store costs.

Sections: choice, overflow, restore, idle_cost; `--only NAME` (several times) runs some of them. `choice` is counted in
virtual time (offload_choice.py), the others run the real engine and node store. Emulated links give a laptop the ratios
of a GPU server.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial

from benchmarks.common import (
    BenchmarkError,
    Cell,
    Options,
    Report,
    Samples,
    Table,
    at_least,
    at_most,
    run_main,
    say,
)
from benchmarks.offload_choice import Machine, Outcome, replay
from benchmarks.offload_cost import idle_cost
from benchmarks.offload_engine import TieredEngine, Tiers, model_of
from benchmarks.offload_restore import restore
from benchmarks.offload_traces import BLOCK, ENDLESS, Workload, workloads
from benchmarks.traces import GeneratorConfig, generate
from tournant.workers.models.families import read_decoder_config

MAX_CHOICE, MIN_SHARE, MIN_SPEEDUP = 1.1, 0.85, 1.5
USERS = (1, 4)
LINKS = {  # bytes per second of RAM and of the disk
    "fast: an H200's, emulated": (500e6, 65e6),
    "near the break-even": (40e6, 40e6),
    "slow": (5e6, 2e6),
}
OVERFLOW_POOL = 4096  # tokens
SESSION_ROUNDS = 3
SESSION_TIERS = Tiers(1 << 30)
CHAT_TIERS = Tiers(1 << 30, nvme_bytes=6 << 30)
QUICK_TIERS = Tiers(64 << 20)


def run(options: Options, only: Sequence[str] = ()) -> Report:
    """The named sections, all without names."""
    report = Report("Offload")
    for name, section in SECTIONS.items():
        if not only or name in only:
            section(options, report)
    return report


# -------------------------------------------------------------------- choice


def choice(options: Options, report: Report) -> None:
    """Restoring always, never, and as the planner estimates, in virtual time."""
    trace = generate(1, GeneratorConfig(num_requests=60 if options.quick else 300))
    rows = [
        choice_row(name, users, {policy: replay(trace, Machine(*link), policy, users) for policy in POLICIES})
        for users in USERS
        for name, link in LINKS.items()
    ]
    middle = trace.block_tokens * sum(len(request.keys) for request in trace.requests) / len(trace.requests) / 2
    level = Machine(1, 1).break_even(middle, trace.block_tokens) / 1e6
    notes = (
        f"{len(trace.requests)} requests of the generated trace, 256 device blocks, 1,024 in RAM, the rest on disk; "
        "every user sends the next request with the answer to the last; virtual seconds until all are answered.",
        f"RAM and disk carry {', '.join(f'{a / 1e6:g} and {b / 1e6:g}' for a, b in LINKS.values())} MB/s, first come, "
        f"first served; a block of 360 KiB at the middle of a prompt is computed as fast as it is loaded at "
        f"{level:.0f} MB/s. The planner learns all rates within the run.",
        "Bound: the better of always and never.",
    )
    report.add(Table("load or recompute", CHOICE_COLUMNS, rows, notes))


POLICIES = ("always", "never", "auto")
CHOICE_COLUMNS = (
    "link, users",
    "always s",
    "never s",
    "auto s",
    "auto / better",
    "bar",
    "prompt tokens computed",
    "chose",
)


def choice_row(name: str, users: int, found: dict[str, Outcome]) -> list[Cell]:
    """One row of the table."""
    better = min(found["always"].total_s, found["never"].total_s)
    ratio = Samples((found["auto"].total_s / better,))
    tiers = found["auto"].stats.tiers
    computed = " / ".join(f"{found[policy].stats.prompt_tokens:,}" for policy in POLICIES)
    return [
        f"{name}, {users}",
        *(found[policy].total_s for policy in POLICIES),
        ratio,
        at_most(MAX_CHOICE, ratio),
        computed,
        f"load {tiers.chose_load}, recompute {tiers.chose_recompute}",
    ]


# -------------------------------------------------------------------- overflow


def overflow(options: Options, report: Report) -> None:
    """A device pool that is too small for its users, without and with a store."""
    rows: list[list[Cell]] = []
    notes: list[str] = []
    for workload in workloads(options.traces, quick=options.quick):
        sessions = workload.name != "mooncake conversation"
        tiers = QUICK_TIERS if options.quick else SESSION_TIERS if sessions else CHAT_TIERS
        rounds = min(options.rounds, SESSION_ROUNDS) if sessions and not options.quick else 1
        rows.append(_overflow_row(workload, tiers, rounds, timed=sessions, options=options))
        notes.append(f"{workload.name}: {workload.note}, {workload.num_tokens:,} prompt tokens, {rounds} rounds.")
    columns = (
        "trace",
        "computed off",
        "computed on",
        "off / on",
        "ceiling (1-h_device)/(1-h_all)",
        "share of the ceiling",
        "bar",
        "seconds off",
        "seconds on",
        "speed-up",
        "bar",
    )
    notes += [
        f"Prompt tokens computed, counted by the engine; device pool of {OVERFLOW_POOL:,} tokens, one request "
        "at a time in the order of the trace, 2 new tokens each; both ways gave the same tokens (deterministic: true).",
        "Ceiling: prefix hits of LRU with the blocks of the device, and without limit.",
    ]
    report.add(Table("device pool overflowing", columns, rows, notes))


def _overflow_row(workload: Workload, tiers: Tiers, rounds: int, *, timed: bool, options: Options) -> list[Cell]:
    pool = 512 if options.quick else OVERFLOW_POOL
    files = model_of(options)
    vocab_size = read_decoder_config(files.folder).vocab_size
    prompts = [prompt.tokens(vocab_size) for prompt in workload.prompts]
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    computed: dict[str, int] = {}
    answers: dict[str, list[list[int]]] = {}
    for number in range(rounds):
        for way, below in (("off", None), ("on", tiers)):
            say(f"{workload.name}, store {way}, round {number + 1} of {rounds}")
            with TieredEngine(files, pool, options.threads, below, deterministic=True) as engine:
                start = time.perf_counter()
                tokens = [engine.ask([prompt], 2)[0].tokens for prompt in prompts]
                seconds[way].append(time.perf_counter() - start)
                computed[way] = engine.stats.prompt_tokens
            if answers.setdefault(way, tokens) != tokens or answers["off"] != tokens:
                raise BenchmarkError(f"{workload.name}: with the store {way} other tokens came than without")
    ratio = Samples((computed["off"] / computed["on"],))
    h_device, h_all = workload.hit_ratio(pool // BLOCK), workload.hit_ratio(ENDLESS)
    ceiling = (1 - h_device) / (1 - h_all)
    share = ratio.map(lambda value: value / ceiling)
    off, on = Samples(tuple(seconds["off"])), Samples(tuple(seconds["on"]))
    speedup = off.over(on)
    return [
        workload.name,
        f"{computed['off']:,}",
        f"{computed['on']:,}",
        ratio,
        ceiling,
        share,
        at_least(MIN_SHARE, share),
        off,
        on,
        speedup,
        at_least(MIN_SPEEDUP, speedup) if timed else "",
    ]


SECTIONS = {"choice": choice, "overflow": overflow, "restore": restore, "idle_cost": idle_cost}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: the options of every benchmark, and which sections."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--only", action="append", choices=SECTIONS, default=[])
    found, rest = parser.parse_known_args(argv)
    run_main(partial(run, only=found.only), __doc__, rest)


if __name__ == "__main__":
    main()
