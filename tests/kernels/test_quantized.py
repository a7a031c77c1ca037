"""Products with 4- and 8-bit weights: the C kernel and its twin bit for bit, the twin against dequantised weights."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize

from tests.kernels.kernel_case import DTYPES
from tournant.kernels import ops, quantized
from tournant.kernels.cpu import build
from tournant.kernels.quantized import KINDS, QuantizedMatrix, pack

SHAPES = ((1, 32), (16, 64), (100, 96), (37, 1536), (960, 576))
ROWS = (*range(1, 18), 31, 40)
BIASED = (100, 96)


@pytest.fixture(autouse=True)
def put_back(threads: None) -> Iterator[None]:
    yield
    ops.select_backend("c")


def matrix_of(kind: str, outputs: int, columns: int, *, biased: bool = False) -> tuple[QuantizedMatrix, torch.Tensor]:
    """A random matrix and its dequantised weights in float32."""
    kind_id = GGMLQuantizationType[kind]
    random = np.random.default_rng([outputs, columns])
    rows = quantize(random.standard_normal((outputs, columns), dtype=np.float32), kind_id)
    bias = torch.from_numpy(random.standard_normal(outputs, dtype=np.float32)) if biased else None
    return pack(kind, torch.from_numpy(rows), bias), torch.from_numpy(dequantize(rows, kind_id))


def activations(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of different sizes, with a group of zeros, one of tiny values and an outlier."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 2, rows)[:, None]
    x[0, :32] = 0
    x[-1, :32] *= 1e-36
    x[rows // 2, columns // 2] *= 1000
    return x.to(dtype)


def product(x: torch.Tensor, matrix: QuantizedMatrix, dtype: torch.dtype | None = None) -> torch.Tensor:
    out = torch.full((len(x), matrix.outputs), torch.nan, dtype=dtype or x.dtype)
    ops.quantized_linear(out, x, matrix)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpacking_gives_the_weights(kind: str, shape: tuple[int, int]) -> None:
    matrix, weights = matrix_of(kind, *shape)
    codes, d, m = quantized.unpack(matrix)
    found = codes * d[..., None] + (0 if m is None else m[..., None])
    assert torch.equal(found.flatten(1), weights)
    assert matrix.tiles.shape[1] % quantized.ALIGNMENT == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_twin_is_the_product_with_quantised_rows(kind: str) -> None:
    """In float64, from the dequantised weights and the definition of a quantised row."""
    matrix, weights = matrix_of(kind, 100, 96, biased=True)
    x = activations(13, 96, torch.float32)
    x[::2, 32:64] *= 20  # outliers of every other row
    codes, scales, fine_codes, fine_scales = quantized.quantize_rows(x)
    assert codes.abs().max() == 127
    assert 100 < fine_codes.abs().max() <= 127
    fine = fine_scales > 0
    assert torch.equal(fine, scales > quantized.FINE_FROM * scales.mean(1, keepdim=True))  # outliers of their row
    assert fine.any()
    assert not fine.all(1).any()
    rounding = (codes * scales[..., None] + fine_codes * fine_scales[..., None]).flatten(1).double() - x
    steps = torch.where(fine, fine_scales, scales).repeat_interleave(32, dim=1)
    assert (rounding.abs() <= steps / 2 * (1 + 1e-3) + 1e-30).all()
    expected = (x.double() + rounding) @ weights.double().t() + matrix.bias.double()
    out = torch.empty(13, 100)
    quantized.quantized_linear(out, x, matrix)
    bound = 1e-5 * (x.double().abs() @ weights.double().abs().t())  # cancels: relative to the sum of sizes
    assert ((out - expected).abs() <= bound + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("compiled")
def test_the_kernel_equals_its_twin_bit_for_bit(shape: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    """Every row as in the whole, whatever the number of rows and threads."""
    matrix, _ = matrix_of(kind, *shape, biased=shape == BIASED)
    x = activations(40, shape[1], dtype)
    wanted = torch.empty(40, shape[0], dtype=dtype)
    quantized.quantized_linear(wanted, x, matrix)
    assert wanted.isfinite().all()
    for number in (1, 2):
        torch.set_num_threads(number)
        for rows in ROWS:
            assert torch.equal(product(x[-rows:], matrix), wanted[-rows:]), f"{rows} rows, {number} threads"
    wide = product(x, matrix, torch.float32)
    assert torch.equal(wide.to(dtype), wanted)


@pytest.mark.usefixtures("compiled")
def test_more_rows_than_the_scratch_holds() -> None:
    matrix, _ = matrix_of("Q4_1", 48, 1536)
    x = activations(700, 1536, torch.bfloat16)
    found = product(x, matrix)
    quantized.quantized_linear(wanted := torch.empty_like(found), x, matrix)
    assert torch.equal(found, wanted)


@pytest.mark.usefixtures("compiled")
def test_the_longest_rows() -> None:
    matrix, _ = matrix_of("Q4_0", 3, quantized.MAX_COLUMNS)
    x = activations(9, quantized.MAX_COLUMNS, torch.float32)
    found = product(x, matrix)
    quantized.quantized_linear(wanted := torch.empty_like(found), x, matrix)
    assert torch.equal(found, wanted)


@pytest.mark.usefixtures("backend")
def test_strided_rows_in_and_out() -> None:
    matrix, _ = matrix_of("Q8_0", 20, 64)
    x, out = activations(5, 128, torch.float32), torch.zeros(5, 50)
    ops.quantized_linear(out[:, 7:27], x[:, 32:96], matrix)
    assert torch.equal(out[:, 7:27], product(x[:, 32:96].contiguous(), matrix))
    assert not out[:, :7].any()
    assert not out[:, 27:].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.usefixtures("backend")
def test_what_is_not_finite_stays_so(kind: str, value: float) -> None:
    """In its own row alone."""
    matrix, _ = matrix_of(kind, 20, 64)
    x = activations(3, 64, torch.bfloat16)
    clean = product(x, matrix)
    x[1, 40] = value
    found = product(x, matrix)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.usefixtures("backend")
def test_no_rows() -> None:
    matrix, _ = matrix_of("Q4_0", 20, 64)
    assert product(torch.empty(0, 64), matrix).shape == (0, 20)


def test_impossible_arguments_are_refused() -> None:
    matrix, _ = matrix_of("Q4_0", 20, 64)
    x, out = torch.zeros(3, 64), torch.zeros(3, 20)
    for name, wrong_out, wrong_x in (
        ("x is", out, x[:, :32]),
        ("x is", out, x.double()),
        ("x is", out, torch.zeros(64, 3).t()),
        ("out is", out[:2], x),
        ("out is", out.half(), x),
        ("out is", torch.zeros(20, 3).t(), x),
    ):
        with pytest.raises(ValueError, match=name):
            ops.quantized_linear(wrong_out, wrong_x, matrix)
    for kind, rows in (
        ("Q6_K", torch.zeros(4, 210, dtype=torch.uint8)),
        ("Q4_0", torch.zeros(4, 19, dtype=torch.uint8)),
        ("Q4_0", torch.zeros(4, 18)),
        ("Q4_0", torch.zeros(4, 18 * 1025, dtype=torch.uint8)),
    ):
        with pytest.raises(ValueError, match="cannot be packed"):
            pack(kind, rows)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C compiler here")
@pytest.mark.parametrize("flag", ["-mno-avx512vnni", "-mno-avx512f", "-march=x86-64-v2"])
def test_lesser_cpus_give_the_same_bits(flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1", flag))
    assert ops.select_backend("c", tmp_path) == "c"
    for kind in KINDS:
        matrix, _ = matrix_of(kind, 100, 96, biased=True)
        for dtype in DTYPES:
            x = activations(13, 96, dtype)
            quantized.quantized_linear(wanted := torch.empty(13, 100, dtype=dtype), x, matrix)
            assert torch.equal(product(x, matrix), wanted)
