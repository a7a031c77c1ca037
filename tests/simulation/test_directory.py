"""The directory under seeded faults: many schedules, the mutation gate, vacuity, determinism."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.simulation.directory_mutants import MUTANTS
from tests.simulation.directory_world import FAULTS, Setup, run
from tests.simulation.mutants import Mutant
from tests.simulation.searching import on_all_cores, printed_under_hash_seeds, violation_of
from tests.simulation.world import Violation

SCHEDULES, SOAK_SCHEDULES = 80, 10_000
MUTANT_SEEDS = 200
RARE = {"node dead": 3, "store silent": 10, "clock jump": 10, "node thought lost": 10}
MIN_COUNT = 30
BRANCHES = ("asked", "expired", "start over", "wrong entry", "full", "overflow", "evicted", "stale")

# schedules that found a bug once
EARLIER = (
    # what changed between a shard's question and the answer was forgotten with an overflow
    Setup(5, frozenset({"store silent", "node thought lost"}), 2, 1, 26, 1000, 16, 4, 16),
    # after a jump of the clock a dead node stayed for an hour
    Setup(46, frozenset({"corrupt record", "node dead", "store killed", "node thought lost", "clock jump"}),
          2, 3, 13, 12, 16, 1000, 16),
)  # fmt: skip


def _schedule(seed: int) -> tuple[Violation | None, Counter[str]]:
    try:
        world = run(Setup.draw(seed))
    except Violation as violation:
        return violation, Counter()
    numbers = {"reads": world.num_reads, "claimed": world.num_claimed, "taken": world.num_taken}
    return None, Counter(world.counts) + Counter(numbers)


def _broken(setup: Setup) -> Violation | None:
    return violation_of(run, setup)


def _schedules(first: int, count: int) -> Counter[str]:
    """Run them on all cores. Fails with the setups of broken ones."""
    total: Counter[str] = Counter()
    broken = []
    for violation, counts in on_all_cores(_schedule, range(first, first + count), chunksize=20):
        total += counts
        if violation is not None:
            broken.append(str(violation))
    if broken:
        pytest.fail("\n".join(broken[:5]), pytrace=False)
    return total


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    """What the schedules of this run have seen."""
    return _schedules(0, SCHEDULES)


def test_no_schedule_breaks_an_invariant_and_the_schedules_are_not_vacuous(counts: Counter[str]) -> None:
    """D1 to D7; readers find what they were told of often enough, and all faults and branches have happened."""
    assert counts["taken"] >= 0.5 * counts["claimed"] >= 0.5 * counts["reads"] > 0
    rare = {name: counts[name] for name in {*FAULTS, *BRANCHES} if counts[name] < RARE.get(name, MIN_COUNT)}
    assert not rare


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant) -> None:
    """Each broken promise is found, by the invariant that watches it."""
    for seed in range(MUTANT_SEEDS):
        setup = Setup.draw(seed)
        with mutant.applied():
            violation = _broken(replace(setup, faults=setup.faults.union(mutant.faults)))
        if violation is not None:
            assert violation.invariant in mutant.killed_by, str(violation)
            return
    pytest.fail(f"{mutant.name}: no schedule of {MUTANT_SEEDS} found it")


def test_there_are_enough_mutants() -> None:
    """Eight at least, each with a name of its own."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 8


@pytest.mark.parametrize("setup", EARLIER, ids=lambda setup: f"seed{setup.seed}")
def test_earlier_find(setup: Setup) -> None:
    """A schedule that found a bug once goes through."""
    run(setup)


TRACE = """
from tests.simulation.directory_world import Setup, run
print([run(Setup.draw(seed)).trace for seed in range(6)])
"""


def test_the_same_seed_is_the_same_schedule() -> None:
    """Also in processes with other hash seeds."""
    traces = printed_under_hash_seeds(TRACE, ("0", "1"))
    assert len(traces) == 1
    assert len(set(traces.pop().split(","))) == 6


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_more_schedules() -> None:
    """As above, for as long as it takes."""
    _schedules(1_000_000, SOAK_SCHEDULES)
