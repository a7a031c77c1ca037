"""The real thing on a real Ray with model M: `tournant serve`, `serve deploy`, and handles."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from openai import APITimeoutError, AuthenticationError, OpenAI
from ray import serve
from ray.serve.schema import ApplicationStatus
from typer.testing import CliRunner

from tests.cluster.service_harness import free_port
from tests.deploy.keys import KEYS, tenants, write_secret
from tournant.deploy.cli import app as command_line
from tournant.deploy.errors import GenerationFailed, RequestError
from tournant.deploy.supervisor import descendants
from tournant.kvstore import nvme_folder
from tournant.workers.errors import EngineDeadError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]

BIN = Path(sys.executable).parent
MESSAGES: list[Any] = [{"role": "user", "content": "What is it?"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
LONG: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1500}


def ask(port: int, stream: bool, key: str = "none") -> str:
    """M's greedy answer over HTTP."""
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60)
    if stream:
        chunks = client.chat.completions.create(model="M", messages=MESSAGES, stream=True, **GREEDY)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    answer = client.chat.completions.create(model="M", messages=MESSAGES, **GREEDY)
    return answer.choices[0].message.content or ""


def handle() -> Any:
    return serve.get_app_handle("tournant")


def leftovers(tmp: Path) -> list[str]:
    """Run folders and shared memory that a `tournant serve` could have left; semaphores are of searches of simulations
    that another test process may run.
    """
    shared = [path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")]
    return [str(path) for path in (*tmp.glob("tournant-*"), *shared, *Path("/tmp").glob("ray"))]


@pytest.fixture
def run_folders() -> Iterator[Path]:
    """TMPDIR of a `tournant serve`, whose sockets need a short path. A test that ends well has removed it."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def start_with_tiers(model: Path, tmp_path: Path, run_folders: Path, port: int) -> subprocess.Popen[str]:
    """`tournant serve` with a node store in RAM and on disk, which is kept between starts."""
    command: list[Any] = [BIN / "tournant", "serve", model, "--port", port, "--served-model-name", "M"]
    command += ["--dtype", "float32", "--cache-dir", tmp_path / "cache", "--kv-cache-bytes", "4MiB"]
    command += ["--host-bytes", "16MiB", "--nvme-bytes", "256MiB", "--nvme-folder", tmp_path / "kv"]
    return subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(run_folders)},
    )


def kv_status(run_folders: Path) -> dict[str, str]:
    """What `tournant kv status` finds by itself."""
    found = subprocess.run(
        [BIN / "tournant", "kv", "status"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "TMPDIR": str(run_folders)},
    )
    return dict(line.split(maxsplit=1) for line in found.stdout.splitlines())


def test_blocks_outlive_tournant_serve(tiny_model: Path, tmp_path: Path, run_folders: Path) -> None:
    """However it ends: engines first, then the store writes to disk what it has, and the next start finds it."""
    port = free_port()
    before = set(leftovers(run_folders))
    on_disk = [0]
    for number, prompt in ((signal.SIGINT, "first " * 20), (signal.SIGTERM, "second " * 20)):
        process = start_with_tiers(tiny_model, tmp_path, run_folders, port)
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("Ready"), process.communicate()
            line = process.stdout.readline()
            assert line.startswith(f"KV store: 16.0 MiB of RAM, up to 256.0 MiB in {tmp_path / 'kv'}: adopted ")
            assert line.endswith(f"adopted {on_disk[-1]}, refused 0, corrupt 0 (tournant kv status)\n")
            facts = kv_status(run_folders)
            assert Path(facts["socket"]).is_relative_to(run_folders)
            assert facts["adopted"] == str(on_disk[-1])
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
            client.completions.create(model="M", prompt=prompt, max_tokens=1)
            below = descendants(process.pid)
        finally:
            process.send_signal(number)
            errors = process.communicate(timeout=60)[1]
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        assert "writing KV blocks to " in errors
        assert not [pid for pid in below if Path("/proc", str(pid)).exists()]
        assert set(leftovers(run_folders)) <= before
        on_disk.append(nvme_folder.verify(tmp_path / "kv").adopted)
        assert on_disk[-1] > on_disk[-2]
    run_folders.rmdir()


def test_tournant_serve_answers_and_leaves_nothing(tiny_model: Path, tmp_path: Path, run_folders: Path) -> None:
    port = free_port()
    before = set(leftovers(run_folders))
    admin_key = write_secret(tmp_path / "admin", KEYS["root"])
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
        "--api-keys-file",
        write_secret(tmp_path / "keys", tenants("ann")),
        "--admin-port",
        "0",
        "--admin-key-file",
        admin_key,
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
        ready, operators, curl = (process.stdout.readline() for _ in range(3))
        assert f"http://127.0.0.1:{port}/v1 serves M in float32 on cpu, KV pool " in ready
        environment = {**os.environ, "API_KEY": KEYS["ann"]}
        pasted = subprocess.run(
            curl, shell=True, capture_output=True, text=True, check=True, timeout=60, env=environment
        )
        assert json.loads(pasted.stdout)["model"] == "M"
        assert ask(port, True, KEYS["ann"]) == ask(port, False, KEYS["ann"]) != ""
        with pytest.raises(AuthenticationError):
            ask(port, stream=False)
        shown = CliRunner().invoke(
            command_line, ["weights", "status", "--url", operators.split()[1], "--key-file", str(admin_key)]
        )
        assert "state done" in shown.output
        (folder,) = run_folders.iterdir()  # Ray opens its own to all users, which lies below
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder / "r/session_latest/sockets/raylet").is_socket()
        below = descendants(process.pid)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEYS["ann"], max_retries=0, timeout=60)
        chunks = client.chat.completions.create(
            model="M", messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}, **LONG
        )
        next(iter(chunks))
    finally:
        process.send_signal(signal.SIGINT)  # while it streams
        errors = process.communicate(timeout=60)[1]
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
    deadline = time.monotonic() + 240
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
    """A Ray of this test's own, and on it the service by `serve deploy` with the shipped file with tiers, made small;
    its HTTP port.
    """
    folder = Path("/tmp", f"r{os.getpid()}")
    folder.mkdir()
    port, dashboard = free_port(), free_port()
    path = tmp_path_factory.mktemp("deploy") / "service.yaml"
    data = yaml.safe_load((Path(__file__).parents[2] / "deploy/configs/tiers.yaml").read_text())
    data["http_options"]["port"] = port
    args = data["applications"][0]["args"]
    args |= {"model": str(tiny_model), "served_model_name": "M", "cache_dir": str(path.parent / "cache")}
    args["engine"]["dtype"] = "float32"
    args["kv_store"] |= {"host_bytes": "64MiB", "nvme_folder": str(path.parent / "kv")}
    path.write_text(yaml.safe_dump(data))
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": str(folder)}
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
                timeout=180,
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


def test_a_killed_node_store_comes_back_and_nobody_notices(deployed: int) -> None:
    """Same socket, same engine; /health and requests go on meanwhile, and usage tells of tiers."""

    def store() -> dict[str, Any]:
        facts = handle().describe.remote().result(timeout_s=60)
        return facts["kv_store"] | {"engine_pid": facts["engine_pid"]}

    def healthy() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{deployed}/health", timeout=30) as response:
            return bool(response.status == 200)

    actor = ray.get_actor(f"tournant-store-{ray.get_runtime_context().get_node_id()}", namespace="tournant-tournant")
    first, pid = store(), ray.get(actor.status.remote(), timeout=30)["pid"]
    assert first["nvme_cap_bytes"] == 4 << 30
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    second = first
    while second.get("incarnation", first["incarnation"]) == first["incarnation"]:
        assert time.monotonic() < deadline, second
        assert healthy()
        usage = handle().generate.remote(MESSAGES, **GREEDY).result(timeout_s=60)["usage"]
        assert sum(usage["cached_by_tier"][tier] for tier in ("device", "host", "nvme")) == usage["cached_tokens"]
        second = store()
    assert (second["socket"], second["engine_pid"]) == (first["socket"], first["engine_pid"])


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
