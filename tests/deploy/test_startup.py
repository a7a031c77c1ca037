"""What an engine is started with: its store's socket and settings, or an error in the words of the configuration."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.async_test import async_test
from tests.deploy.fake_engine import FakeEngineClient
from tournant.deploy import startup
from tournant.deploy.config import ServiceConfig, parse_config
from tournant.deploy.engine_swap import SwapFailed
from tournant.deploy.startup import OwnStore, model_finder, start_engine, start_engine_swap
from tournant.kvstore.errors import StoreConfigError, StoreRefused, StoreUnavailable
from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.model_files import resolve_model
from tournant.workers.model_folder import ModelFiles
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.rank_launch import LocalRanks


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Keyword arguments of every engine that is started; none really is."""
    calls: list[dict[str, Any]] = []

    async def start(*_: Any, **options: Any) -> FakeEngineClient:
        calls.append(options)
        return FakeEngineClient(lambda request, index: [])

    monkeypatch.setattr(startup.ProcessEngineClient, "start", start)
    return calls


def config(model: Path, cache: Path, **sections: Any) -> ServiceConfig:
    return parse_config({"model": str(model), "cache_dir": str(cache), **sections})


@async_test
async def test_an_engine_gets_the_socket_of_its_store(
    tiny_model: Path, tmp_path: Path, started: list[dict[str, Any]]
) -> None:
    made = config(tiny_model, tmp_path, kv_store={"host_bytes": "1MiB"}, advanced={"restore": "always"})
    await start_engine(made, find_store=lambda: "/run/kv/socket")
    assert started == [{"offload": OffloadConfig("/run/kv/socket", restore="always")}]


@async_test
async def test_an_engine_without_a_store_has_no_offload(
    tiny_model: Path, tmp_path: Path, started: list[dict[str, Any]]
) -> None:
    await start_engine(config(tiny_model, tmp_path))
    await start_engine(config(tiny_model, tmp_path), find_store=lambda: None)
    assert started == [{"offload": None}] * 2


@async_test
async def test_a_store_that_cannot_be_had_ends_the_start(
    tiny_model: Path, tmp_path: Path, started: list[dict[str, Any]]
) -> None:
    for error, kind, message in (
        (StoreConfigError("host_bytes is 5; this machine has 4"), ConfigError, r"^kv_store\.host_bytes is 5; this"),
        (StoreRefused("the node store runs with eviction lru, not lfu"), ConfigError, "eviction lru"),
        (StoreUnavailable("not ready"), StoreUnavailable, "not ready"),
    ):

        def find_store(error: Exception = error) -> str:
            raise error

        with pytest.raises(kind, match=message):
            await start_engine(config(tiny_model, tmp_path, kv_store={"host_bytes": "1MiB"}), find_store=find_store)
    assert started == []


