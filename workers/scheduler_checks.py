"""What must hold of a scheduler's lists, rows and blocks between two calls of it, recounted from scratch.

Owns no state; `Scheduler.validate` calls it, in tests after every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listed

from tournant.kvstore.errors import InvariantViolation
from tournant.workers.block_manager import BlockManager
from tournant.workers.sequence import Sequence, SequenceState


def validate_lists(
    lists: Mapping[SequenceState, Listed[Sequence]],
    draining: Listed[Sequence],
    blocks: BlockManager,
    held: Listed[Listed[int]],
    free_rows: Listed[int],
    num_rows: int,
) -> None:
    """lists: sequences that are not over, by state; draining: ended ones that batches in flight still write for; held:
    blocks of transfers and batches. Raises InvariantViolation.
    """
    everyone = [sequence for listed in lists.values() for sequence in listed] + list(draining)
    for sequence in everyone:
        sequence.validate(blocks.block_tokens)
    blocks.validate((sequence.block_table for sequence in everyone), held)
    rows = [*free_rows, *(sequence.row for sequence in everyone if sequence.row >= 0)]
    if sorted(rows) != list(range(num_rows)):
        raise InvariantViolation(f"rows {sorted(rows)} are not each free or held once")
    for state, listed in lists.items():
        if any(sequence.state is not state for sequence in listed):
            raise InvariantViolation(f"a sequence in the list of {state.value} ones is in another state")
        if sorted(listed, key=lambda sequence: sequence.order) != listed:
            raise InvariantViolation(f"{state.value} sequences are out of order")
    if any(sequence.block_table for sequence in lists[SequenceState.WAITING]):
        raise InvariantViolation("a waiting sequence holds blocks")
