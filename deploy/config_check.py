"""What is wrong with a Serve file, all of it at once: by Serve's own schema, and by ours for applications of ours.

Serve ignores keys that it does not know, at every level; here they are faults that name the nearest known key. What
the schema leaves open (autoscaling, routers, gangs) is checked by the class that Serve will make of it.

Owns the faults of whole files; of `args` those are config.py's, of `user_config` live_config.py's. Imports Ray, so the
command line starts it as a process of its own: `python -m tournant.deploy.config_check FILE`.

Invariants:
 1. A fault is one line: the path of the key, what stands there, what it must be or which key is near.
 2. Code that a file names is imported only if it is ours.
"""

from __future__ import annotations

import difflib
import importlib
import re
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ray.runtime_env import RuntimeEnv
from ray.serve.config import AutoscalingPolicy, DeploymentActorConfig, RequestRouterConfig
from ray.serve.schema import ServeDeploySchema

from tournant.cluster.autoscaling import PolicyConfig
from tournant.cluster.kv_router import RouterOptions
from tournant.deploy.access import Access
from tournant.deploy.access_config import AccessConfig
from tournant.deploy.config import (
    DEPLOYMENT_NAME,
    IMPORT_PATH,
    INGRESS_NAME,
    ServiceConfig,
    is_args,
    parse_config,
    unknown_key,
)
from tournant.deploy.live_config import with_user_config
from tournant.deploy.redaction import REDACTED, is_secret
from tournant.deploy.yaml_file import read_yaml
from tournant.workers.errors import ConfigError

OURS = (IMPORT_PATH, IMPORT_PATH.replace(":", "."))
NAMED_CLASSES = {  # keys whose text Serve imports when it makes an object of the class, and of what is given to that
    AutoscalingPolicy: ("policy_function", "policy_kwargs"),
    RequestRouterConfig: ("request_router_class", "request_router_kwargs"),
    DeploymentActorConfig: ("actor_class", "init_kwargs"),
}
OPTIONS: dict[str, Callable[[Mapping[str, Any]], object]] = {  # what reads the latter
    "tournant.cluster.autoscaling:ServingPolicy": PolicyConfig.parse,
    "tournant.cluster.kv_router:KVRouter": RouterOptions.parse,
}
_Within = tuple[type[BaseModel] | None, bool]
_REPR = reprlib.Repr()
_ROUTE = re.compile(r"/|(?:/[^/{}]+)+")
_REPR.maxstring = _REPR.maxother = 120
DEFAULT_NAME, DEFAULT_PREFIX = "default", "/"  # of an application, as Serve has them


def check(data: Any) -> list[str]:
    """Faults of what a file holds, one line each; none means that it is valid."""
    if is_args(data):
        return _faults_of(partial(parse_config, data))
    checker = _SchemaChecker()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Serve's, of what it will refuse some day
        checker.check_model(ServeDeploySchema, data, "")
    faults = list(checker.faults)
    applications = data.get("applications") if isinstance(data, Mapping) else None
    for place, app in enumerate(applications if isinstance(applications, list) else []):
        if not isinstance(app, Mapping):
            continue
        prefix, path = app.get("route_prefix", DEFAULT_PREFIX), app.get("import_path")
        if isinstance(prefix, str) and not _ROUTE.fullmatch(prefix):
            faults.append(f"applications[{place}].route_prefix is {_REPR.repr(prefix)}; it must be / or like /name")
        if path in OURS:
            faults += _faults_of_ours(app, f"applications[{place}]")
        elif isinstance(path, str) and path.startswith("tournant."):
            faults.append(f"applications[{place}].import_path is {_REPR.repr(path)}; it must be {IMPORT_PATH}")
    return faults


def describe(data: Any) -> str:
    """What a valid file will serve, in a line."""
    if is_args(data):
        return f"args of one service: {_told(parse_config(data))}"
    found = []
    for app in data["applications"]:
        name, prefix = app.get("name", DEFAULT_NAME), app.get("route_prefix", DEFAULT_PREFIX)
        what = "not ours, its args are unchecked"
        if app["import_path"] in OURS:
            what = _told(parse_config(app.get("args") or {}), app.get("deployments") or [])
        found.append(f"{name} at {prefix} ({what})")
    return ", ".join(found) or "no application"


def _told(config: ServiceConfig, overrides: Sequence[Mapping[str, Any]] = ()) -> str:
    engine, ranks = config.engine, config.engine.num_ranks
    told = next((one for one in overrides if one["name"] == DEPLOYMENT_NAME), {})
    number = told.get("num_replicas") or config.num_replicas
    scaling = told.get("autoscaling_config")
    if scaling:
        number = f"{scaling.get('min_replicas', 1)} to {scaling.get('max_replicas', 1)}"
    replicas = f"{number} replica{'s' * (number != 1)}"
    split = f" of {ranks} ranks" if ranks > 1 else ""
    return f"{config.model or 'the default model'}, {replicas}{split}, device {engine.device}, ingress {config.ingress}"


