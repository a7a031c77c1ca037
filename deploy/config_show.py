"""The resolved configuration of a Serve file: every key of ours with its value, and what Serve is told of deployments.

The result is a Serve file again and means the same, but for secrets, which are redacted. It imports what a replica
imports, so the command line starts it as a process of its own: `python -m tournant.deploy.config_show FILE`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import yaml
from pydantic import BaseModel
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from tournant.deploy.app import serve_options
from tournant.deploy.config import (
    ADVANCED_KEYS,
    DEPLOYMENT_NAME,
    IMPORT_PATH,
    INGRESS_NAME,
    SERVICE_ADVANCED_KEYS,
    ServiceConfig,
    is_args,
    parse_config,
)
from tournant.deploy.config_check import OURS, run
from tournant.deploy.kv_store_config import KV_STORE_KEYS, tier_values
from tournant.deploy.redaction import redacted

NOTE = "# Where device is auto, resources are those of a cluster without GPUs; with some, a rank takes one.\n"
SERVE_SAYS = frozenset({"host", "port"})  # in http_options


def resolve(data: Mapping[str, Any]) -> dict[str, Any]:
    """A valid file with everything that it leaves open, secrets redacted. Plain values."""
    if is_args(data):
        config = parse_config(data)
        http: dict[str, Any] = {"host": config.host, "port": config.port}
        data = {"http_options": http, "applications": [{"name": "tournant", "import_path": IMPORT_PATH, "args": data}]}
    rest = {key: value for key, value in data.items() if key not in ("http_options", "applications")}
    options = HTTPOptionsSchema.model_validate(data.get("http_options", {})).model_dump()
    found = {
        "proxy_location": ServeDeploySchema.model_fields["proxy_location"].default.value,
        **rest,
        "http_options": {key: value for key, value in options.items() if value is not None},
        "applications": [_resolve_application(app) for app in data["applications"]],
    }
    plain: dict[str, Any] = redacted(found)
    return plain


def _resolve_application(app: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {key: ServeApplicationSchema.model_fields[key].default for key in ("name", "route_prefix")}
    if app["import_path"] not in OURS:
        return defaults | dict(app)
    config = parse_config({key: value for key, value in (app.get("args") or {}).items() if key not in SERVE_SAYS})
    overrides = {one["name"]: one for one in app.get("deployments") or []}
    options = serve_options(config, overrides.get(DEPLOYMENT_NAME), overrides.get(INGRESS_NAME))
    deployments = [{"name": name, **told} for name, told in options.items()]
    return defaults | dict(app) | {"args": all_args(config), "deployments": deployments}


def all_args(config: ServiceConfig) -> dict[str, Any]:
    """`args` with every key, also those that are as by default; without the address, which Serve has."""
    engine = asdict(config.engine)
    advanced = {name: getattr(config, name) for name in sorted(SERVICE_ADVANCED_KEYS)}
    advanced |= {name: engine.pop(name) for name in sorted(ADVANCED_KEYS)}
    sections = {
        "engine": engine,
        "kv_store": {name: getattr(config.kv_store, name) for name in sorted(KV_STORE_KEYS)},
        "advanced": advanced | tier_values(config.kv_store),
    }
    others = ServiceConfig.model_fields.keys() - SERVE_SAYS - SERVICE_ADVANCED_KEYS - sections.keys()
    own = {name: _plain(getattr(config, name)) for name in ServiceConfig.model_fields if name in others}
    return own | sections


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def main(argv: Sequence[str]) -> int:
    """Print one file resolved, or its faults on standard error."""
    return run(argv, "config_show", lambda _, data: NOTE + _dump(resolve(data)))


def _dump(data: Mapping[str, Any]) -> str:
    found: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
