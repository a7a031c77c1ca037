from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from tests.deploy.fake_server import COMPLETIONS, MESSAGES, PROMPT, Server, make
from tournant.deploy.http_routes import AsgiApp
from tournant.deploy.http_server import uvicorn_config
from tournant.deploy.tokenizer import Tokenizer


@contextmanager
def listening(app: AsgiApp) -> Iterator[str]:
    """The application under uvicorn on a free port; gives its address."""
    server = uvicorn.Server(uvicorn_config(app, "127.0.0.1", 0))
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[tuple[Server, str]]:
    server = make(tokenizer, "The capital is Paris 👋")
    with listening(server.app) as address:
        yield server, address


@pytest.fixture
def client(served: tuple[Server, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served[1] + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_chat(client: openai.OpenAI) -> None:
    messages: Any = MESSAGES
    answer = client.chat.completions.create(model="m", messages=messages, temperature=0, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "The capital is Paris 👋"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.system_fingerprint == "tournant-777777777777-e0"
    assert answer.model_extra == {"weights_id": "77" * 32, "epoch": 0}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.choices[0].logprobs is not None
    chunks = list(
        client.chat.completions.create(
            model="m", messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == answer.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == answer.usage
    assert {chunk.system_fingerprint for chunk in chunks} == {answer.system_fingerprint}
    assert all(chunk.model_extra == answer.model_extra for chunk in chunks)


def test_openai_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt=["a", "b"], n=2, max_tokens=3, temperature=0, logprobs=1)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(place, "The") for place in range(4)]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2]
    chunks = list(client.completions.create(model="m", prompt=[1, 2], max_tokens=3, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "The"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert answer.system_fingerprint == chunks[0].system_fingerprint == "tournant-777777777777-e0"
    assert answer.model_extra == chunks[0].model_extra == {"weights_id": "77" * 32, "epoch": 0}


def test_openai_models_and_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    messages: Any = MESSAGES
    calls: list[tuple[type[openai.APIStatusError], Callable[[], object]]] = [
        (openai.NotFoundError, lambda: client.chat.completions.create(model="x", messages=messages)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model="m", messages=messages, temperature=-1)),
    ]
    for kind, call in calls:
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.response.headers["x-request-id"]
        assert caught.value.body is not None
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(
            model="m", messages=messages, tools=[{"type": "function", "function": {"name": "f"}}]
        )


def test_a_socket_that_closes_stops_the_work(tokenizer: Tokenizer) -> None:
    """Through uvicorn: the engine has no answer of a client whose connection is gone."""
    server = make(tokenizer, "x" * 5000, info={"max_model_len": 8192, "pool_tokens": 8192}, stuck=True)
    with listening(server.app) as address:
        for stream in (False, True):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    address + COMPLETIONS,
                    json=PROMPT | {"max_tokens": 5000, "stream": stream},
                    timeout=httpx.Timeout(5, read=0.2),
                )
            deadline = time.monotonic() + 10
            while server.frontend.num_outstanding and time.monotonic() < deadline:
                httpx.get(address + "/version")
            assert server.engine.running == []
        assert len(server.engine.submitted) == 2


def test_a_stop_in_the_middle_of_a_stream_over_a_socket(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "x" * 7000, info={"max_model_len": 8192, "pool_tokens": 8192})
    with listening(server.app) as address, httpx.Client() as client:
        body = PROMPT | {"max_tokens": 7000, "stream": True, "ignore_eos": True}
        with client.stream("POST", address + COMPLETIONS, json=body) as response:
            for line in response.iter_lines():
                if line:
                    break
        deadline = time.monotonic() + 10
        while server.frontend.num_outstanding and time.monotonic() < deadline:
            client.get(address + "/version")
        assert server.engine.running == []
