"""What a handle of the service can call from Python: generation whole or in pieces, and changes of the weights.

Owns the plain form of answers: dicts, lists, strings, numbers, and the errors of errors.py. The frontend does the work.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from tournant.cluster.weights_actor import WeightsClient
from tournant.deploy.errors import RequestError
from tournant.deploy.frontend import Frontend, Prompt
from tournant.deploy.openai_schema import MAX_MESSAGES, MAX_MODEL_CHARS, ApiError, Message
from tournant.workers.sampling_params import SamplingParams


class HandleMethods:
    """Of the deployment that holds the frontend and serves HTTP."""

    _rollout: WeightsClient

    @property
    def frontend(self) -> Frontend:
        """The frontend. Raises EngineDeadError before it is ready."""
        raise NotImplementedError

    async def update_weights(self, model: str | None, tag: str | None = None) -> int:
        """Begin to give all replicas, one after another, other weights; returns the epoch that the update has.

        model: as in the configuration; tag: names the update, so that this can be called again. Requests go on. Raises
        UpdateNameTaken when the tag is that of an update to another model, UpdateRunning while another update is not
        over, UpdateUnavailable when none can be begun now.
        """
        if model is not None and (not isinstance(model, str) or not 1 <= len(model) <= MAX_MODEL_CHARS):
            raise RequestError(
                f"model is {model!r:.100}; it must be text of 1 to {MAX_MODEL_CHARS} characters", "model"
            )
        return await self._rollout.update(model, tag or uuid.uuid4().hex)

    async def weights_status(self) -> dict[str, Any]:
        """`Status.to_plain` of the roll-out. Raises UpdateUnavailable."""
        return (await self._rollout.status()).to_plain()

    async def generate(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        routing_keys: Sequence[bytes] | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Whole answers to one prompt (text, token ids or chat messages) as a plain `Completion`, with weights_id,
        epoch and system_fingerprint of what they were made by.

        sampling: fields of SamplingParams; routing_keys: keys of the prompt's full blocks, if the caller has them, for
        the router on the way here. Raises RequestError for what can never be served, Overloaded,
        EngineDeadError, GenerationFailed. Cancelling the call stops the engine's work.
        """
        completion = await self.frontend.generate(
            _checked(prompt), _sampling(sampling), cache_salt=cache_salt, priority=priority, timeout_s=timeout_s
        )
        plain = asdict(completion) | completion.served_by.to_plain()
        del plain["served_by"]
        if (tiers := completion.usage.cached_by_tier) is not None:
            plain["usage"]["cached_by_tier"] = tiers._asdict()
        return plain

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """`generate` for chat messages alone, with its options; they are as over HTTP, text parts included.

        Answers in pieces: `stream`, which takes messages too.
        """
        if not _is_list(messages) or not all(isinstance(message, Mapping) for message in messages):
            raise RequestError("messages must be a list of chat messages, each with role and content", "messages")
        return await self.generate(messages, **options)

    async def stream(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        routing_keys: Sequence[bytes] | None = None,
        **sampling: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """As `generate`, piece by piece: plain dicts with index, text, token_ids, logprobs, finish_reason, stop_reason,
        weights_id, epoch and system_fingerprint.

        Call it through `handle.options(stream=True)`. Leaving the iteration stops the engine's work.
        """
        stream = await self.frontend.stream(
            _checked(prompt), _sampling(sampling), cache_salt=cache_salt, priority=priority, timeout_s=timeout_s
        )
        try:
            async for delta in stream:
                if delta.error is not None:
                    raise delta.error
                yield {
                    "index": delta.index,
                    "text": delta.text,
                    "token_ids": delta.token_ids,
                    "logprobs": delta.logprobs and [(token_id, asdict(entry)) for token_id, entry in delta.logprobs],
                    "finish_reason": delta.finish_reason,
                    "stop_reason": delta.stop_reason,
                    **stream.served_by.to_plain(),
                }
        finally:
            stream.cancel()


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _checked(prompt: Any) -> Prompt:
    """A prompt that is what it says: text, token ids, or messages as the chat template wants them.

    Raises RequestError for anything else, mixtures among it.
    """
    if isinstance(prompt, str):
        return prompt
    if _is_list(prompt) and all(type(token_id) is int for token_id in prompt):
        return list(prompt)
    if not _is_list(prompt) or not all(isinstance(message, Mapping) for message in prompt):
        raise RequestError("the prompt must be text, a list of token ids, or a list of chat messages", "prompt")
    if len(prompt) > MAX_MESSAGES:
        raise RequestError(f"there are {len(prompt)} messages; at most {MAX_MESSAGES} are allowed", "messages")
    try:
        return [Message.model_validate(message).to_template(place) for place, message in enumerate(prompt)]
    except ApiError as error:
        raise RequestError(error.message, error.param) from error
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        raise RequestError(f"messages: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}", "messages") from error


def _sampling(fields: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams.from_wire(fields)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error).replace("SamplingParams.__init__() got an", "sampling:")) from error
