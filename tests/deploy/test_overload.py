"""More than can be served: every request is answered, and readers that are slow hold up nobody else."""

from __future__ import annotations

import asyncio

import pytest

from tests.deploy.asgi_client import Call, fetch, start
from tests.deploy.async_test import async_test, settle
from tests.deploy.fake_server import COMPLETIONS, PROMPT, Server, content, make
from tests.deploy.fleet import served
from tests.deploy.sockets import ask, serving
from tournant.deploy.frontend import MEAN_PROMPT_TOKENS, FrontendOptions
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.errors import Overloaded
from tournant.workers.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=4)


def prompt(num_tokens: int, **fields: object) -> dict[str, object]:
    return {"prompt": [1] * num_tokens, "temperature": 0} | fields


async def finish(server: Server, calls: list[Call]) -> None:
    while server.engine.running:
        server.engine.step()
        await settle()
    await asyncio.gather(*(call.task for call in calls))


@async_test
async def test_prompts_that_wait_are_bounded_by_their_tokens(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "abc", auto=False, options=FrontendOptions(max_queued_tokens=300))
    calls = [start(server.app, "POST", COMPLETIONS, prompt(200))]
    await settle()
    refused = await fetch(server.app, "POST", COMPLETIONS, prompt(101))
    assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "overloaded", "1")
    assert "prompts of 200 tokens wait to be computed, of at most 300, and this request has 101 more" in refused.text
    calls.append(start(server.app, "POST", COMPLETIONS, prompt(100)))
    await settle()
    assert (await fetch(server.app, "POST", COMPLETIONS, prompt(1))).status == 503
    server.engine.step()  # all have begun: nothing waits any more
    calls.append(start(server.app, "POST", COMPLETIONS, prompt(250)))
    await settle()
    await finish(server, calls)
    assert [call.status for call in calls] == [200] * 3
    assert server.engine.prefill_tokens == 0


@async_test
async def test_one_request_is_never_too_long_for_an_empty_queue(tokenizer: Tokenizer) -> None:
    server = make(tokenizer, "abc", options=FrontendOptions(max_queued_tokens=1))
    for _ in range(2):
        assert (await fetch(server.app, "POST", COMPLETIONS, {"prompt": [[1] * 200] * 3})).status == 200


@async_test
async def test_nothing_is_encoded_for_a_queue_that_is_full(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make(tokenizer, "abc", auto=False, options=FrontendOptions(max_queued_tokens=10))
    call = start(server.app, "POST", COMPLETIONS, prompt(11))
    await settle()
    monkeypatch.setattr(server.frontend.tokenizer, "encode_async", pytest.fail)
    assert (await fetch(server.app, "POST", COMPLETIONS, PROMPT)).status == 503
    monkeypatch.undo()
    await finish(server, [call])


@async_test
async def test_the_bound_follows_from_how_many_may_wait(tokenizer: Tokenizer) -> None:
    long = {"max_model_len": 4096, "pool_tokens": 1 << 16, "max_num_seqs": 2, "max_queued_requests": 2}
    server = make(tokenizer, "abc", auto=False, info=long)
    limit = 4 * MEAN_PROMPT_TOKENS
    streams = [server.frontend.submit([1] * (limit // 2), PARAMS) for _ in range(2)]
    with pytest.raises(Overloaded, match=rf"of {limit} tokens wait to be computed, of at most {limit}, and"):
        server.frontend.submit([1], PARAMS)
    streams[0].cancel()
    streams.append(server.frontend.submit([1], PARAMS))
    for stream in streams:
        stream.cancel()
    assert server.engine.prefill_tokens == 0


@async_test
async def test_a_reader_that_is_slow_pauses_its_own_stream_only(tokenizer: Tokenizer) -> None:
    text = "x" * 200
    server = make(tokenizer, text, auto=False)
    body = PROMPT | {"stream": True, "max_tokens": 200}
    slow, *quick = (start(server.app, "POST", COMPLETIONS, body) for _ in range(4))
    await settle()
    server.engine.step()
    await settle()
    slow.stop_reading()
    await finish(server, quick)
    assert [content(call.events) for call in quick] == [text] * 3
    assert not slow.task.done()
    assert server.frontend.num_outstanding == 0  # the engine does not wait for it
    assert len(slow.sent) <= 3
    assert (await fetch(server.app, "GET", "/health")).status == 200
    slow.read_on()
    await slow.task
    assert content(slow.events) == text
    assert len(slow.sent) <= 5  # what it was late for came joined


@async_test
@pytest.mark.parametrize("ingress", ["direct", "resilient"])
async def test_a_socket_that_is_not_read_pauses_its_own_stream_only(tokenizer: Tokenizer, ingress: str) -> None:
    """As above, through the server. With log-probabilities events are not joined, and are more than sockets hold."""
    info = {"max_model_len": 10_000, "pool_tokens": 1 << 17}
    body = PROMPT | {"stream": True, "max_tokens": 8000, "ignore_eos": True}
    async with (
        served(tokenizer, "x" * 8000, ingress, per_step=20, info=info) as server,
        serving(server.app) as port,
    ):
        slow, slow_writer = await ask(port, COMPLETIONS, body | {"logprobs": 20})
        while not server.engine.submitted:
            await asyncio.sleep(0)
        quick, quick_writer = await ask(port, COMPLETIONS, body)
        reading = asyncio.ensure_future(quick.read())
        while len(server.engine.submitted) < 2:
            await asyncio.sleep(0)
        while server.engine.running:
            server.engine.step()
            await asyncio.sleep(0)
        assert b"data: [DONE]" in await reading
        while server.frontend.num_outstanding:  # the last step is on its way
            await asyncio.sleep(0)
        assert server.app.num_open == 1  # the slow one is not done, though the engine is
        late = await slow.read()
        assert late.count(b'"token_logprobs"') == 400
        assert b"data: [DONE]" in late
        for writer in (slow_writer, quick_writer):
            writer.close()
