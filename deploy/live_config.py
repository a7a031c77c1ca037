"""Which keys of a configuration can change while the service runs, through Serve's `user_config`.

`user_config` has the sections of `args` and lies over them: a key that it names is changed at once in every replica,
without a restart, and one that it names no longer is again as `args` say. What limits of the engine or of Serve were
made from cannot be raised above `args`.

With `ingress: resilient` the way in and the engines are deployments with keys of their own.

Owns what is allowed; deployments take it up (app.py, resilient.py).
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tournant.deploy.config import (
    DEPLOYMENT_NAME,
    INGRESS_NAME,
    ServiceConfig,
    is_known_key,
    parse_config,
    unknown_key,
)
from tournant.workers.errors import ConfigError

if TYPE_CHECKING:
    from tournant.deploy.frontend import Frontend

OF_WAY_IN = ("log_level", "request_timeout_s", "advanced.max_queued_tokens")
OF_ENGINE = ("log_level", "advanced.weights_drain_s")
LIVE_KEYS = (*OF_WAY_IN, "engine.max_queued_requests", "advanced.weights_drain_s")
_SECTIONS = ("engine", "kv_store", "advanced")


def live_keys(config: ServiceConfig, deployment: str) -> tuple[str, ...]:
    """What can change without a restart in a deployment of a service."""
    if config.ingress == "direct":
        return LIVE_KEYS
    return OF_WAY_IN if deployment == INGRESS_NAME else OF_ENGINE


def with_user_config(configured: ServiceConfig, user_config: Any, deployment: str = DEPLOYMENT_NAME) -> ServiceConfig:
    """The configuration with a `user_config` of a deployment over what `args` say.

    Raises ConfigError, one line per fault, for a key that is not live, a wrong value, and a limit above that of `args`.
    """
    live = live_keys(configured, deployment)
    if not isinstance(user_config, Mapping):
        raise ConfigError(f"user_config is {reprlib.repr(user_config)}; it must be a mapping of names to values")
    args = configured.to_args()
    faults: list[str] = []
    for key, value in user_config.items():
        if key not in _SECTIONS:
            faults += _refused(str(key), live)
            args[key] = value
        elif isinstance(value, Mapping):
            faults += [line for name in value for line in _refused(f"{key}.{name}", live)]
            args[key] = {**args.get(key, {}), **value}
        else:
            faults.append(f"user_config.{key} is {reprlib.repr(value)}; it must be a mapping of names to values")
    if faults:
        raise ConfigError("\n".join(faults))
    try:
        changed = parse_config(args)
    except ConfigError as error:
        raise ConfigError("\n".join(f"user_config.{line}" for line in str(error).splitlines())) from None
    faults = [
        f"user_config.{name} is {new:g}; without a restart it can be at most {limit:g}, as in args"
        for name, new, limit in _limits(changed, configured)
        if new > limit
    ]
    if faults:
        raise ConfigError("\n".join(faults))
    return changed


def _limits(changed: ServiceConfig, configured: ServiceConfig) -> list[tuple[str, float, float]]:
    """Keys with their new value and the highest: what an engine takes, and how long Serve waits for a replica that
    ends, are as `args` made them.
    """
    if configured.ingress == "direct":
        new, most = changed.engine.max_queued_requests, configured.engine.max_queued_requests
        return [("engine.max_queued_requests", new, most)]
    return [
        ("request_timeout_s", changed.request_timeout_s, configured.request_timeout_s),
        ("advanced.weights_drain_s", changed.weights_drain_s, configured.weights_drain_s),
    ]


def _refused(key: str, live: Sequence[str]) -> list[str]:
    if key in live:
        return []
    if is_known_key(key):
        return [
            f"user_config.{key} cannot change here while the service runs; {', '.join(live)} can. A change of args "
            "replaces the replicas one after another"
        ]
    return [f"user_config: {unknown_key(key, live)}"]


def take_up(config: ServiceConfig, frontend: Frontend | None) -> None:
    """Let the frontend, and the service's loggers in this process, follow the live keys of `config`.

    Requests that run keep the time limit that they began with.
    """
    logging.getLogger("tournant").setLevel(config.log_level.upper())
    if frontend is not None:
        frontend.options = replace(
            frontend.options,
            request_timeout_s=config.request_timeout_s,
            max_queued_requests=config.engine.max_queued_requests if config.ingress == "direct" else None,
            max_queued_tokens=config.max_queued_tokens,
        )
