"""Named mutants of what keeps sequences larger than the device: policy, bookkeeping of places, copies below.

As engine_mutants.py; schedules are those of `Setup.draw_long`. Table: docs/simulation.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from tests.simulation.engine_device import SimDevice, Work
from tests.simulation.engine_mutants import EngineMutant
from tests.simulation.engine_world import Setup
from tournant.workers.batch import Batch, BatchEntry, StepResult
from tournant.workers.block_manager import BlockManager
from tournant.workers.long_sequences import LongSequences
from tournant.workers.overflow_blocks import OverflowBlocks
from tournant.workers.scheduler import Scheduler
from tournant.workers.sequence import Sequence as Answer

LONG = {"num_blocks": 5, "num_below": 20, "max_num_seqs": 4, "caching": True}
LOSES = {**LONG, "ranks": 1}


class OverflowMutant(EngineMutant):
    """One that sequences larger than the device show."""

    def drawn(self, seed: int) -> Setup:
        return Setup.draw_long(seed)


def _nothing(*_: Any) -> None:
    return None


# ---- what goes below


def _move_without_copy(long: LongSequences, sequence: Answer, index: int, batch: Batch) -> None:
    _MOVE(long, sequence, index, batch)
    del batch.demotions[:]


def _move_untold(long: LongSequences, sequence: Answer, index: int, batch: Batch) -> None:
    num_updates = len(batch.block_updates)
    _MOVE(long, sequence, index, batch)
    del batch.block_updates[num_updates:]


_MOVE = LongSequences._move


def _put_a_step_late(device: SimDevice, work: Work) -> None:
    _PUT_BELOW(device, replace(work, demotions=_LATE.get(device, ())))
    _LATE[device] = work.demotions


_PUT_BELOW = SimDevice.put_below
_LATE: WeakKeyDictionary[SimDevice, tuple[tuple[int, int], ...]] = WeakKeyDictionary()


def _what_is_scheduled_is_movable(long: LongSequences, sequence: Answer, resident: list[int]) -> list[int]:
    computed, sequence.num_computed = sequence.num_computed, sequence.num_scheduled
    movable = _MOVABLE(long, sequence, resident)
    sequence.num_computed = computed
    return movable


def _the_growing_is_movable(long: LongSequences, sequence: Answer, resident: list[int]) -> list[int]:
    blocks = long._blocks
    whole = blocks.blocks_for(sequence.num_computed)
    return [i for i in resident if i < whole and blocks.holders(sequence.block_table[i]) == (1, 0)]


def _shared_is_movable(long: LongSequences, sequence: Answer, resident: list[int]) -> list[int]:
    whole = sequence.num_computed // long._blocks.block_tokens
    return [i for i in resident if i < whole]


_MOVABLE = LongSequences._movable


def _recycle_shared(blocks: OverflowBlocks, block: int) -> None:
    blocks._dirty_used.pop(block, None)
    blocks._forget(block)


def _recycle_with_key(blocks: OverflowBlocks, block: int) -> None:
    del blocks, block


def _hold_not_shrunk(scheduler: Scheduler, blocks: list[int], batch: Batch) -> None:
    if batch.demotions and any(block in {source for source, _ in batch.demotions} for block in blocks):
        scheduler.blocks.release(blocks)
    else:
        _HOLD(scheduler, blocks, batch)


_HOLD = Scheduler._hold


def _the_window_never_yields(
    long: LongSequences, sequence: Answer, count: int, others: int, batch: Batch
) -> list[int] | None:
    if others and len(long._resident(sequence)) >= max(1, long._blocks.num_blocks // 2):
        most = len(long._movable(sequence, long._resident(sequence)))
        if min(most, long._blocks.below.num_free) < count:
            return None
    return _MAKE_ROOM(long, sequence, count, others, batch)


_MAKE_ROOM = LongSequences.make_room


def _seal_as_the_one_before(blocks: OverflowBlocks, table: list[int], index: int) -> tuple[int, int] | None:
    block = table[index]
    key = blocks._key_of[block]
    other = next((known for known in blocks._key_of if known not in (None, key)), key)
    if key is not None and blocks.below.match([key]):
        return _MOVE_BELOW(blocks, table, index)
    blocks._key_of[block] = None
    copy = _MOVE_BELOW(blocks, table, index)
    blocks._key_of[block] = key
    if copy is not None and other is not None and not blocks.below.match([other]):
        blocks.below.seal(copy[1] - blocks.num_blocks, other)
    return copy


def _move_without_a_reference(blocks: OverflowBlocks, table: list[int], index: int) -> tuple[int, int] | None:
    copy = _MOVE_BELOW(blocks, table, index)
    if copy is None:
        blocks.below.release([table[index] - blocks.num_blocks])
    return copy


def _move_to_a_used_place(blocks: OverflowBlocks, table: list[int], index: int) -> tuple[int, int] | None:
    copy = _MOVE_BELOW(blocks, table, index)
    used = [place for place, count in enumerate(blocks.below._references) if count and place + blocks.num_blocks]
    if copy is not None and len(used) > 1:
        other = blocks.num_blocks + used[0]
        if other != copy[1]:
            return copy[0], other
    return copy


_MOVE_BELOW = OverflowBlocks.move_below


# ---- what is found there


def _match_across_gaps(blocks: OverflowBlocks, keys: Sequence[bytes]) -> list[int]:
    found = [_MATCH_ANYWHERE(blocks, [key]) for key in keys]
    return [block for one in found for block in one]


_MATCH_ANYWHERE = OverflowBlocks.match_anywhere


def _start_to_write_below(scheduler: Scheduler, sequence: Answer, batch: Batch, now: float, **how: bool) -> Any:
    said = iter([False])  # to whether the block that it writes next is below
    with patch.object(OverflowBlocks, "is_below", lambda blocks, block: next(said, block >= blocks.num_blocks)):
        return _START(scheduler, sequence, batch, now, **how)


_START = Scheduler._start


def _release_above(blocks: OverflowBlocks, table: Sequence[int]) -> None:
    BlockManager.release(blocks, [block for block in table if block < blocks.num_blocks])


def _reset_above(blocks: OverflowBlocks) -> bool:
    return BlockManager.reset(blocks)


# ---- what is lost there


def _lose_without_epoch(scheduler: Scheduler, entry: BatchEntry, lost: frozenset[int]) -> Any:
    before = entry.sequence.lost_epoch
    outputs = _LOSE(scheduler, entry, lost)
    entry.sequence.lost_epoch = before
    return outputs


def _lose_and_go_on(scheduler: Scheduler, entry: BatchEntry, lost: frozenset[int]) -> Any:
    with patch.object(Scheduler, "_preempt", _nothing):
        return _LOSE(scheduler, entry, lost)


_LOSE = Scheduler._lose


def _book_what_was_lost(scheduler: Scheduler, batch: Batch, result: StepResult, now: float) -> Any:
    return _POSTPROCESS(scheduler, batch, replace(result, lost={}), now)


_POSTPROCESS = Scheduler.postprocess


def _forget_one_off(blocks: OverflowBlocks, ids: Iterable[int]) -> None:
    _FORGET_BELOW(blocks, [blocks.num_blocks + (id - blocks.num_blocks + 1) % blocks.below.num_blocks for id in ids])


_FORGET_BELOW = OverflowBlocks.forget_below


OVERFLOW_MUTANTS = (
    OverflowMutant("a block is written anew without being copied below", ("I16",),
                   ((LongSequences, "_move", _move_without_copy),), (), LONG),
    OverflowMutant("the block table does not say that a block went below", ("I2",),
                   ((LongSequences, "_move", _move_untold),), (), LONG),
    OverflowMutant("blocks go below a step late", ("I18",),
                   ((SimDevice, "put_below", _put_a_step_late),), (), LONG),
    OverflowMutant("a block that a step in flight writes goes below", ("I18",),
                   ((LongSequences, "_movable", _what_is_scheduled_is_movable),), (), {**LONG, "depth": 2}),
    OverflowMutant("a block that still grows goes below", ("I17", "I18"),
                   ((LongSequences, "_movable", _the_growing_is_movable),), (), LONG),
    OverflowMutant("a block that others use is written anew", ("I5", "I17"),
                   ((LongSequences, "_movable", _shared_is_movable), (OverflowBlocks, "recycle", _recycle_shared)),
                   (), LONG),
    OverflowMutant("a block that is written anew keeps its key", ("I5", "I7"),
                   ((OverflowBlocks, "recycle", _recycle_with_key),), (), LONG),
    OverflowMutant("blocks beyond the window are given back before their step", ("I8",),
                   ((Scheduler, "_hold", _hold_not_shrunk),), (), {**LONG, "has_tiers": True, "restore": "always"}),
    OverflowMutant("the window never yields", ("I7", "I11"),
                   ((LongSequences, "make_room", _the_window_never_yields),), (), LONG),
    OverflowMutant("a place is sealed under the key of another block", ("I18",),
                   ((OverflowBlocks, "move_below", _seal_as_the_one_before),), (), LONG),
    OverflowMutant("a place that has the content already is taken without a reference", ("I7",),
                   ((OverflowBlocks, "move_below", _move_without_a_reference),), (), LONG),
    OverflowMutant("a block goes to a place that is in use", ("I16",),
                   ((OverflowBlocks, "move_below", _move_to_a_used_place),), (), LONG),
    OverflowMutant("a prefix is found across a gap", ("I2",),
                   ((OverflowBlocks, "match_anywhere", _match_across_gaps),), (), LONG),
    OverflowMutant("a prefix ends with a place that is to be written", ("I17",),
                   ((Scheduler, "_start", _start_to_write_below),), (), LONG),
    OverflowMutant("an answer that ends keeps its places", ("I7",),
                   ((OverflowBlocks, "release", _release_above),), (), LONG),
    OverflowMutant("a lost place is still found", ("I16",),
                   ((OverflowBlocks, "forget_below", _nothing),), ("lost below",), LOSES),
    OverflowMutant("another place than the lost one is forgotten", ("I16",),
                   ((OverflowBlocks, "forget_below", _forget_one_off),), ("lost below",), LOSES),
    OverflowMutant("what a step yields that could not read is taken", ("I14", "I16", "I18"),
                   ((Scheduler, "postprocess", _book_what_was_lost),), ("lost below",), LOSES),
    OverflowMutant("what later steps of a lost epoch yield is taken", ("I14",),
                   ((Scheduler, "_lose", _lose_without_epoch),), ("lost below",), {**LOSES, "depth": 2}),
    OverflowMutant("a sequence whose places were lost goes on", ("I7", "I11"),
                   ((Scheduler, "_lose", _lose_and_go_on),), ("lost below",), LOSES),
    OverflowMutant("what was found below before a failed step is found after it", ("I16",),
                   ((LongSequences, "forget_all", _nothing),), ("failed step",), LONG),
    OverflowMutant("a reset of the prefix cache leaves what is below", ("I11",),
                   ((OverflowBlocks, "reset", _reset_above),), (), LONG),
)  # fmt: skip
