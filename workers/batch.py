"""One step's work as data: what the scheduler decides and every shard carries out.

Owns no behaviour. Everything but `entries` is plain numbers, so that a leader can send it to other ranks; `entries`
is the leader's own record of whom the results belong to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tournant.workers.messages import TokenLogprobs
from tournant.workers.sampling_params import SamplingParams
from tournant.workers.sequence import Sequence

UNKNOWN_TOKEN = -1


@dataclass(slots=True)
class BatchEntry:
    """`count` tokens of one sequence from position `start`; `samples` when the last of them yields a new token."""

    sequence: Sequence
    epoch: int
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class RowState:
    """What the sampler must know of a sequence that takes a row: its tokens so far, parameters, and random stream."""

    row: int
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    index: int

    @classmethod
    def of(cls, sequence: Sequence) -> RowState:
        """As the sequence is now."""
        tokens = list(sequence.token_ids)
        return cls(sequence.row, tokens, sequence.num_prompt, sequence.params, sequence.seed, sequence.index)


@dataclass(slots=True)
class Batch:
    """Work of one step, in the order of `entries`.

    rows / starts / counts: per entry; rope_offsets: per entry, what to add to a position to find its row in the RoPE
    tables; token_ids: all entries' tokens one after another, UNKNOWN_TOKEN for one that a
    batch in flight is sampling for that row; sampling: indices of entries that yield a token; prompt_logprobs: indices
    of entries that want log-probabilities of the tokens after each of theirs, with how many alternatives and the next
    known prompt token after the chunk (None at the end of the prompt); new_rows: rows taken since the last batch;
    block_updates: (row, first index, block ids) to write into the rows' block tables; copies: (source, destination)
    blocks to copy before anything else but demotions; demotions: (block of the device, id below) to copy first of all;
    held: the leader's own record of blocks that are given back when the batch is booked; scheduled_at: in seconds of
    the engine's clock.
    """

    step: int
    entries: list[BatchEntry] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    rope_offsets: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sampling: list[int] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, int, int | None]] = field(default_factory=list)
    new_rows: list[RowState] = field(default_factory=list)
    block_updates: list[tuple[int, int, list[int]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    demotions: list[tuple[int, int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    scheduled_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this batch."""
        return len(self.token_ids)


@dataclass(slots=True)
class StepResult:
    """What a batch yielded: one token per index of `Batch.sampling`, in that order.

    logprobs: by position in `Batch.sampling`, for sequences that asked; prompt_logprobs: by entry index, one item per
    token of the chunk that has a known next prompt token; lost: by entry index, ids below whose content could not
    be read, so that what this entry yielded means nothing; overflow: what was read there, counters of OverflowStats.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    lost: dict[int, frozenset[int]] = field(default_factory=dict)
    overflow: dict[str, float] = field(default_factory=dict)

    def result(self) -> StepResult:
        """Itself: a step that is over when it is begun (see `PendingStep`)."""
        return self


class PendingStep(Protocol):
    """A batch that was given to a device and may still be running."""

    def result(self) -> StepResult:
        """Wait for it. Raises RuntimeError when the device failed."""
