"""What the Serve application asks of the cluster for a replica."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray
import torch

from tournant.deploy import local_ray
from tournant.deploy.app import make_app
from tournant.deploy.config import ServeFile, ServiceConfig, parse_config
from tournant.deploy.local_ray import check_gpus
from tournant.workers.errors import ConfigError


@pytest.mark.parametrize(
    ("device", "gpus_in_cluster", "wanted"),
    [("cpu", 4, 0), ("auto", None, 0), ("auto", 0, 0), ("auto", 2, 1), ("cuda", 0, 1)],
)
def test_a_replica_asks_for_a_gpu_where_it_will_use_one(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus_in_cluster: int | None, wanted: int
) -> None:
    """Ray hides every GPU from an actor that has not asked for one."""
    monkeypatch.setattr(ray, "is_initialized", lambda: gpus_in_cluster is not None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": float(gpus_in_cluster or 0)})
    app = make_app(parse_config({"engine": {"device": device}}))
    options = app._bound_deployment.ray_actor_options
    assert options["num_gpus"] == wanted


def test_replicas_that_would_wait_for_gpus_without_an_end_are_refused() -> None:
    """Ray only waits, and so would everybody else."""

    def config(device: str, replicas: int) -> ServiceConfig:
        return parse_config({"engine": {"device": device}, "num_replicas": replicas})

    for device, replicas, gpus in (("cuda", 1, 0), ("cuda", 3, 2), ("auto", 2, 1)):
        wanted = f"device is '{device}' and num_replicas is {replicas}; .* Ray finds {gpus} here"
        with pytest.raises(ConfigError, match=wanted):
            check_gpus(config(device, replicas), gpus)
    for device, replicas, gpus in (("cuda", 2, 2), ("auto", 2, 2), ("auto", 2, 0), ("cpu", 2, 1)):
        check_gpus(config(device, replicas), gpus)


def test_serve_on_a_gpu_that_is_not_there_ends_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_ray(*_: object) -> None:
        raise AssertionError("Ray is started")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(local_ray, "start_ray", start_ray)
    monkeypatch.chdir(tmp_path)
    plan = ServeFile(config=parse_config({"model": "/no/model", "engine": {"device": "cuda"}}))
    with pytest.raises(ConfigError, match=r"device is 'cuda', but torch .* finds no usable NVIDIA GPU 0 here"):
        local_ray.ServeProcess(os.open(os.devnull, os.O_WRONLY), tmp_path)._serve(plan)
