"""Packed and plain products agree, for every number of rows."""

from __future__ import annotations

import pytest
import torch

from tournant.workers.models.linear import Linear, can_pack


@pytest.mark.parametrize("rows", [1, 2, 5, 32, 100])
@pytest.mark.parametrize(("outs", "ins"), [(7, 16), (96, 211), (576, 576)])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_equals_plain(rows: int, outs: int, ins: int, biased: bool) -> None:
    if not can_pack(torch.bfloat16):
        pytest.skip("this CPU or torch has no prepacked bfloat16 products")
    x, weight = torch.randn(rows, ins).bfloat16(), torch.randn(outs, ins).bfloat16()
    bias = torch.randn(outs).bfloat16() if biased else None
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for packed in (False, True):
        got = Linear(weight, bias, packed=packed)(x)
        assert got.shape == (rows, outs)
        assert (got.double() - want).abs().max() <= 8e-3 * want.abs().max().clamp_min(1)


def test_only_bfloat16_is_packed() -> None:
    assert not can_pack(torch.float32)
    assert not can_pack(torch.float16)
