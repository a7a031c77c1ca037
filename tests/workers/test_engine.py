"""Engine behaviour that has a name: admission limits, prefix hits, chunking, priorities, forks, accounting."""

from __future__ import annotations

import pytest

from tests.workers.fake_runner import expected_tokens, make_engine
from tournant.workers.engine import Engine
from tournant.workers.messages import EngineRequest, RequestOutput
from tournant.workers.sampling_params import SamplingParams


def drain(engine: Engine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
        engine.validate()
    return outputs


def ask(engine: Engine, number: int, prompt: list[int], **params: object) -> list[RequestOutput]:
    """Add one request and run the engine until it rests."""
    fields = {"max_tokens": 4, "seed": 0, "ignore_eos": True} | params
    return engine.add_request(EngineRequest(number, prompt, SamplingParams(**fields))) + drain(engine)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [7, 8, 9, 31, 32, 33])
def test_a_repeated_prompt_hits_all_but_its_last_block_and_answers_the_same(length: int) -> None:
    engine = make_engine(num_blocks=32, block_tokens=8)
    prompt = list(range(length))
    first, second = ask(engine, 1, prompt), ask(engine, 2, prompt)
    assert first[0].cached_tokens == 0
    assert second[0].cached_tokens == (length - 1) // 8 * 8
    assert [o.token_ids for o in first] == [o.token_ids for o in second]


def test_other_salt_shares_nothing() -> None:
    engine = make_engine(num_blocks=32, block_tokens=8)
    prompt, params = list(range(20)), SamplingParams(max_tokens=1, seed=0)
    for number, salt, hit in [(1, None, 0), (2, "a", 0), (3, "a", 16), (4, "", 0), (5, None, 16)]:
        engine.add_request(EngineRequest(number, prompt, params, cache_salt=salt))
        assert drain(engine)[0].cached_tokens == hit, (number, salt)


def test_prefix_caching_off_never_hits() -> None:
    engine = make_engine(num_blocks=32, block_tokens=8, enable_prefix_caching=False)
    assert [ask(engine, number, list(range(30)))[0].cached_tokens for number in (1, 2)] == [0, 0]


def test_keys_of_another_namespace_are_computed_again() -> None:
    engine = make_engine(num_blocks=32, block_tokens=8)
    prompt, params = list(range(20)), SamplingParams(max_tokens=1, seed=0)
    forged = [b"k" * 32, b"l" * 32]
    engine.add_request(EngineRequest(1, prompt, params, forged, b"d" * 32))
    drain(engine)
    engine.add_request(EngineRequest(2, [900 + token for token in range(20)], params, forged, b"d" * 32))
    assert drain(engine)[0].cached_tokens == 0
    assert ask(engine, 3, prompt)[0].cached_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        (list(range(80)), {}, "80 tokens; at most 79"),
        ([], {}, "no tokens"),
        ([1, 997], {}, "outside 0..996"),
        ([-1], {}, "outside 0..996"),
    ],
)
def test_requests_that_cannot_run_are_answered_with_the_numbers(prompt: list[int], params: dict, words: str) -> None:
    engine = make_engine(num_blocks=10, block_tokens=8)
    outputs = engine.add_request(EngineRequest(1, prompt, SamplingParams(n=2, **params)))
    assert [o.finish_reason for o in outputs] == ["error", "error"]
    assert words in (outputs[0].error or "")
    assert not engine.has_work


def test_a_sequence_may_fill_the_pool_to_the_last_token() -> None:
    engine = make_engine(num_blocks=10, block_tokens=8)
    outputs = ask(engine, 1, [3] * 70, max_tokens=500)
    tokens = [token for o in outputs for token in o.token_ids]
    assert tokens == expected_tokens([3] * 70, 10)
    assert outputs[-1].finish_reason == "length"


def test_max_tokens_zero_computes_the_prompt_only() -> None:
    engine = make_engine(num_blocks=10, block_tokens=8)
    outputs = ask(engine, 1, [3] * 20, max_tokens=0)
    assert [(o.token_ids, o.finish_reason, o.cached_tokens) for o in outputs] == [([], "length", 0)]


def test_a_long_prompt_is_chunked_and_does_not_hold_up_decodes_or_short_prompts() -> None:
    engine = make_engine(num_blocks=200, block_tokens=8, max_num_batched_tokens=64)
    engine.add_request(EngineRequest(1, [1] * 8, SamplingParams(max_tokens=100, seed=0, ignore_eos=True)))
    engine.step()
    engine.add_request(EngineRequest(2, [2] * 800, SamplingParams(max_tokens=2, seed=0, ignore_eos=True)))
    engine.add_request(EngineRequest(3, [3] * 20, SamplingParams(max_tokens=2, seed=0, ignore_eos=True)))
    first_answer: dict[int, int] = {}
    for step in range(60):
        outputs = engine.step()
        assert any(o.request_id == 1 for o in outputs), "the decode missed a step"
        for output in outputs:
            first_answer.setdefault(output.request_id, step)
    assert first_answer[3] == 0
    assert first_answer[2] >= 800 // 64


