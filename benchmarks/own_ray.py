"""A Ray for one benchmark, on this machine and for nobody else."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ray

SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


@contextlib.contextmanager
def own_ray(num_cpus: int = 2) -> Iterator[None]:
    """Start it, on free ports and with a folder of its own, and end it. A Ray that the process is connected to serves
    as well, and stays.
    """
    if ray.is_initialized():
        yield
        return
    os.environ |= SETTINGS
    folder = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))  # short enough for sockets
    ray.init(
        address="local",
        num_cpus=num_cpus,
        object_store_memory=160 << 20,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(folder / "ray"),
        _plasma_directory="/dev/shm",
    )
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
