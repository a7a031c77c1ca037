"""Answers as OpenAI-compatible JSON: whole bodies, stream events, log-probabilities, usage.

Owns the form of responses; it reads `Delta`s and `Completion`s and knows no sockets. Stream events are assembled from
text made once per request, with only the new text encoded per event, because this runs for every token of every stream.

Invariants:
 1. All output is ASCII (other characters are escaped), so no client can take U+2028 or the like for the end of a line.
 2. No NaN and no infinity: log-probabilities are floored at LOGPROB_FLOOR.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from tournant.deploy.answers import Delta, LoggedToken
from tournant.deploy.detokenizer import Detokenizer
from tournant.deploy.generation import CompletedAnswer, Completion, GenerationStream, Usage
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.messages import TokenLogprobs
from tournant.workers.sampling_params import SamplingParams

LOGPROB_FLOOR = -9999.0
DONE = "data: [DONE]\n\n"
_compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return LOGPROB_FLOOR if math.isnan(logprob) else min(max(logprob, LOGPROB_FLOOR), -LOGPROB_FLOOR)


def usage_json(usage: Usage) -> str:
    """OpenAI's usage object; with a node store, it also tells where cached tokens lay."""
    tiers = ""
    if usage.cached_by_tier is not None:
        tiers = ',"cached_tokens_by_tier":{{"device":{},"host":{},"nvme":{}}}'.format(*usage.cached_by_tier)
    return (
        f'{{"prompt_tokens":{usage.prompt_tokens},"completion_tokens":{usage.completion_tokens},'
        f'"total_tokens":{usage.prompt_tokens + usage.completion_tokens},'
        f'"prompt_tokens_details":{{"cached_tokens":{usage.cached_tokens}{tiers}}}}}'
    )


def error_event(body: bytes) -> str:
    """An error object as an event of a stream that has begun."""
    return f"data: {body.decode()}\n\n"


