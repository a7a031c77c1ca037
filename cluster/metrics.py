"""Every metric of the service: names, kinds, labels, in one list, and the registry that feeds them.

Folders below return plain values (`EngineStats`); the frontend hands over one `RequestRecord` per finished request. Who
exposes the numbers is a back end: `PrometheusBackend` here, Ray's in ray_metrics.py. The `vllm_` names are those that
Ray's LLM dashboard reads (Ray puts `ray_` before them); ours begin with `tournant_`. No name may hold a colon.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from tournant.kvstore.directory import DirectoryStats
from tournant.workers.messages import EngineStats

MODEL_LABEL = "model_name"
NO_MODEL = ""  # an empty label is none
OF_SHARD = ("application", "shard")  # labels of what a shard of the directory counts
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class MetricKind(enum.Enum):
    """What one recorded value means: added to a counter, the new value of a gauge, one observation."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)  # compared and hashed as what it is: a key of tables on the hot path
class MetricSpec:
    """One metric. labels: names besides `model_name`; buckets: upper bounds of a histogram; absent_at_first: without a
    series until it is known, as estimates are.
    """

    name: str
    kind: MetricKind
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    absent_at_first: bool = False


def _counter(name: str, description: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, MetricKind.COUNTER, description, labels)


def _gauge(name: str, description: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, MetricKind.GAUGE, description, labels)


def _histogram(name: str, description: str, buckets: tuple[float, ...]) -> MetricSpec:
    return MetricSpec(name, MetricKind.HISTOGRAM, description, (), buckets)


def _of_shard(name: str, description: str) -> MetricSpec:
    return _counter(name, description, *OF_SHARD)


def _estimate(spec: MetricSpec) -> MetricSpec:
    return replace(spec, absent_at_first=True)


