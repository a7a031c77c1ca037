"""What sampling parameters refuse, whoever made them."""

from __future__ import annotations

from typing import Any

import pytest

from tournant.workers.sampling_params import MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS, SamplingParams


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 0}, "n is 0"),
        ({"n": True}, "n is True"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0"),
        ({"seed": 1 << 64}, "seed is"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens is 3"),
        ({"ignore_eos": object()}, "ignore_eos is"),
        ({"stop": ("",)}, "none of them empty"),
        ({"stop": ("x" * (MAX_STOP_CHARS + 1),)}, "shorten it"),
        ({"stop_token_ids": (1,) * (MAX_STOP_TOKEN_IDS + 1)}, "257 entries"),
        ({"stop_token_ids": ("a",)}, "whole numbers, not by 'a'"),
        ({"logit_bias": ((1.5, 1.0),)}, "whole numbers, not by 1.5"),
        ({"logit_bias": ((1, 101.0),)}, "from -100 to 100"),
    ],
)
def test_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**fields)
