"""Fixtures and limits that hold for every test."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import tests.helpers.triton_interpreter  # noqa: F401 - before torch._dynamo imports triton, see there
from tests.helpers.processes import ByFile, starts_ray
from tests.helpers.ray_guard import RayGuard

REPO = Path(__file__).resolve().parent.parent

RAY_GUARD = RayGuard()

settings.register_profile(
    "quick", derandomize=True, max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("soak", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quick")  # --hypothesis-profile=soak comes after and wins


def pytest_configure() -> None:
    torch.set_num_threads(1)  # two threads on two cores spin at barriers whenever anything else runs
    RAY_GUARD.install()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of who runs tests in the background; children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts Ray comes first, since it takes longest."""
    items.sort(key=lambda item: not starts_ray(item.nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """How tests are dealt to several test processes."""
    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(0)  # a tolerance that holds for one draw may not for another
    RAY_GUARD.allowed = item.get_closest_marker("ray") is not None  # before fixtures, which may start Ray for the test


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders of the three random-weight models, by name: "m", "tied" and "mqa" (see tests/helpers/tiny_model.py)."""
    from tests.helpers.tiny_model import SHAPES, build_tiny_model  # 2 s that tests of pure code need not wait

    root = tmp_path_factory.mktemp("models")
    return {name: build_tiny_model(root / name, **shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="session")
def tiny_model(tiny_models: Mapping[str, Path]) -> Path:
    """Folder of M, the model of most tests."""
    return tiny_models["m"]


@pytest.fixture(scope="session")
def traces() -> Path:
    """Folder of the public request traces beside a development checkout; without it the test is skipped."""
    folder = REPO.parent / "shared" / "traces"
    if not folder.is_dir():
        pytest.skip("the request traces are not beside this checkout (../shared/traces)")
    return folder
