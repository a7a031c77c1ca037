"""Autoscaling by a real Serve: replicas come with load and go without it, to none and back, and what runs goes on."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from tests.helpers.own_ray import own_ray
from tournant.cluster.autoscaling import LoadMeter
from tournant.deploy.app import make_app
from tournant.deploy.config import parse_config
from tournant.workers.messages import EngineStats

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning"),
]
PATIENCE_S = 150.0
APP = "scaled"
SCALING = {
    "min_replicas": 0,
    "initial_replicas": 1,
    "max_replicas": 2,
    "metrics_interval_s": 0.25,  # what Serve 2.60 reads; its environment variables of that name do nothing
    "look_back_period_s": 1.0,
    "upscale_delay_s": 0.2,
    "downscale_delay_s": 2.0,
    "policy": {
        "policy_function": "tournant.cluster.autoscaling:ServingPolicy",
        "policy_kwargs": {"target_queue_s": 1.0, "tokens_per_s": 1000.0},
    },
}


@pytest.fixture(scope="module")
def own_serve(no_cluster: None) -> Iterator[int]:
    """Serve on a Ray of these tests' own; its port."""
    with own_ray("a", num_cpus=4):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield port
        serve.shutdown()


class Pretender:
    """A replica whose engine has as much to do as a file says, beside the streams that it gives."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._meter = LoadMeter()
        self._steps = self._streams = 0

    async def record_autoscaling_stats(self) -> dict[str, float]:
        self._steps += 1
        queued = int((self._folder / "queued").read_text())
        stats = EngineStats(
            num_steps=self._steps,
            num_running=self._streams,
            num_waiting=int(queued > 0),
            queued_tokens=queued,
            kv_used=self._streams,
            kv_total=100,
        )
        return self._meter.measure(stats, time.monotonic())

    async def name(self) -> str:
        return str(serve.get_replica_context().replica_id.unique_id)

    async def stream(self) -> AsyncIterator[tuple[str, int]]:
        """Numbers, until another file is there."""
        import asyncio

        self._streams += 1
        name, number = await self.name(), 0
        while not (self._folder / "end").exists():
            yield name, number
            number += 1
            await asyncio.sleep(0.05)
        yield name, -1
        self._streams -= 1


def running(name: str = "Pretender") -> int:
    deployment = serve.status().applications[APP].deployments[name]
    return deployment.replica_states.get("RUNNING", 0)


def until(look: Callable[[], Any], true: Callable[[Any], bool]) -> Any:
    """What is found once it is as wanted."""
    deadline = time.monotonic() + PATIENCE_S
    while not true(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def test_replicas_come_with_load_and_go_without_stopping_a_stream(own_serve: int, tmp_path: Path) -> None:
    queued = tmp_path / "queued"
    queued.write_text("0")
    app = serve.deployment(
        autoscaling_config=SCALING,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=PATIENCE_S,
        graceful_shutdown_wait_loop_s=0.1,
        max_ongoing_requests=64,
    )(Pretender).bind(str(tmp_path))
    handle = serve.run(app, name=APP, route_prefix=None)
    assert running() == 1
    queued.write_text("5000")
    until(running, lambda count: count == 2)
    streams: list[Any] = []
    at: set[str] = set()
    while len(at) < 2:
        streams.append(iter(handle.options(stream=True).stream.remote()))
        name, number = next(streams[-1])
        assert number == 0
        at.add(name)
    queued.write_text("0")
    until(running, lambda count: count == 1)
    for stream in streams:  # what Serve stops goes on with what it has
        later = [number for _, number in (next(stream) for _ in range(5))]
        assert later == [1, 2, 3, 4, 5]
    assert running() == 1, "a stream that runs keeps its replica"
    (tmp_path / "end").touch()
    assert [[number for _, number in stream][-1] for stream in streams] == [-1] * len(streams)
    until(running, lambda count: count == 0)
    assert handle.name.remote().result(timeout_s=PATIENCE_S), "and somebody who asks wakes it"
    assert running() == 1
    serve.delete(APP)


class Users:
    """They ask one after the other, `count` of them at a time, and keep what went wrong."""

    def __init__(self, url: str, prompt_tokens: int, max_tokens: int) -> None:
        self.url, self.num_answered = url, 0
        self.faults: list[str] = []
        self._body = {
            "model": "M", "prompt": list(range(1, prompt_tokens + 1)), "max_tokens": max_tokens, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, count: int) -> None:
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._ends.is_set():
            try:
                self._one()
                self.num_answered += 1
            except (OSError, ValueError) as error:
                self.faults.append(repr(error))

    def _one(self) -> None:
        request = urllib.request.Request(
            self.url, json.dumps(self._body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            lines = [line.decode().removeprefix("data: ").strip() for line in response if line.startswith(b"data")]
        if lines[-1] != "[DONE]" or any("error" in json.loads(line) for line in lines[:-1]):
            raise ValueError(f"cut off after {len(lines)} events: {lines[-1][:200]}")


@pytest.mark.soak
@pytest.mark.parametrize("ingress", ["direct", "resilient"])
def test_a_service_grows_and_shrinks_under_its_users(own_serve: int, tiny_model: Path, ingress: str) -> None:
    """Many of them need two replicas, one needs one; nobody's answer is cut off by either change."""
    engine = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2, "kv_cache_bytes": "4MiB"}
    config = {"model": str(tiny_model), "served_model_name": "M", "ingress": ingress, "engine": engine}
    scaling = {**SCALING, "min_replicas": 1, "downscale_delay_s": 4.0}
    scaling["policy"] = {**SCALING["policy"], "policy_kwargs": {"target_queue_s": 0.02, "tokens_per_s": 500.0}}
    app = make_app(
        parse_config(config | {"advanced": {"num_threads": 1}}),
        {"autoscaling_config": scaling, "ray_actor_options": {"num_cpus": 0}},
    )
    serve.run(app, name=APP, route_prefix="/scaled")
    url = f"http://127.0.0.1:{own_serve}/scaled/v1/completions"
    assert running("Replica") == 1
    few, many = Users(url, 10, 150), Users(url, 60, 30)
    few.start(1)
    many.start(12)
    try:
        until(lambda: running("Replica"), lambda count: count == 2)
        many.end()
        until(lambda: running("Replica"), lambda count: count == 1)
        answered = few.num_answered
        until(lambda: few.num_answered, lambda count: count > answered + 3)
    finally:
        many.end()
        few.end()
    assert few.faults + many.faults == []
    assert running("Replica") == 1
    serve.delete(APP)