class _SchemaChecker:
    """Goes through data beside the model that Serve reads it with, and gathers what neither of them takes."""

    def __init__(self) -> None:
        self.faults: dict[str, None] = {}  # in the order in which they were found, each once

    def check_model(self, model: type[BaseModel], data: Any, where: str) -> dict[str, Any] | None:
        """What is right of the data, or None when no object can be made of that."""
        if not isinstance(data, Mapping):
            self._add(f"{where or 'the file'} is {_REPR.repr(data)}; it must be a mapping of names to values")
            return None
        plain: dict[str, Any] = {}
        prefix = f"{where}." if where else ""
        for key, value in data.items():
            field = model.model_fields.get(key)
            if field is None:
                self._add(_unknown(prefix, key, model.model_fields))
                continue
            keep, plain[key] = self._check_value(_model_within(field.annotation), value, prefix + key)
            if not keep:
                del plain[key]
        if model in NAMED_CLASSES:
            named, options = NAMED_CLASSES[model]
            self._check_class(prefix, plain.get(named), named, plain.get(options, {}))
            if model is not DeploymentActorConfig:
                plain.pop(named, None)
        missing = {key for key in data if key not in plain}
        return self._validate(model, plain, prefix, missing)

    def _check_value(self, found: _Within, value: Any, where: str) -> tuple[bool, Any]:
        """Whether the value, or what is right of it, can be given to the model that it is in; and that. found: what
        the value is about.
        """
        if where.endswith("runtime_env") and isinstance(value, Mapping):
            for key in value.keys() - RuntimeEnv.known_fields:
                self._add(_unknown(f"{where}.", key, sorted(RuntimeEnv.known_fields)))
        model, many = found
        if model is None or value is None or (many and not isinstance(value, list)):
            return True, value
        if not many:
            plain = self.check_model(model, value, where)
            return plain is not None, plain
        items = [self.check_model(model, item, f"{where}[{place}]") for place, item in enumerate(value)]
        return None not in items, items

    def _validate(
        self, model: type[BaseModel], plain: dict[str, Any], prefix: str, missing: set[str]
    ) -> dict[str, Any] | None:
        """As `check_model`. missing: keys that are written, but wrong."""
        given = dict(plain)
        errors = _errors(model, plain)
        if not errors:
            return plain
        if any(not details["loc"] for details in errors):  # then the fields were not looked at
            errors += _errors_by_field(model, given)
        wrong: dict[str, list[str]] = {}  # what is said of each value
        broken = False
        for details in errors:
            loc = details["loc"]
            if loc and loc[0] in given and not model.model_fields[str(loc[0])].is_required():
                plain.pop(str(loc[0]), None)
            else:
                broken = True
            path, value = _within(given, loc)
            if details["type"] == "missing":
                if loc[0] not in missing:
                    self._add(f"{prefix}{loc[-1]} is missing")
            elif isinstance(value, Mapping | list) and details["type"] == "value_error":
                self._add(f"{(prefix + path).rstrip('.') or 'the file'}: {_words(details)}")
            else:
                wrong.setdefault(f"{prefix}{path} is {shown(value, path)}", []).append(_words(details))
        for subject, words in wrong.items():
            self._add(f"{subject}; {' or '.join(dict.fromkeys(words))}")
        return None if broken else plain

    def _check_class(self, prefix: str, path: Any, key: str, options: Any) -> None:
        """What Serve is to import, and what it gives to that; what is ours must be there."""
        if path is None:
            return
        where = f"{prefix}{key} is {_REPR.repr(path)}"
        if not isinstance(path, str):
            self._add(f"{where}; it must be text such as package.module:Name")
            return
        module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
        if not module or not name:
            self._add(f"{where}; it must name what to import, such as package.module:Name")
        elif module.startswith("tournant."):
            try:
                found = hasattr(importlib.import_module(module), name)
            except ModuleNotFoundError:
                found = False
            near = difflib.get_close_matches(path, OPTIONS, n=1)
            if not found:
                self._add(f"{where}, which is not installed here{f'; did you mean {near[0]}?' if near else ''}")
        parse = OPTIONS.get(f"{module}:{name}")
        if parse is not None and isinstance(options, Mapping):
            for line in _faults_of(partial(parse, options)):
                self._add(prefix + line)

    def _add(self, fault: str) -> None:
        self.faults[fault] = None


def _model_within(annotation: Any) -> _Within:
    """The model that an annotation such as `list[Model] | None` or `dict | Model` is about, and whether in a list."""
    if get_origin(annotation) is None:
        known = isinstance(annotation, type) and issubclass(annotation, BaseModel)
        return (annotation if known else None), False
    for part in get_args(annotation):
        model, many = _model_within(part)
        if model is not None:
            return model, many or get_origin(annotation) is list
    return None, False


