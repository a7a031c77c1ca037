"""The answers of one request while they are generated, and the stream a caller reads.

Owns the way from engine outputs to `Delta`s, and what becomes of an answer whose engine is lost. It does not decide
what is admitted and does not know HTTP (frontend.py, http_server.py).

Invariants:
 1. Every answer ends with exactly one Delta that has a finish_reason, unless the caller cancelled.
 2. What waits for a slow reader is bounded by the answers' max_tokens; an answer's deltas are joined while they wait.
 3. Once a stream is over, the engine holds none of its requests and the frontend's count is given back.
 4. An answer is resumed from its token log, in an engine on the same weights, as a request of its own; what another
    engine says of it is not heard any more. So nothing is given out twice, and nothing is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tournant.cluster.metrics import RequestRecord
from tournant.deploy.answers import Answer, Delta, LoggedToken
from tournant.deploy.errors import GenerationFailed
from tournant.deploy.resume import MAX_TURNS, rest_of, wait_s
from tournant.deploy.served_weights import ServedWeights
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.engine_client import EngineClient, OutputSink
from tournant.workers.errors import EngineDeadError
from tournant.workers.messages import LOST_DEAD, LOST_WEIGHTS, EngineRequest, RequestOutput, TokenLogprobs
from tournant.workers.sampling_params import SamplingParams


class CachedTokens(NamedTuple):
    """Prompt tokens taken from the KV cache, by where they lay: on the device, in RAM, on NVMe."""

    device: int
    host: int
    nvme: int


@dataclass(slots=True)
class PromptState:
    """One prompt of a request, as it was given to its first engine, and what that said about it (`noted`); times in
    seconds.
    """

    request: EngineRequest
    max_tokens: int
    noted: bool = False
    cached_tokens: int = 0
    cached_by_tier: tuple[int, int, int] = (0, 0, 0)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    queue_s: float | None = None
    prefill_s: float | None = None

    @property
    def token_ids(self) -> list[int]:
        """Its tokens."""
        return self.request.token_ids


@dataclass(slots=True)
class CompletedAnswer:
    """One whole answer; fields as in `Delta`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[LoggedToken] | None


@dataclass(slots=True)
class Usage:
    """Token counts of a request. cached_tokens: prompt tokens taken from the KV cache, for answer 0 of each prompt;
    cached_by_tier: the same, by where they lay, None without a node store.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_by_tier: CachedTokens | None = None


@dataclass(slots=True)
class Completion:
    """All answers of a request. max_tokens: the limit that applied to each prompt's answers after clamping."""

    answers: list[CompletedAnswer]
    usage: Usage
    max_tokens: list[int]
    served_by: ServedWeights


