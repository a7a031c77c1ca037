"""How a sequence's tokens get into a batch, and what of a batch's result goes back without a decision.

Owns the layout of a batch's lists. Decides nothing but how large a chunk is; `Scheduler` alone calls these.
"""

from __future__ import annotations

from tournant.workers.batch import UNKNOWN_TOKEN, Batch, BatchEntry, StepResult
from tournant.workers.sequence import Sequence

MIN_SHARED_CHUNK = 32  # tokens a prefill gets at least when it shares a step with others


def chunk_of(wanted: int, most: int, taken: int, reserved: int, *, shares: bool) -> int:
    """Tokens of a sequence that wants so many, in a batch of at most `most` of which `taken` are gone.

    reserved: tokens left for decodes that come later; shares: others run or wait. A long prompt leaves half of a step
    to others, so that a short one behind it need not wait for its end.
    """
    room = most - taken
    if wanted > 1:
        room -= reserved
        if shares:
            room = min(room, max(most // 2, MIN_SHARED_CHUNK))
    return max(0, min(wanted, room))


def append_tokens(batch: Batch, sequence: Sequence, count: int) -> int:
    """The next `count` tokens of a sequence that holds blocks for them. Returns how many of them are its prompt's."""
    start, known = sequence.num_scheduled, len(sequence.token_ids)
    end = start + count
    samples = end == sequence.num_tokens and sequence.num_tokens < sequence.max_total
    index = len(batch.entries)
    batch.entries.append(BatchEntry(sequence, sequence.epoch, start, count, samples))
    batch.rows.append(sequence.row)
    batch.starts.append(start)
    batch.counts.append(count)
    batch.rope_offsets.append(sequence.rope_offset)
    batch.token_ids.extend(sequence.token_ids[start:end])
    batch.token_ids.extend([UNKNOWN_TOKEN] * (end - max(known, start)))
    if sequence.prompt_logprobs is not None and start < sequence.num_prompt:
        following = sequence.token_ids[end] if end < sequence.num_prompt else None
        batch.prompt_logprobs.append((index, sequence.params.prompt_logprobs or 0, following))
    if samples:
        batch.sampling.append(index)
        sequence.num_pending += 1
    sequence.num_scheduled = end
    sequence.num_in_flight += 1
    return max(0, min(end, sequence.num_prompt) - start)


def book_prompt_logprobs(batch: Batch, result: StepResult) -> None:
    """Log-probabilities of prompt tokens to the sequences that want them."""
    for index, _, _ in batch.prompt_logprobs:
        entry = batch.entries[index]
        prompt_logprobs = entry.sequence.prompt_logprobs
        if prompt_logprobs is not None:
            following = range(entry.start + 1, len(prompt_logprobs))  # a chunk may reach beyond the prompt
            for place, item in zip(following, result.prompt_logprobs[index], strict=False):
                prompt_logprobs[place] = item
