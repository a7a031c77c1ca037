"""The client of `connect()` over the handle's methods as they are, without a cluster: a fake handle, a fake engine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count, islice
from typing import Any

import pytest
import ray
from ray import serve
from ray._private.grpc_utils import create_grpc_server_with_interceptors
from ray.core.generated.gcs_service_pb2 import GetClusterIdReply
from ray.core.generated.gcs_service_pb2_grpc import (
    NodeInfoGcsServiceServicer,
    add_NodeInfoGcsServiceServicer_to_server,
)
from ray.exceptions import RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from tests.deploy.async_test import async_test, settle
from tests.deploy.fake_engine import FakeEngineClient, make_info
from tournant.deploy.client import AsyncClient, Client, Patience, connect
from tournant.deploy.client_types import NoSuchApplication, NotConnected, NotReady, TokenLogprob
from tournant.deploy.errors import GenerationFailed, PromptTooLong, RequestError
from tournant.deploy.frontend import Frontend
from tournant.deploy.handle_methods import HandleMethods
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.errors import EngineDeadError, Overloaded

MESSAGES = [{"role": "user", "content": "What is it?"}]
SOON = Overloaded("full", 0)


class Service(HandleMethods):
    """The handle's methods over a fake engine that says "abc"."""

    def __init__(self, tokenizer: Tokenizer, **engine: Any) -> None:
        self.engine = FakeEngineClient(lambda request, index: list(b"abc"), make_info(), **({"auto": True} | engine))
        self._frontend = Frontend(tokenizer, self.engine)

    @property
    def frontend(self) -> Frontend:
        return self._frontend


def assert_plain(value: object) -> None:
    """Nothing but what any Python knows."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        assert type(value) in (list, tuple)
        for part in value:
            assert_plain(part)
    else:
        assert type(value) in (str, int, float, bool, type(None)), type(value)


class Response:
    """Of one call, as Serve's: awaited, or iterated over if it streams."""

    def __init__(self, work: Any, fault: Exception | None) -> None:
        self._work, self._fault = work, fault

    def __await__(self) -> Any:
        return self._deliver(self._work).__await__()

    async def __anext__(self) -> Any:
        return await self._deliver(anext(self._work))

    async def _deliver(self, work: Any) -> Any:
        try:
            if self._fault is not None:
                if asyncio.iscoroutine(work):
                    work.close()
                raise self._fault
            answer = await work
        except (RequestError, GenerationFailed, Overloaded, EngineDeadError) as error:
            raise RayTaskError("method", "a traceback from far away", error).as_instanceof_cause() from None
        assert_plain(answer)
        return answer

    def cancel(self) -> None:
        if hasattr(self._work, "aclose"):
            self.closing = asyncio.ensure_future(self._work.aclose())


class Handle:
    """As Serve's. faults: what the next calls fail with."""

    def __init__(self, service: object, faults: list[Exception] | None = None, **options: Any) -> None:
        self.service, self.faults, self.chosen = service, faults or [], options

    def options(self, **options: Any) -> Handle:
        handle = Handle(self.service, **options)
        handle.faults = self.faults
        return handle

    def __getattr__(self, name: str) -> Any:
        handle = self

        class Method:
            def remote(self, *args: Any, **kwargs: Any) -> Response:
                assert_plain([args, kwargs])
                fault = handle.faults.pop(0) if handle.faults else None
                return Response(getattr(handle.service, name)(*args, **kwargs), fault)

        return Method()


def client_of(service: object, *faults: Exception, ready_s: float = 5.0, retries: int = 2) -> AsyncClient:
    return AsyncClient("tournant", Handle(service, list(faults)), Patience(ready_s, retries))


@async_test
async def test_a_completion_has_types(tokenizer: Tokenizer) -> None:
    client = client_of(Service(tokenizer, cached_tokens=1))
    found = await client.generate("hi", n=2, logprobs=1, max_tokens=2, session_id="s")
    assert [(answer.index, answer.text, answer.finish_reason) for answer in found.answers] == [
        (0, "ab", "length"),
        (1, "ab", "length"),
    ]
    assert found.text == "ab"
    assert found.answers[1].token_ids == (97, 98)
    assert found.answers[0].logprobs == (
        TokenLogprob(97, -0.5, ((97, -0.5),)),
        TokenLogprob(98, -0.5, ((98, -0.5),)),
    )
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (2, 4, 1)
    assert (found.weights_id, found.epoch, found.cached_by_tier) == ((b"w" * 32).hex(), 0, None)


