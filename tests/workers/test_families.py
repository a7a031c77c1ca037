"""Every family and RoPE type: greedy tokens of the engine equal transformers' in fp32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from tests.helpers.reference import reference_generate, reference_logits
from tests.helpers.tiny_families import FAMILIES, build_family, rope_config
from tests.workers.harness import Session, make_engine

NUM_NEW = 10


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in lengths]


def check(folder: Path, lengths: tuple[int, ...], **config: object) -> None:
    """Cold in small chunks, then all together from the cache."""
    prompts = prompts_of(lengths)
    want = reference_generate(folder, prompts, NUM_NEW)
    assert len({token for answer in want for token in answer}) > NUM_NEW, "the model repeats itself"
    session = Session(make_engine(folder, num_blocks=128, max_num_batched_tokens=48, **config))
    assert [session.ask([prompt], max_tokens=NUM_NEW)[0] for prompt in prompts] == want
    assert session.ask(prompts, max_tokens=NUM_NEW) == want


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())
def test_family(config: PreTrainedConfig, tmp_path: Path) -> None:
    check(build_family(config, tmp_path), (3, 8, 23, 24, 25, 60, 130))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_rope_of_one_set(kind: str, tmp_path: Path) -> None:
    """Around the original length of 64, the configured 256, and four times the original."""
    check(build_family(rope_config(kind), tmp_path), (8, 53, 63, 65, 200, 240))


@pytest.mark.parametrize(("max_model_len", "lengths"), [(256, (8, 100, 245)), (300, (290,)), (1024, (1014,))])
def test_dynamic_rope_is_the_one_of_max_model_len(max_model_len: int, lengths: tuple[int, ...], tmp_path: Path) -> None:
    """Fixed at load: up to the original length it is the plain one; beyond, that of a sequence of max_model_len.

    The reference recomputes the factor for every length, so it is asked at exactly that length.
    """
    folder = build_family(rope_config("dynamic"), tmp_path)
    session = Session(make_engine(folder, num_blocks=128, max_model_len=max_model_len))
    for prompt in prompts_of(lengths):
        prompt += prompt[: max_model_len - len(prompt) - 1] if max_model_len > 256 else []
        expected = reference_logits(folder, prompt)[-1]
        if max_model_len > 256:
            expected = reference_logits(folder, [*prompt, 0])[-2]
        assert session.ask([prompt], max_tokens=1) == [[int(expected.argmax())]]


def test_longrope_changes_sets_where_the_reference_does(tmp_path: Path) -> None:
    """Prompts below, at and above the switch at 64; answers that cross it; from the cache as well."""
    folder = build_family(rope_config("longrope"), tmp_path)
    check(folder, (8, 50, 63, 64, 65, 66, 120, 240))


def test_longrope_does_not_mix_blocks_of_short_and_long_prompts(tmp_path: Path) -> None:
    folder = build_family(rope_config("longrope"), tmp_path)
    (prompt,) = prompts_of((80,))
    session = Session(make_engine(folder, num_blocks=128))
    session.ask([prompt[:60]], max_tokens=1)
    request = session.submit(prompt, max_tokens=4)
    session.drain()
    assert session.outputs[request][0].cached_tokens == 0
    assert session.tokens(request) == reference_generate(folder, [prompt], 4)[0]
