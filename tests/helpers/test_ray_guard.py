"""ray.init raises in a test that is not marked ray, before and after Ray's import, and works in one that is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.ray_guard import RayGuard, RayNotAllowedError

REPO = Path(__file__).resolve().parents[2]


def test_this_test_may_not_start_ray() -> None:
    import ray

    with pytest.raises(RayNotAllowedError, match="not marked ray"):
        ray.init()


def test_guard_follows_the_permission() -> None:
    guard, ray = RayGuard(), SimpleNamespace(init=lambda **options: options)
    guard.wrap(ray)
    with pytest.raises(RayNotAllowedError):
        ray.init(num_cpus=1)
    guard.allowed = True
    assert ray.init(num_cpus=1) == {"num_cpus": 1}


def test_guard_waits_for_the_import_without_importing() -> None:
    code = (
        "import sys; from tests.helpers.ray_guard import RayGuard; guard = RayGuard(); guard.install()\n"
        "print('ray' in sys.modules); import ray\n"
        "try: ray.init()\nexcept RuntimeError as error: print(type(error).__name__)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "RayNotAllowedError"]
