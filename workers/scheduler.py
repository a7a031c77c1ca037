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
from tournant.workers.batch import UNKNOWN_TOKEN, Batch, BatchEntry, RowState, StepResult
from tournant.workers.block_manager import BlockManager
from tournant.workers.config import EngineConfig
from tournant.workers.messages import EngineStats, RequestOutput, TierStats
from tournant.workers.sequence import Sequence, SequenceState
from tournant.workers.stage_turns import held_back, num_turns
from tournant.workers.step_outputs import output_of
from tournant.workers.tiering import Tiering

MAX_PASSED = 16  # sequences that wait for word from lower tiers while others behind them start
MIN_SHARED_CHUNK = 32  # tokens a prefill gets at least when it shares a step with others
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
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: list[Sequence] = []  # sorted by `order`
        self.running: list[Sequence] = []  # sorted by `order`
        self.restoring: list[Sequence] = []  # sorted by `order`
        self._draining: list[Sequence] = []  # ended, but a batch in flight still writes to their blocks
        self._turns = num_turns(config)
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._step = 0
        self._copied_from: list[int] = []  # sources of batches that are not booked yet
        self._unsent: Batch | None = None  # new rows and their tables that no step has carried yet
        self._booked_at = self._step_s = 0.0
        self._counts = dict.fromkeys(
            ("num_preemptions", "prefix_query_tokens", "prefix_hit_tokens", "prompt_tokens", "generation_tokens"), 0
        )

    # ---------------------------------------------------------------- requests

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises InvariantViolation if it could never run in this pool."""
        if self.blocks.blocks_for(max(sequence.num_prompt, sequence.max_total - 1)) > self.blocks.num_blocks:
            raise InvariantViolation(f"a sequence of {sequence.max_total} tokens does not fit the pool")
        bisect.insort(self.waiting, sequence, key=_order)

    def abort(self, sequence: Sequence, reason: str = "abort") -> None:
        """End a sequence now; blocks that a batch in flight still writes come back when it is done."""
        if sequence.state is not SequenceState.FINISHED:
            self._finish(sequence, reason)

    def give_up(self, reason: str) -> None:
        """End every sequence at once; no batch in flight will be booked any more (they failed or were dropped)."""
        self.blocks.release_held(self._copied_from)
        self._copied_from.clear()
        self._unsent = None
        for sequence in self.waiting + self.restoring + self.running + self._draining:
            sequence.num_in_flight = sequence.num_pending = 0
            if sequence.state is SequenceState.FINISHED:
                self._release_drained(sequence)
            else:
                self._finish(sequence, reason)

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
                if sum(self._needs(sequence, count)) <= self.blocks.num_free + self.blocks.num_coming:
                    count = 0  # copies under way give enough of them back in a moment
                    break
                victim = max(self.running[-1:] + self.restoring[-1:], key=_order)
                if victim.state is SequenceState.RUNNING and self.tiers is not None:
                    self.tiers.preempted(victim, now)
                self._preempt(victim)
                preempted = True
                if victim is sequence:
                    count = 0
            if count:
                self._append(batch, sequence, count)
        return preempted

    def _chunk(self, sequence: Sequence, batch: Batch, reserved: int = 0) -> int:
        """Tokens of this sequence in this batch, `reserved` ones left for decodes that come later in the order.

        A long prompt leaves half of a step to others, so that a short one behind it need not wait for its end.
        """
        wanted = 0 if sequence.outgrew_rope else sequence.num_to_schedule
        room = self.config.max_num_batched_tokens - batch.num_tokens
        if wanted > 1:
            room -= reserved
        if wanted > 1 and len(self.waiting) + len(self.running) > 1:
            room = min(room, max(self.config.max_num_batched_tokens // 2, MIN_SHARED_CHUNK))
        return max(0, min(wanted, room))

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
        if fresh + copies > self.blocks.num_free:
            return False
        if copies:
            self.blocks.hold(table[first : first + 1])  # until the step is booked: no load may write it before
            pair = self.blocks.replace_for_write(table, first)
            if pair is None:
                raise InvariantViolation("a free block vanished between the check and its use")
            batch.copies.append(pair)
            self._copied_from.append(pair[0])
            batch.block_updates.append((sequence.row, first, [table[first]]))
        if fresh > 0:
            blocks = self.blocks.allocate(fresh)
            if blocks is None:
                raise InvariantViolation("free blocks vanished between the check and their use")
            batch.block_updates.append((sequence.row, len(table), blocks))
            table.extend(blocks)
        return True

    def _append(self, batch: Batch, sequence: Sequence, count: int) -> None:
        start, known = sequence.num_scheduled, len(sequence.token_ids)
        end = start + count
        samples = end == sequence.num_tokens and sequence.num_tokens < sequence.max_total
        entry = BatchEntry(sequence, sequence.epoch, start, count, samples)
        index = len(batch.entries)
        batch.entries.append(entry)
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
        self._counts["prompt_tokens"] += max(0, min(end, sequence.num_prompt) - start)

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
            if self._must_wait_for_parent(sequence):
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

    @staticmethod
    def _must_wait_for_parent(sequence: Sequence) -> bool:
        parent = sequence.fork_of
        if parent is None or sequence.num_preemptions:
            return False
        if parent.state in (SequenceState.WAITING, SequenceState.RESTORING):
            return parent.num_preemptions == 0
        return parent.state is SequenceState.RUNNING and parent.num_computed < parent.num_prompt

    def _start(self, sequence: Sequence, batch: Batch, now: float, *, is_next: bool) -> _Turn:
        """Give a waiting sequence its cached blocks, a row, and a place in the batch, or begin to restore what lower
        tiers have of it. WAITS, NO_ROOM: it holds nothing.
        """
        if sequence.outgrew_rope:
            self._switch_rope(sequence)
        shared = self._shareable(sequence)
        num_cached = min(len(shared) * self.blocks.block_tokens, sequence.num_tokens - 1)
        below: int | None = 0
        if self.tiers is not None:
            below = self.tiers.restorable(sequence, *self._missing(sequence, shared), now, is_next=is_next)
        if below is None:
            return _Turn.WAITS
        keep_free = len(self.running)  # a step of growth for those that run, so that admission does not preempt them
        needed = self.blocks.blocks_for(sequence.num_tokens) - num_cached // self.blocks.block_tokens
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
        self._append(batch, sequence, count)
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
        if forks or sequence.outgrew_rope or sequence.prompt_logprobs or not self.blocks.enable_prefix_caching:
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
        return self.blocks.match(sequence.keys[:full])

    # ---------------------------------------------------------------- results

    def postprocess(self, batch: Batch, result: StepResult, now: float) -> list[RequestOutput]:
        """Book a finished batch: seal full blocks, append tokens, end what is done. Outputs are in batch order."""
        outputs: list[RequestOutput] = []
        self._observe(batch, now)
        for index, _, _ in batch.prompt_logprobs:
            entry = batch.entries[index]
            prompt_logprobs = entry.sequence.prompt_logprobs
            if prompt_logprobs is not None:
                following = range(entry.start + 1, len(prompt_logprobs))  # a chunk may reach beyond the prompt
                for place, item in zip(following, result.prompt_logprobs[index], strict=False):
                    prompt_logprobs[place] = item
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
            if entry.epoch == sequence.epoch:
                sequence.num_computed += entry.count
                if position is not None:
                    sequence.token_ids.append(result.token_ids[position])
                self._seal(sequence)
            elif position is not None:
                sequence.token_ids.append(result.token_ids[position])
            self._counts["generation_tokens"] += position is not None
            output = output_of(sequence, position, result, now, self.eos_token_ids)
            if output is None:
                continue
            outputs.append(output)
            if output.finish_reason is not None:
                self._finish(sequence, output.finish_reason)
        return outputs

    def _observe(self, batch: Batch, now: float) -> None:
        """A step is over: what it copied from is free, and what it cost is known."""
        sources = [source for source, _ in batch.copies]
        del self._copied_from[: len(sources)]  # batches are booked in the order they were made
        self.blocks.release_held(sources)
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

    # ---------------------------------------------------------------- checks

    def validate(self) -> None:
        """Recount everything: sequences, rows, blocks, order. Raises InvariantViolation."""
        everyone = self.waiting + self.restoring + self.running + self._draining
        for sequence in everyone:
            sequence.validate(self.blocks.block_tokens)
        held = [self._copied_from, *(() if self.tiers is None else self.tiers.held())]
        self.blocks.validate((sequence.block_table for sequence in everyone), held)
        if self.tiers is not None:
            self.tiers.validate()
        rows = self._free_rows + [s.row for s in everyone if s.row >= 0]
        if sorted(rows) != list(range(self.config.max_num_seqs)):
            raise InvariantViolation(f"rows {sorted(rows)} are not each free or held once")
        for sequences in (self.waiting, self.restoring, self.running):
            if sorted(sequences, key=_order) != sequences:
                raise InvariantViolation("waiting, restoring or running sequences are out of order")
        if any(s.state is not SequenceState.WAITING or s.block_table for s in self.waiting):
            raise InvariantViolation("a waiting sequence holds blocks")
        if any(s.state is not SequenceState.RUNNING for s in self.running) or any(
            s.state is not SequenceState.RESTORING for s in self.restoring
        ):
            raise InvariantViolation("a sequence in the list of running or restoring ones is in another state")
