"""The router inside Ray Serve: what it uses of Serve is there, requests go where they were scored, and, on a real
Serve, prompts stay together without any setting but the configuration's.
"""

from __future__ import annotations

import asyncio
import collections
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata, RequestProtocol
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter

from tests.helpers.own_ray import own_ray
from tests.kvstore.store_harness import keys
from tournant.cluster.directory_actor import find_shard, number_of
from tournant.cluster.index_feed import START, IndexFeed, NoAnswer, RayReader
from tournant.cluster.kv_router import RouterOptions
from tournant.cluster.router_index import IndexConfig
from tournant.cluster.router_scoring import ScoringConfig
from tournant.kvstore.directory import Announcement, Changes, Position
from tournant.workers.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
PATIENCE_S = 60.0
ROUTER = "tournant.cluster.kv_router:KVRouter"
DEPLOYMENT = DeploymentID("Replica", "app")
TEXTS = ["the first prompt " * 100, "another one " * 100, "a third prompt " * 100]
CHAIN = [key[:-2] + b"\x00\x01" for key in keys(64)]


@dataclass
class FakeReplica:
    """What Serve's RunningReplica is to a router."""

    name: str
    queue: int = 0
    max_ongoing_requests: int = 100
    metadata: dict[str, Any] = field(default_factory=dict)
    routing_stats: dict[str, Any] = field(default_factory=dict)
    multiplexed_model_ids: set[str] = field(default_factory=set)
    availability_zone: str | None = None

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, DEPLOYMENT)

    @property
    def node_id(self) -> str:
        return f"{ord(self.name):032x}"[::-1]

    @property
    def replica_metadata(self) -> dict[str, Any]:
        return dict(self.metadata)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue


class World:
    """A router with replicas, on a running event loop. `ask` goes all the way through Serve's own part."""

    def __init__(self, replicas: Sequence[FakeReplica], **kwargs: Any) -> None:
        self.router = RequestRouterConfig(request_router_class=ROUTER).get_request_router_class()(
            deployment_id=DEPLOYMENT,
            handle_source=DeploymentHandleSource.UNKNOWN,
            self_node_id="",
            self_actor_id="actor",
            self_actor_handle=None,
            use_replica_queue_len_cache=True,
            create_replica_wrapper_func=None,
            prefer_local_node_routing=False,
            prefer_local_az_routing=False,
            self_availability_zone=None,
        )
        self.router.initialize_state(**{"directory_shards": 0, **kwargs})
        self.router.update_replicas(list(replicas))
        self.count = 0

    def pending(self, *args: Any, session: str = "", model: str = "", **kwargs: Any) -> PendingRequest:
        self.count += 1
        metadata = RequestMetadata(str(self.count), str(self.count), session_id=session, multiplexed_model_id=model)
        return PendingRequest(list(args), kwargs, metadata)

    async def route(self, pending: PendingRequest) -> str:
        replica = await self.router._choose_replica_for_request(pending)
        self.router.on_request_routed(pending, replica.replica_id, None)
        return str(replica.name)

    async def ask(self, *args: Any, **kwargs: Any) -> str:
        return await self.route(self.pending(*args, **kwargs))


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())


def test_what_is_used_of_serve_is_there() -> None:
    config = RequestRouterConfig(request_router_class=ROUTER)
    assert b"_make_skeleton_class" in config.get_serialized_request_router_cls(), "by value: no state in the module"
    found = config.get_request_router_class()
    assert issubclass(found, RequestRouter)
    assert not issubclass(found, FIFOMixin), "a choice is for its request"
    for name in ("initialize_state", "update_replicas", "choose_replicas", "on_request_routed", "on_request_completed"):
        assert callable(getattr(RequestRouter, name)), name
    http = RequestMetadata("1", "1", _request_protocol=RequestProtocol.HTTP)
    assert http.is_http_request


def test_prompts_and_sessions_stay_together_and_spread() -> None:
    async def test() -> None:
        world = World([FakeReplica(name) for name in "abc"])
        first = [await world.ask(text) for text in TEXTS]
        for _ in range(3):
            assert [await world.ask(text + "and so on") for text in TEXTS] == first
        assert await world.ask({"prompt": TEXTS[0]}) == first[0], "an OpenAI body too"
        sessions = [await world.ask(session=f"s{number}") for number in range(30)]
        assert set(sessions) == set("abc")
        assert [await world.ask(session=f"s{number}") for number in range(30)] == sessions

    run(test)


