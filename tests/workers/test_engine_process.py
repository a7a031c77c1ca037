"""The engine in its own process: start, step messages, failures, and that it never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from tests.workers.harness import files_of
from tournant.kvstore.config import PAGE_BYTES, StoreConfig
from tournant.kvstore.store_process import start_store
from tournant.workers.config import EngineConfig
from tournant.workers.engine_client import ProcessEngineClient, _how_it_ended
from tournant.workers.engine_process import build_engine
from tournant.workers.errors import ConfigError, EngineDeadError, ModelFormatError
from tournant.workers.messages import EngineRequest, RequestOutput
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.families import describe
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.sampling_params import SamplingParams

CONFIG = EngineConfig(dtype="float32", deterministic=True, kv_cache_bytes=64 * 16 * 2048)
PATIENCE_S = 240.0


@asynccontextmanager
async def started(folder: Path, config: EngineConfig = CONFIG) -> AsyncIterator[ProcessEngineClient]:
    client = await ProcessEngineClient.start(config, files_of(folder), timeout_s=60)
    try:
        yield client
    finally:
        await client.close()


class Answer:
    """Collects the outputs of one request; `done` is set when all its answers ended."""

    def __init__(self, client: ProcessEngineClient, prompt: list[int], priority: object = 0, **params: object) -> None:
        fields = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8} | params
        self.params = SamplingParams(**fields)  # type: ignore[arg-type]
        self.request_id = client.new_request_id()
        self.outputs: list[RequestOutput] = []
        self.first, self.done = asyncio.Event(), asyncio.Event()
        request = EngineRequest(self.request_id, prompt, self.params, priority=priority)  # type: ignore[arg-type]
        client.submit(request, self._take)

    def _take(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        self.first.set()
        if sum(o.finish_reason is not None for o in self.outputs) == self.params.n:
            self.done.set()

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]


def run(scenario: Callable[[], Awaitable[None]], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(scenario(), PATIENCE_S))  # type: ignore[arg-type]


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_life(
    tiny_model: Path,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ready, answers, cache hit, reset, abort, a request that cannot run, close: one process for all of it."""

    async def scenario() -> None:
        async with started(tiny_model) as client:
            info = client.info
            assert (info.pid, info.pool_tokens, info.max_sequence_tokens) == (client.process.pid, 1024, 1024)
            assert info.namespace.weights_id == files_of(tiny_model).weights_id
            first = Answer(client, list(range(40)), n=2)
            await first.done.wait()
            second = Answer(client, list(range(40)))
            await second.done.wait()
            assert second.tokens == [t for o in first.outputs if o.index == 0 for t in o.token_ids]
            assert [first.outputs[0].cached_tokens, second.outputs[0].cached_tokens] == [0, 32]
            assert client.stats.generation_tokens == 24
            assert await client.reset_prefix_cache()
            third = Answer(client, list(range(40)))
            await third.done.wait()
            assert third.outputs[0].cached_tokens == 0

            long = Answer(client, [1, 2, 3], max_tokens=1000)
            await long.first.wait()
            assert not await client.reset_prefix_cache()
            client.abort([long.request_id, 12345])
            assert await client.validate() == ""
            quick = Answer(client, [1], max_tokens=1)
            await quick.done.wait()
            assert (client.stats.num_running, client.stats.kv_used) == (0, 0)
            assert await client.reset_prefix_cache(), "an aborted request still held blocks"
            seen = len(long.outputs)

            wrong = Answer(client, [1], n=2, priority="high")
            await wrong.done.wait()
            assert {o.finish_reason for o in wrong.outputs} == {"error"}

            refused = Answer(client, [1] * 1024)
            await refused.done.wait()
            assert refused.outputs[0].finish_reason == "error"
            assert "at most 1023" in (refused.outputs[0].error or "")
            assert len(long.outputs) == seen
        assert client.process.poll() is not None
        assert not client.alive
        with pytest.raises(EngineDeadError):
            Answer(client, [1])

    run(scenario, loop_factory)
    assert [line for name, _, line in caplog.record_tuples if name == "tournant.engine_client"] == []


