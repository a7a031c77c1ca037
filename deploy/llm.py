"""Offline use without Ray: `LLM(model).generate(prompts)` and `.chat(messages)`.

Owns an event loop in a thread of its own, on which a frontend speaks to an engine process, and the feeding of prompts
through a window, so that more of them than the engine's queue holds are no overload. Not for several threads at once.

Invariants:
 1. Results come in the order of the prompts, or the first error is raised and nothing of the call runs on.
 2. The engine process ends with `close`, with the LLM object, and with the interpreter, whichever is first; then the
    node store, if there is one, after it has copied down what is only in RAM.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tournant.deploy.config import ADVANCED_KEYS, parse_config
from tournant.deploy.errors import RequestError
from tournant.deploy.frontend import Frontend, FrontendOptions, Prompt
from tournant.deploy.generation import CachedTokens, CompletedAnswer
from tournant.deploy.kv_store_config import KV_ADVANCED_KEYS, absolute_folder
from tournant.deploy.startup import OwnStore, StartedEngine, start_engine
from tournant.workers.attention_maps import MapProgress, MapRequest, write_attention_maps
from tournant.workers.errors import EngineDeadError
from tournant.workers.map_files import AttentionMaps
from tournant.workers.messages import EngineStats
from tournant.workers.model_folder import check_unchanged
from tournant.workers.sampling_params import SamplingParams

NO_TIMEOUT_S = 7 * 86400.0
CLOSE_TIMEOUT_S = 30.0
Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """The answers to one prompt.

    prompt: the text, None when token ids or messages were given; outputs: one `CompletedAnswer` per n, with text,
    token_ids, finish_reason, stop_reason and logprobs; cached_tokens: prompt tokens taken from the KV cache;
    cached_by_tier: the same, by where they lay (device, host, nvme), None without a node store.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletedAnswer]
    cached_tokens: int
    cached_by_tier: CachedTokens | None = None


