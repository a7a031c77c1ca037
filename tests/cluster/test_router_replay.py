"""Routing on traces: with the real scoring, replicas hit almost what one large cache would, and share the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.routing import BARS, CAPACITY, LruCache, kv_aware, power_of_two, replay, round_robin, shared_ratio
from benchmarks.traces import GeneratorConfig, Trace, generate, load, load_anchors

HEAD = 1000


def test_the_ceiling_is_as_published(traces: Path) -> None:
    anchors = load_anchors(traces)["mooncake_synthetic"]
    capacity = min(anchors)
    assert shared_ratio(load("mooncake_synthetic", traces), capacity) == pytest.approx(
        anchors[capacity]["lru"], abs=5e-5
    )


def test_a_cache_drops_what_was_used_longest_ago_tails_first() -> None:
    cache = LruCache(5)
    assert [cache.request([1, 2, 3]), cache.request([1, 4]), cache.request([1, 2, 3])] == [0, 1, 3]
    assert cache.request([5, 6]) == 0
    assert (cache.came, cache.went) == ([5, 6], [4])
    assert cache.request([1, 2, 3]) == 3


@pytest.mark.parametrize("routers", [1, 4])
def test_generated_conversations_find_their_blocks(routers: int) -> None:
    trace, capacity = generate(5, GeneratorConfig(num_requests=800)), 1000
    ceiling = shared_ratio(trace, 4 * capacity)
    found = replay(trace, capacity, ceiling, lambda copy: kv_aware(copy, routers))
    others = [replay(trace, capacity, ceiling, lambda _, make=make: make()) for make in (power_of_two, round_robin)]
    assert found.hit_ratio >= 0.95 * ceiling
    assert found.work <= 1.15
    assert all(found.hit_ratio > 1.5 * other.hit_ratio for other in others)
    assert all(found.wait(0.5) < other.wait(0.5) for other in others)


@pytest.mark.parametrize("name", sorted(BARS))
def test_the_head_of_a_public_trace(name: str, traces: Path) -> None:
    whole = load(name, traces)
    check(Trace(name, whole.block_tokens, whole.requests[:HEAD]), share=0.97)  # first requests of prefixes weigh more


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(BARS))
def test_all_of_a_public_trace(name: str, traces: Path) -> None:
    check(load(name, traces))


def check(trace: Trace, share: float = 1.0) -> None:
    """share: of the bar for hits that is enough."""
    hits, work = BARS[trace.name]
    ceiling = shared_ratio(trace, 4 * CAPACITY[trace.name])
    found = replay(trace, CAPACITY[trace.name], ceiling, lambda copy: kv_aware(copy, 1))
    assert found.hit_ratio >= share * hits * ceiling
    assert found.work <= work
