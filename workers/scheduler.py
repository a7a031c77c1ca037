"""Which tokens are computed in the next step: continuous batching, chunked prefill, preemption, admission.

Owns the waiting and running lists and calls every mutator of `Sequence`. Does no I/O and reads no clock: time is an
argument. Runs ahead of the device: a batch may be scheduled while earlier ones run, so the last token of a sequence may
be unknown (`num_pending`); what such a batch wrote for a sequence that was preempted or ended meanwhile is dropped.

Invariants (checked by `validate`):
 1. A waiting sequence holds no blocks and no row, so nothing that waits can keep others from running.
 2. The most important running sequence is never preempted for another; every sequence fits the pool by itself (`add`
    checks), so it always finishes: no deadlock.
 3. Admission is in order (priority, arrival); only a fork waiting for its parent's prompt may be passed.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from tournant.kvstore.errors import InvariantViolation
from tournant.workers.batch import UNKNOWN_TOKEN, Batch, BatchEntry, RowState, StepResult
from tournant.workers.block_manager import BlockManager
from tournant.workers.config import EngineConfig
from tournant.workers.messages import EngineStats, RequestOutput
from tournant.workers.sequence import Sequence, SequenceState

MIN_SHARED_CHUNK = 32  # tokens a prefill gets at least when it shares a step with others


class Scheduler:
    """Decides batches and digests their results. Not thread-safe; one engine loop drives it.

    eos_token_ids end an answer unless its request ignores them.
    """

    def __init__(self, config: EngineConfig, blocks: BlockManager, eos_token_ids: Iterable[int]) -> None:
        self.config = config
        self.blocks = blocks
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: list[Sequence] = []  # sorted by `order`
        self.running: list[Sequence] = []  # sorted by `order`
        self._draining: list[Sequence] = []  # ended, but a batch in flight still writes to their blocks
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._step = 0
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
        for sequence in self.waiting + self.running + self._draining:
            sequence.num_in_flight = sequence.num_pending = 0
            if sequence.state is SequenceState.FINISHED:
                self._release_drained(sequence)
            else:
                self._finish(sequence, reason)

    @property
    def has_work(self) -> bool:
        """True while any sequence is not finished."""
        return bool(self.waiting or self.running)

    def stats(self) -> EngineStats:
        """Counters since the start and gauges of now."""
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_used=self.blocks.num_blocks - self.blocks.num_free,
            kv_total=self.blocks.num_blocks,
            kv_cached=self.blocks.num_reusable,
            num_steps=self._step,
            **self._counts,
        )

    # ---------------------------------------------------------------- schedule

    def schedule(self, now: float) -> Batch | None:
        """The next batch, or None when nothing can be computed before a batch in flight returns. `now` in seconds."""
        batch = Batch(step=self._step + 1)
        preempted = self._schedule_running(batch)
        if not preempted:
            self._admit(batch, now)
        if not batch.entries:
            return None
        self._step += 1
        return batch

    def _schedule_running(self, batch: Batch) -> bool:
        preempted = False
        index = 0
        decodes = sum(sequence.num_to_schedule == 1 for sequence in self.running)
        while index < len(self.running):
            sequence = self.running[index]
            if sequence.outgrew_rope and not sequence.num_in_flight:
                self._preempt(sequence)
                sequence.switch_rope()
                continue
            index += 1
            decodes -= sequence.num_to_schedule == 1
            count = self._chunk(sequence, batch, reserved=decodes)
            while count and not self._grow(sequence, count, batch):
                victim = self.running[-1]
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

    def _grow(self, sequence: Sequence, count: int, batch: Batch) -> bool:
        """Blocks for the next `count` tokens, private where they are written. False, nothing changed, when too few."""
        table = sequence.block_table
        first = sequence.num_scheduled // self.blocks.block_tokens
        copies = first < len(table) and self.blocks.must_copy(table[first])
        fresh = self.blocks.blocks_for(sequence.num_scheduled + count) - len(table)
        if fresh + copies > self.blocks.num_free:
            return False
        if copies:
            pair = self.blocks.replace_for_write(table, first)
            if pair is None:
                raise InvariantViolation("a free block vanished between the check and its use")
            batch.copies.append(pair)
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
        self.blocks.release(sequence.drop_progress())
        self._free_rows.append(sequence.row)
        sequence.row = -1
        sequence.num_preemptions += 1
        sequence.state = SequenceState.WAITING
        self._counts["num_preemptions"] += 1
        self.running.remove(sequence)
        bisect.insort(self.waiting, sequence, key=_order)

    # ---------------------------------------------------------------- admission

    def _admit(self, batch: Batch, now: float) -> None:
        index = 0
        while index < len(self.waiting) and self._free_rows:
            if batch.num_tokens >= self.config.max_num_batched_tokens:
                return
            sequence = self.waiting[index]
            if self._must_wait_for_parent(sequence):
                index += 1
                continue
            if sequence.num_in_flight or not self._start(sequence, batch, now):
                return
            del self.waiting[index]
            bisect.insort(self.running, sequence, key=_order)

    @staticmethod
    def _must_wait_for_parent(sequence: Sequence) -> bool:
        parent = sequence.fork_of
        if parent is None or sequence.num_preemptions:
            return False
        if parent.state is SequenceState.WAITING:
            return parent.num_preemptions == 0
        return parent.state is SequenceState.RUNNING and parent.num_computed < parent.num_prompt

    def _start(self, sequence: Sequence, batch: Batch, now: float) -> bool:
        """Give a waiting sequence its cached blocks, a row, and a place in the batch. False: nothing has changed."""
        if sequence.outgrew_rope:
            sequence.switch_rope()
        shared = self._shareable(sequence)
        num_cached = min(len(shared) * self.blocks.block_tokens, sequence.num_tokens - 1)
        keep_free = len(self.running)  # a step of growth for those that run, so that admission does not preempt them
        needed = self.blocks.blocks_for(sequence.num_tokens) - num_cached // self.blocks.block_tokens
        available = self.blocks.num_free - self.blocks.num_unreferenced(shared)
        if needed + keep_free > available and (self.running or needed > available):
            return False
        self.blocks.acquire(shared)
        sequence.block_table = list(shared)
        sequence.row = self._free_rows.pop()
        sequence.num_computed = sequence.num_scheduled = num_cached
        sequence.num_sealed = num_cached // self.blocks.block_tokens
        sequence.state = SequenceState.RUNNING
        if shared:
            batch.block_updates.append((sequence.row, 0, list(shared)))
        if sequence.cached_tokens is None:
            sequence.cached_tokens = num_cached
            if sequence.fork_of is None:
                self._counts["prefix_query_tokens"] += sequence.num_prompt
                self._counts["prefix_hit_tokens"] += num_cached
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = now
        batch.new_rows.append(
            RowState(
                sequence.row,
                list(sequence.token_ids),
                sequence.num_prompt,
                sequence.params,
                sequence.seed,
                sequence.index,
            )
        )
        count = self._chunk(sequence, batch)
        if not self._grow(sequence, count, batch):
            raise InvariantViolation("admission counted more free blocks than there are")
        self._append(batch, sequence, count)
        return True

    def _shareable(self, sequence: Sequence) -> list[int]:
        """Blocks a starting sequence may share: its parent's prompt when it is a fork, else a cached prefix.

        At least one token is always left to compute, because its logits are needed.
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
        for index, _, _ in batch.prompt_logprobs:
            entry = batch.entries[index]
            prompt_logprobs = entry.sequence.prompt_logprobs
            if prompt_logprobs is not None:
                for offset, item in enumerate(result.prompt_logprobs[index]):
                    prompt_logprobs[entry.start + offset + 1] = item
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
            output = self._output(sequence, position, result, now)
            if output is not None:
                outputs.append(output)
        return outputs

    def _seal(self, sequence: Sequence) -> None:
        if not self.blocks.enable_prefix_caching:
            return
        full = sequence.num_computed // self.blocks.block_tokens
        if full > sequence.num_sealed:
            sequence.extend_keys(full, self.blocks.block_tokens)
            for index in range(sequence.num_sealed, full):
                self.blocks.seal(sequence.block_table[index], sequence.keys[index])
            sequence.num_sealed = full

    def _output(self, sequence: Sequence, position: int | None, result: StepResult, now: float) -> RequestOutput | None:
        if position is None:
            if sequence.max_total > sequence.num_prompt or sequence.num_computed < sequence.num_prompt:
                return None
            output = RequestOutput(sequence.request.request_id, sequence.index, [], "length")  # max_tokens = 0
        else:
            token = result.token_ids[position]
            self._counts["generation_tokens"] += 1
            output = RequestOutput(sequence.request.request_id, sequence.index, [token])
            if position in result.logprobs:
                output.logprobs = [result.logprobs[position]]
            output.finish_reason = self._finish_reason(sequence, token)
            if output.finish_reason == "stop":
                output.stop_token = token
        if not sequence.reported:
            sequence.reported = True
            output.cached_tokens = sequence.cached_tokens
            output.prompt_logprobs = sequence.prompt_logprobs
            started = sequence.first_scheduled_time if sequence.first_scheduled_time is not None else now
            output.queue_ms = (started - sequence.arrival_time) * 1e3
            output.prefill_ms = (now - started) * 1e3
        if output.finish_reason is not None:
            self._finish(sequence, output.finish_reason)
        return output

    def _finish_reason(self, sequence: Sequence, token: int) -> str | None:
        params = sequence.params
        stops = token in params.stop_token_ids or (not params.ignore_eos and token in self.eos_token_ids)
        if stops and sequence.num_generated > params.min_tokens:
            return "stop"
        return "length" if len(sequence.token_ids) >= sequence.max_total else None

    def _finish(self, sequence: Sequence, reason: str) -> None:
        (self.running if sequence.state is SequenceState.RUNNING else self.waiting).remove(sequence)
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
        everyone = self.waiting + self.running + self._draining
        for sequence in everyone:
            sequence.validate(self.blocks.block_tokens)
        self.blocks.validate(sequence.block_table for sequence in everyone)
        rows = self._free_rows + [s.row for s in everyone if s.row >= 0]
        if sorted(rows) != list(range(self.config.max_num_seqs)):
            raise InvariantViolation(f"rows {sorted(rows)} are not each free or held once")
        for sequences in (self.waiting, self.running):
            if sorted(sequences, key=_order) != sequences:
                raise InvariantViolation("waiting or running sequences are out of order")
        if any(s.state is not SequenceState.WAITING or s.block_table for s in self.waiting):
            raise InvariantViolation("a waiting sequence holds blocks")
        if any(s.state is not SequenceState.RUNNING for s in self.running):
            raise InvariantViolation("a sequence in the running list does not run")


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
