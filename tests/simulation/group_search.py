"""Looks for schedules of groups of ranks that break an invariant, and makes them small.

Run it for longer searches: `python -m tests.simulation.group_search FIRST_SEED COUNT [EVENTS]`, see --help.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

from tests.simulation.group_world import EVENTS, Setup, run
from tests.simulation.searching import smallest, violation_of
from tests.simulation.world import Violation

MIN_EVENTS = 10
SIMPLER = (("groups", 1), ("nodes", 1), ("ranks", 2), ("shared_heads", False), ("nvme", False), ("credit", 3))


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
    """The same seed with fewer faults, fewer events and a simpler shape that still breaks the same invariant."""
    return smallest(setup, violation, _simpler, fails)


def _simpler(setup: Setup) -> list[Setup]:
    candidates = [replace(setup, events=max(MIN_EVENTS, setup.events * part // 10)) for part in (3, 6, 9)]
    candidates += [replace(setup, faults=setup.faults - {fault}) for fault in sorted(setup.faults)]
    candidates += [replace(setup, **{name: value}) for name, value in SIMPLER]  # type: ignore[arg-type]
    return [one for one in candidates if one.nodes <= one.ranks]


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
        found.steps += world.steps
        found.counts.update(world.counts)
    return found


def replay_line(setup: Setup) -> str:
    """How to run this schedule again."""
    values = asdict(setup) | {"faults": sorted(setup.faults)}
    return "run(Setup(" + ", ".join(f"{name}={value!r}" for name, value in values.items()) + "))"


def main(first: int, count: int, events: int = EVENTS) -> None:
    """Search and print what was found."""
    start = time.process_time()
    found = search(Setup.draw(seed, events=events) for seed in range(first, first + count))
    seconds = time.process_time() - start
    print(f"{found.schedules} schedules, {found.steps} events, {seconds:.1f} s of CPU", end="; ")
    print(f"{found.schedules / seconds:.0f} schedules/s")
    print(dict(sorted(found.counts.items())))
    for setup, violation in found.failures:
        print(violation, replay_line(setup), sep="\n  ")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What `main` takes, from the command line. Exits with 2 when it is wrong."""
    parser = argparse.ArgumentParser("tests.simulation.group_search", description="Search for schedules that fail.")
    parser.add_argument("first", type=int, help="first seed")
    parser.add_argument("count", type=int, help="how many seeds")
    parser.add_argument("events", type=int, nargs="?", default=EVENTS, help="events of a schedule (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(**vars(arguments()))
