"""Hit ratios of every eviction policy beside LRU and the optimum, on request traces: metadata only, no model, no time.

A request hits its leading run of resident blocks; then all its blocks are inserted or used at once, tail first; the
divisor is all prompt tokens. LRU must give the published digits. `python -m benchmarks.trace_replay --help`.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.common import REPO, Cell, Report, Table, say
from benchmarks.traces import LOADERS, Trace, generate, load, load_anchors
from tournant.kvstore.policies import EVICTION
from tournant.kvstore.policies.eviction import BlockInfo, EvictionPolicy
from tournant.kvstore.policies.prefetch import ChainSuccessors
from tournant.kvstore.policies.session_eviction import SessionEviction
from tournant.kvstore.policies.sessions import SessionConfig

MIN_OF_LRU = 0.98  # of a policy that may be a default, at every capacity
DIGITS = 4
POLICIES = tuple(name for name in EVICTION if name != "kind")  # all blocks of a trace are of one kind
GENERATED_CAPACITIES = (500, 2000, 8000)
TUNING = {"learning_rate": (0.1, 0.2, 0.4), "gone_after_medians": (1.0, 1.5, 2.5)}
HALF_CAPACITIES = {
    "mooncake_conversation": (1953, 5859, 11718, 19531),
    "mooncake_synthetic": (1953, 5859, 11718),
    "claude_code_first60": (1000, 4000),
}


class Cache(Protocol):
    """What a trace is replayed through."""

    def request(self, keys: Sequence[int], now_us: int) -> int:
        """Blocks of the chain, head first, that were there without a gap; afterwards all are, as far as they fit."""
        ...


class PolicyCache:
    """A cache of `capacity` blocks that does nothing but follow a policy. blocks: key -> block."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.blocks: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}
        self._next_block = 0

    def request(self, keys: Sequence[int], now_us: int) -> int:
        """See Cache."""
        policy, blocks = self.policy, self.blocks
        policy.begin_request(keys, now_us)
        hits = 0
        for key in keys:
            if key not in blocks:
                break
            hits += 1
        run: list[int] = []
        for depth in range(len(keys) - 1, -1, -1):
            key = keys[depth]
            block = blocks.get(key)
            if block is not None:
                run.append(block)
                continue
            if run:
                policy.touch_run(run, now_us)
                run = []
            if len(blocks) >= self.capacity:
                self._evict()
            self._next_block += 1
            blocks[key] = self._next_block
            self._key_of[self._next_block] = key
            policy.insert(self._next_block, BlockInfo(depth=depth, key=key), now_us)
        if run:
            policy.touch_run(run, now_us)
        return hits

    def _evict(self) -> None:
        victim = next(iter(self.policy.victims()))
        self.policy.remove(victim)
        del self.blocks[self._key_of.pop(victim)]


