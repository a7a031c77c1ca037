"""Runs batches on several ranks at once: the leader tells each batch, every rank carries out its share.

Owns what ranks say to one another about steps. `ParallelRunner` is what an engine on rank 0 drives; `RankServer`
follows it on the others; both hold a `ShardRunner`, the device side of one rank. Who starts ranks, and what happens
when one is lost, is decided elsewhere: here the group ends, and everyone in it says so.

Invariants:
 1. Every rank carries out the same batches in the same order; each message bears its number and the digest of the block
    tables it meant, and a rank that counts or has otherwise ends with InvariantViolation instead of computing.
 2. An order for the store links of ranks keeps its place among the batches: it reaches a rank's link when the rank has
    been given every batch told before, and none told after.
 3. After any failure of a step the group is good for nothing: every later step fails at once, with the first cause.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tournant.kvstore.errors import InvariantViolation
from tournant.workers.batch import UNKNOWN_TOKEN, Batch, PendingStep, StepResult
from tournant.workers.batch_messages import batch_from_wire, batch_to_wire, logprobs_from_wire, logprobs_to_wire
from tournant.workers.config import EngineConfig
from tournant.workers.device import Device
from tournant.workers.forward_input import ForwardInput
from tournant.workers.model_runner import DeviceStep, ModelRunner
from tournant.workers.models.decoder import REVISION
from tournant.workers.models.decoder_config import DecoderConfig
from tournant.workers.models.described import DescribedModel
from tournant.workers.parallel import Shard, ShardTensors, shard_of
from tournant.workers.rank_group import Pipe, RankGroup, RankLost
from tournant.workers.tier_counts import add_counts
from tournant.workers.transfer_messages import Order
from tournant.workers.transfer_wire import order_from_wire, order_to_wire
from tournant.workers.weights import Tensors, load_checkpoint

MAX_RETURNING = 16  # steps whose tokens a rank of stage 0 has not looked at
NO_TOKENS = torch.empty(0, dtype=torch.int64)
NO_LOGPROBS: list[Any] = [[], []]  # on the wire


class ShardRunner(ModelRunner):
    """The device side of one rank: a `ModelRunner` of its share of the model. See `ModelRunner` for errors.

    Every rank of the group constructs one, and then gives `run` the same batches in the same order. One that cannot
    closes the group, so that the others raise RankLost with its reason instead of waiting.
    """

    captures = False  # exchanges between ranks are not captured

    def __init__(
        self, config: EngineConfig, model: DescribedModel, group: RankGroup, device: Device | None = None
    ) -> None:
        self.group = group
        self._returning: deque[_Returning] = deque()
        self._asked: set[int] = set()  # rows that want log-probabilities
        self._untold: dict[str, float] = {}  # what the last stage read below since it last returned a step
        try:
            group.agree("configuration", f"{REVISION} {config}".encode())
            super().__init__(config, model, device)
            group.start()
        except BaseException as error:
            cause = group.first_cause() if isinstance(error, RankLost) else ""
            group.report(error)
            group.close()
            if cause:
                raise RankLost(cause) from error
            raise
        split = self.shard.split
        if split.tensor > 1:  # sums have other bits: what another split wrote is of no use here
            numerics = f"{self.namespace.numerics}/tp{split.tensor}"
            self.namespace = replace(self.namespace, numerics=numerics)

    def read_model(self, model: DescribedModel) -> tuple[DecoderConfig, Tensors]:
        """This rank's share of what is in the folder."""
        self.shard: Shard = shard_of(model.decoder, self.group.member.split, self.group.member.rank)
        return self.shard.config, ShardTensors(load_checkpoint(model.files.folder), self.shard)

    def agreed_blocks(self, num_blocks: int) -> int:
        """The least of all ranks': block ids mean the same on each."""
        return self.group.least(num_blocks)

    def _set_up(self) -> None:
        if self.group.stage is not None:
            self.decoder.join(self.group.stage)
        self.group.wait_for_all()
        super()._set_up()
        if self.inputs.overflow is not None:
            self.inputs.overflow.in_group = True

    @property
    def num_in_flight(self) -> int:
        """At least one batch per stage."""
        stages = self.shard.split.pipeline
        return max(super().num_in_flight, stages)

    @torch.inference_mode()
    def run(self, batch: Batch) -> PendingStep:
        """This rank's share of one batch. What it yields is known on the ranks of the last stage, and on rank 0."""
        pipe = self.group.pipe
        if pipe is None:
            return super().run(batch)
        if self.decoder_config.begins and UNKNOWN_TOKEN in batch.token_ids:
            self.arrive_until()
        step = self.begin(batch)
        residual = None
        if not self.decoder_config.begins:
            shape = (len(step.input_ids), self.decoder_config.hidden_size)
            residual = pipe.receive(shape, self.decoder.dtype, self.device.torch_device)
        hidden = self.decoder.forward(step, self.cache.tensor, kv_scales=self.cache.scales, residual=residual)
        wants = self._wants_logprobs(batch)
        if self.decoder_config.ends:
            pending = self.finish(batch, step, hidden)
            add_counts(self._untold, read_below(step))
            self._return(pipe, pending, wants=wants)
            return pending
        pipe.send_on(hidden)
        if not self.decoder_config.begins:
            return StepResult(token_ids=[])
        returning = _Returning(self, pipe, step, len(batch.sampling), takes_logprobs=wants and self.group.leads)
        self._returning.append(returning)
        if len(self._returning) > MAX_RETURNING:
            self._returning.popleft().arrive()
        return returning

    def _wants_logprobs(self, batch: Batch) -> bool:
        for state in batch.new_rows:
            (self._asked.discard if state.params.logprobs is None else self._asked.add)(state.row)
        return bool(batch.prompt_logprobs) or any(batch.rows[entry] in self._asked for entry in batch.sampling)

    def _return(self, pipe: Pipe, pending: DeviceStep, *, wants: bool) -> None:
        wants = wants and self.group.member.rank % self.shard.split.tensor == 0
        if pending.sampled is not None or wants:
            tokens = NO_TOKENS if pending.sampled is None else pending.sampled.tokens
            pipe.return_step(tokens, logprobs_to_wire(pending.result()) if wants else None, self._untold)
            self._untold.clear()

    def arrive_until(self, last: _Returning | None = None) -> None:
        """Wait for the tokens of steps on their way, in their order, up to this one; of all when it is None."""
        while self._returning and (last is None or not last.arrived):
            self._returning.popleft().arrive()

    def remember(self, step: ForwardInput, tokens: npt.NDArray[np.int64]) -> None:
        """Note tokens int64 [N] that the last stage chose for a step."""
        (moved,) = self.device.upload([tokens])
        self.inputs.remember(step, moved)


