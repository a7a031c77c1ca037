"""Sliding windows, soft-caps, log-sum-exp, and the other row operations of newer families, against their twins."""

from __future__ import annotations

import pytest
import torch

from tournant.kernels import ops, reference
from tournant.kernels.layout import KVLayout

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def step(dtype: torch.dtype, lengths: list[tuple[int, int]], head_size: int = 64, heads: int = 6, kv_heads: int = 2):
    """(context, queries) per sequence, blocks in random order."""
    generator = torch.Generator().manual_seed(1)
    layout = KVLayout(2, kv_heads, 16, head_size, dtype)
    counts = [-(-context // 16) for context, _ in lengths]
    kv_cache = torch.randn(layout.shape(sum(counts)), generator=generator).to(dtype)
    blocks = torch.randperm(sum(counts), generator=generator).to(torch.int32)
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    start = torch.tensor([0, *(queries for _, queries in lengths)]).cumsum(0).to(torch.int32)
    for i, count in enumerate(counts):
        tables[i, :count] = blocks[sum(counts[:i]) : sum(counts[:i]) + count]
    contexts = torch.tensor([context for context, _ in lengths], dtype=torch.int32)
    q = (torch.randn(int(start[-1]), heads, head_size, generator=generator) * 2).to(dtype)
    return q, kv_cache, ops.plan_attention(tables, start, contexts, layout, heads)


LENGTHS = [(1, 1), (700, 1), (300, 40), (513, 513), (1025, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (17, 0.0), (256, 5.0), (300, 0.0), (0, 30.0)])
def test_against_the_twin(dtype: torch.dtype, window: int, softcap: float) -> None:
    q, kv_cache, plan = step(dtype, LENGTHS)
    results = []
    for paged_attention in (ops.paged_attention, reference.paged_attention):
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        paged_attention(out, q, kv_cache, 1, plan, 0.125, window, softcap, lse)
        results.append((out, lse))
    (out, lse), (want, want_lse) = results
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, want_lse, rtol=tolerance / 4, atol=tolerance / 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 20, 256, 400])
def test_a_row_has_the_same_bits_in_every_chunking(dtype: torch.dtype, window: int) -> None:
    length = 600
    q, kv_cache, plan = step(dtype, [(length, length)])
    whole = torch.empty_like(q)
    ops.paged_attention(whole, q, kv_cache, 0, plan, 0.125, window, 20.0)
    for chunk in (1, 7, 64):
        for first in range(length - 70, length, chunk):
            end = min(first + chunk, length)
            tables, start = plan.block_tables, torch.tensor([0, end - first], dtype=torch.int32)
            part = ops.plan_attention(
                tables, start, torch.tensor([end], dtype=torch.int32), plan.layout, plan.num_heads
            )
            out = torch.empty_like(q[first:end])
            ops.paged_attention(out, q[first:end].contiguous(), kv_cache, 0, part, 0.125, window, 20.0)
            assert torch.equal(out, whole[first:end])


def test_bad_options_are_refused() -> None:
    q, kv_cache, plan = step(torch.float32, [(20, 2)])
    for options in ((-1, 0.0, None), (0, -1.0, None), (0, float("inf"), None), (0, 0.0, torch.empty(2, 5))):
        with pytest.raises(ValueError, match=r"window is|softcap|lse is"):
            ops.paged_attention(torch.empty_like(q), q, kv_cache, 0, plan, 0.125, *options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 211, 576])
def test_gelu_mul(dtype: torch.dtype, size: int) -> None:
    gate_up = (torch.randn(5, 2 * size, generator=torch.Generator().manual_seed(2)) * 4).to(dtype)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(ops.gelu_mul(gate_up), reference.gelu_mul(gate_up), rtol=tolerance, atol=tolerance / 8)
    assert torch.equal(ops.gelu_mul(gate_up)[2:3], ops.gelu_mul(gate_up[2:3]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_norm_weights_are_multiplied_before_rounding(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 131, generator=generator).to(dtype)
    weight = torch.randn(131, generator=generator) + 1
    want = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(dtype)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), want)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-6, None), want)
