"""Every metric of the service: names, kinds, labels, in one list, and the registry that feeds them.

Folders below return plain values (`EngineStats`); the frontend hands over one `RequestRecord` per finished request. Who
exposes the numbers is a back end: `PrometheusBackend` here, Ray's in ray_metrics.py. The `vllm_` names are those that
Ray's LLM dashboard reads (Ray puts `ray_` before them); ours begin with `tournant_`. No name may hold a colon.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tournant.workers.messages import EngineStats

MODEL_LABEL = "model_name"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class MetricKind(enum.Enum):
    """What one recorded value means: added to a counter, the new value of a gauge, one observation."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. labels: names besides `model_name`; buckets: upper bounds of a histogram."""

    name: str
    kind: MetricKind
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, description: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, MetricKind.COUNTER, description, labels)


def _gauge(name: str, description: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, MetricKind.GAUGE, description, labels)


def _histogram(name: str, description: str, buckets: tuple[float, ...]) -> MetricSpec:
    return MetricSpec(name, MetricKind.HISTOGRAM, description, (), buckets)


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
ENGINE_UP = _gauge("tournant_engine_up", "1 while the engine process lives")
ENGINE_STEPS = _counter("tournant_engine_steps_total", "Steps of the engine")
KV_BLOCKS = _gauge("tournant_kv_blocks", "Device KV blocks by state: used, cached, total", "state")
OUTSTANDING = _gauge("tournant_answers_outstanding", "Answers admitted by the frontend and not ended")
HTTP_REQUESTS = _counter("tournant_http_requests_total", "HTTP responses by route and status", "route", "status")

SPECS = (
    NUM_RUNNING,
    NUM_WAITING,
    KV_USAGE,
    PREFIX_QUERIES,
    PREFIX_HITS,
    PREEMPTIONS,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    SUCCESS,
    TTFT,
    TPOT,
    E2E,
    QUEUE_TIME,
    PREFILL_TIME,
    DECODE_TIME,
    REQUEST_PROMPT_TOKENS,
    REQUEST_GENERATION_TOKENS,
    ENGINE_UP,
    ENGINE_STEPS,
    KV_BLOCKS,
    OUTSTANDING,
    HTTP_REQUESTS,
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
        """A recorder that looks each series up once; one without labels of its own begins at 0."""
        series: dict[tuple[str, ...], Callable[[float], None]] = {} if spec.labels else {(): make(())}

        def record(value: float, values: tuple[str, ...]) -> None:
            if values not in series:
                series[values] = make(values)
            series[values](value)

        return record

    def render(self) -> bytes:
        """All series in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)


class MetricsRegistry:
    """Turns plain values into recorded metrics. Not thread-safe: used on the frontend's event loop."""

    def __init__(self, model_name: str, backend: MetricsBackend) -> None:
        self._record = {spec: backend.recorder(spec, model_name) for spec in SPECS}
        self._seen = EngineStats()

    def record_engine(self, stats: EngineStats, alive: bool, outstanding: int) -> None:
        """Take the engine's latest counters and gauges. Fewer steps than before mean a new engine, counted anew."""
        record = self._record
        restarted = stats.num_steps < self._seen.num_steps
        for spec, name in ENGINE_COUNTERS:
            increase = getattr(stats, name) - (0 if restarted else getattr(self._seen, name))
            if increase > 0:
                record[spec](increase, ())
        self._seen = stats
        record[NUM_RUNNING](stats.num_running, ())
        record[NUM_WAITING](stats.num_waiting, ())
        record[KV_USAGE](stats.kv_used / stats.kv_total if stats.kv_total else 0.0, ())
        for state, blocks in (("used", stats.kv_used), ("cached", stats.kv_cached), ("total", stats.kv_total)):
            record[KV_BLOCKS](blocks, (state,))
        record[ENGINE_UP](float(alive), ())
        record[OUTSTANDING](outstanding, ())

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
