"""One answer while it is generated: its token log, its text, and what each output of an engine adds to it.

Owns the token log (the truth that an answer is resumed from when its engine is gone), the detokenizer and the held
log-probabilities; they stay when another engine goes on with the answer. Streams are generation.py's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tournant.deploy.detokenizer import Detokenizer
from tournant.deploy.errors import GenerationFailed
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.messages import RequestOutput, TokenLogprobs
from tournant.workers.sampling_params import SamplingParams

LoggedToken = tuple[int, TokenLogprobs]  # a token of the answer's text and its log-probabilities


@dataclass(slots=True)
class Delta:
    """What was added to one answer.

    index: place of the answer (prompt number x n + answer number); parts: pieces of final text; token_ids: new entries
    of the token log; logprobs: of tokens whose text is final, so it may lag behind token_ids; finish_reason: "stop",
    "length" or "error" on the last Delta; stop_reason: the stop string or stop token id that ended it, None for
    end-of-text; num_generated: tokens of all answers of the request so far; error: set with finish_reason "error".
    """

    index: int
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_generated: int = 0
    logprobs: list[LoggedToken] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: GenerationFailed | None = None

    @property
    def text(self) -> str:
        """What this Delta adds to the answer's text; may be empty."""
        return "".join(self.parts)

    def merge(self, later: Delta) -> None:
        """Append the next Delta of the same answer."""
        self.parts += later.parts
        self.token_ids += later.token_ids
        self.num_generated = later.num_generated
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs is not None:
            self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error


class Answer:
    """Token log and text of one answer. request_id: under which an engine makes it now; num_deaths: engines that died
    with it; num_turns: engines that had it before this one.
    """

    __slots__ = (
        "_detokenizer",
        "_held_logprobs",
        "_params",
        "finish_reason",
        "index",
        "num_deaths",
        "num_told",
        "num_turns",
        "pending",
        "request_id",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, index: int, request_id: int, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.index = index
        self.request_id = request_id
        self.num_deaths = self.num_turns = 0
        self.token_ids: list[int] = []  # the token log, a final stop token included
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.pending: Delta | None = None  # the latest Delta that waits in the stream for its reader
        self.num_told = 0  # entries of the token log that deltas have carried
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, params)
        self._held_logprobs: deque[tuple[int, int, LoggedToken]] = deque()  # with first and last character of its text

    def take(self, output: RequestOutput) -> Delta:
        """Log the tokens of one engine output and return what they add; sets finish_reason when the answer is over."""
        params, detokenizer = self._params, self._detokenizer
        token_ids, finish_reason = output.token_ids, output.finish_reason
        if params.max_tokens == 0:  # asked for prompt log-probabilities only; the engine had to make one token
            self.finish_reason = finish_reason and "length"
            return Delta(self.index, finish_reason=self.finish_reason)
        visible = token_ids
        if finish_reason == "stop" and output.stop_token is not None and not params.include_stop_str_in_output:
            visible = token_ids[:-1]
        before = detokenizer.num_tokens
        if params.logprobs is None or output.logprobs is None:
            text = detokenizer.feed(visible)
        else:
            text = self._feed_with_logprobs(token_ids, len(visible), output.logprobs)
        if finish_reason is not None and detokenizer.stopped is None:
            text += detokenizer.finish()
        if detokenizer.stopped is not None:
            token_ids = token_ids[: detokenizer.num_tokens - before]
            finish_reason, self.stop_reason = "stop", detokenizer.stopped
        elif output.stop_token is not None and output.stop_token in params.stop_token_ids:
            self.stop_reason = output.stop_token
        self.token_ids += token_ids
        self.finish_reason = finish_reason
        logprobs = None if params.logprobs is None else self._release_logprobs()
        return Delta(self.index, [text] if text else [], [], 0, logprobs, finish_reason, self.stop_reason)

    def fail(self, error: GenerationFailed) -> Delta:
        """End the answer with an error."""
        self.finish_reason = "error"
        return Delta(self.index, finish_reason="error", error=error)

    def _feed_with_logprobs(self, token_ids: list[int], num_visible: int, logprobs: list[TokenLogprobs]) -> str:
        """`Detokenizer.feed` token by token. A stop token has an entry, though no text: clients count on it."""
        detokenizer = self._detokenizer
        text = ""
        for place, (token_id, entry) in enumerate(zip(token_ids, logprobs, strict=True)):
            start = detokenizer.num_decoded
            if place < num_visible:
                text += detokenizer.feed((token_id,))
            self._held_logprobs.append((start, detokenizer.num_decoded, (token_id, entry)))
            if detokenizer.stopped is not None:
                break
        return text

    def _release_logprobs(self) -> list[LoggedToken]:
        """Entries of tokens whose text was given out; at a stop string those that lie behind the cut are dropped."""
        released: list[LoggedToken] = []
        emitted = self._detokenizer.num_emitted
        stopped = self._detokenizer.stopped is not None
        while self._held_logprobs:
            start, end, entry = self._held_logprobs[0]
            if (start >= emitted) if stopped else (end > emitted):
                break
            released.append(entry)
            self._held_logprobs.popleft()
        return released
