"""Groups of ranks that restore blocks of other nodes under seeded faults: schedules, the mutation gate, vacuity."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.group_mutants import GroupMutant
from tests.simulation.group_remote_mutants import REMOTE_MUTANTS, setup_for
from tests.simulation.group_remote_world import REMOTE_FAULTS, draw, run
from tests.simulation.searching import on_all_cores, printed_under_hash_seeds, violation_of

SCHEDULES = 40
SOAK_SCHEDULES = 10_000
BATCH = 10
MUTANT_SEEDS = 60
# per schedule, about a third of what was measured
FLOORS = {
    "fetched of another node": 1.5, "brought": 1.5, "promised at the end": 1.5, "accepted": 7.0,
    "accepted of another group": 2.5, "found at the end": 6.0,
}  # fmt: skip
LEAST = 3  # of every fault of agents, over all schedules


def _batch(first: int) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    broken = []
    for seed in range(first, first + BATCH):
        setup = draw(seed)
        if (violation := violation_of(lambda one: counts.update(run(one).counts), setup)) is not None:
            broken.append(f"draw({seed}): {violation}")
    return counts, broken


def _schedules(first: int, count: int) -> Counter[str]:
    """Run them on all cores. Fails with the seeds of broken ones."""
    total: Counter[str] = Counter()
    failures: list[str] = []
    for counts, broken in on_all_cores(_batch, range(first, first + count, BATCH)):
        total.update(counts)
        failures += broken
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    return total


@pytest.mark.timeout(600)
def test_no_schedule_breaks_an_invariant_and_all_happens() -> None:
    """I1 to I9, I11 and I13 as in test_group_world.py, whatever agents do; and blocks do come from other nodes."""
    counts = _schedules(0, SCHEDULES)
    low = {name: counts[name] for name, floor in FLOORS.items() if counts[name] < floor * SCHEDULES}
    low |= {name: counts[name] for name in REMOTE_FAULTS if counts[name] < LEAST}
    assert not low


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", REMOTE_MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: GroupMutant) -> None:
    """Each broken promise is found by an invariant that watches it, and nothing is found without it."""
    for seed in range(MUTANT_SEEDS):
        setup = setup_for(mutant, seed)
        with mutant.applied():
            violation = violation_of(run, setup)
        if violation is not None:
            assert violation.invariant in mutant.killed_by, str(violation)
            assert violation_of(run, setup) is None
            return
    pytest.fail(f"{mutant.name}: no schedule of {MUTANT_SEEDS} found it")


TRACE = """
from tests.simulation.group_remote_world import draw, run
print([run(draw(seed)).trace for seed in range(2)])
"""


def test_the_same_seed_is_the_same_schedule() -> None:
    """Also in processes with other hash seeds."""
    assert len(printed_under_hash_seeds(TRACE, ("0", "1"))) == 1


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_more_schedules() -> None:
    """As above, for as long as it takes."""
    _schedules(1_000_000, SOAK_SCHEDULES)
