"""Errors of the frontend that a caller can meet, over HTTP or through a handle.

Every class hands all of its constructor arguments to the base class, so that one pickled by Ray arrives as it left.
"""

from __future__ import annotations

from typing import Literal

FailureKind = Literal["engine_dead", "engine_error", "timeout", "cancelled", "weights_changed"]


class RequestError(ValueError):
    """The request cannot be served as it is (HTTP 400). `param` names the field to change."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class PromptTooLong(RequestError):  # noqa: N818 - names the fact
    """The prompt leaves no room for an answer. limit: tokens of prompt + answer; limited_by: what sets that limit.

    Libraries know this fact by the words "prompt is too long".
    """

    def __init__(self, prompt_tokens: int, limit: int, limited_by: str) -> None:
        super().__init__(
            f"the prompt is too long: it has {prompt_tokens} tokens, but prompt and answer together may have at most "
            f"{limit} tokens ({limited_by}); shorten the prompt to {limit - 1} tokens or fewer",
            "prompt",
        )
        self.args = (prompt_tokens, limit, limited_by)
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        self.limited_by = limited_by


class GenerationFailed(RuntimeError):  # noqa: N818 - names the fact
    """An accepted request ended without its answer.

    kind: "engine_dead" and "engine_error" (send it again), "timeout" (of this request), "cancelled" (by the caller),
    "weights_changed" (meanwhile; send it again).
    """

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message, kind)
        self.message = message
        self.kind: FailureKind = kind

    def __str__(self) -> str:
        return self.message


class QuotaExceeded(RuntimeError):  # noqa: N818 - names the fact
    """A tenant has used what it may (HTTP 429). `retry_after_s` is when a retry is worthwhile."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message
