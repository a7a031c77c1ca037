"""Bodies of OpenAI-compatible requests: what is accepted, ignored and refused, and the error object.

Owns the closed schema; openai_convert.py makes responses. A field we do not know is an error that names the nearest
known one, a field we know but do not support is refused by name, and a few that change nothing here are ignored.

Invariants:
 1. A parsed body holds no NaN, no infinity and no wrong type; numbers are not made from strings nor from booleans.
 2. Every error of parsing is an `ApiError` with status 400 and, where there is one, the field in `param`.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tournant.workers.sampling_params import MAX_LOGPROBS, MAX_STOP_CHARS, SamplingParams

MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_MODEL_CHARS = 4096
MAX_ERRORS = 128  # of one body that are looked at; each is an object
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI documents; a chat answer may fill the room
REFUSED_ROLES = ("tool", "function")
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error as a client sees it: HTTP status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(status, message, param, code, headers)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        """`{"error": {message, type, param, code}}`."""
        return json.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": ERROR_TYPES.get(self.status, "server_error"),
                    "param": self.param,
                    "code": self.code,
                }
            }
        ).encode()


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """An ApiError of status 400."""
    return ApiError(400, message, param, code)


class Strict(BaseModel):
    """Base of all bodies: no unknown fields, no conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Strict):
    """Options of a streamed answer. include_obfuscation is OpenAI's and changes nothing here."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Strict):
    """Fields that both generating endpoints share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = Field(None, ge=-1_000_000, le=1_000_000)
    response_format: Any = None
    # text there names a conversation, anything else nothing
    prompt_cache_key: Any = None
    user: Any = None
    # accepted and ignored: they change nothing here
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    verbosity: Any = None
    parallel_tool_calls: Any = None

    def check(self) -> None:
        """Refuse what is understood but not supported. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only allowed when stream is true", "stream_options")
        kind = self.response_format.get("type") if isinstance(self.response_format, dict) else self.response_format
        if kind is not None and kind != "text":
            raise invalid(f"response_format {str(kind)[:40]!r} is not supported; only 'text' is", "response_format")

    def sampling(self) -> SamplingParams:
        """Sampling parameters of this body. Raises ApiError that names the field."""
        values: dict[str, Any] = {}
        for name in (
            "n",
            "min_tokens",
            "temperature",
            "top_p",
            "min_p",
            "seed",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
        ):
            if (value := getattr(self, name)) is not None:
                values[name] = value
        values["top_k"] = 0 if self.top_k in (None, -1) else self.top_k  # some clients write "off" as -1
        values["logit_bias"] = _logit_bias(self.logit_bias)
        values["stop"] = _stop(self.stop)
        values["stop_token_ids"] = tuple(self.stop_token_ids or ())
        values.update(self._own_sampling())
        try:
            return SamplingParams(**values)
        except ValueError as error:
            raise invalid(str(error), _param_of(str(error), type(self))) from error

    def _own_sampling(self) -> dict[str, Any]:
        raise NotImplementedError


class TextPart(Strict):
    """One part of a message's content; `check` refuses other kinds than text by name."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    video_url: Any = None
    audio_url: Any = None
    refusal: Any = None


class Message(Strict):
    """One message of a chat. Fields that clients echo back from an answer are accepted while they are empty."""

    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    reasoning_content: Any = None

    def to_template(self, place: int) -> dict[str, str]:
        """{"role", "content"[, "name"]} for the chat template. Raises ApiError for what is not supported."""
        where = f"messages.{place}"
        if self.role in REFUSED_ROLES or self.tool_calls or self.function_call or self.tool_call_id:
            raise invalid(f"{where}: messages of tools are not supported", f"{where}.role")
        if self.role not in ("system", "developer", "user", "assistant"):
            raise invalid(
                f"{where}.role is {self.role[:40]!r}; it must be system, developer, user or assistant", f"{where}.role"
            )
        if self.audio:
            raise invalid(f"{where}.audio is not supported; only text is", f"{where}.audio")
        if self.content is None:
            raise invalid(
                f"{where}.content is missing; it must be a string or a list of text parts", f"{where}.content"
            )
        content = self.content if isinstance(self.content, str) else _join_parts(self.content, where)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else message | {"name": self.name}


class ChatBody(GenerationBody):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        """See `GenerationBody.check`."""
        super().check()
        for name in ("tools", "functions", "function_call", "audio", "prediction", "web_search_options"):
            if getattr(self, name):
                raise invalid(f"{name} is not supported by this server; leave it out", name)
        if self.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice must be 'none' or 'auto', because tools are not supported", "tool_choice")
        if self.modalities not in (None, ["text"]):
            raise invalid("modalities must be ['text']; nothing else is supported", "modalities")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "add_generation_prompt must be false when continue_final_message is true", "add_generation_prompt"
            )
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")

    def _own_sampling(self) -> dict[str, Any]:
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise invalid(
                f"top_logprobs is {reprlib.repr(self.top_logprobs)}; it must be a whole number from 0 to "
                f"{MAX_LOGPROBS}",
                "top_logprobs",
            )
        return {"max_tokens": limit, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}

    def template_messages(self) -> list[dict[str, str]]:
        """Messages for the chat template. Raises ApiError."""
        return [message.to_template(place) for place, message in enumerate(self.messages)]


