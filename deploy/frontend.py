"""The way from a prompt to a stream of answers: admission, limits, keys, submission, health.

Owns the count of outstanding answers and what is refused before an engine hears of it. Speaks to the engine through
`EngineClient` alone; the answers themselves are generation.py's, HTTP is http_server.py's. One event loop, no threads.

Invariants:
 1. At most max_num_seqs + max_queued_requests answers are outstanding, and prompts of max_queued_tokens tokens wait to
    be computed, or one request of any length; beyond them `Overloaded` is raised at once.
 2. What reaches the engine fits it: token ids inside the vocabulary, prompt + max_tokens within its longest sequence.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from tournant.cluster.metrics import RequestRecord
from tournant.deploy.admission_gate import AdmissionGate
from tournant.deploy.errors import PromptTooLong, RequestError
from tournant.deploy.generation import Completion, GenerationStream
from tournant.deploy.served_weights import ServedWeights
from tournant.deploy.tokenizer import Tokenizer
from tournant.kvstore.block import Namespace, key_chain
from tournant.workers.engine_client import EngineClient
from tournant.workers.errors import EngineDeadError, Overloaded
from tournant.workers.messages import EngineInfo, EngineRequest
from tournant.workers.sampling_params import SamplingParams

MAX_PRIORITY = 1 << 30
MEAN_PROMPT_TOKENS = 1024  # of all requests that may be outstanding, where `max_queued_tokens` is left open
RESET_TIMEOUT_S = 10.0

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids, or chat messages


@dataclass(frozen=True, slots=True)
class FrontendOptions:
    """What an operator chooses about a frontend.

    request_timeout_s: longest life of a request; enable_prefix_caching: compute keys for prompts; tiers:
    the engine has a node store, so usage tells where cached tokens lay; max_resumes: how many engines may die
    under an answer before it fails, 0 where there is no other engine to go on with it; max_queued_requests: answers
    that may wait beyond those that run, None or more than that = as many as the engine takes; max_queued_tokens: of
    prompts whose answers have not begun, None = as MEAN_PROMPT_TOKENS says.
    """

    request_timeout_s: float = 600.0
    enable_prefix_caching: bool = True
    tiers: bool = False
    max_resumes: int = 0
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None


class Frontend:
    """Serves one engine. All methods are called on one event loop.

    on_request_end: is told about every request that was admitted, once, when it is over.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        engine: EngineClient,
        options: FrontendOptions | None = None,
        on_request_end: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.engine = engine
        self.options = options or FrontendOptions()
        self.gate = AdmissionGate()
        self.epoch = 0  # of the weights, by the roll-out's count; only whoever follows that sets it
        self._on_request_end = on_request_end
        self._outstanding = 0
        self._stopping = False

    @property
    def num_outstanding(self) -> int:
        """Answers admitted and not over."""
        return self._outstanding

    @property
    def served_weights(self) -> ServedWeights:
        """What an answer that begins now is made by."""
        return ServedWeights(self.engine.info.namespace.weights_id.hex(), self.epoch)

    @property
    def healthy(self) -> bool:
        """Whether there is an engine that makes progress, or will be one: one that hangs is killed, see
        engine_watchdog.py. Costs nothing and waits for nothing, however busy the engine is.
        """
        return self.engine.alive

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called: an engine that cannot generate is no fault from then on."""
        return self._stopping

    async def stop(self) -> None:
        """End the engine and wait for it; what runs fails. Idempotent."""
        self._stopping = True
        await self.engine.close()

    def check_capacity(self, num_answers: int) -> None:
        """Raise what `submit_many` would for this many answers, before work is spent on their prompts."""
        self._check_queue(self._check_room(num_answers, self._outstanding + self.gate.num_pending))

    def entry(self, num_answers: int) -> AbstractAsyncContextManager[None]:
        """Encode prompts and submit them inside this block, so that both are for one engine; it waits while the weights
        are changed. Raises as `check_capacity` and `AdmissionGate.entry`.
        """
        self.check_capacity(num_answers)
        return self.gate.entry(num_answers, self.options.request_timeout_s)

    async def change_weights(self, swap: Callable[[], Awaitable[Tokenizer]], drain_s: float | None) -> None:
        """Let running requests finish for `drain_s`, then change what `engine` runs by `swap`, which returns the new
        weights' tokenizer or raises; requests wait meanwhile. Errors, endings and None as `AdmissionGate.change`.
        """

        async def change() -> None:
            self.tokenizer = await swap()

        await self.gate.change(change, drain_s, self.engine.info.max_queued_requests)

    def _check_room(self, num_answers: int, taken: int) -> int:
        """Returns how many answers may be outstanding."""
        info = self.engine.info
        queued = self.options.max_queued_requests
        capacity = info.max_num_seqs + min(
            info.max_queued_requests, info.max_queued_requests if queued is None else queued
        )
        if num_answers > capacity:
            raise RequestError(
                f"the request asks for {num_answers} answers at once; this server holds at most "
                f"{capacity}; send fewer prompts or a smaller n",
                "n",
            )
        if taken + num_answers > capacity:
            raise Overloaded(f"{taken} answers are being generated or wait, of at most {capacity}; try again later")
        return capacity

    def _check_queue(self, capacity: int, num_tokens: int = 0) -> None:
        """num_tokens: of new prompts, as far as they are known."""
        limit, queued = self.options.max_queued_tokens, self.engine.prefill_tokens
        if limit is None:
            limit = capacity * min(self.engine.info.max_sequence_tokens, MEAN_PROMPT_TOKENS)
        if queued and queued + num_tokens > limit:
            new = f", and this request has {num_tokens} more" if num_tokens else ""
            raise Overloaded(
                f"prompts of {queued} tokens wait to be computed, of at most {limit}{new}; try again later"
            )

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        join_deltas: bool = True,
        session: str = "",
    ) -> GenerationStream:
        """`submit_many` of one prompt."""
        return self.submit_many(
            [prompt_token_ids],
            params,
            cache_salt=cache_salt,
            priority=priority,
            timeout_s=timeout_s,
            join_deltas=join_deltas,
            session=session,
        )

    def submit_many(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        join_deltas: bool = True,
        session: str = "",
    ) -> GenerationStream:
        """Hand prompts to the engine and return the stream of their len(prompts) x params.n answers.

        cache_salt: requests share cached blocks only with requests of the same salt; priority: lower runs earlier;
        timeout_s: None = the operator's limit, which also bounds it; join_deltas: join what waits for a slow reader;
        session: of engines that are as good, the one that had the last request of this name takes it.
        max_tokens None or beyond the room a prompt leaves is clamped to that room (`GenerationStream.max_tokens`).

        Raises RequestError (PromptTooLong among them) for what can never be served, Overloaded when it cannot be now,
        EngineDeadError without an engine. All prompts are accepted or none.
        """
        engine, info = self.engine, self.engine.info
        self._check_params(params, info)
        _check_call(cache_salt, priority, timeout_s)
        limits = [self._room(token_ids, params, info) for token_ids in prompts]
        self._check_queue(self._check_room(len(prompts) * params.n, self._outstanding), sum(map(len, prompts)))
        if params.seed is None and not params.greedy:
            params = replace(params, seed=secrets.randbits(63))  # known here, so that another engine can resume it
        requests = [
            (self._engine_request(token_ids, params, limit, cache_salt, priority, session), limit)
            for token_ids, limit in zip(prompts, limits, strict=True)
        ]
        again = partial(self._submit_again, cache_salt, priority, session)
        options = self.options
        stream = GenerationStream(
            engine,
            self.tokenizer,
            params,
            requests,
            self._release,
            join_deltas,
            options.tiers,
            again,
            self.served_weights,
            options.max_resumes,
        )
        self._outstanding += len(stream.answers)
        self.gate.enter(stream)
        try:
            for number, (request, _) in enumerate(requests):
                engine.submit(request, stream.sink(number))
            limit_s = self.options.request_timeout_s
            stream.start_timer(limit_s if timeout_s is None else min(timeout_s, limit_s))
        except BaseException:
            stream.cancel()
            raise
        return stream

    async def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: raw text, chat messages, or ids as they are. Raises RequestError."""
        try:
            if isinstance(prompt, str):
                return await self.tokenizer.encode_async(prompt)
            messages = [part for part in prompt if isinstance(part, Mapping)]
            if messages:
                return await self.tokenizer.apply_chat_async(messages)
        except ValueError as error:
            raise RequestError(str(error), "prompt") from error
        return [part for part in prompt if isinstance(part, int)]

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> GenerationStream:
        """Start a request from Python and return its stream; errors as `submit_many`."""
        async with self.entry(params.n):
            token_ids = await self.encode_prompt(prompt)
            return self.submit(token_ids, params, cache_salt=cache_salt, priority=priority, timeout_s=timeout_s)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Completion:
        """Whole answers of one prompt; errors as `submit_many` and GenerationFailed. Cancelling it stops the engine."""
        stream = await self.stream(prompt, params, cache_salt=cache_salt, priority=priority, timeout_s=timeout_s)
        return await stream.collect()

    async def reset_prefix_cache(self) -> bool:
        """Forget all reusable blocks. True only if the engine did so, within RESET_TIMEOUT_S."""
        if not self.engine.alive:
            return False
        try:
            return await asyncio.wait_for(self.engine.reset_prefix_cache(), RESET_TIMEOUT_S)
        except (TimeoutError, EngineDeadError):
            return False

    def _check_params(self, params: SamplingParams, info: EngineInfo) -> None:
        for name, ids in (
            ("logit_bias", [token for token, _ in params.logit_bias]),
            ("stop_token_ids", params.stop_token_ids),
        ):
            for token_id in ids:
                if not 0 <= token_id < info.vocab_size:
                    raise RequestError(
                        f"{name} names token {token_id}; this model's token ids are 0 to {info.vocab_size - 1}", name
                    )

    def _room(self, token_ids: list[int], params: SamplingParams, info: EngineInfo) -> int:
        """Tokens that an answer to this prompt may have; checks the prompt."""
        if not token_ids:
            raise RequestError("the prompt has no tokens; it must have at least one", "prompt")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < info.vocab_size:
                raise RequestError(
                    f"the prompt has token {token_id}; this model's token ids are 0 to {info.vocab_size - 1}", "prompt"
                )
        limit = info.max_sequence_tokens
        room = limit - len(token_ids)
        if room < 1:
            limited_by = "the model's context, max_model_len"
            if limit != info.max_model_len:
                limited_by = (
                    "what kv_cache_bytes, overflow_host_bytes and overflow_disk_bytes hold together; raise one of them"
                )
            raise PromptTooLong(len(token_ids), limit, limited_by)
        return room if params.max_tokens is None else min(room, params.max_tokens)

    def _engine_request(
        self,
        token_ids: list[int],
        params: SamplingParams,
        limit: int,
        cache_salt: str | None,
        priority: int,
        session: str,
    ) -> EngineRequest:
        """The request as the engine sees it: without stop strings, and with one token where none but log-probabilities
        of the prompt were asked for."""
        max_tokens = max(limit, 1)
        engine_params = params
        if params.stop or params.max_tokens != max_tokens:
            min_tokens = min(params.min_tokens, max_tokens)
            engine_params = replace(params, max_tokens=max_tokens, min_tokens=min_tokens, stop=())
        try:
            digest = _digest(self.engine.info.namespace_for(len(token_ids)), cache_salt)
        except ValueError as error:
            raise RequestError(str(error), "cache_salt") from error
        keys: list[bytes] = []
        if self.options.enable_prefix_caching:
            keys = key_chain(digest, token_ids, self.engine.info.block_tokens)
        return EngineRequest(
            self.engine.new_request_id(),
            token_ids,
            engine_params,
            keys,
            digest,
            cache_salt,
            priority,
            weights_id=self.engine.info.namespace.weights_id,
            session=session,
        )

    def _release(self, stream: GenerationStream) -> None:
        self._outstanding -= len(stream.answers)
        self.gate.leave(stream)
        if self._on_request_end is not None:
            self._on_request_end(stream.record())

    def _submit_again(self, cache_salt: str | None, priority: int, session: str, stream: GenerationStream) -> None:
        """Give a stream that was withdrawn to the engine of now. Raises as `submit_many`."""
        if not self.tokenizer.gives_ids_of(stream.tokenizer):
            raise RequestError("the new weights have another tokenizer; send the request again", "prompt")
        info, params = self.engine.info, stream.params
        self._check_params(params, info)
        requests = []
        for prompt in stream.prompts:
            limit = self._room(prompt.token_ids, params, info)
            request = self._engine_request(prompt.token_ids, params, limit, cache_salt, priority, session)
            requests.append((request, limit))
        stream.begin_again(requests, self.served_weights)
        for number, (again, _) in enumerate(requests):
            self.engine.submit(again, stream.sink(number))


@lru_cache(maxsize=1024)
def _digest(namespace: Namespace, cache_salt: str | None) -> bytes:
    """See `Namespace.digest`."""
    return namespace.digest(cache_salt)


def _check_call(cache_salt: str | None, priority: int, timeout_s: float | None) -> None:
    """Raises RequestError for what HTTP's schema refuses, but a caller from Python can pass."""
    if cache_salt is not None and (not isinstance(cache_salt, str) or not _is_unicode(cache_salt)):
        raise RequestError(f"cache_salt is {cache_salt!r}; it must be text without surrogates", "cache_salt")
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise RequestError(f"priority is {priority!r}; it must be a whole number up to {MAX_PRIORITY}", "priority")
    if timeout_s is not None and (not isinstance(timeout_s, (int, float)) or not timeout_s > 0):
        raise RequestError(f"timeout_s is {timeout_s!r}; it must be a number of seconds above 0", "timeout_s")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)
