from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tournant.cluster.metrics import (
    DIRECTORY_COUNTERS,
    DIRECTORY_ENTRIES,
    DIRECTORY_NODES,
    EXTERNAL_HITS,
    EXTERNAL_QUERIES,
    HIT_TOKENS,
    HITS_BY_TIER,
    NUM_RESTORING,
    SPECS,
    TIER_COUNTERS,
    TIER_GAUGES,
    DirectoryMetrics,
    MetricKind,
    MetricsRegistry,
    PrometheusBackend,
    RequestRecord,
)
from tournant.cluster.ray_metrics import RayBackend
from tournant.kvstore.directory import DirectoryStats
from tournant.workers.messages import EngineStats, OverflowStats, TierStats

RECORD = RequestRecord(("stop", "length"), 10, 5, e2e_s=2.0, ttft_s=0.5, tpot_s=0.375, queue_s=0.1, decode_s=1.5)

WITH_TIERS = EngineStats(
    num_steps=1,
    kv_total=1,
    prefix_query_tokens=100,
    prefix_hit_tokens=70,
    tiers=TierStats(attached=1, host_hit_tokens=30, nvme_hit_tokens=15, saved_bytes=7, pressure=0.5),
)
ESTIMATES = [name for name, spec in (TIER_COUNTERS | TIER_GAUGES).items() if spec.absent_at_first]


@pytest.fixture
def backend() -> PrometheusBackend:
    return PrometheusBackend()


@pytest.fixture
def registry(backend: PrometheusBackend) -> MetricsRegistry:
    return MetricsRegistry("m", backend)


def values(backend: PrometheusBackend) -> dict[str, float]:
    """Value of each series; labels besides the model's stay in the name."""
    series = {}
    for line in backend.render().decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert 'model_name="m"' in name
            series[re.sub(r'\{,|,\}|\{\}|,?model_name="m",?', "", name).replace("{}", "")] = float(value)
    return series


OF_DIRECTORY = (*DIRECTORY_COUNTERS.values(), DIRECTORY_ENTRIES, DIRECTORY_NODES)


def test_names_are_ones_that_every_back_end_takes() -> None:
    specs = (*SPECS, *OF_DIRECTORY)
    assert len({spec.name for spec in specs}) == len(specs)
    for spec in specs:
        assert re.fullmatch(r"(vllm|tournant)_[a-z0-9_]+", spec.name)
        assert spec.name.endswith("_total") == (spec.kind is MetricKind.COUNTER)
        assert (spec.buckets != ()) == (spec.kind is MetricKind.HISTOGRAM)


def test_prometheus_shows_the_names_as_they_are(backend: PrometheusBackend, registry: MetricsRegistry) -> None:
    estimates = dict.fromkeys(ESTIMATES, 1.0)
    tiers, overflow = replace(WITH_TIERS.tiers, **estimates), OverflowStats(total_blocks=4)
    registry.record_engine(replace(WITH_TIERS, tiers=tiers, overflow=overflow), True, 0)
    registry.record_request(RECORD)
    registry.record_http("/health", 200)
    shown = {name.split("{")[0] for name in values(backend)}
    for spec in SPECS:
        assert spec.name + ("_count" if spec.kind is MetricKind.HISTOGRAM else "") in shown
    assert not [name for name in shown if name.endswith("_created")]


def test_series_without_labels_begin_at_zero(backend: PrometheusBackend, registry: MetricsRegistry) -> None:
    assert values(backend)["vllm_prompt_tokens_total"] == 0


def test_every_metric_of_the_tiers_is_in_the_documentation() -> None:
    rows = (Path(__file__).resolve().parents[2] / "docs" / "offload.md").read_text(encoding="utf-8").splitlines()
    for spec in (NUM_RESTORING, HIT_TOKENS, EXTERNAL_QUERIES, EXTERNAL_HITS, *(TIER_COUNTERS | TIER_GAUGES).values()):
        labels = "".join(f"{{{label}}}" for label in spec.labels)
        row = f"| `{spec.name}{labels}` | {spec.kind.value} | {spec.description} |"
        assert row in rows, "docs/offload.md lacks it"


@pytest.mark.parametrize("name", ESTIMATES)
def test_an_estimate_is_absent_until_it_is_known(
    backend: PrometheusBackend, registry: MetricsRegistry, name: str
) -> None:
    shown = (TIER_COUNTERS | TIER_GAUGES)[name].name
    registry.record_engine(WITH_TIERS, True, 0)
    assert shown not in values(backend)
    tiers = replace(WITH_TIERS.tiers, **{name: 2.5})
    registry.record_engine(replace(WITH_TIERS, num_steps=2, tiers=tiers), True, 0)
    assert values(backend)[shown] == 2.5


def test_estimates_are_the_ones_that_are_zero_when_unknown() -> None:
    rates = {f"bytes_per_second_{tier}" for tier in ("host", "nvme", "remote")} | {"prefill_tokens_per_second"}
    assert set(ESTIMATES) == rates | {"estimated_load_seconds", "estimated_recompute_seconds"}


def test_engine_counters_are_added_up_over_restarts(backend: PrometheusBackend, registry: MetricsRegistry) -> None:
    for steps, tokens in ((10, 100), (10, 100), (15, 130), (2, 7)):  # the last is a new engine
        registry.record_engine(EngineStats(num_steps=steps, generation_tokens=tokens), True, 0)
    assert values(backend)["vllm_generation_tokens_total"] == 137
    assert values(backend)["tournant_engine_steps_total"] == 17


