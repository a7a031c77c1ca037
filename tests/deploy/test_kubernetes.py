"""The manifests are what their schemas take, agree with themselves and with the service, and name what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tests.deploy.kubernetes_schema import RayService, Strict, Volume, WorkerGroup, validate
from tournant.cluster import metrics
from tournant.cluster.metrics import MetricKind, MetricSpec
from tournant.deploy.config import ServiceConfig, parse_config
from tournant.deploy.config_check import check
from tournant.deploy.config_show import resolve
from tournant.deploy.yaml_file import parse_yaml

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "deploy" / "kubernetes"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
SERVICES = [path for path in MANIFESTS if path.name.startswith("rayservice-")]
SHM, NVME_SHARE = "/dev/shm", 0.95
UNITS = {"": 1, "m": 1e-3, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def service_of(path: Path) -> RayService:
    (found,) = (one for one in map(validate, documents(path)) if isinstance(one, RayService))
    return found


def serve_config(service: RayService) -> dict[str, Any]:
    data: dict[str, Any] = parse_yaml(service.spec.serveConfigV2)
    return data


def config_of(service: RayService) -> ServiceConfig:
    return parse_config(serve_config(service)["applications"][0]["args"])


def number(quantity: str) -> float:
    digits, unit = re.fullmatch(r"([0-9.]+)(\D*)", quantity).groups()  # type: ignore[union-attr]
    return float(digits) * UNITS[unit]


@pytest.fixture(params=SERVICES, ids=lambda path: path.stem)
def service(request: pytest.FixtureRequest) -> RayService:
    return service_of(request.param)


def test_every_kind_of_service_is_there() -> None:
    names = {path.stem.removeprefix("rayservice-") for path in SERVICES}
    assert names == {"one-gpu", "tp", "ha", "high-throughput"}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_what_its_schema_takes(path: Path) -> None:
    assert all(isinstance(validate(document), Strict) for document in documents(path))


def places(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where mappings with fixed keys are, in a manifest."""
    free = {"labels", "matchLabels", "requests", "limits", "rayStartParams"}
    if isinstance(data, Mapping) and (not path or path[-1] not in free):
        yield path
        for key, item in data.items():
            yield from places(item, (*path, key))
    elif isinstance(data, list):
        for place, item in enumerate(data):
            yield from places(item, (*path, place))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_key_that_is_not_known_is_refused_wherever_it_stands(path: Path) -> None:
    for document in documents(path):
        for place in places(document):
            changed = json.loads(json.dumps(document))  # aliases share nothing then
            inner = changed
            for part in place:
                inner = inner[part]
            inner["replica"] = 1
            with pytest.raises(ValidationError, match="replica"):
                validate(changed)


def test_what_serve_is_given_is_valid(service: RayService) -> None:
    assert check(serve_config(service)) == []
    assert serve_config(service)["http_options"]["host"] == "0.0.0.0"  # probes come from outside the pod


def test_the_versions_are_those_of_this_release(service: RayService) -> None:
    pins = dict(line.split("==") for line in (REPO / "constraints.txt").read_text().splitlines() if "==" in line)
    assert service.spec.rayClusterConfig.rayVersion == pins["ray"]
    version = re.search(r'^version = "(.+)"', (REPO / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    cluster = service.spec.rayClusterConfig
    images = {group.template.spec.containers[0].image for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs)}
    assert images == {f"tournant:{version[1]}"}


def volumes_by_mount(group: Any) -> dict[str, Volume]:
    pod = group.template.spec
    by_name = {volume.name: volume for volume in pod.volumes}
    mounts = {mount.mountPath: by_name[mount.name] for mount in pod.containers[0].volumeMounts}
    assert len(mounts) == len(by_name)  # no volume is left over
    return mounts


def test_pods_have_what_they_are_told_to_use(service: RayService) -> None:
    cluster, config = service.spec.rayClusterConfig, config_of(service)
    for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs):
        pod, mounts = group.template.spec, volumes_by_mount(group)
        resources = pod.containers[0].resources
        assert resources.requests == resources.limits
        assert pod.securityContext.runAsNonRoot
        assert pod.securityContext.runAsUser > 0
        shm = mounts[SHM].emptyDir
        assert shm is not None
        assert shm.medium == "Memory"
        assert int(group.rayStartParams["object-store-memory"]) < number(shm.sizeLimit)
        used = number(shm.sizeLimit)
        if isinstance(group, WorkerGroup):
            assert group.minReplicas <= group.replicas <= group.maxReplicas
            host = config.kv_store.host_bytes or 0
            config.kv_store.check_memory(int(number(resources.limits["memory"])))
            used += host
            check_nvme(config, mounts)
        assert used < 0.75 * number(resources.limits["memory"])  # the rest is for engines and frontends
    if config.model is not None:
        assert all("/models" in volumes_by_mount(group) for group in cluster.workerGroupSpecs)


