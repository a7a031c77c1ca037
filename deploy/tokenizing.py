"""What /tokenize and /detokenize answer, made beside everything else.

Owns their limits and their threads, so that prompts of answers never wait behind them. It knows no HTTP and no quota.

Invariants:
 1. At most MAX_AT_ONCE answers of large bodies are made at a time, none of them on the event loop.
 2. No answer holds more than the ids of MAX_TOKENIZE_CHARS characters, or the text of MAX_DETOKENIZE_IDS ids.
"""

from __future__ import annotations

import asyncio
import json
import reprlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tournant.deploy.errors import RequestError
from tournant.deploy.openai_convert import token_string
from tournant.deploy.openai_schema import ChatBody, DetokenizeBody, Message, TokenizeBody, invalid
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.errors import Overloaded

MAX_TOKENIZE_CHARS = 1 << 19
MAX_DETOKENIZE_IDS = 1 << 19
MAX_TOKENIZE_BYTES = 4 << 20  # of the body: eight for each character or id
INLINE_BYTES = 4096  # a body this long is answered within some milliseconds
MAX_AT_ONCE = 2
MAX_OPEN = 64  # made or waiting
CHUNK = 1 << 14  # items turned into JSON in one go, during which no other thread runs


class TokenizePool:
    """The threads of both routes."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=MAX_AT_ONCE, thread_name_prefix="tokenize")
        self._num_open = 0

    async def run(self, body_bytes: int, make: Callable[[], bytes]) -> bytes:
        """What `make` returns, which runs in a thread if the body is not small. Raises Overloaded, and as `make`."""
        if body_bytes <= INLINE_BYTES:
            return make()
        if self._num_open >= MAX_OPEN:
            raise Overloaded(f"{self._num_open} requests to tokenize are open, of at most {MAX_OPEN}")
        self._num_open += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, make)
        finally:
            self._num_open -= 1


def tokenize(tokenizer: Tokenizer, body: TokenizeBody, max_model_len: int) -> bytes:
    """The response of /tokenize. Raises ApiError and RequestError."""
    if body.prompt is not None:
        _check_chars(len(body.prompt), "prompt")
        try:
            token_ids = tokenizer.encode(body.prompt, body.add_special_tokens is not False)
        except ValueError as error:
            raise RequestError(str(error), "prompt") from error
    else:
        messages, options = chat_arguments(body)
        _check_chars(sum(len(value) for message in messages for value in message.values()), "messages")
        try:
            token_ids = tokenizer.apply_chat(messages, **options)
        except ValueError as error:
            raise RequestError(str(error), "messages") from error
    head = f'{{"count": {len(token_ids)}, "max_model_len": {max_model_len}, "tokens": '
    pieces = [head, *_json_list(token_ids)]
    if body.return_token_strs:
        pieces.append(', "token_strs": ')
        pieces += _json_list(token_ids, lambda token_id: token_string(tokenizer.token_bytes(token_id)))
    return "".join([*pieces, "}"]).encode()


def detokenize(tokenizer: Tokenizer, body: DetokenizeBody) -> bytes:
    """The response of /detokenize. Raises ApiError."""
    token_ids = body.tokens
    if len(token_ids) > MAX_DETOKENIZE_IDS:
        raise invalid(
            f"tokens has {len(token_ids)} ids; at most {MAX_DETOKENIZE_IDS} are allowed, send them in parts", "tokens"
        )
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < tokenizer.vocab_size:
            raise invalid(
                f"tokens has {reprlib.repr(token_id)}; token ids are 0 to {tokenizer.vocab_size - 1}", "tokens"
            )
    return json.dumps({"prompt": tokenizer.decode(token_ids, bool(body.skip_special_tokens))}).encode()


def chat_arguments(body: ChatBody | TokenizeBody) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Messages and keyword arguments for `Tokenizer.apply_chat`. Raises ApiError for what is not supported."""
    messages: Sequence[Message] = body.messages or ()
    continues = bool(body.continue_final_message)
    return [message.to_template(place) for place, message in enumerate(messages)], {
        "add_generation_prompt": not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        "continue_final_message": continues,
        "template_kwargs": body.chat_template_kwargs,
    }


def _check_chars(num_chars: int, param: str) -> None:
    if num_chars > MAX_TOKENIZE_CHARS:
        raise invalid(
            f"{param} has {num_chars} characters; at most {MAX_TOKENIZE_CHARS} are tokenized at once, send it in parts",
            param,
        )


def _json_list(token_ids: Sequence[int], show: Callable[[int], object] | None = None) -> list[str]:
    """Pieces of the list's JSON."""
    pieces = ["["]
    for start in range(0, len(token_ids), CHUNK):
        chunk: Sequence[object] = token_ids[start : start + CHUNK]
        if show is not None:
            chunk = [show(token_id) for token_id in token_ids[start : start + CHUNK]]
        pieces += [", " if start else "", json.dumps(chunk)[1:-1]]
    return [*pieces, "]"]
