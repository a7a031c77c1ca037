"""The requests that a client of an engine has given to it and that are not over, with whom their outputs go to.

Invariants:
 1. A sink hears of each answer until one output with a finish_reason, and nothing after that; nor after a drop, but for
    the errors of a `lose` that is under way.
 2. `lose` ends everything: a request that is added by a sink during it is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tournant.workers.messages import LOST_DEAD, EngineRequest, RequestOutput

Sink = Callable[[RequestOutput], None]


@dataclass(slots=True)
class _Entry:
    sink: Sink
    running: set[int]  # numbers of answers
    prefill_tokens: int  # that the engine has not said to be computed yet


class OpenRequests:
    """See the module. One event loop, no threads."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self.prefill_tokens = 0  # of requests without a first output
        self.num_answers = 0  # that run or wait

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: EngineRequest, sink: Sink) -> None:
        """It was sent."""
        entry = _Entry(sink, set(request.indices), len(request.token_ids))
        self._entries[request.request_id] = entry
        self.prefill_tokens += entry.prefill_tokens
        self.num_answers += len(entry.running)

    def drop(self, request_ids: Iterable[int]) -> list[int]:
        """Forget requests; those that there were."""
        known = [request_id for request_id in request_ids if request_id in self._entries]
        for request_id in known:
            self._forget(request_id)
        return known

    def drop_answer(self, request_id: int, index: int) -> bool:
        """Forget one answer; whether there was one."""
        entry = self._entries.get(request_id)
        if entry is None or index not in entry.running:
            return False
        self._end(request_id, entry, index)
        return True

    def deliver(self, outputs: Iterable[RequestOutput]) -> int:
        """Give outputs to their sinks. Returns how many answers ended other than by an error."""
        num_finished = 0
        for output in outputs:
            entry = self._entries.get(output.request_id)
            if entry is None or output.index not in entry.running:
                continue
            self.prefill_tokens -= entry.prefill_tokens
            entry.prefill_tokens = 0
            if output.finish_reason is not None:
                num_finished += output.finish_reason != "error"
                self._end(output.request_id, entry, output.index)
            entry.sink(output)
        return num_finished

    def lose(self, why: str, lost: str = LOST_DEAD) -> None:
        """End every answer with an "error" after which it can go on elsewhere."""
        entries, self._entries = self._entries, {}
        self.prefill_tokens = self.num_answers = 0
        for request_id, entry in entries.items():
            for index in sorted(entry.running):
                entry.sink(RequestOutput(request_id, index, [], "error", error=why, lost=lost))

    def _end(self, request_id: int, entry: _Entry, index: int) -> None:
        entry.running.discard(index)
        self.num_answers -= 1
        if not entry.running:
            self._forget(request_id)

    def _forget(self, request_id: int) -> None:
        entry = self._entries.pop(request_id)
        self.prefill_tokens -= entry.prefill_tokens
        self.num_answers -= len(entry.running)
