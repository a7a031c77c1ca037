"""Sequences larger than the device under seeded faults: many schedules, the mutation gate, vacuity.

Longer searches: `make soak`, or `python -m tests.simulation.engine_search FIRST COUNT --long`.
"""

from __future__ import annotations

import pytest

from tests.simulation.engine_overflow_mutants import OVERFLOW_MUTANTS, OverflowMutant
from tests.simulation.engine_search import Found, search, search_on_all_cores
from tests.simulation.engine_world import Setup, run

SCHEDULES = 150
SOAK_SCHEDULES = 20_000
BATCH = 25
MUTANT_SEEDS = 20
# per schedule, about a third of what was measured
FLOORS = {
    "steps below": 70.0, "written anew": 28.0, "beyond the window": 3.5, "was there already": 2.5,
    "began with places": 2.8, "lost below": 0.2, "given up after losses": 0.015, "preemptions": 0.8,
    "cancel running": 0.18, "failed step": 0.09, "late rank": 3.0, "prompt_logprobs": 0.35, "restored": 0.03,
    "update during decode": 0.1, "update during prefill": 0.07,
}  # fmt: skip

# a schedule that found a bug once: the last step of a cancelled sequence lost a place, which was found again afterwards
EARLIER = Setup(
    seed=1060, faults=frozenset({"lost below"}), ranks=1, num_blocks=2, block_tokens=8, depth=2, max_num_seqs=8,
    max_num_batched_tokens=256, caching=True, credit=16, host_blocks=4, nvme_blocks=0, restore="always",
    persistent=False, rope_switch=0, lookup_ms=30, restore_ms=5, prefetch_requests=0, prefetch_share=1.0,
    publish_share=0.05, watermarks=(0.5, 0.7, 0.9), token_us=1000, turns=54, num_below=3, has_tiers=False,
)  # fmt: skip


def _batch(first: int) -> Found:
    return search(Setup.draw_long(seed) for seed in range(first, first + BATCH))


@pytest.fixture(scope="module")
def found() -> Found:
    """What the schedules of this run have seen."""
    return search_on_all_cores(_batch, 0, SCHEDULES, BATCH)


@pytest.mark.timeout(300)
def test_no_schedule_breaks_an_invariant(found: Found) -> None:
    """I2, I7, I12, I14, I16 to I18 at every step, I11 after a quiet tail."""
    assert found.schedules == SCHEDULES


@pytest.mark.timeout(300)
def test_the_schedules_are_not_vacuous(found: Found) -> None:
    """I15: blocks go below in every way, are found there, are lost there."""
    low = {name: found.counts[name] for name, floor in FLOORS.items() if found.counts[name] < floor * SCHEDULES}
    assert not low


@pytest.mark.parametrize("mutant", OVERFLOW_MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: OverflowMutant) -> None:
    """Each broken promise is found by an invariant that watches it, and nothing is found without it."""
    mutant.check_killed(MUTANT_SEEDS)


def test_there_are_enough_mutants() -> None:
    """Each with a name of its own, and all invariants of places among what kills them."""
    assert len({mutant.name for mutant in OVERFLOW_MUTANTS}) == len(OVERFLOW_MUTANTS) >= 20
    assert {"I16", "I17", "I18"} <= {invariant for mutant in OVERFLOW_MUTANTS for invariant in mutant.killed_by}


def test_earlier_find() -> None:
    run(EARLIER)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_more_schedules() -> None:
    """As above, for as long as it takes."""
    search_on_all_cores(_batch, 1_000_000, SOAK_SCHEDULES, BATCH)
