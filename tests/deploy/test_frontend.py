from __future__ import annotations

import asyncio
import copy
import gc
import random
import weakref
from collections.abc import Callable

import pytest

from tests.deploy.async_test import async_test, settle
from tests.deploy.fake_engine import FakeEngineClient, make_info
from tests.helpers.tiny_model import EOS_ID, IM_END_ID, IM_START_ID
from tournant.cluster.metrics import RequestRecord
from tournant.deploy.errors import GenerationFailed, PromptTooLong, RequestError
from tournant.deploy.frontend import Frontend, FrontendOptions
from tournant.deploy.generation import CompletedAnswer, Delta, GenerationStream
from tournant.deploy.tokenizer import Tokenizer
from tournant.kvstore.block import key_chain
from tournant.workers.errors import EngineDeadError, Overloaded
from tournant.workers.messages import RequestOutput
from tournant.workers.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [104, 105]


def saying(*texts: str) -> Callable[..., list[int]]:
    """A script whose answer number i is texts[i], one byte per token, then end-of-text."""
    return lambda request, index: list(texts[index % len(texts)].encode())


def make(
    tokenizer: Tokenizer,
    *texts: str,
    options: FrontendOptions | None = None,
    info: dict[str, object] | None = None,
    **engine: object,
) -> tuple[Frontend, FakeEngineClient]:
    client = FakeEngineClient(saying(*texts), make_info(**(info or {})), **engine)  # type: ignore[arg-type]
    return Frontend(tokenizer, client, options), client


async def read(stream: GenerationStream) -> list[Delta]:
    return [delta async for delta in stream]


@async_test
async def test_an_answer_arrives_token_by_token(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "abc", cached_tokens=2)
    stream = frontend.submit(PROMPT, GREEDY)
    seen = []
    for _ in range(4):
        engine.step()
        seen.append(await anext(stream))
    assert [(delta.text, delta.token_ids, delta.finish_reason) for delta in seen] == [
        ("a", [97], None),
        ("b", [98], None),
        ("c", [99], None),
        ("", [EOS_ID], "stop"),
    ]
    assert stream.answers[0].token_ids == [97, 98, 99, EOS_ID]
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens, stream.usage.cached_tokens) == (2, 4, 2)
    assert await read(stream) == []
    assert frontend.num_outstanding == 0


@async_test
async def test_a_slow_reader_gets_joined_text(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "abcdef")
    stream = frontend.submit(PROMPT, GREEDY)
    engine.step(4)
    first = await anext(stream)
    engine.step(4)
    second = await anext(stream)
    assert [(delta.text, delta.token_ids) for delta in (first, second)] == [
        ("abcd", [97, 98, 99, 100]),
        ("ef", [101, 102, EOS_ID]),
    ]
    assert second.num_generated == 7


@async_test
async def test_deltas_stay_apart_where_each_token_counts(tokenizer: Tokenizer) -> None:
    for params, join in ((GREEDY, False), (SamplingParams(temperature=0.0, logprobs=1), True)):
        frontend, engine = make(tokenizer, "abc")
        stream = frontend.submit(PROMPT, params, join_deltas=join)
        engine.step(3)
        deltas = await stream.next_deltas()
        assert [(delta.text, delta.num_generated) for delta in deltas] == [("a", 1), ("b", 2), ("c", 3)]
        stream.cancel()


@async_test
async def test_tokens_without_text_travel_with_the_next_text(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "é👋")
    stream = frontend.submit(PROMPT, GREEDY)
    engine.step()
    assert not stream.over
    engine.step(6)
    deltas = await read(stream)
    assert "".join(delta.text for delta in deltas) == "é👋"
    assert [token for delta in deltas for token in delta.token_ids] == [*"é👋".encode(), EOS_ID]


@async_test
@pytest.mark.case(43)
async def test_streamed_and_whole_answers_agree_when_cut_inside_a_character(tokenizer: Tokenizer) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3)
    frontend, engine = make(tokenizer, "a👋")
    streams = [frontend.submit(PROMPT, params) for _ in range(2)]
    reading = asyncio.ensure_future(read(streams[0]))
    for _ in range(3):
        engine.step()
        await settle()
    whole = (await streams[1].collect()).answers[0]
    assert "".join(delta.text for delta in await reading) == whole.text == "a\ufffd"
    assert whole.finish_reason == "length"


