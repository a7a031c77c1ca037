"""The engine and its tiers under seeded faults: many schedules, the mutation gate, vacuity, determinism, earlier finds.

Longer searches: `make soak`, or `python -m tests.simulation.engine_search`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.engine_mutants import ENGINE_MUTANTS, EngineMutant
from tests.simulation.engine_search import Found, arguments, search, search_on_all_cores
from tests.simulation.engine_world import FAULTS, LATER_FAULTS, Setup, run
from tests.simulation.searching import printed_under_hash_seeds

SCHEDULES = 1_000
SOAK_SCHEDULES = 40_000
BATCH = 50
MUTANT_SEEDS = 60
# per schedule, about a third of what was measured
RESTORED_SHARE = 0.05  # of the requests, some of their prompt
FLOORS = {
    "restores": 2.0, "cut_restores": 0.4, "lost_blocks": 1.2, "corrupt_blocks": 0.1, "loaded_blocks": 5.0,
    "preemptions": 2.0, "swapped": 1.0, "Stash": 0.2, "Unstash": 0.1, "DropStash": 0.1, "store_losses": 0.25,
    "late_lookups": 0.7, "refused_saves": 1.5, "skipped_saves": 5.0, "dropped_dirty": 10.0, "chose_load": 0.5,
    "chose_recompute": 0.5, "prompt_logprobs": 0.7, "nvme_hit_tokens": 5.0, "host_hit_tokens": 15.0,
    "lost while loading": 0.2, "cut off by an update": 0.3, "submitted again": 1.0, "loaded after going back": 0.2,
    "reported after its engine's end": 0.04,
}  # fmt: skip
CANCELLED = ("waiting", "looking", "fetching", "ready", "restoring", "running", "preempted", "stashed")
UNDER_WAY = (
    "prefill",
    "decode",
    "lookup",
    "fetch",
    "load",
    "copy",
    "report",
    "stash",
)  # what a weights update cuts off
LEAST = 30  # of every fault and of every kind of cancel, over all schedules
RARE = {"cancel stashed": 6, "stash lost": 9, "update during stash": 6}

# schedules that found a bug once
SIMPLE = Setup(
    seed=0, faults=frozenset(), ranks=1, num_blocks=8, block_tokens=8, depth=1, max_num_seqs=8,
    max_num_batched_tokens=256, caching=True, credit=16, host_blocks=64, nvme_blocks=0, restore="always",
    persistent=False, rope_switch=0, lookup_ms=4, restore_ms=50, prefetch_requests=0, prefetch_share=0.25,
    publish_share=1.0, watermarks=(0.2, 0.3, 0.5), token_us=200,
)  # fmt: skip
EARLIER = {
    "a stash outlived the change of its sequence's RoPE": replace(
        SIMPLE, seed=143, max_num_batched_tokens=48, rope_switch=28, lookup_ms=100, prefetch_requests=8,
        publish_share=0.0, watermarks=(0.5, 0.7, 0.9), token_us=20, turns=162,
    ),
    "a preempted sequence was given log-probabilities of more than its prompt": replace(
        SIMPLE, seed=23, faults=frozenset({"no credit", "refused save", "slow disk"}), num_blocks=7, rope_switch=28,
        restore_ms=5, prefetch_requests=8, watermarks=(1.0, 1.0, 1.0), turns=35,
    ),
    "blocks before those that a lookup asked for counted as found": replace(
        SIMPLE, seed=75, num_blocks=18, depth=2, credit=1, prefetch_share=0.0, publish_share=0.05,
        watermarks=(1.0, 1.0, 1.0), turns=21,
    ),
    "blocks restored from a store that is lost counted as copied down": replace(
        SIMPLE, seed=30, faults=frozenset({"slow copy", "store lost"}), num_blocks=10, lookup_ms=100, turns=14
    ),
    "orders of a failed step's requests waited for the next request": replace(
        SIMPLE, seed=0, faults=frozenset({"cancel", "failed step"}), ranks=3, num_blocks=9, max_num_seqs=4,
        host_blocks=16, restore="auto", lookup_ms=30, restore_ms=1000, watermarks=(0.5, 0.7, 0.9), token_us=1000,
    ),
    "a load that was late beside a stash on its way made the engine's loop spin": replace(
        SIMPLE, seed=748, faults=frozenset({"failed step", "late rank"}), ranks=3, num_blocks=5,
        max_num_batched_tokens=48, host_blocks=4, lookup_ms=30, restore_ms=5, prefetch_requests=2, prefetch_share=1.0,
        token_us=20, turns=218,
    ),
}  # fmt: skip


def _batch(first: int) -> Found:
    return search(Setup.draw(seed) for seed in range(first, first + BATCH))


@pytest.fixture(scope="module")
def found() -> Found:
    """What the schedules of this run have seen."""
    return search_on_all_cores(_batch, 0, SCHEDULES, BATCH)


@pytest.mark.timeout(600)
def test_no_schedule_breaks_an_invariant(found: Found) -> None:
    """I2 to I8, I12 to I14 at every event, I11 after a quiet tail."""
    assert found.schedules == SCHEDULES


@pytest.mark.timeout(600)
def test_the_schedules_are_not_vacuous(found: Found) -> None:
    """I15: requests restore blocks, and every fault, branch and kind of cancel has happened often enough."""
    counts = found.counts
    assert counts["restored"] >= RESTORED_SHARE * counts["requests"]
    low = {name: counts[name] for name, floor in FLOORS.items() if counts[name] < floor * SCHEDULES}
    names = [*FAULTS, *LATER_FAULTS, *(f"cancel {state}" for state in CANCELLED)]
    names += [f"update during {what}" for what in UNDER_WAY]
    low |= {name: counts[name] for name in names if counts[name] < RARE.get(name, LEAST)}
    assert not low


@pytest.mark.parametrize("mutant", ENGINE_MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: EngineMutant) -> None:
    """Each broken promise is found by an invariant that watches it, and nothing is found without it."""
    mutant.check_killed(MUTANT_SEEDS)


def test_there_are_enough_mutants() -> None:
    """Each with a name of its own, and I12 and I14 among what kills them."""
    assert len({mutant.name for mutant in ENGINE_MUTANTS}) == len(ENGINE_MUTANTS) >= 12
    assert {"I12", "I14"} <= {invariant for mutant in ENGINE_MUTANTS for invariant in mutant.killed_by}


@pytest.mark.parametrize("name", EARLIER)
def test_earlier_find(name: str) -> None:
    """A schedule that found a bug once goes through."""
    run(EARLIER[name])


TRACE = """
from tests.simulation.engine_world import Setup, run
print([run(setup).trace for seed in range(8) for setup in (Setup.draw(seed), Setup.draw_long(seed))])
"""


def test_the_same_seed_is_the_same_schedule() -> None:
    """Also in processes with other hash seeds."""
    traces = printed_under_hash_seeds(TRACE, ("0", "1"))
    assert len(traces) == 1
    assert len(set(traces.pop().strip("[]\n").split(", "))) == 16


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_more_schedules() -> None:
    """As above, for as long as it takes."""
    search_on_all_cores(_batch, 1_000_000, SOAK_SCHEDULES, BATCH)


def test_the_command_line_of_the_search_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert vars(arguments(["5", "100"])) == {"first": 5, "count": 100, "turns": 300, "long": False}
    with pytest.raises(SystemExit, match="0"):
        arguments(["--help"])
    assert "usage: tests.simulation.engine_search [-h] [--long] first count [turns]" in capsys.readouterr().out
