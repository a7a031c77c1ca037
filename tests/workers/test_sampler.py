"""Sampling row by row: filters, penalties, random streams, log-probabilities."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from tournant.workers.batch import RowState
from tournant.workers.device import CpuDevice
from tournant.workers.sampler import LOGPROB_FLOOR, Logprobs, Sampler, _draw, draw_together, uniform
from tournant.workers.sampling_params import SamplingParams

VOCAB = 50
CPU = CpuDevice()


def choose(
    logits: torch.Tensor,
    *,
    position: int = 5,
    tokens: tuple[int, ...] = (1, 2, 3),
    num_prompt: int = 2,
    index: int = 0,
    eos: tuple[int, ...] = (),
    **params: object,
) -> int:
    sampler = Sampler(len(logits), 4, eos, CPU)
    fields = SamplingParams(**({"seed": 1} | params))  # type: ignore[arg-type]
    sampler.start(RowState(0, list(tokens), num_prompt, fields, fields.seed or 0, index))
    return int(sampler.sample(logits.clone()[None], [0], np.asarray([position])).tokens)


def spread(logits: torch.Tensor, **params: object) -> Counter[int]:
    return Counter(choose(logits, position=position, **params) for position in range(300))


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))


def test_uniform_is_reproducible_spread_out_and_separate_per_stream() -> None:
    values = [uniform(seed, index, position) for seed in range(10) for index in range(10) for position in range(10)]
    assert values == [
        uniform(seed, index, position) for seed in range(10) for index in range(10) for position in range(10)
    ]
    assert len(set(values)) == 1000
    assert all(0.0 <= value < 1.0 for value in values)
    assert np.mean(values) == pytest.approx(0.5, abs=0.03)
    assert np.histogram(values, bins=10, range=(0, 1))[0].min() > 60
    assert uniform(-1, 0, 0) == uniform((1 << 64) - 1, 0, 0)


def test_sampling_follows_the_distribution(logits: torch.Tensor) -> None:
    found = spread(logits * 2)
    probabilities = (logits * 2).softmax(-1)
    for token in probabilities.topk(3).indices.tolist():
        assert found[token] / 300 == pytest.approx(float(probabilities[token]), abs=0.08)


def test_greedy_takes_the_best(logits: torch.Tensor) -> None:
    best = int(logits.argmax())
    assert choose(logits, temperature=0.0) == best
    assert choose(logits, top_k=1) == best
    assert set(spread(logits, temperature=1e-4)) == {best}


def test_filters_keep_exactly_their_sets(logits: torch.Tensor) -> None:
    ordered = logits.argsort(descending=True).tolist()
    probabilities = logits.softmax(-1)[ordered]
    assert set(spread(logits, top_k=3)) == set(ordered[:3])
    before = probabilities.cumsum(-1) - probabilities
    kept = int((before < 0.3).sum())
    assert set(spread(logits, top_p=0.3)) == set(ordered[:kept])
    kept = int((probabilities >= 0.5 * probabilities[0]).sum())
    assert set(spread(logits, min_p=0.5)) == set(ordered[:kept])
    assert set(spread(logits, top_p=1e-9)) == {ordered[0]}


def test_logit_bias_and_minimum_length(logits: torch.Tensor) -> None:
    assert choose(logits, temperature=0.0, logit_bias=((7, 100.0),)) == 7
    best, second = logits.topk(2).indices.tolist()
    assert choose(logits, temperature=0.0, logit_bias=((best, -100.0),)) == second
    assert choose(logits, temperature=0.0, eos=(best,), min_tokens=4, position=5) == second
    assert choose(logits, temperature=0.0, eos=(best,), min_tokens=3, position=5) == best
    assert choose(logits, temperature=0.0, eos=(best,), min_tokens=4, position=5, ignore_eos=True) == best
    assert choose(logits, temperature=0.0, stop_token_ids=(best,), min_tokens=4, position=5) == second


def test_penalties_count_what_they_should() -> None:
    flat = torch.zeros(VOCAB)
    flat[4], flat[9] = 2.0, 1.9  # 4 was generated once, 9 only in the prompt
    tokens = (9, 9, 4)
    assert choose(flat, tokens=tokens, temperature=0.0) == 4
    assert choose(flat, tokens=tokens, temperature=0.0, presence_penalty=0.5) == 9
    assert choose(flat, tokens=tokens, temperature=0.0, frequency_penalty=0.05) == 4
    assert choose(flat, tokens=(9, 9, 4, 4, 4), temperature=0.0, frequency_penalty=0.05) == 9
    assert choose(flat, tokens=tokens, temperature=0.0, repetition_penalty=2.0) == 4
    flat[5] = 1.5
    assert choose(flat, tokens=tokens, temperature=0.0, repetition_penalty=2.0) == 5
    assert choose(-flat - 1, tokens=(0, 1, 2), temperature=0.0, repetition_penalty=2.0) not in (0, 1, 2)


def test_penalties_follow_tokens_as_they_are_chosen() -> None:
    sampler = Sampler(VOCAB, 1, (), CPU)
    flat = torch.zeros(VOCAB)
    flat[:4] = torch.tensor([1.0, 0.9, 0.8, 0.7])
    sampler.start(RowState(0, [9], 1, SamplingParams(temperature=0.0, presence_penalty=2.0), 0, 0))
    chosen = [int(sampler.sample(flat.clone()[None], [0], np.asarray([1 + i])).tokens) for i in range(4)]
    assert chosen == [0, 1, 2, 3]


def test_a_row_does_not_depend_on_its_mates() -> None:
    batch = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(5))
    kinds = [
        {"temperature": 0.0},
        {"top_p": 0.5},
        {"top_k": 4, "logprobs": 2},
        {"presence_penalty": 1.0},
        {"min_p": 0.1},
        {},
    ]
    sampler = Sampler(VOCAB, 6, (), CPU)
    for row, kind in enumerate(kinds):
        sampler.start(RowState(row, [1, 2], 2, SamplingParams(seed=row, **kind), row, 0))  # type: ignore[arg-type]
    together = sampler.sample(batch.clone(), list(range(6)), np.full(6, 2)).tokens
    alone = [choose(batch[row], position=2, tokens=(1, 2), **({"seed": row} | kind)) for row, kind in enumerate(kinds)]
    assert together.tolist() == alone


def test_answers_of_one_request_differ_and_repeat(logits: torch.Tensor) -> None:
    texts = [tuple(choose(logits, position=p, index=i, seed=7) for p in range(12)) for i in range(4)]
    assert len(set(texts)) == 4
    assert texts == [tuple(choose(logits, position=p, index=i, seed=7) for p in range(12)) for i in range(4)]


def test_logprobs_are_of_the_raw_logits_and_finite(logits: torch.Tensor) -> None:
    sampler = Sampler(VOCAB, 1, (), CPU)
    params = SamplingParams(temperature=0.0, logprobs=3, logit_bias=((7, 100.0),))
    sampler.start(RowState(0, [1], 1, params, 0, 0))
    sampled = sampler.sample(logits.clone()[None], [0], np.asarray([1]))
    reference = logits.log_softmax(-1)
    assert sampled.tokens.tolist() == [7]
    assert sampled.wants == [0]
    assert sampled.logprobs is not None
    (found,) = sampled.logprobs.read(sampled.logprobs.tensors)
    assert found.logprob == pytest.approx(float(reference[7]))
    assert [token for token, _ in found.top] == reference.topk(3).indices.tolist()
    minus = torch.full((1, VOCAB), -math.inf)
    minus[0, 3] = 0.0
    floor = Logprobs(minus, torch.tensor([4]), [2])
    (entry,) = floor.read(floor.tensors)
    assert entry.logprob == LOGPROB_FLOOR
    assert [value for _, value in entry.top] == [0.0, LOGPROB_FLOOR]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}])
def test_nothing_left_to_choose_from_is_no_crash(params: dict, logits: torch.Tensor) -> None:
    """Every token forbidden by min_tokens, or numbers that went wrong."""
    everything = tuple(range(VOCAB))
    assert 0 <= choose(logits, eos=everything, min_tokens=9, **params) < VOCAB
    assert choose(torch.full((VOCAB,), float("nan")), **params) == 0


def test_rows_drawn_together_are_those_drawn_alone() -> None:
    """What a GPU does for many rows at once against what the CPU does row by row."""
    rng = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(4)
    kinds = [
        {},
        {"top_k": 5},
        {"top_p": 0.6},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.05},
    ]
    kinds += [{"temperature": 0.3}, {"temperature": 1.7, "top_p": 0.95}, {"top_k": 1}, {"top_k": VOCAB}]
    for some in (kinds, [{}, {"min_p": 0.3}]):  # with and without a row that needs sorting
        params = [SamplingParams(**{"temperature": 1.0, **some[i % len(some)]}) for i in range(200)]  # type: ignore[arg-type]
        logits = torch.randn(200, VOCAB, generator=generator) * 3
        logits[7] = float("nan")
        logits[8] = float("-inf")
        logits[9, :40] = float("-inf")
        logits[10] = 1.0  # ties: top_k keeps them all
        draws = rng.random(200).tolist()
        draws[:3] = [0.0, 1.0 - 2.0**-53, 0.5]
        together = draw_together(logits.clone(), params, draws, CPU)
        alone = [_draw(row, param, draw) for row, param, draw in zip(logits, params, draws, strict=True)]
        assert together.tolist() == alone
        assert len(set(alone)) > 20
