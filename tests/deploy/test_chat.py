"""The terminal chat over a made-up server: what it sends, shows and remembers, and what Ctrl-C does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tournant.deploy.chat import Chat, ChatError, run_chat

Handler = Callable[[httpx.Request], httpx.Response]


class Stream(httpx.SyncByteStream):
    """A body that comes in pieces; an exception among them is raised in its place."""

    def __init__(self, *pieces: bytes | BaseException) -> None:
        self.pieces = pieces
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def close(self) -> None:
        self.closed = True


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


def chat_with(*bodies: Stream | httpx.Response, **options: Any) -> tuple[Chat, list[dict[str, Any]]]:
    """A chat whose server answers with these, one after the other, and the bodies it was sent."""
    waiting, sent = list(bodies), []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        sent.append(json.loads(request.content))
        body = waiting.pop(0)
        return body if isinstance(body, httpx.Response) else httpx.Response(200, stream=body)

    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
    return Chat(client, **options), sent


def test_answers_are_shown_as_they_come_and_remembered() -> None:
    first = Stream(event("Hel"), event("lo") + b": comment\n\n", b"data: [DONE]\n\n")
    chat, sent = chat_with(first, Stream(event("Bye")), system="Be short.", sampling={"seed": 3})
    shown: list[str] = []
    chat.ask("Hi", shown.append)
    chat.ask("Go", shown.append)
    assert shown == ["Hel", "lo", "Bye"]
    assert sent[1] == {
        "model": "m",
        "stream": True,
        "seed": 3,
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Go"},
        ],
    }


def test_ctrl_c_stops_the_answer_closes_the_connection_and_keeps_what_was_shown() -> None:
    stream = Stream(event("Hel"), KeyboardInterrupt(), event("never"))
    chat, _ = chat_with(stream)
    shown: list[str] = []
    chat.ask("Hi", shown.append)
    assert shown == ["Hel", " [stopped]"]
    assert stream.closed
    assert chat.messages[-1] == {"role": "assistant", "content": "Hel"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (httpx.Response(429, json={"error": {"message": "full; try again"}}), "full; try again (HTTP 429)"),
        (httpx.Response(502, content=b"<html>\nbad gateway"), "HTTP 502: <html> bad gateway"),
        (Stream(event("a"), b'data: {"error": {"message": "engine died"}}\n\n'), "engine died"),
        (Stream(b"data: {broken\n\n"), "the server sent an event that is no chat chunk"),
        (Stream(b"data: [1]\n\n"), "the server sent an event that is no chat chunk"),
        (Stream(httpx.ReadError("reset")), "no answer from http://server: reset; is `tournant serve` running there?"),
    ],
)
def test_a_failure_is_one_line_and_not_remembered(body: Stream | httpx.Response, message: str) -> None:
    chat, _ = chat_with(body)
    with pytest.raises(ChatError) as caught:
        chat.ask("Hi", lambda _: None)
    assert str(caught.value) == message
    assert chat.messages == []


def test_a_server_without_models_is_told() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={}))
    client = httpx.Client(base_url="http://server", transport=transport)
    with pytest.raises(ChatError, match="lists no models"):
        Chat(client)


def test_a_session_resets_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[dict[str, str]]] = []

    def ask(self: Chat, text: str, show: Callable[[str], None]) -> None:
        self.messages.append({"role": "user", "content": text})
        asked.append(list(self.messages))
        if text == "bad":
            raise ChatError("no")
        show("answer")

    monkeypatch.setattr(Chat, "ask", ask)
    lines = iter(["one", "", "/reset", "bad", "two", "/exit", "never"])
    shown: list[str] = []
    with httpx.Client(base_url="http://server") as client:
        run_chat(client, "m", None, {}, lambda _: next(lines), shown.append)
    assert [[message["content"] for message in messages] for messages in asked] == [["one"], ["bad"], ["bad", "two"]]
    assert "error: no\n" in shown
    assert next(lines) == "never"
