"""Which tokens are computed in the next step: continuous batching, chunked prefill, preemption, admission.

Owns the waiting and running lists and calls every mutator of `Sequence`. Does no I/O and reads no clock: time is an
argument. Runs ahead of the device: a batch may be scheduled while earlier ones run, so the last token of a sequence may
be unknown (`num_pending`); what such a batch wrote for a sequence that was preempted or ended meanwhile is dropped.

Invariants (checked by `validate`):
 1. A waiting sequence holds no blocks and no row, so nothing that waits can keep others from running.
 2. The most important running sequence is never preempted for another; every sequence fits the pool by itself (`add`
    checks), and copies hold blocks only for a moment, so it always finishes: no deadlock.
 3. Admission is in order (priority, arrival); only a fork waiting for its parent's prompt, and a sequence waiting for
    word from lower tiers, may be passed.
 4. A restoring sequence computes nothing until its blocks are in or its deadline has passed; others go on meanwhile.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterable
from operator import attrgetter

from tournant.kvstore.errors import InvariantViolation
from tournant.workers.batch import Batch, BatchEntry, RowState, StepResult
from tournant.workers.batch_making import append_tokens, book_prompt_logprobs, chunk_of
from tournant.workers.block_manager import BlockManager
from tournant.workers.config import EngineConfig
from tournant.workers.long_sequences import LongSequences
from tournant.workers.messages import EngineStats, OverflowStats, RequestOutput, TierStats
from tournant.workers.overflow_blocks import OverflowBlocks
from tournant.workers.scheduler_checks import validate_lists
from tournant.workers.sequence import Sequence, SequenceState
from tournant.workers.stage_turns import held_back, num_turns
from tournant.workers.step_outputs import output_of
from tournant.workers.tiering import Tiering

MAX_PASSED = 16  # sequences that wait for word from lower tiers while others behind them start
MAX_LOSSES = 3  # times that a sequence is computed again because the overflow lost blocks of it
_order = attrgetter("order")


class _Turn(enum.Enum):
    """What became of a waiting sequence whose turn it is."""

    STARTED = "started"
    RESTORING = "restoring"
    WAITS = "waits"
    NO_ROOM = "no room"


class Scheduler:
    """Decides batches and digests their results. Not thread-safe; one engine loop drives it.

    eos_token_ids end an answer unless its request ignores them; tiers: below the device, None without.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        eos_token_ids: Iterable[int],
        tiers: Tiering | None = None,
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.tiers = tiers
        self.long = LongSequences(blocks) if isinstance(blocks, OverflowBlocks) else None
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: list[Sequence] = []  # sorted by `order`
        self.running: list[Sequence] = []  # sorted by `order`
        self.restoring: list[Sequence] = []  # sorted by `order`
        self._draining: list[Sequence] = []  # ended, but a batch in flight still writes to their blocks
        self._turns = num_turns(config)
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._step = 0
        self._held: list[int] = []  # by batches that are not booked yet, in their order
        self._unsent: Batch | None = None  # new rows and their tables that no step has carried yet
        self._booked_at = self._step_s = 0.0
        self._counts = dict.fromkeys(
            ("num_preemptions", "prefix_query_tokens", "prefix_hit_tokens", "prompt_tokens", "generation_tokens"), 0
        )

    # ---------------------------------------------------------------- requests

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises InvariantViolation if it could never run in this pool."""
        if self.blocks.blocks_for(max(sequence.num_prompt, sequence.max_total - 1)) > self.blocks.capacity:
            raise InvariantViolation(f"a sequence of {sequence.max_total} tokens does not fit the pool")
        bisect.insort(self.waiting, sequence, key=_order)

    def abort(self, sequence: Sequence, reason: str = "abort") -> None:
        """End a sequence now; blocks that a batch in flight still writes come back when it is done."""
        if sequence.state is not SequenceState.FINISHED:
            self._finish(sequence, reason)

    def give_up(self, reason: str) -> None:
        """End every sequence at once; no batch in flight will be booked any more (they failed or were dropped)."""
        self.blocks.release_held(self._held)
        self._held.clear()
        self._unsent = None
        for sequence in self.waiting + self.restoring + self.running + self._draining:
            sequence.num_in_flight = sequence.num_pending = 0
            if sequence.state is SequenceState.FINISHED:
                self._release_drained(sequence)
            else:
                self._finish(sequence, reason)
        if self.long is not None:
            self.long.forget_all()

    @property
    def has_work(self) -> bool:
        """True while any sequence is not finished."""
        return bool(self.waiting or self.running or self.restoring)

    def stats(self, now: float = 0.0) -> EngineStats:
        """Counters since the start and gauges of now, in seconds."""
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_used=self.blocks.num_blocks - self.blocks.num_free,
            kv_total=self.blocks.num_blocks,
            kv_cached=self.blocks.num_reusable,
            num_steps=self._step,
            num_restoring=len(self.restoring),
            queued_tokens=sum(len(s.token_ids) for s in self.waiting) + sum(s.num_to_schedule for s in self.running),
            overflow=OverflowStats() if self.long is None else self.long.stats(),
            tiers=TierStats() if self.tiers is None else self.tiers.stats(now),
            **self._counts,
        )

    # ---------------------------------------------------------------- schedule

    def schedule(self, now: float) -> Batch | None:
        """The next batch, or None when nothing can be computed before a batch in flight returns. `now` in seconds."""
        batch = self._unsent or Batch(step=self._step + 1)
        self._unsent = None
        if self.tiers is not None:
            self._resume_restored(batch, self.tiers, now)
            self.tiers.look_ahead(self.waiting, self._missing, now)
        if not self._schedule_running(batch, now):
            self._admit(batch, now)
        if self.tiers is not None:
            idle = not batch.entries and not any(sequence.num_in_flight for sequence in self.running)
            self.tiers.plan_saves(now, self._step_s, idle=idle)
        if not batch.entries:
            self._unsent = batch if batch.new_rows or batch.block_updates else None
            return None
        batch.scheduled_at = now
        self._step += 1
        return batch

    def _schedule_running(self, batch: Batch, now: float) -> bool:
        preempted, index = False, 0
        held = held_back(self.running, self._turns)
        decodes = sum(sequence.num_to_schedule == 1 for sequence in self.running if sequence not in held)
        while index < len(self.running):
            sequence = self.running[index]
            if sequence.outgrew_rope and not sequence.num_in_flight:
                self._preempt(sequence)
                self._switch_rope(sequence)
                continue
            index += 1
            if sequence in held:
                continue
            decodes -= sequence.num_to_schedule == 1
            count = self._chunk(sequence, batch, reserved=decodes)
            while count and not self._grow(sequence, count, batch):
                coming = sum(self._needs(sequence, count)) <= self.blocks.num_free + self.blocks.num_coming
                if coming or (sequence.num_in_flight and self._long_for(sequence)):
                    count = 0  # copies, or its own steps, that are under way make room in a moment
                    break
                victim = max(self.running[-1:] + self.restoring[-1:], key=_order)
                if victim.state is SequenceState.RUNNING and self.tiers is not None and not self._long_for(victim):
                    self.tiers.preempted(victim, now)
                self._preempt(victim)
                preempted = True
                if victim is sequence:
                    count = 0
            if count:
                self._counts["prompt_tokens"] += append_tokens(batch, sequence, count)
                if (long := self._long_for(sequence)) is not None:
                    self._hold(long.shrink(sequence, self._others(sequence), batch), batch)
        return preempted

    def _chunk(self, sequence: Sequence, batch: Batch, reserved: int = 0) -> int:
        """Tokens of this sequence in this batch, `reserved` ones left for decodes that come later in the order."""
        wanted = 0 if sequence.outgrew_rope else sequence.num_to_schedule
        shares = len(self.waiting) + len(self.running) > 1
        count = chunk_of(wanted, self.config.max_num_batched_tokens, batch.num_tokens, reserved, shares=shares)
        long = self._long_for(sequence) if count else None
        return count if long is None else min(count, long.room(sequence, self._others(sequence)))

    def _long_for(self, sequence: Sequence) -> LongSequences | None:
        """Who gives this sequence its room, if it is larger than the device."""
        return self.long if self.long is not None and self.long.is_long(sequence) else None

    def _others(self, sequence: Sequence) -> int:
        """Sequences beside this one that hold or want blocks."""
        beside = len(self.running) + len(self.restoring) + len(self.waiting[:2])
        return beside - (sequence.state is not SequenceState.RESTORING)

    def _needs(self, sequence: Sequence, count: int) -> tuple[int, bool]:
        """(blocks behind its table, whether the one it writes next needs a private copy) for the next tokens."""
        table = sequence.block_table
        first = sequence.num_scheduled // self.blocks.block_tokens
        copies = first < len(table) and self.blocks.must_copy(table[first])
        return max(0, self.blocks.blocks_for(sequence.num_scheduled + count) - len(table)), copies

    def _grow(self, sequence: Sequence, count: int, batch: Batch) -> bool:
        """Blocks for the next `count` tokens, private where they are written. False, nothing changed, when too few."""
        table = sequence.block_table
        first = sequence.num_scheduled // self.blocks.block_tokens
        fresh, copies = self._needs(sequence, count)
        if (long := self._long_for(sequence)) is not None:
            blocks = long.make_room(sequence, fresh + copies, self._others(sequence), batch)
        else:
            blocks = self.blocks.allocate(fresh + copies)
        if blocks is None:
            return False
        if copies:
            source, table[first] = table[first], blocks.pop(0)
            self._hold([source], batch)  # no load may write it before the step is booked
            batch.copies.append((source, table[first]))
            batch.block_updates.append((sequence.row, first, [table[first]]))
        if blocks:
            batch.block_updates.append((sequence.row, len(table), blocks))
            table.extend(blocks)
        return True

    def _hold(self, blocks: list[int], batch: Batch) -> None:
        """References that a sequence had belong to a batch until it is booked."""
        self.blocks.become_held(blocks)
        self._held += blocks
        batch.held += blocks

    def _preempt(self, sequence: Sequence) -> None:
        (self.running if sequence.state is SequenceState.RUNNING else self.restoring).remove(sequence)
        if self.tiers is not None and sequence.state is SequenceState.RESTORING:
            self.tiers.forget(sequence)
        self.blocks.release(sequence.drop_progress())
        self._free_rows.append(sequence.row)
        sequence.row = -1
        sequence.num_preemptions += 1
        sequence.state = SequenceState.WAITING
        self._counts["num_preemptions"] += 1
        bisect.insort(self.waiting, sequence, key=_order)

    # ---------------------------------------------------------------- admission

    def _admit(self, batch: Batch, now: float) -> None:
        index = passed = 0
        while index < len(self.waiting) and self._free_rows:
            if batch.num_tokens >= self.config.max_num_batched_tokens:
                return
            sequence = self.waiting[index]
            if sequence.waits_for_parent:
                index += 1
                continue
            turn = _Turn.NO_ROOM
            if not sequence.num_in_flight:
                turn = self._start(sequence, batch, now, is_next=passed == 0)
            passed += turn is _Turn.WAITS
            if turn is _Turn.NO_ROOM or passed > MAX_PASSED:
                return
            if turn is _Turn.WAITS:
                index += 1
                continue
            del self.waiting[index]
            bisect.insort(self.running if turn is _Turn.STARTED else self.restoring, sequence, key=_order)

    def _start(self, sequence: Sequence, batch: Batch, now: float, *, is_next: bool) -> _Turn:
        """Give a waiting sequence its cached blocks, a row, and a place in the batch, or begin to restore what lower
        tiers have of it. WAITS, NO_ROOM: it holds nothing.
        """
        if sequence.outgrew_rope:
            self._switch_rope(sequence)
        shared = self._shareable(sequence)
        if len(shared) * self.blocks.block_tokens >= sequence.num_tokens and self.blocks.is_below(shared[-1]):
            del shared[-1]  # it would be written, which only blocks of the device can be
        num_cached = min(len(shared) * self.blocks.block_tokens, sequence.num_tokens - 1)
        below: int | None = 0
        if self.tiers is not None:
            below = self.tiers.restorable(sequence, *self._missing(sequence, shared), now, is_next=is_next)
        if below is None:
            return _Turn.WAITS
        keep_free = len(self.running)  # a step of growth for those that run, so that admission does not preempt them
        needed = self.blocks.blocks_for(sequence.num_tokens) - num_cached // self.blocks.block_tokens
        if (long := self._long_for(sequence)) is not None:
            needed = long.admission_blocks(needed, shared)
        available = self.blocks.num_free - self.blocks.num_unreferenced(shared)
        alone = not self.running and not self.restoring
        if needed + keep_free > available and (not alone or needed > available):
            return _Turn.NO_ROOM
        self.blocks.acquire(shared)
        sequence.block_table = list(shared)
        sequence.row = self._free_rows.pop()
        sequence.num_computed = sequence.num_scheduled = num_cached
        sequence.num_sealed = num_cached // self.blocks.block_tokens
        if self.tiers is not None:
            if self._restore(sequence, below, self.tiers, now):
                sequence.state = SequenceState.RESTORING
                return _Turn.RESTORING
            self.tiers.forget(sequence)
        self._run(sequence, batch, now)
        count = self._chunk(sequence, batch)
        if not self._grow(sequence, count, batch):
            raise InvariantViolation("admission counted more free blocks than there are")
        self._counts["prompt_tokens"] += append_tokens(batch, sequence, count)
        return _Turn.STARTED

    def _switch_rope(self, sequence: Sequence) -> None:
        if self.tiers is not None:  # what is kept of it was rotated by the short frequencies
            self.tiers.chain_ended(sequence)
        sequence.switch_rope()

    def _restore(self, sequence: Sequence, below: int, tiers: Tiering, now: float) -> bool:
        """Begin to bring back blocks and the growing one put away at preemption; False when there are none."""
        stashed = tiers.stashes.tokens(sequence) > 0
        if not (below or stashed):
            return False
        if (blocks := self.blocks.allocate(below + stashed)) is None:
            raise InvariantViolation("admission counted more free blocks than there are")
        tail = blocks.pop() if stashed else None
        tiers.begin(sequence, len(sequence.block_table), blocks, tail, now)
        return True

    def _resume_restored(self, batch: Batch, tiers: Tiering, now: float) -> None:
        """Sequences whose blocks are in, or that wait no longer for them, go on."""
        for sequence in list(self.restoring):
            restored = tiers.restored(sequence, now)
            if restored is None:
                continue
            table, first = sequence.block_table, len(sequence.block_table)
            table.extend(restored.blocks)
            for index, block in enumerate(restored.blocks, first):
                self.blocks.seal(block, sequence.keys[index], index, below=tiers.is_below(sequence, index))
            sequence.num_sealed = len(table)
            computed = len(table) * self.blocks.block_tokens
            if restored.tail is not None:
                table.append(restored.tail)
                computed = restored.tail_tokens
            sequence.num_computed = sequence.num_scheduled = computed
            self.restoring.remove(sequence)
            self._run(sequence, batch, now)
            bisect.insort(self.running, sequence, key=_order)

    def _run(self, sequence: Sequence, batch: Batch, now: float) -> None:
        """A sequence with its row and what it has of its blocks runs from now on."""
        sequence.state = SequenceState.RUNNING
        if sequence.block_table:
            batch.block_updates.append((sequence.row, 0, list(sequence.block_table)))
        if sequence.cached_tokens is None:
            cached = sequence.num_computed
            _, host, nvme = sequence.cached_by_tier
            sequence.cached_tokens, sequence.cached_by_tier = cached, (cached - host - nvme, host, nvme)
            if sequence.fork_of is None:
                self._counts["prefix_query_tokens"] += len(sequence.request.token_ids)
                self._counts["prefix_hit_tokens"] += cached
                if self.tiers is not None:
                    self.tiers.counts.add(host_hit_tokens=host, nvme_hit_tokens=nvme)
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = now
        batch.new_rows.append(RowState.of(sequence))

    def _missing(self, sequence: Sequence, shared: list[int] | None = None) -> tuple[int, list[bytes]]:
        """(blocks of its prefix that the device has, keys of the full ones behind them); no keys when lower tiers are
        not to be asked for them. shared: what `_shareable` says, if it was asked already.
        """
        forks = sequence.fork_of is not None and not sequence.num_preemptions
        if (
            self._long_for(sequence)
            or forks
            or sequence.outgrew_rope
            or sequence.prompt_logprobs
            or not self.blocks.enable_prefix_caching
        ):
            return 0, []
        first = len(self._shareable(sequence) if shared is None else shared)
        full = (sequence.num_tokens - 1) // self.blocks.block_tokens
        return first, sequence.keys[first:full]

    def _shareable(self, sequence: Sequence) -> list[int]:
        """Blocks a starting sequence may share: its parent's prompt when it is a fork, else a cached prefix, of which
        at least one token is always left to compute, because its logits are needed.
        """
        parent = sequence.fork_of
        forks = parent is not None and not sequence.num_preemptions and parent.rope_offset == sequence.rope_offset
        if parent is not None and forks and parent.state is SequenceState.RUNNING:
            return parent.block_table[: self.blocks.blocks_for(sequence.num_prompt)]
        if sequence.prompt_logprobs is not None or not self.blocks.enable_prefix_caching:
            return []
        full = (sequence.num_tokens - 1) // self.blocks.block_tokens
        sequence.extend_keys(full, self.blocks.block_tokens)
        long = self._long_for(sequence)
        return self.blocks.match(sequence.keys[:full]) if long is None else long.match(sequence.keys[:full])

    # ---------------------------------------------------------------- results

    def postprocess(self, batch: Batch, result: StepResult, now: float) -> list[RequestOutput]:
        """Book a finished batch: seal full blocks, append tokens, end what is done. Outputs are in batch order."""
        outputs: list[RequestOutput] = []
        self._observe(batch, now)
        if self.long is not None:
            self.long.observe(result)
        book_prompt_logprobs(batch, result)
        tokens = dict(zip(batch.sampling, range(len(result.token_ids)), strict=True))
        for index, entry in enumerate(batch.entries):
            sequence = entry.sequence
            sequence.num_in_flight -= 1
            position = tokens.get(index)
            if position is not None:
                sequence.num_pending -= 1
            if sequence.state is SequenceState.FINISHED:
                self._release_drained(sequence)
                continue
            if index in result.lost or entry.epoch <= sequence.lost_epoch:
                outputs += self._lose(entry, result.lost.get(index, frozenset()))
                continue
            if entry.epoch == sequence.epoch:
                sequence.num_computed += entry.count
            if position is not None:
                sequence.token_ids.append(result.token_ids[position])
            if entry.epoch == sequence.epoch:
                self._seal(sequence)
            self._counts["generation_tokens"] += position is not None
            output = output_of(sequence, position, result, now, self.eos_token_ids)
            if output is None:
                continue
            outputs.append(output)
            if output.finish_reason is not None:
                self._finish(sequence, output.finish_reason)
        return outputs

    def _lose(self, entry: BatchEntry, lost: frozenset[int]) -> list[RequestOutput]:
        """Blocks below that a step of a sequence needed could not be read: it is computed again from its tokens."""
        sequence = entry.sequence
        sequence.num_losses += bool(lost)
        sequence.lost_epoch = max(sequence.lost_epoch, entry.epoch)
        if sequence.num_losses > MAX_LOSSES:
            self._finish(sequence, "error")
            problem = f"KV that lay below the device was lost {sequence.num_losses} times; see the log and the disk"
            return [RequestOutput(sequence.request.request_id, sequence.index, [], "error", error=problem)]
        if sequence.epoch == entry.epoch and sequence.state is SequenceState.RUNNING:
            self._preempt(sequence)
        return []

    def _observe(self, batch: Batch, now: float) -> None:
        """A step is over: what it copied from is free, and what it cost is known."""
        del self._held[: len(batch.held)]  # batches are booked in the order they were made
        self.blocks.release_held(batch.held)
        self._step_s = now - max(batch.scheduled_at, self._booked_at)
        self._booked_at = now
        if self.tiers is not None:
            self.tiers.observe(batch, self._step_s)

    def _seal(self, sequence: Sequence) -> None:
        if not self.blocks.enable_prefix_caching:
            return
        full = sequence.num_computed // self.blocks.block_tokens
        if full > sequence.num_sealed:
            sequence.extend_keys(full, self.blocks.block_tokens)
            for index in range(sequence.num_sealed, full):
                below = self.tiers is not None and self.tiers.is_below(sequence, index)
                self.blocks.seal(sequence.block_table[index], sequence.keys[index], index, below=below)
            sequence.num_sealed = full

    def _finish(self, sequence: Sequence, reason: str) -> None:
        of_state = {SequenceState.RUNNING: self.running, SequenceState.RESTORING: self.restoring}
        of_state.get(sequence.state, self.waiting).remove(sequence)
        if self.tiers is not None:
            self.tiers.ended(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        self._draining.append(sequence)
        self._release_drained(sequence)

    def _release_drained(self, sequence: Sequence) -> None:
        if sequence.num_in_flight:
            return
        self.blocks.release(sequence.drop_progress())
        if sequence.row >= 0:
            self._free_rows.append(sequence.row)
            sequence.row = -1
        self._draining.remove(sequence)

    def validate(self) -> None:
        """Recount everything: sequences, rows, blocks, order. Raises InvariantViolation."""
        lists = {
            SequenceState.WAITING: self.waiting,
            SequenceState.RESTORING: self.restoring,
            SequenceState.RUNNING: self.running,
        }
        held = [self._held, *(() if self.tiers is None else self.tiers.held())]
        validate_lists(lists, self._draining, self.blocks, held, self._free_rows, self.config.max_num_seqs)
        if self.tiers is not None:
            self.tiers.validate()
