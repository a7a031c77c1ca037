"""fp8 KV as bytes: decoded and encoded with integer arithmetic, so that every card and the interpreter agree.

e4m3 is torch.float8_e4m3fn (no infinities, largest 448), e5m2 torch.float8_e5m2 (a float16 cut to 8 bits, largest
finite 57344). Triton refuses e4m3 below sm_89, hence bytes. NaN is never stored: encoding saturates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FORMS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
E4M3_MAX: tl.constexpr = tl.constexpr(448.0)
E5M2_MAX: tl.constexpr = tl.constexpr(57344.0)
E4M3_FACTOR: tl.constexpr = tl.constexpr(256.0)  # what `decode` of e4m3 has to be multiplied by


def form_of(kv_cache: torch.Tensor) -> str:
    """ "e4m3", "e5m2", or "plain" for bfloat16, float16 and float32."""
    return FORMS.get(kv_cache.dtype, "plain")


def as_bytes(kv_cache: torch.Tensor) -> torch.Tensor:
    """The tensor that kernels are given: fp8 as uint8, everything else as it is."""
    return kv_cache.view(torch.uint8) if kv_cache.dtype in FORMS else kv_cache


@triton.jit
def decode(code, form: tl.constexpr):
    """float16 of uint8 codes: exact for e5m2; e4m3 comes as 1/E4M3_FACTOR of its value (the exponent biases differ)."""
    wide = code.to(tl.uint16)
    if form == "e5m2":
        bits = wide << 8
    else:
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def encode(x, form: tl.constexpr):
    """uint8 codes of float32 x, rounded to nearest even, saturated."""
    mantissa: tl.constexpr = 3 if form == "e4m3" else 2
    bias: tl.constexpr = 7 if form == "e4m3" else 15
    largest: tl.constexpr = E4M3_MAX if form == "e4m3" else E5M2_MAX
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), largest)
    drop: tl.constexpr = 23 - mantissa
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) >> drop) - ((127 - bias) << mantissa)
    # Below the smallest normal number codes count its steps of 2^(1 - bias - mantissa): adding 2^(23 + that) rounds
    # to such a step and leaves the count in the lowest bits.
    lift: tl.constexpr = 2.0 ** (24 - bias - mantissa)
    subnormal = (size + lift).to(tl.int32, bitcast=True) & 0xFF
    smallest_normal: tl.constexpr = 2.0 ** (1 - bias)
    return (sign | tl.where(size < smallest_normal, subnormal, normal)).to(tl.uint8)
