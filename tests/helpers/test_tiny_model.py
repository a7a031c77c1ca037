"""M and its siblings are fit to judge others: reproducible, varied, sensitive, and the two ways of asking agree."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers.reference import reference_generate, reference_logits
from tests.helpers.tiny_model import BOS_ID, EOS_ID, IM_END_ID, IM_START_ID, SHAPES, build_tiny_model


def _prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in (1, 5, 16, 60, 200)]


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_output_is_varied_and_far_from_ties(tiny_models: Mapping[str, Path], name: str) -> None:
    prompts = _prompts(SHAPES[name].get("vocab_size", 512))
    gaps = []
    for prompt, answer in zip(prompts, reference_generate(tiny_models[name], prompts, 50), strict=True):
        assert len(set(answer)) >= 20
        logits = reference_logits(tiny_models[name], prompt + answer)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer  # token by token with a cache = all at once without one
        best = logits.topk(2).values
        gaps += (best[:, 0] - best[:, 1]).tolist()
    assert sum(gap < 1e-3 for gap in gaps) <= len(gaps) // 100


@pytest.mark.parametrize("name", SHAPES)
def test_every_position_reaches_the_last_logits(tiny_models: Mapping[str, Path], name: str) -> None:
    prompt = _prompts(SHAPES[name].get("vocab_size", 512))[-1]
    last = reference_logits(tiny_models[name], prompt)[-1]
    for position in (0, 7, 64, 150, 190):
        changed = [token if i != position else (token + 7) % 256 for i, token in enumerate(prompt)]
        assert (reference_logits(tiny_models[name], changed)[-1] - last).abs().max() > 0.05


def test_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    digests = [_digests(build_tiny_model(tmp_path / str(copy), seed=3)) for copy in range(2)]
    assert digests[0] == digests[1]
    other = _digests(build_tiny_model(tmp_path / "other", seed=4))
    assert [name for name in other if other[name] != digests[0][name]] == ["model.safetensors"]


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_dtype_and_end_tokens_are_written(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, dtype=torch.bfloat16, attention_bias=True)
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert "model.layers.0.self_attn.q_proj.bias" in weights
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [EOS_ID, IM_END_ID]


def test_too_small_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size is 259"):
        build_tiny_model(tmp_path, vocab_size=259)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


@given(st.text(max_size=60).filter(lambda text: "<|" not in text))
def test_every_text_is_its_bytes_and_comes_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert ids == [IM_START_ID, *b"user\nhi", IM_END_ID, *b"\n", IM_START_ID, *b"assistant\n"]
    assert tokenizer.decode([IM_START_ID, *b"a", IM_END_ID], skip_special_tokens=True) == "a"


def test_add_bos(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(build_tiny_model(tmp_path, add_bos=True))
    assert tokenizer.encode("a") == [BOS_ID, *b"a"]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text.startswith("<|bos|><|im_start|>user")
