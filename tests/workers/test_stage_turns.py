"""Decodes dealt to the stages of a pipeline, over a fake device: which batches are in flight together."""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise

import pytest

from tests.workers.fake_runner import FakeRunner, expected_tokens, make_engine
from tests.workers.harness import Session
from tournant.workers.batch import UNKNOWN_TOKEN, Batch, StepResult
from tournant.workers.engine import Engine


class Pipeline:
    """Notes which batches are given to the first stage while earlier ones have not come back from the last."""

    def __init__(self, inner: FakeRunner, num_in_flight: int) -> None:
        self._inner = inner
        self.num_in_flight = num_in_flight
        self.batches: list[Batch] = []
        self.together = 0  # batches that began while another was on its way, and could
        self._on_their_way: deque[Batch] = deque()

    def run(self, batch: Batch) -> Step:
        waits = UNKNOWN_TOKEN in batch.token_ids
        self.together += bool(self._on_their_way) and not waits
        self.batches.append(batch)
        self._on_their_way.append(batch)
        return Step(self._on_their_way, batch, self._inner.run(batch))


class Step:
    def __init__(self, on_their_way: deque[Batch], batch: Batch, result: StepResult) -> None:
        self._on_their_way, self._batch, self._result = on_their_way, batch, result

    def result(self) -> StepResult:
        assert self._on_their_way.popleft() is self._batch
        return self._result


def pipeline(stages: int, **config: object) -> tuple[Engine, Pipeline]:
    engine = make_engine(64, pipeline_parallel_size=stages, **config)
    runner = Pipeline(engine.runner, stages)  # type: ignore[arg-type]
    engine.runner = runner
    engine._most_in_flight = engine.config.num_in_flight or stages
    return engine, runner


@pytest.mark.parametrize("stages", [2, 3])
def test_every_stage_has_a_batch(stages: int) -> None:
    engine, runner = pipeline(stages)
    session = Session(engine)
    prompts = [[number] * 5 for number in range(2 * stages)]
    asked = [session.submit(prompt, max_tokens=10, seed=0) for prompt in prompts]
    session.drain()
    assert [session.tokens(request) for request in asked] == [expected_tokens(prompt, 10) for prompt in prompts]
    prefill, *decodes = runner.batches
    assert len(prefill.rows) == 2 * stages
    assert [len(batch.rows) for batch in decodes] == [2] * 9 * stages
    assert runner.together == len(decodes) - 1, "only the first had nothing to overlap with"
    for index in range(len(decodes) - stages + 1):
        rows = Counter(row for batch in decodes[index : index + stages] for row in batch.rows)
        assert set(rows.values()) == {1}, "each sequence has one turn in a round"


@pytest.mark.parametrize("config", [{"pipeline_parallel_size": 1}, {"pipeline_parallel_size": 2, "num_in_flight": 1}])
def test_batches_are_whole_where_nothing_can_overlap(config: dict[str, int]) -> None:
    stages = config.pop("pipeline_parallel_size")
    engine, runner = pipeline(stages, **config)
    session = Session(engine)
    for number in range(4):
        session.submit([number] * 5, max_tokens=6)
    session.drain()
    assert [len(batch.rows) for batch in runner.batches] == [4] * 6


@pytest.mark.parametrize("stages", [2, 3])
def test_nobody_is_passed_over(stages: int) -> None:
    """Answers of all lengths, coming one after another: a decode waits for at most one round of turns."""
    engine, runner = pipeline(stages, max_num_batched_tokens=40)
    session = Session(engine)
    prompts = {}
    for number in range(12):
        prompt = [number] * (3 + 7 * number % 23)
        prompts[session.submit(prompt, max_tokens=3 + number * 5 % 17, seed=0)] = prompt
        session.step()
    session.drain()
    for request, prompt in prompts.items():
        assert session.tokens(request) == expected_tokens(prompt, len(session.tokens(request)))
    turns: dict[object, list[int]] = {}
    for index, batch in enumerate(runner.batches):
        for entry in batch.entries:
            turns.setdefault(entry.sequence, []).append(index)
    assert len(turns) == 12
    gaps = [after - before for places in turns.values() for before, after in pairwise(places)]
    assert max(gaps) <= 2 * stages - 1
