"""Tokenizers out of GGUF files: how each known vocabulary splits text, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType as Type
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers import tiny_gguf
from tests.helpers.family_gguf import write_family_gguf
from tests.helpers.tiny_families import FAMILIES, build_family
from tests.helpers.tiny_gguf import build_tiny_gguf
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.errors import ModelFormatError
from tournant.workers.gguf_files import convert_gguf
from tournant.workers.gguf_tokenizer import BYTE_LEVEL_SPLITS
from tournant.workers.model_files import resolve_model

TEXT = "Hello  WORLD's fooBar naïve 12345\n\n  x(--)/\n"
GPT2 = ["Hello", " ", " WORLD", "'s", " fooBar", " naïve", " 12345", "\n\n ", " x", "(--)/", "\n"]
SMOLLM = ["Hello", " ", " WORLD", "'s", " fooBar", " naïve", " ", "1", "2", "3", "4", "5", "\n\n ", " x", "(--)/", "\n"]
QWEN2 = ["Hello", " ", " WORLD", "'s", " fooBar", " naïve", " ", "1", "2", "3", "4", "5", "\n\n", " ", " x", "(--)/\n"]
LLAMA3 = ["Hello", " ", " WORLD", "'s", " fooBar", " naïve", " ", "123", "45", "\n\n", " ", " x", "(--)/\n"]
TEKKEN = [
    "Hello", " ", " WORLD", "'s", " foo", "Bar", " naïve", " ", "1", "2", "3", "4", "5", "\n\n", " ", " x", "(--)/\n"
]  # fmt: skip
GPT4O = ["Hello", " ", " WORLD's", " foo", "Bar", " naïve", " ", "123", "45", "\n\n", " ", " x", "(--)/\n"]
PARTS = {
    "default": GPT2, "gpt-2": GPT2, "smollm": SMOLLM, "qwen2": QWEN2, "llama-bpe": LLAMA3, "llama3": LLAMA3,
    "llama-v3": LLAMA3, "smaug-bpe": LLAMA3, "dbrx": LLAMA3, "tekken": TEKKEN, "gpt-4o": GPT4O,
}  # fmt: skip
"""TEXT as each split cuts it up, worked out by hand from the published pattern of the vocabulary."""


def tiny_folder(tmp_path: Path, **fields: tuple[Any, Type]) -> Path:
    path = tmp_path / "tiny.gguf"
    build_tiny_gguf(path, fields={f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    return convert_gguf(path, "float16", tmp_path)


def tiny_tokenizer(tmp_path: Path, **fields: tuple[Any, Type]) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_folder(tmp_path, **fields))
    return tokenizer


def test_every_split_is_tested() -> None:
    assert PARTS.keys() == BYTE_LEVEL_SPLITS.keys()


@pytest.mark.parametrize("split", PARTS)
def test_byte_level_split(tmp_path: Path, split: str) -> None:
    tokenizer = tiny_tokenizer(tmp_path, pre=(split, Type.STRING))
    backend = tokenizer.backend_tokenizer
    parts = [TEXT[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert parts == PARTS[split]
    ids = tokenizer.encode(TEXT)
    assert (ids[0] == tiny_gguf.BOS_ID) == BYTE_LEVEL_SPLITS[split].begin
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    whole = tokenizer.encode(tiny_gguf.WHOLE_WORD, add_special_tokens=False) == [tiny_gguf.VOCAB_SIZE - 1]
    assert whole == BYTE_LEVEL_SPLITS[split].whole_words
    composed = tokenizer.encode("e\u0301") == tokenizer.encode("é")
    assert composed == (split == "qwen2")


def test_tokenizer(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    for line in ("hello  12\n\n 3", "naïve 日本語 🙂", "<|im_start|>x<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(line)) == line
    assert tokenizer.encode("<|im_start|><|im_end|>") == [1, 2]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.unk_token == "<|endoftext|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("he  4")) == ["he", "ĠĠ", "4"]
    assert tokenizer.model_max_length == 512
    message = [{"role": "user", "content": "he"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "<|im_start|>user\nhe<|im_end|>\n"


@pytest.mark.case(51)
def test_begin_token_is_added_once(tmp_path: Path) -> None:
    """As the file says; without a word in it, vocabularies of the Llama 3 kind have one."""
    assert tiny_tokenizer(tmp_path, add_bos_token=(True, Type.BOOL)).encode("he")[:2] == [1, 259]
    assert tiny_tokenizer(tmp_path, add_bos_token=(False, Type.BOOL)).encode("he") == [259]
    assert tiny_tokenizer(tmp_path, pre=("llama-bpe", Type.STRING)).encode("he") == [1, 259]
    silent = tiny_tokenizer(tmp_path, pre=("llama-bpe", Type.STRING), add_bos_token=(False, Type.BOOL))
    assert silent.encode("he") == [259]


def test_files_beside_the_model_have_no_say(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_end|>", "add_bos_token": True}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|foreign|>": 7}))
    tokenizer = tiny_tokenizer(tmp_path)
    assert tokenizer.bos_token == "<|im_start|>"
    assert "<|foreign|>" not in tokenizer.get_vocab()


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    """Those that the file names, then marks that end a turn in any vocabulary."""

    def ends(**ids: int) -> list[int]:
        folder = tiny_folder(tmp_path, **{f"{key}_token_id": (value, Type.UINT32) for key, value in ids.items()})
        found: list[int] = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        return found

    assert ends(eos=0) == [0, 2]
    assert ends(eos=5, eot=1, eom=5) == [5, 1, 2]


SENTENCEPIECE = ("mistral", "phi3", "gemma2", "gemma3")


@pytest.fixture
def family_tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    folder = build_family(FAMILIES[request.param], tmp_path / "folder")
    write_family_gguf(tmp_path / "model.gguf", folder)
    return Tokenizer.from_folder(convert_gguf(tmp_path / "model.gguf", "float16", tmp_path))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    table: list[str] = tokenizer._tokenizer.convert_ids_to_tokens(tokenizer.encode(text))
    return table


@pytest.mark.parametrize("family_tokenizer", SENTENCEPIECE, indirect=True)
def test_sentencepiece(family_tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    """Pairs merge best first, what is not in the vocabulary becomes bytes, and text begins with a space of its own
    except in Gemma."""
    gemma = "gemma" in request.node.callspec.id
    found = pieces(family_tokenizer, "hello world")
    begin = ["<bos>", "he", "llo"] if gemma else ["<s>", "▁hello"]
    assert found == [*begin, "▁w", "or", "ld"]
    assert pieces(family_tokenizer, "é")[-2:] == ["<0xC3>", "<0xA9>"]
    for text in ("hello world", "two  spaces ", "12\n日本語"):
        assert family_tokenizer.decode(family_tokenizer.encode(text)) == text


@pytest.mark.parametrize("family_tokenizer", ["mistral", "phi3"], indirect=True)
def test_white_space_after_a_mark(family_tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    """Phi-3's marks swallow it, Llama's do not; begin and end of text never do."""
    swallows = "phi3" in request.node.callspec.id
    found = pieces(family_tokenizer, "<|user|>\n hello<|end|>")
    between = ["▁hello"] if swallows else found[2:-1]
    assert found == ["<s>", "<|user|>", *between, "<|end|>"]
    assert ("<0x0A>" in found) != swallows
    assert "<0x0A>" in pieces(family_tokenizer, "<s>\n")


@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_no_space_before_a_text_when_the_file_says_so(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_family_gguf(
        path, build_family(FAMILIES[name], tmp_path / "folder"), tokenizer__ggml__add_space_prefix=(False, Type.BOOL)
    )
    tokenizer = Tokenizer.from_folder(convert_gguf(path, "float16", tmp_path))
    assert pieces(tokenizer, "hello")[1:] == ["he", "llo"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


REFUSED = {
    "split": ({"tokenizer.ggml.pre": ("bespoke", Type.STRING)}, (), "field tokenizer.ggml.pre is 'bespoke'; known are"),
    "kind": ({"tokenizer.ggml.model": ("rwkv", Type.STRING)}, (), "field tokenizer.ggml.model is 'rwkv'; known are"),
    "unigram": ({"tokenizer.ggml.model": ("t5", Type.STRING)}, (), "field tokenizer.ggml.model is 't5'; known are"),
    "pieces": (
        {
            "tokenizer.ggml.model": ("llama", Type.STRING),
            "tokenizer.ggml.tokens": ([f"{i:02000d}" for i in range(2100)], Type.ARRAY),
        },
        (),
        "field tokenizer.ggml.tokens has 4200000 bytes; at most 4194304 are allowed",
    ),
    "no merges": ({}, ("tokenizer.ggml.merges",), "fields tokenizer.ggml.* make no tokenizer"),
    "more tokens": (
        {"llama.vocab_size": (256, Type.UINT32)}, (), "the tokenizer has 262 tokens, the model only 256"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_vocabulary_that_cannot_be_used(tmp_path: Path, case: str) -> None:
    fields, without, message = REFUSED[case]
    small = {name: np.zeros((256, 64), np.float32) for name in ("token_embd.weight", "output.weight")}
    values = small if "llama.vocab_size" in fields else {}
    build_tiny_gguf(tmp_path / "bad.gguf", fields=fields, without=without, values=values)
    with pytest.raises(ModelFormatError) as caught:
        convert_gguf(tmp_path / "bad.gguf", "float16", tmp_path)
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return resolve_model(None).folder


def test_smollm2(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token) == (1, 2, "<|im_end|>")
    assert len(tokenizer) == 49152
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(1) == 3
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == [2]


def test_smollm2_digits_stand_alone(smollm2: Path) -> None:
    """Spaces before a number stay together, because the model's own tokenizer cuts out every digit first."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x =    42")) == ["x", "Ġ=", "ĠĠĠĠ", "4", "2"]
    code = "\tif n == 1024:\n        return 0"
    assert tokenizer.decode(tokenizer.encode(code)) == code
