"""Load or recompute: estimates that are learned, and choices that are right when the estimates are."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tournant.workers.cost_model import LATENCY_S, CostModel
from tournant.workers.transfer_messages import HOST, NVME, REMOTE

BLOCK_TOKENS, BLOCK_BYTES = 16, 368_640


def taught(a: float, b: float, host: float, nvme: float, noise: float = 0.0) -> CostModel:
    """A model that saw steps of n * (a + b * mean position) seconds and transfers at these bytes per second."""
    rng, model = random.Random(1), CostModel(BLOCK_TOKENS)
    for _ in range(200):
        count, start = rng.randrange(16, 1024), rng.randrange(0, 8192)
        position = start + count / 2
        model.observe_step(count, position, 0, count * (a + b * position) * (1 + rng.uniform(-noise, noise)))
        for tier, rate in ((HOST, host), (NVME, nvme)):
            num_bytes = rng.randrange(1, 100) * BLOCK_BYTES
            model.observe_transfer(tier, num_bytes, LATENCY_S[tier] + num_bytes / rate, now=0.0)
    return model


def test_it_learns_the_line_of_prefill_and_the_rates_of_the_tiers() -> None:
    model = taught(5e-4, 1e-7, 2e9, 1e8, noise=0.05)
    assert model.compute_s(0, 2048) == pytest.approx(2048 * (5e-4 + 1e-7 * 1024), rel=0.03)
    assert model.compute_s(6000, 8000) == pytest.approx(2000 * (5e-4 + 1e-7 * 7000), rel=0.03)
    assert model.bytes_per_second(HOST, 0.0) == pytest.approx(2e9, rel=0.01)
    assert model.load_s(10, 5, BLOCK_BYTES, 0.0) == pytest.approx(
        LATENCY_S[HOST] + LATENCY_S[NVME] + 15 * BLOCK_BYTES / 2e9 + 5 * BLOCK_BYTES / 1e8, rel=0.01
    )


@given(
    st.floats(1e-6, 1e-3), st.floats(1e-9, 1e-6), st.floats(1e6, 1e11), st.floats(1e5, 1e10),
    st.lists(st.sampled_from([HOST, NVME]), min_size=1, max_size=12), st.integers(0, 300),
)  # fmt: skip
def test_the_choice_is_the_best_of_all_prefixes(
    a: float, b: float, host: float, nvme: float, tiers: list[int], first: int
) -> None:
    model = taught(a, b, host, nvme)
    choice = model.choose(tiers, first, BLOCK_BYTES, 0.0)

    def seconds(count: int) -> float:
        num_nvme = tiers[:count].count(NVME)
        load = model.load_s(count - num_nvme, num_nvme, BLOCK_BYTES, 0.0) if count else 0.0
        rest = model.compute_s((first + count) * BLOCK_TOKENS, (first + len(tiers)) * BLOCK_TOKENS)
        assert load is not None
        assert rest is not None
        return load + rest

    assert seconds(choice.count) <= min(seconds(count) for count in range(len(tiers) + 1)) * (1 + 1e-9)


def test_what_is_unknown_is_tried() -> None:
    model = CostModel(BLOCK_TOKENS)
    assert model.choose([HOST] * 3, 0, BLOCK_BYTES, 0.0).count == 3
    model.observe_step(1024, 512.0, 0, 1e-6)
    assert model.choose([HOST] * 3, 0, BLOCK_BYTES, 0.0).count == 3
    model.observe_transfer(HOST, BLOCK_BYTES, 10.0, 0.0)
    assert model.choose([HOST] * 3, 0, BLOCK_BYTES, 0.0).count == 0
    assert model.choose([NVME] * 3, 0, BLOCK_BYTES, 0.0).count == 3


def test_a_slow_transfer_is_forgiven_in_time() -> None:
    model = taught(1e-4, 0.0, 2e9, 1e8)
    for _ in range(100):
        model.observe_transfer(HOST, BLOCK_BYTES, 5.0, now=1.0)
    assert model.choose([HOST] * 8, 0, BLOCK_BYTES, 1.0).count == 0
    later = next(now for now in itertools.count(1) if model.choose([HOST] * 8, 0, BLOCK_BYTES, float(now)).count)
    assert 30 < later < 600


def test_what_waits_before_makes_loading_dearer() -> None:
    model = taught(1e-4, 0.0, 1e9, 1e8)
    assert model.choose([NVME] * 8, 0, BLOCK_BYTES, 0.0).count == 0
    assert model.choose([HOST] * 8, 0, BLOCK_BYTES, 0.0).count == 8
    assert model.began(HOST, 100 * BLOCK_BYTES) == 0
    assert model.choose([HOST] * 8, 0, BLOCK_BYTES, 0.0).count == 0
    model.ended(HOST, 100 * BLOCK_BYTES)
    assert model.choose([HOST] * 8, 0, BLOCK_BYTES, 0.0).count == 8


def test_decodes_beside_a_prefill_are_not_charged_to_it() -> None:
    model = CostModel(BLOCK_TOKENS)
    for _ in range(100):
        model.observe_step(0, 0.0, 8, 0.02)
    for _ in range(100):
        model.observe_step(512, 256.0, 8, 0.12)
    assert model.prefill_tokens_per_second == pytest.approx(5120, rel=0.05)


def test_a_rate_that_was_not_seen_for_a_day_is_still_a_number() -> None:
    model = taught(1e-4, 0.0, 2e9, 1e8)
    rate = model.bytes_per_second(HOST, 86_400.0)
    assert rate is not None
    assert 2e9 < rate < 1e18


def test_those_who_decode_wait_for_a_prompt_that_is_computed() -> None:
    model = CostModel(BLOCK_TOKENS)
    model.observe_step(1000, 500.0, 0, 1.0)
    tokens_s = model.compute_s(0, 8 * BLOCK_TOKENS)
    assert tokens_s is not None
    model.observe_transfer(HOST, 8 * BLOCK_BYTES, 1.5 * tokens_s, 0.0)  # slower than computing, by half
    assert model.choose([HOST] * 8, 0, BLOCK_BYTES, 0.0).count == 0
    assert model.choose([HOST] * 8, 0, BLOCK_BYTES, 0.0, decoding=1).count == 8


def test_it_learns_what_another_node_takes_beside_its_bytes() -> None:
    rng, model = random.Random(1), taught(1e-4, 0.0, 2e9, 1e8)
    assert model.choose([HOST, REMOTE, REMOTE], 0, BLOCK_BYTES, 0.0).count == 3, "what is unknown is tried"
    for _ in range(200):
        num_bytes = rng.randrange(1, 200) * BLOCK_BYTES
        model.observe_transfer(REMOTE, num_bytes, (0.08 + num_bytes / 4e8) * rng.uniform(0.95, 1.05), now=0.0)
    assert model.latency_s(REMOTE) == pytest.approx(0.08, rel=0.1)
    assert model.bytes_per_second(REMOTE, 0.0) == pytest.approx(4e8, rel=0.1)
    far = model.load_s(0, 0, BLOCK_BYTES, 0.0, num_remote=50)
    assert far == pytest.approx(LATENCY_S[HOST] + 0.08 + 50 * BLOCK_BYTES * (1 / 2e9 + 1 / 4e8), rel=0.1)
    assert model.choose([REMOTE] * 8, 0, BLOCK_BYTES, 0.0).count == 0, "8 blocks are computed in 13 ms"
    assert model.choose([HOST] * 2 + [REMOTE] * 8, 0, BLOCK_BYTES, 0.0).count == 2
    assert model.choose([REMOTE] * 400, 0, BLOCK_BYTES, 0.0).count == 400
    model.began(REMOTE, 4000 * BLOCK_BYTES)
    assert model.choose([REMOTE] * 400, 0, BLOCK_BYTES, 0.0).count == 0


def test_transfers_of_one_size_say_nothing_of_latency() -> None:
    model = CostModel(BLOCK_TOKENS)
    for _ in range(50):
        model.observe_transfer(REMOTE, 10 * BLOCK_BYTES, 0.03, now=0.0)
    assert model.latency_s(REMOTE) == LATENCY_S[REMOTE]
    assert model.bytes_per_second(REMOTE, 0.0) == pytest.approx(10 * BLOCK_BYTES / 0.02)
