"""paged_walk under the interpreter: the bits of one call, wherever blocks lie and walks are cut."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.triton_interpreter import KERNELS
from tests.kernels.kernel_case import LAYER
from tests.kernels.triton.paged_case import PagedCase
from tournant.kernels import ops, segments
from tournant.kernels.layout import KVLayout
from tournant.kernels.segments import Places

LENGTH, HEADS = 600, 4  # three pieces
FP16, FP32 = torch.float16, torch.float32


def case_of(form: str = "plain", dtype: torch.dtype = FP16, block_tokens: int = 16) -> PagedCase:
    return PagedCase(KVLayout(2, 2, block_tokens, 64, dtype), [LENGTH], HEADS, form)


def places_of(case: PagedCase) -> tuple[Places, tuple[int, ...]]:
    """Blocks in the cache, in a tensor with layers outermost in memory, and in a ring of one layer."""
    generator = np.random.default_rng(1)
    table = case.tables[0][: -(-LENGTH // case.layout.block_tokens)].astype(np.int64)
    sources, order = generator.integers(0, 3, len(table)), generator.permutation(len(table))
    shape = case.kv_cache.shape
    below = torch.zeros((shape[1], len(table), *shape[2:])).to(case.kv_cache.dtype).transpose(0, 1)
    ring = torch.zeros((len(table), 1, *shape[2:])).to(case.kv_cache.dtype)
    for block, source, place in zip(table, sources, order, strict=True):
        if source == 1:
            below[place] = case.kv_cache[block]
        elif source == 2:
            ring[place, 0] = case.kv_cache[block, LAYER]
    ids = np.where(sources == 0, table, order).astype(np.int64)
    return Places((case.kv_cache, below, ring), sources.astype(np.int64), ids), (LAYER, LAYER, 0)


def walk(
    case: PagedCase, state: torch.Tensor, pieces: tuple[int, int], *, goes_on: bool = False, on_cpu: bool, **how: Any
) -> torch.Tensor:
    """The last rows, as many as there are states, over pieces; by the CPU's kernels or Triton's."""
    q = case.q[LENGTH - len(state) :]
    out, (places, layers) = torch.full_like(q, float("nan")), places_of(case)
    plan = segments.plan_pieces(len(q), LENGTH, KVLayout(1, 2, case.layout.block_tokens, 64, FP16), HEADS, *pieces)
    options = {"goes_on": goes_on, "on_cpu": on_cpu, **how}
    ops.select_backend("triton")
    try:
        segments.walk(out, q, places, layers, plan, case.scale, state, **options)
    finally:
        ops.select_backend("c")
    return out


def states(count: int) -> torch.Tensor:
    return segments.new_state(count, HEADS, 64, torch.device("cpu")).fill_(float("nan"))


@pytest.mark.parametrize(
    ("count", "cuts", "how", "form"),
    [
        (1, [0, 3], {}, "plain"),
        (40, [0, 1, 3], {}, "plain"),
        (40, [0, 2, 3], {"window": 270}, "plain"),
        (90, [0, 1, 2, 3], {"softcap": 20.0}, "plain"),
        (7, [0, 1, 3], {"window": 17, "softcap": 5.0}, "plain"),
        (5, [0, 2, 3], {}, "e5m2"),
    ],
    ids=str,
)
def test_the_bits_are_those_of_one_call(count: int, cuts: list[int], how: dict[str, float], form: str) -> None:
    case = case_of(form)
    q, plan = case.step([(0, LENGTH - count, LENGTH)], deterministic=True)
    wanted, state = torch.full_like(q, float("nan")), states(count)
    KERNELS.paged_attention(wanted, q, case.kv_cache, LAYER, plan, case.scale, **how)  # type: ignore[arg-type]
    for pieces in itertools.pairwise(cuts):
        out = walk(case, state, pieces, on_cpu=False, **how)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(("dtype", "block_tokens"), [(FP32, 64), (FP16, 256)])
def test_other_blocks_and_dtypes(dtype: torch.dtype, block_tokens: int) -> None:
    case, state = case_of("plain", dtype, block_tokens), states(3)
    for pieces in ((0, 1), (1, 3)):
        out = walk(case, state, pieces, on_cpu=False)
    wanted = case.twin([(0, LENGTH - 3, LENGTH)])[0]
    torch.testing.assert_close(out.float(), wanted, rtol=0, atol=5e-6 if dtype == FP32 else 2e-3)


@pytest.mark.parametrize("how", [{}, {"window": 400, "softcap": 10.0}], ids=str)
def test_it_goes_on_where_the_cpu_stopped_and_in_any_order(how: dict[str, float]) -> None:
    case, state = case_of(), states(9)
    state[..., -segments.PARTIAL_EXTRA + 1] = 0.0
    walk(case, state, (1, 2), on_cpu=True, **how)
    walk(case, state, (0, 1), goes_on=True, on_cpu=False, **how)
    out = walk(case, state, (2, 3), goes_on=True, on_cpu=False, **how)
    wanted = case.twin([(0, LENGTH - 9, LENGTH)], **how)[0]
    torch.testing.assert_close(out.float(), wanted, rtol=0, atol=2e-3)
