"""Which replica a request goes to. Pure: the clock is an argument, and so is the source of random numbers.

Owns the scoring, the work that this router has given to each replica of late, and which sessions went where. A replica
costs the prompt tokens that it would have to compute (those it has, weighted by tier, are saved) and its share of the
prefill that waits there; the cheapest is chosen. Of replicas that cost about the same, it is the session's last one,
else the one that a hash of the prompt's first blocks names, so that routers which do not know of each other agree,
unless it has had more than its share of the work.

Invariants:
 1. A replica that drains, or is full, is never chosen when another one neither drains nor is full.
 2. Every candidate is ranked, once.
 3. Of a prompt of which nothing is known, while its shard of the directory is silent, and of a request without keys and
    session, two replicas are drawn, and the one with less to do is chosen.
 4. Memory is bounded: `max_sessions` sessions, the index's limits, some numbers for each replica that is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Literal, NamedTuple

import xxhash

from tournant.cluster.router_index import Prefix, RouterIndex
from tournant.workers.errors import ConfigError

LEARN = 0.05  # weight of the latest request in the mean of what requests compute
Why = Literal["prefix", "session", "hash", "load", "none"]


@dataclass(frozen=True, slots=True)
class ScoringConfig:
    """device, host, nvme: share of a block's prefill that is saved when it is there; queue: cost of a token that waits.

    tie, tie_tokens: replicas that cost more than the cheapest by this share of the prompt, or by so many tokens, are as
    good; head_tokens: what the hash is taken over; excess: of the mean work of late that one chosen by hash may have
    had; recent_s: after which half of the work given is forgotten.
    """

    device: float = 1.0
    host: float = 0.9
    nvme: float = 0.6
    queue: float = 0.05
    tie: float = 0.05
    tie_tokens: int = 64
    head_tokens: int = 1024
    excess: float = 1.1
    recent_s: float = 120.0
    max_sessions: int = 65_536

    def __post_init__(self) -> None:
        for item in fields(self):
            value, least = getattr(self, item.name), 0.0
            most = 1.0 if item.name in ("device", "host", "nvme", "tie") else math.inf
            if item.name in ("head_tokens", "max_sessions", "excess"):
                least = 1.0
            if not least <= value <= most or (item.name == "recent_s" and value == 0):
                raise ConfigError(f"{item.name} of a router is {value}; it must be {least:g} to {most:g}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as it is known. node: the directory's number of its node; queued_tokens: prompt tokens that wait to be
    computed there; running: requests; capacity: blocks of its device.
    """

    replica: str
    node: int | None = None
    queued_tokens: int = 0
    running: int = 0
    capacity: int | None = None
    full: bool = False
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Routed:
    """What is known of a request. keys: of the full blocks of its prompt, `block_tokens` each, head first; tokens: of
    the prompt, 0 = unknown; session: name of a conversation, "" = none.
    """

    keys: Sequence[bytes] = ()
    tokens: int = 0
    block_tokens: int = 16
    session: str = ""


class Choice(NamedTuple):
    """ranked: all candidates, the best first; saved: blocks that the best one has; computed: tokens that it will have
    to compute, as far as is known; why: what decided.
    """

    ranked: tuple[str, ...]
    saved: Prefix
    computed: int
    why: Why


class _Scored(NamedTuple):
    """Sorts by the best state (see `_state`), then the cheapest, then the candidate's place in the list."""

    state: int
    cost: float
    place: int
    candidate: Candidate
    saved: Prefix


