"""The pure engine under random load: every answer equals what the fake model gives alone, nothing is left behind."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.fake_runner import NAMESPACE, expected_tokens, make_engine
from tournant.kvstore.block import key_chain
from tournant.workers.messages import EngineRequest
from tournant.workers.sampling_params import SamplingParams


class Load:
    """Random requests against one engine, checked against the solo answers.

    below: most places of its overflow; loses: share of reads there that fail.
    """

    def __init__(self, rng: random.Random, below: int = 0, loses: float = 0.0) -> None:
        self.rng = rng
        self.loses = loses
        self.block_tokens = rng.choice([8, 16])
        self.num_blocks = rng.randint(2, 12) if below else rng.randint(6, 40)
        num_below = rng.randint(1, below) if below else 0
        self.limit = (self.num_blocks + num_below) * self.block_tokens
        self.engine = make_engine(
            self.num_blocks,
            self.block_tokens,
            num_below=num_below,
            max_num_seqs=rng.choice([1, 3, 16]),
            max_num_batched_tokens=rng.choice([16, 50, 512]),
            enable_prefix_caching=rng.random() < 0.8,
            num_in_flight=rng.choice([1, 1, 2, 3]),
            pipeline_parallel_size=rng.choice([1, 1, 2, 3]),
        )
        self.engine.runner.loses = lambda: rng.random() < loses  # type: ignore[attr-defined]
        self.prefixes = [[rng.randrange(997) for _ in range(rng.randint(1, self.limit // 2))] for _ in range(3)]
        self.requests: dict[int, EngineRequest] = {}
        self.answers: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.finished: dict[tuple[int, int], str] = {}
        self.aborted: set[int] = set()

    def submit(self) -> None:
        rng = self.rng
        number = len(self.requests) + 1
        prompt = list(rng.choice(self.prefixes)[: rng.randint(1, self.limit // 2)])
        if rng.random() < 0.5:
            prompt += [rng.randrange(997) for _ in range(rng.randint(0, 20))]
        prompt = prompt[: self.limit - 1]
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 5]),
            seed=rng.randrange(100),
            max_tokens=rng.randint(1, 40),
            ignore_eos=True,
            stop_token_ids=tuple(rng.sample(range(997), 5)),
        )
        keys = key_chain(NAMESPACE.digest(None), prompt, self.block_tokens) if rng.random() < 0.5 else []
        request = EngineRequest(
            number, prompt, params, keys, NAMESPACE.digest(None), priority=rng.choice([0, 0, 0, -1, 2])
        )
        self.requests[number] = request
        self.book(self.engine.add_request(request))

    def book(self, outputs: list) -> None:
        for out in outputs:
            key = (out.request_id, out.index)
            assert key not in self.finished, "an output after the finish"
            self.answers[key] += out.token_ids
            if out.finish_reason:
                self.finished[key] = out.finish_reason

    def step(self) -> None:
        self.book(self.engine.step())
        self.engine.validate()

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            if self.rng.random() < 0.3:
                self.submit()
            if self.rng.random() < 0.05 and self.requests:
                victim = self.rng.choice(list(self.requests))
                self.engine.abort(victim)
                self.aborted.add(victim)
            self.step()
        for _ in range(100_000):
            if not self.engine.has_work:
                break
            self.step()
        self.check()

    def check(self) -> None:
        assert not self.engine.has_work, "the engine never came to rest"
        stats = self.engine.stats()
        assert (stats.kv_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
        for number, request in self.requests.items():
            room = self.limit - len(request.token_ids)
            for index in range(request.params.n):
                want = expected_tokens(
                    request.token_ids,
                    min(request.params.max_tokens or 0, room),
                    (request.params.seed or 0) * 131 + index,
                    frozenset(request.params.stop_token_ids),
                )
                got = self.answers[number, index]
                lost = self.loses > 0 and self.finished.get((number, index)) == "error"
                if number in self.aborted or lost:
                    assert got == want[: len(got)]
                    continue
                assert got == want
                stopped = want[-1] in request.params.stop_token_ids
                assert self.finished[number, index] == ("stop" if stopped else "length")
        if self.engine.config.enable_prefix_caching:
            assert self.engine.reset_prefix_cache()
        self.engine.validate()


@given(st.integers(min_value=0, max_value=1 << 32))
def test_answers_do_not_depend_on_scheduling(seed: int) -> None:
    Load(random.Random(seed)).run(120)


@given(st.integers(min_value=0, max_value=1 << 32))
def test_answers_do_not_depend_on_where_blocks_lie(seed: int) -> None:
    Load(random.Random(seed), below=60).run(120)


@given(st.integers(min_value=0, max_value=1 << 32))
def test_blocks_that_are_lost_below_are_computed_again(seed: int) -> None:
    Load(random.Random(seed), below=60, loses=0.002).run(120)


def test_a_tight_pool_preempts_and_still_answers_right() -> None:
    engine = make_engine(num_blocks=8, block_tokens=8, max_num_seqs=6)
    for number in range(1, 7):
        params = SamplingParams(max_tokens=40, seed=0, ignore_eos=True)
        assert engine.add_request(EngineRequest(number, [number] * 9, params)) == []
    answers: dict[int, list[int]] = defaultdict(list)
    while engine.has_work:
        for out in engine.step():
            answers[out.request_id] += out.token_ids
        engine.validate()
    assert engine.stats().num_preemptions >= 5
    for number in range(1, 7):
        assert answers[number] == expected_tokens([number] * 9, 40)


def test_a_failed_step_answers_its_requests_and_leaves_a_usable_engine() -> None:
    engine = make_engine(num_blocks=16)
    engine.add_request(EngineRequest(1, [1, 2, 3], SamplingParams(max_tokens=5, n=2)))
    engine.step()
    engine.runner.fail_next = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="injected"):
        engine.step()
    outputs = engine.fail_all("it broke")
    assert [(o.request_id, o.index, o.finish_reason, o.error) for o in outputs] == [
        (1, 0, "error", "it broke"),
        (1, 1, "error", "it broke"),
    ]
    engine.validate()
    assert engine.stats().kv_used == 0
    engine.add_request(EngineRequest(2, [5, 6], SamplingParams(max_tokens=3, seed=0, ignore_eos=True)))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for out in engine.step() for token in out.token_ids]
    assert tokens == expected_tokens([5, 6], 3)