@async_test
@pytest.mark.case(41)
async def test_a_stop_string_ends_the_answer_and_its_work(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "ABCDEFGHIJKLM")
    stream = frontend.submit(PROMPT, SamplingParams(temperature=0.0, stop=("DEFGHIJ",)))
    engine.step(20)
    deltas = await read(stream)
    assert "".join(delta.text for delta in deltas) == "ABC"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "DEFGHIJ")
    assert engine.aborted_answers == [(engine.submitted[0].request_id, 0)]
    assert stream.usage.completion_tokens == 10
    assert engine.submitted[0].params.stop == ()  # text stays on this side
    assert frontend.num_outstanding == 0


@async_test
async def test_a_stop_token_is_reported_and_has_no_text(tokenizer: Tokenizer) -> None:
    for include, text in ((False, "ab"), (True, "abc")):
        frontend, engine = make(tokenizer, "abcd")
        params = SamplingParams(temperature=0.0, stop_token_ids=(99,), include_stop_str_in_output=include)
        stream = frontend.submit(PROMPT, params)
        engine.step(3)
        answer = (await stream.collect()).answers[0]
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (text, "stop", 99)
        assert answer.token_ids == [97, 98, 99]


@async_test
async def test_the_engine_is_rid_of_each_answer_when_its_stop_string_comes(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "aXbbbbbb", "cc", "ddddX")
    stream = frontend.submit(PROMPT, SamplingParams(temperature=0.0, n=3, stop=("X",)))
    engine.step(2)
    assert engine.aborted_answers == [(1, 0)]  # the others still run
    engine.step(3)
    assert engine.aborted_answers == [(1, 0), (1, 2)]
    assert engine.running == []
    answers = (await stream.collect()).answers
    assert [(answer.index, answer.text, answer.stop_reason) for answer in answers] == [
        (0, "a", "X"),
        (1, "cc", None),
        (2, "dddd", "X"),
    ]
    frontend, engine = make(tokenizer, "aXbbbbbb", "cccc")  # the engine ends the last one by itself
    stream = frontend.submit(PROMPT, SamplingParams(temperature=0.0, n=2, stop=("X",)))
    engine.step(5)
    assert stream.over
    assert engine.aborted_answers == [(1, 0)]


@async_test
async def test_prompts_of_one_request_are_numbered_through(tokenizer: Tokenizer) -> None:
    engine = FakeEngineClient(lambda request, index: [request.token_ids[0], 48 + index])
    frontend = Frontend(tokenizer, engine)
    stream = frontend.submit_many([[97], [98]], SamplingParams(temperature=0.0, n=2))
    engine.step(3)
    completion = await stream.collect()
    assert [answer.text for answer in completion.answers] == ["a0", "a1", "b0", "b1"]
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, 12)


@async_test
@pytest.mark.case(55)
async def test_max_tokens_is_clamped_to_the_room(tokenizer: Tokenizer) -> None:
    for asked, expected in ((None, 128), (4096, 128), (128, 128), (5, 5)):
        frontend, engine = make(tokenizer, "x" * 300)
        stream = frontend.submit([1] * 128, SamplingParams(temperature=0.0, max_tokens=asked, min_tokens=3))
        engine.step(130)
        completion = await stream.collect()
        assert engine.submitted[0].params.max_tokens == expected
        assert completion.max_tokens == [expected]
        assert completion.answers[0].finish_reason == "length"
        assert completion.usage.prompt_tokens + completion.usage.completion_tokens <= 256
    frontend, engine = make(tokenizer, "x")
    frontend.submit([1] * 250, SamplingParams(min_tokens=100))
    assert engine.submitted[0].params.min_tokens == 6


