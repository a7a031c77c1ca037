"""Every example runs as it stands, with model M: on one cluster, whose service is that of the autoscaling file."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray import serve

from tests.cluster.service_harness import free_port
from tests.helpers.own_ray import own_ray
from tournant.deploy.app import make_app
from tournant.deploy.client import connect
from tournant.deploy.client_types import NoSuchApplication
from tournant.deploy.config import load_config_file, parse_config

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`use_:DeprecationWarning"),  # Ray Data's own fields
]
REPO = Path(__file__).resolve().parents[2]
QUICKLY = {"metrics_interval_s": 0.25, "look_back_period_s": 1.0, "upscale_delay_s": 0.2, "max_replicas": 2}
Example = Callable[..., str]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Example:
    """Runs one with arguments; what it printed."""

    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(REPO / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def port(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Where the service of deploy/configs/autoscaling.yaml listens, made small and quick."""
    found = free_port()
    file = load_config_file(REPO / "deploy/configs/autoscaling.yaml")
    args = file.config.to_args() | {"model": str(tiny_model), "served_model_name": "M", "port": found}
    args["cache_dir"] = str(tmp_path_factory.mktemp("cache"))
    args["engine"] = {"device": "cpu", "dtype": "float32", "kv_cache_bytes": "4MiB"}
    args["advanced"] = {"num_threads": 1}
    options = file.deployment_options
    options["autoscaling_config"] |= QUICKLY
    options["autoscaling_config"]["policy"]["policy_kwargs"]["target_rate_util"] = 0.01
    with own_ray("x", num_cpus=4):
        try:
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": found})
            serve.run(make_app(parse_config(args), options), name="tournant", route_prefix="/")
            yield found
        finally:
            serve.shutdown()


def test_openai_client(port: int, example: Example) -> None:
    printed = example("openai_client.py", "--url", f"http://127.0.0.1:{port}/v1")
    assert len(printed) > 50


def test_handles(port: int) -> None:
    """As a program of its own, which joins the cluster."""
    command = [sys.executable, REPO / "examples/handles.py", "--address", ray.get_runtime_context().gcs_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    answered = [line for line in lines if " times " in line]
    assert [line.split()[0] for line in answered] == [str(number) for number in range(20)]
    assert all(" is -> " in line for line in answered)
    assert "50 tokens)" in done.stdout


def test_connecting_to_another_name_tells_which_there_are(port: int) -> None:
    with pytest.raises(NoSuchApplication, match="there are tournant; deploy"):
        connect("turnant")


def test_a_stream_that_is_left_is_over_at_the_replica(port: int) -> None:
    aborted = 'vllm_request_success_total{finished_reason="abort"'
    stream = connect().stream("a", max_tokens=2000, ignore_eos=True)
    assert next(stream).index == 0
    stream.close()
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()  # of one replica
        if sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(aborted)):
            return
        assert time.monotonic() < deadline, "it was generated to its end"


def test_autoscaling(port: int, example: Example) -> None:
    lines = example("autoscaling.py", "--in-flight", 32).splitlines()
    assert lines[-1].endswith("replicas: 2")
    assert all(", 0 failed," in line for line in lines)


def test_batch_file(port: int, example: Example, tiny_model: Path, tmp_path: Path) -> None:
    prompts = [{"prompt": f"prompt {number}", "id": number} for number in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    example("batch_file.py", tmp_path / "prompts.jsonl", tmp_path / "answers", "--model", tiny_model, "--max-tokens", 8)
    found = [json.loads(line) for path in (tmp_path / "answers").iterdir() for line in path.read_text().splitlines()]
    assert [
        {"prompt": line["prompt"], "id": line["id"]} for line in sorted(found, key=lambda line: line["id"])
    ] == prompts
    assert all(line["answer"] and line["tokens"] == 8 for line in found)


def test_offline(example: Example, tiny_model: Path) -> None:
    lines = example("offline.py", "--model", tiny_model)
    assert "The sky is blue because -> " in lines
    assert "Once upon a time -> " in lines
