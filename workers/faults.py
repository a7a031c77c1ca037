"""Faults that tests switch on (`offload_config.Faults`): slow, failing and damaged copies, and steps that end later.

Owns nothing that a service uses. With all faults off nothing here is in the way.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from tournant.workers.batch import Batch, PendingStep, StepResult
from tournant.workers.transfer_messages import BlockImages

if TYPE_CHECKING:
    from tournant.workers.engine import Runner

_T = TypeVar("_T")


class BlockFaults:
    """What goes wrong with the blocks of one direction. Counts blocks over all threads that copy."""

    def __init__(
        self, delay_ms: float, fail_every: int, flip_every: int, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self.active = bool(delay_ms or fail_every or flip_every)
        self._delay_s = delay_ms / 1000
        self._fail_every, self._flip_every = fail_every, flip_every
        self._sleep = sleep
        self._count = itertools.count(1)

    def next_block(self) -> tuple[bool, bool]:
        """Wait as long as a block has to; whether its copy fails, and whether its slot is to be damaged."""
        number = next(self._count)
        if self._delay_s:
            self._sleep(self._delay_s)
        fails = bool(self._fail_every) and number % self._fail_every == 0
        return fails, bool(self._flip_every) and number % self._flip_every == 0


def flip_bit(slot: memoryview) -> None:
    """Damage a slot."""
    slot[len(slot) // 2] ^= 1


class _LaterStep:
    """A step that another thread carries out. See `PendingStep`."""

    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def result(self) -> StepResult:
        """Wait for the thread. Raises what the step raised."""
        return self._future.result()


class LateSteps:
    """A thread that carries out what it is given, in order, each `delay_ms` late."""

    def __init__(self, delay_ms: float, sleep: Callable[[float], object] = time.sleep) -> None:
        self._delay_s = delay_ms / 1000
        self._sleep = sleep
        self._last: Future[object] | None = None
        self._thread = ThreadPoolExecutor(
            1, "delayed-steps", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )

    def later(self, act: Callable[[], _T]) -> Future[_T]:
        """Do it late, behind everything given before."""
        return self.behind(lambda: self._late(act))

    def behind(self, act: Callable[[], _T]) -> Future[_T]:
        """Do it as soon as everything given before is over."""
        future = self._thread.submit(act)
        self._last = cast("Future[object]", future)
        return future

    def carry_out(self, act: Callable[[], None]) -> None:
        """`later`, for whoever asks for no result. Raises what the one before raised, if that is over."""
        if self._last is not None and self._last.done():
            self._last.result()
        self.later(act)

    def settle(self) -> None:
        """Return once all that was given so far is over. From any thread."""
        if self._last is not None:
            wait([self._last])

    def _late(self, act: Callable[[], _T]) -> _T:
        self._sleep(self._delay_s)
        return act()


class DelayedRunner(LateSteps):
    """A runner whose steps are carried out in a thread of its own, each `delay_ms` late, in the order given."""

    def __init__(self, runner: Runner, delay_ms: float, sleep: Callable[[float], object] = time.sleep) -> None:
        super().__init__(delay_ms, sleep)
        self._runner = runner

    @property
    def num_in_flight(self) -> int:
        """As the runner's."""
        return self._runner.num_in_flight

    def run(self, batch: Batch) -> PendingStep:
        """Begin one batch; returns at once."""
        return _LaterStep(self.later(lambda: self._runner.run(batch).result()))


class FollowingImages:
    """`BlockImages` whose copies come after all steps given so far, on the CPU too, where `LateSteps` are the only
    thing that is not over when it was given.
    """

    def __init__(self, images: BlockImages, steps: LateSteps) -> None:
        self._images = images
        self._steps = steps

    @property
    def slot_bytes(self) -> int:
        """See `BlockImages`."""
        return self._images.slot_bytes

    def image_bytes(self, depth: int) -> int:
        """See `BlockImages`."""
        return self._images.image_bytes(depth)

    def save(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        """See `BlockImages`."""
        self._steps.settle()
        self._images.save(blocks, slots)

    def load(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        """See `BlockImages`."""
        self._steps.settle()
        self._images.load(slots, blocks)