class CompletionBody(GenerationBody):
    """Body of /v1/completions. prompt: text, texts, token ids, or lists of token ids."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        """See `GenerationBody.check`."""
        super().check()
        if self.suffix:
            raise invalid("suffix is not supported by this server; leave it out", "suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid(
                f"best_of is {reprlib.repr(self.best_of)}; it must equal n, {reprlib.repr(self.n or 1)}, or be "
                "left out",
                "best_of",
            )

    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt. Raises ApiError when the list is empty, too long or of mixed kinds."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        kinds = set(map(type, prompt))
        if kinds == {int}:
            return [prompt]
        if not 1 <= len(prompt) <= MAX_PROMPTS:
            raise invalid(f"prompt has {len(prompt)} entries; it must have 1 to {MAX_PROMPTS}", "prompt")
        if kinds == {str} or (kinds == {list} and all(set(map(type, item)) <= {int} for item in prompt)):
            return prompt
        raise invalid(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists", "prompt"
        )

    def _own_sampling(self) -> dict[str, Any]:
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        own: dict[str, Any] = {"max_tokens": limit, "logprobs": self.logprobs}
        if self.min_tokens is not None and self.max_tokens is None:
            own["max_tokens"] = max(limit, self.min_tokens)
        if self.echo and self.logprobs is not None:
            own["prompt_logprobs"] = self.logprobs
        return own


class TokenizeBody(Strict):
    """Body of /tokenize: a prompt, or messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(default=None, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raises ApiError unless there is exactly one of prompt and messages."""
        if (self.prompt is None) == (not self.messages):
            raise invalid("give either prompt or messages", "prompt")


class DetokenizeBody(Strict):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
    skip_special_tokens: bool | None = None

    def check(self) -> None:
        """Nothing beyond the types."""


class WeightsBody(Strict):
    """Body of POST /admin/weights. model: as in the configuration; null is the default model."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)] | None

    def check(self) -> None:
        """Nothing beyond the types."""


Body = TypeVar("Body", ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, WeightsBody)


def parse_body(kind: type[Body], data: bytes) -> Body:
    """A checked body from the bytes of a request. Raises ApiError."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _first_error(error, kind) from error
    body.check()
    return body


def _first_error(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    """The first thing wrong with a body, as a client can use it; values of the client are not repeated."""
    if (count := error.error_count()) > MAX_ERRORS:
        return invalid(
            f"the body has {count} errors, more than the {MAX_ERRORS} that are looked at; send only fields of this "
            "API, and numbers in logit_bias"
        )
    details = error.errors(include_url=False, include_input=False)
    unknown = [item for item in details if item["type"] == "extra_forbidden"]
    item = (unknown or details)[0]
    if item["type"] in ("json_invalid", "model_type") and not item["loc"]:
        # These words of the parser are of half a pair; a cut escape is an "invalid escape" or the end of a file.
        half = " (a lone surrogate, half of a pair of escapes, is no character)" if "hex escape" in item["msg"] else ""
        return invalid(f"the body must be one JSON object: {item['msg']}{half}", None, "invalid_json")
    # A union puts the name of the member that failed into the location; clients know only the fields.
    path = [str(step) for step in item["loc"] if isinstance(step, int) or step in _field_names(kind)]
    param = ".".join(path) or str(item["loc"][0])[:80]
    if item["type"] == "extra_forbidden":
        name = str(item["loc"][-1])[:80]
        near = difflib.get_close_matches(name, _field_names(kind), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return invalid(f"unknown field {name!r}{hint}", ".".join([*path, name]), "unknown_field")
    return invalid(f"{param}: {item['msg']}", param)


def _field_names(kind: type[BaseModel]) -> list[str]:
    names = list(kind.model_fields)
    for nested, field in ((Message, "messages"), (TextPart, "messages"), (StreamOptions, "stream_options")):
        if field in kind.model_fields:
            names += nested.model_fields
    return names


def _param_of(message: str, kind: type[BaseModel]) -> str | None:
    """The field that a message of SamplingParams begins with."""
    name = message.split(" ", 1)[0]
    return name if name in kind.model_fields else None


def _logit_bias(entries: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    for key in entries or {}:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid(
                f"logit_bias has the key {key[:40]!r}; keys must be token ids, as whole numbers", "logit_bias"
            )
    return tuple((int(key), value) for key, value in (entries or {}).items())


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in texts:
        if len(text) > MAX_STOP_CHARS:
            raise invalid(f"a stop string has {len(text)} characters; at most {MAX_STOP_CHARS} are allowed", "stop")
    return texts


def _join_parts(parts: list[TextPart], where: str) -> str:
    for place, part in enumerate(parts):
        if part.type != "text" or part.text is None:
            raise invalid(
                f"{where}.content.{place}: parts of type {part.type[:40]!r} are not supported; only text is",
                f"{where}.content",
            )
    return "\n".join(part.text or "" for part in parts)
