from __future__ import annotations

import json
from typing import Any

import pytest

from tournant.deploy.openai_schema import ApiError, ChatBody, CompletionBody, TokenizeBody, parse_body
from tournant.workers.sampling_params import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"messages": MESSAGES} | fields).encode())


def completion(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"prompt": "x"} | fields).encode())


def refusal(function: Any, *args: Any, **fields: Any) -> ApiError:
    """The error of parsing and using a body."""
    with pytest.raises(ApiError) as caught:
        function(*args, **fields).sampling()
    assert caught.value.status == 400
    assert json.loads(caught.value.body())["error"].keys() == {"message", "type", "param", "code"}
    return caught.value


def test_every_sampling_field_arrives() -> None:
    params = completion(
        n=2,
        max_tokens=9,
        min_tokens=1,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=-4,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"5": 1, "6": -2.5},
        stop=["a", "b"],
        stop_token_ids=[3],
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=4,
        echo=True,
    ).sampling()
    assert params == SamplingParams(
        n=2,
        max_tokens=9,
        min_tokens=1,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=-4,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias=((5, 1.0), (6, -2.5)),
        stop=("a", "b"),
        stop_token_ids=(3,),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=4,
        prompt_logprobs=4,
    )


def test_null_means_the_default() -> None:
    fields = [name for name in ChatBody.model_fields if name != "messages"]
    assert chat(**dict.fromkeys(fields)).sampling() == SamplingParams()


def test_limits_of_the_two_apis() -> None:
    assert completion().sampling().max_tokens == 16
    assert completion(min_tokens=40).sampling().max_tokens == 40
    assert chat().sampling().max_tokens is None
    assert chat(max_tokens=5, max_completion_tokens=7).sampling().max_tokens == 7
    assert completion(top_k=-1).sampling().top_k == 0
    assert chat(stop="x").sampling().stop == ("x",)


def test_logprobs_of_the_two_apis() -> None:
    assert chat(logprobs=True).sampling().logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling().logprobs == 3
    assert chat(logprobs=False).sampling().logprobs is None
    assert completion(logprobs=0).sampling().logprobs == 0
    assert completion(logprobs=1).sampling().prompt_logprobs is None


def test_ignored_fields_are_accepted() -> None:
    chat(
        user="u",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        verbosity="low",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
    )
    chat(tool_choice="auto", stream=True, stream_options={"include_usage": True, "include_obfuscation": False})


@pytest.mark.case(49)
@pytest.mark.parametrize(
    "raw",
    [
        '{"AI": 1}',
        '{"": 1}',
        '{"1.5": 1}',
        '{"-1": 1}',
        '{"²": 1}',
        '{"1": NaN}',
        '{"1": 1e9}',
        '{"1": null}',
        '{"1": "2"}',
        '{"1": true}',
        "[1]",
        "5",
    ],
)
def test_a_bad_logit_bias_is_refused(raw: str) -> None:
    body = f'{{"messages": {json.dumps(MESSAGES)}, "logit_bias": {raw}}}'.encode()
    assert refusal(parse_body, ChatBody, body).param == "logit_bias"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids.0"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"seed": 1 << 70}, "seed"),
        ({"priority": 10**9}, "priority"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [5]}, "messages.0"),
    ],
)
def test_a_bad_chat_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat, **fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
    ],
)
def test_a_bad_completion_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal(completion, **fields).param == param


@pytest.mark.parametrize(
    ("fields", "name", "near"),
    [
        ({"temprature": 1}, "temprature", "temperature"),
        ({"max_token": 1}, "max_token", "max_tokens"),
        ({"messages": [{"role": "user", "contnt": "x"}]}, "messages.0.contnt", "content"),
        (
            {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "include_usage",
        ),
    ],
)
def test_an_unknown_field_names_the_nearest_known_one(fields: dict[str, Any], name: str, near: str) -> None:
    error = refusal(chat, **fields)
    assert (error.param, error.code) == (name, "unknown_field")
    assert f"did you mean {near}?" in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'{"messages": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    assert refusal(parse_body, ChatBody, body).code == "invalid_json"


def test_messages_for_the_template() -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
        ]
    )
    assert body.template_messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {"role": "assistant", "content": "c"},
    ]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "tool", "content": "x"}, "messages of tools are not supported"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "messages of tools are not supported"),
        ({"role": "robot", "content": "x"}, "must be system, developer, user or assistant"),
        ({"role": "user"}, "content is missing"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "'image_url' are not supported",
        ),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "'input_audio' are not supported"),
        ({"role": "user", "content": [{"type": "text"}]}, "only text is"),
    ],
)
def test_messages_that_are_refused_by_name(message: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        chat(messages=[message]).template_messages()
    assert (caught.value.status, (caught.value.param or "").split(".")[:2]) == (400, ["messages", "0"])


def test_forms_of_a_prompt() -> None:
    assert completion(prompt="x").prompts() == ["x"]
    assert completion(prompt=["x", "y"]).prompts() == ["x", "y"]
    assert completion(prompt=[1, 2]).prompts() == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompts() == [[1], [2, 3]]


@pytest.mark.parametrize("prompt", [[], ["x"] * 129, [1, "x"], [True], [1.5], [[1], "x"], [[1.5]], [None]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        completion(prompt=prompt).prompts()
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize("body", [b"{}", b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}'])
def test_tokenize_wants_a_prompt_or_messages(body: bytes) -> None:
    with pytest.raises(ApiError, match="either prompt or messages"):
        parse_body(TokenizeBody, body)