@async_test
@pytest.mark.case(37)
async def test_a_prompt_without_room_is_refused_with_both_numbers(tokenizer: Tokenizer) -> None:
    for info, limited_by in (({}, "max_model_len"), ({"max_model_len": 4096, "pool_tokens": 256}, "kv_cache_bytes")):
        frontend, engine = make(tokenizer, "x", info=info)
        with pytest.raises(PromptTooLong) as caught:
            frontend.submit([1] * 256, GREEDY)
        assert (caught.value.prompt_tokens, caught.value.limit) == (256, 256)
        assert all(word in str(caught.value) for word in ("256", limited_by))
        assert engine.submitted == []
        frontend.submit([1] * 255, GREEDY)
        assert engine.submitted[0].params.max_tokens == 1


@async_test
async def test_what_lies_outside_the_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "x")
    for prompt, params, param in (
        ([], GREEDY, "prompt"),
        ([1, 512], GREEDY, "prompt"),
        ([-1], GREEDY, "prompt"),
        (PROMPT, SamplingParams(logit_bias=((512, 1.0),)), "logit_bias"),
        (PROMPT, SamplingParams(logit_bias=((-1, 1.0),)), "logit_bias"),
        (PROMPT, SamplingParams(stop_token_ids=(512,)), "stop_token_ids"),
    ):
        with pytest.raises(RequestError) as caught:
            frontend.submit_many([PROMPT, prompt], params)
        assert caught.value.param == param
    with pytest.raises(RequestError) as caught:
        frontend.submit(PROMPT, GREEDY, cache_salt="x" * 257)
    assert caught.value.param == "cache_salt"
    assert engine.submitted == []
    assert frontend.num_outstanding == 0


@async_test
@pytest.mark.case(57)
async def test_the_queue_is_bounded_and_everyone_is_answered(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "ab")
    streams, refused = [], []
    for _ in range(100):
        try:
            streams.append(frontend.submit(PROMPT, SamplingParams(temperature=0.0, n=3)))
        except Overloaded as error:
            refused.append(error.retry_after_s)
    assert (len(streams), refused, frontend.num_outstanding) == (5, [1] * 95, 15)  # of 8 + 8 answers
    frontend.submit(PROMPT, GREEDY)
    engine.step(3)
    assert {(await stream.collect()).answers[2].text for stream in streams} == {"ab"}
    assert frontend.num_outstanding == 0
    with pytest.raises(RequestError, match="17 answers at once; this server holds at most 16"):
        frontend.submit(PROMPT, SamplingParams(n=17))


@async_test
async def test_a_reader_that_goes_away_stops_the_engine_at_once(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "a" * 50)

    async def closed(stream: GenerationStream) -> None:
        await stream.aclose()

    async def cancelled(stream: GenerationStream) -> None:
        reading = asyncio.ensure_future(read(stream))
        await settle()
        reading.cancel()
        await asyncio.wait([reading])

    async def cancelled_while_collecting(stream: GenerationStream) -> None:
        collecting = asyncio.ensure_future(stream.collect())
        await settle()
        collecting.cancel()
        await asyncio.wait([collecting])

    for leave in (closed, cancelled, cancelled_while_collecting):
        stream = frontend.submit_many([PROMPT, PROMPT], SamplingParams(temperature=0.0, n=2))
        engine.step(2)
        await leave(stream)
        assert engine.running == []
        assert frontend.num_outstanding == 0
        assert await read(stream) == []
        stream.cancel()  # again, harmless
    with pytest.raises(GenerationFailed) as caught:
        await stream.collect()
    assert caught.value.kind == "cancelled"


@async_test
async def test_cancelling_generate_stops_the_engine(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "a" * 50)
    task = asyncio.ensure_future(frontend.generate("hi", GREEDY))
    await settle()
    assert len(engine.running) == 1
    task.cancel()
    await asyncio.wait([task])
    assert engine.running == []


