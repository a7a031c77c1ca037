"""Groups of ranks and their node stores under seeded faults: many schedules, the mutation gate, vacuity, determinism.

Longer searches: `make soak`, or `python -m tests.simulation.group_search`.
"""

from __future__ import annotations

import pytest

from tests.simulation.group_mutants import GROUP_MUTANTS, GroupMutant
from tests.simulation.group_search import Found, arguments, fails, replay_line, search
from tests.simulation.group_world import FAULTS, LATER_FAULTS, Setup
from tests.simulation.searching import on_all_cores, printed_under_hash_seeds

SCHEDULES = 600
SOAK_SCHEDULES = 20_000
BATCH = 25
MUTANT_SEEDS = 40
# per schedule, about a third of what was measured
FLOORS = {
    "saved": 9.0, "refused": 0.7, "found": 9.0, "Fetched": 6.0, "verified": 4.0, "accepted": 5.0, "Loaded": 0.7,
    "accepted of another group": 1.5, "found on NVMe": 0.5, "found at the end": 5.0, "corrupt block seen": 0.3,
    "brought back": 0.4, "Detached": 0.4, "Lent": 1.2, "found of both weights": 1.0, "accepted after going back": 0.06,
}  # fmt: skip
UNDER_WAY = ("lookup", "fetch", "load", "copy down", "report", "stash", "spill")  # what a weights update cuts off
LEAST = 80  # of every fault, over all schedules
RARE = {"old rank lives on": 30, "read error": 5, "hung disk": 60, "rank on old weights": 30}
VERIFIED_SHARE = 0.3  # of the lookups that found something


def _batch(first: int) -> Found:
    return search(Setup.draw(seed) for seed in range(first, first + BATCH))


def _schedules(first: int, count: int) -> Found:
    """Run them on all cores. Fails with how to run a broken one again."""
    total = Found()
    for found in on_all_cores(_batch, range(first, first + count, BATCH)):
        total.add(found)
    if total.failures:
        lines = [f"{violation}\n  {replay_line(setup)}" for setup, violation in total.failures]
        pytest.fail("\n".join(lines), pytrace=False)
    return total


@pytest.fixture(scope="module")
def found() -> Found:
    """What the schedules of this run have seen."""
    return _schedules(0, SCHEDULES)


@pytest.mark.timeout(600)
def test_no_schedule_breaks_an_invariant(found: Found) -> None:
    """I1 to I8 as they can be broken, I11 and I13 after a quiet tail."""
    assert found.schedules == SCHEDULES


@pytest.mark.timeout(600)
def test_the_schedules_are_not_vacuous(found: Found) -> None:
    """I15: blocks of both groups are found and accepted, and every fault has happened often enough."""
    counts = found.counts
    assert counts["verified"] >= VERIFIED_SHARE * counts["found"]
    low = {name: counts[name] for name, floor in FLOORS.items() if counts[name] < floor * SCHEDULES}
    low |= {name: counts[name] for name in FAULTS + LATER_FAULTS if counts[name] < RARE.get(name, LEAST)}
    low |= {what: counts[f"update during {what}"] for what in UNDER_WAY if counts[f"update during {what}"] < 20}
    low |= {name: counts[name] for name in ("old rank wakes",) if counts[name] < 15}
    assert not low


@pytest.mark.parametrize("mutant", GROUP_MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: GroupMutant) -> None:
    """Each broken promise is found by an invariant that watches it, and nothing is found without it."""
    for seed in range(MUTANT_SEEDS):
        setup = mutant.setup(seed)
        with mutant.applied():
            violation = fails(setup)
        if violation is not None:
            assert violation.invariant in mutant.killed_by, str(violation)
            assert fails(setup) is None
            return
    pytest.fail(f"{mutant.name}: no schedule of {MUTANT_SEEDS} found it")


def test_there_are_enough_mutants() -> None:
    """Each with a name of its own; I1, I2 and, for weights updates, I9 are among what kills them."""
    assert len({mutant.name for mutant in GROUP_MUTANTS}) == len(GROUP_MUTANTS) >= 10
    assert {"I1", "I2", "I9"} <= {invariant for mutant in GROUP_MUTANTS for invariant in mutant.killed_by}


TRACE = """
from tests.simulation.group_world import Setup, run
print([run(Setup.draw(seed)).trace for seed in range(8)])
"""


def test_the_same_seed_is_the_same_schedule() -> None:
    """Also in processes with other hash seeds."""
    traces = printed_under_hash_seeds(TRACE, ("0", "1"))
    assert len(traces) == 1
    assert len(set(traces.pop().strip("[]\n").split(", "))) == 8


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_more_schedules() -> None:
    """As above, for as long as it takes."""
    _schedules(1_000_000, SOAK_SCHEDULES)


def test_the_command_line_of_the_search_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert vars(arguments(["5", "100"])) == {"first": 5, "count": 100, "events": 400}
    with pytest.raises(SystemExit, match="0"):
        arguments(["--help"])
    assert "usage: tests.simulation.group_search [-h] first count [events]" in capsys.readouterr().out
