"""Walks over KV in several places: the bits of one call over all of it, and the twin's values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.kernels.kernel_case import DTYPES, LAYER, TOLERANCE, Case
from tournant.kernels import ops, segments
from tournant.kernels.layout import KVLayout
from tournant.kernels.segments import Places

LENGTH = 1100  # four pieces and a bit


def case_of(dtype: torch.dtype, block_tokens: int = 16) -> Case:
    case = Case(KVLayout(3, 3, block_tokens, 64, dtype), [LENGTH], 9)
    case.store(0, 0, LENGTH)
    return case


def places_of(case: Case, seed: int = 0) -> tuple[Places, tuple[int, ...]]:
    """Every block in one of three places at random: the cache, a copy of whole blocks, a ring of one layer."""
    generator = np.random.default_rng(seed)
    table = case.tables[0][: -(-LENGTH // case.layout.block_tokens)].astype(np.int64)
    order = generator.permutation(len(table))
    below = torch.full((len(table), *case.kv_cache.shape[1:]), float("nan"), dtype=case.kv_cache.dtype)
    ring = torch.full((len(table), 1, *case.kv_cache.shape[2:]), float("nan"), dtype=case.kv_cache.dtype)
    sources = generator.integers(0, 3, len(table))
    ids = np.where(sources == 0, table, order)
    for block, source, place in zip(table, sources, order, strict=True):
        if source == 1:
            below[place] = case.kv_cache[block]
        elif source == 2:
            ring[place, 0] = case.kv_cache[block, LAYER]
    return Places((case.kv_cache, below, ring), sources.astype(np.int64), ids.astype(np.int64)), (LAYER, LAYER, 0)


def walked(
    case: Case, places: Places, layers: tuple[int, ...], start: int, cuts: list[int], **how: float
) -> torch.Tensor:
    q = case.q[start:LENGTH]
    out, state = torch.full_like(q, float("nan")), segments.new_state(len(q), 9, 64, q.device)
    for first, end in itertools.pairwise(cuts):
        plan = segments.plan_pieces(len(q), LENGTH, case.layout, 9, first, end)
        segments.walk(out, q, places, layers, plan, case.scale, state, **how)
    return out


def whole(case: Case, start: int, **how: float) -> torch.Tensor:
    q = case.q[start:LENGTH]
    plan = ops.plan_attention(case.tables, [0, len(q)], [LENGTH], case.layout, 9)
    out = torch.full_like(q, float("nan"))
    ops.paged_attention(out, q, case.kv_cache, LAYER, plan, case.scale, **how)
    return out


HOW = [{}, {"window": 300}, {"softcap": 20.0}, {"window": 17, "softcap": 5.0}]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("start", [LENGTH - 1, LENGTH - 5, 700, 0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("compiled", "threads")
def test_the_bits_are_those_of_one_call(dtype: torch.dtype, start: int, how: dict[str, float]) -> None:
    case = case_of(dtype)
    expected = whole(case, start, **how)
    for seed, cuts in enumerate(([0, 5], [0, 1, 5], [0, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])):
        places, layers = places_of(case, seed)
        assert torch.equal(walked(case, places, layers, start, cuts, **how), expected)


@pytest.mark.parametrize("block_tokens", [8, 64, 256])
@pytest.mark.usefixtures("compiled")
def test_blocks_of_any_size(block_tokens: int) -> None:
    case = case_of(torch.float32, block_tokens)
    places, layers = places_of(case)
    assert torch.equal(walked(case, places, layers, 1000, [0, 2, 5]), whole(case, 1000))


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("start", [LENGTH - 1, 700, 0])
@pytest.mark.usefixtures("backend")
def test_every_back_end_gives_the_values(start: int, how: dict[str, float]) -> None:
    case = case_of(torch.float32)
    places, layers = places_of(case)
    torch.testing.assert_close(
        walked(case, places, layers, start, [0, 1, 3, 5], **how), whole(case, start, **how), rtol=0, atol=5e-6
    )


@pytest.mark.usefixtures("backend")
def test_against_dense_attention() -> None:
    case = case_of(torch.bfloat16)
    places, layers = places_of(case)
    out = walked(case, places, layers, 900, [0, 4, 5])
    torch.testing.assert_close(out.double(), case.expected(0, 900, LENGTH), rtol=0, atol=TOLERANCE[torch.bfloat16])


def test_a_state_left_over_from_other_rows_does_not_matter() -> None:
    case = case_of(torch.float32)
    places, layers = places_of(case)
    q, state = case.q[1000:], segments.new_state(100, 9, 64, torch.device("cpu")).fill_(float("nan"))
    out = torch.empty_like(q)
    for first, end in ((0, 2), (2, 5)):
        plan = segments.plan_pieces(100, LENGTH, case.layout, 9, first, end)
        segments.walk(out, q, places, layers, plan, case.scale, state)
    assert torch.equal(out, whole(case, 1000))


def test_what_does_not_fit_is_refused() -> None:
    case = case_of(torch.float32)
    places, layers = places_of(case)
    for first, end in ((0, 6), (2, 2), (-1, 1)):
        with pytest.raises(ValueError, match="of 5; a walk has at least one"):
            segments.plan_pieces(1, LENGTH, case.layout, 9, first, end)
    plan = segments.plan_pieces(1, LENGTH, case.layout, 9, 0, 5)
    q, state = case.q[-1:], segments.new_state(1, 9, 64, torch.device("cpu"))
    out = torch.empty_like(q)
    far = Places(places.tensors, places.sources, places.ids + (np.arange(len(places.ids)) == 7) * 1000)
    with pytest.raises(ValueError, match=r"block 7 is [0-9]+ of a tensor of"):
        segments.walk(out, q, far, layers, plan, case.scale, state)
    with pytest.raises(ValueError, match="with a layer 1"):
        segments.walk(out, q, places, (LAYER, LAYER, 1), plan, case.scale, state)
    with pytest.raises(ValueError, match="state is"):
        segments.walk(out, q, places, layers, plan, case.scale, state[:, :8].contiguous())
    with pytest.raises(ValueError, match="places of 3 blocks; this walk ends at block 69"):
        segments.walk(out, q, Places(places.tensors, places.sources[:3], places.ids[:3]), layers, plan, 1.0, state)
