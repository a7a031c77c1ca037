"""What the Serve application asks of the cluster for a replica."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.deploy.async_test import async_test
from tests.deploy.fake_engine import FakeEngineClient
from tournant.cluster import run_folder
from tournant.cluster.metrics import MetricsRegistry, PrometheusBackend
from tournant.cluster.weights_rollout import Order, Report, UpdateUnavailable, Weights
from tournant.deploy import local_ray
from tournant.deploy.app import Replica, make_app, placement, serve_options
from tournant.deploy.config import ServeFile, parse_config
from tournant.deploy.frontend import Frontend
from tournant.deploy.local_ray import check_gpus
from tournant.deploy.tokenizer import Tokenizer
from tournant.deploy.weights_loop import WeightsLoop
from tournant.workers.errors import ConfigError, EngineDeadError


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
    made = make_app(parse_config({"engine": {"device": device}}))
    options = made._bound_deployment.ray_actor_options
    assert options["num_gpus"] == wanted


def test_replicas_that_would_wait_for_gpus_without_an_end_are_refused() -> None:
    """Ray only waits, and so would everybody else."""

    for device, replicas, gpus in (("cuda", 1, 0), ("cuda", 3, 2), ("auto", 2, 1)):
        wanted = f"device is '{device}' and num_replicas is {replicas}; .* Ray finds {gpus} here"
        with pytest.raises(ConfigError, match=wanted):
            check_gpus(parse_config({"engine": {"device": device}}), replicas, gpus)
    for device, replicas, gpus in (("cuda", 2, 2), ("auto", 2, 2), ("auto", 2, 0), ("cpu", 2, 1)):
        check_gpus(parse_config({"engine": {"device": device}}), replicas, gpus)


@pytest.mark.parametrize(
    ("engine", "node_gpus", "bundle", "strategy"),
    [
        ({"device": "cpu", "tensor_parallel_size": 4}, 0, {"CPU": 1}, "STRICT_PACK"),
        ({"device": "cpu", "tensor_parallel_size": 8}, 0, {"CPU": 1}, "PACK"),
        ({"device": "cpu", "pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 0, {"CPU": 1}, "PACK"),
        ({"device": "auto", "tensor_parallel_size": 2}, 2, {"CPU": 1, "GPU": 1}, "STRICT_PACK"),
        ({"device": "cuda", "tensor_parallel_size": 4}, 2, {"CPU": 1, "GPU": 1}, "PACK"),
    ],
)
def test_each_rank_has_a_bundle(
    monkeypatch: pytest.MonkeyPatch,
    engine: dict[str, Any],
    node_gpus: int,
    bundle: dict[str, float],
    strategy: str,
) -> None:
    """On one node if there is one that is large enough, and more than one stage need not be."""
    node = {"Alive": True, "Resources": {"CPU": 4.0, "GPU": float(node_gpus)}}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0 * node_gpus})
    monkeypatch.setattr(ray, "nodes", lambda: [node, node, {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 64.0}}])
    config = parse_config({"engine": engine})
    made = make_app(config)._bound_deployment
    told = made._replica_config
    assert told.placement_group_bundles == [bundle] * config.engine.num_ranks
    assert told.placement_group_strategy == strategy
    assert made.ray_actor_options["num_gpus"] == bundle.get("GPU", 0)


def test_cores_stand_in_for_gpus() -> None:
    engine = {"device": "cpu", "tensor_parallel_size": 2}
    options = placement(parse_config({"engine": engine, "advanced": {"num_threads": 3}}).engine)
    assert (options["placement_group_bundles"], options["ray_actor_options"]["num_cpus"]) == ([{"CPU": 3}] * 2, 3)


def test_a_split_that_needs_more_gpus_than_there_are_is_refused() -> None:
    config = parse_config({"engine": {"device": "cuda", "tensor_parallel_size": 2}})
    with pytest.raises(ConfigError, match=r"each replica takes 2 GPUs \(tensor_parallel_size 2 x .* finds 3 here"):
        check_gpus(config, 2, 3)
    check_gpus(config, 2, 4)


def test_what_is_stopped_outlasts_its_requests_and_only_an_ingress_may_come_before_it_goes() -> None:
    config = {"request_timeout_s": 100, "advanced": {"weights_drain_s": 7}}
    told = serve_options(parse_config(config))
    assert told["Replica"]["graceful_shutdown_timeout_s"] == 110
    assert "max_surge_percent" not in told["Replica"]  # its device may be the last one
    told = serve_options(parse_config(config | {"ingress": "resilient"}), ingress_options={"num_replicas": 2})
    assert (told["Ingress"]["graceful_shutdown_timeout_s"], told["Ingress"]["max_surge_percent"]) == (110, 100)
    assert told["Replica"]["graceful_shutdown_timeout_s"] == 17  # what is left then goes on elsewhere
    assert "max_surge_percent" not in told["Replica"]


class NobodyAnswers:
    """A roll-out that is gone."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    async def report(self, report: Report, hold_s: float) -> Order:
        self.phases.append(report.phase)
        raise UpdateUnavailable("no answer")