@async_test
async def test_a_dead_engine_is_told_to_every_reader(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "abcdef")
    streamed = frontend.submit(PROMPT, SamplingParams(temperature=0.0, n=2))
    collecting = asyncio.ensure_future(frontend.submit(PROMPT, GREEDY).collect())
    engine.step()
    await settle()
    engine.die()
    deltas = await read(streamed)
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [
        ("a", None),
        ("a", None),
        ("", "error"),
        ("", "error"),
    ]
    assert deltas[2].error is not None
    assert deltas[2].error.kind == "engine_dead"
    with pytest.raises(GenerationFailed, match=r"killed.*send the request again"):
        await collecting
    with pytest.raises(EngineDeadError):
        frontend.submit_many([PROMPT, PROMPT], GREEDY)
    assert frontend.num_outstanding == 0
    assert not frontend.healthy
    assert not await frontend.reset_prefix_cache()


@async_test
async def test_a_request_that_the_engine_gives_up_fails_alone(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "abc")
    stream = frontend.submit(PROMPT, SamplingParams(temperature=0.0, n=2))
    engine.step()
    engine.fail("a block was lost")
    with pytest.raises(GenerationFailed, match="a block was lost") as caught:
        await stream.collect()
    assert caught.value.kind == "engine_error"
    assert (frontend.num_outstanding, engine.running) == (0, [])
    collecting = asyncio.ensure_future(frontend.submit(PROMPT, SamplingParams(temperature=0.0, n=2)).collect())
    await settle()
    first = engine.running[0]
    first.sink(RequestOutput(first.request.request_id, 0, [], "error", error="another block was lost"))
    with pytest.raises(GenerationFailed, match="another block was lost"):
        await collecting  # without waiting for the answer that goes on
    assert (frontend.num_outstanding, engine.running) == (0, [])
    task = asyncio.ensure_future(frontend.generate("hi", GREEDY))
    await settle()
    engine.step(4)
    assert (await task).answers[0].text == "abc"


@async_test
async def test_a_request_ends_at_its_time_limit(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "abc", options=FrontendOptions(request_timeout_s=0.01))
    for timeout_s in (None, 1000.0):  # the operator's limit bounds the caller's
        stream = frontend.submit(PROMPT, SamplingParams(temperature=0.0, n=2), timeout_s=timeout_s)
        engine.step()
        deltas = await read(stream)
        assert [(delta.index, delta.finish_reason) for delta in deltas if delta.finish_reason] == [
            (0, "error"),
            (1, "error"),
        ]
        assert deltas[-1].error is not None
        assert deltas[-1].error.kind == "timeout"
        assert engine.running == []
        assert frontend.num_outstanding == 0


@async_test
async def test_keys_are_those_of_the_namespace_and_the_salt(tokenizer: Tokenizer) -> None:
    prompt = list(range(40))
    frontend, engine = make(tokenizer, "x")
    frontend.submit(prompt, GREEDY)
    frontend.submit(prompt, GREEDY, cache_salt="tenant", priority=3)
    plain, salted = engine.submitted
    namespace = engine.info.namespace
    assert (plain.namespace_digest, plain.keys) == (namespace.digest(), key_chain(namespace.digest(), prompt, 16))
    assert salted.keys == key_chain(namespace.digest("tenant"), prompt, 16)
    assert (len(plain.keys), salted.cache_salt, salted.priority) == (2, "tenant", 3)
    assert not set(plain.keys) & set(salted.keys)
    frontend, engine = make(tokenizer, "x", options=FrontendOptions(enable_prefix_caching=False))
    frontend.submit(prompt, GREEDY)
    assert engine.submitted[0].keys == []


@async_test
@pytest.mark.case(45)
async def test_a_seed_is_passed_on_and_one_is_drawn_where_there_is_none(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "x")
    for params in (SamplingParams(seed=7, n=4), SamplingParams(), SamplingParams(), GREEDY):
        frontend.submit(PROMPT, params)
    seeds = [request.params.seed for request in engine.submitted]
    assert seeds[0] == 7
    assert None not in seeds[:3]
    assert len(set(seeds[:3])) == 3
    assert seeds[3] is None
    assert engine.submitted[0].params.n == 4  # one request: the engine tells its children apart