def test_a_killed_engine_answers_everything_with_an_error_and_the_log_says_how_it_ended(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected: list[str] = []

    async def scenario() -> None:
        async with started(tiny_model) as client:
            answers = [Answer(client, [number], n=2, max_tokens=900) for number in range(4)]
            await answers[-1].first.wait()
            os.kill(client.info.pid, signal.SIGKILL)
            expected.append(f"the engine process {client.info.pid} ended by signal 9 (SIGKILL)")
            for answer in answers:
                await answer.done.wait()
                assert {o.error for o in answer.outputs if o.finish_reason} == set(expected)
                assert {(o.index, o.finish_reason) for o in answer.outputs if o.finish_reason} == {
                    (0, "error"),
                    (1, "error"),
                }
            assert not client.alive
            with pytest.raises(EngineDeadError):
                await client.reset_prefix_cache()

    run(scenario)
    logged = [record for record in caplog.records if record.name == "tournant.engine_client"]
    assert [(record.levelname, record.getMessage()) for record in logged] == [("ERROR", expected[0])]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-11, "ended by signal 11 (SIGSEGV)"),
        (-40, "ended by signal 40"),
        (None, "has closed its connection"),
    ],
)
def test_how_a_process_ended_is_said_in_words(code: int | None, words: str) -> None:
    assert _how_it_ended(code) == words


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (EngineConfig(max_model_len=4096), ConfigError, "max_model_len is 4096; this model has 2048"),
        (EngineConfig(kv_cache_bytes=2000), ConfigError, "holds no block"),
        (EngineConfig(kv_cache_bytes=1 << 44), ConfigError, "of memory are free"),
    ],
)
def test_a_config_that_does_not_fit_is_reported(
    tiny_model: Path, config: EngineConfig, error: type, words: str
) -> None:
    async def scenario() -> None:
        with pytest.raises(error, match=words):
            await ProcessEngineClient.start(config, files_of(tiny_model))

    run(scenario)


@pytest.mark.parametrize(
    ("store", "offload", "words"),
    [
        ({"host_bytes": 2 * PAGE_BYTES}, {}, "slot_bytes is 32768; .* give the store more host_bytes"),
        (
            {"host_bytes": 400 * PAGE_BYTES, "max_clients": 1},
            {"lower_kv_dtype": "fp8_e4m3", "lower_kv_dtype_from": 64},
            "max_clients is 1",
        ),
    ],
)
def test_a_store_that_can_never_serve_it_is_reported(
    tiny_model: Path, tmp_path: Path, store: dict[str, int], offload: dict[str, object], words: str
) -> None:
    config = replace(CONFIG, deterministic=False)
    process = start_store(StoreConfig(**store), tmp_path / "store" / "socket", drain_s=0.0)

    async def scenario() -> None:
        tiers = OffloadConfig(str(process.socket), **offload)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"node store does not serve this engine: .*{words}"):
            await ProcessEngineClient.start(config, files_of(tiny_model), 60, tiers)

    try:
        run(scenario)
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("form", "name"),
    [("auto", "float32"), ("fp8_e5m2", "float32 with fp8_e5m2 KV"), ("fp8_e4m3", "float32 with fp8_e4m3 KV")],
)
def test_the_form_of_kv_has_the_name_it_was_configured_by(tiny_model: Path, form: str, name: str) -> None:
    config = replace(CONFIG, kv_cache_dtype=form, deterministic=False)
    assert build_engine(config, describe(files_of(tiny_model), config), 1)[1].dtype == name


def test_a_broken_model_is_reported(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ")

    async def scenario() -> None:
        with pytest.raises(ModelFormatError, match=r"model\.embed_tokens\.weight"):
            await ProcessEngineClient.start(EngineConfig(), ModelFiles(tmp_path, "x", b"w" * 32))

    run(scenario)


PARENT = """
import asyncio, sys
from pathlib import Path
from tournant.workers.config import EngineConfig
from tournant.workers.engine_client import ProcessEngineClient
from tournant.workers.model_folder import ModelFiles

async def main():
    config = EngineConfig(dtype="float32", kv_cache_bytes=1 << 22)
    client = await ProcessEngineClient.start(config, ModelFiles(Path(sys.argv[1]), "m", b"w" * 32))
    print(client.info.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_engine_ends_with_its_parent(tiny_model: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-P", "-c", PARENT, str(tiny_model)], stdout=subprocess.PIPE)
    if parent.stdout is None:
        raise OSError("no pipe")
    engine = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    ready, _, _ = select.select([engine], [], [], 10)
    os.close(engine)
    assert ready, "the engine outlived its parent by 10 s"
