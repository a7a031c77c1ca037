from __future__ import annotations

import codecs
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.tiny_model import IM_END_ID
from tournant.deploy.detokenizer import Detokenizer
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.sampling_params import SamplingParams

# Few letters, so that stop strings nearly match all the time; bytes of split and broken characters; special tokens.
TOKENS = st.lists(
    st.one_of(
        st.sampled_from(b"aab"),
        st.sampled_from("é👋".encode()),
        st.sampled_from([0x80, 0xF0, 0xFF, IM_END_ID, 260, 511]),
    ),
    max_size=40,
)
STOPS = st.lists(st.text("aabé👋", min_size=1, max_size=5), max_size=3).map(tuple)


def feed_in_pieces(detokenizer: Detokenizer, tokens: list[int], cuts: list[int]) -> list[str]:
    """Texts of each feed, and of finish."""
    bounds = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    pieces = [detokenizer.feed(tokens[start:end]) for start, end in pairwise(bounds)]
    return [*pieces, detokenizer.finish()]


def naive(tokenizer: Tokenizer, tokens: list[int], params: SamplingParams) -> tuple[str, str | None]:
    """Text and stop string from whole prefixes, looked at again and again."""
    skip = tokenizer.special_ids if params.skip_special_tokens else frozenset()
    data, before = b"", 0
    for count in range(1, len(tokens) + 2):
        last = count > len(tokens)
        if not last and tokens[count - 1] not in skip:
            data += tokenizer.token_bytes(tokens[count - 1])
        text, _ = codecs.utf_8_decode(data, "replace", last)
        for end in range(before + 1, len(text) + 1):
            found = [stop for stop in params.stop if text[:end].endswith(stop)]
            if found and min(count, len(tokens)) >= params.min_tokens:
                stop = max(found, key=len)
                return text[: end if params.include_stop_str_in_output else end - len(stop)], stop
        before = len(text)
    return codecs.utf_8_decode(data, "replace", True)[0], None


@given(
    tokens=TOKENS,
    cuts=st.lists(st.integers(0, 40), max_size=6),
    stops=STOPS,
    min_tokens=st.integers(0, 12),
    include=st.booleans(),
    skip=st.booleans(),
)
def test_any_grouping_gives_the_naive_text(
    tokenizer: Tokenizer,
    tokens: list[int],
    cuts: list[int],
    stops: tuple[str, ...],
    min_tokens: int,
    include: bool,
    skip: bool,
) -> None:
    params = SamplingParams(
        stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include, skip_special_tokens=skip
    )
    detokenizer = Detokenizer(tokenizer, params)
    pieces = feed_in_pieces(detokenizer, tokens, cuts)
    expected, stop = naive(tokenizer, tokens, params)
    assert ("".join(pieces), detokenizer.stopped) == (expected, stop)
    assert detokenizer.num_emitted == len(expected)


@pytest.mark.parametrize("stops", [("ab",), ("aab",), ("aa", "aba"), ("b", "ab", "aab"), ("abab", "ba"), ("aaa", "a")])
def test_all_short_texts_give_the_naive_text(tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
    """Every text of up to seven letters, by one letter or by three a token."""
    for length in range(8):
        for letters in product(b"ab", repeat=length):
            tokens = [260 if token == ord("b") and place == 2 else token for place, token in enumerate(letters)]
            for min_tokens, include in ((0, False), (0, True), (2, False), (3, False)):
                params = SamplingParams(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
                detokenizer = Detokenizer(tokenizer, params)
                text = "".join(detokenizer.feed([token]) for token in tokens) + detokenizer.finish()
                assert (text, detokenizer.stopped) == naive(tokenizer, tokens, params), (tokens, params)


@given(tokens=TOKENS)
def test_without_stop_strings_the_text_is_that_of_decode(tokenizer: Tokenizer, tokens: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    assert "".join(feed_in_pieces(detokenizer, tokens, list(range(40)))) == tokenizer.decode(tokens)


@given(tokens=TOKENS, stops=STOPS)
def test_what_is_held_back_is_a_head_of_a_stop_string(
    tokenizer: Tokenizer, tokens: list[int], stops: tuple[str, ...]
) -> None:
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stops))
    text = ""
    for count, token in enumerate(tokens, 1):
        text += detokenizer.feed([token])
        if detokenizer.stopped is not None:
            break
        seen = codecs.utf_8_decode(
            b"".join(tokenizer.token_bytes(t) for t in tokens[:count] if t not in tokenizer.special_ids),
            "replace",
            False,
        )[0]
        heads = [seen[-size:] for stop in stops for size in range(1, len(stop)) if seen.endswith(stop[:size])]
        assert seen == text + max(heads, key=len, default="")  # no more than it must be, and no less


@pytest.mark.case(41)
@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_no_head_of_a_stop_string_leaks(tokenizer: Tokenizer, size: int) -> None:
    tokens = tokenizer.encode("ABCDEFGHIJ")
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("DEFGHIJ",)))
    pieces = [detokenizer.feed(tokens[start : start + size]) for start in range(0, 10, size)]
    assert "".join(pieces) + detokenizer.finish() == "ABC"
    assert all("D" not in piece for piece in pieces)
    assert detokenizer.stopped == "DEFGHIJ"
    assert detokenizer.num_tokens == 10


def test_tokens_after_the_stop_string_are_not_taken(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("c",)))
    assert detokenizer.feed(tokenizer.encode("abcdef")) == "ab"
    assert (detokenizer.num_tokens, detokenizer.feed([100]), detokenizer.finish()) == (3, "", "")


@pytest.mark.case(43)
@pytest.mark.parametrize("text", ["👋🏽 family 👨‍👩‍👧", "世界、你好", "สวัสดีครับ", "naïve café"])
def test_split_characters_wait_until_they_are_whole(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    pieces = [detokenizer.feed([token]) for token in tokenizer.encode(text)]  # one byte each
    assert "".join(pieces) == text
    assert detokenizer.finish() == ""


@pytest.mark.case(43)
def test_an_answer_cut_inside_a_character_ends_with_one_replacement_mark(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a👋")[:-1]
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    assert "".join(detokenizer.feed([token]) for token in tokens) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert tokenizer.decode(tokens) == "a\ufffd"


def test_special_tokens_are_left_out_unless_wanted(tokenizer: Tokenizer) -> None:
    tokens = [97, IM_END_ID, 98]
    assert Detokenizer(tokenizer, SamplingParams()).feed(tokens) == "ab"
    assert Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False)).feed(tokens) == "a<|im_end|>b"
