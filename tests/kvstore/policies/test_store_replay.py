"""Traces through the real node store core, with the payloads left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.store_replay import CoreCache
from benchmarks.trace_replay import DIGITS, PolicyCache, hit_ratio
from benchmarks.traces import GeneratorConfig, generate, load, load_anchors
from tournant.kvstore.policies import EVICTION

REPO = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("capacity", [300, 2000])
@pytest.mark.parametrize("eviction", ["lru", "kind"])
def test_the_core_hits_what_a_plain_cache_hits(eviction: str, capacity: int) -> None:
    """Request by request: the core adds slots, generations, versions and pins, and changes nothing about who leaves."""
    trace = generate(5, GeneratorConfig(num_requests=300))
    core, plain = CoreCache(eviction, capacity), PolicyCache(EVICTION[eviction](), capacity)
    for request in trace.requests:
        assert core.request(request.keys, request.time_us) == plain.request(request.keys, request.time_us)
    core.core.validate()
    assert core.core.residency.num_evicted > 0


@pytest.mark.parametrize(("name", "capacity"), [("mooncake_synthetic", 5859), ("mooncake_conversation", 19531)])
def test_the_core_reproduces_the_published_digits(name: str, capacity: int) -> None:
    """All capacities are replayed by `python -m benchmarks.store_core`."""
    folder = REPO.parent / "shared" / "traces"
    if not folder.is_dir():
        pytest.skip(f"the public traces are not in {folder}")
    ratio = hit_ratio(load(name, folder), CoreCache("lru", capacity))
    assert round(ratio, DIGITS) == load_anchors(folder)[name][capacity]["lru"]