def test_requests_routed_at_once_each_go_where_they_were_scored() -> None:
    async def test() -> None:
        world = World([FakeReplica(name) for name in "abc"])
        first = [await world.ask(text) for text in TEXTS]
        many = await asyncio.gather(*(world.ask(TEXTS[number % 3]) for number in range(30)))
        assert many == first * 10

    run(test)


def test_blocks_on_a_node_are_found_by_the_keys_that_a_caller_gives() -> None:
    async def test() -> None:
        replicas = [FakeReplica(name, metadata={"block_tokens": 32}) for name in "abc"]
        world = World(replicas, directory_shards=1)
        node = number_of(replicas[1].node_id)
        world.router._feed.stop()
        world.router._feed.copy.apply(0, Changes(Position(1), True, (), tuple((key, (node,), ()) for key in CHAIN)))
        assert await world.ask(TEXTS[0], routing_keys=CHAIN) == "b"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexFeed, "start", lambda self: None)  # it would ask Ray
        run(test)


def test_full_and_draining_replicas_are_passed_over() -> None:
    async def test() -> None:
        replicas = {name: FakeReplica(name) for name in "abc"}
        world = World(list(replicas.values()))
        first = await world.ask(TEXTS[0])
        replicas[first].routing_stats = {"draining": True}
        second = await world.ask(TEXTS[0])
        assert second != first
        replicas[second].metadata = {"max_requests": 4}
        world.router.on_new_queue_len_info(replicas[second].replica_id, 4)
        third = await world.ask(TEXTS[0])
        assert {first, second, third} == set("abc")
        groups = await world.router.choose_replicas(list(replicas.values()), world.pending())
        assert [len(group) for group in groups] == [1, 1, 1, 0]

    run(test)


def test_a_replica_that_serve_says_is_gone_is_forgotten() -> None:
    async def test() -> None:
        replicas = [FakeReplica(name) for name in "abc"]
        world = World(replicas)
        first = await world.ask(TEXTS[0])
        world.router.update_replicas([one for one in replicas if one.name != first])
        assert await world.ask(TEXTS[0]) != first
        world.router.update_replicas(replicas)
        choice = world.router._scoring.index.lookup(CHAIN, [(first, None)])
        assert sum(choice[0]) == 0

    run(test)


def test_nothing_is_kept_of_a_request_that_has_ended() -> None:
    async def test() -> None:
        world = World([FakeReplica(name) for name in "ab"])
        pending = world.pending(TEXTS[0])
        name = await world.route(pending)
        assert len(world.router._open) == 1
        world.router.on_request_completed(ReplicaID(name, DEPLOYMENT), pending.metadata.internal_request_id)
        assert world.router._open == {}

    run(test)


def test_a_second_choice_is_noted_once_it_is_known() -> None:
    async def test() -> None:
        world = World([FakeReplica(name) for name in "ab"])
        pending = world.pending(TEXTS[0])
        (best,), (other,), *_ = await world.router.choose_replicas(world.router._replicas_list, pending)
        world.router.on_request_routed(pending, other.replica_id, None)
        index = world.router._scoring.index
        (request,) = (one.routed for one in world.router._open.values())
        assert [sum(found) for found in index.lookup(request.keys, [("a", None), ("b", None)])] == [
            len(request.keys)
        ] * 2
        assert best is not other

    run(test)


def test_a_request_for_a_multiplexed_model_stays_with_replicas_that_have_it() -> None:
    async def test() -> None:
        world = World([FakeReplica("a"), FakeReplica("b", multiplexed_model_ids={"m"}), FakeReplica("c")])
        for text in TEXTS:
            assert await world.ask(text, model="m") == "b"

    run(test)


def test_a_full_cluster_is_asked_with_pauses() -> None:
    async def test() -> None:
        world = World([FakeReplica("a")])
        pending = world.pending(TEXTS[0])
        await world.router.choose_replicas(world.router._replicas_list, pending)
        assert pending.routing_context.should_backoff

    run(test)


