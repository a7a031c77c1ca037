"""The one schema of a service: flags, YAML files and `build_app(args)` all end in a `ServiceConfig`.

Owns names, limits and error texts of what an operator may set, and the reading of Serve files. Light on purpose:
neither Ray nor torch is imported, so that the command line answers at once.

Invariants:
 1. Everything raises ConfigError with one line per fault; an unknown key names the nearest known one. Nothing is
    ignored.
 2. Engine fields have one definition, `EngineConfig`; here they are only split into `engine:` and `advanced:`. What is
    about tiers below the device is kv_store_config.py's.
 3. A file that loads here means the same to `serve deploy`.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    model_serializer,
    model_validator,
)

from tournant.cluster.node_store import StorePlan
from tournant.deploy.access_config import AccessConfig, AccessSection
from tournant.deploy.kv_store_config import (
    FAULT_KEYS,
    KV_ADVANCED_KEYS,
    KV_STORE_KEYS,
    NEEDS_HOST,
    KVStoreConfig,
    read_kv_store,
)
from tournant.deploy.yaml_file import read_yaml
from tournant.kvstore.config import parse_bytes
from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError

APP_NAME = "tournant"
DEPLOYMENT_NAME, INGRESS_NAME = "Replica", "Ingress"
IMPORT_PATH = "tournant.deploy.app:build_app"

BYTE_KEYS = frozenset({"kv_cache_bytes", "overflow_host_bytes", "overflow_disk_bytes"})
ADVANCED_KEYS = frozenset(
    {
        "block_tokens",
        "max_num_batched_tokens",
        "num_in_flight",
        "num_threads",
        "overflow_attention",
        "overflow_disk_bytes",
        "overflow_disk_bytes_per_s",
        "overflow_folder",
        "overflow_host_bytes",
        "overflow_host_bytes_per_s",
        "quantization",
        "sparse_attention",
        "weights_offload",
    }
)
ENGINE_KEYS = frozenset(field.name for field in fields(EngineConfig)) - ADVANCED_KEYS
SERVICE_ADVANCED_KEYS = frozenset({"weights_drain_s", "max_queued_tokens"})  # fields of ServiceConfig

# What a Serve file may hold (ray.serve.schema), and of that what `tournant serve` carries out.
SERVE_KEYS = frozenset(
    {
        "proxy_location",
        "http_options",
        "grpc_options",
        "controller_options",
        "logging_config",
        "tracing_config",
        "applications",
        "target_capacity",
    }
)
SERVE_KEYS_USED = frozenset({"proxy_location", "http_options", "applications"})
HTTP_KEYS = frozenset(
    {
        "host",
        "port",
        "root_path",
        "request_timeout_s",
        "keep_alive_timeout_s",
        "ssl_keyfile",
        "ssl_certfile",
        "ssl_keyfile_password",
        "ssl_ca_certs",
    }
)
APPLICATION_KEYS = frozenset(
    {
        "name",
        "route_prefix",
        "import_path",
        "runtime_env",
        "host",
        "port",
        "deployments",
        "autoscaling_policy",
        "args",
        "logging_config",
        "external_scaler_enabled",
    }
)
APPLICATION_KEYS_USED = frozenset({"name", "route_prefix", "import_path", "args", "deployments"})
DEPLOYMENT_KEYS = frozenset(
    {
        "name",
        "num_replicas",
        "max_ongoing_requests",
        "max_queued_requests",
        "backpressure_config",
        "user_config",
        "autoscaling_config",
        "graceful_shutdown_wait_loop_s",
        "graceful_shutdown_timeout_s",
        "health_check_period_s",
        "health_check_timeout_s",
        "ray_actor_options",
        "placement_group_bundles",
        "placement_group_strategy",
        "placement_group_bundle_label_selector",
        "max_replicas_per_node",
        "logging_config",
        "request_router_config",
        "gang_scheduling_config",
        "deployment_actors",
        "rolling_update_percentage",
        "max_surge_percent",
    }
)
Model = TypeVar("Model", bound=BaseModel)


def _bytes(name: str, value: Any) -> Any:
    """Bytes of "1073741824", "512MiB", "1.5 GiB" or "2GB"; what is no text is left as it is. Raises ConfigError."""
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ConfigError(f"{name} is {reprlib.repr(value)}; {error}") from None


@dataclass(frozen=True)
class _Sections:
    """A section and its share of `advanced:` as they came, until one configuration is made of both."""

    own: Any
    advanced: Any


def _engine_config(value: Any) -> Any:
    if not isinstance(value, _Sections):
        return value
    faults: list[str] = []
    found: dict[str, Any] = {}
    for section, data, known in (("engine", value.own, ENGINE_KEYS), ("advanced", value.advanced, ADVANCED_KEYS)):
        if not isinstance(data, Mapping | None):
            faults.append(f"{section} is {reprlib.repr(data)}; it must be a mapping of names to values")
            continue
        for key, item in (data or {}).items():
            if key not in known:
                faults.append(unknown_key(f"{section}.{key}", _ALL_KEYS))
                continue
            try:
                found[key] = _bytes(key, item) if key in BYTE_KEYS else item
                EngineConfig(**{key: found[key]})
            except ConfigError as error:
                faults.append(f"{section}.{error}")
    if faults:
        raise ValueError("\n".join(faults))
    return EngineConfig(**found)


def _kv_store_config(value: Any) -> Any:
    if not isinstance(value, _Sections):
        return value
    section = {} if value.own is None else value.own
    if not isinstance(section, Mapping):
        raise ValueError(f"kv_store is {reprlib.repr(section)}; it must be a mapping of names to values")
    faults = [unknown_key(f"kv_store.{key}", _ALL_KEYS) for key in section if key not in KV_STORE_KEYS]
    try:
        found = read_kv_store({key: item for key, item in section.items() if key in KV_STORE_KEYS}, value.advanced)
    except ConfigError as error:
        faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))
    return found


class ServiceConfig(BaseModel):
    """What an operator chooses about a service. Frozen; made by `parse_config` or `load_config_file`.

    model: folder with config.json and safetensors, a .gguf file, or a hub id; None = SmolLM2-135M-Instruct;
    served_model_name: what clients call it, None = the model's own name; host, port: where `tournant serve` listens
    (a Serve file says it in http_options); num_replicas: engines that share the requests; request_timeout_s: longest
    life of a request; max_body_bytes: largest request body; ingress: "direct" = every replica serves HTTP itself,
    "resilient" = a deployment of its own does, and answers go on in another engine when theirs is lost;
    log_level: of the service's own logs; cache_dir: where conversions are kept, None = the user's cache folder;
    weights_drain_s: how long running requests may go on when the weights are changed, and with a resilient ingress when
    a replica ends; max_queued_tokens: tokens of prompts that may wait to be computed, None = as many as all requests
    that may be outstanding have at MEAN_PROMPT_TOKENS each (both are keys of `advanced:`); access: who may come in.
    engine: `EngineConfig`; kv_store: `KVStoreConfig`; `advanced:` may set more of both.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    served_model_name: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    host: Annotated[str, Field(min_length=1, max_length=255)] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    num_replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    request_timeout_s: Annotated[float, Field(gt=0, le=7 * 86400.0)] = 600.0
    max_body_bytes: Annotated[
        int, BeforeValidator(partial(_bytes, "max_body_bytes")), Field(ge=1 << 10, le=1 << 30)
    ] = 8 << 20
    ingress: Literal["direct", "resilient"] = "direct"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    cache_dir: str | None = None
    engine: Annotated[InstanceOf[EngineConfig], BeforeValidator(_engine_config)] = EngineConfig()
    kv_store: Annotated[InstanceOf[KVStoreConfig], BeforeValidator(_kv_store_config)] = KVStoreConfig()
    access: AccessSection = AccessConfig()
    weights_drain_s: Annotated[float, Field(ge=0, le=86400.0, alias="advanced.weights_drain_s")] = 30.0
    max_queued_tokens: Annotated[int | None, Field(ge=1, le=1 << 40, alias="advanced.max_queued_tokens")] = None

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        """Share `advanced` out between `engine` and `kv_store`; what is no mapping is left to be refused."""
        if not isinstance(data, Mapping):
            return data
        found = {key: value for key, value in data.items() if key != "advanced"}
        advanced, of_tiers = data.get("advanced"), {}
        if isinstance(advanced, Mapping):
            of_tiers = {key: value for key, value in advanced.items() if key in KV_ADVANCED_KEYS}
            found |= {f"advanced.{key}": value for key, value in advanced.items() if key in SERVICE_ADVANCED_KEYS}
            others = KV_ADVANCED_KEYS | SERVICE_ADVANCED_KEYS
            advanced = {key: value for key, value in advanced.items() if key not in others}
        for name, kind, share in (("engine", EngineConfig, advanced), ("kv_store", KVStoreConfig, of_tiers)):
            if not isinstance(found.get(name), kind):
                found[name] = _Sections(found.get(name), share)
        return found

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        """The two sections must go together."""
        if self.kv_store.host_bytes and not self.engine.enable_prefix_caching:
            raise ValueError(
                f"kv_store.host_bytes is {self.kv_store.host_bytes}, but engine.enable_prefix_caching is false, and "
                "without it no block is found again; leave one of them out"
            )
        no_default = self.engine.device == "cpu" or not self.engine.enable_prefix_caching
        if self.kv_store.nvme_bytes and self.kv_store.host_bytes is None and no_default:
            raise ValueError(NEEDS_HOST)
        return self

    def store_plan(self, *, on_gpu: bool) -> StorePlan | None:
        """The node store to run on this machine, None for none; errors as of `KVStoreConfig.plan`."""
        return self.kv_store.plan(on_gpu=on_gpu, prefix_caching=self.engine.enable_prefix_caching)

    @property
    def weights_dtype(self) -> str:
        """What a .gguf file is converted to."""
        return "bfloat16" if self.engine.dtype == "auto" else self.engine.dtype

    @property
    def cache_path(self) -> Path | None:
        """`cache_dir` as a path."""
        return None if self.cache_dir is None else Path(self.cache_dir).expanduser()

    @model_serializer
    def to_args(self) -> dict[str, Any]:
        """Plain values that `parse_config` turns into an equal configuration: only what differs from the defaults."""
        plain = {
            name: getattr(self, name)
            for name, field in type(self).model_fields.items()
            if name not in ("engine", "kv_store") and getattr(self, name) != field.default
        }
        changed = {
            field.name: getattr(self.engine, field.name)
            for field in fields(EngineConfig)
            if getattr(self.engine, field.name) != field.default
        }
        advanced = {name: value for name, value in changed.items() if name in ADVANCED_KEYS} | dict(
            self.kv_store.advanced
        )
        advanced |= {name: plain.pop(name) for name in SERVICE_ADVANCED_KEYS & plain.keys()}
        if "access" in plain:
            plain["access"] = self.access.model_dump(exclude_defaults=True)
        engine = {name: value for name, value in changed.items() if name in ENGINE_KEYS}
        sections = {"engine": engine, "kv_store": self.kv_store.to_plain(), "advanced": advanced}
        return plain | {section: values for section, values in sections.items() if values}


