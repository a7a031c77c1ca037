"""An answer that goes on in another engine: cut anywhere, its tokens are those of one that was never cut."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.workers.harness import make_engine
from tests.workers.test_generation import prompts_of
from tournant.workers.engine import Engine
from tournant.workers.messages import EngineRequest, RequestOutput, TokenLogprobs
from tournant.workers.sampling_params import SamplingParams

NUM_NEW = 20
CASES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 11},
    "filtered": {"temperature": 0.8, "seed": 12, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "three answers": {"temperature": 1.0, "seed": 13, "n": 3},
    "penalties": {
        "temperature": 0.0,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.9,
        "repetition_penalty": 1.3,
    },
    "biased": {"temperature": 0.0, "logit_bias": ((5, 6.0), (9, -4.0)), "frequency_penalty": 1.5},
    "least length": {
        "temperature": 1.0,
        "seed": 14,
        "ignore_eos": False,
        "min_tokens": 15,
        "stop_token_ids": tuple(range(200)),
    },
    "logprobs": {"temperature": 1.0, "seed": 15, "logprobs": 3, "prompt_logprobs": 1, "n": 2},
}


@dataclass
class Whole:
    """What an engine said of one answer."""

    tokens: list[int]
    finish_reason: str | None
    stop_token: int | None
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None] | None


def run(engine: Engine, request: EngineRequest) -> dict[int, Whole]:
    """All answers of a request, by number."""
    outputs: list[RequestOutput] = engine.add_request(request)
    while engine.has_work:
        outputs += engine.step()
        engine.validate()
    found: dict[int, Whole] = {}
    for output in outputs:
        whole = found.setdefault(output.index, Whole([], None, None, [], output.prompt_logprobs))
        whole.tokens += output.token_ids
        whole.logprobs += output.logprobs or []
        whole.finish_reason, whole.stop_token = output.finish_reason, output.stop_token
    return found


def params_of(case: str) -> SamplingParams:
    return SamplingParams(**({"ignore_eos": True, "max_tokens": NUM_NEW} | CASES[case]))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engines(tiny_model: Path) -> tuple[Engine, Engine]:
    """One that is never disturbed, and one with other steps, other blocks and a cache that is not cold."""
    return make_engine(tiny_model), make_engine(tiny_model, max_num_batched_tokens=32, block_tokens=8)


@pytest.mark.parametrize("case", list(CASES))
def test_an_answer_that_is_cut_anywhere_goes_on_as_if_it_had_not_been(
    engines: tuple[Engine, Engine], case: str
) -> None:
    first, second = engines
    (prompt,) = prompts_of((29,), seed=5)
    params = params_of(case)
    whole = run(first, EngineRequest(1, prompt, params))
    assert len(whole) == params.n
    rng = random.Random(case)
    for index, want in whole.items():
        length = len(want.tokens)
        for cut in sorted({0, 1, length - 1, *rng.sample(range(length), 2)}):
            one = SamplingParams(**{**params.to_wire(), "n": 1})
            log = want.tokens[:cut]
            found = run(second, EngineRequest(2, prompt + log, one, num_output=cut, first_index=index))
            assert list(found) == [index]
            rest = found[index]
            assert (rest.tokens, rest.finish_reason) == (want.tokens[cut:], want.finish_reason), f"{index} cut at {cut}"
            assert rest.stop_token == want.stop_token
            assert [entry.logprob for entry in rest.logprobs] == [entry.logprob for entry in want.logprobs[cut:]]
            assert [entry.top for entry in rest.logprobs] == [entry.top for entry in want.logprobs[cut:]]
            assert (rest.prompt_logprobs is not None) == (want.prompt_logprobs is not None and cut == 0)


def test_the_cases_differ_where_it_matters(engines: tuple[Engine, Engine]) -> None:
    """Else what they are about would not be tested: counted as prompt, an output gives other tokens."""
    (prompt,) = prompts_of((29,), seed=5)
    for case in ("penalties", "biased", "least length"):
        params = params_of(case)
        want = run(engines[0], EngineRequest(1, prompt, params))[0]
        naive = run(engines[0], EngineRequest(2, prompt + want.tokens[:9], params))[0]
        assert naive.tokens[: len(want.tokens) - 9] != want.tokens[9:] or len(naive.tokens) != len(want.tokens) - 9, (
            case
        )


def test_answers_differ_by_number(engines: tuple[Engine, Engine]) -> None:
    (prompt,) = prompts_of((29,), seed=5)
    params = SamplingParams(temperature=1.0, seed=13, max_tokens=NUM_NEW, ignore_eos=True)
    answers = [run(engines[0], EngineRequest(1, prompt, params, first_index=index))[index] for index in range(3)]
    assert len({tuple(answer.tokens) for answer in answers}) == 3


@pytest.mark.parametrize(("log", "reason", "stop_token"), [(8, "length", None), (3, "stop", 77)])
def test_what_had_ended_ends_at_once(
    engines: tuple[Engine, Engine], log: int, reason: str, stop_token: int | None
) -> None:
    engine = engines[0]
    params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(77,))
    tokens = [40 + place for place in range(log - 1)] + [stop_token or 39]
    outputs = engine.add_request(EngineRequest(1, [1, 2, 3, *tokens], params, num_output=log, first_index=4))
    assert outputs == [RequestOutput(1, 4, [], reason, stop_token)]
    assert not engine.has_work


def test_it_goes_on_after_a_preemption_too(tiny_model: Path) -> None:
    prompts = prompts_of((20,) * 8, seed=1)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=100, frequency_penalty=0.5)
    roomy, tight = make_engine(tiny_model, num_blocks=100), make_engine(tiny_model, num_blocks=28)
    want = [run(roomy, EngineRequest(1, prompt, params))[0].tokens for prompt in prompts]
    found: dict[int, list[int]] = {}
    for number, (prompt, tokens) in enumerate(zip(prompts, want, strict=True)):
        cut = 10 * number
        found[number] = tokens[:cut]
        tight.add_request(EngineRequest(number, prompt + tokens[:cut], params, num_output=cut))
    while tight.has_work:
        for output in tight.step():
            found[output.request_id] += output.token_ids
        tight.validate()
    assert list(found.values()) == want
    assert tight.stats().num_preemptions > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_output": 3}, "3 of 3 tokens"),
        ({"num_output": -1}, "-1 of 3 tokens"),
        ({"num_output": 1, "params": SamplingParams(n=2)}, "of 2 answers"),
        ({"first_index": -1}, "first_index is -1"),
        ({"first_index": 127, "params": SamplingParams(n=2)}, "first_index is 127"),
        ({"num_output": 2000, "token_ids": [1] * 2001, "params": SamplingParams(max_tokens=2047)}, "2001 tokens"),
    ],
)
def test_what_cannot_be_resumed_is_said(
    engines: tuple[Engine, Engine], fields: dict[str, object], message: str
) -> None:
    request = EngineRequest(**({"request_id": 1, "token_ids": [1, 2, 3], "params": SamplingParams()} | fields))  # type: ignore[arg-type]
    outputs = engines[0].add_request(request)
    assert [output.finish_reason for output in outputs] == ["error"] * request.params.n
    assert message in (outputs[0].error or "")
    assert [output.lost for output in outputs] == [None] * request.params.n


def test_one_resumed_answer_is_stopped_by_its_number(engines: tuple[Engine, Engine]) -> None:
    engine = engines[0]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=50)
    engine.add_request(EngineRequest(1, [1, 2, 3, 4], params, num_output=1, first_index=2))
    engine.step()
    engine.abort_answer(1, 0)
    assert engine.has_work
    engine.abort_answer(1, 2)
    assert not engine.has_work
    engine.validate()
