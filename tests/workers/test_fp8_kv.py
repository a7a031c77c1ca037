"""Engines whose KV on the device is fp8: the same answers through every back end, cached or not, in any chunks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.workers.harness import Session, make_engine
from tournant.kernels import ops
from tournant.workers.config import EngineConfig
from tournant.workers.engine import Engine
from tournant.workers.errors import ConfigError
from tournant.workers.kv_cache import kv_cache_dtype
from tournant.workers.model_runner import ModelRunner

FORMS = ("fp8_e4m3", "fp8_e5m2")
NUM_NEW = 8


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    if ops.select_backend("c") != "c":
        pytest.skip("no C compiler here")
    yield
    ops.select_backend("c")


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


def engine_of(folder: Path, form: str, num_blocks: int = 64, **config: object) -> Engine:
    """`num_blocks` float32 blocks' worth of bytes."""
    return make_engine(folder, num_blocks, kv_cache_dtype=form, **config)


def runner_of(engine: Engine) -> ModelRunner:
    if not isinstance(engine.runner, ModelRunner):
        raise TypeError("the engine has another runner")
    return engine.runner


def answers(session: Session, prompts: list[list[int]], **params: object) -> list[tuple[list[int], list[float]]]:
    """Tokens of all prompts, run together, and the log-probabilities of the best tokens of every step."""
    ids = [session.submit(prompt, max_tokens=NUM_NEW, logprobs=3, **params) for prompt in prompts]
    session.drain()
    return [
        (
            session.tokens(number),
            [value for output in session.outputs[number] for _, value in output.logprobs[0].top],
        )
        for number in ids
    ]


@pytest.mark.parametrize("form", FORMS)
def test_pool_and_namespace_know_the_form(tiny_model: Path, form: str) -> None:
    plain, runner = (
        runner_of(engine_of(tiny_model, "auto")),
        runner_of(engine_of(tiny_model, form, deterministic=False)),
    )
    assert (plain.namespace.kv_form, runner.namespace.kv_form) == ("fp32", form)
    assert plain.namespace.layout_id == runner.namespace.layout_id
    assert (runner.cache.scales is not None) == (form == "fp8_e4m3")
    assert 3.9 < runner.cache.num_blocks / plain.cache.num_blocks <= 4
    assert (
        runner.cache.tensor.dtype
        == runner.layout.dtype
        == kv_cache_dtype(EngineConfig(kv_cache_dtype=form), torch.half)
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_both_back_ends_of_the_cpu_agree(tiny_model: Path, form: str, dtype: str) -> None:
    """And are near KV as it is, but not the same."""
    prompts, found = prompts_of(40, 5), {}
    for name, kind in (("c", form), ("torch", form), ("c", "auto")):
        ops.select_backend(name)
        engine = engine_of(tiny_model, kind, deterministic=False, dtype=dtype, max_num_batched_tokens=24)
        found[name, kind] = answers(Session(engine), prompts)
    for (tokens, values), (twins, twin_values), (_, plain) in zip(*found.values(), strict=True):
        assert tokens == twins
        tolerance = 1e-4 if dtype == "float32" else 4e-2
        torch.testing.assert_close(torch.tensor(values), torch.tensor(twin_values), rtol=0, atol=tolerance)
        error = float((torch.tensor(values[:3]) - torch.tensor(plain[:3])).abs().max())
        assert 0 < error < 0.3


def test_e5m2_in_deterministic_mode(tiny_model: Path) -> None:
    """The bits of an answer depend neither on chunks, nor on batch mates, nor on what came from the cache."""
    prompts = prompts_of(70, 33, 16, 5)
    want = [answers(Session(engine_of(tiny_model, "fp8_e5m2")), [prompt])[0] for prompt in prompts]
    for chunk in (1, 7, 24, 1024):
        for cached in (True, False):
            engine = engine_of(tiny_model, "fp8_e5m2", max_num_batched_tokens=chunk, enable_prefix_caching=cached)
            session = Session(engine)
            assert answers(session, prompts) == want
            assert answers(session, prompts) == want
            assert (engine.stats().prefix_hit_tokens > 0) == cached


@pytest.mark.parametrize("form", FORMS)
def test_cached_blocks_are_final(tiny_model: Path, form: str) -> None:
    """With the prompt's blocks from the cache, copied on write for two answers, and without: the same bits."""
    (prompt,) = prompts_of(43)
    session = Session(engine_of(tiny_model, form, deterministic=False))
    cold = answers(session, [prompt])
    assert answers(session, [prompt]) == cold
    request = session.submit(prompt, max_tokens=NUM_NEW, n=2)
    session.drain()
    assert session.outputs[request][0].cached_tokens == 32
    assert [session.tokens(request, index) for index in (0, 1)] == [cold[0][0]] * 2
    off = Session(engine_of(tiny_model, form, deterministic=False, enable_prefix_caching=False))
    assert answers(off, [prompt]) == cold


@pytest.mark.parametrize("form", FORMS)
def test_preempted_sequences_answer_completely(tiny_model: Path, form: str) -> None:
    engine = engine_of(tiny_model, form, num_blocks=6, deterministic=form == "fp8_e5m2")
    found = Session(engine).ask(prompts_of(*[20] * 8), max_tokens=60)
    assert engine.stats().num_preemptions > 0
    assert [len(tokens) for tokens in found] == [60] * 8
    if form == "fp8_e5m2":
        solo = Session(engine_of(tiny_model, form))
        assert found == [solo.ask([prompt], max_tokens=60)[0] for prompt in prompts_of(*[20] * 8)]


def test_e4m3_is_refused_in_deterministic_mode(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"deterministic is true and kv_cache_dtype 'fp8_e4m3'.*use fp8_e5m2 or auto"):
        engine_of(tiny_model, "fp8_e4m3")
