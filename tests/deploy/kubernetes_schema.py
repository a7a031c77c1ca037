"""What our manifests use of KubeRay's, Kubernetes' and the Prometheus operator's schemas, unknown keys refused.

Fields and limits as in the CRDs of KubeRay 1.5 and the core API v1; what we do not use is left out on purpose.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

NAME = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME)]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti)?$")]
Seconds = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: Name
    labels: dict[str, str] = {}


class Labels(Strict):
    labels: dict[str, str]


class Requirement(Strict):
    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: list[str] = []


class Selector(Strict):
    matchLabels: dict[str, str] = {}  # noqa: N815 - Kubernetes' names, here and below
    matchExpressions: list[Requirement] = []  # noqa: N815


class SecretKey(Strict):
    name: Name
    key: str


class ValueFrom(Strict):
    secretKeyRef: SecretKey  # noqa: N815


class Environment(Strict):
    name: str
    value: str


class Resources(Strict):
    requests: dict[str, Quantity]
    limits: dict[str, Quantity] = {}


class ContainerPort(Strict):
    name: Annotated[str, Field(pattern=NAME, max_length=15)]
    containerPort: Port  # noqa: N815


class HttpGet(Strict):
    path: Annotated[str, Field(pattern="^/")]
    port: Port


class Probe(Strict):
    httpGet: HttpGet  # noqa: N815
    periodSeconds: Annotated[int, Field(ge=1)]  # noqa: N815
    timeoutSeconds: Annotated[int, Field(ge=1)] = 1  # noqa: N815
    failureThreshold: Annotated[int, Field(ge=1)]  # noqa: N815


class Mount(Strict):
    name: Name
    mountPath: Annotated[str, Field(pattern="^/")]  # noqa: N815
    readOnly: bool = False  # noqa: N815


class Capabilities(Strict):
    drop: list[str]


class ContainerSecurity(Strict):
    allowPrivilegeEscalation: bool  # noqa: N815
    capabilities: Capabilities


class Container(Strict):
    name: Name
    image: Annotated[str, Field(pattern=r"^[a-z0-9./-]+:[\w.-]+$")]
    env: list[Environment] = []
    securityContext: ContainerSecurity  # noqa: N815
    resources: Resources
    ports: list[ContainerPort]
    startupProbe: Probe  # noqa: N815
    readinessProbe: Probe  # noqa: N815
    livenessProbe: Probe  # noqa: N815
    volumeMounts: list[Mount]  # noqa: N815


class EmptyDir(Strict):
    medium: Literal["", "Memory"] = ""
    sizeLimit: Quantity  # noqa: N815


class ClaimSpec(Strict):
    accessModes: list[Literal["ReadWriteOnce", "ReadWriteOncePod"]]  # noqa: N815
    storageClassName: Name  # noqa: N815
    resources: Resources


class ClaimTemplate(Strict):
    spec: ClaimSpec


class Ephemeral(Strict):
    volumeClaimTemplate: ClaimTemplate  # noqa: N815


class ClaimRef(Strict):
    claimName: Name  # noqa: N815
    readOnly: bool = False  # noqa: N815


class Volume(Strict):
    name: Name
    emptyDir: EmptyDir | None = None  # noqa: N815
    ephemeral: Ephemeral | None = None
    persistentVolumeClaim: ClaimRef | None = None  # noqa: N815

    @model_validator(mode="after")
    def _one_kind(self) -> Volume:
        kinds = [kind for kind in (self.emptyDir, self.ephemeral, self.persistentVolumeClaim) if kind is not None]
        if len(kinds) != 1:
            raise ValueError(f"the volume {self.name} has {len(kinds)} kinds; it must have one")
        return self


class Seccomp(Strict):
    type: Literal["RuntimeDefault"]


class PodSecurity(Strict):
    runAsNonRoot: bool  # noqa: N815
    runAsUser: int  # noqa: N815
    runAsGroup: int  # noqa: N815
    fsGroup: int  # noqa: N815
    seccompProfile: Seccomp  # noqa: N815


class Spread(Strict):
    maxSkew: Annotated[int, Field(ge=1)]  # noqa: N815
    topologyKey: str  # noqa: N815
    whenUnsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]  # noqa: N815
    labelSelector: Selector  # noqa: N815


class PodSpec(Strict):
    terminationGracePeriodSeconds: Seconds  # noqa: N815
    securityContext: PodSecurity  # noqa: N815
    topologySpreadConstraints: list[Spread] = []  # noqa: N815
    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume]


class PodTemplate(Strict):
    metadata: Labels | None = None
    spec: PodSpec


class Group(Strict):
    rayStartParams: dict[str, str]  # noqa: N815
    template: PodTemplate


class WorkerGroup(Group):
    groupName: Name  # noqa: N815
    replicas: Annotated[int, Field(ge=0)]
    minReplicas: Annotated[int, Field(ge=0)]  # noqa: N815
    maxReplicas: Annotated[int, Field(ge=0)]  # noqa: N815


class RedisPassword(Strict):
    valueFrom: ValueFrom  # noqa: N815


class FaultTolerance(Strict):
    redisAddress: str  # noqa: N815
    redisPassword: RedisPassword  # noqa: N815


class AuthOptions(Strict):
    mode: Literal["token", "disabled"]


class RayCluster(Strict):
    rayVersion: str  # noqa: N815
    authOptions: AuthOptions  # noqa: N815
    gcsFaultToleranceOptions: FaultTolerance | None = None  # noqa: N815
    headGroupSpec: Group  # noqa: N815
    workerGroupSpecs: Annotated[list[WorkerGroup], Field(min_length=1)]  # noqa: N815


class RayServiceSpec(Strict):
    serveConfigV2: str  # noqa: N815
    excludeHeadPodFromServeSvc: bool  # noqa: N815
    rayClusterDeletionDelaySeconds: Seconds  # noqa: N815
    rayClusterConfig: RayCluster  # noqa: N815


class RayService(Strict):
    apiVersion: Literal["ray.io/v1"]  # noqa: N815
    kind: Literal["RayService"]
    metadata: Metadata
    spec: RayServiceSpec


class BudgetSpec(Strict):
    maxUnavailable: int  # noqa: N815
    selector: Selector


class PodDisruptionBudget(Strict):
    apiVersion: Literal["policy/v1"]  # noqa: N815
    kind: Literal["PodDisruptionBudget"]
    metadata: Metadata
    spec: BudgetSpec


class Peer(Strict):
    podSelector: Selector | None = None  # noqa: N815
    namespaceSelector: Selector | None = None  # noqa: N815


class PolicyPort(Strict):
    protocol: Literal["TCP"]
    port: Port


class IngressRule(Strict):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    from_: Annotated[list[Peer], Field(alias="from")] = []
    ports: list[PolicyPort] = []


class PolicySpec(Strict):
    podSelector: Selector  # noqa: N815
    policyTypes: list[Literal["Ingress", "Egress"]]  # noqa: N815
    ingress: list[IngressRule]


class NetworkPolicy(Strict):
    apiVersion: Literal["networking.k8s.io/v1"]  # noqa: N815
    kind: Literal["NetworkPolicy"]
    metadata: Metadata
    spec: PolicySpec


class Relabeling(Strict):
    action: Literal["replace"]
    sourceLabels: list[str]  # noqa: N815
    targetLabel: str  # noqa: N815


class Endpoint(Strict):
    port: str
    path: str
    interval: Annotated[str, Field(pattern=r"^[0-9]+s$")]
    relabelings: list[Relabeling]


class PodMonitorSpec(Strict):
    jobLabel: str  # noqa: N815
    selector: Selector
    podMetricsEndpoints: list[Endpoint]  # noqa: N815


class PodMonitor(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]  # noqa: N815
    kind: Literal["PodMonitor"]
    metadata: Metadata
    spec: PodMonitorSpec


class Annotations(Strict):
    summary: str


class Alert(Strict):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    alert: Annotated[str, Field(pattern=r"^Tournant[A-Za-z]+$")]
    expr: str
    for_: Annotated[str, Field(alias="for", pattern=r"^[0-9]+[mh]$")] = "0m"
    labels: dict[Literal["severity"], Literal["warning", "critical"]]
    annotations: Annotations


class RuleGroup(Strict):
    name: Name
    rules: list[Alert]


class RuleSpec(Strict):
    groups: list[RuleGroup]


class PrometheusRule(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]  # noqa: N815
    kind: Literal["PrometheusRule"]
    metadata: Metadata
    spec: RuleSpec


KINDS: dict[str, type[Strict]] = {
    kind.__name__: kind for kind in (RayService, PodDisruptionBudget, NetworkPolicy, PodMonitor, PrometheusRule)
}


def validate(document: Any) -> Strict:
    """A manifest as an object of its kind. Raises KeyError and ValidationError."""
    return KINDS[document["kind"]].model_validate(document)
