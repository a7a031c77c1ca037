"""The real thing on a real Ray with model M: `tournant serve`, `serve deploy`, and handles."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from openai import APITimeoutError, OpenAI
from ray import serve
from ray.serve.schema import ApplicationStatus

from tournant.deploy.errors import GenerationFailed, RequestError
from tournant.deploy.supervisor import descendants
from tournant.workers.errors import EngineDeadError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]

BIN = Path(sys.executable).parent
MESSAGES: list[Any] = [{"role": "user", "content": "What is it?"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
LONG: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1500}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def ask(port: int, stream: bool) -> str:
    """M's greedy answer over HTTP."""
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    if stream:
        chunks = client.chat.completions.create(model="M", messages=MESSAGES, stream=True, **GREEDY)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    answer = client.chat.completions.create(model="M", messages=MESSAGES, **GREEDY)
    return answer.choices[0].message.content or ""


def handle() -> Any:
    return serve.get_app_handle("tournant")


def leftovers(tmp: Path) -> list[str]:
    """Run folders and shared memory that a `tournant serve` could have left."""
    return [str(path) for path in (*tmp.glob("tournant-*"), *Path("/dev/shm").glob("*"), *Path("/tmp").glob("ray"))]


def test_tournant_serve_answers_and_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    port = free_port()
    run_folders = Path("/tmp", f"t{os.getpid()}")  # sockets below need a short path
    run_folders.mkdir()
    before = set(leftovers(run_folders))
    command = [
        BIN / "tournant",
        "serve",
        tiny_model,
        "--port",
        str(port),
        "--served-model-name",
        "M",
        "--dtype",
        "float32",
        "--cache-dir",
        tmp_path / "cache",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(run_folders)},
    )
    try:
        assert process.stdout is not None
        ready, curl = process.stdout.readline(), process.stdout.readline()
        assert f"http://127.0.0.1:{port}/v1 serves M in float32 on cpu, KV pool " in ready
        pasted = subprocess.run(curl, shell=True, capture_output=True, text=True, check=True, timeout=60)
        assert json.loads(pasted.stdout)["model"] == "M"
        assert ask(port, stream=True) == ask(port, stream=False) != ""
        below = descendants(process.pid)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        chunks = client.chat.completions.create(
            model="M", messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}, **LONG
        )
        next(iter(chunks))
    finally:
        process.send_signal(signal.SIGINT)  # while it streams
        errors = process.communicate(timeout=30)[1]
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert len(below) > 5
    assert not [pid for pid in below if Path("/proc", str(pid)).exists()]
    assert set(leftovers(run_folders)) <= before
    run_folders.rmdir()
    with socket.create_server(("127.0.0.1", port)):
        pass


def wait_until_running() -> None:
    """Until the application is up. Raises AssertionError with what Serve says when it fails or takes too long."""
    deadline = time.monotonic() + 90
    while True:
        application = serve.status().applications.get("tournant")
        if application is not None and application.status == ApplicationStatus.RUNNING:
            return
        failed = application is not None and application.status == ApplicationStatus.DEPLOY_FAILED
        assert not failed, application
        assert time.monotonic() < deadline, application
        time.sleep(0.2)


@pytest.fixture(scope="module")
def deployed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A Ray of this test's own, and on it the service by `serve deploy` with a Serve file; its HTTP port."""
    folder = Path("/tmp", f"r{os.getpid()}")
    folder.mkdir()
    port, dashboard = free_port(), free_port()
    path = tmp_path_factory.mktemp("deploy") / "service.yaml"
    args = {
        "model": str(tiny_model),
        "served_model_name": "M",
        "cache_dir": str(path.parent / "cache"),
        "engine": {"dtype": "float32"},
    }
    application = {"name": "tournant", "import_path": "tournant.deploy.app:build_app", "args": args}
    path.write_text(yaml.safe_dump({"http_options": {"port": port}, "applications": [application]}))
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=80 << 20,
            include_dashboard=True,
            dashboard_port=dashboard,
            log_to_driver=False,
            _temp_dir=str(folder),
            _plasma_directory=str(folder),
        )
        try:
            subprocess.run(
                [BIN / "serve", "deploy", "--address", f"http://127.0.0.1:{dashboard}", path],
                check=True,
                capture_output=True,
                timeout=60,
            )
            wait_until_running()
            yield port
            engine = handle().describe.remote().result(timeout_s=60)["engine_pid"]
        finally:
            serve.shutdown()
            ray.shutdown(wait_for_processes=True)
            shutil.rmtree(folder)
        assert not Path("/proc", str(engine)).exists()


