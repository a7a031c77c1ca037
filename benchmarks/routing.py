"""Routing by what replicas have: what a decision costs, and traces over four simulated replicas.

In the replay the scoring, the index, its feed and the directory are the real ones; a replica is an LRU of blocks that
tells the directory what comes and goes, and computes prompt tokens at a constant rate, one prompt after another. Rates
are such that replicas with one shared cache would be busy for `UTILISATION` of the time. Clients ask several routers in
turn, none of which knows what the others do. `python -m benchmarks.routing --help`.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Cell, Options, Report, Table, run_main, say
from benchmarks.traces import Trace, generate, load
from tournant.cluster.index_feed import POLL_S, IndexFeed, NoAnswer
from tournant.cluster.router_index import DirectoryCopy, RouterIndex
from tournant.cluster.router_scoring import Candidate, Routed, Scoring, ScoringConfig
from tournant.kvstore.block import KEY_BYTES, ROUTE_BYTES
from tournant.kvstore.directory import Announcement, Changes, Directory, DirectoryConfig, Position

REPLICAS = 4
UTILISATION = 0.6
QUICK_REQUESTS = 100
INDEXED, QUICK_INDEXED = 100_000, 5_000
LENGTHS, FLEETS = (64, 256, 1024), (4, 16, 64)  # blocks of a prompt, replicas
CAPACITY = {  # blocks of a replica: those of the published anchors
    "mooncake_conversation": 5859,
    "mooncake_synthetic": 5859,
    "claude_code_first60": 2000,
    "generated": 2000,
}
BARS = {
    "mooncake_conversation": (0.95, 1.10),
    "claude_code_first60": (0.93, 1.15),
}  # hit ratio / ceiling, max/mean work


# -------------------------------------------------------------------- simulated replicas


class LruCache:
    """A cache of `capacity` blocks. came, went: keys of the latest request that were put in and thrown out."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.came: list[int] = []
        self.went: list[int] = []
        self._blocks: dict[int, None] = {}  # the one used longest ago first

    def request(self, keys: Sequence[int]) -> int:
        """Leading blocks that were there; afterwards all are, as far as they fit, the head used last."""
        blocks = self._blocks
        hits = sum(1 for _ in itertools.takewhile(blocks.__contains__, keys))
        self.came = [key for key in keys if key not in blocks]
        for key in reversed(keys):
            blocks.pop(key, None)
            blocks[key] = None
        self.went = list(itertools.islice(blocks, max(0, len(blocks) - self.capacity)))
        for key in self.went:
            del blocks[key]
        return hits


class Replica:
    """One simulated replica, on a node of its own whose number is `node`. rate: prompt tokens per second."""

    def __init__(self, node: int, capacity: int, rate: float, directory: Directory) -> None:
        self.cache = LruCache(capacity)
        self.node = node
        self.computed = 0
        self._rate = rate
        self._directory = directory
        self._free_at = 0.0
        self._seq = 0
        self._announce(0.0, (), ())

    def _announce(self, now_s: float, host: tuple[bytes, ...], gone: tuple[bytes, ...], answers: int = 0) -> None:
        self._seq += 1
        message = Announcement(self.node, 1, self._seq, host, (), gone, answers)
        heard = self._directory.announce(round(now_s * 1e6), message)
        if heard.question:
            self._announce(now_s, host, gone, heard.question)

    def candidate(self, now_s: float) -> Candidate:
        """As routers see it."""
        waiting = max(0.0, self._free_at - now_s)
        return Candidate(f"replica-{self.node}", self.node, round(waiting * self._rate), capacity=self.cache.capacity)

    def serve(self, now_s: float, keys: Sequence[int], tokens: int, block_tokens: int) -> tuple[int, float]:
        """Tokens that were hit, seconds until the first token."""
        hit = self.cache.request(keys) * block_tokens
        self.computed += tokens - hit
        self._free_at = max(self._free_at, now_s) + (tokens - hit) / self._rate
        self._announce(now_s, tuple(map(name_of, self.cache.came)), tuple(map(name_of, self.cache.went)))
        return hit, self._free_at - now_s


def name_of(key: int) -> bytes:
    """A key as the directory has it, all of one shard."""
    return key.to_bytes(KEY_BYTES - ROUTE_BYTES, "little") + b"\xff" * ROUTE_BYTES


