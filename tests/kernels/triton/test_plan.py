"""Which rows go to which tile, and how KV is split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.triton_interpreter import H200
from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import make_plan
from tournant.kernels.triton.card import A100, Card
from tournant.kernels.triton.plan import device_plan
from tournant.kernels.triton.tiles import decode_shape, decode_splits, prefill_shape, prefill_splits

CPU = torch.device("cpu")


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 500)), min_size=1, max_size=12),
    st.sampled_from([(4, 4), (8, 2), (9, 3), (20, 1)]),
    st.booleans(),
)
def test_every_row_is_in_one_tile(steps: list[tuple[int, int]], heads: tuple[int, int], deterministic: bool) -> None:
    layout = KVLayout(1, heads[1], 16, 64, torch.float16)
    starts = np.concatenate([[0], np.cumsum([queries for queries, _ in steps])])
    contexts = [queries + before for queries, before in steps]
    tables = np.tile(np.arange(64, dtype=np.int32), (len(steps), 1))
    plan = make_plan(tables, starts, contexts, layout, heads[0], deterministic=deterministic)
    made = device_plan(plan, H200, CPU)
    found = []
    for work in (made.decode, made.prefill):
        if work is None:
            continue
        queries = work.shape.block_m // (heads[0] // heads[1])
        assert work.partial is None or len(work.partial) == len(work.tiles) * queries
        for seq, row, rows, first in work.tiles.tolist():
            assert 1 <= rows <= queries
            assert starts[seq] <= row < row + rows <= starts[seq + 1]
            assert first == contexts[seq] - (starts[seq + 1] - row)
            found += range(row, row + rows)
    assert sorted(found) == list(range(starts[-1]))
    assert torch.equal(made.block_tables, torch.from_numpy(tables))
    assert not deterministic or made.decode is None


L40S = Card(arch=89, num_sms=142, shared_bytes=99 << 10)


@pytest.mark.parametrize("card", [H200, A100, L40S])
@pytest.mark.parametrize("head_size", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("kv_bytes", [1, 2, 4])
def test_tiles_fit_the_card(card: Card, head_size: int, kv_bytes: int) -> None:
    for group in (1, 3, 8, 96):
        for shape in (
            decode_shape(card, head_size, kv_bytes, group),
            *(prefill_shape(card, head_size, kv_bytes, group, queries) for queries in (1, 5, 1000)),
        ):
            assert shape.block_m >= max(group, 16)
            assert shape.block_n >= 16
            padded = max(head_size, 16)
            buffers = shape.num_stages - (card.arch < 90)
            rows = 0 if group > 16 else shape.block_m  # with very many heads per KV head they may not fit
            assert 2 * buffers * shape.block_n * padded * kv_bytes + rows * padded * kv_bytes <= card.shared_bytes


def test_splits_fill_the_card_without_a_ragged_last_wave() -> None:
    slots = 2 * H200.num_sms
    for programs in (3, 8, 24, 64, 128, 200, 264, 300):
        waves = programs * decode_splits(H200, programs, 1 << 17) / slots
        assert waves / np.ceil(waves) > 0.9
    assert decode_splits(H200, 1, 1 << 17) > 120
    assert decode_splits(H200, 8, 511) == 1  # too short to pay
    assert decode_splits(H200, 8, 1024) == 4
    assert decode_splits(H200, 4 * slots, 1 << 17) == 1
    assert prefill_splits(H200, 8, 1 << 17) == 16
    assert prefill_splits(H200, 67, 1 << 17) == 1
    assert prefill_splits(H200, 8, 1024) == 4
