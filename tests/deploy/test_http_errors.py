from __future__ import annotations

import asyncio
import json
import logging

import pytest

from tests.deploy.asgi_client import fetch, start
from tests.deploy.async_test import async_test, settle
from tests.deploy.fake_engine import FakeEngineClient
from tests.deploy.fake_server import ASK, CHAT, COMPLETIONS, PROMPT, content, error_of, make
from tournant.cluster.metrics import MetricsRegistry, PrometheusBackend
from tournant.deploy.frontend import FrontendOptions
from tournant.deploy.http_server import HttpOptions, build_http_app
from tournant.deploy.tokenizer import Tokenizer


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
async def test_overflow_is_answered_with_503(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "ab", auto=False)
    calls = [start(server.app, "POST", COMPLETIONS, PROMPT | {"stream": place % 2 == 1}) for place in range(400)]
    await settle()
    while server.engine.running:
        server.engine.step()
        await settle()
    await asyncio.gather(*(call.task for call in calls))
    assert sorted(call.status for call in calls) == [200] * 16 + [503] * 384
    refused = next(call for call in calls if call.status == 503)
    assert (refused.headers["retry-after"], refused.error["code"]) == ("1", "overloaded")


@async_test
async def test_open_requests_are_bounded_whatever_they_do(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "ab", auto=False, http={"max_concurrent_requests": 1})
    waiting = start(server.app, "POST", COMPLETIONS, PROMPT)
    await settle()
    assert (await fetch(server.app, "GET", "/version")).status == 503
    waiting.disconnect()
    await waiting.task
    assert (await fetch(server.app, "GET", "/version")).status == 200


@async_test
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_fails_before_the_first_token(tokenizer: Tokenizer, stream: bool) -> None:
    for fault, status, code in (
        (FakeEngineClient.die, 503, "engine_dead"),
        (FakeEngineClient.restart, 503, "engine_dead"),
        (lambda engine: engine.fail("x"), 500, "engine_error"),
    ):
        server = make(tokenizer, "abc", auto=False)
        call = start(server.app, "POST", CHAT, ASK | {"stream": stream})
        await settle()
        fault(server.engine)
        await call.task
        assert (call.status, call.error["code"]) == (status, code)
        assert call.headers.get("retry-after") == ("1" if status == 503 else None)
    server.engine.die()
    call = await fetch(server.app, "POST", CHAT, ASK | {"stream": stream})
    assert (call.status, call.error["code"], call.headers["retry-after"]) == (503, "engine_dead", "1")


@async_test
@pytest.mark.parametrize("stream", [False, True])
async def test_while_an_engine_is_started_anew_clients_are_told_to_come_again(
    tokenizer: Tokenizer, stream: bool
) -> None:
    """It is not ready, but no fault either, for which Serve would replace the replica."""
    server = make(tokenizer, "abc")
    server.engine.restart()
    call = await fetch(server.app, "POST", CHAT, ASK | {"stream": stream})
    assert (call.status, call.error["code"], call.headers["retry-after"]) == (503, "engine_dead", "1")
    assert "try again" in call.error["message"]
    call = await fetch(server.app, "GET", "/health")
    assert (call.status, call.error["code"], call.headers["retry-after"]) == (503, "restarting", "1")
    assert server.frontend.healthy
    server.engine.restarting = False
    assert (await fetch(server.app, "GET", "/health")).status == 200
    assert (await fetch(server.app, "POST", CHAT, ASK)).status == 200


@async_test
async def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error_event(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    server = make(tokenizer, "abc", auto=False)
    with caplog.at_level(logging.INFO, logger="tournant.http"):
        call = start(server.app, "POST", CHAT, ASK | {"stream": True})
        await settle()
        server.engine.step()
        await settle()
        server.engine.step()
        server.engine.die()
        await call.task
    line = json.loads(caplog.messages[-1])
    assert (line["status"], line["complete"], line["error"]) == (200, False, "engine_dead")
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
async def test_a_fault_of_ours_is_a_500_that_tells_nothing(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