def token_string(data: bytes) -> str:
    """A token's bytes as text; `bytes:\\xNN...` when they are not whole characters, so that different tokens differ."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[LoggedToken]) -> dict[str, Any]:
    """The logprobs object of chat answers."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": token_string(data), "logprob": finite(logprob), "bytes": list(data)}

    return {
        "content": [
            entry(token_id, value.logprob) | {"top_logprobs": [entry(other, logprob) for other, logprob in value.top]}
            for token_id, value in entries
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """The logprobs object of one answer of /v1/completions, made piece by piece; keeps the place in the text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, start: int = 0) -> None:
        self._tokenizer = tokenizer
        self._start = start  # characters of text before the first token
        self._detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip_special_tokens))

    def make(self, entries: Sequence[tuple[int, TokenLogprobs | None]]) -> dict[str, list[Any]]:
        """tokens, token_logprobs, top_logprobs (the most probable tokens and the token itself), text_offset."""
        spell = self._tokenizer.token_bytes
        made: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, value in entries:
            token = token_string(spell(token_id))
            made["text_offset"].append(self._start + self._detokenizer.num_decoded)
            made["tokens"].append(token)
            made["token_logprobs"].append(None if value is None else finite(value.logprob))
            made["top_logprobs"].append(
                None
                if value is None
                else {
                    **{token_string(spell(other)): finite(logprob) for other, logprob in value.top},
                    token: finite(value.logprob),
                }
            )
            self._detokenizer.feed((token_id,))
        return made


class ResponseWriter:
    """Writes the answers of one request. Subclasses know the two APIs; `chunk` and `whole` are what servers call.

    usage: stream chunks carry `usage` (null, but for the last); continuous_usage: each carries the counts so far.
    """

    object_name = ""
    chunk_name = ""

    def __init__(
        self,
        response_id: str,
        model: str,
        created: int,
        tokenizer: Tokenizer,
        stream: GenerationStream,
        usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = stream
        self._usage = usage
        self._continuous_usage = continuous_usage
        self._fields = {"id": response_id, "object": self.object_name, "created": created, "model": model}
        self._head = ""  # of every event
        self._tail = '],"usage":null}\n\n' if usage else "]}\n\n"

    def chunk(self, delta: Delta) -> str:
        """One event for one Delta that is not an error."""
        if not self._head:
            self._head = self._make_head()
        tail = self._tail
        if self._continuous_usage:
            usage = self._stream.usage
            usage.completion_tokens = delta.num_generated
            tail = f'],"usage":{usage_json(usage)}}}\n\n'
        finish = "null"
        if delta.finish_reason is not None:
            finish = f'{quoted(delta.finish_reason)},"stop_reason":{json.dumps(delta.stop_reason)}'
        return f'{self._head}{{"index":{delta.index},{self._chunk_content(delta)},"finish_reason":{finish}}}{tail}'

    def _make_head(self) -> str:
        """To be made when the first Delta is there: from then on no other weights can answer."""
        fields = self._fields | {"object": self.chunk_name} | self._stream.served_by.to_plain()
        return f'data: {_compact(fields)[:-1]},"choices":['

    def end(self) -> str:
        """The last events of a stream: usage where it was asked for, then the end mark."""
        if not self._usage:
            return DONE
        return f'{self._head}],"usage":{usage_json(self._stream.usage)}}}\n\n{DONE}'

    def whole(self, completion: Completion) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [
            {
                "index": answer.index,
                **self._whole_content(answer),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            for answer in completion.answers
        ]
        fields = self._fields | completion.served_by.to_plain()
        text = _compact(fields | {"choices": choices})
        return f'{text[:-1]},"usage":{usage_json(completion.usage)}}}'.encode()

    def _chunk_content(self, delta: Delta) -> str:
        raise NotImplementedError

    def _whole_content(self, answer: CompletedAnswer) -> dict[str, Any]:
        raise NotImplementedError


class ChatWriter(ResponseWriter):
    """Answers of /v1/chat/completions; the first event of each answer names the role."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self,
        response_id: str,
        model: str,
        created: int,
        tokenizer: Tokenizer,
        stream: GenerationStream,
        usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        super().__init__(response_id, model, created, tokenizer, stream, usage, continuous_usage)
        self._begun: set[int] = set()

    def _chunk_content(self, delta: Delta) -> str:
        text = delta.text
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            content = f'"delta":{{"role":"assistant","content":{quoted(text)}}}'
        else:
            content = f'"delta":{{"content":{quoted(text)}}}' if text else '"delta":{}'
        if delta.logprobs is None:
            return content
        return f'{content},"logprobs":{json.dumps(chat_logprobs(self._tokenizer, delta.logprobs), allow_nan=False)}'

    def _whole_content(self, answer: CompletedAnswer) -> dict[str, Any]:
        entries = answer.logprobs
        if entries is None and self._stream.params.logprobs is not None:
            entries = []
        return {
            "message": {"role": "assistant", "content": answer.text},
            "logprobs": None if entries is None else chat_logprobs(self._tokenizer, entries),
        }


class CompletionWriter(ResponseWriter):
    """Answers of /v1/completions.

    echo: the text of each prompt, where it is to be put before its answers, else None; a prompt that came as token ids
    is echoed as they decode, special tokens included.
    """

    object_name = chunk_name = "text_completion"

    def __init__(
        self,
        response_id: str,
        model: str,
        created: int,
        tokenizer: Tokenizer,
        stream: GenerationStream,
        usage: bool = False,
        continuous_usage: bool = False,
        echo: Sequence[str] | None = None,
    ) -> None:
        super().__init__(response_id, model, created, tokenizer, stream, usage, continuous_usage)
        self._echo = echo
        skip = stream.params.skip_special_tokens
        self._logprobs = [
            CompletionLogprobs(tokenizer, skip, 0 if echo is None else len(echo[answer.index // stream.params.n]))
            for answer in stream.answers
        ]
        self._begun: set[int] = set()

    def _chunk_content(self, delta: Delta) -> str:
        text, logprobs = self._content(delta.index, delta.text, delta.logprobs)
        if logprobs is None:
            return f'"text":{quoted(text)},"logprobs":null'
        return f'"text":{quoted(text)},"logprobs":{json.dumps(logprobs, allow_nan=False)}'

    def _whole_content(self, answer: CompletedAnswer) -> dict[str, Any]:
        text, logprobs = self._content(answer.index, answer.text, answer.logprobs)
        return {"text": text, "logprobs": logprobs}

    def _content(
        self, index: int, text: str, entries: list[LoggedToken] | None
    ) -> tuple[str, dict[str, list[Any]] | None]:
        logprobs = None
        if self._stream.params.logprobs is not None:
            logprobs = self._logprobs[index].make(entries or [])
        if self._echo is not None and index not in self._begun:
            self._begun.add(index)
            number = index // self._stream.params.n
            text = self._echo[number] + text
            if logprobs is not None:
                echoed = self._prompt_logprobs(number)
                logprobs = {name: echoed[name] + values for name, values in logprobs.items()}
        return text, logprobs

    def _prompt_logprobs(self, number: int) -> dict[str, list[Any]]:
        prompt = self._stream.prompts[number]
        values = prompt.prompt_logprobs or [None] * len(prompt.token_ids)
        maker = CompletionLogprobs(self._tokenizer, skip_special_tokens=False)
        made = maker.make(list(zip(prompt.token_ids, values, strict=True)))
        if self._echo is not None:  # a begin-of-text token that is not part of the text moves all offsets
            surplus = len(self._tokenizer.decode(prompt.token_ids, False)) - len(self._echo[number])
            made["text_offset"] = [max(offset - surplus, 0) for offset in made["text_offset"]]
        return made
