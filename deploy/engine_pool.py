"""All engines of an application as one: what a frontend of its own (`ingress: resilient`) gives its requests to.

Owns one stream to each engine that the registry names, opened again while it is named, and the requests that wait
while there is no engine for them. Which of several engines gets a request is `choose`'s; that an answer goes on
elsewhere when its engine is lost is generation.py's. One event loop.

Invariants:
 1. A request goes to an engine on its own weights (`EngineRequest.weights_id`), or waits for one. When there is none
    and none is named, while others serve other weights, each of its answers is LOST_WEIGHTS. Nothing waits for ever:
    whoever submits has a time limit and aborts.
 2. A stream that is over gets nothing, whatever the registry says; one that works is used, though the registry has
    forgotten it.
 3. `info` is what every engine on the current weights can do; the current weights change by `use` alone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from tournant.cluster.engine_members import Member
from tournant.workers.engine_client import OutputSink
from tournant.workers.errors import EngineDeadError
from tournant.workers.messages import LOST_WEIGHTS, EngineInfo, EngineRequest, EngineStats, RequestOutput
from tournant.workers.stream_client import StreamEngineClient

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0  # before a stream is opened again; doubled with every failure
GAUGES = ("num_running", "num_waiting", "kv_used", "kv_total", "kv_cached", "num_restoring", "queued_tokens")
logger = logging.getLogger("tournant.engine_pool")


@dataclass(eq=False, slots=True)
class PoolEngine:
    """One engine. client: the stream to it, None while there is none; listed: whether the registry names it."""

    member: Member
    client: StreamEngineClient | None = None
    listed: bool = True
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def replica(self) -> str:
        """Its replica's name."""
        return self.member.replica

    @property
    def serving(self) -> bool:
        """Whether it takes requests."""
        return self.client is not None and self.client.serving

    @property
    def weights_id(self) -> bytes:
        """Of the weights it has, as far as is known."""
        if self.client is not None and self.client.alive:
            return self.client.info.namespace.weights_id
        return bytes.fromhex(self.member.weights_id)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of this frontend's requests that it has not begun to answer."""
        return 0 if self.client is None else self.client.prefill_tokens

    @property
    def num_answers(self) -> int:
        """Answers that run or wait there: those of all frontends as it said last, or those of this one, if more."""
        if self.client is None:
            return 0
        stats = self.client.stats
        return max(self.client.num_answers, stats.num_running + stats.num_waiting + stats.num_restoring)

    def has_room(self, request: EngineRequest) -> bool:
        """Whether it can take a request now, and have all of it."""
        if self.client is None:
            return False
        info, params = self.client.info, request.params
        longest = len(request.token_ids) - request.num_output + (params.max_tokens or 0)
        capacity = info.max_num_seqs + info.max_queued_requests
        return self.num_answers + params.n <= capacity and longest <= info.max_sequence_tokens


Connect = Callable[[Member], Awaitable[StreamEngineClient]]
Choose = Callable[[EngineRequest, Sequence[PoolEngine]], PoolEngine]


def least_prefill(request: EngineRequest, engines: Sequence[PoolEngine]) -> PoolEngine:
    """The engine with the least prompt tokens to compute, of several the one with the fewest answers."""
    return min(engines, key=lambda engine: (engine.prefill_tokens, engine.num_answers))