class GenerationStream:
    """Deltas of all answers of one request, for one reader on the event loop that made it.

    Read it by `async for`, by `next_deltas`, or whole by `collect`. A reader that goes away must end it: by leaving a
    `with` block, by `aclose` or `cancel`, or by the cancellation of its task; each stops the engine's work at once.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        params: SamplingParams,
        requests: list[tuple[EngineRequest, int]],
        on_end: Callable[[GenerationStream], None],
        join_deltas: bool,
        tiers: bool,
        submit_again: Callable[[GenerationStream], None],
        served_by: ServedWeights,
        max_resumes: int = 0,
    ) -> None:
        self.params = params
        self.arrival = time.monotonic()
        self.first_token_time: float | None = None
        self.tokenizer = tokenizer
        self.delivered = False  # whether its reader has been given anything
        self.served_by = served_by  # may become other weights until something is delivered
        self._submit_again = submit_again
        self._max_resumes = max_resumes
        self._engine = engine
        self.prompts: list[PromptState]
        self.answers: list[Answer]
        self._take_up(requests)
        self._on_end = on_end
        self._join_deltas = join_deltas and params.logprobs is None
        self._tiers = tiers
        self._collecting = False
        self._num_generated = 0
        self._unfinished = len(self.answers)
        self._over = False
        self._pending: deque[Delta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        """True once no more work is done for this stream; deltas may still wait to be read."""
        return self._over

    @property
    def drained(self) -> bool:
        """True once the stream is over and every Delta has been read."""
        return self._over and not self._pending

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        prompts = self.prompts
        return Usage(
            sum(len(prompt.token_ids) for prompt in prompts),
            self._num_generated,
            sum(prompt.cached_tokens for prompt in prompts),
            self._cached_by_tier() if self._tiers else None,
        )

    def _cached_by_tier(self) -> CachedTokens:
        return CachedTokens(*map(sum, zip(*(prompt.cached_by_tier for prompt in self.prompts), strict=True)))

    @property
    def max_tokens(self) -> list[int]:
        """The limit that applies to the answers of each prompt, after clamping to the room it leaves."""
        return [prompt.max_tokens for prompt in self.prompts]

    def sink(self, prompt_number: int) -> OutputSink:
        """What the engine calls with the outputs of one prompt."""
        return partial(self._take, prompt_number)

    def start_timer(self, timeout_s: float) -> None:
        """End the stream with a "timeout" failure unless it is over in time."""
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, timeout_s)

    def withdraw(self) -> None:
        """Take it back from the engine and forget what was generated: nothing was `delivered`. Its time runs on."""
        self._abort_all()
        self._pending.clear()
        self._take_up([(prompt.request, prompt.max_tokens) for prompt in self.prompts])
        self.first_token_time, self._num_generated, self._unfinished = None, 0, len(self.answers)

    def submit_again(self) -> None:
        """Give what was withdrawn to the frontend's engine of now; errors as `Frontend.submit_many`."""
        self._submit_again(self)

    def begin_again(self, requests: list[tuple[EngineRequest, int]], served_by: ServedWeights) -> None:
        """What it is submitted as now, and to which weights."""
        self.served_by = served_by
        self._take_up(requests)

    def _take_up(self, requests: list[tuple[EngineRequest, int]]) -> None:
        """Begin with nothing said."""
        self.prompts = [PromptState(request, limit) for request, limit in requests]
        self.answers = [
            Answer(number * self.params.n + index, request.request_id, self.tokenizer, self.params)
            for number, (request, _) in enumerate(requests)
            for index in range(self.params.n)
        ]
        self._info = self._engine.info

    def fail(self, error: GenerationFailed) -> None:
        """Stop the work in the engine and end all answers that are not over with an error."""
        self._abort_all()
        for answer in self.answers:
            if answer.finish_reason is None:
                self._add(answer, answer.fail(error))

    def cancel(self) -> None:
        """Stop the work in the engine at once; what waits to be read is dropped. Idempotent."""
        if not self._over:
            self._abort_all()
            self._pending.clear()
            self._end()

    async def aclose(self) -> None:
        """As `cancel`."""
        self.cancel()

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> Delta:
        """The next Delta. Cancelling the task that waits here cancels the stream."""
        await self._wait()
        if not self._pending:
            raise StopAsyncIteration
        return self._pop()

    async def next_deltas(self) -> list[Delta]:
        """All deltas that wait, at least one; an empty list once the stream is over. Cancellation as in `__anext__`."""
        await self._wait()
        return [self._pop() for _ in range(len(self._pending))]

    async def collect(self) -> Completion:
        """Wait for all answers.

        Raises GenerationFailed when one fails (the others are stopped) or when the stream is cancelled meanwhile.
        """
        self._collecting = self._join_deltas = True
        wholes = {answer.index: Delta(answer.index) for answer in self.answers}
        while deltas := await self.next_deltas():
            for delta in deltas:
                if delta.error is not None:
                    self.cancel()
                    raise delta.error
                wholes[delta.index].merge(delta)
        if self._unfinished:
            raise GenerationFailed("the request was cancelled", "cancelled")
        return Completion(
            [
                CompletedAnswer(
                    whole.index,
                    whole.text,
                    whole.token_ids,
                    whole.finish_reason or "",
                    whole.stop_reason,
                    whole.logprobs,
                )
                for whole in wholes.values()
            ],
            self.usage,
            self.max_tokens,
            self.served_by,
        )

    def record(self) -> RequestRecord:
        """What metrics keep of this request; answers cut short by the caller count as "abort"."""
        now = time.monotonic()
        first = self.first_token_time
        decode_s = None if first is None else now - first
        per_answer = self._num_generated / len(self.answers)
        return RequestRecord(
            finish_reasons=tuple(answer.finish_reason or "abort" for answer in self.answers),
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            generation_tokens=self._num_generated,
            e2e_s=now - self.arrival,
            ttft_s=None if first is None else first - self.arrival,
            tpot_s=decode_s / (per_answer - 1) if decode_s is not None and per_answer > 1 else None,
            queue_s=self.prompts[0].queue_s,
            prefill_s=self.prompts[0].prefill_s,
            decode_s=decode_s,
        )

    def _take(self, prompt_number: int, output: RequestOutput) -> None:
        answer = self.answers[prompt_number * self.params.n + output.index]
        if self._over or answer.finish_reason is not None or output.request_id != answer.request_id:
            return
        prompt = self.prompts[prompt_number]
        if output.lost is not None and self._goes_on(answer, output.lost):
            return
        if output.index == 0 and output.finish_reason != "error" and not prompt.noted:
            prompt.noted = True
            self._note_first_output(prompt, output)
        if output.finish_reason in ("error", "abort"):
            delta = answer.fail(self._failure(output))
        else:
            logged = len(answer.token_ids)
            delta = answer.take(output)
            self._num_generated += len(answer.token_ids) - logged
            if self.first_token_time is None and self._num_generated:
                self.first_token_time = time.monotonic()
            if isinstance(delta.stop_reason, str) and output.finish_reason is None:  # the engine cannot know
                self._engine.abort_answer(answer.request_id, output.index)
        self._add(answer, delta)

    def _note_first_output(self, prompt: PromptState, output: RequestOutput) -> None:
        if output.cached_tokens is not None:
            prompt.cached_tokens = output.cached_tokens
        if output.cached_by_tier is not None:
            prompt.cached_by_tier = output.cached_by_tier
        if output.prompt_logprobs is not None:
            prompt.prompt_logprobs = output.prompt_logprobs
        if output.queue_ms is not None:
            prompt.queue_s = output.queue_ms / 1000
        if output.prefill_ms is not None:
            prompt.prefill_s = output.prefill_ms / 1000

    def _goes_on(self, answer: Answer, lost: str) -> bool:
        """Whether an answer whose engine is lost is begun again, or goes on, in another one."""
        if not self._max_resumes:
            return False
        if lost == LOST_WEIGHTS:
            return self._begin_anew()
        answer.num_deaths += lost == LOST_DEAD
        answer.num_turns += 1
        if answer.num_deaths > self._max_resumes or answer.num_turns > MAX_TURNS:
            return False
        answer.request_id = self._engine.new_request_id()  # from now on the one before is not heard
        loop = asyncio.get_running_loop()
        loop.call_later(wait_s(answer.num_turns), self._submit_rest, answer, answer.request_id)
        return True

    def _begin_anew(self) -> bool:
        """On the weights of now, if nobody has seen anything of the old ones' answers."""
        if self.delivered:
            return False
        self.withdraw()
        try:
            self.submit_again()
        except (ValueError, RuntimeError) as error:
            self.fail(GenerationFailed(f"after the weights were changed: {error}", "weights_changed"))
        return True

    def _submit_rest(self, answer: Answer, request_id: int) -> None:
        if self._over or answer.finish_reason is not None or answer is not self.answers[answer.index]:
            return
        number, index = divmod(answer.index, self.params.n)
        prompt = self.prompts[number]
        given = prompt.prompt_logprobs is not None
        request = rest_of(prompt.request, request_id, answer.token_ids, index, self._info, prompt_is_told=given)
        try:
            self._engine.submit(request, self.sink(number))
        except EngineDeadError as error:
            self._add(answer, answer.fail(GenerationFailed(f"{error}; send the request again", "engine_dead")))

    def _failure(self, output: RequestOutput) -> GenerationFailed:
        if output.lost == LOST_WEIGHTS:
            return GenerationFailed(f"{output.error}; send the request again", "weights_changed")
        if output.lost is not None and self._max_resumes:
            return GenerationFailed(
                f"the answer was lost {self._max_resumes + 1} times, the last time because {output.error}; send the "
                "request again",
                "engine_dead",
            )
        if not self._engine.alive or self._engine.restarting:
            return GenerationFailed(
                f"the engine ended: {output.error or 'no reason given'}; send the request again", "engine_dead"
            )
        return GenerationFailed(
            f"the engine gave up this request: {output.error or output.finish_reason}", "engine_error"
        )

    def _add(self, answer: Answer, delta: Delta) -> None:
        delta.num_generated = self._num_generated
        if delta.parts or delta.logprobs or delta.finish_reason is not None:  # else its tokens go with the next Delta
            delta.token_ids = answer.token_ids[answer.num_told :]
            answer.num_told = len(answer.token_ids)
            if self._join_deltas and answer.pending is not None and delta.error is None:
                answer.pending.merge(delta)
            else:
                self._pending.append(delta)
                answer.pending = delta
        if delta.error is not None:
            self._collecting = False  # whoever collects need not wait for the other answers
        if delta.finish_reason is not None:
            self._unfinished -= 1
            if not self._unfinished:
                self._end()
                return
        if self._pending and not self._collecting:
            self._wake()

    def _pop(self) -> Delta:
        delta = self._pending.popleft()
        self.delivered = True
        answer = self.answers[delta.index]
        if answer.pending is delta:
            answer.pending = None
        return delta

    async def _wait(self) -> None:
        while not self._over and (self._collecting or not self._pending):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self, timeout_s: float) -> None:
        self.fail(GenerationFailed(f"the request took longer than its limit of {timeout_s:g} s", "timeout"))

    def _abort_all(self) -> None:
        self._engine.abort(list(dict.fromkeys(answer.request_id for answer in self.answers)))

    def _end(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._on_end(self)
        self._wake()
