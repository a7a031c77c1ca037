"""From a configuration to everything a frontend needs: model files, tokenizer, a running engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tournant.deploy.config import ServiceConfig
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.engine_client import ProcessEngineClient
from tournant.workers.model_files import ModelFiles, resolve_model


async def start_engine(
    config: ServiceConfig, progress: Callable[[str], None] | None = None
) -> tuple[ModelFiles, Tokenizer, ProcessEngineClient]:
    """Resolve the model, then start its engine while the tokenizer loads. progress: called with a line of text.

    Raises ConfigError, ModelFormatError, EngineDeadError or OSError; no engine process is left then.
    """
    files = await asyncio.to_thread(resolve_model, config.model, config.weights_dtype, config.cache_path, progress)
    if progress is not None:
        progress(f"loading {files.name} into the engine")
    engine = asyncio.create_task(ProcessEngineClient.start(config.engine, files))
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, files.folder)
        return files, tokenizer, await engine
    except BaseException:
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
        raise
