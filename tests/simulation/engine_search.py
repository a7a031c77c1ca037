"""Looks for schedules of the simulated engine that break an invariant, and makes them small.

Run it for longer searches: `python -m tests.simulation.engine_search FIRST_SEED COUNT [TURNS] [--long]`, see --help.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

from tests.simulation.engine_world import TURNS, Setup, run
from tests.simulation.searching import on_all_cores, smallest, violation_of
from tests.simulation.world import Violation

MIN_TURNS = 5
SIMPLER = (
    ("ranks", 1), ("depth", 1), ("rope_switch", 0), ("persistent", False), ("nvme_blocks", 0), ("host_blocks", 64),
           ("credit", 16), ("prefetch_requests", 0), ("max_num_batched_tokens", 256), ("max_num_seqs", 8),
           ("max_num_seqs", 1), ("has_tiers", False))  # fmt: skip


@dataclass
class Found:
    """What a run of many schedules has seen. failures: (setup, violation), each made small."""

    schedules: int = 0
    steps: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[Setup, Violation]] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Join what another run has seen."""
        self.schedules += other.schedules
        self.steps += other.steps
        self.counts.update(other.counts)
        self.failures += other.failures


def fails(setup: Setup) -> Violation | None:
    """The violation that this schedule runs into."""
    return violation_of(run, setup)


def minimised(setup: Setup, violation: Violation) -> tuple[Setup, Violation]:
    """The same seed with fewer faults, fewer turns and simpler numbers that still breaks the same invariant."""
    return smallest(setup, violation, _simpler, fails)


def _simpler(setup: Setup) -> list[Setup]:
    candidates = [replace(setup, turns=max(MIN_TURNS, setup.turns * part // 10)) for part in (3, 6, 9)]
    candidates += [replace(setup, faults=setup.faults - {fault}) for fault in sorted(setup.faults)]
    candidates += [replace(setup, **{name: value}) for name, value in SIMPLER]  # type: ignore[arg-type]
    return [one for one in candidates if one.max_num_seqs == setup.max_num_seqs or setup.max_num_seqs == 3]


def search(setups: Iterable[Setup], *, most_failures: int = 3) -> Found:
    """Run schedules until they are done or enough have failed."""
    found = Found()
    for setup in setups:
        found.schedules += 1
        try:
            world = run(setup)
        except Violation as violation:
            found.failures.append(minimised(setup, violation))
            if len(found.failures) >= most_failures:
                break
            continue
        found.steps += world.runner.num_steps
        found.counts.update(world.counts)
    return found


def search_on_all_cores(batch: Callable[[int], Found], first: int, count: int, size: int) -> Found:
    """batch: searches `size` seeds from a given one. Raises AssertionError with how to run broken schedules again."""
    total = Found()
    for found in on_all_cores(batch, range(first, first + count, size)):
        total.add(found)
    if total.failures:
        raise AssertionError("\n".join(f"{violation}\n  {replay_line(setup)}" for setup, violation in total.failures))
    return total


def replay_line(setup: Setup) -> str:
    """How to run this schedule again."""
    values = asdict(setup) | {"faults": sorted(setup.faults)}
    return "run(Setup(" + ", ".join(f"{name}={value!r}" for name, value in values.items()) + "))"


def main(first: int, count: int, turns: int = TURNS, *, long: bool = False) -> None:
    """Search and print what was found."""
    start = time.process_time()
    draw = Setup.draw_long if long else Setup.draw
    found = search(draw(seed, turns=turns) for seed in range(first, first + count))
    seconds = time.process_time() - start
    print(f"{found.schedules} schedules, {found.steps} steps, {seconds:.1f} s of CPU", end="; ")
    print(f"{found.schedules / seconds:.0f} schedules/s")
    print(dict(sorted(found.counts.items())))
    for setup, violation in found.failures:
        print(violation, replay_line(setup), sep="\n  ")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What `main` takes, from the command line. Exits with 2 when it is wrong."""
    parser = argparse.ArgumentParser("tests.simulation.engine_search", description="Search for schedules that fail.")
    parser.add_argument("first", type=int, help="first seed")
    parser.add_argument("count", type=int, help="how many seeds")
    parser.add_argument("turns", type=int, nargs="?", default=TURNS, help="turns of a schedule (%(default)s)")
    parser.add_argument("--long", action="store_true", help="sequences may be larger than the device")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(**vars(arguments()))