def _within(data: Any, loc: Sequence[int | str]) -> tuple[str, Any]:
    """The path that pydantic names, and the value there; what it says beyond the data, as of unions, is left out."""
    path = ""
    for part in loc:
        if isinstance(data, Mapping) and part in data:
            path += f".{part}" if path else str(part)
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            path += f"[{part}]"
            data = data[part]
        else:
            break
    return path, data


def _words(details: Any) -> str:
    message = " ".join(details["msg"].removeprefix("Value error, ").split()).rstrip(".")
    return message.replace("Input should be", "it must be").replace("String should", "it should")


def shown(value: Any, path: str) -> str:
    """A value in a fault, cut to a readable length, unless its key says that it is a secret."""
    return REDACTED if is_secret(path.rpartition(".")[2]) else _REPR.repr(value)


def _unknown(prefix: str, key: Any, known: Iterable[str]) -> str:
    line, mark, rest = unknown_key(f"{prefix}{key}", [prefix + name for name in known]).partition("; known keys: ")
    return line + mark + rest.replace(prefix, "") if prefix else line + mark + rest


def _errors(model: type[BaseModel], data: Mapping[str, Any]) -> list[Any]:
    """As `ValidationError.errors`."""
    try:
        model.model_validate(dict(data))
    except ValidationError as error:
        return list(error.errors())
    except (TypeError, AttributeError, LookupError) as error:  # of Serve's validators, which expect the right kinds
        return [{"loc": (), "type": "value_error", "msg": f"Serve cannot read it: {error}"}]
    return []


def _errors_by_field(model: type[BaseModel], given: Mapping[str, Any]) -> list[Any]:
    needed = {key: given[key] for key, field in model.model_fields.items() if field.is_required() and key in given}
    return [
        details
        for key, value in given.items()
        for details in _errors(model, {**needed, key: value})
        if details["loc"][:1] in ((), (key,))
    ]


def _faults_of_secrets(access: AccessConfig) -> list[str]:
    """Of the files of keys that are on this machine; others are for those that serve HTTP to find."""
    names = ("api_keys_file", "admin_key_file")
    absent = {name: None for name in names if (path := getattr(access, name)) is not None and not Path(path).exists()}
    return _faults_of(partial(Access, access.model_copy(update=absent)))


def _faults_of_ours(app: Mapping[str, Any], where: str) -> list[str]:
    """Faults of `args`, and of overrides of deployments that `args` make."""
    args, overrides = app.get("args") or {}, app.get("deployments") or []
    if not isinstance(args, Mapping) or not isinstance(overrides, list):
        return []  # the schema has said so
    faults = [f"{where}.args.{key}: a Serve file says it in http_options" for key in ("host", "port") if key in args]
    config: ServiceConfig | None = None
    try:
        config = parse_config({key: value for key, value in args.items() if key not in ("host", "port")})
    except ConfigError as error:
        faults += [f"{where}.args: {line}" for line in str(error).splitlines()]
    if config is not None:
        faults += [f"{where}.args.access: {fault}" for fault in _faults_of_secrets(config.access)]
    names = [DEPLOYMENT_NAME] if config is not None and config.ingress == "direct" else [DEPLOYMENT_NAME, INGRESS_NAME]
    seen: set[str] = set()
    for place, override in enumerate(overrides):
        if not isinstance(override, Mapping):
            continue
        here, name = f"{where}.deployments[{place}]", override.get("name")
        if name not in names or name in seen:
            faults.append(f"{here}.name is {_REPR.repr(name)}; it must be {' or '.join(names)}, each once")
            continue
        seen.add(name)
        if config is not None and override.get("user_config") is not None:
            faults += [
                f"{here}.{line}"
                for line in _faults_of(partial(with_user_config, config, override["user_config"], str(name)))
            ]
    return faults


def _faults_of(parse: Callable[[], object]) -> list[str]:
    try:
        parse()
    except ConfigError as error:
        return str(error).splitlines()
    return []


def run(argv: Sequence[str], module: str, tell: Callable[[Path, Any], str]) -> int:
    """A command about one file, run as `module`: all faults on standard error, or what `tell` makes of its path and
    content on standard output. Returns the exit code.
    """
    if len(argv) != 1:
        print(f"usage: python -m tournant.deploy.{module} FILE", file=sys.stderr)
        return 2
    path = Path(argv[0])
    try:
        data = read_yaml(path)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    faults = check(data)
    for fault in faults:
        print(f"error: {path}: {fault}", file=sys.stderr)
    if not faults:
        print(tell(path, data), end="")
    return int(bool(faults))


def main(argv: Sequence[str]) -> int:
    """Check one file: tell all faults on standard error, or what it will serve."""
    return run(argv, "config_check", lambda path, data: f"{path} is valid: {describe(data)}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
