"""Ray's back end for the metrics of metrics.py. Only for Ray processes: values recorded elsewhere are lost."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge, Histogram

from tournant.cluster.metrics import MODEL_LABEL, MetricKind, MetricSpec, Recorder


class RayBackend:
    """Records through `ray.util.metrics`; Ray exports every name with `ray_` before it."""

    def recorder(self, spec: MetricSpec, model_name: str) -> Recorder:
        """See `MetricsBackend`."""
        keys = (MODEL_LABEL, *spec.labels)

        def tags(values: tuple[str, ...]) -> dict[str, str]:
            return dict(zip(keys, (model_name, *values), strict=True))

        if spec.kind is MetricKind.COUNTER:
            counter = Counter(spec.name, spec.description, tag_keys=keys)
            return lambda value, values: counter.inc(value, tags=tags(values))
        if spec.kind is MetricKind.GAUGE:
            gauge = Gauge(spec.name, spec.description, tag_keys=keys)
            return lambda value, values: gauge.set(value, tags=tags(values))
        histogram = Histogram(spec.name, spec.description, boundaries=list(spec.buckets), tag_keys=keys)
        return lambda value, values: histogram.observe(value, tags=tags(values))
