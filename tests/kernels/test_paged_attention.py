"""Paged attention against dense float64, and the promise that a row's bits depend on the row alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.kernels.kernel_case import DTYPES, LAYER, TOLERANCE, Case
from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import BlocksBelow

SHAPES = [(9, 3, 64, 16), (4, 2, 64, 8), (4, 4, 80, 32), (32, 1, 16, 64), (8, 2, 128, 256), (2, 1, 256, 16)]


def layout_of(dtype: torch.dtype, kv_heads: int = 3, head_size: int = 64, block_tokens: int = 16) -> KVLayout:
    return KVLayout(2, kv_heads, block_tokens, head_size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "block_tokens"), SHAPES)
@pytest.mark.usefixtures("backend")
def test_equals_dense_attention(
    heads: int, kv_heads: int, head_size: int, block_tokens: int, dtype: torch.dtype
) -> None:
    case = Case(layout_of(dtype, kv_heads, head_size, block_tokens), [5, 300, 700, 1, 256, 257, 33], heads)
    for seq, length in enumerate(case.lengths):
        case.store(seq, 0, length)
    parts = [(0, 0, 5), (1, 299, 300), (2, 600, 700), (3, 0, 1), (4, 0, 256), (5, 217, 257), (6, 33, 33)]
    for part, out in zip(parts, case.attend(parts), strict=True):
        torch.testing.assert_close(out.double(), case.expected(*part), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.usefixtures("backend")
def test_by_hand() -> None:
    case = Case(layout_of(torch.float32, kv_heads=1, head_size=16), [3], num_heads=1)
    case.k.zero_()
    case.v.copy_(torch.tensor([1.0, 3.0, 8.0]).view(3, 1, 1).expand(3, 1, 16))
    case.store(0, 0, 3)
    (out,) = case.attend([(0, 0, 3)])  # equal keys: each row is the mean of the values so far
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([1.0, 2.0, 4.0]))


@pytest.mark.usefixtures("backend")
def test_padding_rows_get_zeros_and_an_empty_batch_is_fine() -> None:
    case = Case(layout_of(torch.float32), [4], num_heads=9)
    case.store(0, 0, 4)
    plan = ops.plan_attention(case.tables, [0, 4], [4], case.layout, 9)
    q = torch.cat([case.q, torch.full((12, 9, 64), float("nan"))])
    out = torch.full_like(q, float("nan"))
    ops.paged_attention(out, q, case.kv_cache, LAYER, plan, case.scale)
    torch.testing.assert_close(out[:4].double(), case.expected(0, 0, 4), rtol=0, atol=5e-6)
    assert torch.equal(out[4:], torch.zeros(12, 9, 64))
    empty = ops.plan_attention(np.zeros((0, 0), np.int32), [0], [], case.layout, 9)
    ops.paged_attention(out[:0], q[:0], case.kv_cache, LAYER, empty, case.scale)


@pytest.mark.usefixtures("backend")
def test_rows_may_be_strided() -> None:
    case = Case(layout_of(torch.float32), [20], num_heads=9)
    case.store(0, 0, 20)
    plan = ops.plan_attention(case.tables, [0, 20], [20], case.layout, 9)
    fused = torch.cat([case.q, case.k, case.v], dim=1)
    out = torch.zeros(20, 11, 64)
    ops.paged_attention(out[:, 1:10], fused[:, :9], case.kv_cache, LAYER, plan, case.scale)
    torch.testing.assert_close(out[:, 1:10].double(), case.expected(0, 0, 20), rtol=0, atol=5e-6)
    assert not out[:, [0, 10]].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "block_tokens"), [(9, 3, 64, 16), (10, 2, 80, 8)])
@pytest.mark.usefixtures("compiled", "threads")
def test_bits_do_not_depend_on_chunks_batch_or_threads(
    heads: int, kv_heads: int, head_size: int, block_tokens: int, dtype: torch.dtype
) -> None:
    length = 600  # two and a bit pieces of 256
    layout = layout_of(dtype, kv_heads, head_size, block_tokens)
    mates = [1, 17, 300, 255, 256, 257, 64, 90, 511, 512, 513, 40, 7, 16, 128]
    case = Case(layout, [length, *mates], heads)
    torch.set_num_threads(1)
    case.store(0, 0, length)
    (whole,) = case.attend([(0, 0, length)])
    for chunk in (1, 7, 16, 64):
        case.kv_cache.fill_(float("nan"))
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            case.store(0, start, stop)
            torch.set_num_threads(1 + (chunk == 64 and start // chunk % 2))
            (out,) = case.attend([(0, start, stop)])
            assert torch.equal(out, whole[start:stop]), f"chunks of {chunk}, rows {start} to {stop}"
    for seq, tokens in enumerate(mates, 1):
        case.store(seq, 0, tokens)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for start, stop in ((0, 600), (590, 600), (599, 600)):
            parts = [(seq, max(0, tokens - 20), tokens) for seq, tokens in enumerate(mates, 1)]
            out = case.attend([*parts[:8], (0, start, stop), *parts[8:]])[8]
            assert torch.equal(out, whole[start:stop]), f"{threads} threads, rows {start} to {stop} in a batch of 16"


@pytest.mark.usefixtures("compiled", "threads")
def test_long_decode_is_split_over_threads_with_the_same_bits() -> None:
    case = Case(layout_of(torch.bfloat16), [3000], num_heads=9)
    case.store(0, 0, 3000)
    torch.set_num_threads(1)
    (alone,) = case.attend([(0, 2999, 3000)])
    torch.set_num_threads(2)
    plan = ops.plan_attention(case.tables, [0, 1], [3000], case.layout, 9)
    out = torch.empty_like(alone)
    ops.paged_attention(out, case.q[2999:], case.kv_cache, LAYER, plan, case.scale)
    assert len(plan.native.splits) > 0
    assert torch.equal(out, alone)
    torch.testing.assert_close(out.double(), case.expected(0, 2999, 3000), rtol=0, atol=TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize(
    ("tables", "starts", "contexts", "heads", "message"),
    [
        ([[0]], [0, 1], [1, 1], 9, "1 rows, query_start 2 and context_lens 2"),
        ([[0]], [0, 1], [1], 10, "num_heads is 10"),
        ([[0]], [0, 1], [1], 3 * 97, "more than 96 each"),
        ([[0]], [1, 2], [2], 9, "begin at 0"),
        ([[0], [0]], [0, 2, 1], [2, 2], 9, "never fall"),
        ([[0]], [0, 5], [4], 9, "5 query rows but only 4"),
        ([[0, 1]], [0, 1], [33], 9, "take 3 blocks of 16; its block table has room for 2"),
        ([[0, -1]], [0, 1], [17], 9, "block -1"),
        ([0], [0, 1], [1], 9, "1 axes"),
    ],
)
def test_impossible_plans_are_refused(
    tables: object, starts: object, contexts: object, heads: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ops.plan_attention(tables, starts, contexts, layout_of(torch.float32), heads)


def moved_below(case: Case) -> tuple[npt.NDArray[np.int32], torch.Tensor]:
    """Tables of the case with every other whole block in a tensor of its own, and that; NaN lies where they were."""
    first, tables = len(case.kv_cache), case.tables.copy()
    below = torch.full((2, first, *case.kv_cache.shape[2:]), float("nan"), dtype=case.layout.dtype).transpose(0, 1)
    for seq, length in enumerate(case.lengths):
        for index in range(seq % 2, length // case.layout.block_tokens, 2):
            block = case.tables[seq, index]
            tables[seq, index] = 2 * first - 1 - block
            below[first - 1 - block] = case.kv_cache[block]
            case.kv_cache[block] = float("nan")
    return tables, below


@pytest.mark.parametrize("how", [{}, {"window": 40}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("block_tokens", [8, 16, 64])
@pytest.mark.usefixtures("backend")
def test_blocks_below_are_read_where_they_lie(block_tokens: int, how: dict[str, float]) -> None:
    case = Case(KVLayout(2, 3, block_tokens, 64, torch.float32), [700, 5, 129], num_heads=9)
    for seq, length in enumerate(case.lengths):
        case.store(seq, 0, length)
    q = torch.cat([case.q[case.rows(0, 690, 700)], case.q[case.rows(1, 4, 5)], case.q[case.rows(2, 0, 129)]])

    def attended(tables: npt.NDArray[np.int32], below: BlocksBelow | None) -> torch.Tensor:
        plan = ops.plan_attention(tables, [0, 10, 11, 140], case.lengths, case.layout, 9, below=below)
        out = torch.full_like(q, float("nan"))
        ops.paged_attention(out, q, case.kv_cache, LAYER, plan, case.scale, **how)  # type: ignore[arg-type]
        return out

    expected = attended(case.tables, None)
    tables, below = moved_below(case)
    found = attended(tables, BlocksBelow(len(case.kv_cache), below))
    assert torch.equal(found, expected)
    assert found.isfinite().all()


def test_blocks_below_that_are_not_there_are_refused() -> None:
    case = Case(layout_of(torch.float32), [40], num_heads=9)
    case.store(0, 0, 40)
    tables, below = moved_below(case)
    first = len(case.kv_cache)
    for message, wrong in (
        (r"names block \d+; the KV cache holds \d blocks, and 1 from", BlocksBelow(first, below[:1])),
        ("KV below is", BlocksBelow(first, below.half())),
        ("KV below is", BlocksBelow(first, below[:, :1])),
        ("KV below is", BlocksBelow(first, below.transpose(4, 5))),
        ("from 9 on are below", BlocksBelow(9, below)),
    ):
        plan = ops.plan_attention(tables, [0, 40], [40], case.layout, 9, below=wrong)
        out = torch.zeros_like(case.q)
        with pytest.raises(ValueError, match=message):
            ops.paged_attention(out, case.q, case.kv_cache, LAYER, plan, case.scale)
        assert not out.any()


def test_impossible_calls_are_refused() -> None:
    case = Case(layout_of(torch.float32), [40], num_heads=9)
    plan = ops.plan_attention(case.tables, [0, 40], [40], case.layout, 9)
    out = torch.zeros_like(case.q)

    def refused(message: str, **changed: object) -> None:
        good = {"out": out, "q": case.q, "kv_cache": case.kv_cache, "layer": LAYER, "plan": plan, "scale": 0.125}
        with pytest.raises(ValueError, match=message):
            ops.paged_attention(**{**good, **changed})  # type: ignore[arg-type]

    refused("layers 0 to 1", layer=2)
    refused("layers 0 to 1", layer=-1)
    refused("scale is 0", scale=0.0)
    refused("scale is nan", scale=float("nan"))
    refused("q is torch.float16", q=case.q.half())
    refused("out is torch.float32", out=out[:39])
    refused("the plan has 40 tokens", q=case.q[:39], out=out[:39])
    refused("plan's layout", kv_cache=Case(layout_of(torch.float32, kv_heads=1), [40], 9).kv_cache)
    refused("kv_cache is", kv_cache=case.kv_cache.transpose(0, 1))
    top = int(case.tables[0, :3].max())
    refused(f"names block {top}; the KV cache holds {top} blocks", kv_cache=case.kv_cache[:top])
    assert not out.any()