@async_test
async def test_logprobs_follow_the_text_and_stop_where_it_does(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "abSTOPcd", "xy")
    stream = frontend.submit(PROMPT, SamplingParams(temperature=0.0, n=2, logprobs=2, stop=("STOP",)))
    engine.step(10)
    deltas = await read(stream)
    said = {
        index: [token for delta in deltas if delta.index == index for token, _ in delta.logprobs or []]
        for index in (0, 1)
    }
    assert said == {0: list(b"ab"), 1: [*b"xy", EOS_ID]}  # no token of the stop string; one entry for the end
    assert (deltas[0].logprobs or [])[0][1].top == [(97, -0.5), (98, -1.5)]


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "logged"),
    [
        ([97, 98, 99], "b", "a", [97]),
        ([97, 261, 98], "b", "aa", [97, 261]),
        ([97, 261, 98], "bab", "aa", [97, 261]),
        ([97, 261, 98], "abab", "a", [97]),
    ],
)
def test_logprobs_at_a_stop_string_are_those_of_the_text(
    tokenizer: Tokenizer, tokens: list[int], stop: str, text: str, logged: list[int]
) -> None:
    """A token that is cut in two keeps its entry."""

    async def ask() -> CompletedAnswer:
        frontend = Frontend(tokenizer, FakeEngineClient(lambda request, index: tokens, auto=True))
        return (await frontend.generate("x", SamplingParams(temperature=0.0, logprobs=0, stop=(stop,)))).answers[0]

    assert tokenizer.token_bytes(261) == b"aba"
    answer = asyncio.run(ask())
    assert (answer.text, [token for token, _ in answer.logprobs or []]) == (text, logged)


@async_test
async def test_nothing_holds_a_stream_that_is_over(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "ab")
    stream = frontend.submit(PROMPT, GREEDY)
    engine.step(3)
    await read(stream)
    watched = weakref.ref(stream)
    del stream
    gc.collect()
    assert watched() is None  # least of all its timer, for ten minutes


@async_test
@pytest.mark.case(29)
async def test_log_probabilities_of_a_prompt_need_no_answer(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "abc")
    stream = frontend.submit(PROMPT, SamplingParams(max_tokens=0, logprobs=1, prompt_logprobs=1))
    assert engine.submitted[0].params.max_tokens == 1
    engine.step()
    completion = await stream.collect()
    assert [(answer.text, answer.token_ids, answer.finish_reason) for answer in completion.answers] == [
        ("", [], "length")
    ]
    assert completion.usage.completion_tokens == 0
    logprobs = stream.prompts[0].prompt_logprobs or []
    assert [entry and entry.logprob for entry in logprobs] == [None, -0.5]


@async_test
async def test_prompts_from_python(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "yes", auto=True)
    for prompt in ("hi", [104, 105], [{"role": "user", "content": "hi"}]):
        completion = await frontend.generate(prompt, GREEDY)  # type: ignore[arg-type]
        assert completion.answers[0].text == "yes"
    first, second, third = (request.token_ids for request in engine.submitted)
    assert first == second == [104, 105]
    assert (third[0], third[-1]) == (IM_START_ID, ord("\n"))
    assert IM_END_ID in third
    with pytest.raises(RequestError, match="refused the messages"):
        await frontend.generate([{"role": "user"}, {"content": "x"}], GREEDY)
    stream = await frontend.stream("hi", GREEDY)
    assert "".join(delta.text for delta in await read(stream)) == "yes"


@async_test
async def test_health_is_told_at_once_and_asks_nothing_of_a_busy_engine(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "abc")
    running = [await frontend.stream("a", GREEDY) for _ in range(16)]  # as many as it takes, and none of them moves
    assert frontend.healthy
    assert len(engine.submitted) == 16
    engine.restart()
    assert frontend.healthy  # it will be back
    await frontend.stop()
    assert (frontend.healthy, frontend.stopping, engine.alive) == (False, True, False)
    for stream in running:
        stream.cancel()
    await frontend.stop()


@async_test
async def test_reset_is_true_only_when_it_was_done(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "abc")
    assert await frontend.reset_prefix_cache()
    engine.reset_result = False
    assert not await frontend.reset_prefix_cache()


