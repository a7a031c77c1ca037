"""Which engine of a pool gets a request, by the scoring of router_scoring.py over the keys that the frontend has.

Owns how an engine of the pool looks to the scoring; the weighing is router_scoring.py's, what nodes hold is told by the
directory's copy (index_feed.py). One event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tournant.cluster.directory_actor import number_of
from tournant.cluster.index_feed import IndexFeed
from tournant.cluster.router_index import RouterIndex
from tournant.cluster.router_scoring import Candidate, Routed, Scoring, ScoringConfig
from tournant.deploy.engine_pool import PoolEngine
from tournant.workers.messages import EngineRequest, EngineStats


@dataclass(slots=True)
class _Given:
    """stats: what the engine said last; tokens: to compute, of requests that it was given since."""

    stats: EngineStats
    tokens: int = 0


class KVChoice:
    """`engine_pool.Choose` by what engines and their nodes hold of the prompt, and by what waits there. feed: of the
    application's directory, kept alive by this; clock: seconds.
    """

    def __init__(
        self, feed: IndexFeed, config: ScoringConfig | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._feed = feed
        self._scoring = Scoring(config or ScoringConfig(), RouterIndex(feed.copy))
        self._clock = clock
        self._given: dict[str, _Given] = {}

    def keep(self, replicas: Iterable[str]) -> None:
        """These are all replicas that there are: forget others."""
        kept = set(replicas)
        self._scoring.keep(kept)
        for replica in self._given.keys() - kept:
            del self._given[replica]

    def __call__(self, request: EngineRequest, engines: Sequence[PoolEngine]) -> PoolEngine:
        """One of at least one engine, which is then taken to have the request."""
        now = self._clock()
        block_tokens = next((engine.client.info.block_tokens for engine in engines if engine.client is not None), 1)
        routed = Routed(request.keys, len(request.token_ids), block_tokens, request.session)
        candidates = [self._candidate(engine, request) for engine in engines]
        choice = self._scoring.choose(now, routed, candidates)
        place = [candidate.replica for candidate in candidates].index(choice.ranked[0])
        self._scoring.sent(now, routed, candidates[place], choice.computed)
        if (given := self._given.get(choice.ranked[0])) is not None:
            given.tokens += choice.computed
        return engines[place]

    def _candidate(self, engine: PoolEngine, request: EngineRequest) -> Candidate:
        replica, node = engine.replica, number_of(engine.member.node)
        if engine.client is None:
            return Candidate(replica, node, draining=True)
        info, stats = engine.client.info, engine.client.stats
        given = self._given.get(replica)
        if given is None or given.stats is not stats:  # it knows by now of what came before
            given = self._given[replica] = _Given(stats)
        return Candidate(
            replica,
            node,
            queued_tokens=stats.queued_tokens + given.tokens,
            running=engine.num_answers,
            capacity=info.pool_tokens // info.block_tokens,
            full=not engine.has_room(request),
            draining=not engine.serving,
        )
