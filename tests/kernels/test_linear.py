"""Products of few rows through our own kernel, against float64."""

from __future__ import annotations

import pytest
import torch

from tournant.kernels import ops

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("outs", "ins"), [(1, 1), (7, 16), (65, 33), (130, 576), (9, 211)])
@pytest.mark.parametrize("biased", [False, True])
def test_against_float64(dtype: torch.dtype, rows: int, outs: int, ins: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows * outs + ins)
    x, weight = (torch.randn(n, ins, generator=generator).to(dtype) for n in (rows, outs))
    bias = torch.randn(outs, generator=generator).to(dtype) if biased else None
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    got = ops.linear(x, weight, bias).double()
    assert (got - want).abs().max() <= TOLERANCE[dtype] * want.abs().max().clamp_min(1)


def test_strided_rows_and_every_row_like_alone() -> None:
    x = torch.randn(4, 128).to(torch.bfloat16)
    weight = torch.randn(70, 64).to(torch.bfloat16)
    together = ops.linear(x[:, :64], weight)
    for row in range(4):
        assert torch.equal(ops.linear(x[row : row + 1, :64], weight), together[row : row + 1])


def test_shapes_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="weight is"):
        ops.linear(x, torch.zeros(4, 9, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="bias is"):
        ops.linear(x, torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.bfloat16))
