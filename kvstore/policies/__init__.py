"""Policies of the block store: each kind is a small protocol with several values that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from tournant.kvstore.errors import StoreConfigError
from tournant.kvstore.policies.admission import AdmissionPolicy, AdmitAll, PredictedReuse, SeenTwice
from tournant.kvstore.policies.by_kind import ByKind
from tournant.kvstore.policies.cost_aware import CostAware
from tournant.kvstore.policies.eviction import EvictionPolicy
from tournant.kvstore.policies.frequency import HeatCounters, Lfu
from tournant.kvstore.policies.lru import Lru
from tournant.kvstore.policies.s3fifo import S3Fifo
from tournant.kvstore.policies.session_eviction import SessionEviction

_Policy = TypeVar("_Policy")

EVICTION: Mapping[str, Callable[[], EvictionPolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "s3fifo": S3Fifo,
    "cost": CostAware,
    "heat": HeatCounters,
    "kind": ByKind,
    "session": SessionEviction,
}
ADMISSION: Mapping[str, Callable[[], AdmissionPolicy]] = {
    "all": AdmitAll,
    "seen_twice": SeenTwice,
    "predicted_reuse": PredictedReuse,
}


def make_eviction(name: str) -> EvictionPolicy:
    """A new eviction policy. Raises StoreConfigError for a name that is not in `EVICTION`."""
    return _make("eviction", name, EVICTION)


def make_admission(name: str, eviction: EvictionPolicy | None = None) -> AdmissionPolicy:
    """A new admission policy, which shares the predictor of `eviction` if that has one.

    Raises StoreConfigError for a name that is not in `ADMISSION`.
    """
    if name == "predicted_reuse" and isinstance(eviction, SessionEviction):
        return PredictedReuse(eviction.tracker)
    return _make("admission", name, ADMISSION)


def _make(what: str, name: str, known: Mapping[str, Callable[[], _Policy]]) -> _Policy:
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise StoreConfigError(f"{what} is {name!r}; it must be one of {', '.join(known)}{hint}")
    return known[name]()
