"""Which back end serves which tensors, and what is said when it cannot."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.kernels.kernel_case import LAYER, TOLERANCE, Case
from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.kernels.triton import backend

CPU = torch.device("cpu")


@pytest.fixture
def interpreted() -> Iterator[None]:
    """CPU tensors go through the Triton kernels under the interpreter."""
    ops.select_backend("triton")
    yield
    ops.select_backend("c")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("interpreted")
def test_triton_serves_cpu_tensors_under_the_interpreter(dtype: torch.dtype) -> None:
    assert ops.backend() == "triton"
    case = Case(KVLayout(2, 2, 16, 64, dtype), [40, 3], num_heads=4)
    case.store(0, 0, 40)
    case.store(1, 0, 3)
    parts = [(0, 39, 40), (1, 0, 3)]
    for got, part in zip(case.attend(parts), parts, strict=True):
        torch.testing.assert_close(got.double(), case.expected(*part), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["c", "torch", "triton"])
def test_blocks_to_staging_and_back(name: str) -> None:
    if ops.select_backend(name) != name:
        pytest.skip("no C compiler here")
    try:
        pool = torch.randn(KVLayout(2, 3, 8, 16, torch.float32).shape(5)).to(torch.bfloat16)
        before, staging = pool.clone(), torch.zeros((4, *pool.shape[1:]), dtype=pool.dtype)
        ops.gather_blocks(pool, torch.tensor([3, -1, 0]), staging)
        assert torch.equal(staging[[0, 2]], before[[3, 0]])
        assert not staging[[1, 3]].any()
        ops.scatter_blocks(staging, torch.tensor([1, -1, 4]), pool)
        assert torch.equal(pool, before[[0, 3, 2, 3, 0]])
    finally:
        ops.select_backend("c")


def test_staging_that_does_not_fit_is_refused() -> None:
    pool = torch.zeros(KVLayout(2, 3, 8, 16, torch.float32).shape(5))
    ids, staging = torch.arange(3), torch.zeros_like(pool)
    for pool_, ids_, staging_, words in (
        (pool.transpose(3, 4), ids, staging, "pool is"),
        (torch.zeros(4, 3, dtype=torch.uint8), ids, staging, "multiple of 8 bytes"),
        (pool, ids.int(), staging, "ids is"),
        (pool, ids, staging[:2], "staging is"),
        (pool, ids, staging.half(), "staging is"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.gather_blocks(pool_, ids_, staging_)
        with pytest.raises(ValueError, match=words):
            ops.scatter_blocks(staging_, ids_, pool_)


@pytest.mark.usefixtures("interpreted")
def test_a_static_plan_is_refilled_step_by_step() -> None:
    case = Case(KVLayout(2, 2, 16, 64, torch.float32), [20, 1, 31], num_heads=4)
    for seq, length in enumerate(case.lengths):
        case.store(seq, 0, length)
    static = ops.static_decode_plan(case.layout, 4, 4, 3, CPU)
    for parts in ([(0, 19, 20), (1, 0, 1), (2, 30, 31)], [(2, 16, 17)]):
        tables, rows = case.tables[[seq for seq, _, _ in parts]], np.arange(len(parts) + 1)
        step = ops.plan_attention(tables[:, :-1], rows, [stop for _, _, stop in parts], case.layout, 4)
        ops.refill_plan(static, step)
        q = torch.zeros(4, 4, 64)
        q[: len(parts)] = torch.cat([case.q[case.rows(*part)] for part in parts])
        out = torch.full_like(q, float("nan"))
        ops.paged_attention(out, q, case.kv_cache, LAYER, static, case.scale)
        wanted = torch.cat([case.expected(*part) for part in parts])
        torch.testing.assert_close(out[: len(parts)].double(), wanted, rtol=0, atol=5e-6)
        assert not out[len(parts) :].any()


def test_only_triton_has_static_plans() -> None:
    with pytest.raises(ValueError, match="a static plan needs the Triton back end"):
        ops.static_decode_plan(KVLayout(1, 1, 16, 64, torch.float32), 1, 1, 1, CPU)


def test_without_the_interpreter_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    with pytest.raises(ops.MissingBackendError, match="interpreter is off"):
        ops.select_backend("triton")
    assert ops.backend() in ("c", "torch")


def test_a_gpu_without_triton_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named 'triton' ({name})", name="triton")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ops.MissingBackendError, match=r"install tournant\[cuda\]"):
        ops.backend(torch.device("cuda:7"))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="back end is 'cuda'"):
        ops.select_backend("cuda")
