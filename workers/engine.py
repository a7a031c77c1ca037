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
from typing import Protocol

from tournant.workers.batch import Batch, PendingStep
from tournant.workers.block_manager import BlockManager
from tournant.workers.config import EngineConfig
from tournant.workers.messages import EngineInfo, EngineRequest, EngineStats, RequestOutput
from tournant.workers.scheduler import Scheduler
from tournant.workers.sequence import RopeSwitch, Sequence


class Runner(Protocol):
    """What the engine needs of a device side; see `ModelRunner`. num_in_flight: batches worth giving it at a time."""

    @property
    def num_in_flight(self) -> int: ...

    def run(self, batch: Batch) -> PendingStep:
        """Begin one batch; batches are carried out in the order of calls."""


class Engine:
    """A scheduler and a runner. With two batches in flight the second is scheduled while the first runs.

    info: the limits of pool and model, the same that frontends are told.
    """

    def __init__(self, config: EngineConfig, runner: Runner, info: EngineInfo) -> None:
        self.config = config
        self.runner = runner
        self.info = info
        num_blocks = info.pool_tokens // info.block_tokens
        blocks = BlockManager(num_blocks, info.block_tokens, enable_prefix_caching=config.enable_prefix_caching)
        self.scheduler = Scheduler(config, blocks, info.eos_token_ids)
        self._in_flight: deque[tuple[Batch, PendingStep]] = deque()
        self._most_in_flight = config.num_in_flight or runner.num_in_flight
        self._sequences: dict[int, list[Sequence]] = {}
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """True while a step could do something."""
        return self.scheduler.has_work or bool(self._in_flight)

    def stats(self) -> EngineStats:
        """Counters and gauges of the scheduler."""
        return self.scheduler.stats()

    def step(self) -> list[RequestOutput]:
        """One turn of the loop: schedule a batch, start it, book the oldest one that is in flight."""
        batch = self.scheduler.schedule(time.monotonic())
        if batch is not None:
            self._in_flight.append((batch, self.runner.run(batch)))
        if not self._in_flight or (batch is not None and len(self._in_flight) < self._most_in_flight):
            return []
        done, pending = self._in_flight.popleft()
        return self._forget_finished(self.scheduler.postprocess(done, pending.result(), time.monotonic()))

    def add_request(self, request: EngineRequest) -> list[RequestOutput]:
        """Queue all answers of a request; returns "error" outputs instead when it can never run."""
        problem = self._problem(request)
        if problem is not None:
            return [
                RequestOutput(request.request_id, index, [], "error", error=problem)
                for index in range(request.params.n)
            ]
        request = self._with_own_keys(request)
        num_prompt, info = len(request.token_ids), self.info
        room = info.max_sequence_tokens - num_prompt
        wanted = room if request.params.max_tokens is None else min(request.params.max_tokens, room)
        seed = request.params.seed if request.params.seed is not None else secrets.randbits(63)
        sequences: list[Sequence] = []
        for index in range(request.params.n):
            self._arrivals += 1
            sequence = Sequence(
                request,
                index,
                self._arrivals,
                num_prompt + wanted,
                seed,
                request.namespace_digest,
                self._rope_switch(request),
                time.monotonic(),
                fork_of=sequences[0] if sequences else None,
            )
            self.scheduler.add(sequence)
            sequences.append(sequence)
        self._sequences[request.request_id] = sequences
        return []

    def abort(self, request_id: int) -> None:
        """End a request without further outputs. Unknown ids are ignored."""
        for sequence in self._sequences.pop(request_id, []):
            self.scheduler.abort(sequence)

    def abort_answer(self, request_id: int, index: int) -> None:
        """End one answer of a request without further outputs; the others go on. Unknown ones are ignored."""
        sequences = self._sequences.get(request_id, [])
        if index < len(sequences):
            self.scheduler.abort(sequences[index])
            self._forget_if_finished(request_id)

    def fail_all(self, error: str) -> list[RequestOutput]:
        """End everything with "error" after a failed step; batches in flight are given up."""
        self._in_flight.clear()
        outputs = [
            RequestOutput(request_id, sequence.index, [], "error", error=error)
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
        num_prompt, limit = len(request.token_ids), self.info.max_sequence_tokens
        if num_prompt == 0:
            return "the prompt has no tokens; at least one is needed"
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
        return EngineRequest(
            request.request_id, request.token_ids, request.params, keys, digest, request.cache_salt, request.priority
        )

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
