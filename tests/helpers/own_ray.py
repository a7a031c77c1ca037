"""A Ray of a test module's own: own folder, own ports, nothing left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


@contextmanager
def own_ray(name: str, num_cpus: int) -> Iterator[Path]:
    """Start it and end it; its folder, which is TMPDIR meanwhile. name: a letter or so, short enough for sockets."""
    folder = Path("/tmp", f"{name}{os.getpid()}")
    folder.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in (SETTINGS | {"TMPDIR": str(folder)}).items():
            patch.setenv(key, value)
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=80 << 20,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=str(folder / "ray"),
            _plasma_directory=str(folder),
        )
        try:
            yield folder
        finally:
            ray.shutdown(wait_for_processes=True)
            shutil.rmtree(folder)
