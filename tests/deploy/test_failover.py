"""Engines die, drain and change under streams, and whoever reads them does not notice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.async_test import async_test, settle
from tests.deploy.fake_engine import FakeEngineClient, make_info
from tests.deploy.fleet import Fleet, Site, continuing, fleet, until
from tests.workers.harness import files_of
from tournant.deploy.answers import Delta
from tournant.deploy.errors import GenerationFailed
from tournant.deploy.frontend import Frontend, FrontendOptions
from tournant.deploy.generation import CompletedAnswer, GenerationStream
from tournant.deploy.resume import MAX_RESUMES, MAX_TURNS, rest_of, wait_s
from tournant.deploy.tokenizer import Tokenizer
from tournant.kvstore.block import Namespace, key_chain
from tournant.workers.config import EngineConfig
from tournant.workers.engine_client import ProcessEngineClient
from tournant.workers.messages import EngineRequest
from tournant.workers.sampling_params import SamplingParams

OPTIONS = FrontendOptions(max_resumes=MAX_RESUMES)
GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
PROMPT = [104, 105]
TEXT = "the quick brown fox jumps over the lazy dog, häßlich und schön"
CASES = [
    GREEDY,
    replace(GREEDY, n=2),
    replace(GREEDY, stop=("fox jumps",)),
    replace(GREEDY, stop=("jumps over", "zzz"), include_stop_str_in_output=True, logprobs=2),
    replace(GREEDY, max_tokens=80, logprobs=0, n=2, prompt_logprobs=1),
    replace(GREEDY, max_tokens=60, min_tokens=50, stop=("quick",)),
    replace(GREEDY, max_tokens=1),
]


def told(deltas: Sequence[Delta], params: SamplingParams) -> list[CompletedAnswer]:
    """What a reader has seen of each answer."""
    wholes = [Delta(index) for index in range(params.n)]
    for delta in deltas:
        if delta.error is not None:
            raise delta.error
        wholes[delta.index].merge(delta)
    return [
        CompletedAnswer(one.index, one.text, one.token_ids, one.finish_reason or "", one.stop_reason, one.logprobs)
        for one in wholes
    ]


async def read(stream: GenerationStream) -> list[Delta]:
    return [delta async for delta in stream]


@asynccontextmanager
async def front(
    tokenizer: Tokenizer, names: Sequence[str] = ("a", "b", "c"), options: FrontendOptions = OPTIONS, **engine: Any
) -> AsyncIterator[tuple[Frontend, Fleet]]:
    async with fleet() as found:
        for name in names:
            await found.add(name, FakeEngineClient(continuing(TEXT), **engine))
        if not names:
            found.pool._info = make_info()
        yield Frontend(tokenizer, found.pool, options), found


def engines(found: Fleet) -> list[FakeEngineClient]:
    return [site.engine for site in found.sites.values()]


async def busy(found: Fleet) -> tuple[str, Site]:
    """The replica that has something to do, once there is one."""
    await until(lambda: any(engine.running for engine in engines(found)))
    return next((name, site) for name, site in found.sites.items() if site.engine.running)


async def logged(stream: GenerationStream, count: int) -> None:
    """Return once the first answer has so many tokens."""
    await until(lambda: len(stream.answers[0].token_ids) >= count)


@pytest.mark.parametrize("seed", range(6))
@async_test
async def test_whatever_dies_whenever_answers_are_those_of_an_engine_that_lives(
    tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    alone = FakeEngineClient(continuing(TEXT), auto=True)
    undisturbed = Frontend(tokenizer, alone)
    want = [told(await read(undisturbed.submit(PROMPT, params)), params) for params in CASES]
    async with front(tokenizer, info=make_info(max_num_seqs=64)) as (frontend, found):
        streams = [frontend.submit(PROMPT, params) for params in CASES]
        readers = [asyncio.ensure_future(read(stream)) for stream in streams]
        born = 0
        while not all(reader.done() for reader in readers):
            for engine in engines(found):
                engine.step(rng.randrange(3))
                await asyncio.sleep(0)
            if born < MAX_RESUMES and rng.random() < 0.2:
                born += 1
                name = rng.choice(list(found.sites))
                await (found.sites[name].server.drain(0.0) if rng.random() < 0.3 else settle())
                found.lose(name)
                await found.add(f"new{born}", FakeEngineClient(continuing(TEXT), make_info(max_num_seqs=64)))
            await asyncio.sleep(0)
        assert born == MAX_RESUMES
        for stream, reader, params, expected in zip(streams, readers, CASES, want, strict=True):
            assert told(reader.result(), params) == expected
            assert stream.usage.completion_tokens == sum(len(one.token_ids) for one in expected)
            assert (stream.prompts[0].prompt_logprobs is None) == (params.prompt_logprobs is None)
        assert frontend.num_outstanding == 0
        await until(lambda: not any(engine.running for engine in engines(found)))


@async_test
async def test_more_deaths_than_are_borne_end_in_an_error_that_says_so(tokenizer: Tokenizer) -> None:
    async with front(tokenizer, names=("a",)) as (frontend, found):
        stream = frontend.submit(PROMPT, GREEDY)
        for number in range(MAX_RESUMES + 1):
            name, site = await busy(found)
            site.engine.step(2)
            await logged(stream, 2 * (number + 1))
            found.lose(name)
            await found.add(f"next{number}", FakeEngineClient(continuing(TEXT)))
        deltas = await read(stream)
        assert "".join(delta.text for delta in deltas) == TEXT[: 2 * (MAX_RESUMES + 1)]
        assert deltas[-1].error is not None
        assert deltas[-1].error.kind == "engine_dead"
        assert f"lost {MAX_RESUMES + 1} times" in str(deltas[-1].error)
        assert frontend.num_outstanding == 0


@async_test
async def test_being_handed_on_is_no_death(tokenizer: Tokenizer) -> None:
    async with front(tokenizer, names=("a", "b")) as (frontend, found):
        stream = frontend.submit(PROMPT, GREEDY)
        for number in range(MAX_RESUMES + 3):
            _, site = await busy(found)
            site.engine.step()
            await logged(stream, number + 1)
            await site.server.drain(0.0)
            other, _ = await busy(found)
            assert found.sites[other] is not site
            site.server.serve_again(0)
            await until(lambda: all(one.serving for one in found.pool.engines))
        assert stream.answers[0].num_deaths == 0
        for engine in engines(found):
            engine.step(30)
        assert "".join(delta.text for delta in await read(stream)) == TEXT[:30]


@async_test
async def test_one_that_goes_from_engine_to_engine_for_ever_ends(tokenizer: Tokenizer) -> None:
    async with front(tokenizer, names=("a",)) as (frontend, found):
        stream = frontend.submit(PROMPT, GREEDY)
        await until(lambda: bool(engines(found)[0].running))
        answer = stream.answers[0]
        answer.num_turns = MAX_TURNS
        stream_of_engine = next(iter(found.sites["a"].server._streams))
        stream_of_engine.hand_back("it is full")
        (delta,) = await read(stream)
        assert delta.error is not None
        assert "it is full" in str(delta.error)
    assert [wait_s(turn) for turn in (1, 2, 3, 30)] == [0.0, 0.05, 0.1, 2.0]


@async_test
async def test_without_an_engine_requests_wait_but_not_longer_than_they_may(tokenizer: Tokenizer) -> None:
    async with front(tokenizer, names=()) as (frontend, found):
        short = frontend.submit(PROMPT, GREEDY, timeout_s=0.05)
        (delta,) = await read(short)
        assert delta.error is not None
        assert delta.error.kind == "timeout"
        assert found.pool.num_waiting == 0
        long = frontend.submit(PROMPT, GREEDY)
        await found.add("a", FakeEngineClient(continuing(TEXT)))
        await until(lambda: bool(engines(found)[0].running))
        engines(found)[0].step(3)
        await until(lambda: len(long.answers[0].token_ids) == 3)
        found.lose("a")
        await until(lambda: found.pool.num_waiting == 1)
        late = await found.add("b", FakeEngineClient(continuing(TEXT), auto=True))
        assert "".join(delta.text for delta in await read(long)) == TEXT[:30]
        (request,) = late.engine.submitted
        assert (request.num_output, request.token_ids) == (3, [*PROMPT, *TEXT[:3].encode()])


@async_test
async def test_a_reader_that_goes_away_while_its_answer_is_nowhere_leaves_nothing(tokenizer: Tokenizer) -> None:
    async with front(tokenizer, names=("a",)) as (frontend, found):
        stream = frontend.submit(PROMPT, replace(GREEDY, n=2))
        await until(lambda: len(engines(found)[0].running) == 2)
        found.lose("a")
        await until(lambda: found.pool.num_waiting == 2)
        stream.cancel()
        assert (found.pool.num_waiting, frontend.num_outstanding) == (0, 0)


def info_of(weights_id: bytes) -> Any:
    return make_info(namespace=Namespace(weights_id, "fp32", "fp32", b"l" * 32))


@async_test
async def test_an_answer_that_was_begun_goes_on_only_on_its_own_weights(tokenizer: Tokenizer) -> None:
    old, new = b"o" * 32, b"n" * 32
    async with fleet() as found:
        frontend = Frontend(tokenizer, found.pool, OPTIONS)
        await found.add("old", FakeEngineClient(continuing(TEXT), info_of(old)))
        begun, unread = frontend.submit(PROMPT, GREEDY), frontend.submit(PROMPT, GREEDY)
        await until(lambda: len(engines(found)[0].running) == 2)
        engines(found)[0].step(2)
        first = await anext(begun)
        await until(lambda: len(unread.answers[0].token_ids) == 2)
        other = await found.add("new", FakeEngineClient(continuing("other words"), info_of(new), auto=True), epoch=1)
        found.lose("old")
        await until(lambda: found.pool.num_waiting == 2)
        assert other.engine.submitted == []
        assert found.pool.preferred() == (new, 1)

        async def swap() -> Tokenizer:
            found.pool.use(new)
            frontend.epoch = 1
            return tokenizer

        await frontend.change_weights(swap, None)
        assert found.pool.num_waiting == 2  # the registry still names the old one
        found.tell()
        rest = await read(begun)
        assert first.text == TEXT[:2]
        assert rest[-1].error is not None
        assert rest[-1].error.kind == "weights_changed"
        completion = await unread.collect()
        assert completion.answers[0].text == "other words"
        assert completion.served_by.epoch == 1
        assert completion.served_by.weights_id == new.hex()


@async_test
async def test_who_is_inside_stays_there_while_new_weights_are_taken_up(tokenizer: Tokenizer) -> None:
    async with front(tokenizer, names=("a",)) as (frontend, found):
        stream = frontend.submit(PROMPT, GREEDY)
        await until(lambda: bool(engines(found)[0].running))

        async def swap() -> Tokenizer:
            return tokenizer

        await frontend.change_weights(swap, None)
        engines(found)[0].step(30)
        assert "".join(delta.text for delta in await read(stream)) == TEXT[:30]


@async_test
async def test_without_other_engines_a_death_is_told_at_once(tokenizer: Tokenizer) -> None:
    engine = FakeEngineClient(continuing(TEXT))
    stream = Frontend(tokenizer, engine).submit(PROMPT, GREEDY)
    engine.step()
    engine.die()
    with pytest.raises(GenerationFailed, match="the engine ended: killed"):
        await stream.collect()


def test_the_rest_of_an_answer_has_the_keys_of_the_longer_prefix() -> None:
    info = make_info(rope_switch=40, long_layout_id=b"m" * 32)
    prompt, log = list(range(35)), list(range(100, 130))
    digest = info.namespace_for(35).digest("salt")
    params = SamplingParams(n=3, max_tokens=50, prompt_logprobs=1)
    request = EngineRequest(1, prompt, params, key_chain(digest, prompt, 16), digest, "salt", 4, weights_id=b"w" * 32)
    for cut in (0, 3, 5, 6, 30):
        found = rest_of(request, 9, log[:cut], 2, info, prompt_is_told=cut > 0)
        tokens = prompt + log[:cut]
        namespace = info.namespace_for(len(tokens)).digest("salt")
        assert found.keys == key_chain(namespace, tokens, 16)
        assert (found.token_ids, found.namespace_digest, found.num_output, found.first_index) == (
            tokens,
            namespace,
            cut,
            2,
        )
        assert (found.params.n, found.params.max_tokens, found.params.prompt_logprobs) == (1, 50, None if cut else 1)
        assert (found.request_id, found.priority, found.cache_salt, found.weights_id) == (9, 4, "salt", b"w" * 32)


REAL = [
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True, n=2, logprobs=1),
    SamplingParams(temperature=0.9, seed=4, max_tokens=60, ignore_eos=True, frequency_penalty=0.8, top_p=0.9),
    SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True, stop=("q",), min_tokens=20),
    SamplingParams(temperature=1.0, seed=6, max_tokens=60, min_tokens=30, stop_token_ids=tuple(range(100, 140))),
]


@pytest.mark.timeout(240)
def test_real_engines_are_killed_and_every_token_is_what_it_would_have_been(
    tiny_model: Path, tokenizer: Tokenizer
) -> None:
    config = EngineConfig(
        dtype="float32", device="cpu", deterministic=True, num_threads=1, kv_cache_bytes=64 * 16 * 2048
    )
    files = files_of(tiny_model)
    prompt = list(b"Once upon a time")

    async def answers(frontend: Frontend) -> list[list[CompletedAnswer]]:
        streams = [frontend.submit(prompt, params) for params in REAL]
        return [(await stream.collect()).answers for stream in streams]

    async def scenario() -> None:
        found = Fleet()
        try:
            for name in ("a", "b"):
                await found.add(name, await ProcessEngineClient.start(config, files, timeout_s=120))
            frontend = Frontend(tokenizer, found.pool, OPTIONS)
            want = await answers(frontend)
            streams = [frontend.submit(prompt, params) for params in REAL]
            reading = [asyncio.ensure_future(stream.collect()) for stream in streams]
            busiest = max(found.pool.engines, key=lambda engine: engine.num_answers)
            doomed = found.sites[busiest.replica].engine
            its = [stream for stream in streams if busiest.client.num_answers and stream._num_generated < 10]
            await until(lambda: min(stream._num_generated for stream in its) >= 5)
            os.kill(doomed.process.pid, signal.SIGKILL)
            got = [(await one).answers for one in reading]
            assert got == want
            assert sum(answer.num_deaths for stream in streams for answer in stream.answers) > 0
            assert not doomed.alive
        finally:
            await found.close()

    asyncio.run(asyncio.wait_for(scenario(), 230))
