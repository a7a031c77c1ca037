"""Back ends and thread counts as fixtures that put everything back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tournant.kernels import ops


@pytest.fixture(params=["c", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test that takes this runs on both back ends."""
    if ops.select_backend(request.param) != request.param:
        pytest.skip("no C compiler here")
    yield request.param
    ops.select_backend("c")


@pytest.fixture
def compiled() -> None:
    """Tests of promises that only the C back end makes."""
    if ops.select_backend("c") != "c":
        pytest.skip("no C compiler here")


@pytest.fixture
def threads() -> Iterator[None]:
    """Lets a test change torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
