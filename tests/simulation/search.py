"""Looks for schedules that break an invariant, and makes them small.

Run it for longer searches: `python -m tests.simulation.search FIRST_SEED COUNT [EVENTS]`, see --help.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tests.simulation.searching import smallest, violation_of
from tests.simulation.world import Setup, Violation, run

MIN_EVENTS = 10


@dataclass
class Found:
    """What a run of many schedules has seen. failures: (setup, violation), each made small."""

    schedules: int = 0
    events: int = 0
    opens: int = 0
    verified: int = 0
    accepted: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[Setup, Violation]] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Join what another run has seen."""
        for name in ("schedules", "events", "opens", "verified", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.counts.update(other.counts)
        self.failures += other.failures


def fails(setup: Setup) -> Violation | None:
    """The violation that this schedule runs into."""
    return violation_of(run, setup)


def minimised(setup: Setup, violation: Violation) -> tuple[Setup, Violation]:
    """The same seed with fewer faults and events that still breaks the same invariant."""
    return smallest(setup, violation, _simpler, fails)


def _simpler(setup: Setup) -> list[Setup]:
    candidates = [replace(setup, faults=setup.faults - {fault}) for fault in sorted(setup.faults)]
    candidates.append(replace(setup, events=max(MIN_EVENTS, setup.events // 2)))
    candidates.append(replace(setup, events=max(MIN_EVENTS, setup.events * 9 // 10)))
    return candidates


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
        found.events += world.steps
        found.opens += world.num_opens
        found.verified += world.num_verified
        found.accepted += world.num_accepted
        found.counts.update(world.counts)
    return found


def replay_line(setup: Setup) -> str:
    """How to run this schedule again."""
    return (
        f"run(Setup(seed={setup.seed}, faults=frozenset({sorted(setup.faults)}), ranks={setup.ranks}, "
        f"replicas={setup.replicas}, slots={setup.slots}, nvme={setup.nvme}, eviction={setup.eviction!r}, "
        f"admission={setup.admission!r}, prefetch={setup.prefetch}, events={setup.events}, "
        f"adopts={setup.adopts}))"
    )


def main(first: int, count: int, events: int = 200) -> None:
    """Search and print what was found."""
    start = time.process_time()
    found = search(Setup.draw(seed, events=events) for seed in range(first, first + count))
    seconds = time.process_time() - start
    print(f"{found.schedules} schedules, {found.events} events, {seconds:.1f} s of CPU", end="; ")
    print(f"{found.schedules / seconds:.0f} schedules/s, {found.verified} of {found.opens} reads verified")
    print(dict(sorted(found.counts.items())))
    for setup, violation in found.failures:
        print(violation, replay_line(setup), sep="\n  ")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What `main` takes, from the command line. Exits with 2 when it is wrong."""
    parser = argparse.ArgumentParser("tests.simulation.search", description="Search for schedules that fail.")
    parser.add_argument("first", type=int, help="first seed")
    parser.add_argument("count", type=int, help="how many seeds")
    parser.add_argument("events", type=int, nargs="?", default=200, help="events of a schedule (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(**vars(arguments()))
