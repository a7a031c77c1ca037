"""The twin of training attention and its autograd function against float64, and what a call keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.flash_case import NAMES, Dense, differences, wrong
from tests.kernels.flash_mutants import MUTANTS
from tests.simulation.mutants import Mutant
from tournant.kernels import flash_attention as module
from tournant.kernels.flash_attention import flash_attention

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

CASES = [
    Dense(2, 6, 2, 300, 300, 16),  # groups of 3, tiles cut on both sides
    Dense(1, 4, 1, 129, 515, 8),  # a group of 4, the last chunk of a longer sequence
    Dense(1, 3, 3, 1, 257, 8),  # one row
    Dense(2, 2, 2, 1, 1, 8),  # one key
    Dense(1, 2, 1, 131, 300, 8, window=70),
    Dense(1, 2, 1, 140, 140, 8, softcap=2.0),
    Dense(1, 3, 1, 37, 300, 8, window=1, softcap=0.7, scale=0.9),
    Dense(1, 2, 2, 130, 60, 8, causal=False),  # more queries than keys
    Dense(1, 4, 2, 20, 270, 7, causal=False, scale=1.3),
]
TOLERANCE = {FP64: 1e-12, FP32: 1e-5, FP16: 8e-3, BF16: 6e-2}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_whole_matrices_in_float64(case: Dense) -> None:
    assert wrong([case], FP64, TOLERANCE[FP64]) == []


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    assert wrong(CASES[:3] + CASES[6:7], dtype, TOLERANCE[dtype]) == []


@pytest.mark.parametrize("case", [Dense(2, 4, 1, 5, 9, 3, softcap=1.5), Dense(1, 3, 1, 6, 6, 2, window=3)], ids=str)
def test_gradcheck(case: Dense, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERY_TILE", 4)
    monkeypatch.setattr(module, "KEY_TILE", 3)
    q, k, v, _ = case.inputs(FP64)

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return flash_attention(*tensors, window=case.window, softcap=case.softcap)

    assert torch.autograd.gradcheck(call, (q, k, v))


def test_every_head_of_every_sequence_receives_its_own_gradient() -> None:
    """One head at a time speaks: its dq and its KV head's dk and dv are there, and no others."""
    case = Dense(2, 6, 2, 40, 40, 8)
    q, k, v, dout = case.inputs(FP64)
    for sequence in range(2):
        for head in range(6):
            alone = torch.zeros_like(dout)
            alone[sequence, head] = dout[sequence, head]
            for name, gradient in zip(NAMES[1:], case.run(q, k, v, alone)[1:], strict=True):
                reached = [tuple(place) for place in gradient.abs().amax(dim=(2, 3)).nonzero().tolist()]
                assert reached == [(sequence, head if name == "dq" else head // 3)], name


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_found(mutant: Mutant) -> None:
    with mutant.applied():
        assert any(wrong([case], FP64, 1e-6) for case in reversed(CASES))


def saved_bytes(tokens: int) -> int:
    found: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        found.append(x.untyped_storage().nbytes())
        return x

    q, k, v = (torch.randn(1, heads, tokens, 16, requires_grad=True) for heads in (6, 2, 2))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = flash_attention(q, k, v)
    out.sum().backward()
    return sum(found)


def test_what_is_kept_grows_with_tokens_not_with_their_square() -> None:
    per_token = 4 * (6 * 16 + 2 * 2 * 16 + 6 * 16 + 6)  # q, k and v, out, lse
    assert [saved_bytes(tokens) for tokens in (1, 100, 700)] == [per_token * tokens for tokens in (1, 100, 700)]


def test_no_tensor_of_a_pass_is_a_matrix_of_scores() -> None:
    """Everything that torch makes on the way, in both directions, is smaller than one head's scores."""
    tokens, largest = 700, 0
    q, k, v = (torch.randn(1, heads, tokens, 8, requires_grad=True) for heads in (2, 1, 1))

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else [result]:
                largest = max(largest, x.untyped_storage().nbytes() // x.itemsize)
            return result

    with Watch():
        flash_attention(q, k, v).sum().backward()
    assert 0 < largest < tokens * tokens / 5


def test_layout_and_strides() -> None:
    """Any strides go in, also an expanded gradient; results lie token by token, so that joining heads is free."""
    case = Dense(2, 3, 1, 33, 33, 8)
    q, k, v, _ = case.inputs(FP64)
    awkward = [x.detach().mT.contiguous().mT.requires_grad_() for x in (q, k, v)]
    ones = torch.ones((), dtype=FP64).expand(q.shape)
    for got, wanted in zip(case.run(*awkward, ones), case.expected(q, k, v, ones), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
        assert got.transpose(1, 2).is_contiguous()


def test_no_queries() -> None:
    q, k = torch.zeros(1, 2, 0, 8, requires_grad=True), torch.zeros(1, 1, 5, 8, requires_grad=True)
    out = flash_attention(q, k, k)
    out.sum().backward()
    assert out.shape == q.shape
    assert k.grad is not None
    assert not k.grad.any()


def test_large_scores_do_not_overflow() -> None:
    assert wrong([Dense(1, 2, 1, 140, 140, 8, scale=300.0)], FP32, 0.5) == []  # exp(s) itself would be infinite
    assert differences(Dense(1, 2, 1, 140, 140, 8, scale=300.0), FP64)["out"] < 1e-9


SHAPE = (1, 4, 5, 8)


@pytest.mark.parametrize(
    ("q", "k", "v", "options", "message"),
    [
        (torch.zeros(4, 5, 8), torch.zeros(SHAPE), torch.zeros(SHAPE), {}, "q is"),
        (torch.zeros(()), torch.zeros(SHAPE), torch.zeros(SHAPE), {}, "q is"),
        (torch.zeros(1, 4, 5, 300), torch.zeros(SHAPE), torch.zeros(SHAPE), {}, "at most 256"),
        (torch.zeros(SHAPE).int(), torch.zeros(SHAPE), torch.zeros(SHAPE), {}, "bfloat16, float16 or float32"),
        (torch.zeros(SHAPE), torch.zeros(1, 4, 5, 9), torch.zeros(SHAPE), {}, "k is"),
        (torch.zeros(SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE).half(), {}, "v is"),
        (torch.zeros(SHAPE), torch.zeros(SHAPE), torch.zeros(1, 4, 6, 8), {}, "of k's shape"),
        (torch.zeros(SHAPE), torch.zeros(1, 3, 5, 8), torch.zeros(1, 3, 5, 8), {}, "multiple"),
        (torch.zeros(SHAPE), torch.zeros(1, 4, 4, 8), torch.zeros(1, 4, 4, 8), {}, "at least as many keys"),
        (torch.zeros(SHAPE), torch.zeros(1, 4, 0, 8), torch.zeros(1, 4, 0, 8), {"causal": False}, "one key at least"),
        (torch.zeros(SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE), {"scale": 0.0}, "scale is"),
        (torch.zeros(SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE), {"softcap": -1.0}, "softcap"),
        (torch.zeros(SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE), {"window": 2, "causal": False}, "only causal"),
        (torch.zeros(SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE), {"window": True}, "whole number of keys"),
        (torch.zeros(SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE), {"window": float("nan")}, "window is nan"),
    ],
)
def test_refusals(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(q, k, v, **options)
