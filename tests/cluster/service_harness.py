"""Services deployed on a Ray of three nodes, as tests ask them over HTTP."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from tests.workers.launch_harness import LENGTHS
from tests.workers.parallel_harness import NUM_NEW, without_near_ties
from tournant.deploy.app import make_app
from tournant.deploy.config import load_config_file, parse_config
from tournant.deploy.tokenizer import Tokenizer

CONFIGS = Path(__file__).resolve().parents[2] / "deploy/configs"
ENDS_S = 240.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Service:
    """One of the shipped files, deployed. Its model is small, and it is told which node gets what.

    args: what else the configuration says; options: of the deployment.
    """

    def __init__(
        self, name: str, model: Path, cache: Path, port: int, *, args: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self.model = model
        self.url = f"http://127.0.0.1:{port}/{name}"
        plan = load_config_file(CONFIGS / f"{name}.yaml")
        given = plan.config.to_args() | {"model": str(model), "served_model_name": "M", "cache_dir": str(cache)}
        given["engine"] |= {"device": "cpu", "dtype": "float32", "kv_cache_bytes": 4 << 20, "deterministic": True}
        given["kv_store"] = {"host_bytes": 8 << 20}
        given["advanced"] = {"num_threads": 1, "restore": "always", "lookup_ms": 10_000, "restore_ms": 60_000}
        for key, value in (args or {}).items():
            given[key] = given[key] | value if isinstance(value, Mapping) else value
        self.target = serve.RunTarget(make_app(parse_config(given), options), name=name, route_prefix=f"/{name}")

    def facts(self) -> dict[str, Any]:
        handle: Any = serve.get_app_handle(self.target.name)
        found: dict[str, Any] = handle.describe.remote().result(timeout_s=60)
        return found

    def replaced(self, engine_pid: int) -> bool:
        """Whether there is another engine than this one."""
        try:
            found: int = self.facts()["engine_pid"]
        except (RayError, RayServeException, TimeoutError):
            return False
        return found != engine_pid

    def post(self, prompt: str | list[int], timeout_s: float = 60.0, **fields: Any) -> Any:
        body = {"model": "M", "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=timeout_s)

    def check_answers(self, tier: str = "") -> None:
        """Over HTTP they are those of a single process. tier: where all blocks of the prompts must come from."""
        chosen = without_near_ties(self.model, LENGTHS)
        for prompt, answer in zip(chosen.prompts, chosen.answers, strict=True):
            with self.post(prompt, max_tokens=NUM_NEW) as response:
                found = json.load(response)
            assert found["choices"][0]["text"] == Tokenizer.from_folder(self.model).decode(answer, True)
            if tier:
                cached = found["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
                assert cached == {"device": 0, "host": 0, "nvme": 0} | {tier: (len(prompt) - 1) // 16 * 16}

    def wait_attached(self) -> None:
        """Until every rank has its store."""
        wait_for(lambda: self._gauge("tournant_store_attached") == 1)

    def forget_device(self) -> None:
        """Everything is below, and nothing on the device."""
        self.wait_attached()
        wait_for(lambda: self._gauge("tournant_dirty_blocks") == 0)
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response) == {"success": True}

    def store_pid(self, node: str) -> int:
        """The process of a node's store, which runs."""
        actor = ray.get_actor(f"tournant-store-{node}", namespace=f"tournant-{self.target.name}")
        pid: int = ray.get(actor.status.remote(), timeout=60)["pid"]
        return pid

    def _gauge(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        (value,) = (float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))
        return value

    def wait_answer(self) -> None:
        """Until the service answers; refusals meanwhile say when to try again."""
        deadline = time.monotonic() + ENDS_S
        while (refusal := self._refusal()) is not None:
            assert (refusal.code, refusal.headers["retry-after"]) == (503, "1"), refusal.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def _refusal(self) -> urllib.error.HTTPError | None:
        try:
            self.post("a", max_tokens=1).close()
        except urllib.error.HTTPError as error:
            return error
        return None


def all_end(pids: list[int]) -> bool:
    """Whether these processes end, now or in a while."""
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    return True


def wait_for(true: Callable[[], bool], limit_s: float = ENDS_S) -> None:
    """Raises AssertionError when it does not come true in a while."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
