"""/tokenize and /detokenize beside everything else: limits, quotas, their own threads."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.asgi_client import fetch, start
from tests.deploy.async_test import async_test
from tests.deploy.fake_server import CHAT, COMPLETIONS, make
from tests.deploy.keys import access_for, bearer, tenants
from tournant.deploy import tokenizing
from tournant.deploy.http_routes import RoutedApp
from tournant.deploy.tokenizer import INLINE_CHARS, INLINE_MESSAGES, Tokenizer
from tournant.deploy.tokenizing import (
    CHUNK,
    INLINE_BYTES,
    MAX_AT_ONCE,
    MAX_DETOKENIZE_IDS,
    MAX_OPEN,
    MAX_TOKENIZE_BYTES,
    MAX_TOKENIZE_CHARS,
)

LONG = "a" * (INLINE_BYTES + 1)
BODIES = [("/tokenize", {"prompt": LONG}), ("/detokenize", {"tokens": [97] * INLINE_BYTES})]


class Held:
    """Encoding and decoding that wait for the test."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.begun = threading.Semaphore(0)
        self.threads: list[str] = []
        for name in ("encode", "decode"):
            monkeypatch.setattr(tokenizer, name, self._held(getattr(tokenizer, name)))

    def _held(self, function: Any) -> Any:
        def held(*args: Any, **kwargs: Any) -> Any:
            name = threading.current_thread().name
            if name.startswith("tokenize_"):
                self.threads.append(name)
                self.begun.release()
                assert self.go_on.wait(60)
            return function(*args, **kwargs)

        return held

    async def wait_until_begun(self, number: int) -> None:
        for _ in range(number):
            assert await asyncio.to_thread(self.begun.acquire, timeout=60)


async def status_of(app: RoutedApp, path: str, body: object, name: str = "ann") -> int:
    return (await fetch(app, "POST", path, body, bearer(name))).status


@async_test
@pytest.mark.parametrize(
    ("path", "body", "said", "param"),
    [
        (
            "/tokenize",
            {"prompt": "a" * (MAX_TOKENIZE_CHARS + 1)},
            f"prompt has {MAX_TOKENIZE_CHARS + 1} characters; at most {MAX_TOKENIZE_CHARS}",
            "prompt",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a" * MAX_TOKENIZE_CHARS}]},
            f"messages has {MAX_TOKENIZE_CHARS + 4} characters; at most {MAX_TOKENIZE_CHARS}",
            "messages",
        ),
        (
            "/detokenize",
            {"tokens": [97] * (MAX_DETOKENIZE_IDS + 1)},
            f"tokens has {MAX_DETOKENIZE_IDS + 1} ids; at most {MAX_DETOKENIZE_IDS}",
            "tokens",
        ),
        ("/detokenize", {"tokens": [10**300]}, "tokens has 1000", "tokens"),
        ("/detokenize", {"tokens": [97, -1]}, "tokens has -1; token ids are 0 to", "tokens"),
    ],
)
async def test_what_is_too_much_is_told_with_its_limit(
    tokenizer: Tokenizer, path: str, body: object, said: str, param: str
) -> None:
    call = await fetch(make(tokenizer, "a").app, "POST", path, json.dumps(body, separators=(",", ":")).encode())
    assert (call.status, call.error["param"]) == (400, param)
    assert said in call.error["message"]
    assert len(call.error["message"]) < 200


@async_test
async def test_bodies_are_shorter_than_those_of_answers(tokenizer: Tokenizer) -> None:
    for path, _ in BODIES:
        call = await fetch(make(tokenizer, "a").app, "POST", path, b" " * (MAX_TOKENIZE_BYTES + 1))
        assert (call.status, call.error["code"]) == (413, "body_too_large")