class CoreReader:
    """Asks a directory's shard as index_feed.RayReader does."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def read(self, positions: Mapping[int, Position]) -> Mapping[int, Changes | NoAnswer]:
        """See index_feed.Reader."""
        return {shard: self._directory.changes_since(position) for shard, position in positions.items()}


# -------------------------------------------------------------------- contestants

Route = Callable[[float, Routed, Sequence[Candidate]], int]  # seconds, request, replicas -> number of a replica


def round_robin() -> Route:
    """One after another."""
    turn = itertools.count()
    return lambda now_s, request, candidates: next(turn) % len(candidates)


def power_of_two(seed: int = 1) -> Route:
    """Of two drawn ones the one where less waits."""
    rng = random.Random(seed)
    return lambda now_s, request, candidates: min(
        rng.sample(range(len(candidates)), min(2, len(candidates))), key=lambda i: _waiting(candidates[i])
    )


def _waiting(one: Candidate) -> tuple[int, int]:
    return one.queued_tokens, one.running


def kv_aware(copy: DirectoryCopy, routers: int, config: ScoringConfig | None = None) -> Route:
    """The scoring; requests come to so many routers in turn."""
    made = [Scoring(config or ScoringConfig(), RouterIndex(copy), random.Random(seed)) for seed in range(routers)]
    turn = itertools.cycle(made)

    def route(now_s: float, request: Routed, candidates: Sequence[Candidate]) -> int:
        scoring = next(turn)
        choice = scoring.choose(now_s, request, candidates)
        number = next(i for i, one in enumerate(candidates) if one.replica == choice.ranked[0])
        scoring.sent(now_s, request, candidates[number], choice.computed)
        return number

    return route


@dataclass(frozen=True, slots=True)
class Replayed:
    """hit_ratio: share of all prompt tokens; work: max/mean of the prompt tokens computed; waits: seconds to the first
    token, sorted.
    """

    hit_ratio: float
    work: float
    waits: tuple[float, ...]

    def wait(self, share: float) -> float:
        """A quantile of the waits."""
        return self.waits[min(len(self.waits) - 1, int(share * len(self.waits)))]


def shared_ratio(trace: Trace, capacity: int) -> float:
    """Hit ratio of one cache for all: the ceiling."""
    cache = LruCache(capacity)
    hits = sum(cache.request(request.keys) for request in trace.requests)
    return hits * trace.block_tokens / sum(request.tokens for request in trace.requests)


def replay(trace: Trace, capacity: int, ceiling: float, make: Callable[[DirectoryCopy], Route]) -> Replayed:
    """A trace over the replicas of one router or several, with the directory read every `POLL_S` of its time."""
    total = sum(request.tokens for request in trace.requests)
    rate = total * (1 - ceiling) / _busy_s(trace) / REPLICAS / UTILISATION
    directory = Directory(DirectoryConfig(silent_us=1 << 60), incarnation=7)
    replicas = [Replica(node, capacity, rate, directory) for node in range(REPLICAS)]
    feed = IndexFeed(CoreReader(directory), DirectoryCopy(1))
    route = make(feed.copy)
    hit, read_at, waits = 0, 0.0, []
    for request in trace.requests:
        now_s = request.time_us / 1e6
        if now_s - read_at >= POLL_S:
            feed.round()
            read_at = now_s
        routed = Routed(tuple(map(name_of, request.keys)), request.tokens, trace.block_tokens)
        chosen = replicas[route(now_s, routed, [one.candidate(now_s) for one in replicas])]
        tokens, wait_s = chosen.serve(now_s, request.keys, request.tokens, trace.block_tokens)
        hit += tokens
        waits.append(wait_s)
    work = [one.computed for one in replicas]
    return Replayed(hit / total, max(work) * REPLICAS / sum(work), tuple(sorted(waits)))


def _busy_s(trace: Trace) -> float:
    """How long the trace would last if all of it came as fast as the middle four fifths: sessions end one by one."""
    times = [request.time_us for request in trace.requests]
    return (times[len(times) * 9 // 10] - times[len(times) // 10]) / 1e6 / 0.8


CONTESTANTS: Mapping[str, Callable[[DirectoryCopy], Route]] = {
    "KV-aware, 1 router": lambda copy: kv_aware(copy, 1),
    "KV-aware, 4 routers": lambda copy: kv_aware(copy, 4),
    "power of two": lambda copy: power_of_two(),
    "round robin": lambda copy: round_robin(),
}


def compare(trace: Trace, capacity: int, bars: tuple[float, float] | None = None) -> Table:
    """All contestants on one trace."""
    ceiling = shared_ratio(trace, capacity * REPLICAS)
    rows: list[list[Cell]] = []
    for name, make in CONTESTANTS.items():
        say(f"{trace.name}, {name}")
        found = replay(trace, capacity, ceiling, make)
        share = found.hit_ratio / ceiling
        bar = "" if bars is None else "met" if share >= bars[0] and found.work <= bars[1] else "missed"
        waits = [f"{found.wait(at):.2f}" for at in (0.5, 0.95)]
        rows.append([name, f"{found.hit_ratio:.4f}", f"{share:.3f}", f"{found.work:.3f}", *waits, bar])
    wanted = "" if bars is None else f" The bar: at least {bars[0]:g} of the ceiling, max/mean at most {bars[1]:g}."
    return Table(
        f"routing replay, {trace.name}",
        ("router", "hit ratio", "of the ceiling", "max/mean work", "wait p50, s", "wait p95, s", "bar"),
        rows,
        [
            f"{REPLICAS} replicas of {capacity:,} blocks of {trace.block_tokens} tokens; the ceiling, one cache of "
            f"them all, hits {ceiling:.4f}.{wanted} Waits are simulated."
        ],
    )


def replayed(options: Options) -> Iterator[Table]:
    """Tables of all traces; what has no files is named and left out."""
    for name, capacity in CAPACITY.items():
        try:
            trace = generate(seed=1) if name == "generated" else load(name, Path(options.traces))
        except FileNotFoundError as error:
            say(str(error))
            note = f"{name} is not in the folder of --traces."
            yield Table(f"routing replay, {name}", ("not measured",), [], [note])
            continue
        bars = BARS.get(name)
        if options.quick:
            trace, bars = Trace(f"{trace.name}, head", trace.block_tokens, trace.requests[:QUICK_REQUESTS]), None
        yield compare(trace, capacity, bars)


# -------------------------------------------------------------------- a decision


def decided(options: Options) -> Table:
    """CPU time of one choice, keys given, with an index of 10^5 blocks; each prompt is there in part, on two nodes."""
    rows: list[list[Cell]] = []
    indexed, count = (QUICK_INDEXED, 20) if options.quick else (INDEXED, 200)
    kinds = 1 if options.quick else None
    for length, replicas in itertools.product(LENGTHS[:kinds], FLEETS[:kinds]):
        choices, notes = _choices(length, replicas, indexed, count)
        chosen = f"{statistics.median(choices) * 1e6:.0f} ({statistics.quantiles(choices, n=10)[-1] * 1e6:.0f})"
        rows.append([str(length), str(replicas), chosen, f"{statistics.median(notes) * 1e6:.0f}"])
    return Table(
        "a decision, CPU time",
        ("blocks of the prompt", "replicas", "choose, us: p50 (p90)", "note what was sent, us: p50"),
        rows,
        [f"{indexed:,} blocks are indexed. The bar: at most 200 us for a choice."],
    )


def _choices(length: int, replicas: int, indexed: int, count: int) -> tuple[list[float], list[float]]:
    """Seconds of CPU of each choice, and of noting it."""
    rng = random.Random(length)
    chains = [[rng.randbytes(KEY_BYTES - 2) + b"\xff\xff" for _ in range(length)] for _ in range(indexed // length)]
    entries = []
    for number, chain in enumerate(chains):
        holders = tuple(sorted({number % replicas, (number + 1) % replicas}))
        entries += [
            (key, holders, ()) if place < length * 3 // 4 else (key, (), holders[:1]) for place, key in enumerate(chain)
        ]
    copy = DirectoryCopy(1)
    copy.apply(0, Changes(Position(1), True, (), tuple(entries)))
    scoring = Scoring(ScoringConfig(), RouterIndex(copy), rng)
    candidates = [Candidate(f"replica-{number}", number, rng.randrange(10_000)) for number in range(replicas)]
    choices, notes = [], []
    for _ in range(count):
        keys = [bytes(bytearray(key)) for key in rng.choice(chains)]  # objects of their own, as those of a request are
        request = Routed(keys, 16 * length, 16)
        start = time.thread_time()
        choice = scoring.choose(0.0, request, candidates)
        chosen = time.thread_time()
        scoring.sent(0.0, request, candidates[0], choice.computed)
        choices.append(chosen - start)
        notes.append(time.thread_time() - chosen)
    return choices, notes


def run(options: Options) -> Report:
    """Everything."""
    report = Report("Routing")
    report.add(decided(options))
    for table in replayed(options):
        report.add(table)
    return report


if __name__ == "__main__":
    run_main(run, __doc__)
