"""A replica whose weights are changed while it serves: every answer is of one model, and a failure changes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.deploy.async_test import async_test, settle
from tests.deploy.fake_engine import FakeEngineClient, make_info
from tests.helpers.reference import reference_generate
from tests.helpers.tiny_model import build_tiny_model
from tournant.cluster.weights_rollout import Weights
from tournant.deploy.engine_swap import EngineSwap, SwapFailed
from tournant.deploy.frontend import Frontend, FrontendOptions
from tournant.deploy.tokenizer import Tokenizer
from tournant.deploy.weights_loop import weights_change
from tournant.kvstore.block import Namespace
from tournant.workers.config import EngineConfig
from tournant.workers.engine_client import ProcessEngineClient
from tournant.workers.errors import ConfigError, EngineDeadError, ModelFormatError
from tournant.workers.messages import EngineRequest
from tournant.workers.model_files import resolve_model
from tournant.workers.model_folder import ModelFiles
from tournant.workers.sampling_params import SamplingParams

NUM_REQUESTS, NUM_TOKENS = 40, 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
CONFIG = EngineConfig(
    device="cpu", dtype="float32", kv_cache_bytes=32 << 20, max_num_seqs=8, max_queued_requests=64, deterministic=True
)


# ------------------------------------------------------------ with fake engines


class Starter:
    """Starts fake engines, never a second one beside one that lives; `broken` names weights that cannot be loaded."""

    def __init__(self) -> None:
        self.engines: list[FakeEngineClient] = []
        self.broken: dict[str, Exception] = {}
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def __call__(self, files: ModelFiles) -> FakeEngineClient:
        assert not any(engine.alive for engine in self.engines)
        await self.may_start.wait()
        if files.name in self.broken:
            raise self.broken[files.name]
        namespace = Namespace(files.weights_id, "fp32", "fp32", b"l" * 32)
        self.engines.append(FakeEngineClient(lambda *_: [], make_info(namespace=namespace)))
        return self.engines[-1]


def files(name: str) -> ModelFiles:
    return ModelFiles(Path(name), name, name.encode().ljust(32))


def request(number: int) -> EngineRequest:
    return EngineRequest(number, [1], GREEDY, [], b"")


@async_test
async def test_what_it_says_is_of_the_engine_that_runs() -> None:
    start = Starter()
    swap = await EngineSwap.start(start, files("old"))
    ids = [swap.new_request_id()]
    await swap.swap(files("new"))
    ids.append(swap.new_request_id())
    assert swap.engine is start.engines[1]
    assert swap.info is start.engines[1].info
    assert swap.stats is start.engines[1].stats
    assert swap.info.namespace.weights_id == swap.files.weights_id == files("new").weights_id
    assert len(set(ids)) == 2
    assert [engine.alive for engine in start.engines] == [False, True]
    swap.submit(request(ids[1]), lambda output: None)
    assert len(start.engines[1].submitted) == 1


@async_test
async def test_weights_that_cannot_be_loaded_leave_the_old_ones() -> None:
    start = Starter()
    swap = await EngineSwap.start(start, files("old"))
    start.broken["new"] = ModelFormatError("no tensor of this name")
    with pytest.raises(SwapFailed, match=r"^no tensor of this name$") as caught:
        await swap.swap(files("new"))
    assert (caught.value.serving, swap.alive, swap.files.name) == (True, True, "old")
    start.broken["old"] = ConfigError("the disk is gone")
    with pytest.raises(
        SwapFailed, match="name; and the weights from before cannot be loaded again: the disk"
    ) as caught:
        await swap.swap(files("new"))
    assert (caught.value.serving, swap.alive) == (False, False)


@async_test
async def test_during_a_swap_it_lives_and_takes_nothing_and_close_ends_it() -> None:
    start = Starter()
    swap = await EngineSwap.start(start, files("old"))
    start.may_start.clear()
    swapping = asyncio.create_task(swap.swap(files("new")))
    await settle()
    assert (swap.alive, swap.swapping) == (True, True)
    with pytest.raises(EngineDeadError, match="being changed; try again"):
        swap.submit(request(1), lambda output: None)
    with pytest.raises(EngineDeadError, match="being changed; try again"):
        await swap.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="already"):
        await swap.swap(files("newer"))
    swap.abort([1])
    await swap.close()
    with pytest.raises(EngineDeadError, match="closed"):
        await swapping
    assert (swap.alive, len(start.engines)) == (False, 1)
    with pytest.raises(EngineDeadError, match="closed"):
        await swap.swap(files("new"))


@async_test
async def test_a_change_brings_engine_tokenizer_and_limits(tiny_model: Path, tmp_path: Path) -> None:
    start = Starter()
    swap = await EngineSwap.start(start, files("old"))
    frontend = Frontend(Tokenizer.from_folder(tiny_model), swap)
    other = ModelFiles(build_tiny_model(tmp_path, add_bos=True), "new", b"n" * 32)
    asked: list[str | None] = []

    def resolve(model: str | None) -> ModelFiles:
        asked.append(model)
        return other

    change = weights_change(frontend, swap, resolve, drain_s=0.0)
    assert await change(Weights(1, "new", "t")) == other.weights_id.hex()
    assert (asked, swap.files, frontend.engine, frontend.epoch) == (["new"], other, swap, 1)
    assert await frontend.encode_prompt("a") == [256, 97]  # by the new tokenizer
    start.broken["new"] = ModelFormatError("no")
    with pytest.raises(SwapFailed):
        await change(Weights(2, "new", "t2"))
    assert (swap.files, frontend.gate.closed, swap.alive) == (other, False, False)


# ------------------------------------------------------------ with real ones


@pytest.fixture(scope="module")
def new_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """M's shape with other weights."""
    return build_tiny_model(tmp_path_factory.mktemp("models") / "new", seed=7)