def test_queued_tokens_are_those_that_no_step_computes_yet() -> None:
    engine = make_engine(num_blocks=200, block_tokens=8, max_num_batched_tokens=64, max_num_seqs=1)
    engine.add_request(EngineRequest(1, [2] * 160, SamplingParams(max_tokens=2, seed=0, ignore_eos=True)))
    engine.add_request(EngineRequest(2, [3] * 20, SamplingParams(max_tokens=1, seed=0, ignore_eos=True)))
    queued = [engine.stats().queued_tokens]
    while engine.has_work:
        engine.step()
        queued.append(engine.stats().queued_tokens)
    assert queued[0] == 180
    assert queued[-1] == 0
    assert queued == sorted(queued, reverse=True)
    assert len(set(queued)) > 3, "a long prompt counts for less after each of its chunks"


def test_priority_runs_first_and_is_not_preempted() -> None:
    engine = make_engine(num_blocks=8, block_tokens=8, max_num_seqs=1)
    params = SamplingParams(max_tokens=2, seed=0, ignore_eos=True)
    for number, priority in [(1, 1), (2, 0), (3, -5)]:
        engine.add_request(EngineRequest(number, [number] * 5, params, priority=priority))
    order = [o.request_id for o in drain(engine) if o.finish_reason]
    assert order == [3, 2, 1]


def test_answers_of_one_request_share_the_prompt() -> None:
    engine = make_engine(num_blocks=64, block_tokens=8)
    engine.add_request(EngineRequest(1, list(range(30)), SamplingParams(n=4, max_tokens=6, seed=0, ignore_eos=True)))
    engine.step()
    engine.step()
    assert engine.stats().kv_used == 3 + 4  # three shared full blocks, a tail of its own for each answer
    drain(engine)
    assert engine.stats().prompt_tokens == 30 + 3  # each fork computes only the last prompt token again
    assert engine.stats().prefix_query_tokens == 30


def test_abort_frees_everything_at_once_and_says_nothing_more() -> None:
    engine = make_engine(num_blocks=64, block_tokens=8)
    engine.add_request(EngineRequest(1, list(range(30)), SamplingParams(n=3, max_tokens=50, seed=0)))
    engine.step()
    engine.step()
    engine.abort(1)
    engine.abort(99)
    assert engine.step() == []
    assert engine.stats().kv_used == 0
    engine.validate()


@pytest.mark.parametrize("after", range(1, 9))
def test_abort_with_many_batches_in_flight_breaks_no_invariant(after: int) -> None:
    engine = make_engine(num_blocks=16, num_in_flight=4)
    for number in (1, 2):
        engine.add_request(EngineRequest(number, list(range(20)), SamplingParams(max_tokens=12, ignore_eos=True)))
    for _ in range(after):
        engine.step()
    engine.abort(1)
    assert {output.request_id for output in drain(engine)} == {2}
    assert engine.stats().kv_used == 0


def test_reset_is_refused_while_blocks_are_in_use() -> None:
    engine = make_engine(num_blocks=64, block_tokens=8)
    engine.add_request(EngineRequest(1, list(range(30)), SamplingParams(max_tokens=50, seed=0)))
    engine.step()
    assert not engine.reset_prefix_cache()
    engine.abort(1)
    assert engine.stats().kv_cached == 3
    assert engine.reset_prefix_cache()
    assert engine.stats().kv_cached == 0
    assert ask(engine, 2, list(range(30)))[0].cached_tokens == 0


def test_min_tokens_holds_stop_tokens_back() -> None:
    want = expected_tokens([4, 5], 8)
    engine = make_engine(num_blocks=8)
    outputs = ask(engine, 1, [4, 5], max_tokens=8, stop_token_ids=(want[2],))
    assert (len(outputs), outputs[-1].finish_reason, outputs[-1].stop_token) == (3, "stop", want[2])
    outputs = ask(engine, 2, [4, 5], max_tokens=8, stop_token_ids=(want[2],), min_tokens=3)
    assert len(outputs) == (8 if want[2] not in want[3:] else 4 + want[3:].index(want[2]))


def test_one_answer_of_several_can_be_ended() -> None:
    engine = make_engine(num_blocks=64, block_tokens=8)
    engine.add_request(EngineRequest(1, list(range(30)), SamplingParams(n=3, max_tokens=10, seed=0, ignore_eos=True)))
    engine.step()
    engine.abort_answer(1, 0)
    engine.abort_answer(1, 7)
    engine.abort_answer(5, 0)
    outputs = drain(engine)
    assert {(o.index, o.finish_reason) for o in outputs if o.finish_reason} == {(1, "length"), (2, "length")}
    assert [t for o in outputs if o.index == 2 for t in o.token_ids] == expected_tokens(list(range(30)), 10, seed=2)
    engine.add_request(EngineRequest(1, [1], SamplingParams(max_tokens=1)))
    assert drain(engine)[0].finish_reason == "length", "the id of a finished request was not given free"