class LLM:
    """A model in a process of its own, for this one; in several with tensor_parallel_size or pipeline_parallel_size.
    For other weights make another LLM.

    model: folder, .gguf file or hub id, None = SmolLM2-135M-Instruct; cache_dir: where conversions are kept;
    host_bytes: RAM for KV that leaves the device, such as "4GiB", in a process of its own, 0 = none, None = none on a
    CPU and 25 % of memory with a GPU; nvme_bytes, nvme_folder: most bytes on disk and where they are kept, between runs
    too; the rest are fields of EngineConfig, or keys of `advanced:`. Raises ConfigError, ModelFormatError,
    EngineDeadError or StoreUnavailable; no process is left then.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        cache_dir: str | None = None,
        host_bytes: int | str | None = None,
        nvme_bytes: int | str = 0,
        nvme_folder: str | Path | None = None,
        **engine_fields: Any,
    ) -> None:
        folder = None if nvme_folder is None else absolute_folder(str(nvme_folder))
        kv_store = {"host_bytes": host_bytes, "nvme_bytes": nvme_bytes, "nvme_folder": folder}
        args: dict[str, Any] = {"engine": {}, "advanced": {}, "model": model, "cache_dir": cache_dir}
        for name, value in engine_fields.items():
            section = "advanced" if name in ADVANCED_KEYS | KV_ADVANCED_KEYS else "engine"
            args[section][name] = str(value) if isinstance(value, Path) else value
        self._config = config = parse_config({**args, "kv_store": kv_store})
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True, name="llm")
        thread.start()
        self._loop = loop
        engines: list[StartedEngine] = []
        stores: list[OwnStore] = []
        self._close = weakref.finalize(self, _end, engines, stores, loop, thread)  # runs at the interpreter's exit too
        try:
            plan = config.store_plan(on_gpu=_on_gpu(config.engine.device))
            stores += [] if plan is None else [OwnStore(plan)]
            find_store = stores[0].socket if stores else None
            self._files, tokenizer, engine = self._run(start_engine(config, find_store=find_store))
        except BaseException:
            self._close()
            raise
        engines.append(engine)
        options = FrontendOptions(NO_TIMEOUT_S, config.engine.enable_prefix_caching, tiers=bool(stores))
        self._frontend = Frontend(tokenizer, engine, options)
        self._spellings = tokenizer.spellings

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[PromptOutput]:
        """Answers to one text, several texts, or several lists of token ids; use_tqdm: show a progress bar.

        sampling_params: one for all or one per prompt; None = the defaults. Raises RequestError for a prompt that can
        never be served, GenerationFailed and EngineDeadError when the engine fails.
        """
        return self._answer([prompts] if isinstance(prompts, str) else list(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[PromptOutput]:
        """Answers to one conversation (a list of messages) or to several; the rest as in `generate`."""
        one = all(isinstance(message, Mapping) for message in messages)
        conversations: list[Any] = [list(messages)] if one else list(messages)
        return self._answer(conversations, sampling_params, use_tqdm)

    def attention_maps(
        self,
        prompt: Prompt,
        layers: Sequence[int],
        heads: Sequence[int],
        out_dir: str | Path,
        *,
        kinds: Sequence[str] = ("probabilities",),
        overwrite: bool = False,
        progress: MapProgress | None = None,
    ) -> AttentionMaps:
        """Write the attention of some layers and heads over a prompt to `out_dir`, whole and exact, as memory-mapped
        float32 [tokens, tokens] arrays (workers/map_files.py); `kinds`: "scores", "probabilities" or both.

        The layers up to the last one named are loaded once more, into this process, and run over the prompt beside the
        engine, with its weights, device and dtype. progress: as of `write_attention_maps`. Raises ConfigError for
        layers or heads that the model lacks or a folder that holds maps, OSError when the disk is full; then nothing is
        left in the folder.
        """
        token_ids = self._run(self._frontend.encode_prompt(prompt))
        check_unchanged(self._files, self._config.cache_path)
        request = MapRequest(
            token_ids, layers, heads, Path(out_dir), kinds, overwrite=overwrite, token_texts=self._spellings(token_ids)
        )
        return write_attention_maps(self._config.engine, self._files, request, progress=progress)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, or of a conversation as the chat template writes it. Raises RequestError."""
        return self._run(self._frontend.encode_prompt(prompt))

    @property
    def engine_stats(self) -> EngineStats:
        """Counters of the engine since it started, and gauges, as of its latest step."""
        return self._frontend.engine.stats

    @property
    def engine_pid(self) -> int:
        """The engine's process; of several ranks the first."""
        return self._frontend.engine.info.pid

    def close(self) -> None:
        """End the engine process. Idempotent."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _answer(
        self, prompts: list[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None, use_tqdm: bool
    ) -> list[PromptOutput]:
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise RequestError(f"there are {len(sampling_params)} sampling_params for {len(prompts)} prompts", "n")
        columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, disable=not use_tqdm, console=Console(stderr=True)) as progress:
            bar = progress.add_task("answers", total=len(prompts))
            pairs = list(zip(prompts, sampling_params, strict=True))
            return self._run(_answer_all(self._frontend, pairs, lambda: progress.advance(bar)))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait; Ctrl-C here cancels it there."""
        if not self._close.alive:
            work.close()
            raise EngineDeadError("this LLM is closed; make a new one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _answer_all(
    frontend: Frontend, pairs: list[tuple[Prompt, SamplingParams]], done: Callable[[], None]
) -> list[PromptOutput]:
    """As many feeders as keep the engine busy, each taking the next prompt once its last one is answered."""
    info = frontend.engine.info
    outputs: list[PromptOutput | None] = [None] * len(pairs)
    widest = max((params.n for _, params in pairs), default=1)
    window = min(2 * info.max_num_seqs, info.max_num_seqs + info.max_queued_requests) // widest
    queue = iter(enumerate(pairs))
    num_feeders = min(max(1, window), len(pairs))
    feeders = [asyncio.create_task(_feed(frontend, queue, outputs, done)) for _ in range(num_feeders)]
    try:
        await asyncio.gather(*feeders)
    finally:
        for feeder in feeders:
            feeder.cancel()
        await asyncio.gather(*feeders, return_exceptions=True)
    return [output for output in outputs if output is not None]


async def _feed(
    frontend: Frontend,
    queue: Iterator[tuple[int, tuple[Prompt, SamplingParams]]],
    outputs: list[PromptOutput | None],
    done: Callable[[], None],
) -> None:
    for place, (prompt, params) in queue:
        token_ids = await frontend.encode_prompt(prompt)
        completion = await frontend.submit(token_ids, params).collect()
        text = prompt if isinstance(prompt, str) else None
        usage = completion.usage
        outputs[place] = PromptOutput(text, token_ids, completion.answers, usage.cached_tokens, usage.cached_by_tier)
        done()


def _on_gpu(device: str) -> bool:
    """Whether an engine on this device will use a GPU, found out without torch."""
    return device == "cuda" or (device == "auto" and any(Path("/dev").glob("nvidia[0-9]*")))


def _end(
    engines: list[StartedEngine],
    stores: list[OwnStore],
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
) -> None:
    for engine in engines:
        try:
            asyncio.run_coroutine_threadsafe(engine.close(), loop).result(CLOSE_TIMEOUT_S)
        except (TimeoutError, RuntimeError):  # at the interpreter's exit no thread can be started to wait in
            engine.kill()
    for store in stores:  # engines first: they hand over what is only on the device
        store.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(CLOSE_TIMEOUT_S)
    if not thread.is_alive():
        loop.close()
