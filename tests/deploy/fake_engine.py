"""An engine client whose tokens are written by the test: one step at a time, with faults on demand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tournant.kvstore.block import Namespace
from tournant.workers.engine_client import OutputSink
from tournant.workers.errors import EngineDeadError
from tournant.workers.messages import (
    LOST_DEAD,
    EngineInfo,
    EngineRequest,
    EngineStats,
    RequestOutput,
    TokenLogprobs,
)

Script = Callable[[EngineRequest, int], Sequence[int]]  # tokens of answer number i of a request, then end-of-text


def make_info(**changes: object) -> EngineInfo:
    fields: dict[str, object] = {
        "writer_id": 1,
        "pid": 1,
        "max_model_len": 256,
        "pool_tokens": 1024,
        "block_tokens": 16,
        "max_num_seqs": 8,
        "max_queued_requests": 8,
        "vocab_size": 512,
        "eos_token_ids": (257, 259),
        "dtype": "float32",
        "device": "cpu",
        "namespace": Namespace(b"w" * 32, "fp32", "fp32", b"l" * 32),
    }
    return EngineInfo(**(fields | changes))  # type: ignore[arg-type]


@dataclass
class Running:
    """One answer that the fake engine makes."""

    request: EngineRequest
    index: int
    sink: OutputSink
    tokens: list[int]
    made: int = 0


@dataclass
class FakeEngineClient:
    """`EngineClient` without an engine. `step` gives each running answer its next token; `auto` steps by itself.

    script: what each answer says; per_step: tokens per answer and step; logprobs are -0.5 for a chosen token and -0.5,
    -1.5, ... for the top ones, which are the chosen token and those that follow its id.
    """

    script: Script
    info: EngineInfo = field(default_factory=make_info)
    auto: bool = False
    per_step: int = 1
    cached_tokens: int = 0
    cached_by_tier: tuple[int, int, int] | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    alive: bool = True
    restarting: bool = False
    reset_result: bool = True
    stuck: bool = False
    submitted: list[EngineRequest] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    aborted_answers: list[tuple[int, int]] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self._ids = itertools.count(1)
        self._stepping: asyncio.Handle | None = None

    @property
    def prefill_tokens(self) -> int:
        waiting = {a.request.request_id: a.request for a in self.running if a.made == a.request.num_output}
        return sum(len(request.token_ids) for request in waiting.values())

    def new_request_id(self) -> int:
        return next(self._ids)

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        if not self.alive:
            raise EngineDeadError("the engine process has ended")
        if self.restarting:
            raise EngineDeadError("the engine is being started anew; try again")
        self.submitted.append(request)
        for index in request.indices:
            tokens = list(self.script(request, index))
            self.running.append(Running(request, index, sink, tokens, made=request.num_output))
        self._keep_stepping()

    def abort(self, request_ids: Iterable[int]) -> None:
        ids = set(request_ids)
        self.aborted += [
            request_id for request_id in ids if any(answer.request.request_id == request_id for answer in self.running)
        ]
        self.running = [answer for answer in self.running if answer.request.request_id not in ids]

    def abort_answer(self, request_id: int, index: int) -> None:
        kept = [a for a in self.running if (a.request.request_id, a.index) != (request_id, index)]
        if len(kept) < len(self.running):
            self.aborted_answers.append((request_id, index))
        self.running = kept

    async def reset_prefix_cache(self) -> bool:
        return self.reset_result

    async def close(self) -> None:
        self.alive = False

    def step(self, count: int = 1) -> None:
        """Run engine steps: every running answer gets its next tokens."""
        for _ in range(count):
            self.steps += 1
            for answer in list(self.running):
                if answer in self.running:  # a sink may have aborted it
                    output = self._next_output(answer)
                    if output.finish_reason is not None:
                        self.running.remove(answer)
                    answer.sink(output)

    def die(self) -> None:
        """End as a killed engine does: every answer gets an error."""
        self.alive = False
        running, self.running = self.running, []
        for answer in running:
            answer.sink(
                RequestOutput(answer.request.request_id, answer.index, [], "error", error="killed", lost=LOST_DEAD)
            )

    def restart(self) -> None:
        """End as one that will come back: every answer gets an error, and nothing is taken."""
        self.restarting = True
        self.fail("rank 1 on a: killed", LOST_DEAD)

    def fail(self, message: str, lost: str | None = None) -> None:
        """Give up all requests, but live on."""
        running, self.running = self.running, []
        for answer in running:
            request_id = answer.request.request_id
            answer.sink(RequestOutput(request_id, answer.index, [], "error", error=message, lost=lost))

    def _keep_stepping(self) -> None:
        if self.auto and not self.stuck and self._stepping is None:
            self._stepping = asyncio.get_running_loop().call_soon(self._auto_step)

    def _auto_step(self) -> None:
        self._stepping = None
        self.step()
        if self.running:
            self._keep_stepping()

    def _next_output(self, answer: Running) -> RequestOutput:
        params = answer.request.params
        first = answer.made == answer.request.num_output
        tokens: list[int] = []
        finish: str | None = None
        stop_token: int | None = None
        while len(tokens) < self.per_step and finish is None:
            token = answer.tokens[answer.made] if answer.made < len(answer.tokens) else self.info.eos_token_ids[0]
            tokens.append(token)
            answer.made += 1
            ends = not params.ignore_eos and token in self.info.eos_token_ids
            if (ends or token in params.stop_token_ids) and answer.made > params.min_tokens:
                finish, stop_token = "stop", token
            elif params.max_tokens is not None and answer.made >= params.max_tokens:
                finish = "length"
        output = RequestOutput(answer.request.request_id, answer.index, tokens, finish, stop_token)
        if params.logprobs is not None:
            output.logprobs = [self._logprobs(token, params.logprobs) for token in tokens]
        if first:
            output.cached_tokens, output.queue_ms, output.prefill_ms = self.cached_tokens, 1.0, 2.0
            output.cached_by_tier = self.cached_by_tier
            if params.prompt_logprobs is not None and answer.index == 0 and not answer.request.num_output:
                top = params.prompt_logprobs
                output.prompt_logprobs = [None, *(self._logprobs(t, top) for t in answer.request.token_ids[1:])]
        return output

    def _logprobs(self, token: int, top: int) -> TokenLogprobs:
        return TokenLogprobs(-0.5, [((token + place) % self.info.vocab_size, -0.5 - place) for place in range(top)])
