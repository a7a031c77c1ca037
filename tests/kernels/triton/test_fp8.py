"""fp8 codes made and read with integers agree with torch's on every code and over the whole range of floats."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from tournant.kernels.triton import fp8


def both_ways(x_ptr, codes_ptr, values_ptr, form: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    codes = fp8.encode(tl.load(x_ptr + at), form)
    tl.store(codes_ptr + at, codes)
    tl.store(values_ptr + at, fp8.decode(codes, form))


@pytest.mark.parametrize(
    ("form", "dtype", "largest", "factor"),
    [("e4m3", torch.float8_e4m3fn, 448.0, 256.0), ("e5m2", torch.float8_e5m2, 57344.0, 1.0)],
)
def test_codes(form: str, dtype: torch.dtype, largest: float, factor: float) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()]
    halfway = (every[:-1] + every[1:]) / 2
    scattered = torch.cat([torch.randn(512) * 10.0**power for power in range(-9, 9)])
    x = torch.cat([every, halfway, scattered, torch.tensor([float("inf"), -float("inf"), 1e-45])])
    x = torch.cat([x, torch.zeros(-len(x) % 1024)])
    codes, values = torch.empty(len(x), dtype=torch.uint8), torch.empty(len(x), dtype=torch.float16)
    InterpretedFunction(both_ways)[(len(x) // 1024,)](x, codes, values, form, 1024)
    wanted = x.clamp(-largest, largest).to(dtype)
    assert torch.equal(codes, wanted.view(torch.uint8))
    assert torch.equal(values.float() * factor, wanted.float())
