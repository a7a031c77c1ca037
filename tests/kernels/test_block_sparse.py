"""Attention over chosen blocks against dense attention with the others hidden; bounds against all products."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.kernel_case import DTYPES, LAYER, TOLERANCE, Case
from tournant.kernels import block_sparse, ops
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


def attended(case: Case, places: Places, mask: np.ndarray, count: int, lse: torch.Tensor | None = None) -> torch.Tensor:
    q = case.q[LENGTH - count :]
    out = torch.full_like(q, float("nan"))
    block_sparse.attend_blocks(out, q, places, (LAYER,), mask, LENGTH, case.layout, case.scale, lse=lse)
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
    out = attended(case, places, mask, count, lse)
    wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1).t(), rtol=0, atol=1e-2)


@pytest.mark.usefixtures("compiled")
def test_with_every_block_it_is_paged_attention_bit_for_bit() -> None:
    case, places = case_of(torch.float32)
    out = attended(case, places, np.ones((3, BLOCKS), np.bool_), 1)
    assert torch.equal(out, case.attend([(0, LENGTH - 1, LENGTH)])[0])


def test_bounds_are_above_every_product_and_reached() -> None:
    case, _ = case_of(torch.float32)
    table = torch.from_numpy(case.tables[0][: LENGTH // 16]).long()
    bounds = block_sparse.key_bounds(case.kv_cache[table])[:, LAYER].permute(1, 2, 0, 3)
    found = block_sparse.score_bounds(case.q[-1], bounds)
    keys = case.k[: LENGTH // 16 * 16].repeat_interleave(3, 1)
    most = torch.einsum("hd,khd->hk", case.q[-1], keys).view(9, -1, 16).amax(-1)
    assert (found >= most - 1e-4).all()
    alone = case.kv_cache[table[:1]].clone()
    alone[:, :, 0] = alone[:, :, 0, :, :1]  # all keys of a block alike: the bound is their product
    same = block_sparse.score_bounds(case.q[-1], block_sparse.key_bounds(alone)[:, LAYER].permute(1, 2, 0, 3))
    product = torch.einsum("hd,hd->h", case.q[-1], alone[0, LAYER, 0, :, 0].repeat_interleave(3, 0))
    torch.testing.assert_close(same[:, 0], product, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("compiled")
def test_what_cannot_be_is_refused() -> None:
    case, places = case_of(torch.float32)
    with pytest.raises(ValueError, match="no head may leave one out"):
        attended(case, places, np.zeros((3, BLOCKS), np.bool_), 1)
    with pytest.raises(ValueError, match="mask is bool"):
        attended(case, places, np.ones((2, BLOCKS), np.bool_), 1)
    ops.select_backend("torch")
    try:
        with pytest.raises(ValueError, match="the C back end"):
            attended(case, places, np.ones((3, BLOCKS), np.bool_), 1)
    finally:
        ops.select_backend("c")
