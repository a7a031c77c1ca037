"""What a step tells the client of one answer: its new token, why it ended, and once, how it began.

Owns the making of `RequestOutput`; books nothing but `Sequence.reported`. Called by `Scheduler` alone.
"""

from __future__ import annotations

from collections.abc import Set

from tournant.workers.batch import StepResult
from tournant.workers.messages import RequestOutput
from tournant.workers.sequence import Sequence


def output_of(
    sequence: Sequence, position: int | None, result: StepResult, now: float, eos_token_ids: Set[int]
) -> RequestOutput | None:
    """The output of a step for a sequence that was booked; None when there is nothing to tell yet.

    position: of its new token in the result, None when the step yielded none; now: in seconds.
    """
    if position is None:
        if sequence.max_total > sequence.num_prompt or sequence.num_computed < sequence.num_prompt:
            return None
        output = RequestOutput(sequence.request.request_id, sequence.index, [], "length")  # max_tokens = 0
    else:
        token = result.token_ids[position]
        output = RequestOutput(sequence.request.request_id, sequence.index, [token])
        if position in result.logprobs:
            output.logprobs = [result.logprobs[position]]
        output.finish_reason = finish_reason(sequence, token, eos_token_ids)
        if output.finish_reason == "stop":
            output.stop_token = token
    if not sequence.reported:
        sequence.reported = True
        output.cached_tokens = sequence.cached_tokens
        output.cached_by_tier = sequence.cached_by_tier
        output.prompt_logprobs = sequence.prompt_logprobs
        started = sequence.first_scheduled_time if sequence.first_scheduled_time is not None else now
        output.queue_ms = (started - sequence.arrival_time) * 1e3
        output.prefill_ms = (now - started) * 1e3
    return output


def end_of_resumed(sequence: Sequence, eos_token_ids: Set[int]) -> RequestOutput | None:
    """The only output of an answer that had ended before it was resumed; None when it goes on."""
    if not sequence.num_generated:
        return None
    token = sequence.token_ids[-1]
    reason = finish_reason(sequence, token, eos_token_ids)
    if reason is None:
        return None
    return RequestOutput(sequence.request.request_id, sequence.index, [], reason, token if reason == "stop" else None)


def finish_reason(sequence: Sequence, token: int, eos_token_ids: Set[int]) -> str | None:
    """Why an answer is over whose last token this is: "stop", "length", or None when it is not."""
    params = sequence.params
    stops = token in params.stop_token_ids or (not params.ignore_eos and token in eos_token_ids)
    if stops and sequence.num_generated > params.min_tokens:
        return "stop"
    return "length" if len(sequence.token_ids) >= sequence.max_total else None
