from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.deploy.async_test import async_test
from tests.helpers.tiny_model import BOS_ID, CHAT_TEMPLATE, IM_END_ID, IM_START_ID, build_tiny_model
from tournant.deploy.known_pieces import known_pieces
from tournant.deploy.tokenizer import INLINE_CHARS, Tokenizer
from tournant.workers.errors import ModelFormatError
from tournant.workers.model_files import resolve_model

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_folder(resolve_model(None).folder)


def byte_fallback_tokenizer() -> Tokenizer:
    """The kind of Llama 2 and Gemma: blanks as U+2581, unknown characters as <0xNN>."""
    texts = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    backend = Backend(
        models.BPE(
            vocab={text: place for place, text in enumerate(texts)},
            merges=[("▁", "h"), ("▁h", "i")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))


def test_text_comes_back(tokenizer: Tokenizer) -> None:
    text = "Grüße, 世界 👋 <|im_end|> x"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<|im_end|>", "")
    assert b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text)) == text.encode()


def test_ids_without_a_spelling_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 512
    assert tokenizer.token_bytes(512) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([65, 5000, -3, 66]) == "AB"


@pytest.mark.case(51)
def test_a_raw_prompt_gets_one_begin_token(tokenizer: Tokenizer, bos_tokenizer: Tokenizer) -> None:
    assert bos_tokenizer.encode("hi") == [BOS_ID, 104, 105]
    assert bos_tokenizer.encode("<|bos|>hi") == [BOS_ID, 104, 105]
    assert bos_tokenizer.encode("hi", add_special_tokens=False) == [104, 105]
    assert bos_tokenizer.encode("<|bos|>hi", add_special_tokens=False) == [BOS_ID, 104, 105]
    assert tokenizer.encode("hi") == [104, 105]  # a model that uses none


@pytest.mark.case(51)
def test_a_chat_template_with_a_begin_token_gets_no_second_one(bos_tokenizer: Tokenizer) -> None:
    token_ids = bos_tokenizer.apply_chat(CHAT)
    assert token_ids.count(BOS_ID) == 1
    assert token_ids[0] == BOS_ID


@async_test
async def test_a_chat_template_without_a_begin_token_gets_none(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, add_bos=True, hidden=16, num_heads=1, num_kv_heads=1, head_size=16)
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.chat_template = CHAT_TEMPLATE
    tokenizer = Tokenizer(loaded)
    assert tokenizer.encode("hi")[0] == BOS_ID
    assert tokenizer.apply_chat(CHAT)[0] == (await tokenizer.apply_chat_async(CHAT))[0] == IM_START_ID


def test_chat_is_what_the_template_says(tokenizer: Tokenizer) -> None:
    assert tokenizer.render_chat(CHAT) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat(CHAT)[:2] == [IM_START_ID, ord("u")]
    assert tokenizer.apply_chat(CHAT, add_generation_prompt=False)[-2:] == [IM_END_ID, ord("\n")]
    started = [*CHAT, {"role": "assistant", "content": "Well"}]
    assert tokenizer.render_chat(started, add_generation_prompt=False, continue_final_message=True).endswith("Well")


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "bos_token"])
def test_clients_may_not_set_what_belongs_to_the_server(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(ValueError, match=f"may not set {name}"):
        tokenizer.render_chat(CHAT, template_kwargs={name: "{{ 1 }}"})


def tokenizer_with_template(template: str | None) -> Tokenizer:
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ messages.__class__.__mro__ }}",
        "{% for %}",
    ],
)
def test_whatever_a_template_stumbles_over_is_a_value_error(template: str) -> None:
    with pytest.raises(ValueError, match="chat template of this model refused"):
        tokenizer_with_template(template).render_chat(CHAT)


def test_template_kwargs_reach_the_template() -> None:
    tokenizer = tokenizer_with_template("{% if thinking %}a{% endif %}")
    assert tokenizer.render_chat(CHAT, template_kwargs={"thinking": True}) == "a"


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(ValueError, match="no chat template; use /v1/completions"):
        tokenizer_with_template(None).apply_chat(CHAT)


