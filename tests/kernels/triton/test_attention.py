"""paged_decode, paged_prefill, merge_splits and merge_states under the interpreter against their twins.

The interpreter multiplies bfloat16 wrongly, so float16 stands for both; fp8 KV is multiplied in float16 anyway, and is
tested with bfloat16 queries.
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers.triton_interpreter import KERNELS
from tests.kernels.kernel_case import LAYER
from tests.kernels.triton.paged_case import PagedCase
from tournant.kernels import reference
from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import make_plan

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
TOLERANCE = {FP32: 5e-6, FP16: 2e-3, BF16: 2e-2}

# dtype, form of KV, heads, KV heads, head size, block tokens, window, soft-cap: every pair of neighbouring columns'
# values that people use, each value several times.
CASES = [
    (FP16, "plain", 9, 3, 64, 16, 0, 0.0),
    (FP16, "plain", 4, 1, 128, 64, 0, 0.0),
    (FP16, "plain", 8, 1, 80, 8, 33, 0.0),
    (FP16, "plain", 2, 2, 96, 32, 0, 5.0),
    (FP16, "plain", 4, 2, 256, 128, 100, 5.0),
    (FP16, "plain", 20, 1, 64, 256, 1, 0.0),
    (FP16, "plain", 2, 1, 16, 64, 64, 0.0),
    (FP32, "plain", 4, 2, 64, 8, 0, 0.0),
    (FP32, "plain", 6, 2, 80, 64, 0, 0.0),
    (FP32, "plain", 1, 1, 128, 16, 40, 30.0),
    (FP32, "plain", 2, 1, 256, 256, 0, 0.0),
    (FP32, "plain", 7, 1, 96, 128, 0, 0.0),
    (BF16, "e4m3", 4, 2, 128, 16, 0, 0.0),
    (FP16, "e4m3", 8, 2, 64, 64, 33, 0.0),
    (FP32, "e4m3", 2, 2, 80, 32, 0, 5.0),
    (BF16, "e5m2", 4, 1, 64, 8, 0, 5.0),
    (FP16, "e5m2", 3, 1, 96, 128, 50, 0.0),
    (FP32, "e5m2", 2, 1, 128, 256, 0, 0.0),
]
PARTS = [(0, 0, 1), (1, 69, 70), (2, 260, 300), (1, 0, 70), (2, 298, 300), (3, 128, 129)]


@pytest.mark.parametrize(
    ("dtype", "form", "heads", "kv_heads", "head_size", "block_tokens", "window", "softcap"), CASES
)
def test_equals_its_twin(
    dtype: torch.dtype,
    form: str,
    heads: int,
    kv_heads: int,
    head_size: int,
    block_tokens: int,
    window: int,
    softcap: float,
) -> None:
    case = PagedCase(KVLayout(2, kv_heads, block_tokens, head_size, dtype), [1, 70, 300, 129], heads, form)
    out, lse, plan = case.run(PARTS, window=window, softcap=softcap)
    wanted, wanted_lse = case.twin(PARTS, window=window, softcap=softcap)
    assert plan.native.decode is not None
    assert plan.native.prefill is not None
    torch.testing.assert_close(out.float(), wanted, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=2e-5 if form == "plain" else 2e-3)


@pytest.mark.parametrize(("queries", "dtype"), [(1, FP32), (9, FP16)])
@pytest.mark.parametrize("window", [0, 700])
def test_split_kv_equals_its_twin(queries: int, dtype: torch.dtype, window: int) -> None:
    case = PagedCase(KVLayout(2, 1, 64, 64, dtype), [1500, 5], 2)
    parts = [(0, 1500 - queries, 1500), (1, 5 - min(queries, 5), 5)]  # the short one leaves most splits empty
    out, lse, plan = case.run(parts, window=window)
    work = plan.native.decode or plan.native.prefill
    assert work.num_splits > 2
    wanted, wanted_lse = case.twin(parts, window=window)
    torch.testing.assert_close(out.float(), wanted, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=2e-5)


def test_edges_of_context_and_window_at_every_alignment() -> None:
    case = PagedCase(KVLayout(2, 1, 8, 16, FP32), [100], 1)
    for stop in range(60, 100, 2):
        window = stop // 2 - 6  # 24 to 43: from the least that lets all 9 rows see a whole tile
        parts = [(0, stop - 9, stop)]
        out, _, plan = case.run(parts, window=window)
        assert (plan.native.prefill.shape.block_m, plan.native.prefill.shape.block_n) == (16, 16)
        torch.testing.assert_close(out, case.twin(parts, window=window)[0], rtol=0, atol=5e-6)


def test_strided_rows_and_padding_rows() -> None:
    case = PagedCase(KVLayout(2, 2, 16, 64, FP32), [20], 4)
    q, plan = case.step([(0, 18, 20)])
    fused = torch.full((5, 8, 64), float("nan"))
    fused[:2, :4] = q
    out, lse = torch.full((5, 6, 64), float("nan")), torch.full((5, 4), float("nan"))
    KERNELS.paged_attention(out[:, 1:5], fused[:, :4], case.kv_cache, LAYER, plan, case.scale, lse=lse)
    wanted, wanted_lse = case.twin([(0, 18, 20)])
    torch.testing.assert_close(out[:2, 1:5], wanted, rtol=0, atol=5e-6)
    torch.testing.assert_close(lse[:2], wanted_lse, rtol=0, atol=2e-5)
    assert torch.equal(out[2:, 1:5], torch.zeros(3, 4, 64))
    assert lse[2:].eq(float("-inf")).all()
    assert out[:, [0, 5]].isnan().all()


@pytest.mark.parametrize("max_blocks", [3, 200])  # without and with split KV
def test_a_static_plan_serves_one_step_after_another(max_blocks: int) -> None:
    case = PagedCase(KVLayout(2, 2, 16, 64, FP16), [20, 1, 31], 4)
    static = KERNELS.static_plan(case.layout, 4, 4, max_blocks, torch.device("cpu"))
    assert static.decode is not None
    assert (static.decode.num_splits > 1) == (max_blocks > 3)
    pointers = static.block_tables.data_ptr(), static.decode.tiles.data_ptr()
    nothing = case.q[:0], make_plan(torch.empty(0, 0), [0], [], case.layout, 4)
    for parts in ([(0, 19, 20), (1, 0, 1), (2, 30, 31)], [(2, 16, 17)], []):
        q, plan = case.step(parts) if parts else nothing
        KERNELS.refill(static, plan)
        plan.native = static
        padded = torch.cat([q, torch.full((4 - len(q), 4, 64), 7.0, dtype=FP16)])
        out = torch.full_like(padded, float("nan"))
        plan.num_tokens = 4  # a graph computes all rows of its bucket
        KERNELS.paged_attention(out, padded, case.kv_cache, LAYER, plan, case.scale)
        if parts:
            torch.testing.assert_close(out[: len(q)].float(), case.twin(parts)[0], rtol=0, atol=2e-3)
        assert torch.equal(out[len(q) :], torch.zeros(4 - len(q), 4, 64, dtype=FP16))
    assert (static.block_tables.data_ptr(), static.decode.tiles.data_ptr()) == pointers


def test_an_empty_step_is_fine() -> None:
    layout = KVLayout(2, 2, 16, 64, FP16)
    out = torch.full((3, 4, 64), float("nan"), dtype=FP16)
    plan = make_plan(torch.empty(0, 0), [0], [], layout, 4)
    KERNELS.paged_attention(out, out.clone(), torch.empty(layout.shape(1), dtype=FP16), LAYER, plan, 0.1)
    assert not out.any()


def test_what_does_not_fit_a_static_plan_is_refused() -> None:
    case = PagedCase(KVLayout(2, 2, 16, 64, FP16), [20, 20, 20], 4)
    static = KERNELS.static_plan(case.layout, 4, 2, 3, torch.device("cpu"))
    for parts in ([(0, 19, 20), (1, 19, 20), (2, 19, 20)], [(0, 18, 20)]):
        with pytest.raises(ValueError, match="does not fit a static plan of 2 decoding sequences of 3 blocks"):
            KERNELS.refill(static, case.step(parts)[1])


def test_deterministic_rows_do_not_depend_on_their_step() -> None:
    case = PagedCase(KVLayout(2, 2, 16, 64, FP32), [200, 90], 4)
    whole = case.run([(0, 0, 200), (1, 0, 90)], deterministic=True)[0]
    for start, stop in ((0, 7), (7, 100), (100, 199), (199, 200)):
        part = case.run([(1, 88, 90), (0, start, stop)], deterministic=True)[0]
        assert torch.equal(part[2:], whole[start:stop])
        assert torch.equal(part[:2], whole[288:290])


def test_offsets_beyond_32_bits() -> None:
    layout = KVLayout(2, 1, 256, 256, FP16)
    elements = layout.block_bytes // 2
    blocks = 2**31 // elements + 2  # virtual memory: only pages that are written exist
    kv_cache = torch.empty(layout.shape(blocks), dtype=FP16)
    k, v, q = (torch.randn(3, heads, 256).to(FP16) for heads in (1, 1, 2))
    slots = torch.arange(3) + (blocks - 1) * 256
    KERNELS.store_kv(k, v, kv_cache, LAYER, slots)
    plan = make_plan([[blocks - 1]], [0, 3], [3], layout, 2)
    out, wanted = torch.empty_like(q), torch.empty_like(q)
    KERNELS.paged_attention(out, q, kv_cache, LAYER, plan, 0.1)
    reference.paged_attention(wanted, q, kv_cache, LAYER, plan, 0.1)
    torch.testing.assert_close(out, wanted, rtol=0, atol=2e-3)
    staging = torch.empty_like(kv_cache[:1])
    KERNELS.gather_blocks(kv_cache, torch.tensor([blocks - 1]), staging)
    assert torch.equal(staging[0, LAYER, :, :, :3], kv_cache[-1, LAYER, :, :, :3])
    assert torch.equal(staging[0, LAYER, 0, 0, :3], k[:, 0])


def test_merged_halves_equal_the_whole() -> None:
    case = PagedCase(KVLayout(2, 2, 16, 64, FP32), [100], 4)
    whole, whole_lse, _ = case.run([(0, 99, 100)])
    q = case.q[99:100]
    parts = []
    for tables, context in ((case.tables[:, :4], 64), (case.tables[:, 4:], 36)):
        out, lse = torch.empty_like(q), torch.empty(1, 4)
        plan = make_plan(tables, [0, 1], [context], case.layout, 4)
        KERNELS.paged_attention(out, q, case.kv_cache, LAYER, plan, case.scale, lse=lse)
        parts += [out, lse]
    out, lse = parts[0], parts[1]
    KERNELS.merge_states(out, lse, *parts)  # in place
    torch.testing.assert_close(out, whole, rtol=0, atol=5e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("dtype", "heads", "head_size"), [(FP16, 3, 80), (BF16, 33, 64), (FP32, 5, 256)])
def test_merge_states_equals_its_twin(dtype: torch.dtype, heads: int, head_size: int) -> None:
    a, b = (torch.randn(4, heads + 2, head_size).to(dtype)[:, 1:-1] for _ in range(2))
    lse_a, lse_b = torch.randn(4, heads) * 30, torch.randn(4, heads) * 30
    for lse, side, row in ((lse_a, a, 0), (lse_b, b, 1), (lse_a, a, 2), (lse_b, b, 2)):
        lse[row] = float("-inf")
        side[row] = float("nan")
    out, wanted = torch.full((4, heads, head_size), 9, dtype=dtype), torch.empty(4, heads, head_size, dtype=dtype)
    lse, wanted_lse = torch.empty(4, heads), torch.empty(4, heads)
    KERNELS.merge_states(out, lse, a, lse_a, b, lse_b)
    reference.merge_states(wanted, wanted_lse, a, lse_a, b, lse_b)
    torch.testing.assert_close(out, wanted, rtol=1e-2 if dtype == BF16 else 2e-3, atol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(out[2], torch.zeros(heads, head_size, dtype=dtype))
