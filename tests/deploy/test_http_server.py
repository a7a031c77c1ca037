from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from tests.deploy.asgi_client import fetch, start
from tests.deploy.async_test import async_test, settle
from tests.deploy.fake_engine import FakeEngineClient
from tests.deploy.fake_server import ASK, CHAT, COMPLETIONS, MESSAGES, PROMPT, Server, content, error_of, make
from tests.helpers.tiny_model import BOS_ID
from tournant.deploy.frontend import FrontendOptions
from tournant.deploy.status_routes import VERSION
from tournant.deploy.tokenizer import Tokenizer
from tournant.kvstore.block import Namespace
from tournant.workers.messages import EngineStats, TierStats, TokenLogprobs

TIERS = FrontendOptions(tiers=True)


@async_test
async def test_a_chat_answer(tokenizer: Tokenizer) -> None:
    call = await fetch(make(tokenizer, "It is “tea”\n", cached_tokens=16).app, "POST", CHAT, ASK | {"model": "alias"})
    body = call.json
    assert call.status == 200
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "It is “tea”\n"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 30,
        "completion_tokens": 17,
        "total_tokens": 47,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert (body["object"], body["model"]) == ("chat.completion", "alias")
    assert body["id"] == f"chatcmpl-{call.headers['x-request-id']}"


@async_test
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_tells_where_cached_tokens_lay_if_there_is_a_store(tokenizer: Tokenizer, path: str) -> None:
    body = ASK if path == CHAT else {"prompt": ["hi", "ho"], "temperature": 0}
    engine = {"cached_tokens": 48, "cached_by_tier": (16, 32, 0)}
    prompts = 1 if path == CHAT else 2
    whole = (await fetch(make(tokenizer, "abc", options=TIERS, **engine).app, "POST", path, body)).json["usage"]
    by_tier = {"device": 16 * prompts, "host": 32 * prompts, "nvme": 0}
    assert whole["prompt_tokens_details"] == {"cached_tokens": 48 * prompts, "cached_tokens_by_tier": by_tier}
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    events = (await fetch(make(tokenizer, "abc", options=TIERS, **engine).app, "POST", path, streamed)).events
    assert events[-1]["usage"] == whole
    without = (await fetch(make(tokenizer, "abc", **engine).app, "POST", path, body)).json["usage"]
    assert without["prompt_tokens_details"] == {"cached_tokens": 48 * prompts}


