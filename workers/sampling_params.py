"""How tokens of one request are chosen. Pure data: validated here once, for HTTP, handles and offline use alike."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass, fields
from typing import Any

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
_WHOLE = (  # limits of whole numbers, and whether they may be left out
    ("n", 1, MAX_N, False),
    ("max_tokens", 0, 1 << 31, True),
    ("min_tokens", 0, 1 << 31, False),
    ("top_k", 0, 1 << 31, False),
    ("seed", -(1 << 63), (1 << 64) - 1, True),
    ("logprobs", 0, MAX_LOGPROBS, True),
    ("prompt_logprobs", 0, MAX_LOGPROBS, True),
)
_REAL = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request, with vLLM's and OpenAI's names and meanings.

    n: independent answers; max_tokens: None = as many as fit; temperature 0 = greedy; top_k 0 = off;
    min_p: tokens below min_p x the most probable one are dropped; seed: None = a random one per request;
    presence/frequency penalties count generated tokens, repetition_penalty prompt and generated ones;
    logit_bias: (token id, bias in -100..100) pairs; stop strings are applied by the frontend, all else by the engine;
    logprobs / prompt_logprobs: None = off, k = the chosen token and the k most probable ones.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, low, high, optional in _WHOLE:
            value = getattr(self, name)
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name} is {reprlib.repr(value)}; it must be a whole number from {low} to {high}")
        for name, flow, fhigh in _REAL:
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not flow <= number <= fhigh:
                raise ValueError(f"{name} is {reprlib.repr(number)}; it must be a number from {flow:g} to {fhigh:g}")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries; at most {MAX_STOP_TOKEN_IDS} are allowed"
            )
        for token in (*self.stop_token_ids, *(token for token, _ in self.logit_bias[: MAX_LOGIT_BIAS + 1])):
            if isinstance(token, bool) or not isinstance(token, int):
                raise ValueError(f"stop_token_ids and logit_bias name tokens by whole numbers, not by {token!r}")
        if self.top_p == 0.0:
            raise ValueError("top_p is 0; it must be above 0 and at most 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; it must not exceed max_tokens, {self.max_tokens}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed")
        for token, bias in self.logit_bias:
            if (
                isinstance(bias, bool)
                or not isinstance(bias, (int, float))
                or not math.isfinite(bias)
                or abs(bias) > 100
            ):
                raise ValueError(f"logit_bias of token {token} is {bias!r}; it must be a number from -100 to 100")
        if len(self.stop) > MAX_STOP_STRINGS or any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError(f"stop must be at most {MAX_STOP_STRINGS} strings, none of them empty")
        if any(len(text) > MAX_STOP_CHARS for text in self.stop):
            raise ValueError(f"stop holds a string of more than {MAX_STOP_CHARS} characters; shorten it")

    @property
    def greedy(self) -> bool:
        """True when the most probable token is taken without drawing a random number."""
        return self.temperature < 1e-5 or self.top_k == 1

    def to_wire(self) -> dict[str, Any]:
        """Plain msgpack types: only fields that differ from the default."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> SamplingParams:
        """Inverse of `to_wire`. Raises TypeError on unknown fields and ValueError on values out of range."""
        data = dict(data)
        for name in ("stop", "stop_token_ids"):
            if name in data:
                data[name] = tuple(data[name])
        if "logit_bias" in data:
            data["logit_bias"] = tuple((int(t), float(b)) for t, b in data["logit_bias"])
        return cls(**data)