NUM_RUNNING = _gauge("vllm_num_requests_running", "Sequences that run in the engine")
NUM_WAITING = _gauge("vllm_num_requests_waiting", "Sequences that wait in the engine")
KV_USAGE = _gauge("vllm_kv_cache_usage_perc", "Share of device KV blocks held by sequences, 0 to 1")
PREFIX_QUERIES = _counter("vllm_prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache")
PREFIX_HITS = _counter("vllm_prefix_cache_hits_total", "Prompt tokens found in the prefix cache")
PREEMPTIONS = _counter("vllm_num_preemptions_total", "Sequences taken off the device to be computed again")
PROMPT_TOKENS = _counter("vllm_prompt_tokens_total", "Prompt tokens computed")
GENERATION_TOKENS = _counter("vllm_generation_tokens_total", "Tokens generated")
SUCCESS = _counter("vllm_request_success_total", "Answers that ended", "finished_reason")
TTFT = _histogram("vllm_time_to_first_token_seconds", "From arrival to the first token", SECONDS)
TPOT = _histogram("vllm_request_time_per_output_token_seconds", "Mean time per token after the first", SECONDS)
E2E = _histogram("vllm_e2e_request_latency_seconds", "From arrival to the end of the last answer", SECONDS)
QUEUE_TIME = _histogram("vllm_request_queue_time_seconds", "From arrival to the first scheduling", SECONDS)
PREFILL_TIME = _histogram("vllm_request_prefill_time_seconds", "From first scheduling to the first token", SECONDS)
DECODE_TIME = _histogram("vllm_request_decode_time_seconds", "From the first token to the end", SECONDS)
REQUEST_PROMPT_TOKENS = _histogram("vllm_request_prompt_tokens", "Prompt tokens per request", TOKENS)
REQUEST_GENERATION_TOKENS = _histogram("vllm_request_generation_tokens", "Tokens generated per request", TOKENS)
EXTERNAL_QUERIES = _counter(
    "vllm_external_prefix_cache_queries_total", "Prompt tokens that the device lacked while a node store was attached"
)
EXTERNAL_HITS = _counter("vllm_external_prefix_cache_hits_total", "Prompt tokens restored from RAM or NVMe")
NUM_RESTORING = _gauge("tournant_num_requests_restoring", "Sequences whose blocks are on their way to the device")
HIT_TOKENS = _counter("tournant_prefix_hit_tokens_total", "Prompt tokens not computed, by where they lay", "tier")
ENGINE_UP = _gauge("tournant_engine_up", "1 while the engine process lives")
ENGINE_STEPS = _counter("tournant_engine_steps_total", "Steps of the engine")
KV_BLOCKS = _gauge("tournant_kv_blocks", "Device KV blocks by state: used, cached, total", "state")
OUTSTANDING = _gauge("tournant_answers_outstanding", "Answers admitted by the frontend and not ended")
WEIGHTS_EPOCH = _gauge("tournant_weights_epoch", "Epoch of the weights; 0 = as configured, then each update is one")
HTTP_REQUESTS = _counter("tournant_http_requests_total", "HTTP responses by route and status", "route", "status")
OVERFLOW_COUNTERS = {  # field of OverflowStats -> the counter it feeds
    "written_bytes": _counter("tournant_overflow_written_bytes_total", "KV of running sequences copied off the device"),
    "host_bytes": _counter("tournant_overflow_host_bytes_total", "KV below the device attended to in RAM"),
    "disk_bytes": _counter("tournant_overflow_disk_bytes_total", "KV below the device read from disk to attend to"),
    "streamed_bytes": _counter("tournant_overflow_streamed_bytes_total", "Of that in RAM, copied to the device first"),
    "lost_blocks": _counter("tournant_overflow_lost_blocks_total", "Blocks below that could not be read"),
    "chosen_layers": _counter("tournant_sparse_layers_total", "Layers of decode steps that read some blocks below"),
    "dense_layers": _counter("tournant_sparse_dense_layers_total", "Of these, layers that then had to read all"),
    "missed_mass": _counter("tournant_sparse_missed_mass_total", "Attention that the others missed, estimated"),
}
OVERFLOW_BLOCKS = _gauge("tournant_overflow_blocks", "Places below the device by state: used, total", "state")
TIER_COUNTERS = {  # field of TierStats -> the counter it feeds
    "saved_bytes": _counter("vllm_kv_offload_store_bytes_total", "Bytes copied from the device to RAM"),
    "save_seconds": _counter("vllm_kv_offload_store_time_total", "Seconds of those copies, queue included"),
    "loaded_bytes": _counter("vllm_kv_offload_load_bytes_total", "Bytes copied from RAM to the device"),
    "load_seconds": _counter("vllm_kv_offload_load_time_total", "Seconds of those copies, queue included"),
    "store_losses": _counter("tournant_store_losses_total", "How often the node store was lost"),
    "store_refusals": _counter("tournant_store_refusals_total", "Attempts to attach to a node store that said no"),
    "saved_blocks": _counter("tournant_saved_blocks_total", "Device blocks copied to RAM"),
    "refused_saves": _counter("tournant_refused_saves_total", "Blocks that the store did not take"),
    "skipped_saves": _counter("tournant_skipped_saves_total", "Blocks that waited because no slot was lent"),
    "dropped_dirty": _counter("tournant_dropped_dirty_blocks_total", "Blocks dropped that were only on the device"),
    "loaded_blocks": _counter("tournant_loaded_blocks_total", "Blocks copied from RAM to the device"),
    "fetched_bytes": _counter("tournant_fetched_bytes_total", "Bytes brought from NVMe to RAM for requests"),
    "fetch_seconds": _counter("tournant_fetch_seconds_total", "Seconds of that, queue included"),
    "remote_blocks": _counter("tournant_remote_blocks_total", "Blocks brought from other nodes to RAM for requests"),
    "remote_bytes": _counter("tournant_remote_bytes_total", "Bytes of those blocks"),
    "remote_seconds": _counter("tournant_remote_seconds_total", "Seconds that requests waited for them"),
    "remote_failures": _counter("tournant_remote_failures_total", "How often another node gave less than it was to"),
    "lookups": _counter("tournant_lookups_total", "Questions to the store about a request's prefix"),
    "late_lookups": _counter("tournant_late_lookups_total", "Lookups that were not waited for any longer"),
    "restores": _counter("tournant_restores_total", "Requests whose prefix was restored"),
    "cut_restores": _counter("tournant_cut_restores_total", "Restores that their deadline ended"),
    "lost_blocks": _counter("tournant_lost_blocks_total", "Blocks that were chosen, but gone or wrong when copied"),
    "corrupt_blocks": _counter("tournant_corrupt_blocks_total", "Blocks whose bytes were wrong"),
    "chose_load": _counter("tournant_chose_load_total", "Decisions to load a prefix"),
    "chose_recompute": _counter("tournant_chose_recompute_total", "Decisions to compute a prefix again"),
    "estimated_load_seconds": _estimate(
        _counter("tournant_estimated_load_seconds_total", "Estimates of loading whole prefixes, one per decision")
    ),
    "estimated_recompute_seconds": _estimate(
        _counter("tournant_estimated_recompute_seconds_total", "Estimates of computing the same prefixes again")
    ),
    "actual_load_seconds": _counter("tournant_actual_load_seconds_total", "What the loads that were chosen took"),
    "swapped": _counter("tournant_swapped_preemptions_total", "Preemptions that copied down instead of recomputing"),
    "stashed": _counter("tournant_stashed_blocks_total", "Growing blocks copied down with them"),
}
TIER_GAUGES = {
    "attached": _gauge("tournant_store_attached", "1 while a node store serves the engine"),
    "dirty_blocks": _gauge("tournant_dirty_blocks", "Sealed blocks that are only on the device"),
    "pressure": _gauge("tournant_pressure", "Share of the device pool that is in use or only there"),
    "bytes_per_second_host": _estimate(
        _gauge("tournant_bytes_per_second_host", "From RAM to the device, as estimates use it")
    ),
    "bytes_per_second_nvme": _estimate(
        _gauge("tournant_bytes_per_second_nvme", "From NVMe to RAM, as estimates use it")
    ),
    "bytes_per_second_remote": _estimate(
        _gauge("tournant_bytes_per_second_remote", "From another node to RAM, as estimates use it")
    ),
    "prefill_tokens_per_second": _estimate(
        _gauge("tournant_prefill_tokens_per_second", "Computing, as estimates use it")
    ),
}
DIRECTORY_COUNTERS = {  # field of DirectoryStats -> the counter it feeds, of one shard
    "looked_up": _of_shard("tournant_directory_lookups_total", "Blocks that the shard was asked about"),
    "found": _of_shard("tournant_directory_found_total", "Those of them that some node is known to hold"),
    "applied": _of_shard("tournant_directory_announcements_total", "Messages of node stores that were taken in"),
    "stale": _of_shard("tournant_directory_stale_total", "Messages that came twice or late"),
    "questions": _of_shard("tournant_directory_questions_total", "How often a store was asked to tell everything"),
    "evicted": _of_shard("tournant_directory_evicted_total", "Entries that left because the shard was full"),
    "nodes_lost": _of_shard("tournant_directory_nodes_lost_total", "Nodes that fell silent or were said to be gone"),
}
DIRECTORY_ENTRIES = _gauge("tournant_directory_entries", "Blocks that the shard has an entry of", *OF_SHARD)
DIRECTORY_NODES = _gauge("tournant_directory_nodes", "Nodes that the shard has heard of", *OF_SHARD)
HITS_BY_TIER = {"host": "host_hit_tokens", "nvme": "nvme_hit_tokens"}  # the rest was on the device