def read_below(step: ForwardInput) -> Mapping[str, float]:
    """What a step read of the overflow, see `StepResult.overflow`; when its layers are over."""
    return {} if step.overflow is None else step.overflow.counts()


class _Returning:
    """A step of stage 0 whose tokens are on their way back from the last stage. See `PendingStep`."""

    def __init__(
        self, runner: ShardRunner, pipe: Pipe, step: ForwardInput, count: int, *, takes_logprobs: bool
    ) -> None:
        self._runner = runner
        self._pipe = pipe
        self._step: ForwardInput | None = step
        self._count = count
        self._takes_logprobs = takes_logprobs
        self._result = StepResult(token_ids=[])

    @property
    def arrived(self) -> bool:
        """Whether its tokens are here."""
        return self._step is None

    def arrive(self) -> None:
        """Wait for the tokens and let later steps know them. Idempotent; steps arrive in their order."""
        if self._step is None:
            return
        counts = dict(read_below(self._step))
        if self._count or self._takes_logprobs:
            tokens, logprobs, later = self._pipe.take_step(self._count)
            if self._count:
                with torch.inference_mode():
                    self._runner.remember(self._step, tokens)
            try:
                self._result = logprobs_from_wire(logprobs or NO_LOGPROBS, tokens.tolist())
                add_counts(counts, later)
            except (ValueError, TypeError) as error:
                problem = f"the last stage returned what are no log-probabilities or counts: {error}"
                raise InvariantViolation(problem) from error
        self._result.overflow = counts
        self._step = None

    def result(self) -> StepResult:
        """Wait for the last stage. Raises RankLost."""
        self._runner.arrive_until(self)
        return self._result


