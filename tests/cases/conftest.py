"""Common set-up of CASES.md: model M, greedy, deterministic, the SMALL pool, and what the right answer is (REF)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.live_server import LiveServer, live_server
from tests.workers.harness import Session, make_engine
from tournant.deploy.tokenizer import Tokenizer

Ref = Callable[..., str]


@pytest.fixture(scope="session")
def small_server(tiny_model: Path) -> Iterator[LiveServer]:
    """M behind HTTP with a device pool of 64 blocks of 16 tokens."""
    with live_server(tiny_model) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "small_server" in request.fixturenames:
        request.getfixturevalue("small_server").assert_at_rest()


@pytest.fixture(scope="session")
def ref(tiny_model: Path) -> Ref:
    """The text M answers a token-id prompt with: nothing cached, one request at a time."""
    session = Session(make_engine(tiny_model, enable_prefix_caching=False))
    tokenizer = Tokenizer.from_folder(tiny_model)
    known: dict[tuple, str] = {}

    def answer(prompt: list[int], max_tokens: int = 16) -> str:
        key = (tuple(prompt), max_tokens)
        if key not in known:
            known[key] = tokenizer.decode(session.ask([prompt], max_tokens=max_tokens)[0])
        return known[key]

    return answer


def random_prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` byte tokens that spell printable text."""
    rng = random.Random(seed)
    return [[rng.randrange(32, 127) for _ in range(length)] for _ in range(count)]
