"""The node store under seeded faults: many schedules, the mutation gate, vacuity, determinism, earlier finds.

Longer searches: `make soak`, or `python -m tests.simulation.search`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.simulation.adopter import Adopter
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.search import Found, arguments, fails, replay_line, search
from tests.simulation.searching import on_all_cores, printed_under_hash_seeds
from tests.simulation.world import FAULTS, Setup, run
from tournant.kvstore.adoption import Adoption
from tournant.kvstore.policies import EVICTION

SCHEDULES = 3_000
SOAK_SCHEDULES = 200_000
BATCH = 250
MUTANT_SEEDS = 1500
# faults that a schedule of 200 events meets rarely still have to happen often enough to mean something
RARE = {"resurrected segment": 5, "delete error": 50, "checkpoint error": 50, "torn record": 50, "fetch late": 50}
MIN_COUNT = 100
BRANCHES = (
    "loaded", "written", "corrupt", "bad slot", "evicted", "evicted clean", "incomplete dropped", "credit short",
    "read expired", "cut by pins", "entry refused", "generation changed", "hard pin", "recovered", "bad block seen",
    "disconnected", "prefetched", "adopted", "adopted nothing",
)  # fmt: skip

# schedules that found a bug once
EARLIER = (
    # a slot under suspicion stayed in the list of blocks to be copied down
    Setup(
        seed=10,
        faults=frozenset({"cancel", "host bit flip", "slow disk", "stalled rank", "sync error"}),
        ranks=2,
        replicas=2,
        slots=34,
        nvme=True,
        events=90,
    ),
    # a hard pin that came after its unpin stayed for ever
    Setup(
        seed=1384,
        faults=frozenset({"cancel", "clock jump", "dropped message", "duplicated message", "forged report"})
        | {"hung disk", "late message", "weights update"},
        ranks=2,
        replicas=2,
        slots=28,
        nvme=True,
        events=117,
    ),
    # a run of blocks was as old as its request, not as its first block
    Setup(
        seed=9650,
        faults=frozenset(),
        ranks=2,
        replicas=2,
        slots=28,
        nvme=True,
        eviction="session",
        admission="seen_twice",
        events=19,
    ),
)


def _batch(first: int) -> Found:
    evictions = ("lru",) if first % (2 * BATCH) else tuple(EVICTION)
    return search(Setup.draw(seed, evictions=evictions) for seed in range(first, first + BATCH))


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


@pytest.mark.timeout(900)
def test_no_schedule_breaks_an_invariant(found: Found) -> None:
    """I1 to I11, I13 after every event, I11 after a quiet tail."""
    assert found.schedules == SCHEDULES
    assert found.events >= SCHEDULES * 200


@pytest.mark.timeout(900)
def test_the_schedules_are_not_vacuous(found: Found) -> None:
    """I15: reads are verified often enough, and every fault and branch has happened often enough."""
    assert found.verified >= 0.30 * found.opens
    names = {*FAULTS, *BRANCHES, *RARE} - {"power loss", "cancel"}
    rare = {name: found.counts[name] for name in names if found.counts[name] < RARE.get(name, MIN_COUNT)}
    assert not rare


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant) -> None:
    """Each broken promise is found, by the invariant that watches it."""
    for setup in _setups_for(mutant):
        with mutant.applied():
            violation = fails(setup)
        if violation is not None:
            assert violation.invariant in mutant.killed_by, str(violation)
            return
    pytest.fail(f"{mutant.name}: no schedule of {MUTANT_SEEDS} found it")


def _setups_for(mutant: Mutant) -> Iterator[Setup]:
    adopts = any(target in (Adopter, Adoption) for target, _, _ in mutant.patches)
    needs_disk = {"swapped records", "bit flip", "read error", "hung disk", "slow disk"}.intersection(mutant.faults)
    for seed in range(MUTANT_SEEDS):
        setup = Setup.draw(seed)
        faults, nvme = setup.faults.union(mutant.faults), setup.nvme or bool(needs_disk)
        yield replace(setup, faults=faults, nvme=nvme, adopts=adopts)


def test_there_are_enough_mutants() -> None:
    """Twenty at least, each with a name of its own and an invariant that kills it."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
    assert all(mutant.killed_by for mutant in MUTANTS)


@pytest.mark.parametrize("setup", EARLIER, ids=lambda setup: f"seed{setup.seed}")
def test_earlier_find(setup: Setup) -> None:
    """A schedule that found a bug once goes through."""
    run(setup)


TRACE = """
from tests.simulation.world import Setup, run
print([run(Setup.draw(seed)).trace for seed in range(12)])
"""


def test_the_same_seed_is_the_same_schedule() -> None:
    """Also in processes with other hash seeds."""
    traces = printed_under_hash_seeds(TRACE, ("0", "1", "2"))
    assert len(traces) == 1
    assert len(set(numbers_of(traces.pop()))) == 12


def numbers_of(printed: str) -> list[int]:
    """Numbers of a printed list."""
    return [int(number) for number in printed.strip().strip("[]").split(", ")]


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_more_schedules() -> None:
    """As above, for as long as it takes."""
    _schedules(1_000_000, SOAK_SCHEDULES)


def test_the_command_line_of_the_search_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert vars(arguments(["5", "100"])) == {"first": 5, "count": 100, "events": 200}
    with pytest.raises(SystemExit, match="0"):
        arguments(["--help"])
    assert "usage: tests.simulation.search [-h] first count [events]" in capsys.readouterr().out
