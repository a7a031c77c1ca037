"""Greedy tokens of the real engine equal transformers' in fp32: cold, cached, alone, batched, chunked, preempted."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers.reference import reference_generate
from tests.workers.harness import Session, make_engine
from tournant.workers.messages import RequestOutput

NUM_NEW = 12
LENGTHS = (1, 5, 15, 16, 17, 31, 32, 33, 100, 255, 256, 257, 300)


def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module", params=["m", "tied", "mqa"])
def model(request: pytest.FixtureRequest, tiny_models: Mapping[str, Path]) -> Path:
    return tiny_models[request.param]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return reference_generate(model, prompts_of(LENGTHS), NUM_NEW)


@pytest.mark.parametrize("chunk", [16, 64, 1024])
@pytest.mark.parametrize("deterministic", [True, False])
def test_tokens_equal_transformers(model: Path, expected: list[list[int]], chunk: int, deterministic: bool) -> None:
    """Alone and in a batch of 16, cold and from the prefix cache."""
    prompts = prompts_of(LENGTHS)
    engine = make_engine(model, num_blocks=200, max_num_batched_tokens=chunk, deterministic=deterministic)
    session = Session(engine)
    cold = [session.ask([prompt], max_tokens=NUM_NEW)[0] for prompt in prompts]
    assert cold == expected
    assert engine.reset_prefix_cache()
    batch = (prompts + prompts)[:16]
    assert session.ask(batch, max_tokens=NUM_NEW) == (expected + expected)[:16]
    warm = session.ask(batch, max_tokens=NUM_NEW)
    assert warm == (expected + expected)[:16]
    cached = [session.outputs[request][0].cached_tokens for request in list(session.outputs)[-16:]]
    assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in batch]


@pytest.mark.parametrize("block_tokens", [8, 32, 256])
def test_other_block_sizes(tiny_model: Path, block_tokens: int) -> None:
    lengths = (3, 40, 300)
    engine = make_engine(tiny_model, num_blocks=2048 // block_tokens, block_tokens=block_tokens)
    session = Session(engine)
    expected = reference_generate(tiny_model, prompts_of(lengths), NUM_NEW)
    for _ in range(2):
        assert session.ask(prompts_of(lengths), max_tokens=NUM_NEW) == expected


def test_preempted_sequences_answer_completely(tiny_model: Path) -> None:
    prompts = prompts_of((20,) * 12, seed=1)
    solo = Session(make_engine(tiny_model))
    want = [solo.ask([prompt], max_tokens=150)[0] for prompt in prompts]
    engine = make_engine(tiny_model, num_blocks=64)
    assert Session(engine).ask(prompts, max_tokens=150) == want
    assert engine.stats().num_preemptions >= 5
    assert engine.stats().kv_used == 0


def test_answers_of_one_request_continue_as_if_alone(tiny_model: Path) -> None:
    (prompt,) = prompts_of((37,), seed=2)
    session = Session(make_engine(tiny_model))
    request = session.submit(prompt, n=4, temperature=1.0, seed=7, max_tokens=20)
    session.drain()
    answers = [session.tokens(request, index) for index in range(4)]
    assert len({tuple(answer) for answer in answers}) == 4
    again = session.submit(prompt, n=4, temperature=1.0, seed=7, max_tokens=20)
    session.drain()
    assert [session.tokens(again, index) for index in range(4)] == answers
    for index in (0, 3):
        other = Session(make_engine(tiny_model, enable_prefix_caching=False, num_blocks=8))
        request = other.submit(prompt, n=index + 1, temperature=1.0, seed=7, max_tokens=20)
        other.drain()
        assert other.tokens(request, index) == answers[index]


def prompt_logprobs(outputs: list[RequestOutput]) -> list[float | None]:
    found = outputs[0].prompt_logprobs
    if found is None:
        raise TypeError("no prompt log-probabilities came back")
    return [None if entry is None else entry.logprob for entry in found]


@pytest.mark.parametrize("chunk", [16, 1024])
def test_prompt_logprobs_equal_transformers_and_do_not_depend_on_the_cache(tiny_model: Path, chunk: int) -> None:
    """Also CASES.md 29: asked again while the prefix is cached."""
    from tests.helpers.reference import reference_logits

    (prompt,) = prompts_of((70,), seed=3)
    values = reference_logits(tiny_model, prompt).log_softmax(-1)
    want = [float(values[i, token]) for i, token in enumerate(prompt[1:])]
    session = Session(make_engine(tiny_model, max_num_batched_tokens=chunk))
    found = []
    for _ in range(2):
        session.ask([prompt], max_tokens=2)
        request = session.submit(prompt, prompt_logprobs=2, max_tokens=1, logprobs=1)
        session.drain()
        found.append(prompt_logprobs(session.outputs[request]))
    assert found[0] == found[1]
    assert found[0][0] is None
    assert found[0][1:] == pytest.approx(want, abs=2e-4)
    assert session.outputs[request][0].cached_tokens == 0


def test_batches_in_flight_change_nothing(tiny_model: Path) -> None:
    prompts = prompts_of((5, 40, 100), seed=4)
    want = Session(make_engine(tiny_model)).ask(prompts, max_tokens=20)
    assert Session(make_engine(tiny_model, num_in_flight=3)).ask(prompts, max_tokens=20) == want