@async_test
async def test_a_store_that_nobody_asked_for_is_done_without(
    tiny_model: Path, tmp_path: Path, started: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    def find_store() -> str:
        raise StoreConfigError("host_bytes is 5; this machine has 4")

    await start_engine(config(tiny_model, tmp_path), find_store=find_store)
    assert started == [{"offload": None}]
    assert "there is no node store" in caplog.text


@async_test
async def test_an_engine_of_several_ranks_is_one_that_comes_back(
    tiny_model: Path, tmp_path: Path, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(engine: EngineConfig, files: ModelFiles, **options: Any) -> FakeEngineClient:
        started.append(options | {"ranks": engine.num_ranks})
        return FakeEngineClient(lambda request, index: [])

    monkeypatch.setattr(startup.ReplicaEngine, "start", start)
    split = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    await start_engine(config(tiny_model, tmp_path, engine=split))
    await start_engine(config(tiny_model, tmp_path, engine=split), make_launcher=NoRanks)
    assert started == [
        {"offload": None, "make_launcher": LocalRanks, "cache_dir": tmp_path, "ranks": 4},
        {"offload": None, "make_launcher": NoRanks, "cache_dir": tmp_path, "ranks": 4},
    ]


class NoRanks(LocalRanks):
    pass


@async_test
async def test_an_engine_whose_weights_can_change_starts_with_those_it_is_told(
    tiny_models: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its engines gets the same store, whatever model is configured."""
    calls: list[tuple[Path, Any]] = []

    async def start(_: EngineConfig, files: ModelFiles, offload: OffloadConfig | None) -> FakeEngineClient:
        calls.append((files.folder, offload))
        return FakeEngineClient(lambda request, index: [])

    monkeypatch.setattr(startup.ProcessEngineClient, "start", start)
    made = config(tmp_path / "gone", tmp_path, kv_store={"host_bytes": "1MiB"})
    tokenizer, swap = await start_engine_swap(made, str(tiny_models["mqa"]), lambda: "/run/kv/socket")
    assert tokenizer.vocab_size == 389
    await swap.swap(resolve_model(str(tiny_models["m"]), cache_dir=tmp_path))
    offload = OffloadConfig("/run/kv/socket")
    assert calls == [(tiny_models["mqa"], offload), (tiny_models["m"], offload)]


@async_test
async def test_weights_that_were_overwritten_are_not_gone_back_to(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under their old name they would be answered from the old ones' KV."""

    async def start(_: EngineConfig, files: ModelFiles, offload: OffloadConfig | None) -> FakeEngineClient:
        if files.folder.name == "bad":
            raise ModelFormatError("damaged")
        return FakeEngineClient(lambda request, index: [])

    monkeypatch.setattr(startup.ProcessEngineClient, "start", start)
    folders = [tmp_path / "old", tmp_path / "bad"]
    for folder in folders:
        shutil.copytree(tiny_model, folder)
    cache = tmp_path / "cache"
    _, swap = await start_engine_swap(config(folders[0], cache), str(folders[0]))
    bad = resolve_model(str(folders[1]), cache_dir=cache)
    with pytest.raises(SwapFailed, match=r"^damaged$"):
        await swap.swap(bad)
    (folders[0] / "config.json").write_text((folders[0] / "config.json").read_text() + "\n")
    with pytest.raises(SwapFailed, match=r"damaged; and .* was overwritten: its weights are") as caught:
        await swap.swap(bad)
    assert not caught.value.serving


@async_test
async def test_no_engine_is_left_when_its_tokenizer_cannot_be_read(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ready = FakeEngineClient(lambda request, index: []), threading.Event()

    async def start(*_: Any, **__: Any) -> FakeEngineClient:
        ready.set()
        return engine

    def read(_: Path) -> None:
        assert ready.wait(10)  # it fails when the engine is there already
        raise ModelFormatError("tokenizer.json is damaged")

    monkeypatch.setattr(startup.ProcessEngineClient, "start", start)
    monkeypatch.setattr(startup.Tokenizer, "from_folder", read)
    with pytest.raises(ModelFormatError, match="damaged"):
        await start_engine(config(tiny_model, tmp_path))
    assert not engine.alive


def test_a_store_of_this_process_alone_leaves_nothing() -> None:
    plan = parse_config({"kv_store": {"host_bytes": "1MiB"}}).kv_store.plan(on_gpu=False)
    assert plan is not None
    store = OwnStore(plan)
    socket = Path(store.socket())
    assert socket.is_socket()
    assert socket.parent.parent.stat().st_mode & 0o777 == 0o700
    store.close()
    store.close()
    assert not socket.parent.parent.exists()


def test_a_model_that_the_ranks_cannot_share_is_refused_by_its_configuration_alone(
    tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "m")
    possible = model_finder(config(tmp_path / "m", tmp_path, engine={"tensor_parallel_size": 2}))
    assert possible(str(tmp_path / "m")).folder == tmp_path / "m"
    find = model_finder(config(tmp_path / "m", tmp_path, engine={"tensor_parallel_size": 3}))
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size is 3, but the model has 4 heads .*; possible are 1, 2"
    ):
        find(str(tmp_path / "m"))
