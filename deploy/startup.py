"""From a configuration to everything a frontend needs: model files, tokenizer, node store, a running engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tournant.cluster.node_store import StoreKeeper, StorePlan
from tournant.cluster.run_folder import STORE_SOCKET, RunFolder
from tournant.deploy.config import ServiceConfig
from tournant.deploy.engine_swap import EngineSwap
from tournant.deploy.kv_store_config import in_words_of_the_user
from tournant.deploy.tokenizer import Tokenizer
from tournant.kvstore.errors import StoreConfigError, StoreRefused
from tournant.workers.engine_client import EngineClient, ProcessEngineClient
from tournant.workers.errors import ConfigError
from tournant.workers.model_files import resolve_model
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.families import read_decoder_config
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.parallel import check_split
from tournant.workers.rank_launch import LocalRanks, RankLauncher
from tournant.workers.replica_engine import ReplicaEngine, start_unchanged

StartedEngine = ProcessEngineClient | ReplicaEngine
Engine = TypeVar("Engine", bound=EngineClient)
_LOG = logging.getLogger("tournant.startup")


async def start_engine(
    config: ServiceConfig,
    progress: Callable[[str], None] | None = None,
    find_store: Callable[[], str | None] | None = None,
    make_launcher: Callable[[], RankLauncher] = LocalRanks,
) -> tuple[ModelFiles, Tokenizer, StartedEngine]:
    """Resolve the configured model, then start its engine while the tokenizer loads. progress: called with text.

    make_launcher: of the ranks of each engine, if it has several; find_store: called in a thread, gives the socket of
    the node store, None for none. A store that nobody asked for, of the default size, is done without when it cannot
    start. Raises ConfigError, ModelFormatError, EngineDeadError, StoreUnavailable or OSError; no engine process is left
    then.
    """
    files, offload = await _prepare(config, config.model, progress, find_store)
    starting = launch_engine(config, files, offload, make_launcher)
    tokenizer, engine = await _with_tokenizer(files, starting)
    return files, tokenizer, engine


async def start_engine_swap(
    config: ServiceConfig,
    model: str | None,
    find_store: Callable[[], str | None] | None = None,
    make_launcher: Callable[[], RankLauncher] = LocalRanks,
) -> tuple[Tokenizer, EngineSwap]:
    """As `start_engine`, of an engine whose weights can be changed. model: what it starts with, not `config.model`.

    No engine starts on files that are not what they were when they were resolved, when it goes back to them neither.
    """
    files, offload = await _prepare(config, model, None, find_store)

    async def start(found: ModelFiles) -> StartedEngine:
        return await launch_engine(config, found, offload, make_launcher)

    return await _with_tokenizer(files, EngineSwap.start(start, files))


def model_finder(config: ServiceConfig) -> Callable[[str | None], ModelFiles]:
    """Finds the files of a model, as `resolve_model`, and refuses, by its config.json alone, one that an engine of this
    configuration cannot run: ConfigError for an impossible split or length.
    """

    def find(model: str | None) -> ModelFiles:
        files, engine = resolve_model(model, config.weights_dtype, config.cache_path), config.engine
        found = read_decoder_config(files.folder, engine.max_model_len)
        check_split(found, engine.tensor_parallel_size, engine.pipeline_parallel_size)
        return files

    return find


async def launch_engine(
    config: ServiceConfig,
    files: ModelFiles,
    offload: OffloadConfig | None,
    make_launcher: Callable[[], RankLauncher] = LocalRanks,
) -> StartedEngine:
    """Start an engine; one of several ranks comes back when it ends. Errors as of `start_unchanged` and
    `ProcessEngineClient.start`.
    """
    engine, cache = config.engine, config.cache_path
    if engine.num_ranks == 1:
        return await start_unchanged(files, cache, lambda: ProcessEngineClient.start(engine, files, offload=offload))
    return await ReplicaEngine.start(engine, files, offload=offload, make_launcher=make_launcher, cache_dir=cache)


async def _prepare(
    config: ServiceConfig,
    model: str | None,
    progress: Callable[[str], None] | None,
    find_store: Callable[[], str | None] | None,
) -> tuple[ModelFiles, OffloadConfig | None]:
    """The files of a model, and what its engine is told of the node store."""
    resolving = asyncio.to_thread(resolve_model, model, config.weights_dtype, config.cache_path, progress)
    if find_store is None:
        files, socket = await resolving, None
    else:
        files, socket = await asyncio.gather(
            resolving, asyncio.to_thread(_found, find_store, asked=config.kv_store.asked_for)
        )
    if progress is not None:
        progress(f"loading {files.name} into the engine")
    return files, None if socket is None else config.kv_store.offload(socket)


async def _with_tokenizer(files: ModelFiles, starting: Coroutine[Any, Any, Engine]) -> tuple[Tokenizer, Engine]:
    """An engine, and its tokenizer, which loads while the engine starts."""
    engine = asyncio.create_task(starting)
    try:
        return await asyncio.to_thread(Tokenizer.from_folder, files.folder), await engine
    except BaseException:
        engine.cancel()
        (started,) = await asyncio.gather(engine, return_exceptions=True)
        if not isinstance(started, BaseException):
            await started.close()
        raise


def _found(find_store: Callable[[], str | None], *, asked: bool) -> str | None:
    try:
        return find_store()
    except (StoreConfigError, StoreRefused) as error:
        message = in_words_of_the_user(str(error))
        if asked or isinstance(error, StoreRefused):
            raise ConfigError(message) from None
        _LOG.warning("there is no node store, because one of the default size cannot start: %s", message)
        return None


class OwnStore:
    """A node store of this process alone, in a run folder of its own. It ends with `close`, or with this process."""

    def __init__(self, plan: StorePlan) -> None:
        self._folder = RunFolder()
        self._keeper = StoreKeeper(plan, (self._folder.path / STORE_SOCKET).parent)

    def socket(self) -> str:
        """Where engines attach, once the store is ready. Raises StoreConfigError, StoreUnavailable."""
        return str(self._keeper.wait_ready())

    def close(self) -> None:
        """Let the store copy down what is dirty, within its limit, and end it. Idempotent."""
        self._keeper.stop()
        self._folder.remove()
