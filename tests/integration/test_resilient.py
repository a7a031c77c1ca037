"""A resilient ingress over two engines on a real Ray: engines are killed, and nobody who reads an answer notices."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from openai import AsyncOpenAI
from ray import serve

from tests.cluster.service_harness import free_port
from tests.helpers.own_ray import own_ray
from tests.helpers.tiny_model import build_tiny_model
from tournant.cluster.app_namespace import namespace_of
from tournant.cluster.engine_members import Member, MembersConfig
from tournant.cluster.engines_actor import ACTOR_NAME, EngineAnnouncer, EnginesClient, EngineWatch
from tournant.deploy.app import make_app
from tournant.deploy.config import parse_config

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]

NUM_STREAMS, NUM_TOKENS, LONG = 10, 200, 1000
BODY: dict[str, Any] = {"temperature": 1.0, "extra_body": {"ignore_eos": True}}


class Service:
    """The application as it is deployed."""

    def __init__(self, args: dict[str, Any], folder: Path) -> None:
        self._args, self._folder = args, folder

    def run(self) -> None:
        """Deploy it, anew if it is there."""
        app = make_app(parse_config(self._args), {"health_check_period_s": 0.5}, str(self._folder))
        serve.run(app, name="tournant", route_prefix="/")

    async def replicas(self) -> set[str]:
        """Those that the registry names."""
        return {member.replica for member in (await EnginesClient("tournant").changes(None)).members}


@pytest.fixture(scope="module")
def port(service: Service) -> int:
    """Where it listens."""
    return int(service._args["port"])


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two engines and an ingress, on a Ray of this module's own."""
    found = free_port()
    engine = {"device": "cpu", "dtype": "float32", "deterministic": True, "kv_cache_bytes": "4MiB"}
    args = {
        "model": str(tiny_model),
        "served_model_name": "M",
        "cache_dir": str(tmp_path_factory.mktemp("cache")),
        "num_replicas": 2,
        "ingress": "resilient",
        "engine": engine,
        "advanced": {"num_threads": 1, "weights_drain_s": 1},
        "port": found,
    }
    with own_ray("r", num_cpus=4) as folder:
        try:
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": found})
            made = Service(args, folder)
            made.run()
            yield made
        finally:
            serve.shutdown()


async def read(client: AsyncOpenAI, number: int, seen: list[int], length: int = NUM_TOKENS) -> tuple[str, str | None]:
    """One streamed answer and why it ended. seen: events of each answer so far."""
    stream = await client.completions.create(
        model="M", prompt=f"prompt {number}", seed=number, max_tokens=length, stream=True, **BODY
    )
    text, reason = "", None
    async for event in stream:
        seen[number] += 1
        text += event.choices[0].text
        reason = event.choices[0].finish_reason or reason
    return text, reason


async def answers(client: AsyncOpenAI, length: int = NUM_TOKENS) -> list[tuple[str, str | None]]:
    seen = [0] * NUM_STREAMS
    return list(await asyncio.gather(*(read(client, number, seen, length) for number in range(NUM_STREAMS))))


async def while_killing(client: AsyncOpenAI, pid: int) -> list[tuple[str, str | None]]:
    """All answers, of an engine that is killed when every one of them is on its way, and another."""
    seen = [0] * NUM_STREAMS
    reading = [asyncio.ensure_future(read(client, number, seen)) for number in range(NUM_STREAMS)]
    while min(seen) < 5 and not any(one.done() for one in reading):
        await asyncio.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    return list(await asyncio.gather(*reading))


def test_an_engine_is_killed_under_ten_streams_and_their_texts_are_what_they_would_have_been(port: int) -> None:
    async def scenario() -> None:
        async with AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=200
        ) as client:
            want = await answers(client)
            assert {reason for _, reason in want} == {"length"}
            assert len({text for text, _ in want}) == NUM_STREAMS
            facts = await asyncio.to_thread(lambda: serve.get_app_handle("tournant").describe.remote().result())
            assert await while_killing(client, facts["engine_pid"]) == want
            again = await asyncio.to_thread(lambda: serve.get_app_handle("tournant").describe.remote().result())
            assert again["num_resumed"] > facts["num_resumed"] == 0
            assert await answers(client) == want
            ray.kill(ray.get_actor(ACTOR_NAME, namespace=namespace_of("tournant")), no_restart=False)
            assert await answers(client) == want  # frontends keep the streams they have

    asyncio.run(asyncio.wait_for(scenario(), 280))