async def change(weights: Weights) -> str:
    raise AssertionError(f"nobody changes {weights}")


def replica_of(tokenizer: Tokenizer) -> tuple[Any, FakeEngineClient]:
    """A replica as it is when its engine runs, without what Serve puts around it."""
    engine = FakeEngineClient(lambda request, index: [])
    frontend = Frontend(tokenizer, engine)
    plain = Replica.__mro__[1]
    methods = {name: getattr(plain, name) for name in ("check_health", "end_engine", "_end", "frontend")}
    kind = type("PlainReplica", (), methods)  # its __del__ is awaited by Serve alone
    replica: Any = kind()
    replica._frontend, replica._metrics = frontend, MetricsRegistry("M", PrometheusBackend())
    replica._http = None
    replica._following = WeightsLoop("a", NobodyAnswers(), change)
    return replica, engine


@async_test
async def test_a_health_check_of_a_replica_that_is_ending_raises_and_logs_nothing(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve goes on asking while the node store writes to disk; what is raised then stands in the user's terminal."""
    replica, engine = replica_of(tokenizer)
    await replica.check_health()
    await replica.end_engine()
    assert not engine.alive
    await replica.check_health()
    assert caplog.records == []


@async_test
async def test_a_health_check_of_a_replica_whose_engine_died_raises(tokenizer: Tokenizer) -> None:
    replica, engine = replica_of(tokenizer)
    engine.die()
    with pytest.raises(EngineDeadError, match="cannot generate"):
        await replica.check_health()


@async_test
async def test_a_replica_that_is_lost_to_the_rollout_is_replaced_and_says_that_it_ends(tokenizer: Tokenizer) -> None:
    replica, engine = replica_of(tokenizer)
    await replica.check_health()
    replica._following.lost = "neither weights can be loaded"
    with pytest.raises(EngineDeadError, match="neither weights can be loaded"):
        await replica.check_health()
    await replica.end_engine()
    assert (replica._following._client.phases, engine.alive) == (["leaving"], False)
    await replica.check_health()


def test_sockets_of_ray_have_names_that_linux_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system's temporary folder is too long for that, /tmp is taken."""
    session = "session_2026-11-30_17-07-46_123456_4194304"  # of the largest process id
    below = f"/tournant-{os.getuid()}-0123abcd/{local_ray.RAY_FOLDER}/{session}/sockets/plasma_store"
    longest = "/" + "t" * (107 - len(below) - 1)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: longest)
    assert run_folder.temporary_folder() == Path(longest)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: longest + "t")
    assert run_folder.temporary_folder() == Path("/tmp")


def test_an_impossible_split_ends_before_ray_starts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_ray(*_: object) -> None:
        raise AssertionError("Ray is started")

    monkeypatch.setattr(local_ray, "start_ray", start_ray)
    monkeypatch.chdir(tmp_path)
    for key, message in (
        ("tensor_parallel_size", "tensor_parallel_size is 3, but .* possible are 1, 2, 4$"),
        ("pipeline_parallel_size", "pipeline_parallel_size is 3, but .* possible are 1 to 2$"),
    ):
        args = {"model": str(tiny_model), "cache_dir": str(tmp_path), "engine": {"device": "cpu", key: 3}}
        process = local_ray.ServeProcess(os.open(os.devnull, os.O_WRONLY), tmp_path)
        with pytest.raises(ConfigError, match=message):
            process._serve(ServeFile(config=parse_config(args)))


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
