"""Training attention's kernels under the interpreter, through the autograd function, against float64.

The interpreter multiplies bfloat16 wrongly, so float16 stands for both.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.flash_case import Dense, wrong
from tournant.kernels import ops
from tournant.kernels.triton import flash_attention as kernels
from tournant.kernels.triton.card import A100, H200
from tournant.kernels.triton.tiles import TileShape

FP16, FP32 = torch.float16, torch.float32
TOLERANCE = {FP16: 1.2e-2, FP32: 1e-5}

CASES = [  # tiles of the tests: 32 queries, 16 keys; dk/dv: 16 queries, 32 keys
    Dense(2, 3, 1, 70, 70, 16),  # groups of 3, tiles cut on both sides
    Dense(1, 4, 1, 37, 101, 24),  # a group of 4, a padded head, the last chunk of a longer sequence
    Dense(1, 3, 3, 1, 45, 16),  # one row
    Dense(1, 1, 1, 1, 1, 8),  # one key
    Dense(1, 2, 1, 90, 130, 16, window=40),
    Dense(1, 2, 1, 33, 64, 16, window=1, softcap=0.7),
    Dense(1, 3, 1, 50, 50, 16, softcap=2.0, scale=0.9),
    Dense(1, 2, 2, 65, 20, 16, causal=False),  # more queries than keys
    Dense(1, 4, 2, 20, 65, 16, causal=False, scale=0.5),
]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels serve CPU tensors, with tiles so small that few tokens fill several."""
    monkeypatch.setattr(kernels, "prefill_shape", lambda *_: TileShape(32, 16, 4, 2))
    monkeypatch.setattr(kernels, "backward_shapes", lambda *_: (TileShape(32, 16, 4, 2), TileShape(16, 32, 4, 2)))
    ops.select_backend("triton")
    yield
    ops.select_backend("c")


@pytest.mark.parametrize(("case", "dtype"), [*((case, FP16) for case in CASES), (CASES[0], FP32), (CASES[5], FP32)])
def test_equals_whole_matrices_in_float64(case: Dense, dtype: torch.dtype) -> None:
    assert wrong([case], dtype, TOLERANCE[dtype]) == []


def test_a_large_head_in_the_tiles_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert kernels.backward_shapes(H200, 128, 2) != kernels.backward_shapes(A100, 128, 2)
    assert wrong([Dense(1, 2, 1, 140, 150, 128)], FP16, TOLERANCE[FP16]) == []


def test_every_head_of_every_sequence_receives_its_own_gradient() -> None:
    case = Dense(2, 6, 2, 20, 20, 16)
    q, k, v, dout = case.inputs(FP32)
    for sequence, head in ((0, 0), (0, 4), (1, 2), (1, 5)):
        alone = torch.zeros_like(dout)
        alone[sequence, head] = dout[sequence, head]
        for gradient, own in zip(case.run(q, k, v, alone)[1:], (head, head // 3, head // 3), strict=True):
            assert gradient.abs().amax(dim=(2, 3)).nonzero().tolist() == [[sequence, own]]


def test_the_kernels_were_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above compare is not the twin."""
    called: list[str] = []
    for name in ("forward", "backward"):
        inner = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, inner=inner, name=name: called.append(name) or inner(*args))
    Dense(1, 1, 1, 2, 2, 8).run(*Dense(1, 1, 1, 2, 2, 8).inputs(FP32))
    assert called == ["forward", "backward"]


def test_nothing_beyond_the_last_row_is_written_or_read() -> None:
    """q, k and v are the beginnings of longer tensors of NaN; so is what is written."""
    case = Dense(1, 2, 1, 21, 21, 16)
    tensors = case.inputs(FP32)
    wanted = case.run(*tensors)
    long = []
    for x in tensors[:3]:
        room = torch.full((1, x.shape[1], 64, 16), float("nan"))
        room[:, :, :21] = x.detach()
        long.append(room[:, :, :21].requires_grad_())
    for got, expected in zip(case.run(*long, tensors[3]), wanted, strict=True):
        assert torch.equal(got, expected)