def check_nvme(config: ServiceConfig, mounts: Mapping[str, Volume]) -> None:
    folder = config.kv_store.nvme_folder
    assert folder is not None
    (mount,) = (path for path in mounts if Path(folder).is_relative_to(path))
    assert folder != mount  # the store makes a folder of its own there, with mode 0700
    volume = mounts[mount].ephemeral
    assert volume is not None
    claim = volume.volumeClaimTemplate.spec
    assert config.kv_store.nvme_bytes <= NVME_SHARE * number(claim.resources.requests["storage"])


def test_there_are_gpus_for_all_ranks_and_a_stage_fits_into_a_pod(service: RayService) -> None:
    config = config_of(service)
    groups = service.spec.rayClusterConfig.workerGroupSpecs
    each = [int(group.template.spec.containers[0].resources.limits["nvidia.com/gpu"]) for group in groups]
    assert all(count % config.engine.tensor_parallel_size == 0 for count in each)
    in_all = sum(count * group.replicas for count, group in zip(each, groups, strict=True))
    assert in_all == config.num_replicas * config.engine.num_ranks


def test_a_pod_lives_as_long_as_serve_lets_a_replica_end(service: RayService) -> None:
    config = config_of(service)
    (application,) = resolve(serve_config(service))["applications"]
    longest = max(one["graceful_shutdown_timeout_s"] for one in application["deployments"])
    for group in service.spec.rayClusterConfig.workerGroupSpecs:
        assert group.template.spec.terminationGracePeriodSeconds > longest + config.kv_store.drain_s


def test_a_service_whose_answers_outlive_engines_gives_them_the_time(service: RayService) -> None:
    config = config_of(service)
    (application,) = resolve(serve_config(service))["applications"]
    timeouts = {one["name"]: one["graceful_shutdown_timeout_s"] for one in application["deployments"]}
    assert timeouts["Replica"] >= (config.weights_drain_s if config.ingress == "resilient" else 0)
    assert timeouts.get("Ingress", config.request_timeout_s) >= config.request_timeout_s


def test_probes_ask_what_answers_them(service: RayService) -> None:
    cluster = service.spec.rayClusterConfig
    port = serve_config(service)["http_options"]["port"]
    for group in cluster.workerGroupSpecs:
        container = group.template.spec.containers[0]
        assert container.readinessProbe.httpGet.port == port
        assert port in {one.containerPort for one in container.ports}
        assert container.livenessProbe.httpGet.path == "/api/local_raylet_healthz"
    assert cluster.headGroupSpec.template.spec.containers[0].readinessProbe.httpGet.path == "/api/gcs_healthz"


def test_what_is_read_when_serve_starts_is_the_same_in_all_pods_and_explained() -> None:
    cluster = service_of(FOLDER / "rayservice-high-throughput.yaml").spec.rayClusterConfig
    head, *workers = (
        group.template.spec.containers[0].env for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs)
    )
    assert head
    assert all(env == head for env in workers)
    told = (REPO / "deploy/configs/high-throughput.yaml").read_text(encoding="utf-8")
    assert all(f"{one.name}={one.value}" in told for one in head)


def test_the_service_that_outlives_its_head_has_a_redis_and_two_ways_in() -> None:
    service = service_of(FOLDER / "rayservice-ha.yaml")
    assert service.spec.rayClusterConfig.gcsFaultToleranceOptions is not None
    (application,) = serve_config(service)["applications"]
    numbers = {one["name"]: one.get("num_replicas") for one in application["deployments"]}
    assert config_of(service).ingress == "resilient"
    assert numbers["Ingress"] >= 2
    assert config_of(service).num_replicas >= 2


