"""Norm, gated silu, rotation with store, block copies: against their twins, by hand, and bit for bit row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.kernels.kernel_case import DTYPES, LAYER, TOLERANCE, Case
from tournant.kernels import ops, reference
from tournant.kernels.layout import KVLayout

WIDTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 576)
ULP = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # relative, one unit in the last place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("compiled")
def test_rms_norm_equals_its_twin(dtype: torch.dtype) -> None:
    for width in WIDTHS:
        for rows in (1, 2, 7):
            x, residual, weight = (torch.randn(rows, width).to(dtype) for _ in range(3))
            ours, twins = residual.clone(), residual.clone()
            got = ops.rms_norm(x, weight[0], 1e-5, ours)
            torch.testing.assert_close(
                got, reference.rms_norm(x, weight[0], 1e-5, twins), rtol=2 * ULP[dtype], atol=1e-6
            )
            assert torch.equal(ours, twins)
            strided = torch.cat([x, x], dim=1)[:, width:]
            expected = reference.rms_norm(x, weight[0], 1e-5, None)
            torch.testing.assert_close(ops.rms_norm(strided, weight[0], 1e-5), expected, rtol=2 * ULP[dtype], atol=1e-6)


@pytest.mark.usefixtures("backend")
def test_rms_norm_by_hand() -> None:
    residual = torch.tensor([[1.0, 1.0]])
    got = ops.rms_norm(torch.tensor([[2.0, 3.0]]), torch.tensor([1.0, 10.0]), 0.0, residual)
    assert residual.tolist() == [[3.0, 4.0]]  # root of the mean square: sqrt(12.5)
    torch.testing.assert_close(got, torch.tensor([[3.0, 40.0]]) / 12.5**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("compiled")
def test_silu_mul_equals_its_twin(dtype: torch.dtype) -> None:
    for width in WIDTHS:
        gate_up = (torch.randn(3, 2 * width) * 4).to(dtype)
        torch.testing.assert_close(ops.silu_mul(gate_up), reference.silu_mul(gate_up), rtol=ULP[dtype], atol=1e-6)


@pytest.mark.usefixtures("backend")
def test_silu_mul_at_the_ends() -> None:
    gate_up = torch.tensor([[0.0, -1e4, 1e4, -60.0, 2.0, 2.0, 2.0, 2.0]])
    torch.testing.assert_close(ops.silu_mul(gate_up), torch.tensor([[0.0, 0.0, 2e4, 0.0]]))


def rotated_by_hand(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [N, heads, hs] float64, angles [N, rotary_dim / 2]: complex multiplication of the pairs (i, i + half)."""
    half = angles.shape[1]
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (80, 32), (64, 20), (128, 128), (16, 0)])
@pytest.mark.usefixtures("backend")
def test_rope_store_kv(head_size: int, rotary_dim: int, positions_dtype: torch.dtype, dtype: torch.dtype) -> None:
    case = Case(KVLayout(2, 2, 16, head_size, dtype), [37], num_heads=6)
    rows, half = 37, rotary_dim // 2
    table_angles = torch.arange(50, dtype=torch.float64)[:, None] * torch.rand(half, dtype=torch.float64)
    cos_sin = torch.cat([table_angles.cos(), table_angles.sin()], dim=1).float()
    positions = torch.randperm(50)[:rows].to(positions_dtype)
    slots = torch.from_numpy(case.slots(0, 0, rows))
    slots[5] = slots[20] = -1
    fused = torch.cat([case.q, case.k, case.v], dim=1)
    q, k, v = fused.split((6, 2, 2), dim=1)
    ops.rope_store_kv(q, k, v, cos_sin, positions, case.kv_cache, LAYER, slots)

    real = slots >= 0
    angles = table_angles[positions.long()]
    expected_q = torch.where(real[:, None, None], rotated_by_hand(case.q.double(), angles), case.q.double())
    torch.testing.assert_close(q.double(), expected_q, rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(fused[:, 6:], torch.cat([case.k, case.v], dim=1))
    blocks, offsets = slots[real] // 16, slots[real] % 16
    stored_k, stored_v = (case.kv_cache[blocks, LAYER, which, :, offsets] for which in (0, 1))
    expected_k = rotated_by_hand(case.k.double(), angles)[real]
    torch.testing.assert_close(stored_k.double(), expected_k, rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(stored_v, case.v[real])
    written = int((~case.kv_cache.isnan()).sum())
    assert written == int(real.sum()) * 2 * 2 * head_size  # nothing else was touched


@pytest.mark.usefixtures("backend")
def test_rope_by_hand() -> None:
    layout = KVLayout(1, 1, 8, 16, torch.float32)
    kv_cache = layout.allocate(1)
    head = torch.arange(1.0, 17.0).view(1, 1, 16)
    q = head.clone()
    quarter_turn = torch.tensor([[0.0, 1.0]])
    ops.rope_store_kv(q, head, head, quarter_turn, torch.tensor([0]), kv_cache, 0, torch.tensor([3]))
    assert q[0, 0, :3].tolist() == [-2.0, 1.0, 3.0]
    assert kv_cache[0, 0, 0, 0, 3, :3].tolist() == [-2.0, 1.0, 3.0]
    assert kv_cache[0, 0, 1, 0, 3, :3].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.usefixtures("backend")
def test_out_of_range_rows_write_nothing() -> None:
    case = Case(KVLayout(2, 2, 16, 64, torch.float32), [4], num_heads=4)
    before = case.q.clone()
    cos_sin = torch.ones(10, 64)
    num_slots = case.kv_cache.shape[0] * 16

    def refused(message: str, position: int, slot: int) -> None:
        positions, slots = torch.tensor([0, 1, 2, position]), torch.tensor([0, 1, 2, slot])
        with pytest.raises(ValueError, match=message):
            ops.rope_store_kv(case.q, case.k, case.v, cos_sin, positions, case.kv_cache, LAYER, slots)

    refused(f"row 3 has slot {num_slots} at position 3; allowed are slots -1 to {num_slots - 1}", 3, num_slots)
    refused("row 3 has slot -2", 3, -2)
    refused("position 10; allowed are .* positions 0 to 9", 10, 3)
    refused("position -1", -1, 3)
    with pytest.raises(ValueError, match=f"row 0 has slot {num_slots}; allowed"):
        ops.store_kv(case.k[:1], case.v[:1], case.kv_cache, LAYER, torch.tensor([num_slots]))
    assert torch.equal(case.q, before)
    assert case.kv_cache.isnan().all()


@pytest.mark.usefixtures("backend")
def test_copy_blocks() -> None:
    layout = KVLayout(2, 2, 8, 16, torch.bfloat16)
    kv_cache = torch.randn(layout.shape(6)).to(torch.bfloat16)
    before = kv_cache.clone()
    ops.copy_blocks(kv_cache, torch.tensor([0, 5, 0]), torch.tensor([3, 1, 2]))
    assert torch.equal(kv_cache, before[[0, 5, 0, 0, 4, 5]])
    ops.copy_blocks(kv_cache, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


def test_impossible_copies_are_refused() -> None:
    kv_cache = KVLayout(1, 1, 8, 16, torch.float32).allocate(4)
    for src, dst, message in (
        ([0], [4], "0 to 4; the KV cache holds blocks 0 to 3"),
        ([-1], [1], "from -1"),
        ([0, 1], [2, 2], "twice"),
        ([0, 1], [1, 2], "both source and destination"),
        ([0, 1], [2], "dense int64 \\[2\\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.copy_blocks(kv_cache, torch.tensor(src), torch.tensor(dst))


def test_impossible_arguments_are_refused() -> None:
    x, case = torch.zeros(3, 8), Case(KVLayout(2, 2, 16, 64, torch.float32), [4], num_heads=4)
    slots, positions, cos_sin = torch.arange(4), torch.arange(4), torch.zeros(10, 64)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("x is", lambda: ops.rms_norm(x.double(), x[0].double(), 1e-5)),
        ("x is", lambda: ops.rms_norm(x.t(), x[:, 0], 1e-5)),
        ("weight is", lambda: ops.rms_norm(x, x[0, :7], 1e-5)),
        ("weight is", lambda: ops.rms_norm(x, x[0].half(), 1e-5)),
        ("residual is", lambda: ops.rms_norm(x, x[0], 1e-5, x[:2])),
        ("gate_up is", lambda: ops.silu_mul(x[:, :7])),
        ("k is", lambda: ops.store_kv(case.k[:, :1], case.v, case.kv_cache, 0, slots)),
        ("v is", lambda: ops.store_kv(case.k, case.v[:3], case.kv_cache, 0, slots)),
        ("v is", lambda: ops.store_kv(case.k, case.v.bfloat16(), case.kv_cache, 0, slots)),
        ("slot_mapping is", lambda: ops.store_kv(case.k, case.v, case.kv_cache, 0, slots.int())),
        ("layer is 2", lambda: ops.store_kv(case.k, case.v, case.kv_cache, 2, slots)),
        (
            "cos_sin is",
            lambda: ops.rope_store_kv(
                case.q, case.k, case.v, cos_sin[:, :63].contiguous(), positions, case.kv_cache, 0, slots
            ),
        ),
        (
            "positions is",
            lambda: ops.rope_store_kv(case.q, case.k, case.v, cos_sin, positions.float(), case.kv_cache, 0, slots),
        ),
        (
            "q is",
            lambda: ops.rope_store_kv(case.q[:3], case.k, case.v, cos_sin, positions, case.kv_cache, 0, slots),
        ),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert case.kv_cache.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("compiled", "threads")
def test_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    rows, width = 300, 577
    x, residual, gate_up = (torch.randn(rows, size).to(dtype) for size in (width, width, 2 * width))
    weight, cos_sin = torch.randn(width).to(dtype), torch.rand(rows, 64)
    case = Case(KVLayout(2, 3, 16, 64, dtype), [rows], num_heads=9)
    slots = torch.from_numpy(case.slots(0, 0, rows))

    def run(start: int, stop: int) -> list[torch.Tensor]:
        part, q = slice(start, stop), case.q[start:stop].clone()
        positions = torch.arange(start, stop)
        ops.rope_store_kv(q, case.k[part], case.v[part], cos_sin, positions, case.kv_cache, LAYER, slots[part])
        summed = residual[part].clone()
        return [q, ops.rms_norm(x[part], weight, 1e-6, summed), summed, ops.silu_mul(gate_up[part])]

    torch.set_num_threads(2)
    whole, stored = run(0, rows), case.kv_cache.clone()
    torch.set_num_threads(1)
    for count in (1, 7, 16, 300):
        case.kv_cache.fill_(float("nan"))
        parts = [run(start, min(start + count, rows)) for start in range(0, rows, count)]
        for name, got, expected in zip(("q", "norm", "sum", "silu"), zip(*parts, strict=True), whole, strict=True):
            assert torch.equal(torch.cat(got), expected), f"{name} in {count} rows"
        assert torch.equal(case.kv_cache.nan_to_num(), stored.nan_to_num()), f"KV in {count} rows"
