"""Faults that tests switch on do what they say, and nothing when they are off."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from tests.workers.fake_runner import FakeRunner
from tests.workers.link_harness import PATIENCE_S
from tournant.workers.batch import Batch, StepResult
from tournant.workers.faults import BlockFaults, DelayedRunner, FollowingImages, LateSteps, flip_bit


def test_every_nth_block_fails_or_is_flipped() -> None:
    slept: list[float] = []
    faults = BlockFaults(250.0, 3, 2, slept.append)
    assert faults.active
    assert [faults.next_block() for _ in range(6)] == [
        (False, False), (False, True), (True, False), (False, True), (False, False), (True, True),
    ]  # fmt: skip
    assert slept == [0.25] * 6
    assert not BlockFaults(0.0, 0, 0).active
    slot = memoryview(bytearray(9))
    flip_bit(slot)
    assert bytes(slot) == b"\0\0\0\0\1\0\0\0\0"


class _Runner:
    """Notes steps; fails at step 2."""

    num_in_flight = 3

    def __init__(self) -> None:
        self.done: list[int] = []

    def run(self, batch: Batch) -> StepResult:
        if batch.step == 2:
            raise RuntimeError("injected")
        self.done.append(batch.step)
        return StepResult([batch.step])


class _Images:
    slot_bytes = 5

    def __init__(self, runner: _Runner) -> None:
        self._runner = runner
        self.seen: list[tuple[str, list[int]]] = []

    def image_bytes(self, depth: int) -> int:
        return depth

    def save(self, blocks: object, slots: object) -> None:
        self.seen.append(("save", list(self._runner.done)))

    def load(self, slots: object, blocks: object) -> None:
        self.seen.append(("load", list(self._runner.done)))


def test_delayed_steps_return_at_once_and_keep_their_order() -> None:
    may_go_on = threading.Semaphore(0)
    delays: list[float] = []

    def sleep(seconds: float) -> None:
        delays.append(seconds)
        assert may_go_on.acquire(timeout=PATIENCE_S)

    runner = _Runner()
    delayed = DelayedRunner(runner, 40.0, sleep)
    assert delayed.num_in_flight == 3
    delayed.settle()
    steps = [delayed.run(Batch(step=number)) for number in range(4)]
    assert runner.done == []
    may_go_on.release(4)
    assert steps[3].result().token_ids == [3]
    assert runner.done == [0, 1, 3]
    assert delays == [0.04] * 4
    with pytest.raises(RuntimeError, match="injected"):
        steps[2].result()


def test_what_belongs_behind_late_steps_is_not_late_itself() -> None:
    delays: list[float] = []
    late = LateSteps(7.0, delays.append)
    done: list[int] = []
    for number in range(2):
        late.carry_out(partial(done.append, number))
        assert late.behind(lambda: list(done)).result(PATIENCE_S) == list(range(number + 1))
    assert delays == [0.007] * 2
    late.carry_out(lambda: done.append(1 // 0))
    late.settle()
    with pytest.raises(ZeroDivisionError):
        late.carry_out(lambda: None)


def test_copies_follow_the_steps_that_were_given_before() -> None:
    may_go_on = threading.Semaphore(0)
    runner = _Runner()
    delayed = DelayedRunner(runner, 1.0, lambda seconds: may_go_on.acquire(timeout=PATIENCE_S))
    images = _Images(runner)
    following = FollowingImages(images, delayed)
    assert (following.slot_bytes, following.image_bytes(3)) == (5, 3)
    delayed.run(Batch(step=0))
    delayed.run(Batch(step=1))
    lane = threading.Thread(target=lambda: (following.load([], []), following.save([], [])))  # type: ignore[func-returns-value]
    lane.start()
    assert images.seen == []
    may_go_on.release(2)
    lane.join(PATIENCE_S)
    assert images.seen == [("load", [0, 1]), ("save", [0, 1])]


def test_a_delayed_runner_is_a_runner() -> None:
    fake = FakeRunner(8)
    assert DelayedRunner(fake, 0.0).run(Batch(step=1)).result().token_ids == []