@async_test
async def test_a_long_answer_is_whole(tokenizer: Tokenizer) -> None:
    text = "ab" * CHUNK + '"\\é'
    app = make(tokenizer, "a").app
    call = await fetch(app, "POST", "/tokenize", {"prompt": text, "return_token_strs": True})
    token_ids = tokenizer.encode(text)
    assert len(token_ids) > 2 * CHUNK
    assert (call.json["count"], call.json["tokens"]) == (len(token_ids), token_ids)
    assert call.json["token_strs"] == [*text[:-1], "bytes:\\xc3", "bytes:\\xa9"]
    assert (await fetch(app, "POST", "/detokenize", {"tokens": token_ids})).json == {"prompt": text}
    nothing = await fetch(app, "POST", "/tokenize", {"prompt": "", "return_token_strs": True})
    assert (nothing.json["count"], nothing.json["tokens"], nothing.json["token_strs"]) == (0, [], [])


@async_test
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_requests_are_counted_with_their_tenant(
    tokenizer: Tokenizer, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    access = access_for(tmp_path, tenants("ann", "bob", requests_per_minute=2))
    app = make(tokenizer, "a", access=access).app
    assert await status_of(app, path, {"nothing": 1}) == 400  # and is not counted
    assert [await status_of(app, path, body) for _ in range(3)] == [200, 200, 429]
    assert await status_of(app, path, body, "bob") == 200


@async_test
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_outstanding_requests_are_bounded(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    held = Held(tokenizer, monkeypatch)
    app = make(tokenizer, "a", access=access_for(tmp_path, tenants("ann", max_outstanding=1))).app
    first = start(app, "POST", path, body, bearer("ann"))
    await held.wait_until_begun(1)
    assert await status_of(app, path, body) == 429
    held.go_on.set()
    await first.task
    assert first.status == 200
    assert await status_of(app, path, body) == 200


@async_test
async def test_prompts_of_answers_do_not_wait_behind_them(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tokenizer, monkeypatch)
    app = make(tokenizer, "a", info={"max_model_len": 1 << 16, "pool_tokens": 1 << 16}).app
    calls = [start(app, "POST", *BODIES[place % 2]) for place in range(MAX_AT_ONCE + 2)]
    await held.wait_until_begun(MAX_AT_ONCE)
    long = "b" * (INLINE_CHARS + 1)
    assert (await fetch(app, "POST", COMPLETIONS, {"prompt": long, "max_tokens": 1})).status == 200
    chat = {"messages": [{"role": "user", "content": long}], "max_tokens": 1}
    assert (await fetch(app, "POST", CHAT, chat)).status == 200
    assert (await fetch(app, "POST", "/tokenize", {"prompt": "short"})).status == 200
    assert (len(held.threads), any(call.sent for call in calls)) == (MAX_AT_ONCE, False)
    held.go_on.set()
    await asyncio.gather(*(call.task for call in calls))
    assert {call.status for call in calls} == {200}
    assert len(set(held.threads)) == MAX_AT_ONCE


@async_test
async def test_those_that_wait_are_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "MAX_OPEN", MAX_AT_ONCE)
    held = Held(tokenizer, monkeypatch)
    app = make(tokenizer, "a").app
    calls = [start(app, "POST", *BODIES[0]) for _ in range(MAX_AT_ONCE)]
    await held.wait_until_begun(MAX_AT_ONCE)
    call = await fetch(app, "POST", *BODIES[0])
    assert (call.status, call.error["code"]) == (503, "overloaded")
    held.go_on.set()
    await asyncio.gather(*(call.task for call in calls))
    assert (await fetch(app, "POST", *BODIES[0])).status == 200
    assert MAX_OPEN > MAX_AT_ONCE


@async_test
async def test_long_chats_are_rendered_off_the_loop(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    render = tokenizer.render_chat

    def noting(*args: Any, **kwargs: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(*args, **kwargs)

    monkeypatch.setattr(tokenizer, "render_chat", noting)
    short, long = ({"role": "user", "content": "a" * size} for size in (1, INLINE_CHARS + 1))
    named = {"role": "user", "content": "a", "name": "n" * INLINE_CHARS}
    for chat in ([short], [short] * (INLINE_MESSAGES + 1), [long], [named]):
        assert await tokenizer.apply_chat_async(chat) == tokenizer.apply_chat(chat)
    assert threads[0] == threading.main_thread().name
    assert all(name.startswith("tokenizer") for name in threads[2::2])
    assert len(threads) == 8