@async_test
async def test_a_stream_has_the_same_in_pieces(tokenizer: Tokenizer) -> None:
    client = client_of(Service(tokenizer))
    pieces = [piece async for piece in client.stream([104, 105], logprobs=0)]
    assert "".join(piece.text for piece in pieces) == "abc"
    assert [token for piece in pieces for token in piece.token_ids] == [97, 98, 99, 257]
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
    assert [logged.logprob for piece in pieces for logged in piece.logprobs or ()] == [-0.5] * 4


@async_test
async def test_a_chat_is_what_its_template_says(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer)
    client = client_of(service)
    assert (await client.chat(MESSAGES)).text == "abc"
    assert (await client.generate(MESSAGES)).text == "abc"
    await client.chat([{"role": "user", "content": [{"type": "text", "text": "What is it?"}]}])
    wanted = tokenizer.apply_chat(MESSAGES)
    assert [request.token_ids for request in service.engine.submitted] == [wanted] * 3


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "must be a list of chat messages"),
        ([1, 2], "must be a list of chat messages"),
        ([], "no tokens"),
        ([{"role": "user"}], "content is missing"),
        ([{"role": "tool", "content": "x"}], "tools are not supported"),
        ([{"role": "user", "content": "x", "colour": "red"}], "colour"),
        ([{"role": "user", "content": 5}], "valid string"),
    ],
)
def test_what_is_no_chat_is_refused(tokenizer: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        asyncio.run(client_of(Service(tokenizer)).chat(messages))


@pytest.mark.parametrize("prompt", [5, None, [1, "a"], [True], [1, {"role": "user", "content": "x"}], b"hi", [[1]]])
def test_what_is_no_prompt_is_refused(tokenizer: Tokenizer, prompt: Any) -> None:
    async def call() -> None:
        with pytest.raises(RequestError, match="the prompt must be"):
            await Service(tokenizer).generate(prompt)

    asyncio.run(call())


@async_test
async def test_errors_are_those_of_the_service_and_say_nothing_else(tokenizer: Tokenizer) -> None:
    client = client_of(Service(tokenizer))
    with pytest.raises(PromptTooLong, match="300 tokens") as caught:
        await client.generate([1] * 300)
    assert type(caught.value) is PromptTooLong
    assert caught.value.prompt_tokens == 300
    unknown: Any = {"temprature": 1.0}
    with pytest.raises(RequestError, match="temprature"):
        await client.generate("hi", **unknown)
    with pytest.raises(RequestError, match="temperature is -1"):
        await anext(client.stream("hi", temperature=-1.0))


@async_test
async def test_refusals_are_met_by_trying_again_a_few_times(tokenizer: Tokenizer) -> None:
    lost = GenerationFailed("the engine died", "engine_dead")
    assert (await client_of(Service(tokenizer), SOON, lost).generate("hi")).text == "abc"
    pieces = [piece async for piece in client_of(Service(tokenizer), lost, SOON).stream("hi")]
    assert "".join(piece.text for piece in pieces) == "abc"
    with pytest.raises(Overloaded, match="full") as caught:
        await client_of(Service(tokenizer), SOON, SOON, SOON).generate("hi")
    assert caught.value.retry_after_s == 0
    with pytest.raises(Overloaded):
        await client_of(Service(tokenizer), SOON, retries=0).generate("hi")
    with pytest.raises(GenerationFailed, match="too slow"):
        await client_of(Service(tokenizer), GenerationFailed("too slow", "timeout")).generate("hi")


@async_test
async def test_serves_own_refusal_is_overload() -> None:
    client = client_of(Failing(BackPressureError(9, 8)), retries=0)
    with pytest.raises(Overloaded, match="num_queued_requests=9") as caught:
        await client.generate("hi")
    assert caught.value.retry_after_s == 1


class Failing:
    """A service of which nothing arrives but an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def generate(self, prompt: object) -> None:
        raise self._error


@async_test
async def test_an_engine_that_is_not_ready_gets_time_and_the_error_says_how_much(tokenizer: Tokenizer) -> None:
    not_yet = EngineDeadError("no engine is ready yet")
    assert (await client_of(Service(tokenizer), not_yet, retries=0).generate("hi")).text == "abc"
    with pytest.raises(NotReady, match="no engine is ready yet") as caught:
        await client_of(Service(tokenizer), not_yet, ready_s=0.0).generate("hi")
    assert 0.0 <= caught.value.waited_s < 10.0


@async_test
async def test_a_service_that_says_nothing_is_given_up_if_the_call_has_a_limit(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, stuck=True)
    with pytest.raises(NotReady, match="no replica has answered"):
        await client_of(service, ready_s=-0.5).generate("hi", timeout_s=0.6)
    await settle()
    assert service.engine.running == []


@async_test
async def test_a_stream_that_broke_after_a_piece_is_not_begun_again(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, auto=False)
    stream = client_of(service).stream("hi")
    first = asyncio.ensure_future(anext(stream))
    await settle()
    service.engine.step()
    assert (await first).text == "a"
    service.engine.die()
    with pytest.raises(GenerationFailed, match="killed"):
        await anext(stream)
    assert len(service.engine.submitted) == 1


@async_test
async def test_a_closed_stream_and_a_cancelled_call_end_the_work(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, auto=False)
    stream = client_of(service).stream("hi")
    first = asyncio.ensure_future(anext(stream))
    await settle()
    service.engine.step()
    await first
    await stream.aclose()
    await settle()
    assert service.engine.aborted == [1]
    whole = asyncio.ensure_future(client_of(service).generate("hi"))
    await settle()
    whole.cancel()
    with pytest.raises(asyncio.CancelledError):
        await whole
    assert service.engine.aborted == [1, 2]


class Counting:
    """Answers with the prompt; tells how many calls are open, and fails for some. go: what calls wait for."""

    def __init__(self) -> None:
        self.open = self.most = self.ended = 0
        self.go = asyncio.Event()

    async def generate(self, prompt: str) -> dict[str, Any]:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await self.go.wait()
            await asyncio.sleep(0)
            if prompt.endswith("7"):
                raise RequestError("no sevens", "prompt")
            return whole(prompt)
        finally:
            self.open -= 1
            self.ended += 1


def whole(text: str) -> dict[str, Any]:
    answer = {
        "index": 0,
        "text": text,
        "token_ids": [1],
        "finish_reason": "stop",
        "stop_reason": None,
        "logprobs": None,
    }
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0, "cached_by_tier": None}
    return {"answers": [answer], "usage": usage, "max_tokens": [1], "weights_id": "00", "epoch": 0}


@async_test
async def test_a_batch_keeps_the_order_and_one_failure_is_one_outcome() -> None:
    service, taken = Counting(), []

    def prompts() -> Iterator[str]:
        for number in range(40):
            taken.append(number)
            yield f"prompt {number}"

    found = client_of(service).batch(prompts(), max_in_flight=3)
    first = asyncio.ensure_future(anext(found))
    while (service.open, len(taken)) != (3, 12):
        await asyncio.sleep(0.001)
    for _ in range(20):
        await settle()
    assert (service.open, len(taken)) == (3, 12)
    service.go.set()
    outcomes = [await first, *[outcome async for outcome in found]]
    assert [outcome.number for outcome in outcomes] == list(range(40))
    failed = [outcome.number for outcome in outcomes if outcome.error is not None]
    assert failed == [7, 17, 27, 37]
    assert [one.text for one in outcomes if one.error is None] == [f"prompt {n}" for n in range(40) if n not in failed]
    with pytest.raises(RequestError, match="no sevens"):
        outcomes[7].result()
    assert (service.most, service.open) == (3, 0)


@async_test
async def test_a_batch_that_is_left_ends_what_runs() -> None:
    service = Counting()
    found = client_of(service).batch((f"prompt {number}" for number in count()), max_in_flight=4)
    first = asyncio.ensure_future(anext(found))
    while service.open < 4:
        await asyncio.sleep(0.001)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await found.aclose()
    assert (service.open, service.ended) == (0, 4)


@async_test
async def test_a_slow_source_of_prompts_holds_up_nothing_else() -> None:
    service, more = Counting(), threading.Event()
    service.go.set()

    def prompts() -> Iterator[str]:
        yield "first"
        more.wait(10)
        yield "second"

    client = client_of(service)
    found = client.batch(prompts())
    try:
        assert (await anext(found)).text == "first"
        assert (await client.generate("other")).text == "other"
        assert not more.is_set()
    finally:
        more.set()
    assert [outcome.text async for outcome in found] == ["second"]


@pytest.mark.parametrize(
    ("raised", "said"), [(KeyError("gone"), "KeyError: 'gone'"), (SystemExit(3), r"RuntimeError: .*SystemExit\(3\)")]
)
def test_what_a_source_of_prompts_raises_ends_the_batch_alone(raised: BaseException, said: str) -> None:
    client = Client("tournant", Handle(Endless()), Patience())

    def prompts() -> Iterator[str]:
        yield "a"
        raise raised

    with pytest.raises(Exception) as caught:  # noqa: PT011 - whichever, it is matched below
        list(client.batch(prompts()))
    assert re.fullmatch(said, f"{type(caught.value).__name__}: {caught.value}")
    assert client.generate("b").text == "b"
    client.close()


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ([], {"max_in_flight": 0}, "max_in_flight is 0; it must be a whole number of at least 1"),
        ([], {"max_in_flight": 1.5}, "max_in_flight is 1.5"),
        ([], {"max_in_flight": "3"}, "max_in_flight is '3'"),
        ([], {"max_in_flight": None}, "max_in_flight is None"),
        ([], {"max_in_flight": True}, "max_in_flight is True"),
        ("abc", {}, "prompts is 'abc'; it must be a list of prompts"),
        ({"role": "user"}, {}, "prompts is {'role'"),
        (None, {}, "prompts is None"),
        ([], {"max_token": 3}, "unknown option max_token; did you mean max_tokens?"),
        ([], {"timeout_s": -1}, "timeout_s is -1"),
    ],
)
def test_a_batch_that_can_never_do_is_refused_at_once(prompts: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        client_of(Counting()).batch(prompts, **options)
    assert str(caught.value).startswith(said)


@async_test
async def test_a_limit_is_a_number_of_seconds_or_none() -> None:
    client = client_of(Limited())
    assert (await client.generate("hi", timeout_s=None, session_id=None)).text == "None"
    assert (await client.generate("hi", timeout_s=10**400)).text == str(10**400)
    for wrong in ("5", float("nan"), 0, -1, True):
        with pytest.raises(RequestError, match=f"timeout_s is {wrong!r}; it must be a number of seconds above 0"):
            await client.generate("hi", timeout_s=wrong)
    unknown: Any = {"max_token": 3}
    for call in (
        client.generate("hi", **unknown),
        client.chat(MESSAGES, **unknown),
        anext(client.stream("", **unknown)),
    ):
        with pytest.raises(RequestError, match=r"unknown option max_token; did you mean max_tokens\?") as caught:
            await call
        assert caught.value.param == "max_token"
    unknown = {"zzz": 3}
    with pytest.raises(RequestError, match="unknown option zzz; there are session_id, "):
        await client.generate("hi", **unknown)


class Limited:
    """Answers with its limit."""

    async def generate(self, prompt: str, timeout_s: float | None) -> dict[str, Any]:
        return whole(str(timeout_s))


class Endless:
    """Streams for ever, and says when it was left."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def stream(self, prompt: str) -> AsyncIterator[dict[str, Any]]:
        try:
            for number in count():
                yield {
                    "index": 0,
                    "text": str(number),
                    "token_ids": [],
                    "finish_reason": None,
                    "stop_reason": None,
                    "logprobs": None,
                }
        finally:
            self.left.set()

    async def generate(self, prompt: str) -> dict[str, Any]:
        return whole(prompt)

    async def chat(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return whole(messages[-1]["content"])


def test_the_same_without_an_event_loop() -> None:
    service = Endless()
    client = Client("tournant", Handle(service), Patience())
    assert client.generate("hi").text == "hi"
    assert client.chat(MESSAGES).text == "What is it?"
    assert [outcome.text for outcome in client.batch(["a", "b", "c"])] == ["a", "b", "c"]
    assert [outcome.text for outcome in islice(client.batch(map(str, count())), 5)] == ["0", "1", "2", "3", "4"]
    texts = []
    for piece in client.stream("hi"):
        texts.append(piece.text)
        if len(texts) == 3:
            break
    assert texts == ["0", "1", "2"]
    client._run(asyncio.wait_for(service.left.wait(), 10))
    service.left.clear()
    unread = client.stream("hi")
    assert next(unread).text == "0"
    client.close()
    assert service.left.is_set()
    unread.close()
    with pytest.raises(NotConnected, match="closed"):
        client.generate("hi")


def test_prompts_may_come_from_calls_of_the_same_client() -> None:
    client = Client("tournant", Handle(Endless()), Patience())
    nested = (client.generate(prompt).text * 2 for prompt in ["a", "b", "c"])
    assert [outcome.text for outcome in client.batch(nested, max_in_flight=1)] == ["aa", "bb", "cc"]
    client.close()


def test_a_call_on_the_clients_own_loop_is_refused() -> None:
    client = Client("tournant", Handle(Endless()), Patience())

    async def call() -> None:
        with pytest.raises(RuntimeError, match="the client's own event loop"):
            client.generate("hi")

    client._run(call())
    client.close()


def test_a_stream_that_is_garbage_on_the_loop_is_closed() -> None:
    service = Endless()
    client = Client("tournant", Handle(service), Patience())
    unread: Any = client.stream("hi")
    next(unread)

    async def drop() -> None:
        unread.close()
        await asyncio.wait_for(service.left.wait(), 10)

    client._run(drop())
    client.close()


class Interrupting(Counting):
    """Ctrl-C comes with one of the calls."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after

    async def generate(self, prompt: str) -> dict[str, Any]:
        self._after -= 1
        if not self._after:
            os.kill(os.getpid(), signal.SIGINT)
        return await super().generate(prompt)


@pytest.mark.parametrize("batch", [True, False])
def test_an_interrupt_ends_the_work_and_is_what_is_raised(batch: bool) -> None:
    service = Interrupting(4 if batch else 1)
    client = Client("tournant", Handle(service), Patience())
    with pytest.raises(KeyboardInterrupt) as caught:
        list(client.batch(f"prompt {number}" for number in count())) if batch else client.generate("hi")
    assert caught.value.__context__ is None
    assert service.open == 0
    assert service.ended >= (4 if batch else 1)
    service.go.set()
    assert client.generate("again").text == "again"
    client.close()


def test_closing_a_client_ends_calls_of_other_threads() -> None:
    service, errors = Counting(), []
    client = Client("tournant", Handle(service), Patience())

    def call() -> None:
        try:
            client.generate("hi")
        except NotConnected as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()

    async def opened() -> None:
        while not service.open:
            await asyncio.sleep(0.001)

    client._run(opened())
    client.close()
    thread.join(10)
    assert errors == ["this client was closed meanwhile; connect again"]


@pytest.mark.parametrize("talk", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_port_that_is_not_rays_is_refused(talk: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("tournant.deploy.client.REACHABLE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection = server.accept()[0]
                except OSError:
                    return
                held.append(connection)
                connection.sendall(talk)

        held: list[socket.socket] = []
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(NotConnected, match=f"no Ray cluster answers at {address}: .*whose port is 6379"):
            connect(address=address)
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        for connection in held:
            connection.close()


def test_a_port_that_is_rays_is_connected_to(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    class Control(NodeInfoGcsServiceServicer):
        def GetClusterId(self, request: object, context: object) -> GetClusterIdReply:  # noqa: N802 - Ray's name
            return GetClusterIdReply(cluster_id=b"x" * 28)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    asked: list[str] = []
    monkeypatch.setattr(ray, "init", lambda address, **_: asked.append(address))
    cluster.add("tournant", "RUNNING", running=1)
    server = create_grpc_server_with_interceptors(max_workers=1)
    add_NodeInfoGcsServiceServicer_to_server(Control(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        connect(address=address).close()
    finally:
        server.stop(None)
    assert asked == [address]


def test_without_ray_it_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(NotConnected, match=f"127.0.0.1:{port}.*ray start --head"):
        connect(address=f"127.0.0.1:{port}")

    def none(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray, "init", none)
    with pytest.raises(NotConnected, match="this machine"):
        connect()


class Cluster:
    """Applications, as Serve tells of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.applications: dict[str, ApplicationStatusOverview] = {}
        patch.setattr(ray, "is_initialized", lambda: True)
        patch.setattr(ray, "get_runtime_context", lambda: self)
        patch.setattr(serve, "status", lambda: self)
        patch.setattr(serve, "get_app_handle", lambda name: Handle(Endless()))

    gcs_address = "10.0.0.1:6379"

    def add(self, name: str, status: str, message: str = "", running: int = 0, deployment: str = "Replica") -> None:
        states: Any = {"RUNNING": running} if running else {"STARTING": 1}
        found = DeploymentStatusOverview(
            status="HEALTHY", status_trigger="UNSPECIFIED", replica_states=states, message=""
        )
        self.applications[name] = ApplicationStatusOverview(
            status=ApplicationStatus(status), message=message, last_deployed_time_s=1.0, deployments={deployment: found}
        )


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_connecting_to_what_is_not_there_names_what_is(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoSuchApplication, match="there is none at all"):
        connect()
    cluster.add("chat", "RUNNING", running=1)
    cluster.add("other", "RUNNING", running=1, deployment="Driver")
    with pytest.raises(NoSuchApplication, match="there are chat, other") as caught:
        connect()
    assert caught.value.known == ("chat", "other")
    with pytest.raises(NoSuchApplication, match="'other'"):
        connect("other")
    with pytest.raises(NotConnected, match=r"10.0.0.1:6379, not at 10.0.0.2:6379"):
        connect("chat", "10.0.0.2:6379")
    assert connect("chat", "10.0.0.1:6379").generate("hi").text == "hi"
    assert connect("chat", "localhost:6379").aio.app == "chat"

    def gone(name: str) -> None:
        raise RayServeException(f"Application '{name}' does not exist.")

    monkeypatch.setattr(serve, "get_app_handle", gone)
    with pytest.raises(NoSuchApplication):
        connect("chat")


@pytest.mark.parametrize(
    ("status", "running", "ready_s", "says"),
    [
        ("DEPLOYING", 0, 0.0, "DEPLOYING: no replica of it runs yet"),
        ("DEPLOY_FAILED", 0, 60.0, "DEPLOY_FAILED: the model is not there"),
        ("DEPLOYING", 1, 0.0, ""),
        ("UNHEALTHY", 1, 0.0, ""),
        ("RUNNING", 0, 0.0, ""),  # scaled to none: the first request brings a replica
    ],
)
def test_connecting_waits_for_what_can_take_requests(
    cluster: Cluster, status: str, running: int, ready_s: float, says: str
) -> None:
    message = "the model is not there" if status == "DEPLOY_FAILED" else ""
    cluster.add("tournant", status, message, running)
    if not says:
        assert connect(ready_s=ready_s).generate("hi").text == "hi"
        return
    with pytest.raises(NotReady, match=says) as caught:
        connect(ready_s=ready_s)
    assert caught.value.waited_s < 30.0


def test_connecting_goes_on_when_it_is_ready(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.add("tournant", "DEPLOYING")
    asked: Callable[[], Cluster] = serve.status

    def ready_at_last() -> Cluster:
        found = asked()
        if looks := next(looking, None):
            cluster.add("tournant", *looks)
        return found

    looking = iter([("DEPLOYING",), ("RUNNING", "", 1)])
    monkeypatch.setattr(serve, "status", ready_at_last)
    assert connect().aio.app == "tournant"
    assert next(looking, None) is None