class EnginePool:
    """`EngineClient` over all engines. connect: opens a stream, raises EngineDeadError; choose: from at least one
    engine; first_wait_s: before a stream is opened again.
    """

    def __init__(self, connect: Connect, choose: Choose = least_prefill, first_wait_s: float = FIRST_WAIT_S) -> None:
        self.on_change: Callable[[], None] = lambda: None  # called when engines or their weights are others
        self.on_wait: Callable[[], None] = lambda: None  # called when a request waits for an engine
        self.num_resumed = 0  # answers that came with tokens of another engine
        self._connect = connect
        self._choose = choose
        self._first_wait_s = first_wait_s
        self._engines: dict[str, PoolEngine] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._parked: dict[int, tuple[EngineRequest, OutputSink]] = {}
        self._ids = itertools.count(1)
        self._weights_id: bytes | None = None
        self._info: EngineInfo | None = None
        self._ready = asyncio.Event()
        self._closed = False

    # ------------------------------------------------------------ engines

    def set_members(self, members: Iterable[Member]) -> None:
        """Who the registry names now."""
        if self._closed:
            return
        named = {member.replica: member for member in members}
        for replica, engine in self._engines.items():
            engine.listed = replica in named
            engine.news.set()
        for replica, member in named.items():
            engine = self._engines.setdefault(replica, PoolEngine(member))
            engine.member = member
            if replica not in self._keepers:
                self._keepers[replica] = asyncio.get_running_loop().create_task(self._keep(engine))
        self._changed()

    @property
    def engines(self) -> list[PoolEngine]:
        """All engines that are named or connected."""
        return list(self._engines.values())

    @property
    def weights_id(self) -> bytes | None:
        """The current weights: those that new requests are for. None before the first engine."""
        return self._weights_id

    def preferred(self) -> tuple[bytes, int] | None:
        """The weights that most serving engines have, of several the newest, and their epoch; None without engines."""
        counts: Counter[bytes] = Counter()
        epochs: dict[bytes, int] = {}
        for engine in self._engines.values():
            if engine.client is not None and engine.serving:
                weights_id = engine.weights_id
                counts[weights_id] += 1
                epochs[weights_id] = max(epochs.get(weights_id, 0), engine.client.facts.epoch)
        if not counts:
            return None
        best = max(counts, key=lambda weights_id: (counts[weights_id], epochs[weights_id]))
        return best, epochs[best]

    def model_of(self, weights_id: bytes) -> str | None:
        """Where these weights are from, as an engine that has them says it; None for the default model."""
        for engine in self._engines.values():
            if engine.client is not None and engine.serving and engine.weights_id == weights_id:
                return engine.client.facts.model
        raise EngineDeadError("no engine has these weights any more")

    def use(self, weights_id: bytes) -> None:
        """Make weights the current ones; those who submit must know their tokenizer."""
        self._weights_id = weights_id
        self._changed()

    async def wait_ready(self) -> None:
        """Return once `info` is known."""
        await self._ready.wait()

    async def _keep(self, engine: PoolEngine) -> None:
        """Keep a stream to an engine as long as it is named."""
        wait_s, told = self._first_wait_s, ""
        while engine.listed and not self._closed:
            try:
                client = await self._connect(engine.member)
            except EngineDeadError as error:
                if told != (told := str(error)):  # said once, however often it is tried
                    logger.warning("%s", _about(engine, told))
                engine.news.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(engine.news.wait(), wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                continue
            wait_s, told = self._first_wait_s, ""
            client.on_change = self._changed
            engine.client = client
            logger.info("replica %s is connected", engine.replica)
            self._changed()
            try:
                why = await client.wait_ended()
            except asyncio.CancelledError:
                await client.close()
                raise
            logger.warning("the stream to replica %s is over: %s", engine.replica, why)
            engine.client = None
            with suppress(TimeoutError):
                engine.news.clear()
                await asyncio.wait_for(engine.news.wait(), wait_s)
        if not self._closed:
            del self._engines[engine.replica], self._keepers[engine.replica]
            self._changed()

    def _changed(self) -> None:
        """Engines came, went, or are others: give out what waits."""
        if self._closed:
            return
        if self._weights_id is None and (found := self.preferred()) is not None:
            self._weights_id = found[0]
        self._merge()
        for request_id in list(self._parked):
            if (parked := self._parked.pop(request_id, None)) is not None:
                self._give(*parked)
        self.on_change()

    def _merge(self) -> None:
        """What all engines on the current weights can do; as it was while there are none."""
        infos = [
            engine.client.info
            for engine in self._engines.values()
            if engine.client is not None and engine.serving and engine.weights_id == self._weights_id
        ]
        if infos:
            self._info = replace(
                infos[0],
                max_model_len=min(info.max_model_len for info in infos),
                pool_tokens=min(info.pool_tokens for info in infos),
                overflow_tokens=min(info.overflow_tokens for info in infos),
                max_num_seqs=sum(info.max_num_seqs for info in infos),
                max_queued_requests=sum(info.max_queued_requests for info in infos),
            )
            self._ready.set()

    # ------------------------------------------------------------ EngineClient

    @property
    def info(self) -> EngineInfo:
        """Limits that hold for every engine on the current weights; how many sequences all of them hold together."""
        if self._info is None:
            raise EngineDeadError("no engine is ready yet")
        return self._info

    @property
    def stats(self) -> EngineStats:
        """Gauges of all engines together. Counters are zero: replicas count for themselves."""
        found = [engine.client.stats for engine in self._engines.values() if engine.client is not None]
        return EngineStats(**{name: sum(getattr(stats, name) for stats in found) for name in GAUGES})

    @property
    def alive(self) -> bool:
        """True until it is closed: without an engine, one may come."""
        return not self._closed

    @property
    def restarting(self) -> bool:
        """Whether no engine takes requests now."""
        return not self._closed and not any(engine.serving for engine in self._engines.values())

    @property
    def prefill_tokens(self) -> int:
        """See `EngineClient.prefill_tokens`; those that wait for an engine included."""
        parked = sum(len(request.token_ids) for request, _ in self._parked.values())
        return parked + sum(engine.prefill_tokens for engine in self._engines.values())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an engine."""
        return len(self._parked)

    def new_request_id(self) -> int:
        """See `EngineClient.new_request_id`."""
        return next(self._ids)

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Give a request to an engine, or keep it until there is one. Raises EngineDeadError once closed."""
        if self._closed:
            raise EngineDeadError("the pool of engines was closed")
        self.num_resumed += request.num_output > 0
        self._give(request, sink)

    def abort(self, request_ids: Iterable[int]) -> None:
        """See `EngineClient.abort`."""
        ids = [request_id for request_id in request_ids if self._parked.pop(request_id, None) is None]
        for engine in self._engines.values():
            if engine.client is not None:
                engine.client.abort(ids)

    def abort_answer(self, request_id: int, index: int) -> None:
        """See `EngineClient.abort_answer`."""
        for engine in self._engines.values():
            if engine.client is not None:
                engine.client.abort_answer(request_id, index)

    async def reset_prefix_cache(self) -> bool:
        """Every engine forgets. True only if there is one and all did so."""
        clients = [engine.client for engine in self._engines.values() if engine.client is not None]
        found = await asyncio.gather(*(client.reset_prefix_cache() for client in clients), return_exceptions=True)
        return bool(found) and all(done is True for done in found)

    async def close(self) -> None:
        """End all streams; the engines live on. What runs or waits is lost. Idempotent."""
        self._closed = True
        for task in self._keepers.values():
            task.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        parked, self._parked = self._parked, {}
        for request, sink in parked.values():
            _end(request, sink, "the pool of engines was closed")

    # ------------------------------------------------------------ where requests go

    def _give(self, request: EngineRequest, sink: OutputSink) -> None:
        """To an engine, else among those who wait; or it ends, because waiting is of no use."""
        able = [engine for engine in self._engines.values() if engine.serving and self._suits(request, engine)]
        while able:
            roomy = [engine for engine in able if engine.has_room(request)]
            engine = self._choose(request, roomy or able)
            try:
                if engine.client is not None:
                    engine.client.submit(request, sink)
                    return
            except EngineDeadError as error:  # it ended since it was looked at
                logger.warning("%s", _about(engine, str(error)))
            able.remove(engine)
        if self._is_hopeless(request):
            asyncio.get_running_loop().call_soon(
                _end, request, sink, "no engine has the weights of this request any more", LOST_WEIGHTS
            )
        else:
            self._parked[request.request_id] = (request, sink)
            self.on_wait()

    def _suits(self, request: EngineRequest, engine: PoolEngine) -> bool:
        return (request.weights_id or self._weights_id) == engine.weights_id

    def _is_hopeless(self, request: EngineRequest) -> bool:
        """Whether its weights are not the current ones and no engine has them or is named with them."""
        if request.weights_id in (b"", self._weights_id):
            return False
        return not any(
            engine.weights_id == request.weights_id and (engine.client is None or not engine.client.draining)
            for engine in self._engines.values()
            if engine.listed
        )


def _about(engine: PoolEngine, why: str) -> str:
    """What is said, with the name of the replica, which engines put into some of what they say."""
    return why if f"replica {engine.replica} " in why else f"replica {engine.replica}: {why}"


def _end(request: EngineRequest, sink: OutputSink, why: str, lost: str | None = None) -> None:
    for index in request.indices:
        sink(RequestOutput(request.request_id, index, [], "error", error=why, lost=lost))
