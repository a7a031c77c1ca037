"""A service of two replicas whose weights are changed under load, on a real Ray."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from ray import serve
from typer.testing import CliRunner

from tests.cluster.service_harness import free_port
from tests.helpers.own_ray import own_ray
from tests.helpers.reference import reference_generate
from tests.helpers.tiny_model import build_tiny_model
from tournant.deploy.app import make_app
from tournant.deploy.cli import app as command_line
from tournant.deploy.config import parse_config
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.model_folder import weights_id

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]

NUM_REQUESTS, CONCURRENCY, NUM_PROMPTS, NUM_TOKENS = 500, 16, 20, 12
UPDATE_S = 240.0
QUICK_TO_NOTICE = {"health_check_period_s": 0.5}


class Service:
    """Two replicas on the weights "old", and what each model of two answers to each prompt."""

    def __init__(self, folder: Path, old: Path) -> None:
        self.port = free_port()
        self.old, self.new = old, build_tiny_model(folder / "new", seed=7)
        self.bad = folder / "bad"
        shutil.copytree(self.new, self.bad)
        os.truncate(self.bad / "model.safetensors", 50_000)
        cache = folder / "cache"
        self.ids = {name: weights_id(path, cache).hex() for name, path in (("old", self.old), ("new", self.new))}
        self.prompts = [[(7 * number + place) % 250 for place in range(20)] for number in range(NUM_PROMPTS)]
        tokenizer = Tokenizer.from_folder(old)
        self.texts = {
            self.ids[name]: [tokenizer.decode(tokens, True) for tokens in reference_generate(path, self.prompts, 12)]
            for name, path in (("old", self.old), ("new", self.new))
        }
        engine = {"device": "cpu", "dtype": "float32", "deterministic": True, "kv_cache_bytes": "4MiB"}
        advanced = {"num_threads": 1, "weights_drain_s": 5}
        args = {"model": str(old), "cache_dir": str(cache), "num_replicas": 2, "engine": engine, "advanced": advanced}
        self.config = parse_config(args)

    async def ask(self, client: AsyncOpenAI, number: int) -> str:
        """The weights that one request was answered by, whole or streamed; its text must be wholly theirs."""
        place = number % NUM_PROMPTS
        call: dict[str, Any] = {
            "model": self.old.name, "prompt": self.prompts[place], "temperature": 0.0, "max_tokens": NUM_TOKENS,
            "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        if number % 2:
            found = [chunk async for chunk in await client.completions.create(**call, stream=True)]
        else:
            found = [await client.completions.create(**call)]
        (weights,) = {part.model_extra["weights_id"] for part in found if part.model_extra is not None}
        (fingerprint,) = {part.system_fingerprint for part in found}
        (epoch,) = {part.model_extra["epoch"] for part in found if part.model_extra is not None}
        assert fingerprint == f"tournant-{weights[:12]}-e{epoch}"
        assert "".join(part.choices[0].text for part in found) == self.texts[weights][place]
        return str(weights)

    async def load(
        self, begin: Callable[[], None], going_on: Callable[[dict[str, Any]], bool], num_requests: int
    ) -> list[str]:
        """Requests, sixteen at a time, until there were so many and what has begun among them is over."""
        counted: list[str] = []
        some, over = asyncio.Event(), asyncio.Event()

        async def watch() -> None:
            await some.wait()
            await asyncio.to_thread(begin)
            while going_on(await asyncio.to_thread(self.status)):
                await asyncio.sleep(0.2)
            over.set()

        async def keep_asking(client: AsyncOpenAI, first: int) -> None:
            number = first
            while len(counted) < num_requests or not over.is_set():
                counted.append(await self.ask(client, number))
                some.set()
                number += CONCURRENCY

        openai = AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=180)
        async with openai as client, asyncio.timeout(UPDATE_S), asyncio.TaskGroup() as group:
            group.create_task(watch())
            for first in range(CONCURRENCY):
                group.create_task(keep_asking(client, first))
        return counted

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/admin/weights", timeout=30).raise_for_status().json()
        return found

    def update(self, model: Path, key: str) -> httpx.Response:
        headers = {"idempotency-key": key}
        return httpx.post(f"{self.url}/admin/weights", json={"model": str(model)}, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("weights"), tiny_model)
    with own_ray("u", num_cpus=2):
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": made.port})
            serve.run(make_app(made.config, QUICK_TO_NOTICE), name="tournant", route_prefix="/")
            yield made
        finally:
            serve.shutdown()


def test_the_weights_change_under_load_and_nobody_notices_but_by_their_name(service: Service) -> None:
    def begin() -> None:
        began = service.update(service.new, "one")
        assert (began.status_code, began.json()) == (202, {"epoch": 1, "status_url": "/admin/weights"})
        refused = service.update(service.bad, "two")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "update_running")
        assert service.update(service.new, "one").json()["epoch"] == 1

    counted = asyncio.run(service.load(begin, lambda status: status["state"] == "running", NUM_REQUESTS))
    assert len(counted) >= NUM_REQUESTS
    assert {weights: counted.count(weights) > 0 for weights in counted} == dict.fromkeys(service.ids.values(), True)
    assert set(counted[-CONCURRENCY:]) == {service.ids["new"]}
    status = service.status()
    assert (status["state"], status["epoch"], status["weights_id"]) == ("done", 1, service.ids["new"])
    runs = [(one["phase"], one["epoch"], one["weights_id"]) for one in status["replicas"]]
    assert runs == [("serving", 1, service.ids["new"])] * 2
    (card,) = httpx.get(f"{service.url}/v1/models").json()["data"]
    assert (card["id"], card["weights_id"], card["epoch"]) == (service.old.name, service.ids["new"], 1)

    # a replica that comes later starts on the new weights
    handle = serve.get_app_handle("tournant")
    names = {one["replica"] for one in status["replicas"]}
    os.kill(handle.describe.remote().result(timeout_s=60)["engine_pid"], signal.SIGKILL)
    deadline = time.monotonic() + UPDATE_S
    while True:
        replicas = service.status()["replicas"]
        serving = [one for one in replicas if one["phase"] == "serving"]
        if len(serving) == 2 and {one["replica"] for one in serving} != names:
            break
        assert time.monotonic() < deadline, replicas
        time.sleep(0.1)
    assert [(one["epoch"], one["weights_id"]) for one in replicas] == [(1, service.ids["new"])] * 2

    # weights that cannot be loaded change nothing, and the command says so
    def begin_bad() -> None:
        begun = service.update(service.bad, "three")
        assert (begun.status_code, begun.json()["epoch"]) == (202, 2)

    counted = asyncio.run(service.load(begin_bad, lambda status: status["state"] in ("running", "undoing"), 50))
    assert set(counted) == {service.ids["new"]}
    status = service.status()
    assert (status["state"], status["failed_epoch"], status["weights_id"]) == ("failed", 2, service.ids["new"])
    assert "model.safetensors" in status["error"]
    assert {one["weights_id"] for one in status["replicas"]} == {service.ids["new"]}
    answer = handle.generate.remote(service.prompts[0], temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = answer.result(timeout_s=60)
    assert (found["answers"][0]["text"], found["weights_id"], found["epoch"]) == (
        service.texts[service.ids["new"]][0], service.ids["new"], 3,
    )  # fmt: skip
    shown = CliRunner().invoke(command_line, ["weights", "status", "--url", service.url])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith(f"state failed\nepoch 3\nmodel {service.new}\nweights_id {service.ids['new']}\n")
