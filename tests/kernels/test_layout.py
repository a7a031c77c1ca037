"""Slot arithmetic by hand, sizes against the tensor itself, and the encoding of layout ids held still."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tournant.kernels.layout import KVLayout

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, block_tokens=16, head_size=64, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sizes_are_those_of_the_tensor(dtype: torch.dtype) -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=3, block_tokens=8, head_size=48, dtype=dtype)
    tensor = layout.allocate(5, "cpu")
    assert tensor.shape == (5, 2, 2, 3, 8, 48)
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert not tensor.any()
    assert layout.block_bytes == tensor[0].nbytes == layout.token_bytes * 8
    assert layout.block_offset(3) == tensor[3].data_ptr() - tensor.data_ptr()


def test_offsets_are_64_bit() -> None:
    assert LAYOUT.block_bytes == 368_640
    assert LAYOUT.block_offset(10_000_000) == 3_686_400_000_000


def test_num_blocks_for_rounds_down() -> None:
    assert LAYOUT.num_blocks_for(LAYOUT.block_bytes * 7) == 7
    assert LAYOUT.num_blocks_for(LAYOUT.block_bytes * 7 - 1) == 6
    assert LAYOUT.num_blocks_for(0) == 0


def test_slots_by_hand() -> None:
    slots = LAYOUT.slots(np.array([9, 2, 500_000_000], np.int32), [0, 15, 16, 31, 32])
    assert slots.dtype == np.int64
    assert slots.tolist() == [144, 159, 32, 47, 8_000_000_000]


def test_slots_refuse_positions_beyond_the_table() -> None:
    with pytest.raises(IndexError):
        LAYOUT.slots(np.array([9, 2], np.int32), [32])


def test_kv_form_names_the_dtype() -> None:
    forms = [replace(LAYOUT, dtype=dtype).kv_form for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    assert forms == ["bf16", "fp16", "fp32"]


def test_fp8_blocks_count_their_scales() -> None:
    e4m3, e5m2 = (replace(LAYOUT, dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
    assert (e4m3.kv_form, e5m2.kv_form) == ("fp8_e4m3", "fp8_e5m2")
    assert e5m2.block_bytes == e5m2.allocate(1)[0].nbytes == LAYOUT.block_bytes // 2
    assert e5m2.allocate_scales(3) is None
    scales = e4m3.allocate_scales(3)
    assert scales is not None
    assert (scales.shape, scales.dtype) == ((3, 30, 2, 3), torch.float32)
    assert e4m3.block_bytes == e4m3.allocate(1)[0].nbytes + scales[0].nbytes
    assert e4m3.num_blocks_for(e4m3.block_bytes * 2 + e4m3.token_bytes) == 2
    assert e4m3.block_offset(2) == 2 * e4m3.allocate(1)[0].nbytes
    assert (
        e4m3.layout_id == e5m2.layout_id == LAYOUT.layout_id
    )  # the form is a part of the namespace, not of the layout


def test_layout_id_golden() -> None:
    assert LAYOUT.layout_id.hex() == "8a0a9aed6e50ee7a9bcadf84b5464f16fb1170618eb04946b469f6a98d4a914a"
    other = replace(LAYOUT, block_tokens=64, head_size=128, rope_digest=bytes(range(32)))
    assert other.layout_id.hex() == "adabbeef0f2d9281b76856930b8b91e627eb1f71ada142887592e7eba6c09427"


def test_layout_id_depends_on_the_form_of_a_block_and_not_on_the_part() -> None:
    differing = [LAYOUT, replace(LAYOUT, block_tokens=32), replace(LAYOUT, head_size=128)]
    differing += [replace(LAYOUT, rope_digest=b"a"), replace(LAYOUT, rope_digest=b"aa")]
    assert len({layout.layout_id for layout in differing}) == len(differing)
    assert replace(LAYOUT, num_layers=15, num_kv_heads=1).layout_id == LAYOUT.layout_id


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_kv_heads", 0),
        ("block_tokens", 4),
        ("block_tokens", 24),
        ("block_tokens", 512),
        ("head_size", 0),
        ("head_size", 72),
        ("head_size", 272),
        ("dtype", torch.float64),
    ],
)
def test_impossible_layouts_are_refused_by_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=str(value)):
        replace(LAYOUT, **{field: value})