class Scoring:
    """See the module. Of one thread. rng: for the draws of invariant 3."""

    def __init__(self, config: ScoringConfig, index: RouterIndex, rng: Random | None = None) -> None:
        self.config = config
        self.index = index
        self._rng = rng or Random()
        self._mean = 1.0
        self._work: dict[str, tuple[float, float]] = {}  # replica -> tokens given to it, decayed, and when
        self._sessions: dict[str, str] = {}  # session -> replica, the one heard of longest ago first

    @property
    def mean_computed(self) -> float:
        """Tokens that a request has to compute where it is sent, on average of late; at least 1."""
        return self._mean

    def choose(self, now_s: float, request: Routed, candidates: Sequence[Candidate]) -> Choice:
        """Rank replicas for a request. Changes nothing: say with `sent` where it went. now_s: any monotonic clock."""
        if not candidates:
            return Choice((), Prefix(), request.tokens, "none")
        scored = self._scored(request, candidates)
        able = [one for one in scored if one.state == scored[0].state]
        best, why = self._best(now_s, request, able)
        ranked = (best.candidate.replica, *(one.candidate.replica for one in scored if one is not best))
        saved = sum(best.saved) * request.block_tokens
        return Choice(ranked, best.saved, max(0, request.tokens - saved), why)

    def sent(self, now_s: float, request: Routed, candidate: Candidate, computed: int) -> None:
        """A request went to a replica, which had to compute so many tokens of it (`Choice.computed`). One of unknown
        length is taken for an average one.
        """
        replica = candidate.replica
        if request.tokens:
            self._mean += LEARN * (max(1, computed) - self._mean)
        work = computed if request.tokens else self._mean
        self._work[replica] = (self._worked(now_s, replica) + work, now_s)
        if request.keys:
            self.index.note(replica, request.keys, candidate.capacity)
        if request.session:
            self._sessions.pop(request.session, None)
            self._sessions[request.session] = replica
            if len(self._sessions) > self.config.max_sessions:
                del self._sessions[next(iter(self._sessions))]

    def keep(self, replicas: Iterable[str]) -> None:
        """These are all replicas that there are: forget what is known of others."""
        kept = set(replicas)
        self.index.keep(kept)
        for replica in self._work.keys() - kept:
            del self._work[replica]

    # ---- scoring

    def _scored(self, request: Routed, candidates: Sequence[Candidate]) -> list[_Scored]:
        found = self.index.lookup(request.keys, [(one.replica, one.node) for one in candidates])
        device, host, nvme = (
            weight * request.block_tokens for weight in (self.config.device, self.config.host, self.config.nvme)
        )
        scored = []
        for place, (one, saved) in enumerate(zip(candidates, found, strict=True)):
            worth = device * saved.device + host * saved.host + nvme * saved.nvme
            cost = request.tokens - worth + self.config.queue * one.queued_tokens
            scored.append(_Scored(_state(one), cost, place, one, saved))
        scored.sort()
        return scored

    def _best(self, now_s: float, request: Routed, able: Sequence[_Scored]) -> tuple[_Scored, Why]:
        if self._is_blind(request, able):
            drawn = self._rng.sample(able, min(2, len(able)))
            return min(drawn, key=lambda one: self._load(now_s, one.candidate)), "load"
        limit = able[0].cost + max(self.config.tie * request.tokens, self.config.tie_tokens)
        equal = [one for one in able if one.cost <= limit]
        if len(equal) == 1:
            return equal[0], "prefix" if any(equal[0].saved) else "load"
        return self._best_of_equals(now_s, request, equal, able)

    def _is_blind(self, request: Routed, able: Sequence[_Scored]) -> bool:
        if any(any(one.saved) for one in able):
            return False
        if not request.keys:
            return not request.session
        return self.index.directory.silent(request.keys)

    def _load(self, now_s: float, candidate: Candidate) -> tuple[float, ...]:
        return candidate.queued_tokens, candidate.running, self._worked(now_s, candidate.replica)

    def _best_of_equals(
        self, now_s: float, request: Routed, equal: Sequence[_Scored], able: Sequence[_Scored]
    ) -> tuple[_Scored, Why]:
        last = self._sessions.get(request.session)
        for one in equal:
            if one.candidate.replica == last:
                return one, "session"
        works = {one.candidate.replica: self._worked(now_s, one.candidate.replica) for one in able}
        most = self.config.excess * sum(works.values()) / len(works)
        idle = [one for one in equal if works[one.candidate.replica] <= most]
        if not idle:
            return min(equal, key=lambda one: works[one.candidate.replica]), "load"
        head = self._head(request)
        return max(idle, key=lambda one: xxhash.xxh64_intdigest(one.candidate.replica.encode() + head)), "hash"

    def _head(self, request: Routed) -> bytes:
        """What names the beginning of a prompt: the key of its last block there, which holds all before it."""
        if not request.keys:
            return request.session.encode()
        blocks = max(1, self.config.head_tokens // request.block_tokens)
        return request.keys[min(blocks, len(request.keys)) - 1]

    def _worked(self, now_s: float, replica: str) -> float:
        """Tokens that a replica was given of late."""
        tokens, at = self._work.get(replica, (0.0, now_s))
        return tokens * math.exp2(-max(0.0, now_s - at) / self.config.recent_s)


def _state(candidate: Candidate) -> int:
    """0: can take a request, 1: is full, 2: drains."""
    return 2 if candidate.draining else int(candidate.full)
