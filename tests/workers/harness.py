"""Real engines on small models inside the test process."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from pathlib import Path

from tournant.workers.config import EngineConfig
from tournant.workers.device import Device
from tournant.workers.engine import Engine
from tournant.workers.engine_process import build_engine
from tournant.workers.messages import EngineRequest, RequestOutput
from tournant.workers.model_files import resolve_model
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.families import describe, read_decoder_config
from tournant.workers.sampling_params import SamplingParams

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@lru_cache
def files_of(folder: Path) -> ModelFiles:
    """The folder as a model, hashed once."""
    return resolve_model(str(folder))


def make_engine(folder: Path, num_blocks: int = 64, on: Device | None = None, **config: object) -> Engine:
    """An engine in fp32 and deterministic mode unless told otherwise; `num_blocks` blocks of 16 tokens."""
    fields: dict[str, object] = {"dtype": "float32", "deterministic": True, "device": "cpu", "num_threads": 1} | config
    decoder = read_decoder_config(folder)
    block_tokens = fields.get("block_tokens") or 16
    token_bytes = decoder.num_layers * 2 * decoder.num_kv_heads * decoder.head_size * 4
    fields["kv_cache_bytes"] = num_blocks * int(block_tokens) * token_bytes  # type: ignore[call-overload]
    made = EngineConfig(**fields)  # type: ignore[arg-type]
    return build_engine(made, describe(files_of(folder), made), 1, on)[0]


class Session:
    """Feeds prompts to an engine and collects the answers of each."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: dict[int, list[RequestOutput]] = defaultdict(list)
        self._next = 0

    def submit(self, prompt: list[int], **params: object) -> int:
        """Queue one prompt; returns its request id."""
        self._next += 1
        request = EngineRequest(self._next, prompt, SamplingParams(**(GREEDY | params)))  # type: ignore[arg-type]
        self.book(self.engine.add_request(request))
        return self._next

    def book(self, outputs: list[RequestOutput]) -> None:
        """Sort outputs by request."""
        for output in outputs:
            self.outputs[output.request_id].append(output)

    def step(self) -> None:
        """One turn of the engine's loop, checked."""
        self.book(self.engine.step())
        self.engine.validate()

    def drain(self) -> None:
        """Run until nothing is left to do."""
        while self.engine.has_work:
            self.step()

    def tokens(self, request_id: int, index: int = 0) -> list[int]:
        """Generated tokens of one answer so far."""
        return [token for o in self.outputs[request_id] if o.index == index for token in o.token_ids]

    def ask(self, prompts: list[list[int]], **params: object) -> list[list[int]]:
        """Answers of all prompts, run together."""
        ids = [self.submit(prompt, **params) for prompt in prompts]
        self.drain()
        return [self.tokens(request_id) for request_id in ids]
