"""An engine without a model: every running answer gets one token per step, at once.

Owns the steps; speaks `EngineClient` inside the server's process, so that what a server spends is its own work and this
little loop. A step is one turn of the event loop, in which every reader of the step before has run.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence

from tournant.kvstore.block import Namespace
from tournant.workers.engine_client import OutputSink
from tournant.workers.messages import EngineInfo, EngineRequest, EngineStats, RequestOutput


class NullEngineClient:
    """`EngineClient` whose answers repeat `tokens`; they end by max_tokens alone. One answer per request."""

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        self.info = EngineInfo(
            writer_id=1,
            pid=0,
            max_model_len=1 << 16,
            pool_tokens=1 << 20,
            block_tokens=16,
            max_num_seqs=1024,
            max_queued_requests=1 << 16,
            vocab_size=vocab_size,
            eos_token_ids=(),
            dtype="bfloat16",
            device="cpu",
            namespace=Namespace(b"w" * 32, "bf16", "null", b"l" * 32),
        )
        self.stats = EngineStats()
        self.alive = True
        self.restarting = False
        self.prefill_tokens = 0
        self._ids = itertools.count(1)
        self._tokens = tokens
        self._running: dict[int, tuple[OutputSink, int, int]] = {}  # request id -> sink, tokens made, tokens wanted
        self._scheduled = False

    def new_request_id(self) -> int:
        """See `EngineClient`."""
        return next(self._ids)

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """See `EngineClient`."""
        self._running[request.request_id] = (sink, 0, request.params.max_tokens or 1)
        self._schedule()

    def abort(self, request_ids: Iterable[int]) -> None:
        """See `EngineClient`."""
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def abort_answer(self, request_id: int, index: int) -> None:
        """See `EngineClient`; a request has one answer."""
        if index == 0:
            self.abort([request_id])

    async def reset_prefix_cache(self) -> bool:
        """See `EngineClient`."""
        return True

    async def close(self) -> None:
        """See `EngineClient`."""
        self.alive = False

    def _schedule(self) -> None:
        if not self._scheduled and self._running:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._scheduled = False
        for request_id, (sink, made, wanted) in list(self._running.items()):
            output = RequestOutput(request_id, 0, [self._tokens[made % len(self._tokens)]])
            made += 1
            if made == 1:
                output.cached_tokens, output.queue_ms, output.prefill_ms = 0, 0.0, 0.0
            if made == wanted:
                output.finish_reason = "length"
                del self._running[request_id]
            else:
                self._running[request_id] = (sink, made, wanted)
            sink(output)
        self._schedule()