def test_options_are_checked() -> None:
    parsed = RouterOptions.parse({"queue": 0.2, "max_hints": 5, "directory_shards": 2})
    assert parsed == RouterOptions(ScoringConfig(queue=0.2), IndexConfig(max_hints=5), 2)
    faults: list[tuple[Mapping[str, Any], str]] = [
        ({"wieght": 1}, "has no 'wieght'; there are .*device.*max_keys"),
        ({"queue": "much"}, "queue is 'much'; it must be a number"),
        ({"directory_shards": 65}, "directory_shards is 65; it must be 0 to 64"),
        ({"nvme": 2}, "nvme of a router is 2"),
    ]
    for given, message in faults:
        with pytest.raises(ConfigError, match=message):
            RouterOptions.parse(given)


# -------------------------------------------------------------------- a real Serve


@pytest.fixture(scope="module")
def ray_of_these(no_cluster: None) -> Iterator[None]:
    """A Ray of these tests' own."""
    with own_ray("r", num_cpus=8):
        yield


@pytest.fixture
def own_serve(ray_of_these: None) -> Iterator[None]:
    """Serve on it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield
    serve.shutdown()


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_the_actors_of_a_directory_are_read_whatever_becomes_of_them(ray_of_these: None) -> None:
    reader = RayReader("read")
    assert reader.read({0: START, 1: START}) == {0: NoAnswer.ABSENT, 1: NoAnswer.ABSENT}
    shard = find_shard("read", 0)
    announced = Announcement(7, 1, 1, host=(CHAIN[0],))
    question = ray.get(shard.announce.remote("07", announced), timeout=PATIENCE_S).question
    ray.get(shard.announce.remote("07", replace(announced, seq=2, answers=question)), timeout=PATIENCE_S)
    answers = until(lambda: reader.read({0: START, 1: START}), lambda found: found[0] is not NoAnswer.LATE)
    assert answers == {0: Changes(answers[0].position, True, (), (), ((CHAIN[0], (7,), ()),)), 1: NoAnswer.ABSENT}
    assert reader.read({0: answers[0].position})[0] == Changes(answers[0].position, False, (), ())
    ray.kill(shard, no_restart=False)
    fresh = until(
        lambda: reader.read({0: answers[0].position})[0], lambda one: isinstance(one, Changes) and one.start_over
    )
    assert fresh.entries == (), "another life, of which nothing is known yet"
    ray.kill(shard)


def until(look: Callable[[], Any], true: Callable[[Any], bool]) -> Any:
    """What is found once it is as wanted."""
    deadline = time.monotonic() + PATIENCE_S
    while not true(found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


class Echo:
    """Says which replica it is."""

    async def generate(self, prompt: str, routing_keys: Sequence[bytes] = ()) -> str:
        return str(serve.get_replica_context().replica_id.unique_id)

    async def record_replica_metadata(self) -> dict[str, Any]:
        return {"block_tokens": 16, "pool_blocks": 1000, "max_requests": 64}


@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_prompts_stay_together_on_a_real_serve(own_serve: None) -> None:
    config = RequestRouterConfig(request_router_class=ROUTER, request_router_kwargs={"queue": 0.2})
    app = serve.deployment(
        num_replicas=3, request_router_config=config, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=64
    )(Echo).bind()
    handle = serve.run(app, name="app", route_prefix=None).generate
    prompts = [f"{number} " * 500 for number in range(12)]
    went = [
        [one.result(timeout_s=120) for one in [handle.remote(text + str(turn)) for text in prompts]]
        for turn in range(6)
    ]
    again = [new == old for turn in went[2:] for new, old in zip(turn, went[1], strict=True)]
    assert len(set(went[1])) == 3
    assert sum(again) >= 0.8 * len(again), "a third by chance; not all, as a replica may not answer Serve in time"
    sessions = [handle.options(session_id="s").remote("short").result(timeout_s=120) for _ in range(20)]
    assert collections.Counter(sessions).most_common(1)[0][1] >= 16
    with_keys = [handle.remote("other", routing_keys=CHAIN).result(timeout_s=120) for _ in range(20)]
    assert collections.Counter(with_keys).most_common(1)[0][1] >= 16
