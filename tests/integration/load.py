"""Clients that keep asking a service over HTTP and check every answer: nothing fails, is missing, or comes twice.

The service is deterministic, so each prompt has one answer for each set of weights; an answer is compared whole. A
second reading of one stream, a token too few or too many, or an error event makes it another text.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

PATIENCE_S = 300.0


@dataclass
class Load:
    """url: of the service; length: tokens of an answer; num_prompts: how many different prompts there are; prompt: they
    are this with their numbers; pause_s: of a client between an answer and its next request.

    wanted: the text of each prompt under each set of weights; answered: by weights; failures: in words; flowing: events
    so far of every stream that is being read.
    """

    url: str
    length: int
    num_prompts: int = 8
    prompt: str = "prompt {}"
    pause_s: float = 0.0
    wanted: dict[tuple[str, int], str] = field(default_factory=dict)
    answered: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    flowing: Counter[int] = field(default_factory=Counter)
    _number: int = 0

    @property
    def num_answered(self) -> int:
        return self.answered.total()

    @property
    def told(self) -> str:
        """For whoever reads what a long test prints."""
        return f"{self.num_answered} answered, {len(self.failures)} failed, the slowest in {self.slowest_s:.1f} s"

    async def learn(self) -> None:
        """Ask everything once, not in streams, while nothing happens; answers are known then."""
        async with self._client(self.num_prompts) as client:
            await asyncio.gather(*(self.ask(client, number, False) for number in range(self.num_prompts)))
        assert self.failures == []
        assert len(set(self.wanted.values())) == self.num_prompts

    @asynccontextmanager
    async def running(self, num_clients: int, *, streams_only: bool = False) -> AsyncIterator[None]:
        """So many clients ask one thing after another meanwhile; all of them have their answers at the end. One answer
        in four is not a stream, unless all are to be.
        """
        over = asyncio.Event()
        async with self._client(num_clients) as client:
            asking = [asyncio.create_task(self._keep_asking(client, over, streams_only)) for _ in range(num_clients)]
            try:
                yield
            finally:
                over.set()
                await asyncio.gather(*asking)

    async def until(self, num_answered: int) -> None:
        """So many more answers have come, or failures."""
        goal = self.num_answered + len(self.failures) + num_answered
        async with asyncio.timeout(PATIENCE_S):
            while self.num_answered + len(self.failures) < goal:
                await asyncio.sleep(0.05)

    async def all_flow(self, num_streams: int, events: int) -> None:
        """So many streams are being read, each with so many events or more, and not at its end."""
        async with asyncio.timeout(PATIENCE_S):
            while sum(count >= events for count in self.flowing.values()) < num_streams:
                await asyncio.sleep(0.005)

    async def _keep_asking(self, client: httpx.AsyncClient, over: asyncio.Event, streams_only: bool) -> None:
        while not over.is_set():
            self._number += 1
            await self.ask(client, self._number % self.num_prompts, streams_only or self._number % 4 > 0)
            await asyncio.sleep(self.pause_s)

    async def ask(self, client: httpx.AsyncClient, number: int, stream: bool) -> None:
        """One request; what is wrong with its answer goes to `failures`."""
        body = {
            "model": "M",
            "prompt": self.prompt.format(number),
            "seed": number,
            "temperature": 1.0,
            "max_tokens": self.length,
            "ignore_eos": True,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        began = asyncio.get_running_loop().time()
        try:
            weights_id, text = await self._read(client, body)
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            self.failures.append(f"prompt {number}, stream {stream}: {type(error).__name__}: {error}")
            return
        self.slowest_s = max(self.slowest_s, asyncio.get_running_loop().time() - began)
        if (wanted := self.wanted.setdefault((weights_id, number), text)) != text:
            self.failures.append(f"prompt {number}, stream {stream}: {text!r} instead of {wanted!r}")
        self.answered[weights_id] += 1

    async def _read(self, client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str]:
        """Weights and text of an answer. Raises ValueError and others for one that is not whole."""
        async with client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"{response.status_code} {(await response.aread())[:300]!r}")
            if body["stream"]:
                lines = await self._lines(response)
                if not lines or lines.pop() != "[DONE]":
                    raise ValueError(f"the stream ends after {lines[-1:]}")
                events = [json.loads(line) for line in lines]
            else:
                events = [json.loads(await response.aread())]
        if errors := [event["error"] for event in events if "error" in event]:
            raise ValueError(f"an error event: {errors}")
        (weights_id,) = {event["weights_id"] for event in events}
        (usage,) = (event["usage"] for event in events if event.get("usage"))
        choices = [choice for event in events for choice in event["choices"]]
        ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        if (usage["completion_tokens"], ends) != (self.length, ["length"]):
            raise ValueError(f"{usage['completion_tokens']} tokens, ended by {ends}")
        return weights_id, "".join(choice["text"] for choice in choices)

    async def _lines(self, response: httpx.Response) -> list[str]:
        lines, number = list[str](), id(response)
        try:
            async for line in response.aiter_lines():
                if line:
                    lines.append(line.removeprefix("data: "))
                    self.flowing[number] += 1
        finally:
            del self.flowing[number]
        return lines

    def _client(self, num_clients: int) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=num_clients)
        return httpx.AsyncClient(timeout=httpx.Timeout(PATIENCE_S), limits=limits, trust_env=False)
