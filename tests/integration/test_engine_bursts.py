"""More clients than can be served, over Serve: who is refused is told so, who comes in is known, and nothing stays."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from tests.deploy.fake_server import COMPLETIONS, make
from tests.deploy.keys import KEYS, bearer, tenants, write_secret
from tests.deploy.sockets import ask
from tests.integration.conftest import Deployed
from tournant.deploy.access import Access
from tournant.deploy.app import make_app
from tournant.deploy.config import parse_config
from tournant.deploy.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]
INGRESSES = ("direct", "resilient")
RUN, WAIT = 4, 16
CAPACITY, CLIENTS = RUN + WAIT, 10 * (RUN + WAIT)
PATIENCE_S = 120.0
ENGINE = {"device": "cpu", "dtype": "float32", "max_num_seqs": RUN, "max_queued_requests": WAIT}
SHORT: dict[str, Any] = {"model": "M", "prompt": "hi", "max_tokens": 8, "ignore_eos": True}
LONG: dict[str, Any] = SHORT | {"max_tokens": 2000, "stream": True}
SPARE_MIB = 24  # that a process may take more in a burst than it had after the one before


class Service:
    """An application with keys: ann may do all there is, bob has `RUN` requests at once, root is for operators."""

    def __init__(self, nodes: Deployed, name: str) -> None:
        self.name, self.url = name, f"{nodes.url}/{name}"
        self._folder = nodes.cluster.folder

    def app(self, model: Path, folder: Path) -> serve.RunTarget:
        content = tenants("ann")
        content["tenants"] += tenants("bob", max_outstanding=RUN)["tenants"]
        content["tenants"] += [{"name": "few", "keys": ["tn-few-0123456789abcdef"], "requests_per_minute": 1}]
        access = {
            "api_keys_file": str(write_secret(folder / "keys", content)),
            "admin_port": 0,
            "admin_key_file": str(write_secret(folder / "admin", KEYS["root"])),
        }
        args = {"model": str(model), "served_model_name": "M", "ingress": self.name, "engine": ENGINE, "access": access}
        cpus = {"ray_actor_options": {"num_cpus": 0}}
        made = make_app(parse_config(args | {"advanced": {"num_threads": 1}}), cpus, str(self._folder), cpus)
        return serve.RunTarget(made, name=self.name, route_prefix=f"/{self.name}")

    @property
    def facts(self) -> dict[str, Any]:
        handle: Any = serve.get_app_handle(self.name)
        found: dict[str, Any] = handle.describe.remote().result(timeout_s=60)
        return found

    def load(self) -> dict[str, float]:
        """Of the engine, as autoscaling is told."""
        handle: Any = serve.get_deployment_handle("Replica", self.name)
        found: dict[str, float] = handle.record_autoscaling_stats.remote().result(timeout_s=60)
        return found

    def processes(self) -> dict[str, int]:
        """Process ids by what they are."""
        found = {"engine": int(self.facts["engine_pid"])}
        for path in Path("/proc").iterdir():
            with suppress(OSError):
                title = (path / "cmdline").read_bytes().decode() if path.name.isdecimal() else ""
                if title.startswith(f"ray::ServeReplica:{self.name}:"):
                    found[title.split(":")[-1].strip("\0")] = int(path.name)
        assert len(found) == (2 if self.name == "direct" else 3), found
        return found

    @asynccontextmanager
    async def client(self, name: str = "ann", **options: Any) -> AsyncIterator[httpx.AsyncClient]:
        given: dict[str, Any] = {"base_url": self.url, "headers": bearer(name), "timeout": PATIENCE_S} | options
        async with httpx.AsyncClient(**given, trust_env=False) as made:
            yield made


def memory(pids: dict[str, int]) -> dict[str, int]:
    """MiB that each of some processes has in RAM."""
    return {name: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) >> 8 for name, pid in pids.items()}


@pytest.fixture(scope="module")
def services(nodes: Deployed, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    """Of either arrangement, with one engine each."""
    found = [Service(nodes, name) for name in INGRESSES]
    serve.run_many([one.app(tiny_model, tmp_path_factory.mktemp(one.name)) for one in found])
    yield found
    for one in found:
        serve.delete(one.name)


@pytest.fixture(params=INGRESSES)
def service(services: list[Service], request: pytest.FixtureRequest) -> Service:
    return services[INGRESSES.index(request.param)]


# ---------------------------------------------------------------- who may come in


def test_every_route_needs_a_key_and_operators_another_one(service: Service, tiny_model: Path) -> None:
    access = Access(parse_config({"access": {"admin_port": 0}}).access)
    routes = make(Tokenizer.from_folder(tiny_model), "a", access=access).app.routes
    facts = service.facts
    host, port = facts["admin_address"]

    async def scenario() -> None:
        async with service.client(headers={}) as nobody:
            for path, method in ((path, method) for path, methods in routes.items() for method in methods):
                for headers in ({}, bearer("root")):
                    got = await nobody.request(method, path, headers=headers, json={} if method == "POST" else None)
                    assert got.status_code == (200 if path == "/health" else 401), path
                    assert path == "/health" or got.headers["www-authenticate"].startswith("Bearer")
        async with service.client() as ann:
            assert (await ann.get("/v1/models")).status_code == 200
            assert (await ann.get("/admin/weights")).status_code == 404  # it has a port of its own
            few = {"authorization": "Bearer tn-few-0123456789abcdef"}
            first, second = [await ann.post(COMPLETIONS, json=SHORT, headers=few) for _ in range(2)]
            assert (first.status_code, second.status_code) == (200, 429)
            assert 0 < int(second.headers["retry-after"]) <= 60
            assert second.json()["error"]["code"] == "quota_exceeded"
        async with service.client("root", base_url=f"http://{host}:{port}") as root:
            for headers, status in (({"authorization": ""}, 401), (bearer("ann"), 403), (bearer("root"), 200)):
                assert (await root.get("/admin/weights", headers=headers)).status_code == status
            told = (await root.get("/admin/weights")).json()
            assert [one["weights_id"] for one in told["replicas"]] == [facts["weights_id"]]
            assert (await root.post("/reset_prefix_cache")).json() == {"success": True}

    asyncio.run(scenario())


# ---------------------------------------------------------------- more than can be served


@dataclass
class Burst:
    """answers: by status; faults: what was no answer, or not a whole one."""

    answers: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    async def keep_asking(self, client: httpx.AsyncClient, number: int, until_s: float) -> None:
        """One after the other. Who is refused comes again soon, and not as late as it is told."""
        rng = random.Random(number)
        while time.monotonic() < until_s:
            stream, headers = rng.random() < 0.5, bearer("ann" if number % 2 else "bob")
            try:
                got = await client.post(COMPLETIONS, json=SHORT | {"stream": stream}, headers=headers)
                self._check(got, stream)
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                self.faults.append(f"{type(error).__name__}: {error}")
                continue
            if got.status_code != 200:
                await asyncio.sleep(rng.random())

    def _check(self, got: httpx.Response, stream: bool) -> None:
        self.answers[got.status_code] += 1
        if got.status_code == 200:
            text = got.text.split("data: ")[-2] if stream else got.text
            if json.loads(text)["choices"][0]["finish_reason"] != "length" or (stream and "[DONE]" not in got.text):
                raise ValueError(f"an answer that is not whole: {got.text[-300:]}")
            return
        code = {503: "overloaded", 429: "quota_exceeded"}[got.status_code]
        if got.json()["error"]["code"] != code or int(got.headers["retry-after"]) < 1:
            raise ValueError(f"a refusal without what belongs to it: {got.status_code} {got.headers} {got.text[:300]}")


async def burst(service: Service, pids: dict[str, int], seconds: float) -> tuple[Burst, dict[str, int]]:
    """Ten times as many clients as there is room for. What they were told, and the most memory of each process."""
    found, most = Burst(), memory(pids)
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
    async with service.client(limits=limits) as client:
        until_s = time.monotonic() + seconds
        asking = [asyncio.create_task(found.keep_asking(client, number, until_s)) for number in range(CLIENTS)]
        while time.monotonic() < until_s:
            await asyncio.sleep(0.2)
            now = memory(pids)
            most = {name: max(size, now[name]) for name, size in most.items()}
        await asyncio.gather(*asking)
    return found, most


@pytest.mark.parametrize(
    ("warm_s", "burst_s"), [(2.0, 4.0), pytest.param(10.0, 30.0, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
)
def test_everybody_is_answered_in_a_burst_and_memory_stays(service: Service, warm_s: float, burst_s: float) -> None:
    pids = service.processes()

    async def scenario() -> None:
        await burst(service, pids, warm_s)  # what a process takes once and keeps
        await at_rest(service)
        before = memory(pids)
        found, most = await burst(service, pids, burst_s)
        async with service.client() as client:  # at once
            assert (await client.post(COMPLETIONS, json=SHORT)).status_code == 200
        await at_rest(service)
        after = memory(pids)
        sizes = {name: (before[name], most[name], after[name]) for name in pids}
        print(f"\n{service.name}: {dict(found.answers)}, {len(found.faults)} faults; MiB before, most, after: {sizes}")
        assert found.faults == []
        assert found.answers.keys() == {200, 429, 503}
        assert max(most[name] - before[name] for name in pids) <= SPARE_MIB, sizes
        await full_and_empty(service)

    asyncio.run(scenario())


# ---------------------------------------------------------------- nothing stays


async def outstanding(client: httpx.AsyncClient) -> float:
    """Answers, as the metrics have them."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("tournant_answers_outstanding{"))


async def at_rest(service: Service) -> float:
    """Wait until nobody knows of a request any more; how many seconds that took."""
    began = time.monotonic()
    async with service.client() as client:
        while await outstanding(client) or (await asyncio.to_thread(service.load)).get("open", 1):
            assert time.monotonic() < began + PATIENCE_S
    return time.monotonic() - began


async def full_and_empty(service: Service) -> float:
    """All places are taken, so none was lost, and then all streams are closed at once. Returns how long it takes until
    nothing of them is left.
    """
    port, path = httpx.URL(service.url).port or 0, f"/{service.name}{COMPLETIONS}"
    async with service.client() as client:
        bobs = [await ask(port, path, LONG, bearer("bob")) for _ in range(RUN)]
        for reader, _ in bobs:
            assert b"200 OK" in await reader.readline()
        assert (await client.post(COMPLETIONS, json=SHORT, headers=bearer("bob"))).status_code == 429
        anns = [await ask(port, path, LONG, bearer("ann")) for _ in range(WAIT)]
        while await outstanding(client) < CAPACITY:
            await asyncio.sleep(0.01)
        assert (await client.post(COMPLETIONS, json=SHORT)).status_code == 503
    for _, writer in (*bobs, *anns):
        writer.transport.abort()
    return await at_rest(service)


@pytest.mark.parametrize("rounds", [3, pytest.param(25, marks=pytest.mark.soak)])
def test_streams_closed_at_once_leave_nothing(service: Service, rounds: int) -> None:
    async def scenario() -> None:
        took = [await full_and_empty(service) for _ in range(rounds)]
        print(f"\n{service.name}: {CAPACITY} streams closed at once {rounds} times, gone in {max(took):.2f} s at most")

    asyncio.run(scenario())


async def texts(reader: asyncio.StreamReader) -> Sequence[str]:
    """Of all events of a stream, which must be whole."""
    *lines, last = [line for line in (await reader.read()).decode().split("\n") if line.startswith("data: ")]
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]


def test_a_slow_reader_pauses_its_own_stream_only(service: Service) -> None:
    """It asks for more than buffers hold on the way, and has all of it when it reads on."""
    port, path = httpx.URL(service.url).port or 0, f"/{service.name}{COMPLETIONS}"

    async def scenario() -> None:
        slow, slow_writer = await ask(port, path, LONG | {"logprobs": 20}, bearer("ann"))
        others = [await ask(port, path, LONG | {"max_tokens": 200}, bearer("ann")) for _ in range(RUN)]
        for reader, writer in others:
            assert len("".join(await texts(reader))) > 0
            writer.close()
        await at_rest(service)  # the engine is done with it
        late = (await slow.read()).decode()
        assert late.count('"token_logprobs"') > 1
        logged = [json.loads(line[6:]) for line in late.split("\n") if line.startswith('data: {"')]
        assert sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in logged) == LONG["max_tokens"]
        slow_writer.close()

    asyncio.run(scenario())
