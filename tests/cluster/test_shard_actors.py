"""Replicas of several ranks on a Ray of three nodes, deployed as the shipped files say: answers, and what dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray.util.placement_group import placement_group

from tests.cluster.conftest import RayCluster
from tests.workers.harness import files_of
from tests.workers.launch_harness import LENGTHS
from tests.workers.parallel_harness import NUM_NEW, without_near_ties
from tests.workers.test_rank_launch import PLACE
from tournant.cluster.shard_actors import RayRanks, deal, node_address
from tournant.deploy.app import make_app
from tournant.deploy.config import load_config_file, parse_config
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.errors import ConfigError
from tournant.workers.split import Split

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]
CONFIGS = Path(__file__).resolve().parents[2] / "deploy/configs"
ENDS_S = 60.0
HOST = socket.gethostname()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Service:
    """One of the shipped files, deployed. Its model is small, and it is told which node gets what."""

    def __init__(self, name: str, model: Path, cache: Path, port: int, **options: Any) -> None:
        self.model = model
        self.url = f"http://127.0.0.1:{port}/{name}"
        plan = load_config_file(CONFIGS / f"{name}.yaml")
        args = plan.config.to_args() | {"model": str(model), "served_model_name": "M", "cache_dir": str(cache)}
        args["engine"] |= {"device": "cpu", "dtype": "float32", "kv_cache_bytes": 4 << 20}
        args["advanced"] = {"num_threads": 1}
        self.target = serve.RunTarget(make_app(parse_config(args), options), name=name, route_prefix=f"/{name}")

    def facts(self) -> dict[str, Any]:
        handle: Any = serve.get_app_handle(self.target.name)
        found: dict[str, Any] = handle.describe.remote().result(timeout_s=60)
        return found

    def post(self, prompt: str | list[int], **fields: Any) -> Any:
        body = {"model": "M", "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=60)

    def check_answers(self) -> None:
        """Over HTTP they are those of a single process."""
        chosen = without_near_ties(self.model, LENGTHS)
        for prompt, answer in zip(chosen.prompts, chosen.answers, strict=True):
            with self.post(prompt, max_tokens=NUM_NEW) as response:
                text = json.load(response)["choices"][0]["text"]
            assert text == Tokenizer.from_folder(self.model).decode(answer, True)

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


def wait_for(true: Callable[[], bool]) -> None:
    """Raises AssertionError when it does not come true in a while."""
    deadline = time.monotonic() + ENDS_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture(scope="module")
def services(
    ray_cluster: RayCluster, tiny_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Service, Service]]:
    """tp.yaml as it is, and pp.yaml with a node for each rank."""
    port, cache = free_port(), tmp_path_factory.mktemp("cache")
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    bundles = [{"CPU": 1, "head": 1}, {"CPU": 1, "b": 1}]
    tp = Service("tp", tiny_models["tied"], cache, port)
    pp = Service("pp", tiny_models["m"], cache, port, placement_group_bundles=bundles)
    try:
        serve.run_many([tp.target, pp.target])
        yield tp, pp
    finally:
        serve.shutdown()


def test_a_rank_is_killed_and_its_set_comes_back(ray_cluster: RayCluster, services: tuple[Service, Service]) -> None:
    _, service = services
    service.check_answers()
    first = service.facts()
    leader, rank = first["ranks"]
    assert [leader["node"], rank["node"]] == [ray_cluster.node_id(name) for name in ("head", "b")]
    assert (leader["pid"], first["last_end"]) == (first["engine_pid"], "")
    with service.post("go on", max_tokens=1500, stream=True) as stream:
        assert stream.readline().startswith(b"data: {")
        os.kill(rank["pid"], signal.SIGKILL)
        *_, last, done = [line for line in stream.read().decode().splitlines() if line]
    assert done == "data: [DONE]"
    error = json.loads(last.removeprefix("data: "))["error"]
    cause = f"rank 1 on {HOST} (process {rank['pid']}): its process ended"
    assert (error["code"], cause in error["message"]) == ("engine_dead", True), error
    service.wait_answer()
    second = service.facts()
    assert (second["last_end"], second["restarting"]) == (cause, False)
    assert first["writer_id"] != second["writer_id"]
    assert [found["node"] for found in second["ranks"]] == [leader["node"], rank["node"]]
    assert all_end([leader["pid"]])


def test_a_killed_replica_leaves_no_rank(services: tuple[Service, Service]) -> None:
    """Not even one that is stopped."""
    service, _ = services
    service.check_answers()
    ranks = service.facts()["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    assert len({rank["node"] for rank in ranks}) == 1
    os.kill(ranks[2]["pid"], signal.SIGSTOP)
    os.kill(parent_of(ranks[0]["pid"]), signal.SIGKILL)
    assert all_end([rank["pid"] for rank in ranks])


def test_what_is_known_of_ranks_that_end(ray_cluster: RayCluster, tiny_model: Path) -> None:
    """One is killed, the node of another is lost, and a third is stopped: none is left, and nothing waits for ever."""
    files = files_of(tiny_model)
    group = placement_group([{name: 1.0} for name in ("head", "a", "head", "head")])
    assert group.wait(ENDS_S)
    with socket.create_server(("", 0), backlog=16) as silent:
        port = silent.getsockname()[1]
        launcher = RayRanks(group, node_address())
        place = replace(
            PLACE,
            host=launcher.host,
            port=port,
            channel_port=port,
            model=(str(files.folder), files.name, files.weights_id),
            split=Split(5),
        )
        with pytest.raises(ConfigError, match="has 4 bundles, and its 5 ranks need one each"):
            launcher.start(place)
        launcher.start(replace(place, split=Split(4)))
        first, second, third = launcher.facts()
        head, a = ray_cluster.node_id("head"), ray_cluster.node_id("a")
        assert [(rank.rank, rank.node) for rank in (first, second, third)] == [(1, head), (2, head), (3, a)]
        assert launcher.causes() == []
        os.kill(first.pid, signal.SIGKILL)
        os.kill(second.pid, signal.SIGSTOP)
        killed = f"rank 1 on {HOST} (Ray node {head[:8]}): killed by signal 9"
        wait_for(lambda: launcher.causes() == [killed])
        ray_cluster.remove_node("a")
        wait_for(lambda: len(launcher.causes()) == 2)
        assert launcher.causes()[1].startswith(f"rank 3 on {HOST} (Ray node {a[:8]}): ")
        launcher.kill()
        launcher.kill()
        assert not Path(f"/proc/{second.pid}").exists()
        assert all_end([third.pid])
        assert len(launcher.causes()) == 2
        launcher.start(replace(place, split=Split(4)))
        assert len(launcher.facts()) == 3, "nothing is started after the kill"


@pytest.mark.parametrize(
    ("nodes", "size", "order"),
    [
        ("aaa", 3, [0, 1, 2]),
        ("abab", 4, [0, 2, 1, 3]),
        ("cabcab", 6, [0, 3, 1, 4, 2, 5]),
        ("abcab", 3, [0, 3, 1]),
    ],
)
def test_ranks_are_dealt_node_by_node(nodes: str, size: int, order: list[int]) -> None:
    assert deal(list(nodes), size) == order
