"""What an ingress over engines elsewhere shows: its requests, and nothing of engines, which would be zeros."""

from __future__ import annotations

import pytest

from tournant.cluster.metrics import REQUEST_SPECS, SPECS, PrometheusBackend, RequestRecord
from tournant.deploy.resilient import IngressMetrics
from tournant.workers.messages import EngineStats

OF_ENGINES = [spec.name for spec in SPECS if spec not in REQUEST_SPECS]


@pytest.fixture
def shown() -> str:
    backend = PrometheusBackend()
    metrics = IngressMetrics("m", backend)
    metrics.record_engine(EngineStats(num_running=3, num_steps=4, generation_tokens=9), True, 7, 2)
    metrics.record_request(RequestRecord(("stop",), 10, 5, e2e_s=2.0))
    metrics.record_http("/health", 200)
    return backend.render().decode()


def test_an_ingress_shows_nothing_of_engines_not_even_zeros(shown: str) -> None:
    assert {"tournant_engine_up", "vllm_num_requests_running"} < set(OF_ENGINES)
    assert [name for name in OF_ENGINES if name in shown] == []


def test_an_ingress_shows_its_requests(shown: str) -> None:
    assert 'tournant_answers_outstanding{model_name="m"} 7.0' in shown
    assert 'tournant_weights_epoch{model_name="m"} 2.0' in shown
    assert 'vllm_e2e_request_latency_seconds_count{model_name="m"} 1.0' in shown
