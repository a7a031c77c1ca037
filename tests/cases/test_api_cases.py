"""Cases about the API: streams, stop strings, characters, seeds, log-probabilities, limits, usage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases.conftest import Ref, random_prompts
from tests.helpers.live_server import LiveServer, live_server, sse_events
from tests.helpers.tiny_model import BOS_ID, build_tiny_model


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LiveServer]:
    """The default model as it is served: bf16, real text."""
    with live_server(
        None, "smollm2", {"dtype": "bfloat16", "deterministic": False, "kv_cache_bytes": 1 << 26}
    ) as server:
        yield server


def streamed(server: LiveServer, prompt: Any, **fields: Any) -> list[str]:
    """The text pieces of a streamed completion, in order."""
    chunks = server.client.completions.create(model=server.name, prompt=prompt, temperature=0, stream=True, **fields)
    return [choice.text for chunk in chunks for choice in chunk.choices]


def whole(server: LiveServer, prompt: Any, **fields: Any) -> Any:
    return server.client.completions.create(model=server.name, prompt=prompt, temperature=0, **fields).choices[0]


def test_case_41_a_stop_string_never_leaks_its_head(smollm2: LiveServer) -> None:
    prompt = '"ABCDEFGHIJ", ' * 6 + '"'
    assert whole(smollm2, prompt, max_tokens=12).text.startswith("ABCDEFGHIJ")
    fields = {"max_tokens": 30, "stop": "DEFGHIJ"}
    pieces, choice = streamed(smollm2, prompt, **fields), whole(smollm2, prompt, **fields)
    assert "".join(pieces) == choice.text == "ABC"
    assert choice.finish_reason == "stop"


def test_case_41_on_every_place_of_a_text(small_server: LiveServer, ref: Ref) -> None:
    (prompt,) = random_prompts(1, 30, seed=41)
    text = ref(prompt, 24)
    for start in range(0, len(text) - 4, 3):
        stop = text[start : start + 4]
        extra = {"ignore_eos": True}
        pieces = streamed(small_server, prompt, max_tokens=24, stop=stop, extra_body=extra)
        assert (
            "".join(pieces)
            == text[: text.index(stop)]
            == whole(small_server, prompt, max_tokens=24, stop=stop, extra_body=extra).text
        )


@pytest.mark.parametrize("prompt", ["🙂🎉🍣" * 6, "你好世界。" * 6, "สวัสดีชาวโลก " * 4])
def test_case_43_split_characters_arrive_whole(smollm2: LiveServer, prompt: str) -> None:
    pieces = streamed(smollm2, prompt, max_tokens=24)
    text = whole(smollm2, prompt, max_tokens=24).text
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    assert any(ord(character) > 127 for character in text), "the model did not continue in the script asked about"


def test_case_43_cut_inside_a_character_is_the_same_streamed_or_not(smollm2: LiveServer) -> None:
    for max_tokens in range(1, 9):
        pieces = streamed(smollm2, "🙂🎉🍣" * 6, max_tokens=max_tokens)
        assert "".join(pieces) == whole(smollm2, "🙂🎉🍣" * 6, max_tokens=max_tokens).text
        assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_case_45_seeded_answers_differ_and_come_back(small_server: LiveServer) -> None:
    (prompt,) = random_prompts(1, 30, seed=45)

    def texts(seed: int) -> list[str]:
        completion = small_server.client.completions.create(
            model="m", prompt=prompt, n=4, seed=seed, temperature=1, max_tokens=20
        )
        return [choice.text for choice in sorted(completion.choices, key=lambda choice: choice.index)]

    first = texts(7)
    assert len(set(first)) == 4
    assert texts(7) == first
    assert not set(texts(8)) & set(first)


def test_case_47_infinite_logprobs_stay_json(small_server: LiveServer) -> None:
    (prompt,) = random_prompts(1, 10, seed=47)
    body = {"model": "m", "prompt": prompt, "echo": True, "logprobs": 5, "top_k": 1, "max_tokens": 4,
            "logit_bias": {"65": -100}}  # fmt: skip
    response = small_server.http.post("/v1/completions", json=body)
    assert response.status_code == 200

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    parsed = json.loads(response.text, parse_constant=refuse)
    values = parsed["choices"][0]["logprobs"]["token_logprobs"]
    assert len(values) == 14
    assert all(value is None or -9999 <= value <= 0 for value in values)


@pytest.mark.parametrize(
    "bias",
    ['{"AI": 1}', '{"": 1}', '{"1.5": 1}', '{"5": NaN}', '{"5": 1e9}', '{"5": null}', '{"-1": 1}', '{"512": 1}', "[5]"],
)
def test_case_49_bad_logit_bias_is_400_and_harms_nobody(small_server: LiveServer, bias: str) -> None:
    headers = {"content-type": "application/json"}
    body = f'{{"model": "m", "prompt": [1, 2, 3], "max_tokens": 2, "logit_bias": {bias}}}'
    response = small_server.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 400, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    good = small_server.http.post("/v1/completions", json={"model": "m", "prompt": [1, 2, 3], "max_tokens": 2})
    assert good.status_code == 200


def test_case_51_exactly_one_bos(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "bos", add_bos=True)
    with live_server(model, "bos") as server:
        messages = [{"role": "user", "content": "hello"}]
        chat = server.http.post("/tokenize", json={"model": "bos", "messages": messages}).json()["tokens"]
        raw = server.http.post("/tokenize", json={"model": "bos", "prompt": "hello"}).json()["tokens"]
        assert chat.count(BOS_ID) == raw.count(BOS_ID) == 1
        assert chat[0] == raw[0] == BOS_ID
        usage = server.client.completions.create(model="bos", prompt="hello", max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens == len(raw)


def test_case_51_default_model(smollm2: LiveServer) -> None:
    """Its BOS is the mark that begins every message: the template writes it, raw text has none."""
    chat = smollm2.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hello"}]}).json()["tokens"]
    text = smollm2.http.post("/detokenize", json={"tokens": chat}).json()["prompt"]
    assert text.count("<|im_start|>") == 3  # system, user and the answer that begins
    assert not text.startswith("<|im_start|><|im_start|>")
    assert 1 not in smollm2.http.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]


@pytest.mark.parametrize("n", [1, 2])
def test_case_53_usage_comes_last_in_a_stream(small_server: LiveServer, n: int) -> None:
    body = {"model": "m", "prompt": [65] * 20, "max_tokens": 5, "n": n, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    events = sse_events(small_server.http.post("/v1/completions", json=body).text)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (20, 5 * n, 20 + 5 * n)


def test_case_55_max_tokens_beyond_the_room_is_clamped(small_server: LiveServer) -> None:
    (prompt,) = random_prompts(1, 512, seed=55)
    body = {"model": "m", "prompt": prompt, "max_tokens": 1024, "ignore_eos": True, "temperature": 0}
    response = small_server.http.post("/v1/completions", json=body)
    assert response.status_code == 200
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.json()["usage"]["total_tokens"] == 1024
    assert response.headers["x-tournant-max-tokens"] == "512"


def test_the_capital_of_france(smollm2: LiveServer) -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    client = smollm2.client.chat.completions
    answer = client.create(model="smollm2", messages=messages, temperature=0, max_tokens=40).choices[0]
    assert "Paris" in (answer.message.content or "")
    assert answer.finish_reason == "stop"
    chunks = client.create(model="smollm2", messages=messages, temperature=0, max_tokens=40, stream=True)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == answer.message.content
