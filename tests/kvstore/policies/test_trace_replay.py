"""The replay reproduces published digits, the optimum is one, and no default is worse than LRU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import trace_replay
from benchmarks.trace_replay import DIGITS, MIN_OF_LRU, Belady, compare, hit_ratio, policy_ratio
from benchmarks.traces import LOADERS, GeneratorConfig, Request, Trace, generate, load, load_anchors
from tournant.kvstore.policies import EVICTION
from tournant.kvstore.policies.session_eviction import SessionEviction

QUICK = [("mooncake_conversation", 5859), ("mooncake_synthetic", 5859), ("claude_code_first60", 2000)]
SLOW = [
    *(("mooncake_conversation", n) for n in (196, 586, 1953, 11718, 19531, 39062, 58594, 97656, 170899)),
    *(("mooncake_synthetic", n) for n in (196, 586, 1953, 11718, 19531, 29296, 40148)),
    *(("claude_code_first60", n) for n in (1000, 4000, 8000, 16000)),
]
GAINS = {
    "mooncake_conversation": 1.2,
    "mooncake_synthetic": 1.05,
    "claude_code_first60": 1.3,
}  # of session, QUICK sizes


def chain_trace(chains: Sequence[Sequence[int]]) -> Trace:
    return Trace("small", 1, tuple(Request(i, tuple(chain), len(chain)) for i, chain in enumerate(chains)))


def test_belady_by_hand() -> None:
    """Two blocks of room. 3 and 4 never come back, so the optimum never lets them in: 1 hits twice, 2 once."""
    trace = chain_trace([(1,), (2,), (3,), (1,), (4,), (2,), (1,)])
    assert hit_ratio(trace, Belady(trace, 2)) == pytest.approx(3 / 7)
    assert policy_ratio(trace, EVICTION["lru"], 2) == pytest.approx(0 / 7)


def test_belady_keeps_heads() -> None:
    """Both blocks come back at once; with room for one, only the head is of use."""
    trace = chain_trace([(1, 2), (3,), (1, 2)])
    assert hit_ratio(trace, Belady(trace, 1)) == pytest.approx(1 / 5)


def best_by_trying_everything(trace: Trace, capacity: int) -> int:
    """Most hits of single-block requests over all choices of what to keep."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for request in trace.requests:
        following: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            found = hits + (request.keys[0] in kept)
            union = kept | set(request.keys)
            for size in range(min(capacity, len(union)) + 1):
                for choice in itertools.combinations(sorted(union), size):
                    state = frozenset(choice)
                    following[state] = max(following.get(state, 0), found)
        states = following
    return max(states.values())


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 3))
@settings(max_examples=25)
def test_belady_is_the_best_there_is(keys: list[int], capacity: int) -> None:
    trace = chain_trace([(key,) for key in keys])
    assert hit_ratio(trace, Belady(trace, capacity)) * len(keys) == pytest.approx(
        best_by_trying_everything(trace, capacity)
    )


def test_generator_is_seeded_and_shaped() -> None:
    first, again, other = generate(1), generate(1), generate(2)
    assert first == again
    assert first != other
    times = [request.time_us for request in first.requests]
    assert times == sorted(times)
    assert len(times) == GeneratorConfig().num_requests
    system = {request.keys[: GeneratorConfig().system_blocks] for request in first.requests}
    assert len(system) == GeneratorConfig().num_system_prompts
    prompts = {request.keys for request in first.requests}
    extended = sum(
        request.keys[:length] in prompts for request in first.requests for length in range(len(request.keys))
    )
    assert extended > len(times) // 3  # many turns continue an earlier prompt
    parent: dict[int, int] = {}
    for request in first.requests:
        for before, key in itertools.pairwise(request.keys):
            assert parent.setdefault(key, before) == before  # a key names its whole prefix
        assert 0 <= request.tokens - len(request.keys) * first.block_tokens < first.block_tokens


@pytest.mark.parametrize("capacity", [500, 2000, 8000])
def test_session_on_the_generated_trace(capacity: int) -> None:
    trace = generate(7)
    lru, session = (policy_ratio(trace, EVICTION[name], capacity) for name in ("lru", "session"))
    assert session >= MIN_OF_LRU * lru
    assert session <= hit_ratio(trace, Belady(trace, capacity))
    if capacity == 2000:
        assert session >= 1.2 * lru


def test_tables_show_every_policy_and_the_optimum() -> None:
    trace = generate(3, GeneratorConfig(num_requests=200))
    table = compare(trace, [100, 400], {100: {"lru": 0.9999, "belady": 0.9999}})
    assert {"lru", "lfu", "s3fifo", "cost", "heat", "session", "optimum"} <= set(table.columns)
    assert str(table.rows[0][-2]).startswith("no: lru 0.9999")
    assert table.rows[1][-2] == ""
    halves = trace_replay.held_out(trace, [200])
    assert [row[0] for row in halves.rows] == [
        "generated, second half",
        "generated, first half",
        "generated, after the first half",
    ]


def test_missing_traces_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError, match="--traces"):
        load("mooncake_conversation", tmp_path)
    trace_replay.main(["mooncake_synthetic", "--traces", str(tmp_path)])
    assert "mooncake_synthetic is not in the folder of --traces" in capsys.readouterr().out


def check_digits(traces: Path, name: str, capacity: int, *, optimum: bool) -> None:
    trace, published = load(name, traces), load_anchors(traces)[name][capacity]
    assert round(policy_ratio(trace, EVICTION["lru"], capacity), DIGITS) == published["lru"]
    if optimum:
        assert round(hit_ratio(trace, Belady(trace, capacity)), DIGITS) == published["belady"]
    session = policy_ratio(trace, SessionEviction, capacity)
    assert session >= MIN_OF_LRU * published["lru"]
    if (name, capacity) in QUICK:
        assert session >= GAINS[name] * published["lru"]


@pytest.mark.parametrize(("name", "capacity"), QUICK)
def test_published_digits(traces: Path, name: str, capacity: int) -> None:
    check_digits(traces, name, capacity, optimum=name != "claude_code_first60")  # for which that takes long


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "capacity"), QUICK + SLOW)
def test_published_digits_at_every_capacity(traces: Path, name: str, capacity: int) -> None:
    check_digits(traces, name, capacity, optimum=True)


def test_every_capacity_is_checked(traces: Path) -> None:
    published = load_anchors(traces)
    assert sorted(QUICK + SLOW) == sorted((name, capacity) for name in LOADERS for capacity in published[name])
