"""What callers of a service from Python give and get: options of a call, results, and errors of the client's own.

Owns their form, and how results are made of what crosses a handle (handle_methods.py), which is plain. client.py makes
the calls; errors of the service itself are those of errors.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypedDict

from tournant.deploy.errors import RequestError

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids, or chat messages


class NotConnected(ConnectionError):  # noqa: N818 - names the fact
    """There is no Ray cluster to use."""


class NoSuchApplication(LookupError):  # noqa: N818 - names the fact
    """The cluster has no Tournant service of that name. known: the applications that there are."""

    def __init__(self, app: str, known: Sequence[str]) -> None:
        super().__init__(app, known)
        self.app, self.known = app, tuple(known)

    def __str__(self) -> str:
        there = f"there are {', '.join(self.known)}" if self.known else "there is none at all"
        return (
            f"no application {self.app!r} of Tournant's is on this cluster, {there}; deploy one by: serve deploy FILE"
        )


class NotReady(RuntimeError):  # noqa: N818 - names the fact
    """The service could not answer in time. waited_s: for how long it was given time; why: what it is about."""

    def __init__(self, app: str, waited_s: float, why: str) -> None:
        super().__init__(app, waited_s, why)
        self.app, self.waited_s, self.why = app, waited_s, why

    def __str__(self) -> str:
        return f"{self.app} was not ready within {self.waited_s:.1f} s: {self.why}"


class Options(TypedDict, total=False):
    """Of a call. session_id: requests of one conversation go to the replica that has its blocks; cache_salt: cached
    blocks are shared only with the same salt; priority: lower runs earlier; timeout_s: most seconds that the service
    may take, and ready_s more until the caller is told, None = the service's own limit; the rest are SamplingParams'
    fields.
    """

    session_id: str
    cache_salt: str
    priority: int
    timeout_s: float | None
    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Sequence[tuple[int, float]]
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logprobs: int
    prompt_logprobs: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token of an answer; top: (token id, log-probability) of the most probable ones there."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the n answers to a prompt. finish_reason: "stop" or "length"; stop_reason: the stop string or stop token
    id that ended it; logprobs: if they were asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True, slots=True)
class Completion:
    """All answers to one prompt, tokens counted. cached_tokens: of the prompt, from the KV cache; cached_by_tier: the
    same by where they lay (device, host, nvme), None without tiers; weights_id, epoch: of the weights that answered.
    """

    answers: tuple[Answer, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_by_tier: Mapping[str, int] | None
    weights_id: str
    epoch: int

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.answers[0].text

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Self:
        """From what `HandleMethods.generate` returns."""
        usage = data["usage"]
        return cls(
            tuple(
                Answer(
                    answer["index"],
                    answer["text"],
                    tuple(answer["token_ids"]),
                    answer["finish_reason"],
                    answer["stop_reason"],
                    _logprobs(answer["logprobs"]),
                )
                for answer in data["answers"]
            ),
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage["cached_tokens"],
            usage["cached_by_tier"],
            data["weights_id"],
            data["epoch"],
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """What a stream adds to answer `index`; fields as in `Answer`, finish_reason on its last piece only."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...] | None

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Self:
        """From what `HandleMethods.stream` yields."""
        return cls(
            data["index"],
            data["text"],
            tuple(data["token_ids"]),
            data["finish_reason"],
            data["stop_reason"],
            _logprobs(data["logprobs"]),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of prompt `number` (from 0) of a batch: a completion, or the error of this prompt alone."""

    number: int
    prompt: Prompt
    completion: Completion | None
    error: Exception | None

    @property
    def text(self) -> str:
        """Of the first answer; raises `error`, if there is one."""
        return self.result().text

    def result(self) -> Completion:
        """The completion; raises `error`, if there is one."""
        if self.completion is None:
            raise self.error or ValueError("an outcome without completion or error")
        return self.completion


def check_options(options: Mapping[str, Any]) -> None:
    """Raises RequestError for names that no call has, and for a timeout_s that is none; the service checks the rest."""
    for name in options.keys() - Options.__annotations__.keys():
        near = difflib.get_close_matches(name, Options.__annotations__, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(Options.__annotations__)}"
        raise RequestError(f"unknown option {name}{hint}", name)
    timeout_s = options.get("timeout_s")
    if timeout_s is not None and (
        type(timeout_s) is bool or not isinstance(timeout_s, int | float) or not timeout_s > 0
    ):
        raise RequestError(
            f"timeout_s is {timeout_s!r}; it must be a number of seconds above 0, or None for the service's own limit",
            "timeout_s",
        )


def check_batch(prompts: Iterable[Prompt], max_in_flight: int) -> None:
    """Raises RequestError unless there may be prompts in it, and a whole number of them at once."""
    if type(max_in_flight) is not int or max_in_flight < 1:
        raise RequestError(
            f"max_in_flight is {max_in_flight!r}; it must be a whole number of at least 1", "max_in_flight"
        )
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts is {prompts!r:.100}; it must be a list of prompts, or something else to iterate over that gives "
            "prompts; for a single one use generate",
            "prompts",
        )


def _logprobs(entries: Sequence[tuple[int, Mapping[str, Any]]] | None) -> tuple[TokenLogprob, ...] | None:
    if entries is None:
        return None
    return tuple(
        TokenLogprob(token, entry["logprob"], tuple((other, value) for other, value in entry["top"]))
        for token, entry in entries
    )