@pytest.mark.soak
def test_everything_is_deployed_anew_under_ten_streams(port: int, service: Service) -> None:
    """Answers are too long for the time that engines have to end: they are handed on; the ingress stays for them."""

    async def scenario() -> None:
        async with AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=200
        ) as client:
            while len(before := await service.replicas()) < 2:  # the one that was killed is not back yet
                await asyncio.sleep(0.1)
            want = await answers(client, LONG)
            seen = [0] * NUM_STREAMS
            reading = [asyncio.ensure_future(read(client, number, seen, LONG)) for number in range(NUM_STREAMS)]
            while min(seen) < 5:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(service.run)
            assert list(await asyncio.gather(*reading)) == want
            after = await service.replicas()
            assert (len(before), len(after), before & after) == (2, 2, set())

    asyncio.run(asyncio.wait_for(scenario(), 280))


def test_weights_change_under_load_and_every_answer_is_of_one_model(port: int, tmp_path: Path) -> None:
    new = build_tiny_model(tmp_path / "new", seed=7)
    handle = serve.get_app_handle("tournant")
    counted: Counter[str] = Counter()

    async def keep_asking(client: AsyncOpenAI, over: asyncio.Event) -> None:
        while not over.is_set():
            stream = await client.completions.create(
                model="M", prompt="abc", temperature=0.0, max_tokens=12, stream=True, extra_body={"ignore_eos": True}
            )
            events = [event async for event in stream]
            (weights,) = {event.model_extra["weights_id"] for event in events if event.model_extra is not None}
            assert "".join(event.choices[0].text for event in events) == texts.setdefault(
                weights, "".join(event.choices[0].text for event in events)
            )
            assert events[-1].choices[0].finish_reason == "length"
            counted[weights] += 1

    async def scenario() -> None:
        over = asyncio.Event()
        async with (
            AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=200) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(4):
                group.create_task(keep_asking(client, over))
            while sum(counted.values()) < 20:
                await asyncio.sleep(0.05)
            epoch = await handle.update_weights.remote(str(new), "t1")
            while True:
                status = await handle.weights_status.remote()
                if status["state"] == "done" and status["epoch"] == epoch and len(counted) == 2:
                    break
                await asyncio.sleep(0.1)
            over.set()
        assert min(counted.values()) > 0
        assert len(set(texts.values())) == 2

    texts: dict[str, str] = {}
    asyncio.run(asyncio.wait_for(scenario(), 280))


def test_the_registry_hears_of_everybody_again_after_it_was_killed(port: int) -> None:
    async def scenario() -> None:
        client = EnginesClient("registry", MembersConfig(lease_us=2_000_000), idle_s=60.0)
        seen: list[set[str]] = []
        watch = EngineWatch(client, lambda members: seen.append({member.replica for member in members}))
        members = [Member(name, "127.0.0.1", 1, b"t", "n", "00", 0) for name in "ab"]
        first, second = (EngineAnnouncer(client, member, heartbeat_s=0.3) for member in members)

        async def until(names: set[str]) -> None:
            while not seen or seen[-1] != names:
                await asyncio.sleep(0.02)

        await until({"a", "b"})
        before = len(seen)
        ray.kill(ray.get_actor(ACTOR_NAME, namespace=namespace_of("registry")), no_restart=False)
        while len(seen) == before or seen[-1] != {"a", "b"}:
            await asyncio.sleep(0.02)
        await second.stop()
        await until({"a"})
        if first._task is not None:
            first._task.cancel()  # it dies without a word
        await until(set())
        await watch.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))
