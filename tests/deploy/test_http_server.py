from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from tests.deploy.asgi_client import Call, fetch, start
from tests.deploy.async_test import async_test, settle
from tests.deploy.fake_engine import FakeEngineClient, make_info
from tests.helpers.tiny_model import BOS_ID
from tournant.cluster.metrics import MetricsRegistry, PrometheusBackend
from tournant.deploy.frontend import Frontend, FrontendOptions
from tournant.deploy.http_server import VERSION, AsgiApp, HttpOptions, build_http_app, uvicorn_config
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.messages import TokenLogprobs

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "What is it?"}]
ASK = {"messages": MESSAGES, "temperature": 0}
PROMPT = {"prompt": "hi", "temperature": 0}


@dataclass
class Server:
    """An application over a fake engine."""

    app: AsgiApp
    engine: FakeEngineClient
    frontend: Frontend


def make(tokenizer: Tokenizer, *texts: str, options: FrontendOptions | None = None,
         info: dict[str, object] | None = None, http: dict[str, Any] | None = None, **engine: Any) -> Server:
    answers = [list(text.encode()) for text in texts]
    client = FakeEngineClient(lambda request, index: answers[index % len(answers)], make_info(**(info or {})),
                              **({"auto": True} | engine))
    backend = PrometheusBackend()
    metrics = MetricsRegistry("m", backend)
    frontend = Frontend(tokenizer, client, options, metrics.record_request)
    app = build_http_app(lambda: frontend, HttpOptions(**({"served_model_name": ("m", "alias")} | (http or {}))),
                         metrics, backend)
    return Server(app, client, frontend)


