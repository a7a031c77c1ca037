"""Cases about the ranks of one replica: M over tensor parallel processes, with a store below."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.workers.parallel_harness import without_near_ties
from tests.workers.test_group_offload import Faulty, group
from tests.workers.tiered_engine import BLOCK_BYTES, BLOCK_TOKENS, Store, node_store

LENGTHS = tuple(range(60, 380, 8))
SMALL = {"kv_cache_bytes": 32 * BLOCK_BYTES}  # of each of two ranks: 64 blocks of its heads
CONCURRENCY, NUM_REQUESTS = 16, 150


@pytest.mark.case(17)
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(NUM_REQUESTS, marks=pytest.mark.timeout(300)),
        pytest.param(80 * NUM_REQUESTS, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_case_17_one_rank_is_late_with_its_copies_at_the_pool_s_limit(
    tiny_model: Path, tmp_path: Path, count: int
) -> None:
    """Every rank compares each step's number and block tables with the leader's, and a difference would end the group:
    so it is the group of the beginning that has answered everything.
    """
    chosen = without_near_ties(tiny_model, LENGTHS)
    rng = random.Random(17)
    numbers = iter([rng.randrange(len(LENGTHS)) for _ in range(count)])

    async def scenario(store: Store) -> None:
        late = lambda: Faulty(load_delay_ms=2.0, save_delay_ms=0.5)  # noqa: E731 - on rank 1 alone
        async with group(tiny_model, store, (2, 1), late, SMALL, restore_ms=60_000, lookup_ms=10_000) as one:
            assert one.engine.info.pool_tokens == 64 * BLOCK_TOKENS
            writer_id, full = one.engine.info.writer_id, 0

            async def client() -> None:
                nonlocal full
                for number in numbers:
                    (answer,) = await one.ask([chosen.prompts[number]])
                    assert answer.tokens == chosen.answers[number]
                    full += one.engine.stats.num_waiting > 0

            await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
            assert (one.engine.info.writer_id, one.engine.last_end) == (writer_id, "")
            assert full > count / 2, "others waited for room nearly all the time"
            assert one.tiers.loaded_blocks > 2 * count

    with node_store(tmp_path, 512, nvme=False) as store:
        asyncio.run(scenario(store))