REQUEST_SPECS = (  # of whoever takes requests
    SUCCESS,
    TTFT,
    TPOT,
    E2E,
    QUEUE_TIME,
    PREFILL_TIME,
    DECODE_TIME,
    REQUEST_PROMPT_TOKENS,
    REQUEST_GENERATION_TOKENS,
    OUTSTANDING,
    WEIGHTS_EPOCH,
    HTTP_REQUESTS,
)
SPECS = (
    *REQUEST_SPECS,
    NUM_RUNNING,
    NUM_WAITING,
    KV_USAGE,
    PREFIX_QUERIES,
    PREFIX_HITS,
    PREEMPTIONS,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    ENGINE_UP,
    ENGINE_STEPS,
    KV_BLOCKS,
    EXTERNAL_QUERIES,
    EXTERNAL_HITS,
    NUM_RESTORING,
    HIT_TOKENS,
    *OVERFLOW_COUNTERS.values(),
    OVERFLOW_BLOCKS,
    *TIER_COUNTERS.values(),
    *TIER_GAUGES.values(),
)
ENGINE_COUNTERS: tuple[tuple[MetricSpec, str], ...] = (  # which field of EngineStats feeds which counter
    (PREFIX_QUERIES, "prefix_query_tokens"),
    (PREFIX_HITS, "prefix_hit_tokens"),
    (PREEMPTIONS, "num_preemptions"),
    (PROMPT_TOKENS, "prompt_tokens"),
    (GENERATION_TOKENS, "generation_tokens"),
    (ENGINE_STEPS, "num_steps"),
)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What is known of a request once all of its answers have ended; times in seconds, None where nothing was measured.

    finish_reasons: one per answer; ttft_s: until the first token of any answer; tpot_s: mean over the tokens after it.
    """

    finish_reasons: tuple[str, ...]
    prompt_tokens: int
    generation_tokens: int
    e2e_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None


Recorder = Callable[[float, tuple[str, ...]], None]  # (value, values of the spec's labels)


class MetricsBackend(Protocol):
    """Makes one recorder per spec; every series carries the label `model_name`."""

    def recorder(self, spec: MetricSpec, model_name: str) -> Recorder:
        """A function that records one value under this spec."""


class PrometheusBackend:
    """Exposes metrics in Prometheus' text format from a collector registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # when series began, which nobody reads
        self._registry = CollectorRegistry()

    def recorder(self, spec: MetricSpec, model_name: str) -> Recorder:
        """See `MetricsBackend`. Raises ValueError when a spec is registered twice."""
        labels = (MODEL_LABEL, *spec.labels)
        if spec.kind is MetricKind.COUNTER:
            counter = Counter(spec.name, spec.description, labels, registry=self._registry)
            return self._by_labels(spec, lambda values: counter.labels(model_name, *values).inc)
        if spec.kind is MetricKind.GAUGE:
            gauge = Gauge(spec.name, spec.description, labels, registry=self._registry)
            return self._by_labels(spec, lambda values: gauge.labels(model_name, *values).set)
        histogram = Histogram(spec.name, spec.description, labels, registry=self._registry, buckets=spec.buckets)
        return self._by_labels(spec, lambda values: histogram.labels(model_name, *values).observe)

    @staticmethod
    def _by_labels(spec: MetricSpec, make: Callable[[tuple[str, ...]], Callable[[float], None]]) -> Recorder:
        """A recorder that looks each series up once; one without labels of its own begins at 0, or absent."""
        series: dict[tuple[str, ...], Callable[[float], None]] = {}
        if not spec.labels and not spec.absent_at_first:
            series[()] = make(())

        def record(value: float, values: tuple[str, ...]) -> None:
            add = series.get(values)
            if add is None:
                add = series[values] = make(values)
            add(value)

        return record

    def render(self) -> bytes:
        """All series in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)


class MetricsRegistry:
    """Turns plain values into recorded metrics. Not thread-safe: used on the frontend's event loop.

    specs: what it has series of.
    """

    specs: tuple[MetricSpec, ...] = SPECS

    def __init__(self, model_name: str, backend: MetricsBackend) -> None:
        self._record = {spec: backend.recorder(spec, model_name) for spec in self.specs}
        self._seen = EngineStats()

    def record_engine(self, stats: EngineStats, alive: bool, outstanding: int, epoch: int = 0) -> None:
        """Take the engine's latest counters and gauges, and the epoch of its weights.

        Fewer steps than before mean a new engine, counted anew.
        """
        record = self._record
        seen = EngineStats() if stats.num_steps < self._seen.num_steps else self._seen
        for spec, name in ENGINE_COUNTERS:
            self._add(spec, getattr(stats, name) - getattr(seen, name))
        self._record_tiers(stats, seen)
        for name, spec in OVERFLOW_COUNTERS.items():
            self._add(spec, getattr(stats.overflow, name) - getattr(seen.overflow, name))
        if stats.overflow.total_blocks:
            record[OVERFLOW_BLOCKS](stats.overflow.used_blocks, ("used",))
            record[OVERFLOW_BLOCKS](stats.overflow.total_blocks, ("total",))
        self._seen = stats
        record[NUM_RUNNING](stats.num_running, ())
        record[NUM_WAITING](stats.num_waiting, ())
        record[KV_USAGE](stats.kv_used / stats.kv_total if stats.kv_total else 0.0, ())
        for state, blocks in (("used", stats.kv_used), ("cached", stats.kv_cached), ("total", stats.kv_total)):
            record[KV_BLOCKS](blocks, (state,))
        record[ENGINE_UP](float(alive), ())
        record[OUTSTANDING](outstanding, ())
        record[WEIGHTS_EPOCH](epoch, ())

    def _record_tiers(self, stats: EngineStats, seen: EngineStats) -> None:
        record, tiers = self._record, stats.tiers
        for name, spec in TIER_COUNTERS.items():
            self._add(spec, getattr(tiers, name) - getattr(seen.tiers, name))
        for name, spec in TIER_GAUGES.items():
            value = getattr(tiers, name)
            if value or not spec.absent_at_first:  # 0 stands for what is not known yet
                record[spec](value, ())
        record[NUM_RESTORING](stats.num_restoring, ())
        below = 0
        for tier, name in HITS_BY_TIER.items():
            hits = getattr(tiers, name) - getattr(seen.tiers, name)
            self._add(HIT_TOKENS, hits, (tier,))
            below += hits
        on_device = stats.prefix_hit_tokens - seen.prefix_hit_tokens - below
        self._add(HIT_TOKENS, on_device, ("device",))
        self._add(EXTERNAL_HITS, below)
        if tiers.attached:
            self._add(EXTERNAL_QUERIES, stats.prefix_query_tokens - seen.prefix_query_tokens - on_device)

    def _add(self, spec: MetricSpec, increase: float, values: tuple[str, ...] = ()) -> None:
        if increase > 0:  # Ray refuses to add nothing
            self._record[spec](increase, values)

    def record_request(self, request: RequestRecord) -> None:
        """Count one ended request."""
        record = self._record
        for reason in request.finish_reasons:
            record[SUCCESS](1, (reason,))
        record[REQUEST_PROMPT_TOKENS](request.prompt_tokens, ())
        record[REQUEST_GENERATION_TOKENS](request.generation_tokens, ())
        for spec, seconds in (
            (E2E, request.e2e_s),
            (TTFT, request.ttft_s),
            (TPOT, request.tpot_s),
            (QUEUE_TIME, request.queue_s),
            (PREFILL_TIME, request.prefill_s),
            (DECODE_TIME, request.decode_s),
        ):
            if seconds is not None:
                record[spec](seconds, ())

    def record_http(self, route: str, status: int) -> None:
        """Count one HTTP response. `route` is a known route or "other", never a path made up by a client."""
        self._record[HTTP_REQUESTS](1, (route, str(status)))


class DirectoryMetrics:
    """Turns what a shard of the directory counts into recorded metrics. application, shard: its labels."""

    def __init__(self, application: str, shard: int, backend: MetricsBackend) -> None:
        specs = (*DIRECTORY_COUNTERS.values(), DIRECTORY_ENTRIES, DIRECTORY_NODES)
        self._record = {spec: backend.recorder(spec, NO_MODEL) for spec in specs}
        self._labels = (application, str(shard))
        self._seen = DirectoryStats()

    def record(self, stats: DirectoryStats, entries: int, nodes: int) -> None:
        """Take the latest counters and gauges of the shard."""
        for name, spec in DIRECTORY_COUNTERS.items():
            increase = getattr(stats, name) - getattr(self._seen, name)
            if increase > 0:
                self._record[spec](increase, self._labels)
        self._seen = replace(stats)
        self._record[DIRECTORY_ENTRIES](entries, self._labels)
        self._record[DIRECTORY_NODES](nodes, self._labels)
