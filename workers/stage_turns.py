"""Which running sequences take turns, so that every stage of a pipeline has a batch to work on.

Pure arithmetic for `Scheduler`. A sequence whose last token is still being sampled could be scheduled at once, but the
first stage would only wait for that token: batches in flight overlap between stages when no two hold the same decode.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items

from tournant.workers.config import EngineConfig
from tournant.workers.sequence import Sequence


def num_turns(config: EngineConfig) -> int:
    """Batches that decodes are dealt to: one per stage, unless fewer may be in flight."""
    stages = config.pipeline_parallel_size
    return min(stages, config.num_in_flight or stages)


def held_back(running: Items[Sequence], turns: int) -> Collection[Sequence]:
    """Sequences that are not to be in the next batch: those in flight with a token, and of the other decodes what goes
    beyond an equal share, first come first served. Nobody waits for more than `turns` batches. Prefills are never held.
    """
    if turns == 1:
        return ()
    share = -(-len(running) // turns)
    ready = [sequence for sequence in running if not sequence.num_pending and sequence.num_to_schedule == 1]
    return {*ready[share:], *(sequence for sequence in running if sequence.num_pending)}