@async_test
async def test_only_long_texts_leave_the_loop(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    encode = tokenizer.encode

    def noting(text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", noting)
    short, long = "a" * INLINE_CHARS, "a" * (INLINE_CHARS + 1)
    assert [len(await tokenizer.encode_async(text)) for text in (short, long)] == [len(short), len(long)]
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("tokenizer")


@async_test
async def test_many_threads_at_once_agree(bos_tokenizer: Tokenizer) -> None:
    texts = [chr(ord("a") + place) * (INLINE_CHARS + 100 * place) for place in range(12)]
    results = await asyncio.gather(*(bos_tokenizer.encode_async(text) for text in texts))
    assert list(results) == [[BOS_ID, *text.encode()] for text in texts]


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="not valid Unicode"):
        tokenizer.encode("\ud800")


def test_byte_fallback_tokens_have_bytes() -> None:
    tokenizer = byte_fallback_tokenizer()
    token_ids = tokenizer.encode("hi 👋", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in token_ids) == b" hi \xf0\x9f\x91\x8b"
    assert tokenizer.decode(token_ids) == "hi 👋"
    assert tokenizer.special_ids == {1}


def test_other_decoders_are_refused_by_name() -> None:
    backend = Backend(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelFormatError, match="decoder WordPiece"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    backend.decoder = decoders.Replace(Regex("x+"), "y")
    with pytest.raises(ModelFormatError, match="only plain strings"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="no tokenizer could be read"):
        Tokenizer.from_folder(tmp_path)


def test_every_token_of_smollm2_has_the_bytes_of_its_text(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    for token in range(smollm2.vocab_size):
        text = smollm2.token_bytes(token).decode("utf-8", "replace")
        assert text == smollm2.decode([token], skip_special_tokens=False)


def test_smollm2_needs_no_begin_token(smollm2: Tokenizer) -> None:
    assert smollm2.decode(smollm2.encode("The capital"), skip_special_tokens=False) == "The capital"
    assert smollm2.apply_chat(CHAT).count(smollm2.bos_token_id or 0) == 3  # system, user, assistant


@given(
    st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=20), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_plain_chat_is_what_transformers_makes_of_it(
    smollm2: Tokenizer, chat: list[tuple[str, str, bool]], generation_prompt: bool
) -> None:
    """Rendered by the template alone, and encoded piece by piece."""
    messages = [
        {"role": role, "content": text + ("<|im_end|><|im_start|> x" if marked else "")} for role, text, marked in chat
    ]
    whole = smollm2._tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generation_prompt, return_dict=False
    )
    assert smollm2.render_chat(messages, add_generation_prompt=generation_prompt) == whole
    token_ids = smollm2.apply_chat(messages, add_generation_prompt=generation_prompt)
    assert token_ids == smollm2.encode(whole, add_special_tokens=False)


def test_a_chat_of_a_tokenizer_that_looks_beyond_added_tokens_is_not_cut(tokenizer: Tokenizer) -> None:
    chats = ["<s>hi <s>unknown"]
    assert known_pieces(byte_fallback_tokenizer()._backend, chats, "unknown") is None  # a blank before each piece
    backend = Backend.from_str(tokenizer._backend.to_str())
    assert known_pieces(backend, ["<|im_end|>hi <|im_end|>unknown"], "unknown") is not None
    backend.add_special_tokens([AddedToken("<x>", special=True, normalized=False, lstrip=True)])
    assert known_pieces(backend, ["<|im_end|>hi <|im_end|>unknown"], "unknown") is None


def test_odd_messages_go_the_longer_way(smollm2: Tokenizer) -> None:
    nested = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    with pytest.raises(ValueError, match="chat template"):
        smollm2.render_chat(nested)
    assert smollm2.render_chat([{"role": "user", "content": "hi", "name": None}]) == smollm2.render_chat(CHAT)