@async_test
async def test_health_does_not_depend_on_the_store(tokenizer: Tokenizer) -> None:
    """The store is away, as it is while it is started again: requests go on, so nobody is to replace the replica."""
    stats = EngineStats(num_steps=1, tiers=TierStats(attached=0, store_losses=1))
    server = make(tokenizer, "abc", options=TIERS, stats=stats)
    assert (await fetch(server.app, "GET", "/health")).status == 200
    metrics = (await fetch(server.app, "GET", "/metrics")).text
    assert 'tournant_store_losses_total{model_name="m"} 1.0' in metrics
    assert 'tournant_store_attached{model_name="m"} 0.0' in metrics


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
@pytest.mark.parametrize(
    ("prompt", "echoed"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
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
        parts = (
            [event["choices"][0]["logprobs"] for event in call.events]
            if stream
            else [call.json["choices"][0]["logprobs"]]
        )
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
        parts = (
            [event["choices"][0]["logprobs"] for event in call.events]
            if stream
            else [call.json["choices"][0]["logprobs"]]
        )
        first, second = [entry for part in parts for entry in part["content"]]
        assert (first["token"], first["bytes"], first["logprob"]) == ("bytes:\\xc3", [0xC3], -0.5)
        assert [top["bytes"] for top in second["top_logprobs"]] == [[0xA9], [0xAA]]


@async_test
@pytest.mark.case(47)
@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf"), -1e30])
async def test_log_probabilities_without_a_value_are_finite_json(
    tokenizer: Tokenizer, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakeEngineClient,
        "_logprobs",
        lambda self, token, top: TokenLogprobs(value, [(place, value) for place in range(top)]),
    )
    bodies = [
        (COMPLETIONS, PROMPT | {"echo": True, "logprobs": 20, "top_k": 1}),
        (CHAT, ASK | {"logprobs": True, "top_logprobs": 20}),
    ]
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


@async_test
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_slow_client_that_counts_tokens_gets_each(tokenizer: Tokenizer, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    server = make(tokenizer, "abcd", auto=False)
    body = (ASK if path == CHAT else PROMPT) | {"stream": True, "stream_options": options}
    call = start(server.app, "POST", path, body)
    await settle()
    call.stop_reading()
    for _ in range(5):
        server.engine.step()
        await settle()
    call.read_on()
    await call.task
    assert [event["usage"]["completion_tokens"] for event in call.events] == [1, 2, 3, 4, 5, 5]


# ---------------------------------------------------------------- weights that change


async def change_weights(server: Server, tokenizer: Tokenizer) -> FakeEngineClient:
    """Exchange the engine at once for one of other weights, as epoch 1."""
    other = make(tokenizer, "new", info={"namespace": Namespace(b"n" * 32, "fp32", "fp32", b"l" * 32)}).engine

    async def swap() -> Tokenizer:
        server.frontend.engine, server.frontend.epoch = other, 1
        return tokenizer

    await server.frontend.change_weights(swap, 0.0)
    return other


@async_test
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_that_begins_again_names_the_weights_that_made_it(
    tokenizer: Tokenizer, path: str, stream: bool
) -> None:
    server = make(tokenizer, "old", auto=False)
    body = (ASK if path == CHAT else PROMPT) | {"stream": stream}
    call = start(server.app, "POST", path, body)
    await settle()
    await change_weights(server, tokenizer)
    await call.task
    parts = call.events if stream else [call.json]
    found = {(part["system_fingerprint"], part["weights_id"], part["epoch"]) for part in parts}
    assert found == {("tournant-6e6e6e6e6e6e-e1", "6e" * 32, 1)}
    if stream:
        assert content(parts) == "new"
    (card, _) = (await fetch(server.app, "GET", "/v1/models")).json["data"]
    assert (card["weights_id"], card["epoch"]) == ("6e" * 32, 1)
    assert 'tournant_weights_epoch{model_name="m"} 1.0' in (await fetch(server.app, "GET", "/metrics")).text


@async_test
async def test_an_answer_that_has_begun_ends_with_an_event_that_says_so(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "old", auto=False)
    calls = [start(server.app, "POST", COMPLETIONS, PROMPT | {"stream": stream, "n": 2}) for stream in (True, False)]
    await settle()
    server.engine.step()
    await settle()
    await change_weights(server, tokenizer)
    await asyncio.gather(*(call.task for call in calls))
    assert calls[0].events[-1]["error"]["code"] == "weights_changed"
    assert {event["weights_id"] for event in calls[0].events[:-1]} == {"77" * 32}
    assert [choice["text"] for choice in calls[1].json["choices"]] == ["new", "new"]  # nobody had seen any of it


@async_test
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_request_that_waits_for_new_weights_is_encoded_by_their_tokenizer(
    tokenizer: Tokenizer, bos_tokenizer: Tokenizer, path: str
) -> None:
    server = make(tokenizer, "old", auto=False)
    running = start(server.app, "POST", path, ASK if path == CHAT else PROMPT)
    await settle()
    swapped = asyncio.Event()
    new = make(tokenizer, "new").engine

    async def swap() -> Tokenizer:
        await swapped.wait()
        server.frontend.engine = new
        return bos_tokenizer

    changing = asyncio.create_task(server.frontend.change_weights(swap, 60.0))
    await settle()
    waiting = start(server.app, "POST", path, ASK if path == CHAT else PROMPT)
    await settle()
    server.engine.step(4)
    await running.task
    assert (new.submitted, server.frontend.gate.num_pending) == ([], 1)
    swapped.set()
    await changing
    await waiting.task
    assert waiting.status == 200
    assert [request.token_ids[0] for request in new.submitted] == [BOS_ID]
    assert server.engine.submitted[0].token_ids[0] != BOS_ID


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
async def test_a_connection_that_breaks_while_sending_stops_its_work(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    server = make(tokenizer, "abcdefgh", auto=False)
    call = start(server.app, "POST", CHAT, ASK | {"stream": True}, broken=True)
    await settle()
    server.engine.step()
    await call.task
    assert caplog.messages == []  # nothing of ours failed
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
    server = make(tokenizer, "a")
    for method in ("GET", "HEAD"):
        assert (await fetch(server.app, method, "/health")).status == 200
    assert (await fetch(server.app, "GET", "/version")).json == {"version": VERSION}
    server.engine.die()
    call, error = await error_of(server, "/health", None, "GET")
    assert (call.status, error["code"]) == (503, "unhealthy")
    await server.frontend.stop()
    call, error = await error_of(server, "/health", None, "GET")
    assert (call.status, error["code"], error["message"]) == (503, "stopping", "the service is stopping")


@async_test
@pytest.mark.case(51)
async def test_tokenize_and_back(tokenizer: Tokenizer, bos_tokenizer: Tokenizer) -> None:
    server = make(bos_tokenizer, "a")
    for body in ({"prompt": "hi"}, {"prompt": "<|bos|>hi"}, {"messages": MESSAGES}):
        tokens = (await fetch(server.app, "POST", "/tokenize", body)).json["tokens"]
        assert tokens.count(BOS_ID) == 1
    call = await fetch(server.app, "POST", "/tokenize", {"prompt": "é", "return_token_strs": True})
    assert call.json == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [BOS_ID, 0xC3, 0xA9],
        "token_strs": ["<|bos|>", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert (await fetch(server.app, "POST", "/detokenize", {"tokens": [BOS_ID, 0xC3, 0xA9]})).json == {
        "prompt": "<|bos|>é"
    }
    plain = await fetch(server.app, "POST", "/tokenize", {"prompt": "hi", "add_special_tokens": False})
    assert plain.json["tokens"] == [104, 105]
    assert (await fetch(make(tokenizer, "a").app, "POST", "/tokenize", {"prompt": "hi"})).json["count"] == 2


@async_test
async def test_metrics_after_a_request(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "abc")
    await fetch(server.app, "POST", CHAT, ASK)
    await fetch(server.app, "GET", "/no/such/path")
    text = (await fetch(server.app, "GET", "/metrics")).text
    for line in (
        'vllm_request_success_total{finished_reason="stop",model_name="m"} 1.0',
        'vllm_time_to_first_token_seconds_count{model_name="m"} 1.0',
        'vllm_num_requests_running{model_name="m"} 0.0',
        'tournant_http_requests_total{model_name="m",route="/v1/chat/completions",status="200"} 1.0',
        'tournant_http_requests_total{model_name="m",route="other",status="404"} 1.0',
    ):
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
    call = await fetch(
        server.app, "POST", "/llm" + CHAT, ASK | {"cache_salt": "s", "priority": 2}, scope={"root_path": "/llm"}
    )
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