def prompts() -> list[list[int]]:
    return [[(7 * number + place) % 250 for place in range(20)] for number in range(NUM_REQUESTS)]


@pytest.mark.timeout(120)
def test_forty_requests_across_a_swap_are_each_of_one_model(tiny_model: Path, new_model: Path, tmp_path: Path) -> None:
    """Some run to their end, some begin again, some wait: no answer fails and none is of two models."""
    own = [reference_generate(folder, prompts(), NUM_TOKENS) for folder in (tiny_model, new_model)]
    assert all(old != new for old, new in zip(*own, strict=True))
    counted = [0, 0]

    async def scenario() -> None:
        async def start(found: ModelFiles) -> ProcessEngineClient:
            return await ProcessEngineClient.start(CONFIG, found)

        def resolve(model: str | None) -> ModelFiles:
            return resolve_model(model, "float32", tmp_path)

        engine = await EngineSwap.start(start, resolve(str(tiny_model)))
        old_pid, old_writer = engine.info.pid, engine.info.writer_id
        frontend = Frontend(Tokenizer.from_folder(tiny_model), engine, FrontendOptions(request_timeout_s=90))
        change = weights_change(frontend, engine, resolve, drain_s=0.0)
        new_files, new_tokenizer = resolve(str(new_model)), Tokenizer.from_folder(new_model)

        async def swap() -> Tokenizer:
            await engine.swap(new_files)
            return new_tokenizer

        try:
            waiting = [asyncio.create_task(frontend.generate(prompt, GREEDY)) for prompt in prompts()[:20]]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)  # the others run or wait in the engine
            changing = asyncio.create_task(frontend.change_weights(swap, 0.0))
            await settle()
            assert frontend.gate.closed
            waiting += [asyncio.create_task(frontend.generate(prompt, GREEDY)) for prompt in prompts()[20:]]
            await changing
            for place, task in enumerate(waiting):
                tokens = (await task).answers[0].token_ids
                assert tokens in (own[0][place], own[1][place])
                counted[tokens == own[1][place]] += 1
            assert (engine.info.pid != old_pid, engine.info.writer_id != old_writer) == (True, True)
            assert not Path("/proc", str(old_pid)).exists()
            assert engine.info.namespace.weights_id == engine.files.weights_id
            with pytest.raises(ModelFormatError):  # before anyone has to wait
                await change(Weights(1, str(tmp_path / "none"), "t"))
            with pytest.raises(ConfigError, match=r"is .* here and 0123 where it was loaded first"):
                await change(Weights(1, str(new_model), "t", "0123"))
            assert frontend.engine.info.pid == engine.info.pid
            assert (await frontend.generate(prompts()[0], GREEDY)).answers[0].token_ids == own[1][0]
        finally:
            await engine.close()

    asyncio.run(scenario())
    assert sum(counted) == NUM_REQUESTS
    assert 1 <= counted[0] < 20
