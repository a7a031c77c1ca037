"""Attention over chosen blocks against dense attention with the others hidden; bounds against all products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.kernel_case import DTYPES, LAYER, TOLERANCE, Case
from tournant.kernels import block_sparse, ops
from tournant.kernels.block_sparse import RowAttention, RowBlocks
from tournant.kernels.layout import KVLayout
from tournant.kernels.segments import Places

LENGTH = 700
BLOCKS = -(-LENGTH // 16)


def case_of(dtype: torch.dtype) -> tuple[Case, Places]:
    case = Case(KVLayout(2, 3, 16, 64, dtype), [LENGTH], 9)
    case.store(0, 0, LENGTH)
    table = case.tables[0][:BLOCKS].astype(np.int64)
    return case, Places((case.kv_cache,), np.zeros_like(table), table)


def mask_of(count: int, seed: int, share: float = 0.3) -> np.ndarray:
    mask = np.random.default_rng(seed).random((3, BLOCKS)) < share
    mask[:, (LENGTH - count) // 16 :] = True
    return mask


def attended(case: Case, places: Places, mask: np.ndarray, count: int, **options: Any) -> torch.Tensor:
    q = case.q[LENGTH - count :]
    out = torch.full_like(q, float("nan"))
    block_sparse.attend_blocks(out, q, places, (LAYER,), mask, LENGTH, case.layout, case.scale, **options)
    return out


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("compiled")
def test_equals_dense_attention_with_the_other_blocks_hidden(dtype: torch.dtype, count: int) -> None:
    case, places = case_of(dtype)
    mask = mask_of(count, count)
    k, v = (x.double().repeat_interleave(3, 1) for x in (case.k, case.v))
    scores = torch.einsum("qhd,khd->hqk", case.q[LENGTH - count :].double(), k) * case.scale
    position = torch.arange(LENGTH - count, LENGTH)
    scores.masked_fill_(torch.arange(LENGTH) > position[:, None], float("-inf"))
    hidden = torch.from_numpy(~mask).repeat_interleave(3, 0).repeat_interleave(16, 1)[:, :LENGTH]
    scores.masked_fill_(hidden[:, None, :], float("-inf"))
    lse = torch.empty(count, 9)
    out = attended(case, places, mask, count, lse=lse)
    wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1).t(), rtol=0, atol=1e-2)


@pytest.mark.usefixtures("compiled")
def test_with_every_block_it_is_paged_attention_bit_for_bit() -> None:
    case, places = case_of(torch.float32)
    out = attended(case, places, np.ones((3, BLOCKS), np.bool_), 1)
    assert torch.equal(out, case.attend([(0, LENGTH - 1, LENGTH)])[0])


def bounds_of(kv: torch.Tensor) -> torch.Tensor:
    """Of layer LAYER of blocks: [kv_heads, blocks, 2, size], axes as a pool keeps them."""
    return block_sparse.key_bounds(kv, kv.dtype)[:, LAYER].transpose(0, 1).contiguous()


@pytest.mark.usefixtures("backend")
def test_bounds_are_above_every_score_and_reached() -> None:
    case, _ = case_of(torch.float32)
    table = torch.from_numpy(case.tables[0][: LENGTH // 16]).long()
    places = np.arange(LENGTH // 16)
    found = block_sparse.score_bounds(case.q[-1], bounds_of(case.kv_cache[table]), RowBlocks(places), 0.5, 3.0)
    keys = case.k[: LENGTH // 16 * 16].repeat_interleave(3, 1)
    scores = torch.tanh(torch.einsum("hd,khd->hk", case.q[-1], keys) * 0.5 / 3.0) * 3.0
    assert (found >= scores.view(9, -1, 16).amax(-1) - 1e-4).all()
    alone = case.kv_cache[table[:1]].clone()
    alone[:, :, 0] = alone[:, :, 0, :, :1]  # all keys of a block alike: the bound is their score
    same = block_sparse.score_bounds(case.q[-1], bounds_of(alone), RowBlocks(np.zeros(1, np.int64)), case.scale)
    product = torch.einsum("hd,hd->h", case.q[-1], alone[0, LAYER, 0, :, 0].repeat_interleave(3, 0)) * case.scale
    torch.testing.assert_close(same[:, 0], product, rtol=0, atol=1e-4)


@dataclass(frozen=True)
class Choosing:
    """Random bounds of 300 places, and a sequence that has some of them in some order."""

    heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype
    blocks: int
    count: int

    def choose(self) -> tuple[torch.Tensor, block_sparse.BlockChoice]:
        """Bounds of the scores, and the choice by them."""
        generator = torch.Generator().manual_seed(self.blocks)
        bounds = torch.randn(self.kv_heads, 300, 2, self.size, generator=generator).sort(2).values.to(self.dtype)
        q = torch.randn(self.heads, self.size, generator=generator).to(self.dtype)
        random = np.random.default_rng(self.blocks)
        places = np.concatenate([np.arange(64), random.permutation(np.arange(64, 300))])[: self.blocks].copy()
        places[random.permutation(self.blocks)[: self.blocks // 5]] = -1
        row = RowBlocks(places)
        found = block_sparse.score_bounds(q, bounds, row, 0.3, 20.0 if self.heads == 4 else 0.0)
        kept = found[:, torch.from_numpy(places >= 0)].clone()
        return kept, block_sparse.choose_blocks(found, row, self.kv_heads, self.count)


@pytest.mark.parametrize(
    "case",
    [
        Choosing(9, 3, 64, torch.bfloat16, 300, 60),
        Choosing(9, 3, 64, torch.float32, 129, 1),
        Choosing(9, 3, 64, torch.float16, 37, 30),
        Choosing(4, 4, 256, torch.float32, 70, 20),
        Choosing(7, 1, 16, torch.bfloat16, 261, 100),
        Choosing(32, 2, 128, torch.bfloat16, 5, 4),
        Choosing(2, 2, 32, torch.float32, 1, 0),
    ],
    ids=str,
)
@pytest.mark.usefixtures("compiled")
def test_chooses_as_its_twin(case: Choosing) -> None:
    found, choice = case.choose()
    ops.select_backend("torch")
    try:
        expected, wanted = case.choose()
    finally:
        ops.select_backend("c")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (choice.mask == wanted.mask).all()
    assert (choice.read == wanted.read).all()
    np.testing.assert_allclose(choice.most, wanted.most, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(choice.missed, wanted.missed, rtol=1e-3, atol=1e-6)


@pytest.mark.usefixtures("backend")
def test_the_nearest_to_a_head_s_best_are_chosen_and_the_first_of_equal_ones() -> None:
    found = torch.tensor([[9.0, 1.0, 8.0, 8.0, 0.0, 8.0], [0.0, 5.0, 1.0, 1.0, 7.0, 1.0]])  # one group
    row = RowBlocks(np.array([3, 4, 5, 6, -1, 7]))
    choice = block_sparse.choose_blocks(found.clone(), row, 1, 3)
    assert choice.mask.tolist() == [[True, True, True, False, True, False]]
    left_out = torch.tensor([[8.0, 8.0], [1.0, 1.0]])
    np.testing.assert_allclose(choice.most, left_out.logsumexp(1), rtol=1e-5)
    known = found[:, [0, 1, 2, 3, 5]].logsumexp(1)
    np.testing.assert_allclose(choice.missed, torch.exp(left_out.logsumexp(1) - known), rtol=1e-5)
    assert choice.read.tolist() == [True, True, True, False, False, False]
    lse = torch.tensor([8.0, 9.0])
    assert choice.missed_at_most(lse, 16) == pytest.approx(32 / 33)
    everything = block_sparse.choose_blocks(found.clone(), row, 1, 5)
    assert everything.mask.all()
    assert everything.missed.tolist() == [0.0, 0.0]
    assert everything.missed_at_most(lse, 16) == 0.0


class Row:
    """The last row of a case whose blocks, but for the last two, lie below in a tensor of their own."""

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        self.case, _ = case_of(dtype)
        table = self.case.tables[0][:BLOCKS].astype(np.int64)
        cache = self.case.kv_cache.clone()
        below = cache[torch.from_numpy(table)].transpose(0, 1).contiguous().transpose(0, 1)
        is_below = np.arange(BLOCKS) < BLOCKS - 2
        cache[torch.from_numpy(table[is_below])] = float("nan")
        bounds = block_sparse.key_bounds(below.nan_to_num(), dtype).permute(1, 2, 0, 3, 4).contiguous()
        self.bounds, self.count = bounds, count
        self.blocks = RowBlocks(np.where(is_below, np.arange(BLOCKS), -1))
        self.places = Places((cache, below), is_below.astype(np.int64), np.where(is_below, np.arange(BLOCKS), table))
        self.plan = block_sparse.plan_blocks([2 + count] * 3, LENGTH, 1, self.case.layout, 9)
        self.q = self.case.q[-1:].contiguous()

    def attention(self, least_mass: float = 0.0) -> RowAttention:
        return RowAttention(self.blocks, self.places, self.bounds, self.plan, 9, self.count, least_mass)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("compiled", "threads")
def test_one_call_does_what_the_three_do(dtype: torch.dtype, softcap: float) -> None:
    row = Row(dtype, 10)
    scale = row.case.scale
    found = block_sparse.score_bounds(row.q[0], row.bounds[LAYER], row.blocks, scale, softcap)
    choice = block_sparse.choose_blocks(found, row.blocks, 3, row.count)
    expected, missed = torch.empty_like(row.q), float(choice.missed.astype(np.float64).mean())
    where = (row.places, (LAYER, LAYER), choice.mask.copy(), LENGTH, row.case.layout, scale)
    block_sparse.attend_blocks(expected, row.q, *where, softcap=softcap)
    assert 0 < missed < 1
    for number in (1, 2):
        torch.set_num_threads(number)
        out = torch.full_like(row.q, float("nan"))
        assert Row(dtype, 10).attention().attend(out, row.q, LAYER, scale, softcap) == pytest.approx(missed)
        assert torch.equal(out, expected)
    out = torch.full_like(row.q, 3.0)
    assert row.attention(1.0 - missed / 2).attend(out, row.q, LAYER, scale, softcap) == pytest.approx(missed)
    assert bool((out == 3.0).all())  # too much would be missed: nothing was attended to


@pytest.mark.usefixtures("compiled")
def test_one_call_over_every_block_is_paged_attention() -> None:
    row = Row(torch.float32, BLOCKS - 2)
    out = torch.empty_like(row.q)
    assert row.attention(1.0).attend(out, row.q, LAYER, row.case.scale) == 0.0
    assert torch.equal(out, row.case.attend([(0, LENGTH - 1, LENGTH)])[0])


@pytest.mark.usefixtures("compiled")
def test_rows_that_cannot_be_are_refused() -> None:
    row = Row(torch.float32, 10)
    places, far = row.places, row.places.ids.copy()
    far[3] = 1000
    for message, wrong in (
        ("blocks that are not there", {"places": Places(places.tensors, places.sources, far)}),
        ("are not of 44 blocks", {"places": Places(places.tensors, places.sources[:40], places.ids[:40])}),
        ("are not of 44 blocks in 1 tensors", {"places": Places(places.tensors[:1], places.sources, places.ids)}),
        ("a place is", {"places": Places((places.tensors[0], row.bounds), places.sources, places.ids)}),
        ("the plan is for", {"count": 11}),
        ("1000 blocks to choose", {"count": 1000}),
        ("bounds is", {"bounds": row.bounds.transpose(3, 4)}),
        ("place 41 of 3", {"bounds": row.bounds[:, :, :3].contiguous()}),
    ):
        changed = Row(torch.float32, 10)
        for name, value in wrong.items():
            setattr(changed, name, value)
        with pytest.raises(ValueError, match=message):
            changed.attention()
    attention, out = row.attention(), torch.zeros_like(row.q)
    for message, arguments in (
        ("q is", (out, row.q[:, :3], LAYER, 0.1)),
        ("out is", (out.double(), row.q, LAYER, 0.1)),
        ("layer is 9; there are 0 to", (out, row.q, 9, 0.1)),
    ):
        with pytest.raises(ValueError, match=message):
            attention.attend(*arguments)  # type: ignore[arg-type]
    assert not out.any()


@pytest.mark.usefixtures("compiled")
def test_what_cannot_be_is_refused() -> None:
    case, places = case_of(torch.float32)
    with pytest.raises(ValueError, match="no head may leave one out"):
        attended(case, places, np.zeros((3, BLOCKS), np.bool_), 1)
    other = block_sparse.plan_blocks([3, 3, 3], LENGTH, 1, case.layout, 9)
    with pytest.raises(ValueError, match=r"the plan is for \[3, 3, 3\] blocks"):
        attended(case, places, np.ones((3, BLOCKS), np.bool_), 1, plan=other)
    with pytest.raises(ValueError, match="has place 44; there are bounds of 44"):
        block_sparse.score_bounds(case.q[-1], torch.zeros(3, 44, 2, 64), RowBlocks(np.array([44])), 0.1)
    with pytest.raises(ValueError, match=r"3 blocks to choose of dense .*; 2 can be"):
        block_sparse.choose_blocks(torch.zeros(9, 3), RowBlocks(np.array([0, -1, 1])), 3, 3)
    with pytest.raises(ValueError, match="mask is bool"):
        attended(case, places, np.ones((2, BLOCKS), np.bool_), 1)
    ops.select_backend("torch")
    try:
        with pytest.raises(ValueError, match="the C back end"):
            attended(case, places, np.ones((3, BLOCKS), np.bool_), 1)
    finally:
        ops.select_backend("c")
