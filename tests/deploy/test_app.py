"""What the Serve application asks of the cluster for a replica."""

from __future__ import annotations

import pytest
import ray

from tournant.deploy.app import make_app
from tournant.deploy.config import parse_config


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