class _Guarded:
    """A step of a `ParallelRunner`, whose failure ends the group."""

    def __init__(self, runner: ParallelRunner, pending: PendingStep) -> None:
        self._runner = runner
        self._pending = pending

    def result(self) -> StepResult:
        """Wait for it. Raises RankLost."""
        with self._runner.failing():
            return self._pending.result()


class ParallelRunner:
    """What an engine on rank 0 gives its batches to. See `engine.Runner`."""

    def __init__(self, shard: ShardRunner) -> None:
        self.shard = shard
        self._group = shard.group
        self._number = 0
        self._lost: str | None = None

    @property
    def num_in_flight(self) -> int:
        """Batches worth giving to the group at a time."""
        return self.shard.num_in_flight

    def run(self, batch: Batch) -> PendingStep:
        """Begin one batch on all ranks. Raises RankLost, also when an earlier one has failed."""
        if self._lost is not None:
            raise RankLost(self._lost)
        with self.failing():
            digest = self.shard.inputs.digest(batch)
            self._group.tell(["batch", self._number, digest, batch_to_wire(batch)])
            self._number += 1
            return _Guarded(self, self.shard.run(batch))

    def tell(self, ranks: Sequence[int], orders: Sequence[Order]) -> None:
        """Hand orders to the store links of these ranks, behind all batches so far. Raises RankLost, as `run` does."""
        if self._lost is not None:
            raise RankLost(self._lost)
        with self.failing():
            self._group.tell(["orders", list(ranks), [order_to_wire(order) for order in orders]])

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Within it, any failure is the group's end."""
        try:
            yield
        except Exception as error:
            cause = self._group.first_cause()
            self._lost = f"step {self._number} failed: {cause or error}"
            if isinstance(error, RankLost):
                raise RankLost(self._lost) from error
            raise

    def close(self) -> None:
        """Let the other ranks end, and leave the group."""
        if self._lost is None:
            with contextlib.suppress(RankLost):
                self._group.tell(["end"])
                self._group.settle()
        self._group.close()


class RankServer:
    """Follows the leader on another rank. submit: takes the orders for its store link, if it has one; carry_out: does
    what it is given, in order, now or later.
    """

    def __init__(
        self,
        shard: ShardRunner,
        submit: Callable[[Sequence[Order]], object] | None = None,
        carry_out: Callable[[Callable[[], None]], object] = lambda act: act(),
    ) -> None:
        self._shard = shard
        self._submit = submit
        self._carry_out = carry_out
        self._group = shard.group
        self._number = 0

    def serve(self) -> None:
        """Carry out what the leader tells until it says that it is over. Raises RankLost when the leader or another
        rank is gone, InvariantViolation when this one is not where the leader is; whatever it is, the leader can read
        it.
        """
        try:
            while (message := self._group.hear())[0] != "end":
                self._handle(message)
        except BaseException as error:
            self._group.report(error)
            raise
        finally:
            self._group.close()

    def _handle(self, message: list[Any]) -> None:
        match message:
            case ["idle"]:
                return
            case ["batch", int(number), int(digest), list(data)]:
                try:
                    batch = batch_from_wire(data)
                except (ValueError, TypeError) as error:
                    raise InvariantViolation(f"the leader told what is no batch: {error}") from error
                self._carry_out(partial(self._run, number, digest, batch))
            case ["orders", list(ranks), list(orders)] if self._submit is not None:
                if self._group.member.rank in ranks:
                    self._submit([order_from_wire(order) for order in orders])
            case _:
                raise InvariantViolation(f"the leader told {message[0]!r}, which no rank knows")

    def _run(self, number: int, digest: int, batch: Batch) -> None:
        if number != self._number:
            raise InvariantViolation(f"the leader is at step {number}, this rank at {self._number}")
        own = self._shard.inputs.digest(batch)
        if own != digest:
            raise InvariantViolation(
                f"step {number}: block tables have the digest {own:016x} here and {digest:016x} at the leader"
            )
        self._shard.run(batch)
        self._number += 1