# ------------------------------------------------------------------ metrics


def specs() -> dict[str, MetricSpec]:
    """Everything that metrics.py exports, by the names that Prometheus sees."""
    groups = [list(one.values()) if isinstance(one, dict) else [one] for one in vars(metrics).values()]
    found = {one.name: one for group in groups for one in group if isinstance(one, MetricSpec)}
    series: dict[str, MetricSpec] = {}
    for name, spec in found.items():
        ends = ("_bucket", "_sum", "_count") if spec.kind is MetricKind.HISTOGRAM else ("",)
        series |= {f"ray_{name}{end}": spec for end in ends}
    return series


def expressions() -> list[str]:
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    found += [one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    (rules,) = documents(FOLDER / "prometheus-rules.yaml")
    return found + [rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]]


def unknown_names(expression: str) -> list[str]:
    """Metrics and labels in an expression that metrics.py does not have."""
    names, known = re.findall(r"\bray_\w+", expression), specs()
    wrong = [name for name in names if name not in known]
    labels = {"le", metrics.MODEL_LABEL} | {label for name in names if name in known for label in known[name].labels}
    used = [one for part in re.findall(r"\bby \(([^)]*)\)", expression) for one in re.split(r",\s*", part)]
    used += re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expression)
    return wrong + [label for label in used if label not in labels]


def test_dashboard_and_alerts_name_metrics_and_labels_that_there_are() -> None:
    found = expressions()
    assert len(found) > 50
    assert [(one, unknown_names(one)) for one in found if unknown_names(one) or "ray_" not in one] == []


def test_the_alert_on_missing_engines_does_not_need_a_series_of_one() -> None:
    """What Prometheus makes of an empty sum is nothing, which no comparison with 0 finds."""
    (rules,) = documents(FOLDER / "prometheus-rules.yaml")
    (rule,) = (one for group in rules["spec"]["groups"] for one in group["rules"] if one["alert"] == "TournantNoEngine")
    assert " ".join(rule["expr"].split()) == (
        "max by (model_name) (max_over_time(ray_tournant_engine_up[1d])) "
        "unless sum by (model_name) (ray_tournant_engine_up) > 0 "
        "or absent_over_time(ray_tournant_engine_up[1d])"
    )


def test_a_metric_or_label_that_is_not_there_would_be_told() -> None:
    assert unknown_names("sum by (modle) (rate(ray_vllm_prompt_token_total{tier=~'x'}[5m]))") == [
        "ray_vllm_prompt_token_total",
        "modle",
        "tier",
    ]
    assert unknown_names("ray_vllm_time_to_first_token_seconds") != []  # a histogram has no series of its own name


def test_panels_lie_beside_each_other_and_have_ids_of_their_own() -> None:
    panels = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        box = panel["gridPos"]
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert box["x"] + box["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_pod_monitor_reads_a_port_that_all_pods_have() -> None:
    (monitor,) = documents(FOLDER / "podmonitor.yaml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for path in SERVICES:
        cluster = service_of(path).spec.rayClusterConfig
        for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs):
            assert endpoint["port"] in {one.name for one in group.template.spec.containers[0].ports}


# ------------------------------------------------------------------ the image


def test_the_image_runs_as_nobody_in_particular_and_copies_what_there_is() -> None:
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    assert [words[1] for words in lines if words[0] == "FROM"] == ["python:3.11-slim"] * 2
    assert [words[1] for words in lines if words[0] == "USER"] == ["1000"]
    copied = [name for words in lines if words[0] == "COPY" and "--from=wheel" not in words for name in words[1:-1]]
    assert [name for name in copied if not (REPO / name).exists()] == []
    packages = re.findall(r'"tournant\.\w+" = "(\w+)"', (REPO / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(packages) <= set(copied)
    for module in re.findall(r"tournant((?:\.\w+)+)", text):
        assert (REPO / f"{module.strip('.').replace('.', '/')}.py").exists(), module