_TOP_KEYS = frozenset(ServiceConfig.model_fields) - SERVICE_ADVANCED_KEYS | {"advanced"}
_ALL_ADVANCED = ADVANCED_KEYS | SERVICE_ADVANCED_KEYS | KV_ADVANCED_KEYS
_ALL_KEYS = [
    *sorted(_TOP_KEYS),
    *(f"engine.{key}" for key in sorted(ENGINE_KEYS)),
    *(f"kv_store.{key}" for key in sorted(KV_STORE_KEYS)),
    *(f"access.{key}" for key in AccessConfig.model_fields),
    *(f"advanced.{key}" for key in sorted(_ALL_ADVANCED - FAULT_KEYS)),  # those are for tests
]


def is_known_key(key: str) -> bool:
    """Whether a configuration has this key, named with its section."""
    return key in _ALL_KEYS


def unknown_key(key: str, known: Iterable[str]) -> str:
    """ "unknown key x; did you mean y?", where a key in the wrong section counts as near; else what its section has."""
    last = {name.rpartition(".")[2]: name for name in known}
    section, _, wrong = str(key).rpartition(".")
    if near := difflib.get_close_matches(wrong, last, n=1):
        return f"unknown key {key}; did you mean {last[near[0]]}?"
    prefix = f"{section}." if section else ""
    return f"unknown key {key}; known keys: {', '.join(name for name in last.values() if name.startswith(prefix))}"


