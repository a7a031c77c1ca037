"""The loop of a replica: schedule, run, postprocess.

Owns the order of those three and the requests' sequences; decides nothing itself. Knows nothing of processes, sockets
or text: engine_process.py drives it and carries its outputs away.

Guarantees:
 1. Every sequence of an added request yields exactly one output with a finish_reason, unless it is aborted.
 2. A request that cannot run is answered with finish_reason "error" and the numbers, never queued.
 3. When a step fails, all its requests end with "error" and the engine goes on with an empty pool state it can check.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from tournant.workers.batch import Batch, PendingStep
from tournant.workers.block_manager import BlockManager
from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError
from tournant.workers.group_link import GroupLink
from tournant.workers.messages import LOST_DEAD, EngineInfo, EngineRequest, EngineStats, RequestOutput
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.overflow_blocks import OverflowBlocks
from tournant.workers.sampling_params import MAX_N
from tournant.workers.scheduler import Scheduler
from tournant.workers.sequence import RopeSwitch, Sequence
from tournant.workers.step_outputs import end_of_resumed
from tournant.workers.tiering import Tiering
from tournant.workers.transfer_messages import Link

WAIT_POLL_S = 0.05


class Runner(Protocol):
    """What the engine needs of a device side; see `ModelRunner`. num_in_flight: batches worth giving it at a time."""

    @property
    def num_in_flight(self) -> int: ...

    def run(self, batch: Batch) -> PendingStep:
        """Begin one batch; batches are carried out in the order of calls."""


class Engine:
    """A scheduler and a runner. With two batches in flight the second is scheduled while the first runs.

    info: the limits of pool and model, the same that frontends are told; link, offload: the way to the tiers below the
    device and how it is used, None without; clock: in seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        info: EngineInfo,
        link: Link | None = None,
        offload: OffloadConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (link is None) != (offload is None):
            raise ConfigError("an engine with a link to a store needs an OffloadConfig, and the other way round")
        self.config = config
        self.runner = runner
        self.info = info
        num_blocks = info.pool_tokens // info.block_tokens
        caching = config.enable_prefix_caching
        has_tiers, num_below = offload is not None, info.overflow_tokens // info.block_tokens
        blocks = BlockManager(num_blocks, info.block_tokens, enable_prefix_caching=caching, has_tiers=has_tiers)
        if num_below:
            blocks = OverflowBlocks(
                num_blocks, info.block_tokens, num_below, enable_prefix_caching=caching, has_tiers=has_tiers
            )
        self._link = link
        self._tiers = None if offload is None else Tiering(offload, blocks, info.writer_id)
        self._clock = clock
        self._stalled = False  # the last step found nothing to compute
        self.scheduler = scheduler = Scheduler(config, blocks, info.eos_token_ids, self._tiers)
        if self._tiers is not None:
            self._tiers.restores.queues = (scheduler.running, scheduler.restoring, scheduler.waiting)
        self._in_flight: deque[tuple[Batch, PendingStep]] = deque()
        self._most_in_flight = config.num_in_flight or runner.num_in_flight
        if self._tiers is not None:
            self._tiers.restores.least_turns = self._most_in_flight
        self._sequences: dict[int, list[Sequence]] = {}
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """True while a step could do something."""
        return self.scheduler.has_work or bool(self._in_flight)

    @property
    def has_tiers(self) -> bool:
        """Whether there are tiers below the device, which a step without work serves too."""
        return self._tiers is not None

    def wait_s(self) -> float | None:
        """Seconds until a step can do something if nothing happens before: 0 for now, None for never. What may happen:
        a new request, or an event of the link.
        """
        orders = self._tiers is not None and bool(self._tiers.orders)
        if self._in_flight or orders or (self.has_work and not self._stalled):
            return 0.0
        deadline = None if self._tiers is None else self._tiers.next_deadline()
        return None if deadline is None else max(0.0, deadline - self._clock())

    def stats(self) -> EngineStats:
        """Counters and gauges of the scheduler."""
        return self.scheduler.stats(self._clock())

    def step(self) -> list[RequestOutput]:
        """One turn of the loop: take events, schedule a batch, start it, book the oldest one that is in flight."""
        self._take_events()
        batch = self.scheduler.schedule(self._clock())
        self._submit_orders()
        if batch is not None:
            self._in_flight.append((batch, self.runner.run(batch)))
        self._stalled = not self._in_flight
        if not self._in_flight or (batch is not None and len(self._in_flight) < self._most_in_flight):
            return []
        done, pending = self._in_flight.popleft()
        return self._forget_finished(self.scheduler.postprocess(done, pending.result(), self._clock()))

    def _take_events(self) -> None:
        if self._tiers is not None and self._link is not None:
            for event in self._link.take_events():
                self._tiers.on_event(event, self._clock())

    def _submit_orders(self) -> None:
        if self._tiers is not None and self._link is not None and self._tiers.orders:
            self._link.submit(self._tiers.orders)
            self._tiers.orders.clear()

    def attach(self, wait: Callable[[float], object], most_s: float) -> None:
        """Give the store a moment to be there before the first request. wait, most_s: as in `flush`.

        Raises ConfigError when a store refuses this engine and would for ever; one that is not there may come later.
        """
        self._step_until(lambda tiers: tiers.attached or bool(tiers.refusal), wait, most_s)
        if self._tiers is not None and self._tiers.refusal:
            raise ConfigError(f"the node store does not serve this engine: {self._tiers.refusal}")

    def flush(self, wait: Callable[[float], object], most_s: float) -> None:
        """With nothing left to compute: let what is only on the device go down, for at most so long. wait: returns when
        the link has an event or the given seconds have passed.
        """
        self._step_until(lambda tiers: tiers.is_settled, wait, most_s)

    def _step_until(self, reached: Callable[[Tiering], bool], wait: Callable[[float], object], most_s: float) -> None:
        end = self._clock() + most_s
        while self._tiers is not None and not reached(self._tiers) and (left := end - self._clock()) > 0:
            self.step()
            wait(min(left, WAIT_POLL_S))

    def close(self) -> None:
        """End the link; device blocks are not touched afterwards. Idempotent."""
        if self._link is not None:
            self._link.close(0.0)
            self._link = None

    def add_request(self, request: EngineRequest) -> list[RequestOutput]:
        """Queue all answers of a request. Returns "error" outputs instead when it can never run, and the end of an
        answer that is resumed though it was over.
        """
        problem = self._problem(request)
        if problem is not None:
            return [RequestOutput(request.request_id, index, [], "error", error=problem) for index in request.indices]
        request = self._with_own_keys(request)
        num_prompt, info = len(request.token_ids) - request.num_output, self.info
        room = info.max_sequence_tokens - num_prompt
        wanted = room if request.params.max_tokens is None else min(request.params.max_tokens, room)
        seed = request.params.seed if request.params.seed is not None else secrets.randbits(63)
        sequences: list[Sequence] = []
        for index in request.indices:
            self._arrivals += 1
            sequence = Sequence(
                request,
                index,
                self._arrivals,
                num_prompt + wanted,
                seed,
                request.namespace_digest,
                self._rope_switch(request),
                self._clock(),
                fork_of=sequences[0] if sequences else None,
            )
            ended = end_of_resumed(sequence, self.scheduler.eos_token_ids)
            if ended is not None:
                return [ended]
            self.scheduler.add(sequence)
            sequences.append(sequence)
        self._stalled = False
        self._sequences[request.request_id] = sequences
        return []

    def abort(self, request_id: int) -> None:
        """End a request without further outputs. Unknown ids are ignored."""
        for sequence in self._sequences.pop(request_id, []):
            self.scheduler.abort(sequence)
        self._stalled = False

    def abort_answer(self, request_id: int, index: int) -> None:
        """End one answer of a request without further outputs; the others go on. Unknown ones are ignored."""
        for sequence in self._sequences.get(request_id, []):
            if sequence.index == index:
                self.scheduler.abort(sequence)
        self._forget_if_finished(request_id)

    def fail_all(self, error: str) -> list[RequestOutput]:
        """End everything with "error" after a failed step; batches in flight are given up."""
        self._in_flight.clear()
        outputs = [
            RequestOutput(request_id, sequence.index, [], "error", error=error, lost=LOST_DEAD)
            for request_id, sequences in self._sequences.items()
            for sequence in sequences
            if sequence.finish_reason is None
        ]
        self._sequences.clear()
        self.scheduler.give_up(error)
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forget all reusable blocks; False while any block is in use."""
        return self.scheduler.blocks.reset()

    def _problem(self, request: EngineRequest) -> str | None:
        num_tokens, limit = len(request.token_ids), self.info.max_sequence_tokens
        if request.num_output and (request.params.n != 1 or not 0 < request.num_output < num_tokens):
            return f"{request.num_output} of {num_tokens} tokens cannot be the output of {request.params.n} answers"
        if not 0 <= request.first_index <= MAX_N - request.params.n:
            return f"first_index is {request.first_index}; answers are numbered from 0 to {MAX_N - 1}"
        num_prompt = num_tokens - request.num_output
        if num_prompt == 0:
            return "the prompt has no tokens; at least one is needed"
        if request.num_output and num_tokens > limit:
            return f"the answer that is to go on has {num_tokens} tokens; at most {limit} fit"
        wants_token = request.params.max_tokens != 0
        if num_prompt + wants_token > limit:
            return f"the prompt has {num_prompt} tokens; at most {limit - wants_token} fit"
        if min(request.token_ids) < 0 or max(request.token_ids) >= self.info.vocab_size:
            return f"the prompt holds a token id outside 0..{self.info.vocab_size - 1}"
        if isinstance(request.priority, bool) or not isinstance(request.priority, int):
            return f"priority is {request.priority!r}; it must be a whole number"
        if request.request_id in self._sequences:
            return f"request id {request.request_id} is in use"
        return None

    def _rope_switch(self, request: EngineRequest) -> RopeSwitch | None:
        """Where a sequence of this request changes to the long frequencies, None if it never does."""
        info = self.info
        if not info.rope_switch:
            return None
        namespace = info.namespace_for(info.rope_switch + 1).digest(request.cache_salt)
        return RopeSwitch(info.rope_switch, info.max_model_len, namespace)

    def _with_own_keys(self, request: EngineRequest) -> EngineRequest:
        """Keys made in another namespace than ours are dropped; the scheduler makes them anew from the tokens."""
        digest = self.info.namespace_for(len(request.token_ids)).digest(request.cache_salt)
        num_full = len(request.token_ids) // self.scheduler.blocks.block_tokens
        usable = request.namespace_digest == digest and len(request.keys) == num_full
        keys = request.keys if usable else []
        return replace(request, keys=keys, namespace_digest=digest)

    def _forget_finished(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        for output in outputs:
            if output.finish_reason is not None:
                self._forget_if_finished(output.request_id)
        return outputs

    def _forget_if_finished(self, request_id: int) -> None:
        if all(sequence.finish_reason is not None for sequence in self._sequences.get(request_id, [])):
            self._sequences.pop(request_id, None)

    def validate(self) -> None:
        """Check every invariant of scheduler, sequences and blocks; with nothing to do, nothing may be held."""
        self.scheduler.validate()
        if isinstance(self._link, GroupLink):
            self._link.validate()