class Belady:
    """The optimum for blocks of one size: the farthest next use leaves, even a newcomer; of equals the deepest."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        self.capacity = capacity
        self._uses: dict[int, list[int]] = {}  # key -> numbers of the requests to come, the next one last
        for number in range(len(trace.requests) - 1, -1, -1):
            for key in trace.requests[number].keys:
                self._uses.setdefault(key, []).append(number)
        self._never = len(trace.requests)
        self._next: dict[int, int] = {}  # resident key -> number of the request that uses it next
        self._heap: list[tuple[int, int, int]] = []  # -next use, -depth, key; stale ones too

    def request(self, keys: Sequence[int], now_us: int) -> int:
        """See Cache. Requests must come in the order of the trace."""
        hits = 0
        for key in keys:
            if key not in self._next:
                break
            hits += 1
        for depth, key in enumerate(keys):
            uses = self._uses[key]
            uses.pop()
            following = self._next[key] = uses[-1] if uses else self._never
            heapq.heappush(self._heap, (-following, -depth, key))
        while len(self._next) > self.capacity:
            following, _, key = heapq.heappop(self._heap)
            if self._next.get(key) == -following:
                del self._next[key]
        return hits


def hit_ratio(trace: Trace, cache: Cache, counted_from: int = 0) -> float:
    """Share of all prompt tokens that were hit, of the requests from this number on."""
    hits = [cache.request(request.keys, request.time_us) for request in trace.requests]
    tokens = sum(request.tokens for request in trace.requests[counted_from:])
    return sum(hits[counted_from:]) * trace.block_tokens / tokens


def policy_ratio(trace: Trace, make: Callable[[], EvictionPolicy], capacity: int) -> float:
    """Hit ratio of a policy with a cache of so many blocks."""
    return hit_ratio(trace, PolicyCache(make(), capacity))


def successor_accuracy(trace: Trace) -> float:
    """How often the last successor is right where a block seen before follows another one."""
    table, seen, right, asked = ChainSuccessors(1 << 30), set[int](), 0, 0
    for request in trace.requests:
        for key, following in itertools.pairwise(request.keys):
            if following in seen:
                asked += 1
                right += table.predict(key, 1) == [following]
        table.observe(request.keys)
        seen.update(request.keys)
    return right / asked if asked else 0.0


# -------------------------------------------------------------------- tables


def compare(trace: Trace, capacities: Iterable[int], anchors: Mapping[int, Mapping[str, float]]) -> Table:
    """Every policy at every capacity, the optimum, and what was published for LRU and the optimum."""
    rows: list[list[Cell]] = []
    worst = dict.fromkeys(POLICIES, float("inf"))
    for capacity in capacities:
        say(f"{trace.name}, {capacity} blocks")
        found = {name: policy_ratio(trace, EVICTION[name], capacity) for name in POLICIES}
        optimum = hit_ratio(trace, Belady(trace, capacity))
        published = anchors.get(capacity, {})
        for name, ratio in found.items():
            worst[name] = min(worst[name], ratio / found["lru"])
        rows.append(
            [
                f"{capacity:,}",
                f"{capacity * trace.block_tokens / 1e6:.2g}",
                *(_digits(ratio) for ratio in found.values()),
                _digits(optimum),
                _agreement({"lru": found["lru"], "belady": optimum}, published),
                f"{found['session'] / found['lru']:.2f}",
            ]
        )
    rows.append(["least / LRU", "", *(f"{ratio:.3f}" for ratio in worst.values()), "", "", ""])
    fit = ", ".join(name for name, ratio in worst.items() if ratio >= MIN_OF_LRU)
    return Table(
        f"hit ratio, {trace.name}",
        ("blocks", "M tokens", *POLICIES, "optimum", "as published", "session / LRU"),
        rows,
        [
            f"At least {MIN_OF_LRU} of LRU at every capacity: {fit}.",
            f"The last successor of a block is right for {successor_accuracy(trace):.3f} of the reused ones after it.",
        ],
    )


def _digits(ratio: float) -> str:
    return f"{ratio:.{DIGITS}f}"


def _agreement(found: Mapping[str, float], published: Mapping[str, float]) -> str:
    """Which of the two agree with the published digits; empty when nothing was published."""
    wrong = [
        f"{name} {published[name]:.{DIGITS}f}"
        for name, ratio in found.items()
        if name in published and _digits(ratio) != _digits(published[name])
    ]
    if not any(name in published for name in found):
        return ""
    return "no: " + ", ".join(wrong) if wrong else "yes"


def held_out(trace: Trace, capacities: Sequence[int]) -> Table:
    """Choices of the session predictor made on one half of a trace and measured on the other, both ways."""
    rows: list[list[Cell]] = []
    halves = trace.halves()
    for fitted, measured in (halves, halves[::-1]):
        say(f"choosing on {fitted.name}")
        lru = [policy_ratio(fitted, EVICTION["lru"], capacity) for capacity in capacities]

        def gain(config: SessionConfig, on: Trace = fitted, lru: Sequence[float] = lru) -> float:
            ratios = [policy_ratio(on, lambda: SessionEviction(config), capacity) for capacity in capacities]
            return sum(ratio / base for ratio, base in zip(ratios, lru, strict=True))

        choices = itertools.product(TUNING["learning_rate"], TUNING["gone_after_medians"])
        best = max((SessionConfig(learning_rate=rate, gone_after_medians=gone) for rate, gone in choices), key=gain)
        for capacity in capacities:
            base = policy_ratio(measured, EVICTION["lru"], capacity)
            chosen = policy_ratio(measured, lambda best=best: SessionEviction(best), capacity)  # type: ignore[misc]
            default = policy_ratio(measured, SessionEviction, capacity)
            optimum = hit_ratio(measured, Belady(measured, capacity))
            rows.append(
                [
                    measured.name,
                    f"{capacity:,}",
                    _digits(base),
                    _digits(chosen),
                    f"{chosen / base:.2f}",
                    f"{default / base:.2f}",
                    _digits(optimum),
                    ", ".join(f"{name} {getattr(best, name):g}" for name in TUNING),
                ]
            )
    rows += [_second_half(trace, capacity) for capacity in capacities]
    return Table(
        f"session predictor on the half it was not chosen on, {trace.name}",
        (
            "measured on",
            "blocks",
            "LRU",
            "session",
            "gain",
            "gain of the default",
            "optimum",
            "chosen on the other half",
        ),
        rows,
        [
            "A half starts with an empty cache and an untaught predictor, which learns while it is measured; in rows "
            "'after the first half' the whole trace is replayed with the default and its second half counts.",
        ],
    )


def _second_half(trace: Trace, capacity: int) -> list[Cell]:
    middle = len(trace.requests) // 2
    caches = PolicyCache(EVICTION["lru"](), capacity), PolicyCache(SessionEviction(), capacity), Belady(trace, capacity)
    lru, session, optimum = (hit_ratio(trace, cache, middle) for cache in caches)
    gain = f"{session / lru:.2f}"
    where = f"{trace.name}, after the first half"
    return [where, f"{capacity:,}", _digits(lru), _digits(session), gain, gain, _digits(optimum), "nothing"]


def report_on(names: Iterable[str], folder: Path, *, quick: bool, halves: bool) -> Report:
    """Tables of the named traces; what has no files is named and left out."""
    report = Report("Eviction policies on request traces")
    for name in names:
        if name == "generated":
            report.add(compare(generate(seed=1), GENERATED_CAPACITIES, {}))
            continue
        try:
            trace, anchors = load(name, folder), load_anchors(folder)
        except FileNotFoundError as error:
            say(str(error))
            report.add(
                Table(f"hit ratio, {name}", ("not measured",), [], [f"{name} is not in the folder of --traces."])
            )
            continue
        capacities = sorted(anchors[name])
        report.add(compare(trace, capacities[2:4] if quick else capacities, anchors[name]))
        if halves:
            report.add(held_out(trace, HALF_CAPACITIES[name]))
    return report


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, and write them as Markdown when asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*LOADERS, "generated"], help="traces (default: all)")
    parser.add_argument("--traces", type=Path, default=REPO.parent / "shared" / "traces", help="folder of the traces")
    parser.add_argument("--quick", action="store_true", help="two capacities of each trace")
    parser.add_argument("--halves", action="store_true", help="also choose on one half and measure on the other")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in (*LOADERS, "generated")]
    if unknown:
        parser.error(f"no trace {unknown[0]!r}; there are {', '.join(LOADERS)}, generated")
    report = report_on(options.names, options.traces, quick=options.quick, halves=options.halves)
    if options.markdown:
        options.markdown.write_text(report.to_markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