def parse_config(data: Mapping[str, Any]) -> ServiceConfig:
    """A ServiceConfig from plain values (YAML args, flags). Raises ConfigError, one line per fault."""
    return _validated(ServiceConfig, data)


def _validated(kind: type[Model], data: Mapping[str, Any]) -> Model:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_fault(details) for details in error.errors())) from None


def _fault(details: Any) -> str:
    key, value = ".".join(str(part) for part in details["loc"]), details["input"]
    match details["type"]:
        case "extra_forbidden":
            return unknown_key(key, _ALL_KEYS)
        case "value_error":
            return str(details["ctx"]["error"])
        case "literal_error":
            return (
                f"{key} is {reprlib.repr(value)}; it must be one of {details['ctx']['expected'].replace(' or ', ', ')}"
            )
        case _ if not key:
            return f"the configuration is {reprlib.repr(value)}; it must be a mapping of names to values"
        case _:
            message = details["msg"].replace("Input should be", "it must be").replace("String should", "it should")
            return f"{key} is {reprlib.repr(value)}; {message}"


class ServeFile(BaseModel):
    """A Serve file with one application, ours, as `tournant serve` carries it out.

    proxy_location, http_options: of Serve's proxies, without host and port, which are in config;
    deployment_options: overrides of what Serve is told about the replica; ingress_options: the same of the ingress, if
    that is a deployment of its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: ServiceConfig = ServiceConfig()
    name: str = APP_NAME
    route_prefix: str = "/"
    proxy_location: Literal["Disabled", "HeadOnly", "EveryNode"] | None = None
    http_options: dict[str, Any] = {}
    deployment_options: dict[str, Any] = {}
    ingress_options: dict[str, Any] = {}

    @property
    def replicas(self) -> tuple[int, int]:
        """Engines that there are at first, and that there may be, as far as the file says it."""
        told, scaling = self.deployment_options, self.deployment_options.get("autoscaling_config")
        first = most = told.get("num_replicas") or self.config.num_replicas
        if isinstance(scaling, Mapping):
            first, most = scaling.get("initial_replicas"), scaling.get("max_replicas", 1)
            first = scaling.get("min_replicas", 1) if first is None else first
        return (first, most) if isinstance(first, int) and isinstance(most, int) else (1, 1)


def load_config_file(path: Path) -> ServeFile:
    """Read a Serve file.

    Raises ConfigError as `read_yaml` does, and when the file holds something unknown or something that only
    `serve deploy` carries out. A file of `args` alone is the configuration of one service.
    """
    data = read_yaml(path)
    try:
        return _serve_file(data)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def is_args(data: Any) -> bool:
    """Whether a file holds `args` alone, not what Serve reads."""
    return isinstance(data, Mapping) and not data.keys() & SERVE_KEYS and bool(data.keys() & _TOP_KEYS)


def _serve_file(data: Any) -> ServeFile:
    if is_args(data):
        return ServeFile(config=parse_config(data))
    faults = _faults_of_keys("", data, SERVE_KEYS, SERVE_KEYS_USED)
    applications = data.get("applications") if isinstance(data, Mapping) else None
    http = data.get("http_options") or {} if isinstance(data, Mapping) else {}
    faults += _faults_of_keys("http_options", http, HTTP_KEYS, HTTP_KEYS)
    if not isinstance(applications, list) or len(applications) != 1:
        raise ConfigError("\n".join([*faults, f"applications must be a list of one application, {APP_NAME}"]))
    app = applications[0]
    faults += _faults_of_keys("applications[0]", app, APPLICATION_KEYS, APPLICATION_KEYS_USED)
    if faults:
        raise ConfigError("\n".join(faults))
    if app.get("import_path") != IMPORT_PATH:
        faults.append(
            f"applications[0].import_path is {reprlib.repr(app.get('import_path'))}; it must be {IMPORT_PATH}"
        )
    config = ServiceConfig()
    try:
        config = parse_config(refuse_address(app.get("args") or {}))
        config = parse_config({**config.to_args(), **{key: http[key] for key in ("host", "port") if key in http}})
    except ConfigError as error:
        faults.append(str(error))
    names = [DEPLOYMENT_NAME, INGRESS_NAME] if config.ingress == "resilient" else [DEPLOYMENT_NAME]
    options, more = _deployments(app.get("deployments") or [], names)
    if faults := [*more, *faults]:
        raise ConfigError("\n".join(faults))
    plain = {
        "name": app.get("name", APP_NAME),
        "route_prefix": app.get("route_prefix", "/"),
        "proxy_location": data.get("proxy_location"),
        "http_options": {key: value for key, value in http.items() if key not in ("host", "port")},
        "deployment_options": options.get(DEPLOYMENT_NAME, {}),
        "ingress_options": options.get(INGRESS_NAME, {}),
    }
    return _validated(ServeFile, {"config": config, **plain})


def _deployments(overrides: Any, names: list[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What a file tells Serve about deployments, by name, and its faults. names: of those that there are."""
    if not isinstance(overrides, list) or len(overrides) > len(names):
        count = "one deployment" if len(names) == 1 else f"at most {len(names)} deployments"
        return {}, [f"applications[0].deployments must be a list of {count}, {' and '.join(names)}"]
    found: dict[str, dict[str, Any]] = {}
    faults: list[str] = []
    for place, override in enumerate(overrides):
        where = f"applications[0].deployments[{place}]"
        faults += _faults_of_keys(where, override, DEPLOYMENT_KEYS, DEPLOYMENT_KEYS)
        if isinstance(override, Mapping):
            name = override.get("name")
            if name not in names or name in found:
                faults.append(f"{where}.name is {reprlib.repr(name)}; it must be {' or '.join(names)}")
            found[str(name)] = {key: value for key, value in override.items() if key != "name"}
    return found, faults


def refuse_address(args: Any) -> Any:
    """`args` of an application unchanged. Raises ConfigError when they name an address, which Serve would not use."""
    if isinstance(args, Mapping) and (wrong := sorted({"host", "port"} & args.keys())):
        raise ConfigError(f"args.{wrong[0]}: the address of a Serve file stands in http_options, not in args")
    return args


def _faults_of_keys(section: str, data: Any, known: frozenset[str], used: frozenset[str]) -> list[str]:
    if not isinstance(data, Mapping):
        return [f"{section or 'the file'} is {reprlib.repr(data)}; it must be a mapping of names to values"]
    prefix = f"{section}." if section else ""
    faults = [
        unknown_key(prefix + str(key), [prefix + name for name in sorted(known)]) for key in data if key not in known
    ]
    faults += [
        f"{prefix}{key} is known to Serve, but `tournant serve` does not carry it out; use `serve deploy`"
        for key in data
        if key in known - used
    ]
    return faults
