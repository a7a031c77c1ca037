"""Packed, plain and quantised products agree, for every number of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize

from tournant.workers.models.linear import Linear, QuantizedLinear, can_pack


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


@pytest.mark.parametrize("biased", [False, True])
def test_quantised_matrices_lie_side_by_side(biased: bool) -> None:
    """Of one type they become one matrix; of several the outputs are in order all the same."""
    random = np.random.default_rng(5)
    kinds, outputs = ("Q4_1", "Q4_1", "Q8_0", "Q4_0"), (24, 8, 40, 16)
    ids = [GGMLQuantizationType[kind] for kind in kinds]
    rows = [
        quantize(random.standard_normal((n, 64), dtype=np.float32), kind) for n, kind in zip(outputs, ids, strict=True)
    ]
    weight = torch.cat([torch.from_numpy(dequantize(part, kind)) for part, kind in zip(rows, ids, strict=True)])
    bias = torch.randn(sum(outputs)) if biased else None
    parts = list(zip(kinds, map(torch.from_numpy, rows), strict=True))
    x = torch.randn(5, 64)
    want = torch.nn.functional.linear(x, weight, bias)
    product = QuantizedLinear(parts, bias)
    assert product.matrix is None
    got = product(x)
    assert (got - want).abs().max() <= 0.02 * want.abs().max()
    assert got.dtype == torch.float32
    assert product(x.bfloat16()).dtype == torch.bfloat16
    assert QuantizedLinear(parts, bias, torch.float32)(x.bfloat16()).dtype == torch.float32
    whole = QuantizedLinear(parts[:2]).matrix
    assert whole is not None
    assert (whole.outputs, whole.columns) == (32, 64)


def test_quantised_matrices_stay_on_the_cpu() -> None:
    product = QuantizedLinear([("Q4_0", torch.zeros(2, 18, dtype=torch.uint8))])
    assert product.to(torch.device("cpu")) is product
    with pytest.raises(ValueError, match="the device is cuda"):
        product.to(torch.device("cuda"))
