"""The choice of a replica inside Ray Serve, by the scoring of router_scoring.py: for handles, and for direct ingress.

Owns everything that touches Serve's request router, an alpha interface, and the parts of a request and of a replica
that are not public (tests/cluster/test_router_serve.py holds Serve to what is used).
Serve pickles this module by value into every process that has a handle: whatever is to exist once in a process lives in
another module (`index_feed.shared_feed`).

In a Serve file: `request_router_config: {request_router_class: tournant.cluster.kv_router:KVRouter,
request_router_kwargs: {...}}`, with the fields of `ScoringConfig` and `IndexConfig`, and `directory_shards`.

Invariants:
 1. Serve is told every candidate, the best first, so that one that turns out to be full or dead costs another try only.
 2. A request goes to the replica that was chosen for it: without FIFOMixin, Serve matches by the request's id.
 3. What is kept of a request goes when it ends; of those whose end is never told, `MAX_OPEN` are kept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ray.serve.request_router import LocalityMixin, MultiplexMixin, PendingRequest, RequestRouter, RunningReplica

from tournant.cluster.directory_actor import number_of
from tournant.cluster.index_feed import IndexFeed, shared_feed
from tournant.cluster.router_index import IndexConfig, RouterIndex
from tournant.cluster.router_scoring import Candidate, Choice, Routed, Scoring, ScoringConfig
from tournant.cluster.routing_keys import DEFAULT_BLOCK_TOKENS, routed_call
from tournant.kvstore.directory import MAX_SHARDS
from tournant.workers.errors import ConfigError

MAX_OPEN = 65_536
ONE_BY_ONE = 3  # replicas that are tried alone; after them the one with the shortest queue


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """`request_router_kwargs`, all optional. directory_shards: as `advanced.store_directory_shards` of the service."""

    scoring: ScoringConfig
    index: IndexConfig
    directory_shards: int = 1

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> RouterOptions:
        """Raises ConfigError."""
        names = {kind: {item.name for item in fields(kind)} for kind in (ScoringConfig, IndexConfig)}
        unknown = given.keys() - names[ScoringConfig] - names[IndexConfig] - {"directory_shards"}
        if unknown:
            known = ", ".join(sorted((*names[ScoringConfig], *names[IndexConfig], "directory_shards")))
            raise ConfigError(f"request_router_kwargs has no {min(unknown)!r}; there are {known}")
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"request_router_kwargs.{name} is {value!r}; it must be a number")
        shards = given.get("directory_shards", 1)
        if not isinstance(shards, int) or not 0 <= shards <= MAX_SHARDS:
            raise ConfigError(f"request_router_kwargs.directory_shards is {shards}; it must be 0 to {MAX_SHARDS}")
        scoring, index = ({key: given[key] for key in names[kind] & given.keys()} for kind in names)
        return cls(ScoringConfig(**scoring), IndexConfig(**index), shards)


@dataclass(slots=True)
class _Open:
    """A request that has been routed. sent_to: the replica that it was last noted for."""

    routed: Routed
    sent_to: str = ""


class KVRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """See the module. Of the event loop that routes."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve with `request_router_kwargs`. Raises ConfigError."""
        options = RouterOptions.parse(kwargs)
        self._feed: IndexFeed = shared_feed(self.app_name, options.directory_shards, options.index.max_keys)
        self._scoring = Scoring(options.scoring, RouterIndex(self._feed.copy, options.index))
        self._open: dict[str, _Open] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve with all replicas that run."""
        super().update_replicas(replicas)
        self._scoring.keep(one.replica_id.unique_id for one in replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Called by Serve for each try: groups of replicas, the best first."""
        if pending_request is None or not candidate_replicas:
            return [list(candidate_replicas)]
        pending_request.routing_context.should_backoff = True  # else a full cluster is asked without a pause
        allowed = list(candidate_replicas)
        if pending_request.metadata.multiplexed_model_id:
            ids = self.apply_multiplex_routing(pending_request=pending_request)
            allowed = [one for one in candidate_replicas if one.replica_id in ids] or allowed
        by_id = {one.replica_id.unique_id: one for one in allowed}
        candidates = {name: self._candidate(one) for name, one in by_id.items()}
        request = self._routed(pending_request, allowed[0])
        choice = self._scoring.choose(time.monotonic(), request, list(candidates.values()))
        self._note(pending_request.metadata.internal_request_id, request, candidates[choice.ranked[0]], choice)
        ranked = [by_id[name] for name in choice.ranked]
        return [*([one] for one in ranked[:ONE_BY_ONE]), ranked[ONE_BY_ONE:]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        """Called by Serve when a replica has accepted a request, which may not be the first choice."""
        known = self._open.get(pending_request.metadata.internal_request_id)
        replica = self.curr_replicas.get(replica_id)
        if known is None or replica is None or known.sent_to == replica_id.unique_id:
            return
        choice = self._scoring.choose(time.monotonic(), known.routed, [self._candidate(replica)])
        self._note(pending_request.metadata.internal_request_id, known.routed, self._candidate(replica), choice)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Called by Serve when a request has ended."""
        self._open.pop(internal_request_id, None)

    # ---- what is known

    def _note(self, request_id: str, request: Routed, candidate: Candidate, choice: Choice) -> None:
        """Taken for sent at once: another request of the same prompt may be routed before this one has arrived."""
        known = self._open.setdefault(request_id, _Open(request))
        if known.sent_to == candidate.replica:  # another try
            return
        known.sent_to = candidate.replica
        self._scoring.sent(time.monotonic(), request, candidate, choice.computed)
        if len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]

    def _candidate(self, replica: RunningReplica) -> Candidate:
        queue = self.replica_queue_len_cache.get(replica.replica_id) or 0
        metadata, stats = replica.replica_metadata, replica.routing_stats
        most = min(replica.max_ongoing_requests, _whole(metadata.get("max_requests")) or replica.max_ongoing_requests)
        return Candidate(
            replica.replica_id.unique_id,
            None if replica.node_id is None else number_of(replica.node_id),
            round(queue * self._scoring.mean_computed),
            queue,
            _whole(metadata.get("pool_blocks")),
            full=queue >= most,
            draining=stats.get("draining") is True,
        )

    def _routed(self, pending: PendingRequest, replica: RunningReplica) -> Routed:
        known = self._open.get(pending.metadata.internal_request_id)
        if known is not None:
            return known.routed
        block_tokens = _whole(replica.replica_metadata.get("block_tokens")) or DEFAULT_BLOCK_TOKENS
        if pending.metadata.is_http_request:  # its body is read by the replica alone
            return Routed(session=pending.metadata.session_id)
        return routed_call(pending.args, pending.kwargs, pending.metadata.session_id, block_tokens)


def _whole(value: object) -> int | None:
    """A number above 0 that a replica gave, if it did."""
    return value if isinstance(value, int) and value > 0 else None
