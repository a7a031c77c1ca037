"""Cases about KV blocks: prefix hits, preemption, forks, rejected and aborted requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.cases.conftest import Ref, random_prompts
from tests.helpers.live_server import SMALL_BLOCKS, LiveServer, live_server

EXTRA: dict[str, Any] = {"ignore_eos": True}


def complete(server: LiveServer, prompt: list[int], max_tokens: int = 16, **fields: Any) -> Any:
    return server.client.completions.create(
        model=server.name, prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=EXTRA, **fields
    )


def cached_tokens(completion: Any) -> int:
    return completion.usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("length", [63, 64, 65])
def test_case_25_prompt_of_whole_blocks_fully_cached(small_server: LiveServer, ref: Ref, length: int) -> None:
    (prompt,) = random_prompts(1, length, seed=length)
    first, second = complete(small_server, prompt), complete(small_server, prompt)
    assert first.choices[0].text == second.choices[0].text == ref(prompt)
    assert (cached_tokens(first), cached_tokens(second)) == (0, (length - 1) // 16 * 16)


def test_case_27_cache_is_transparent_after_stop_strings(small_server: LiveServer, ref: Ref) -> None:
    prompts = random_prompts(8, 40, seed=27)
    texts = [ref(prompt, 32) for prompt in prompts]
    stops = [text[len(text) // 2 :][:3] for text in texts]
    with ThreadPoolExecutor(8) as pool:
        stopped = list(
            pool.map(lambda pair: complete(small_server, pair[0], 32, stop=[pair[1]]), zip(prompts, stops, strict=True))
        )
    for completion, text, stop in zip(stopped, texts, stops, strict=True):
        assert completion.choices[0].text == text[: text.index(stop)]
        assert completion.choices[0].finish_reason == "stop"
    for prompt, text in zip(prompts, texts, strict=True):
        again = complete(small_server, prompt, 32)
        assert again.choices[0].text == text
        assert cached_tokens(again) == 32


def test_case_29_prompt_logprobs_while_the_prefix_is_cached(small_server: LiveServer) -> None:
    (prompt,) = random_prompts(1, 50, seed=29)
    complete(small_server, prompt)
    found = [complete(small_server, prompt, 1, echo=True, logprobs=1).choices[0].logprobs for _ in range(2)]
    assert found[0] == found[1]
    assert len(found[0].token_logprobs) == 50 + 1
    assert found[0].token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in found[0].token_logprobs[1:])


def test_case_31_many_answers_under_memory_pressure(small_server: LiveServer) -> None:
    prompts = random_prompts(5, 30, seed=31)
    before = small_server.engine_client.stats.num_preemptions

    def ask(prompt: list[int]) -> Any:
        return small_server.client.completions.create(
            model="m", prompt=prompt, max_tokens=200, n=8, temperature=1.0, seed=1, extra_body=EXTRA
        )

    with ThreadPoolExecutor(5) as pool:
        for completion in pool.map(ask, prompts):
            assert len(completion.choices) == 8
            assert len({choice.text for choice in completion.choices}) == 8
            assert completion.usage.completion_tokens == 8 * 200
    assert small_server.engine_client.stats.num_preemptions > before


def test_case_33_a_rejected_turn_leaves_the_session_intact(small_server: LiveServer, ref: Ref) -> None:
    (history,) = random_prompts(1, 700, seed=33)
    assert complete(small_server, history).choices[0].text == ref(history)
    with pytest.raises(openai.BadRequestError, match="1024"):
        complete(small_server, history + random_prompts(1, 400, seed=34)[0])
    turn = history + random_prompts(1, 40, seed=35)[0]
    answer = complete(small_server, turn)
    assert answer.choices[0].text == ref(turn)
    assert cached_tokens(answer) == 688
    counters = small_server.engine_client.stats
    assert min(counters.kv_used, counters.num_running, counters.num_waiting, counters.prefix_hit_tokens) >= 0


def test_case_37_a_prompt_larger_than_the_pool_is_rejected_and_nobody_waits(small_server: LiveServer, ref: Ref) -> None:
    (long,), short = random_prompts(1, 2000, seed=37), random_prompts(10, 20, seed=38)
    with ThreadPoolExecutor(11) as pool:
        rejected = pool.submit(complete, small_server, long)
        answers = [pool.submit(complete, small_server, prompt) for prompt in short]
        for prompt, answer in zip(short, answers, strict=True):
            assert answer.result(timeout=30).choices[0].text == ref(prompt)
        with pytest.raises(openai.BadRequestError) as error:
            rejected.result(timeout=30)
    assert "2000" in error.value.message
    assert str(SMALL_BLOCKS * 16) in error.value.message


def test_case_39_preempted_requests_answer_completely(small_server: LiveServer, ref: Ref) -> None:
    prompts = random_prompts(12, 20, seed=39)
    before = small_server.engine_client.stats.num_preemptions
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda prompt: complete(small_server, prompt, 300), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.usage.completion_tokens == 300
        assert answer.choices[0].text == ref(prompt, 300)
    assert small_server.engine_client.stats.num_preemptions - before >= 5


def test_64_streams_on_a_pool_for_a_third_of_them(small_server: LiveServer, ref: Ref) -> None:
    """Mixed lengths; every stream equals its solo run."""
    prompts = [prompt[: 5 + 7 * (i % 9)] for i, prompt in enumerate(random_prompts(64, 64, seed=64))]
    lengths = [10 + 5 * (i % 7) for i in range(64)]

    def stream(prompt: list[int], max_tokens: int) -> str:
        chunks = complete(small_server, prompt, max_tokens, stream=True)
        return "".join(choice.text for chunk in chunks for choice in chunk.choices)

    with ThreadPoolExecutor(64) as pool:
        texts = list(pool.map(stream, prompts, lengths))
    assert texts == [ref(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]


def test_40_of_64_streams_closed_midway_leave_nothing_behind(small_server: LiveServer, ref: Ref) -> None:
    prompts = random_prompts(64, 20, seed=65)

    def stream(index: int) -> str | None:
        body = {
            "model": "m",
            "prompt": prompts[index],
            "max_tokens": 120 if index < 40 else 12,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        url = f"{small_server.url}/v1/completions"
        with httpx.Client(timeout=60) as http, http.stream("POST", url, json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            if index < 40:
                next(lines)
                return None
            return "".join(lines)

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(stream, range(64)))
    small_server.assert_at_rest()
    assert answers[:40] == [None] * 40
    assert all(text is not None and text.endswith("[DONE]") for text in answers[40:])
    again = complete(small_server, prompts[0], 12)
    assert again.choices[0].text == ref(prompts[0], 12)


def test_case_57_overflow_answers_everyone(tiny_model: Path) -> None:
    """Far more requests than the queue holds: each gets 200, or 503 with Retry-After."""
    with live_server(tiny_model, engine={"max_num_seqs": 4, "max_queued_requests": 12}) as server:
        body = {"model": "m", "prompt": [65] * 20, "max_tokens": 12, "temperature": 0, "ignore_eos": True}

        def flood(count: int) -> list[tuple[int, str | None]]:
            with httpx.Client(base_url=server.url, timeout=60) as http:
                answers = [http.post("/v1/completions", json=body) for _ in range(count)]
            return [(answer.status_code, answer.headers.get("retry-after")) for answer in answers]

        with ThreadPoolExecutor(40) as pool:
            results = [result for part in pool.map(flood, [10] * 40) for result in part]
        assert len(results) == 400
        kinds = set(results)
        assert {status for status, _ in kinds} == {200, 503}
        assert all(retry is not None for status, retry in kinds if status == 503)
        server.assert_at_rest()
        assert server.http.post("/v1/completions", json=body).status_code == 200