def content(events: Sequence[dict[str, Any]], index: int = 0) -> str:
    """Text of one answer of a stream, of either API."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


# ---------------------------------------------------------------- answers


@async_test
async def test_a_chat_answer(tokenizer: Tokenizer) -> None:
    call = await fetch(make(tokenizer, "It is “tea”\n", cached_tokens=16).app, "POST", CHAT, ASK | {"model": "alias"})
    body = call.json
    assert call.status == 200
    assert body["choices"] == [{
        "index": 0, "message": {"role": "assistant", "content": "It is “tea”\n"}, "logprobs": None,
        "finish_reason": "stop", "stop_reason": None}]
    assert body["usage"] == {"prompt_tokens": 30, "completion_tokens": 17, "total_tokens": 47,
                             "prompt_tokens_details": {"cached_tokens": 16}}
    assert (body["object"], body["model"]) == ("chat.completion", "alias")
    assert body["id"] == f"chatcmpl-{call.headers['x-request-id']}"


@async_test
async def test_a_streamed_chat_answer_is_the_same(tokenizer: Tokenizer) -> None:
    text = "é👋 \u2028 x" + '"\\'
    call = await fetch(make(tokenizer, text).app, "POST", CHAT, ASK | {"stream": True})
    events = call.events
    assert call.text.isascii()
    assert content(events) == text
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [event["choices"][0]["delta"].get("role") for event in events[1:]] == [None] * (len(events) - 1)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert all("usage" not in event and "\ufffd" not in json.dumps(event, ensure_ascii=False) for event in events)


@async_test
@pytest.mark.case(53)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_comes_last_in_a_stream(tokenizer: Tokenizer, n: int, path: str) -> None:
    body = (ASK if path == CHAT else PROMPT) | {"n": n, "stream": True, "stream_options": {"include_usage": True}}
    events = (await fetch(make(tokenizer, "abc", "defg").app, "POST", path, body)).events
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == (4 if n == 1 else 9)
    assert [content(events, index) for index in range(n)] == ["abc", "defg"][:n]
    finishes = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(finishes) == list(range(n))


@async_test
async def test_continuous_usage_counts_every_token(tokenizer: Tokenizer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = PROMPT | {"stream": True, "stream_options": options}
    events = (await fetch(make(tokenizer, "abc").app, "POST", COMPLETIONS, body)).events
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 4]
    assert {event["usage"]["prompt_tokens"] for event in events} == {2}


@async_test
@pytest.mark.parametrize(("prompt", "echoed"), [
    ("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([97, 98], ["ab"]), ([[97, 98], [99]], ["ab", "c"]),
])
async def test_every_form_of_prompt(tokenizer: Tokenizer, prompt: Any, echoed: list[str]) -> None:
    for stream in (False, True):
        body = PROMPT | {"prompt": prompt, "echo": True, "n": 2, "stream": stream}
        call = await fetch(make(tokenizer, "x", "yz").app, "POST", COMPLETIONS, body)
        expected = [text + answer for text in echoed for answer in ("x", "yz")]
        if stream:
            assert [content(call.events, index) for index in range(len(expected))] == expected
        else:
            assert [(choice["index"], choice["text"]) for choice in call.json["choices"]] == list(enumerate(expected))


@async_test
async def test_completion_logprobs(tokenizer: Tokenizer) -> None:
    """The tokens of the answer "é!": two halves of a character, one letter, the end."""
    for stream in (False, True):
        body = PROMPT | {"logprobs": 2, "stream": stream}
        call = await fetch(make(tokenizer, "é!").app, "POST", COMPLETIONS, body)
        parts = [event["choices"][0]["logprobs"] for event in call.events] if stream else [
            call.json["choices"][0]["logprobs"]]
        joined = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        assert joined["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!", "<|eos|>"]
        assert joined["token_logprobs"] == [-0.5] * 4
        assert joined["text_offset"] == [0, 0, 1, 2]
        assert joined["top_logprobs"][2] == {"!": -0.5, '"': -1.5}


@async_test
@pytest.mark.case(29)
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_with_logprobs_as_lm_eval_sends_it(bos_tokenizer: Tokenizer, max_tokens: int) -> None:
    server = make(bos_tokenizer, "x")
    body = PROMPT | {"prompt": "é!", "echo": True, "logprobs": 1, "max_tokens": max_tokens, "seed": 1}
    choices = [(await fetch(server.app, "POST", COMPLETIONS, body)).json["choices"][0] for _ in range(2)]
    assert choices[0] == choices[1]
    logprobs = choices[0]["logprobs"]
    answer = ["x"] * max_tokens
    assert choices[0]["text"] == "é!" + "".join(answer)
    assert logprobs["tokens"] == ["<|bos|>", "bytes:\\xc3", "bytes:\\xa9", "!", *answer]
    assert logprobs["token_logprobs"] == [None, *[-0.5] * (3 + max_tokens)]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 0, 0, 1, *[2] * max_tokens]
    assert {len(values) for values in logprobs.values()} == {4 + max_tokens}


@async_test
async def test_chat_logprobs(tokenizer: Tokenizer) -> None:
    for stream in (False, True):
        body = ASK | {"logprobs": True, "top_logprobs": 2, "max_tokens": 2, "stream": stream}
        call = await fetch(make(tokenizer, "é").app, "POST", CHAT, body)
        parts = [event["choices"][0]["logprobs"] for event in call.events] if stream else [
            call.json["choices"][0]["logprobs"]]
        first, second = [entry for part in parts for entry in part["content"]]
        assert (first["token"], first["bytes"], first["logprob"]) == ("bytes:\\xc3", [0xC3], -0.5)
        assert [top["bytes"] for top in second["top_logprobs"]] == [[0xA9], [0xAA]]


@async_test
@pytest.mark.case(47)
@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf"), -1e30])
async def test_log_probabilities_without_a_value_are_finite_json(tokenizer: Tokenizer, value: float,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngineClient, "_logprobs",
                        lambda self, token, top: TokenLogprobs(value, [(place, value) for place in range(top)]))
    bodies = [(COMPLETIONS, PROMPT | {"echo": True, "logprobs": 20, "top_k": 1}),
              (CHAT, ASK | {"logprobs": True, "top_logprobs": 20})]
    for path, body in bodies:
        for stream in (False, True):
            call = await fetch(make(tokenizer, "a").app, "POST", path, body | {"stream": stream})
            assert call.status == 200
            for text in [block.removeprefix("data: ") for block in call.text.split("\n\n")] if stream else [call.text]:
                if text not in ("", "[DONE]"):
                    json.loads(text, parse_constant=pytest.fail)


@async_test
@pytest.mark.case(41)
async def test_a_stop_string_never_shows(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "ABCDEFGHIJ")
    body = PROMPT | {"stop": "DEFGHIJ"}
    whole = (await fetch(server.app, "POST", COMPLETIONS, body)).json["choices"][0]
    events = (await fetch(server.app, "POST", COMPLETIONS, body | {"stream": True})).events
    assert whole["text"] == content(events) == "ABC"
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "DEFGHIJ")
    assert events[-1]["choices"][0]["stop_reason"] == "DEFGHIJ"


@async_test
@pytest.mark.case(55)
async def test_a_clamped_limit_is_reported(tokenizer: Tokenizer) -> None:
    for stream in (False, True):
        server = make(tokenizer, "x" * 300)
        body = {"prompt": [1] * 128, "max_tokens": 256, "temperature": 0, "stream": stream}
        call = await fetch(server.app, "POST", COMPLETIONS, body)
        assert call.headers["x-tournant-max-tokens"] == "128"
        choice = call.events[-1]["choices"][0] if stream else call.json["choices"][0]
        assert choice["finish_reason"] == "length"
    assert "x-tournant-max-tokens" not in (await fetch(server.app, "POST", COMPLETIONS, PROMPT)).headers


@async_test
async def test_a_slow_client_gets_joined_events(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "abcdefgh", auto=False)
    call = start(server.app, "POST", COMPLETIONS, PROMPT | {"stream": True})
    await settle()
    server.engine.step()
    await settle()
    call.stop_reading()
    for _ in range(7):
        server.engine.step()
        await settle()
    call.read_on()
    server.engine.step()
    await call.task
    assert [event["choices"][0]["text"] for event in call.events] == ["a", "b", "cdefgh"]


# ---------------------------------------------------------------- clients that go away


@async_test
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
async def test_a_client_that_goes_away_stops_its_work(tokenizer: Tokenizer, stream: bool, steps: int) -> None:
    server = make(tokenizer, "abcdefgh", auto=False)
    call = start(server.app, "POST", CHAT, ASK | {"stream": stream, "n": 2})
    await settle()
    server.engine.step(steps)
    await settle()
    assert len(server.engine.running) == 2
    call.disconnect()
    await settle()
    assert server.engine.running == []
    assert server.frontend.num_outstanding == 0
    await call.task
    assert not call.finished


@async_test
async def test_a_server_that_drops_a_request_stops_its_work(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "abcdefgh", auto=False)
    call = start(server.app, "POST", CHAT, ASK)
    await settle()
    call.task.cancel()
    await asyncio.wait([call.task])
    assert server.engine.running == []
    assert server.frontend.num_outstanding == 0


@async_test
async def test_a_client_gone_before_its_body_arrived(tokenizer: Tokenizer) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pytest.fail("nobody is there")

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    await make(tokenizer, "a").app(scope, receive, send)


# ---------------------------------------------------------------- errors


async def error_of(server: Server, path: str, body: object, method: str = "POST",
                   headers: dict[str, str] | None = None) -> tuple[Call, dict[str, Any]]:
    call = await fetch(server.app, method, path, body, headers)
    return call, call.error


@async_test
async def test_errors_before_an_engine_hears_of_it(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "a")
    long = [1] * 256
    for path, body, status, param, code in (
        (CHAT, ASK | {"model": "gpt-9"}, 404, "model", "model_not_found"),
        (CHAT, ASK | {"temprature": 1}, 400, "temprature", "unknown_field"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role", None),
        (CHAT, ASK | {"chat_template_kwargs": {"chat_template": "x"}}, 400, "messages", None),
        (CHAT, ASK | {"logit_bias": {"512": 1}}, 400, "logit_bias", None),
        (COMPLETIONS, PROMPT | {"prompt": long}, 400, "prompt", "context_length_exceeded"),
        (COMPLETIONS, PROMPT | {"prompt": [["x"]]}, 400, "prompt", None),
        (COMPLETIONS, PROMPT | {"prompt": ""}, 400, "prompt", None),
        (COMPLETIONS, PROMPT | {"prompt": [700]}, 400, "prompt", None),
        (COMPLETIONS, PROMPT | {"n": 17}, 400, "n", None),
        (COMPLETIONS, b"{", 400, None, "invalid_json"),
        ("/v1/embeddings", {}, 404, None, "not_found"),
        ("/tokenize", {"prompt": "x", "model": "gpt-9"}, 404, "model", "model_not_found"),
        ("/detokenize", {"tokens": [512]}, 400, "tokens", None),
    ):
        call, error = await error_of(server, path, body)
        assert (call.status, error["param"], error["code"]) == (status, param, code), body
        assert error["type"] == "invalid_request_error"
    assert server.engine.submitted == []


@async_test
async def test_errors_of_http_itself(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "a", http={"max_body_bytes": 5000})
    call, _ = await error_of(server, CHAT, None, method="GET")
    assert (call.status, call.headers["allow"]) == (405, "POST")
    assert (await error_of(server, "/v1/models", {}))[0].status == 405
    assert (await error_of(server, CHAT, b"x" * 5001))[0].status == 413
    assert (await error_of(server, CHAT, b"x" * 5001, headers={"content-length": "1"}))[0].status == 413
    assert (await error_of(server, CHAT, b"{}", headers={"content-length": "9" * 5000}))[0].status == 413
    assert (await error_of(server, CHAT, b"a=b", headers={"content-type": "text/plain"}))[0].status == 415
    charset = {"content-type": "application/json; charset=utf-8"}
    assert (await fetch(server.app, "POST", CHAT, ASK, charset)).status == 200


@async_test
@pytest.mark.case(49)
async def test_a_bad_logit_bias_harms_nobody_else(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "ab")
    for bias in ("AI", "", "1.5"):
        assert (await error_of(server, COMPLETIONS, PROMPT | {"logit_bias": {bias: 1}}))[0].status == 400
    for value in (float("nan"), 1e9, None):
        assert (await error_of(server, COMPLETIONS, PROMPT | {"logit_bias": {"1": value}}))[0].status == 400
    assert (await fetch(server.app, "POST", COMPLETIONS, PROMPT)).json["choices"][0]["text"] == "ab"


@async_test
@pytest.mark.case(57)
async def test_overflow_is_answered_with_429(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "ab", auto=False)
    calls = [start(server.app, "POST", COMPLETIONS, PROMPT | {"stream": place % 2 == 1}) for place in range(400)]
    await settle()
    while server.engine.running:
        server.engine.step()
        await settle()
    await asyncio.gather(*(call.task for call in calls))
    assert sorted(call.status for call in calls) == [200] * 16 + [429] * 384
    refused = next(call for call in calls if call.status == 429)
    assert (refused.headers["retry-after"], refused.error["type"]) == ("1", "rate_limit_error")


@async_test
async def test_open_requests_are_bounded_whatever_they_do(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "ab", auto=False, http={"max_concurrent_requests": 1})
    waiting = start(server.app, "POST", COMPLETIONS, PROMPT)
    await settle()
    assert (await fetch(server.app, "GET", "/version")).status == 429
    waiting.disconnect()
    await waiting.task
    assert (await fetch(server.app, "GET", "/version")).status == 200


@async_test
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_fails_before_the_first_token(tokenizer: Tokenizer, stream: bool) -> None:
    for fault, status, code in ((FakeEngineClient.die, 503, "engine_dead"),
                                (lambda engine: engine.fail("x"), 500, "engine_error")):
        server = make(tokenizer, "abc", auto=False)
        call = start(server.app, "POST", CHAT, ASK | {"stream": stream})
        await settle()
        fault(server.engine)
        await call.task
        assert (call.status, call.error["code"]) == (status, code)
    server.engine.die()
    call = await fetch(server.app, "POST", CHAT, ASK | {"stream": stream})
    assert (call.status, call.error["code"], call.headers["retry-after"]) == (503, "engine_dead", "1")


@async_test
async def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error_event(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "abc", auto=False)
    call = start(server.app, "POST", CHAT, ASK | {"stream": True})
    await settle()
    server.engine.step()
    await settle()
    server.engine.step()
    server.engine.die()
    await call.task
    assert call.finished
    assert content(call.events[:-1]) == "ab"
    assert call.events[-1]["error"]["code"] == "engine_dead"


@async_test
@pytest.mark.parametrize("stream", [False, True])
async def test_the_time_limit_of_a_request(tokenizer: Tokenizer, stream: bool) -> None:
    server = make(tokenizer, "abc", auto=False, options=FrontendOptions(request_timeout_s=0.01))
    call, error = await error_of(server, CHAT, ASK | {"stream": stream})
    assert (call.status, error["type"], error["code"]) == (504, "timeout_error", "timeout")
    assert server.engine.running == []


@async_test
async def test_a_fault_of_ours_is_a_500_that_tells_nothing(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch,
                                                           caplog: pytest.LogCaptureFixture) -> None:
    server = make(tokenizer, "abc")
    monkeypatch.setattr(server.frontend, "submit", lambda *args, **kwargs: 1 / 0)
    call, error = await error_of(server, CHAT, ASK)
    assert (call.status, error["code"]) == (500, "internal_error")
    assert "division" not in error["message"]
    assert "ZeroDivisionError" in caplog.text
    assert call.headers["x-request-id"] in caplog.text


@async_test
async def test_without_a_frontend_everything_is_503(tokenizer: Tokenizer) -> None:
    backend = PrometheusBackend()
    app = build_http_app(lambda: None, HttpOptions(("m",)), MetricsRegistry("m", backend), backend)
    for method, path, body in (("POST", CHAT, ASK), ("GET", "/health", None), ("GET", "/v1/models", None)):
        call = await fetch(app, method, path, body)
        assert (call.status, call.error["code"]) == (503, "not_ready")
    assert (await fetch(app, "GET", "/metrics")).status == 200


# ---------------------------------------------------------------- the other routes


@async_test
async def test_models(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "a")
    listed = (await fetch(server.app, "GET", "/v1/models")).json["data"]
    assert [card["id"] for card in listed] == ["m", "alias"]
    assert (listed[0]["max_model_len"], listed[0]["weights_id"]) == (256, (b"w" * 32).hex())
    assert (await fetch(server.app, "GET", "/v1/models/m")).json == listed[0]
    call, error = await error_of(server, "/v1/models/org/other", None, "GET")
    assert (call.status, error["code"]) == (404, "model_not_found")


@async_test
async def test_health_and_version(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "a", options=FrontendOptions(probe_timeout_s=0.01))
    for method in ("GET", "HEAD"):
        assert (await fetch(server.app, method, "/health")).status == 200
    assert (await fetch(server.app, "GET", "/version")).json == {"version": VERSION}
    server.engine.die()
    assert (await error_of(server, "/health", None, "GET"))[0].status == 503


@async_test
@pytest.mark.case(51)
async def test_tokenize_and_back(tokenizer: Tokenizer, bos_tokenizer: Tokenizer) -> None:
    server = make(bos_tokenizer, "a")
    for body in ({"prompt": "hi"}, {"prompt": "<|bos|>hi"}, {"messages": MESSAGES}):
        tokens = (await fetch(server.app, "POST", "/tokenize", body)).json["tokens"]
        assert tokens.count(BOS_ID) == 1
    call = await fetch(server.app, "POST", "/tokenize", {"prompt": "é", "return_token_strs": True})
    assert call.json == {"count": 3, "max_model_len": 256, "tokens": [BOS_ID, 0xC3, 0xA9],
                         "token_strs": ["<|bos|>", "bytes:\\xc3", "bytes:\\xa9"]}
    assert (await fetch(server.app, "POST", "/detokenize", {"tokens": [BOS_ID, 0xC3, 0xA9]})).json == {
        "prompt": "<|bos|>é"}
    plain = await fetch(server.app, "POST", "/tokenize", {"prompt": "hi", "add_special_tokens": False})
    assert plain.json["tokens"] == [104, 105]
    assert (await fetch(make(tokenizer, "a").app, "POST", "/tokenize", {"prompt": "hi"})).json["count"] == 2


@async_test
async def test_metrics_after_a_request(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "abc")
    await fetch(server.app, "POST", CHAT, ASK)
    await fetch(server.app, "GET", "/no/such/path")
    text = (await fetch(server.app, "GET", "/metrics")).text
    for line in ('vllm_request_success_total{finished_reason="stop",model_name="m"} 1.0',
                 'vllm_time_to_first_token_seconds_count{model_name="m"} 1.0',
                 'vllm_num_requests_running{model_name="m"} 0.0',
                 'tournant_http_requests_total{model_name="m",route="/v1/chat/completions",status="200"} 1.0',
                 'tournant_http_requests_total{model_name="m",route="other",status="404"} 1.0'):
        assert line in text
    head = await fetch(server.app, "HEAD", "/metrics")
    assert (head.status, head.text) == (200, "")


@async_test
async def test_reset_says_whether_it_was_done(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "abc")
    for done in (True, False):
        server.engine.reset_result = done
        assert (await fetch(server.app, "POST", "/reset_prefix_cache")).json == {"success": done}


@async_test
async def test_request_ids_and_log_lines(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    server = make(tokenizer, "secret answer")
    with caplog.at_level(logging.INFO, logger="tournant.http"):
        body = {"prompt": "secret prompt", "temperature": 0}
        call = await fetch(server.app, "POST", COMPLETIONS, body, {"x-request-id": "abc-1"})
        for bad in ("x" * 129, "a b", "a\nb", ""):
            minted = (await fetch(server.app, "GET", "/version", None, {"x-request-id": bad})).headers["x-request-id"]
            assert len(minted) == 32
    assert call.headers["x-request-id"] == "abc-1"
    line = json.loads(caplog.messages[0])
    assert (line["request_id"], line["path"], line["status"]) == ("abc-1", COMPLETIONS, 200)
    assert (line["prompt_tokens"], line["completion_tokens"], line["complete"]) == (13, 14, True)
    assert "secret" not in caplog.text


@async_test
async def test_it_works_under_a_prefix_and_with_a_salt(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "abc")
    call = await fetch(server.app, "POST", "/llm" + CHAT, ASK | {"cache_salt": "s", "priority": 2},
                       scope={"root_path": "/llm"})
    assert call.status == 200
    assert (server.engine.submitted[0].cache_salt, server.engine.submitted[0].priority) == ("s", 2)


@async_test
async def test_lifespan_and_websockets(tokenizer: Tokenizer) -> None:
    app = make(tokenizer, "a").app
    events = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[str] = []

    async def receive() -> dict[str, Any]:
        return events.pop(0)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    await app({"type": "websocket"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]


# ---------------------------------------------------------------- real server, real client


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
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.choices[0].logprobs is not None
    chunks = list(client.chat.completions.create(model="m", messages=messages, temperature=0, stream=True,
                                                 stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == answer.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == answer.usage


def test_openai_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt=["a", "b"], n=2, max_tokens=3, temperature=0, logprobs=1)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(place, "The") for place in range(4)]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2]
    chunks = list(client.completions.create(model="m", prompt=[1, 2], max_tokens=3, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "The"
    assert chunks[-1].choices[0].finish_reason == "length"


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
        client.chat.completions.create(model="m", messages=messages, tools=[
            {"type": "function", "function": {"name": "f"}}])


def test_a_socket_that_closes_stops_the_work(tokenizer: Tokenizer) -> None:
    """Through uvicorn: the engine has no answer of a client whose connection is gone."""
    server = make(tokenizer, "x" * 5000, info={"max_model_len": 8192, "pool_tokens": 8192}, stuck=True)
    with listening(server.app) as address:
        for stream in (False, True):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(address + COMPLETIONS, json=PROMPT | {"max_tokens": 5000, "stream": stream},
                           timeout=httpx.Timeout(5, read=0.2))
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
