"""The whole engine through the Triton kernels, under their interpreter, against the CPU's kernels: small jobs on M."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.device.made_up import decode_batch
from tests.helpers.tiny_families import FAMILIES, build_family
from tests.workers.harness import Session, make_engine
from tournant.kernels import ops
from tournant.workers.device import CpuDevice
from tournant.workers.engine import Engine
from tournant.workers.forward_input import ForwardInput
from tournant.workers.model_runner import ModelRunner

NUM_NEW = 8


@pytest.fixture
def triton() -> Iterator[None]:
    ops.select_backend("triton")
    yield
    ops.select_backend("c")


class GraphedCpu(CpuDevice):
    """A CPU that works as a GPU does: decode steps captured, two batches in flight."""

    num_in_flight = 2

    def graph_sizes(self, max_num_seqs: int) -> tuple[int, ...]:
        return (1, 3)


def prompt_of(length: int, seed: int = 10) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def answers(folder: Path, dtype: str, kv_cache_dtype: str = "auto") -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and best log-probabilities of a prompt in chunks, and of its two forks from the cache, copied on write."""
    limits = {"deterministic": False, "max_num_batched_tokens": 24}
    engine = make_engine(folder, dtype=dtype, kv_cache_dtype=kv_cache_dtype, **limits)
    session = Session(engine)
    cold = session.submit(prompt_of(40), max_tokens=NUM_NEW, logprobs=2)
    session.drain()
    forks = session.submit(prompt_of(40), max_tokens=NUM_NEW, logprobs=2, n=2)
    session.drain()
    assert session.outputs[forks][0].cached_tokens == 32
    answers = [(cold, 0), (forks, 0), (forks, 1)]
    tokens = [session.tokens(request, index) for request, index in answers]
    values = [
        [value for o in session.outputs[request] if o.index == index for _, value in o.logprobs[0].top]
        for request, index in answers
    ]
    return tokens, values


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 2e-2)])
def test_tokens_and_logits_equal_those_of_the_cpu(
    tiny_model: Path, dtype: str, tolerance: float, request: pytest.FixtureRequest
) -> None:
    """In float16 too: the best token of this prompt leads by 0.6 at every step, far more than the tolerance."""
    tokens, values = answers(tiny_model, dtype)
    assert tokens[0] == tokens[1] == tokens[2]
    lead = torch.tensor(values).view(3, NUM_NEW, 2)
    assert float((lead[..., 0] - lead[..., 1]).min()) > 0.6
    request.getfixturevalue("triton")
    found, found_values = answers(tiny_model, dtype)
    assert found == tokens
    torch.testing.assert_close(torch.tensor(found_values), torch.tensor(values), rtol=0, atol=tolerance)


def test_e5m2_kv(tiny_model: Path, request: pytest.FixtureRequest) -> None:
    tokens, values = answers(tiny_model, "float32", "fp8_e5m2")
    request.getfixturevalue("triton")
    found, found_values = answers(tiny_model, "float32", "fp8_e5m2")
    assert found == tokens
    torch.testing.assert_close(torch.tensor(found_values), torch.tensor(values), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("form", "num_new"), [("auto", NUM_NEW), ("fp8_e4m3", 4)])
def test_captured_decode_steps_with_two_batches_in_flight(
    tiny_model: Path, form: str, num_new: int, request: pytest.FixtureRequest
) -> None:
    """Sizes 1 and 3 serve 1, 2 and 3 sequences; a chunk of a prompt in between runs eagerly."""
    prompts = [prompt_of(length, seed=length) for length in (5, 9, 20)]
    wanted = Session(make_engine(tiny_model, deterministic=False, kv_cache_dtype=form)).ask(prompts, max_tokens=num_new)
    request.getfixturevalue("triton")
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 64}
    engine = make_engine(tiny_model, 8, GraphedCpu(), deterministic=False, kv_cache_dtype=form, **limits)
    sizes = record_sizes(engine)
    session = Session(engine)
    ids = [session.submit(prompts[0], max_tokens=num_new), session.submit(prompts[1], max_tokens=num_new)]
    session.step()
    session.step()
    ids.append(session.submit(prompts[2], max_tokens=num_new))
    session.drain()
    assert [session.tokens(number) for number in ids] == wanted
    assert set(sizes) == {None, 1, 3}


def record_sizes(engine: Engine) -> list[int | None]:
    """The captured size of each batch from now on, None where it runs eagerly."""
    if not isinstance(engine.runner, ModelRunner) or engine.runner.graphs is None:
        raise TypeError("this engine captures nothing")
    graphs, sizes = engine.runner.graphs, list[int | None]()
    size_for = graphs.size_for

    def recorded(step: ForwardInput) -> int | None:
        sizes.append(size_for(step))
        return sizes[-1]

    graphs.size_for = recorded  # type: ignore[method-assign]
    return sizes


@pytest.mark.usefixtures("triton")
def test_padding_rows_of_a_captured_step_store_nothing(tiny_model: Path) -> None:
    """Two sequences in the size of three, after a step of three whose last row is now padding."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64}
    runner = make_engine(tiny_model, 8, GraphedCpu(), deterministic=False, **limits).runner
    if not isinstance(runner, ModelRunner):
        raise TypeError("the engine has another runner")
    pool = runner.cache.tensor
    pool.normal_(generator=torch.Generator().manual_seed(1))
    runner.run(decode_batch([5, 9, 17], 16)).result()
    before, two = pool.clone(), decode_batch([6, 10], 16)
    captured = runner.run(two).result().token_ids
    changed = (pool != before).any(dim=(1, 2, 3, 5)).nonzero().tolist()
    assert changed == [[0, 5], [1, 9]]  # block, place
    stored = pool.clone()
    runner.graphs = None
    pool.copy_(before)
    assert runner.run(two).result().token_ids == captured
    torch.testing.assert_close(pool, stored, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_other_families(family: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Norm weights in float32, soft-caps, windows that end within the prompt, norms of q and k."""
    folder = build_family(FAMILIES[family], tmp_path)
    limits = {"deterministic": False, "max_num_batched_tokens": 20}
    wanted = Session(make_engine(folder, **limits)).ask([prompt_of(30)], max_tokens=3)
    request.getfixturevalue("triton")
    assert Session(make_engine(folder, **limits)).ask([prompt_of(30)], max_tokens=3) == wanted