def test_http_and_handle_whole_and_streamed_give_the_same_answer(deployed: int) -> None:
    completion = handle().generate.remote(MESSAGES, **GREEDY).result(timeout_s=60)
    deltas = list(handle().options(stream=True).stream.remote(MESSAGES, **GREEDY))
    (answer,) = completion["answers"]
    assert answer["text"] == "".join(delta["text"] for delta in deltas) != ""
    assert answer["token_ids"] == [token for delta in deltas for token in delta["token_ids"]]
    assert [delta["finish_reason"] for delta in deltas if delta["finish_reason"]] == [answer["finish_reason"]]
    assert completion["usage"]["completion_tokens"] == len(answer["token_ids"])
    assert ask(deployed, stream=False) == ask(deployed, stream=True) == answer["text"]


def test_token_ids_and_logprobs_cross_a_handle(deployed: int) -> None:
    params = {"temperature": 0.0, "max_tokens": 3, "logprobs": 2, "ignore_eos": True}
    (answer,) = handle().generate.remote([1, 2, 3], **params).result(timeout_s=60)["answers"]
    assert [token for token, _ in answer["logprobs"]] == answer["token_ids"]
    assert all(len(entry["top"]) == 2 for _, entry in answer["logprobs"])
    (streamed,) = [
        [
            token
            for delta in handle().options(stream=True).stream.remote([1, 2, 3], **params)
            for token, _ in delta["logprobs"] or ()
        ]
    ]
    assert streamed == answer["token_ids"]


def test_errors_keep_their_kind_across_a_handle(deployed: int) -> None:
    for prompt, params, message in (
        ("", {}, "the prompt has no tokens"),
        ("a", {"temperature": -1.0}, "temperature is -1.0"),
        ("a", {"temprature": 1.0}, "temprature"),
        ([1] * 5000, {}, "5000 tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            handle().generate.remote(prompt, **params).result(timeout_s=60)
        with pytest.raises(RequestError, match=message):
            list(handle().options(stream=True).stream.remote(prompt, **params))
    with pytest.raises(GenerationFailed, match="longer than its limit") as caught:
        handle().generate.remote("a", timeout_s=0.001, ignore_eos=True, **LONG).result(timeout_s=60)
    assert caught.value.kind == "timeout"


def test_leaving_a_stream_stops_the_engine(deployed: int) -> None:
    """Over HTTP, streamed or not, and through a handle."""

    def count(series: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{deployed}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(series))

    aborted = 'vllm_request_success_total{finished_reason="abort"'
    before = count(aborted)
    client = OpenAI(base_url=f"http://127.0.0.1:{deployed}/v1", api_key="none", max_retries=0, timeout=60)
    with client.chat.completions.create(
        model="M", messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}, **LONG
    ) as chunks:
        next(iter(chunks))
    response = handle().options(stream=True).stream.remote(MESSAGES, ignore_eos=True, **LONG)
    next(iter(response))
    response.cancel()
    with pytest.raises(APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(
            model="M", messages=MESSAGES, extra_body={"ignore_eos": True}, **LONG
        )
    deadline = time.monotonic() + 30
    while count(aborted) < before + 3:
        assert time.monotonic() < deadline, "one of the answers was generated to its end"
        time.sleep(0.05)
    assert count("tournant_answers_outstanding{") == 0


def test_a_dead_engine_is_replaced(deployed: int) -> None:
    first = handle().describe.remote().result(timeout_s=60)["engine_pid"]
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 90
    second = first
    while second == first:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        try:
            second = handle().describe.remote().result(timeout_s=60)["engine_pid"]
        except (EngineDeadError, ray.exceptions.RayError):
            continue
    assert ask(deployed, stream=False)
