"""Norm, gated activations, rotation, stores in every form and block copies under the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.triton_interpreter import KERNELS
from tests.kernels.kernel_case import DTYPES
from tournant.kernels import reference
from tournant.kernels.layout import KVLayout

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
ULP = {FP32: 2e-6, FP16: 1e-3, BF16: 2e-2}  # relative, one unit in the last place; bfloat16: see triton_interpreter
LAYER, BLOCKS = 1, 5


@pytest.mark.parametrize(
    ("dtype", "width", "with_residual", "wide_weight"),
    [
        (FP16, 576, False, False),
        (BF16, 33, True, False),
        (FP32, 1000, True, True),
        (BF16, 640, False, True),
        (FP32, 16, False, False),
        (FP16, 96, True, True),
    ],
)
def test_rms_norm(dtype: torch.dtype, width: int, with_residual: bool, wide_weight: bool) -> None:
    x = torch.randn(3, width + 8).to(dtype)[:, 8:]
    weight = torch.randn(width).to(FP32 if wide_weight else dtype)
    residual = torch.randn(3, width).to(dtype) if with_residual else None
    twins = None if residual is None else residual.clone()
    got = KERNELS.rms_norm(x, weight, 1e-5, residual)
    wanted = reference.rms_norm(x, weight, 1e-5, twins)
    torch.testing.assert_close(got, wanted, rtol=ULP[dtype], atol=1e-6)
    if residual is not None and twins is not None:
        torch.testing.assert_close(residual, twins, rtol=ULP[dtype], atol=1e-6)


def test_rms_norm_of_each_head() -> None:
    fused, weight = torch.randn(3, 7, 80), torch.randn(80)
    got = KERNELS.rms_norm(fused[:, 2:6], weight, 1e-5, None)
    torch.testing.assert_close(got, reference.rms_norm(fused[:, 2:6], weight, 1e-5, None), rtol=2e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(("dtype", "width"), [(FP16, 3), (BF16, 1030), (FP32, 1024)])
def test_gated_activations(dtype: torch.dtype, width: int) -> None:
    gate_up = (torch.randn(3, 2 * width + 8) * 4).to(dtype)[:, 8:]
    tolerance = {"rtol": ULP[dtype], "atol": 1e-5}
    torch.testing.assert_close(KERNELS.silu_mul(gate_up), reference.silu_mul(gate_up), **tolerance)
    torch.testing.assert_close(KERNELS.gelu_mul(gate_up), reference.gelu_mul(gate_up), **tolerance)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gated_activations_at_the_ends() -> None:
    gate_up = torch.tensor([[0.0, -1e4, 1e4, 2.0, 2.0, 2.0]])
    for function in (KERNELS.silu_mul, KERNELS.gelu_mul):
        torch.testing.assert_close(function(gate_up), torch.tensor([[0.0, 0.0, 2e4]]))


def rows_of(dtype: torch.dtype, head_size: int, heads: int = 5, kv_heads: int = 3) -> tuple[torch.Tensor, ...]:
    fused = torch.randn(21, heads + 2 * kv_heads, head_size).to(dtype)
    return fused.split((heads, kv_heads, kv_heads), dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (80, 32), (64, 20), (96, 0), (256, 256)])
def test_rope_and_rope_store_kv(dtype: torch.dtype, head_size: int, rotary_dim: int) -> None:
    q, k, v = rows_of(dtype, head_size)
    angles = torch.rand(30, rotary_dim // 2) * 100
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(30, (21,), dtype=torch.int32 if head_size == 64 else torch.int64)
    slots = torch.randperm(BLOCKS * 8)[:21]
    slots[[4, 9]] = -1
    layout = KVLayout(2, 3, 8, head_size, dtype)
    kv_cache, twins = (torch.full(layout.shape(BLOCKS), 7.0, dtype=dtype) for _ in range(2))
    got, wanted = q.contiguous(), q.contiguous()
    KERNELS.rope_store_kv(got, k, v, cos_sin, positions, kv_cache, LAYER, slots)
    reference.rope_store_kv(wanted, k, v, cos_sin, positions, twins, LAYER, slots)
    torch.testing.assert_close(got, wanted, rtol=ULP[dtype], atol=ULP[dtype])
    torch.testing.assert_close(kv_cache, twins, rtol=ULP[dtype], atol=ULP[dtype])
    assert torch.equal(kv_cache[:, 1 - LAYER], torch.full_like(kv_cache[:, 0], 7.0))

    positions[3], positions[8] = -1, 30  # left alone
    out, wanted = torch.full_like(got, 5.0), torch.full_like(got, 5.0)
    KERNELS.rope(q, cos_sin, positions, out)
    reference.rope(q, cos_sin, positions, wanted)
    torch.testing.assert_close(out, wanted if rotary_dim else q, rtol=ULP[dtype], atol=ULP[dtype])


def test_slots_and_positions_out_of_range_write_nothing() -> None:
    q, k, v = rows_of(FP32, 64)
    kv_cache = torch.zeros(KVLayout(2, 3, 8, 64, FP32).shape(BLOCKS))
    before = q.clone()
    slots, positions = torch.full((21,), BLOCKS * 8), torch.zeros(21, dtype=torch.int64)
    slots[::2], slots[0], positions[0] = -5, 1, 10
    KERNELS.rope_store_kv(q, k, v, torch.ones(10, 64), positions, kv_cache, LAYER, slots)
    slots[0] = BLOCKS * 8
    KERNELS.store_kv(k, v, kv_cache, LAYER, slots)
    assert torch.equal(q, before)
    assert not kv_cache.any()


@pytest.mark.parametrize(("dtype", "head_size", "block_tokens"), [(BF16, 64, 16), (FP16, 80, 8), (FP32, 256, 64)])
def test_store_kv(dtype: torch.dtype, head_size: int, block_tokens: int) -> None:
    _, k, v = rows_of(dtype, head_size, kv_heads=7)
    layout = KVLayout(2, 7, block_tokens, head_size, dtype)
    slots = torch.randperm(BLOCKS * block_tokens)[:21]
    slots[3] = -1
    kv_cache, twins = (torch.zeros(layout.shape(BLOCKS), dtype=dtype) for _ in range(2))
    KERNELS.store_kv(k, v, kv_cache, LAYER, slots)
    reference.store_kv(k, v, twins, LAYER, slots)
    assert torch.equal(kv_cache, twins)
    codes, twin_codes = (torch.zeros(layout.shape(BLOCKS), dtype=torch.float8_e5m2) for _ in range(2))
    KERNELS.store_kv(k * 1e4, v, codes, LAYER, slots)
    reference.store_kv(k * 1e4, v, twin_codes, LAYER, slots)
    assert torch.equal(codes.view(torch.uint8), twin_codes.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "head_size", "block_tokens"), [(BF16, 64, 16), (FP16, 80, 8), (FP32, 16, 64)])
def test_store_kv_e4m3_keeps_scales(dtype: torch.dtype, head_size: int, block_tokens: int) -> None:
    _, k, v = rows_of(dtype, head_size)
    k[12:] *= 1000  # a later token that does not fit the scale of its block: older tokens are recoded
    v[:, 1] = 0
    layout = KVLayout(2, 3, block_tokens, head_size, dtype)
    slots = torch.cat([torch.arange(14) + 2 * block_tokens, torch.tensor([-1]), torch.arange(6)])
    pools = []
    for store in (KERNELS.store_kv, None):
        kv_cache = torch.full(layout.shape(BLOCKS), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scales = torch.full((BLOCKS, 2, 2, 3), float("nan"))
        for rows in (slice(0, 11), slice(11, 12), slice(12, 21)):  # as chunks of a prompt and a decode step
            if store:
                store(k[rows], v[rows], kv_cache, LAYER, slots[rows], kv_scales=scales)
            else:
                reference.store_kv(k[rows], v[rows], kv_cache, LAYER, slots[rows], kv_scales=scales)
        pools.append((kv_cache, scales))
    (kv_cache, scales), (twin_cache, twin_scales) = pools
    torch.testing.assert_close(scales, twin_scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(kv_cache.view(torch.uint8), twin_cache.view(torch.uint8))
    real = slots >= 0
    blocks, offsets = slots[real] // block_tokens, slots[real] % block_tokens
    values = kv_cache[blocks, LAYER, 0, :, offsets].float() * scales[blocks, LAYER, 0][..., None]
    largest = torch.stack([k[real][blocks == block].float().abs().amax(dim=(0, 2)) for block in blocks.tolist()])
    assert ((values - k[real].float()).abs() <= largest[..., None] / 2**8 + k[real].float().abs() / 16).all()


def test_e4m3_without_scales_is_refused() -> None:
    _, k, v = rows_of(FP32, 64)
    kv_cache = torch.zeros(KVLayout(2, 3, 8, 64, FP32).shape(BLOCKS), dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="give kv_scales"):
        KERNELS.store_kv(k, v, kv_cache, LAYER, torch.arange(21))


def test_rope_store_kv_into_fp8() -> None:
    q, k, v = rows_of(FP16, 64)
    angles = torch.rand(30, 32)
    cos_sin, positions, slots = torch.cat([angles.cos(), angles.sin()], dim=1), torch.arange(21), torch.arange(21)
    slots[20] = -1
    kv_cache = torch.zeros(KVLayout(2, 3, 8, 64, FP16).shape(BLOCKS), dtype=torch.float8_e4m3fn)
    scales, got, wanted, rotated = torch.ones(BLOCKS, 2, 2, 3), q.clone(), q.clone(), torch.empty_like(k)
    before = k.clone()
    KERNELS.rope_store_kv(got, k, v, cos_sin, positions, kv_cache, LAYER, slots, kv_scales=scales)
    reference.rope(q[:20], cos_sin, positions[:20], wanted[:20])
    reference.rope(k, cos_sin, positions, rotated)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    stored = kv_cache[slots[:20] // 8, LAYER, 0, :, slots[:20] % 8].float() * scales[slots[:20] // 8, LAYER, 0, :, None]
    torch.testing.assert_close(stored, rotated[:20].float(), rtol=0.07, atol=0.02)
    assert torch.equal(k, before)


@pytest.mark.parametrize(
    ("dtype", "block_tokens", "head_size"),
    [(BF16, 16, 128), (FP32, 8, 16), (torch.float8_e5m2, 64, 80), (FP16, 256, 64)],
)
def test_block_copies(dtype: torch.dtype, block_tokens: int, head_size: int) -> None:
    shape = KVLayout(2, 3, block_tokens, head_size, FP32).shape(BLOCKS)
    pool = torch.randn(shape).to(dtype)
    ids = torch.tensor([3, -1, 0])
    staging, wanted = torch.zeros((4, *shape[1:])).to(dtype), torch.zeros((4, *shape[1:])).to(dtype)
    KERNELS.gather_blocks(pool, ids, staging)
    reference.gather_blocks(pool, ids, wanted)
    assert torch.equal(staging.view(torch.uint8), wanted.view(torch.uint8))
    assert staging[0].view(torch.uint8).any()
    other, wanted = torch.zeros(shape).to(dtype), torch.zeros(shape).to(dtype)
    KERNELS.scatter_blocks(staging, ids, other)
    reference.scatter_blocks(staging, ids, wanted)
    assert torch.equal(other.view(torch.uint8), wanted.view(torch.uint8))
    before = pool.clone()
    KERNELS.copy_blocks(pool, torch.tensor([0, 4]), torch.tensor([2, 1]))
    assert torch.equal(pool.view(torch.uint8), before.view(torch.uint8)[[0, 4, 0, 3, 4]])
    empty = torch.empty(0, dtype=torch.int64)
    KERNELS.copy_blocks(pool, empty, empty)


def test_scales_are_copied_like_blocks() -> None:
    scales, staging = torch.randn(BLOCKS, 2, 2, 3), torch.empty(2, 2, 2, 3)
    KERNELS.gather_blocks(scales, torch.tensor([4, 1]), staging)
    assert torch.equal(staging, scales[[4, 1]])
