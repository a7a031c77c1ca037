"""Bodies whose numbers are made to keep a server busy: told so, off the loop, before they are parsed."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from tests.deploy.async_test import async_test
from tests.deploy.fake_server import CHAT, COMPLETIONS, PROMPT, error_of, make
from tournant.deploy import large_bodies, openai_schema
from tournant.deploy.http_server import MAX_CHARS_PER_TOKEN
from tournant.deploy.large_bodies import INLINE_BODY_BYTES, MAX_CONTAINERS, MAX_KEYS, MAX_STRINGS, parse_request
from tournant.deploy.openai_schema import MAX_ERRORS, MAX_MESSAGES, ApiError, ChatBody, CompletionBody, parse_body
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.sampling_params import MAX_LOGIT_BIAS

FILL = "x" * INLINE_BODY_BYTES
MANY = {f"{place:x}": 1 for place in range(10_000)}
USER = {"role": "user", "content": "a"}


def refused(kind: Any, body: object) -> ApiError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        asyncio.run(parse_request(kind, data))
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (CompletionBody, MANY, f"the body has 10000 fields; at most {MAX_KEYS}"),
        (ChatBody, {"messages": [USER, MANY]}, f"messages.1 has 10000 fields; at most {MAX_KEYS}"),
        (
            CompletionBody,
            {"prompt": FILL, "logit_bias": dict.fromkeys(MANY, "x")},
            f"logit_bias has 10000 entries; at most {MAX_LOGIT_BIAS}",
        ),
        (
            CompletionBody,
            b"{" + b",".join(b'"%d":1' % place for place in range(MAX_STRINGS + 1)) + b"}",
            f"the body has {MAX_STRINGS + 1} strings (names and texts); at most {MAX_STRINGS}",
        ),
        (
            CompletionBody,
            b'{"prompt":[' + b"[]," * MAX_CONTAINERS + b"[]]}",
            f"the body has {MAX_CONTAINERS + 3} lists and objects; at most {MAX_CONTAINERS}",
        ),
    ],
)
def test_the_shape_is_refused_before_it_is_parsed(
    kind: Any, body: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_bodies, "parse_body", pytest.fail)
    assert said in refused(kind, body).message


@pytest.mark.parametrize(
    "text",
    [
        "[{" * MAX_CONTAINERS,
        '"' * (2 * MAX_STRINGS + 2),
        "\\" * INLINE_BODY_BYTES,
        '\\"' * (2 * MAX_STRINGS),
        '\\\\"[{',
    ],
)
def test_what_stands_in_texts_is_not_counted(text: str) -> None:
    body = asyncio.run(parse_request(CompletionBody, json.dumps({"prompt": [text, FILL, text]}).encode()))
    assert body.prompt == [text, FILL, text]


def test_the_longest_chat_is_within_the_shape() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "name": "n", "content": parts, "refusal": None}
    body = asyncio.run(parse_request(ChatBody, json.dumps({"messages": [message] * MAX_MESSAGES}).encode()))
    assert len(body.messages) == MAX_MESSAGES


@pytest.mark.parametrize(
    "data", [b'{"a": "' + FILL.encode(), b"[" * INLINE_BODY_BYTES + b"]", b'{"a' + b'":"' * 30_000]
)
def test_a_large_body_that_is_no_json_is_told_so(data: bytes) -> None:
    assert refused(CompletionBody, data).code == "invalid_json"


@async_test
async def test_only_large_bodies_leave_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def noting(kind: type[CompletionBody], data: bytes) -> CompletionBody:
        threads.append(threading.current_thread() is threading.main_thread())
        return parse_body(kind, data)

    monkeypatch.setattr(large_bodies, "parse_body", noting)
    for prompt in ("a", FILL):
        assert (await parse_request(CompletionBody, json.dumps({"prompt": prompt}).encode())).prompt == prompt
    assert threads == [True, False]


def test_errors_without_end_are_counted_and_not_made() -> None:
    for key, number in (("logit_bias", 2000), ("stream_options", 3000)):
        entries = dict.fromkeys([f"k{place}" for place in range(number)], "x")
        error = refused(CompletionBody, {"prompt": "a", key: entries})
        assert f"the body has {number} errors, more than the {MAX_ERRORS}" in error.message


def test_few_errors_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_schema, "MAX_ERRORS", 2)
    assert refused(CompletionBody, {"prompt": "a", "x": 1, "y": 1}).param == "x"
    assert "has 3 errors" in refused(CompletionBody, {"prompt": "a", "x": 1, "y": 1, "z": 1}).message


@pytest.mark.parametrize("name", ["best_of", "n", "seed", "max_tokens", "top_k", "logprobs"])
def test_a_huge_number_is_not_repeated_in_full(name: str) -> None:
    data = json.dumps({"prompt": "a", name: 10**400}).encode()
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionBody, data).sampling()
    assert caught.value.param == name
    assert f"{name} is 1000" in caught.value.message
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("text", [b"\\ud800", b"\\udc00 x", b"\\ud800\\u0041", b"\\udfff"])
def test_a_lone_surrogate_is_called_one(text: bytes) -> None:
    error = refused(CompletionBody, b'{"prompt": "' + text + b'"}')
    assert (error.code, "a lone surrogate" in error.message) == ("invalid_json", True)


@pytest.mark.parametrize("text", [b"\\u12", b"\\uzzzz", b"\\q"])
def test_another_wrong_escape_is_not(text: bytes) -> None:
    assert "surrogate" not in refused(CompletionBody, b'{"prompt": "' + text + b'"}').message


@async_test
async def test_both_routes_of_answers_look_at_the_shape(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "a")
    for path, body in ((COMPLETIONS, PROMPT | MANY), (CHAT, {"messages": [USER]} | MANY)):
        call, error = await error_of(server, path, body)
        assert (call.status, "10001 fields" in error["message"] or "10002 fields" in error["message"]) == (400, True)


@async_test
async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make(tokenizer, "a", info={"max_model_len": 256})
    limit = 256 * MAX_CHARS_PER_TOKEN
    call, error = await error_of(server, COMPLETIONS, {"prompt": "a" * limit})
    assert f"it has {limit} tokens" in error["message"]  # was encoded
    monkeypatch.setattr(tokenizer, "encode", pytest.fail)
    long = "a" * (limit + 1)
    chat = {"messages": [USER | {"content": "a"}, USER | {"content": long[1:]}]}
    for path, body in ((COMPLETIONS, {"prompt": long}), (COMPLETIONS, {"prompt": [long + "a", long]}), (CHAT, chat)):
        call, error = await error_of(server, path, body)
        assert (call.status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
        assert error["message"].startswith("the prompt is too long: it has ")
        assert " characters, but" in error["message"]
