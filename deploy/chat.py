"""A chat in the terminal with a running server, over its HTTP API.

Owns the conversation and what Ctrl-C means: during an answer it stops that answer only (the server stops its work when
the connection closes), at the prompt it drops the line; a second one in a row ends the chat, as /exit and Ctrl-D do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from tournant.deploy.http_client import error_text, unreachable

MAX_EVENT_CHARS = 1 << 20
HELP = "Ctrl-C stops an answer; /reset forgets the conversation; /exit or Ctrl-D ends."


class ChatError(RuntimeError):
    """The server could not be reached, or refused; the message is one line."""


class Chat:
    """One conversation.

    model: None = the first one that the server lists; sampling: further fields of every request, such as temperature.
    Raises ChatError when the server lists no model.
    """

    def __init__(
        self,
        client: httpx.Client,
        model: str | None = None,
        system: str | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self._client = client
        self._sampling = dict(sampling or {})
        self._system = system
        self.model = model or self._first_model()
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, text: str, show: Callable[[str], None]) -> None:
        """Send one message and show the answer as it comes.

        A KeyboardInterrupt ends the answer where it is; what was shown stays in the conversation. On ChatError the
        conversation is as it was before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        try:
            for piece in self._stream(messages):
                answer += piece
                show(piece)
        except KeyboardInterrupt:
            show(" [stopped]")
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        body = {**self._sampling, "model": self.model, "messages": messages, "stream": True}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise ChatError(error_text(response.status_code, response.read()))
                for line in response.iter_lines():
                    if len(line) > MAX_EVENT_CHARS:
                        raise ChatError(f"the server sent an event of more than {MAX_EVENT_CHARS} characters")
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        yield _piece(line[5:])
        except httpx.HTTPError as error:
            raise ChatError(unreachable(self._client, error)) from error

    def _first_model(self) -> str:
        try:
            response = self._client.get("/v1/models")
            if response.status_code != 200:
                raise ChatError(error_text(response.status_code, response.content))
            return str(response.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            raise ChatError(unreachable(self._client, error)) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ChatError(f"{self._client.base_url} lists no models; is it an OpenAI-compatible server?") from error


def _piece(data: str) -> str:
    """The text that one event adds. Raises ChatError when the event is an error or not a chat chunk."""
    try:
        event: Any = json.loads(data)
        if "error" in event:
            raise ChatError(str(event["error"]["message"]))
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ChatError("the server sent an event that is no chat chunk") from error


def run_chat(
    client: httpx.Client,
    model: str | None,
    system: str | None,
    sampling: Mapping[str, Any],
    read: Callable[[str], str],
    show: Callable[[str], None],
) -> None:
    """Chat until the user ends it. read: prompts for a line, may raise EOFError; show: prints text as it is.

    Raises ChatError when the server cannot be reached at the start; later errors are shown and the chat goes on.
    """
    chat = Chat(client, model, system, sampling)
    show(f"{chat.model} at {client.base_url}. {HELP}\n")
    dropped = False
    while True:
        try:
            text = read("\n> ").strip()
        except (EOFError, KeyboardInterrupt) as end:
            show("\n")
            if dropped or isinstance(end, EOFError):
                return
            show("Ctrl-C once more ends the chat.")
            dropped = True
            continue
        dropped = False
        if text == "/exit":
            return
        if text == "/reset":
            chat.reset()
        elif text.startswith("/"):
            show(f"{text.split()[0]} is no command. {HELP}\n")
        elif text:
            try:
                chat.ask(text, show)
                show("\n")
            except ChatError as error:
                show(f"error: {error}\n")
