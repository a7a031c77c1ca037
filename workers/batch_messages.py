"""The plain-number form of a batch, in which a leader sends it to the other ranks of its replica.

Owns the closed schema and nothing else. What only the leader needs stays behind: `entries`, and the tokens of rows
whose sampling does not look at them.
"""

from __future__ import annotations

from typing import Any

from tournant.workers.batch import Batch, RowState, StepResult
from tournant.workers.messages import TokenLogprobs
from tournant.workers.sampling_params import SamplingParams


def _row_to_wire(state: RowState) -> list[Any]:
    params = state.params
    counted = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    tokens = state.token_ids if counted else []
    return [state.row, tokens, state.num_prompt, params.to_wire(), state.seed, state.index]


def _row_from_wire(data: list[Any]) -> RowState:
    row, tokens, num_prompt, params, seed, index = data
    return RowState(row, tokens, num_prompt, SamplingParams.from_wire(params), seed, index)


def batch_to_wire(batch: Batch) -> list[Any]:
    """A batch as lists of numbers for msgpack."""
    return [
        batch.step,
        batch.rows,
        batch.starts,
        batch.counts,
        batch.rope_offsets,
        batch.token_ids,
        batch.sampling,
        batch.prompt_logprobs,
        [_row_to_wire(state) for state in batch.new_rows],
        batch.block_updates,
        batch.copies,
        batch.demotions,
    ]


def batch_from_wire(data: list[Any]) -> Batch:
    """Inverse of `batch_to_wire`, without entries. Raises ValueError or TypeError when it is no batch."""
    step, rows, starts, counts, offsets, tokens, sampling, prompts, new_rows, updates, copies, demotions = data
    return Batch(
        step=step,
        rows=rows,
        starts=starts,
        counts=counts,
        rope_offsets=offsets,
        token_ids=tokens,
        sampling=sampling,
        prompt_logprobs=[(entry, num_top, following) for entry, num_top, following in prompts],
        new_rows=[_row_from_wire(state) for state in new_rows],
        block_updates=[(row, first, blocks) for row, first, blocks in updates],
        copies=[(source, target) for source, target in copies],
        demotions=[(block, place) for block, place in demotions],
    )


def _logprobs_from_wire(data: list[Any]) -> TokenLogprobs:
    return TokenLogprobs(data[0], [(token, value) for token, value in data[1]])


def logprobs_to_wire(result: StepResult) -> list[Any]:
    """Everything of a result but its tokens."""
    return [
        [[place, item.logprob, item.top] for place, item in result.logprobs.items()],
        [[entry, [[item.logprob, item.top] for item in items]] for entry, items in result.prompt_logprobs.items()],
    ]


def logprobs_from_wire(data: list[Any], token_ids: list[int]) -> StepResult:
    """Inverse of `logprobs_to_wire`, with the tokens."""
    logprobs, prompts = data
    return StepResult(
        token_ids,
        {place: _logprobs_from_wire([value, top]) for place, value, top in logprobs},
        {entry: [_logprobs_from_wire(item) for item in items] for entry, items in prompts},
    )