def test_what_lies_below_the_device_is_counted(backend: PrometheusBackend, registry: MetricsRegistry) -> None:
    for steps, read in ((1, 10), (2, 14)):
        overflow = OverflowStats(disk_bytes=read, used_blocks=3, total_blocks=4)
        registry.record_engine(EngineStats(num_steps=steps, overflow=overflow), True, 0)
    shown = values(backend)
    assert shown["tournant_overflow_disk_bytes_total"] == 14
    assert shown['tournant_overflow_blocks{state="used"}'] == 3


def test_every_field_of_the_tiers_is_recorded() -> None:
    assert {field.name for field in fields(TierStats)} == {*TIER_COUNTERS, *TIER_GAUGES, *HITS_BY_TIER.values()}


def test_hits_are_told_by_tier_and_as_rays_dashboard_reads_them(
    backend: PrometheusBackend, registry: MetricsRegistry
) -> None:
    registry.record_engine(WITH_TIERS, True, 0)
    registry.record_engine(WITH_TIERS, True, 0)
    later = replace(WITH_TIERS, num_steps=2, prefix_query_tokens=200, prefix_hit_tokens=170)
    registry.record_engine(later, True, 0)
    shown = values(backend)
    hits = {tier: shown[f'tournant_prefix_hit_tokens_total{{tier="{tier}"}}'] for tier in ("device", "host", "nvme")}
    assert hits == {"device": 125, "host": 30, "nvme": 15}
    assert shown["vllm_external_prefix_cache_hits_total"] == 45
    assert shown["vllm_external_prefix_cache_queries_total"] == 75  # of 200 tokens, 125 lay on the device
    assert shown["vllm_kv_offload_store_bytes_total"] == 7
    assert (shown["tournant_store_attached"], shown["tournant_pressure"]) == (1, 0.5)


def test_counters_of_the_tiers_go_on_over_a_restart_of_the_engine(
    backend: PrometheusBackend, registry: MetricsRegistry
) -> None:
    for steps, saved in ((5, 10), (9, 14), (1, 3)):
        registry.record_engine(EngineStats(num_steps=steps, tiers=TierStats(saved_blocks=saved)), True, 0)
    assert values(backend)["tournant_saved_blocks_total"] == 17


def test_without_a_store_nothing_counts_as_asked_below(backend: PrometheusBackend, registry: MetricsRegistry) -> None:
    registry.record_engine(EngineStats(num_steps=1, prefix_query_tokens=100, prefix_hit_tokens=20), True, 0)
    shown = values(backend)
    assert shown["vllm_external_prefix_cache_queries_total"] == 0
    assert shown['tournant_prefix_hit_tokens_total{tier="device"}'] == 20


def test_gauges_are_the_latest_values(backend: PrometheusBackend, registry: MetricsRegistry) -> None:
    registry.record_engine(EngineStats(num_running=3, num_waiting=2, kv_used=1, kv_cached=5, kv_total=4), True, 7, 2)
    shown = values(backend)
    assert shown["tournant_weights_epoch"] == 2
    assert (shown["vllm_num_requests_running"], shown["vllm_num_requests_waiting"]) == (3, 2)
    assert shown["vllm_kv_cache_usage_perc"] == 0.25
    assert shown['tournant_kv_blocks{state="cached"}'] == 5
    assert (shown["tournant_engine_up"], shown["tournant_answers_outstanding"]) == (1, 7)
    registry.record_engine(EngineStats(), False, 0)
    assert values(backend)["tournant_engine_up"] == values(backend)["vllm_kv_cache_usage_perc"] == 0


def test_a_request_is_counted_by_answer_and_timed_once(backend: PrometheusBackend, registry: MetricsRegistry) -> None:
    registry.record_request(RECORD)
    shown = values(backend)
    assert shown['vllm_request_success_total{finished_reason="stop"}'] == 1
    assert shown['vllm_request_success_total{finished_reason="length"}'] == 1
    assert shown["vllm_e2e_request_latency_seconds_sum"] == 2.0
    assert shown["vllm_request_generation_tokens_sum"] == 5
    assert shown["vllm_request_prefill_time_seconds_count"] == 0  # not measured


def test_a_shard_of_the_directory_counts_what_is_new(backend: PrometheusBackend) -> None:
    metrics, stats = DirectoryMetrics("app", 1, backend), DirectoryStats()
    for found in (3, 0, 4):
        stats.found += found
        metrics.record(stats, found, 2)
    lines = [line for line in backend.render().decode().splitlines() if not line.startswith("#")]
    labels = '{application="app",model_name="",shard="1"}'
    assert f"tournant_directory_found_total{labels} 7.0" in lines
    assert f"tournant_directory_entries{labels} 4.0" in lines
    assert not any(line.startswith("tournant_directory_stale") for line in lines)


def test_every_counter_of_a_shard_is_recorded_and_documented() -> None:
    assert {field.name for field in fields(DirectoryStats)} == set(DIRECTORY_COUNTERS)
    rows = (Path(__file__).resolve().parents[2] / "docs" / "store.md").read_text(encoding="utf-8").splitlines()
    for spec in OF_DIRECTORY:
        assert f"| `{spec.name}` | {spec.kind.value} | {spec.description} |" in rows


def test_rays_back_end_takes_every_metric(recwarn: pytest.WarningsRecorder) -> None:
    registry = MetricsRegistry("m", RayBackend())
    registry.record_engine(WITH_TIERS, True, 0)
    registry.record_request(RECORD)
    registry.record_http("/health", 200)
    DirectoryMetrics("app", 0, RayBackend()).record(DirectoryStats(*[1] * len(DIRECTORY_COUNTERS)), 1, 1)
    assert [str(warning.message) for warning in recwarn if "etric" in str(warning.message)] == []