@async_test
async def test_every_request_is_recorded_once(tokenizer: Tokenizer) -> None:
    records: list[RequestRecord] = []
    engine = FakeEngineClient(saying("abc", "de"))
    frontend = Frontend(tokenizer, engine, None, records.append)
    stream = frontend.submit(PROMPT, SamplingParams(temperature=0.0, n=2))
    engine.step(4)
    await read(stream)
    cut = frontend.submit(PROMPT, GREEDY)
    engine.step()
    cut.cancel()
    cut.cancel()
    assert [record.finish_reasons for record in records] == [("stop", "stop"), ("abort",)]
    assert (records[0].prompt_tokens, records[0].generation_tokens) == (2, 7)
    assert (records[0].queue_s, records[0].prefill_s) == (0.001, 0.002)
    assert records[0].ttft_s is not None
    assert 0 <= records[0].ttft_s <= records[0].e2e_s


@pytest.mark.parametrize("seed", range(30))
def test_random_requests_leave_nothing_behind(tokenizer: Tokenizer, seed: int) -> None:
    """Whatever mixture of answers, stops, cancels and steps: counts return to zero, texts are the script's."""
    rng = random.Random(seed)
    text = "the quick brown fox é👋 jumps over"

    async def scenario() -> None:
        frontend, engine = make(
            tokenizer, text, per_step=rng.choice([1, 1, 3]), info={"max_num_seqs": 32, "max_queued_requests": 32}
        )
        expected: dict[asyncio.Future[list[Delta]], str] = {}
        for _ in range(60):
            action = rng.random()
            if action < 0.4:
                stop = rng.choice([(), ("fox",), ("zzz",), ("n f", "👋")])
                params = SamplingParams(
                    temperature=0.0, n=rng.choice([1, 1, 3]), stop=stop, logprobs=rng.choice([None, None, 1])
                )
                try:
                    stream = frontend.submit(PROMPT, params, join_deltas=rng.random() < 0.5)
                except Overloaded:
                    continue
                whole = min((text.split(part)[0] for part in stop), key=len, default=text)
                expected[asyncio.ensure_future(read(stream))] = whole
            elif action < 0.5 and expected:
                rng.choice(list(expected)).cancel()
            else:
                engine.step(rng.randrange(1, 4))
            if rng.random() < 0.5:
                await settle()
        engine.step(60)
        await asyncio.wait(expected)
        for reading, whole in expected.items():
            if not reading.cancelled():
                deltas = reading.result()
                for index in {delta.index for delta in deltas}:
                    assert "".join(delta.text for delta in deltas if delta.index == index) == whole
        assert frontend.num_outstanding == 0
        assert engine.running == []

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize("error", [PromptTooLong(5, 4, "x"), RequestError("m", "p"), GenerationFailed("m", "timeout")])
def test_errors_survive_a_trip_between_processes(error: Exception) -> None:
    twin = copy.copy(error)  # made from what the base class was given, as pickle does
    assert (type(twin), str(twin), vars(twin)) == (type(error), str(error), vars(error))


@async_test
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"priority": 1 << 70}, "priority is"),
        ({"priority": None}, "priority is None"),
        ({"cache_salt": "\ud800"}, "cache_salt is"),
        ({"timeout_s": "x"}, "timeout_s is 'x'"),
        ({"timeout_s": -1}, "timeout_s is -1"),
    ],
)
async def test_arguments_from_python_that_make_no_sense_leave_nothing_behind(
    tokenizer: Tokenizer, fields: dict, words: str
) -> None:
    frontend, engine = make(tokenizer, "abc")
    with pytest.raises(RequestError, match=words):
        frontend.submit(PROMPT, SamplingParams(), **fields)
    assert frontend.num_outstanding == 0
    assert engine.submitted == []


@async_test
async def test_an_engine_that_cannot_take_a_request_leaves_nothing_behind(tokenizer: Tokenizer) -> None:
    frontend, engine = make(tokenizer, "abc")

    def refuse(*_: object) -> None:
        raise OverflowError("too large for the wire")

    engine.submit = refuse  # type: ignore[method-assign]
    with pytest.raises(OverflowError):
        frontend.submit(PROMPT, SamplingParams())
    assert frontend.num_outstanding == 0
