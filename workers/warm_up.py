"""Batches of random tokens: the largest step, to see what memory it takes, and one of every kind, so that kernels are
compiled and libraries set up before the first request.

Owns nothing: a runner runs them before anyone else uses its rows and blocks, whose contents they leave undefined. All
sequences of such a batch share their blocks, so that few are needed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tournant.workers.batch import Batch, RowState
from tournant.workers.sampling_params import SamplingParams

SPLIT_TOKENS = 1024  # a context of which attention kernels may take the parts at once
MOST_QUERIES = 128  # more in one sequence take no other kernel
SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, top_k=50)  # what sampling costs most


def make_batch(counts: list[int], contexts: list[int], block_tokens: int, vocab_size: int) -> Batch:
    """Sequence i has contexts[i] tokens, the last counts[i] of which are computed, in blocks 0, 1, ...; all sample."""
    rng = random.Random(0)
    num_blocks = -(-max(contexts) // block_tokens)
    rows = list(range(len(counts)))
    return Batch(
        step=0,
        rows=rows,
        starts=[context - count for context, count in zip(contexts, counts, strict=True)],
        counts=counts,
        rope_offsets=[0] * len(counts),
        token_ids=[rng.randrange(vocab_size) for _ in range(sum(counts))],
        sampling=rows,
        new_rows=[RowState(row, [0], 1, SAMPLING, seed=0, index=0) for row in rows],
        block_updates=[(row, 0, list(range(num_blocks))) for row in rows],
    )


def largest_batch(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_tokens: int, vocab_size: int
) -> Batch:
    """As many sequences and as many tokens as one step may have."""
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    share, more = divmod(max_num_batched_tokens, num_seqs)
    counts = [min(share + (index < more), max_model_len) for index in range(num_seqs)]
    return make_batch(counts, counts, block_tokens, vocab_size)


def kinds_of_steps(
    max_num_batched_tokens: int, max_model_len: int, pool_tokens: int, block_tokens: int, vocab_size: int
) -> Iterator[Batch]:
    """Decodes and chunks of 2, 4, 8, ... tokens, over short and long contexts, as far as limits allow."""
    longest = min(max_model_len, pool_tokens, SPLIT_TOKENS)
    count = 1
    while count <= min(max_num_batched_tokens, longest, MOST_QUERIES):
        for context in sorted({count, longest}):
            yield make_batch([count], [context], block_tokens, vocab_size)
        count *= 2
