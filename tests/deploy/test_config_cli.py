"""What is wrong with a Serve file is told before it is deployed, all of it; what is right is shown in full."""

from __future__ import annotations

import copy
import importlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr
from typer.testing import CliRunner

from tournant.deploy import config_check, config_cli, config_show
from tournant.deploy.cli import app
from tournant.deploy.config import IMPORT_PATH, ServeFile, ServiceConfig, load_config_file, parse_config
from tournant.deploy.config_check import check, describe
from tournant.deploy.config_show import all_args, resolve
from tournant.deploy.redaction import REDACTED, is_secret, redacted
from tournant.deploy.yaml_file import MAX_FILE_BYTES, MAX_NODES, parse_yaml, read_yaml
from tournant.workers.errors import ConfigError

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "deploy/configs").glob("*.yaml"))
configs = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


def serve_file(*deployments: dict[str, Any], **application: Any) -> dict[str, Any]:
    return {"applications": [{"import_path": IMPORT_PATH, "deployments": list(deployments), **application}]}


def replica(**options: Any) -> dict[str, Any]:
    return serve_file({"name": "Replica", **options})


HERE = "applications[0].deployments[0]"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ([1], "the file is [1]; it must be a mapping of names to values"),
        (None, "the file is None; it must be a mapping of names to values"),
        ({}, "applications is missing"),
        ({"applications": 3}, "applications is 3; it must be a valid list"),
        ({**serve_file(), "aplications": []}, "unknown key aplications; did you mean applications?"),
        (
            {**serve_file(), "http_options": {"prot": 1}},
            "unknown key http_options.prot; did you mean http_options.port?",
        ),
        (
            {**serve_file(), "proxy_location": "Here"},
            "proxy_location is 'Here'; it must be 'Disabled', 'HeadOnly' or 'EveryNode'",
        ),
        ({**serve_file(), "target_capacity": 101}, "target_capacity is 101; it must be less than or equal to 100"),
        (
            {**serve_file(), "grpc_options": {"ports": 1}},
            "unknown key grpc_options.ports; did you mean grpc_options.port?",
        ),
        (serve_file(arg={}), "unknown key applications[0].arg; did you mean applications[0].args?"),
        ({"applications": [{"name": "x"}]}, "applications[0].import_path is missing"),
        ({"applications": ["x"]}, "applications[0] is 'x'; it must be a mapping of names to values"),
        (serve_file(route_prefix="x"), "applications[0].route_prefix is 'x'; it must be / or like /name"),
        (serve_file(route_prefix="/x/"), "applications[0].route_prefix is '/x/'; it must be / or like /name"),
        (
            {"applications": [{"import_path": "tournant.deploy.app:build"}]},
            f"applications[0].import_path is 'tournant.deploy.app:build'; it must be {IMPORT_PATH}",
        ),
        (
            serve_file(runtime_env={"envvars": {}}),
            "unknown key applications[0].runtime_env.envvars; did you mean applications[0].runtime_env.env_vars?",
        ),
        (
            serve_file(args={"engine": {"dtype": "int4"}}),
            "applications[0].args: engine.dtype is 'int4'; it must be one of auto, bfloat16, float16, float32",
        ),
        (serve_file(args={"modle": "x"}), "applications[0].args: unknown key modle; did you mean model?"),
        (serve_file(args={"port": 1}), "applications[0].args.port: a Serve file says it in http_options"),
        (serve_file(args=[1]), "applications[0].args is [1]; it must be a valid dictionary"),
        (serve_file({"name": "replica"}), f"{HERE}.name is 'replica'; it must be Replica, each once"),
        (
            serve_file({"name": "ingress"}, args={"ingress": "resilient"}),
            f"{HERE}.name is 'ingress'; it must be Replica or Ingress, each once",
        ),
        (
            serve_file({"name": "Replica"}, {"name": "Replica"}),
            "applications[0].deployments[1].name is 'Replica'; it must be Replica, each once",
        ),
        (replica(num_replica=1), f"unknown key {HERE}.num_replica; did you mean {HERE}.num_replicas?"),
        (replica(max_ongoing_requests=0), f"{HERE}.max_ongoing_requests is 0; it must be greater than 0"),
        (
            replica(ray_actor_options={"num_gpu": 1}),
            f"unknown key {HERE}.ray_actor_options.num_gpu; did you mean {HERE}.ray_actor_options.num_gpus?",
        ),
        (
            replica(num_replicas=2, autoscaling_config={"max_replicas": 3}),
            f"{HERE}: Manually setting num_replicas is not allowed when autoscaling_config is provided",
        ),
        (
            replica(autoscaling_config={"min_replica": 1}),
            f"unknown key {HERE}.autoscaling_config.min_replica; did you mean {HERE}.autoscaling_config.min_replicas?",
        ),
        (
            replica(autoscaling_config={"upscale_delay_s": -1}),
            f"{HERE}.autoscaling_config.upscale_delay_s is -1; it must be greater than or equal to 0",
        ),
        (
            replica(autoscaling_config={"policy": {"policy_kwarg": {}}}),
            f"unknown key {HERE}.autoscaling_config.policy.policy_kwarg; did you mean "
            f"{HERE}.autoscaling_config.policy.policy_kwargs?",
        ),
        (
            replica(request_router_config={"request_router_class": "tournant.cluster.kv_router:KVRoute"}),
            f"{HERE}.request_router_config.request_router_class is 'tournant.cluster.kv_router:KVRoute', which is not "
            "installed here; did you mean tournant.cluster.kv_router:KVRouter?",
        ),
        (
            replica(request_router_config={"request_router_class": 3}),
            f"{HERE}.request_router_config.request_router_class is 3; it must be text such as package.module:Name",
        ),
        (
            replica(
                request_router_config={
                    "request_router_class": "tournant.cluster.kv_router:KVRouter",
                    "request_router_kwargs": {"queue": "x"},
                }
            ),
            f"{HERE}.request_router_config.request_router_kwargs.queue is 'x'; it must be a number",
        ),
        (
            replica(backpressure_config={"status_code": 500}),
            f"{HERE}.backpressure_config.status_code is 500; it must be 503 or 429",
        ),
        (replica(gang_scheduling_config={}), f"{HERE}.gang_scheduling_config.gang_size is missing"),
        (
            replica(user_config={"log_level": "loud"}),
            f"{HERE}.user_config.log_level is 'loud'; it must be one of 'debug', 'info', 'warning', 'error'",
        ),
        (
            {"model": "x", "engine": {"max_num_seqs": 0}},
            "engine.max_num_seqs is 0; it must be a whole number from 1 to 4096",
        ),
    ],
)
def test_a_fault_is_one_line_with_path_value_and_limit_or_nearest_key(data: Any, line: str) -> None:
    assert check(data) == [line]


def test_all_faults_are_told_at_once_also_behind_one_that_hides_others() -> None:
    bad = {
        "name": "Replica",
        "num_replicas": 2,
        "autoscaling_config": {"min_replicas": -1, "maxreplicas": 1},  # together: Serve looks at nothing else then
        "max_queued_requests": 0,
        "health_check_period_s": 0,
        "placement_group_bundles": [{"GPU": "x"}],
        "user_config": {"model": "x", "request_timeout_s": -1},
    }
    data = {**serve_file(bad, args={"engine": {"dtype": "x"}, "host": "h"}), "http_options": {"port": "x"}, "extra": 1}
    data["applications"] += [{"import_path": "x", "name": "b", "args": 1}, 7]
    found = check(data)
    assert len(found) == 13
    assert all("\n" not in line for line in found)
    for piece in (
        "extra",
        "http_options.port",
        "maxreplicas",
        "min_replicas is -1",
        "Manually setting",
        "max_queued_requests must be -1",
        "health_check_period_s",
        "placement_group_bundles[0].GPU",
        "args.host",
        "engine.dtype",
        "applications[1].import_path",
        "applications[1].args",
        "applications[2] is 7",
    ):
        assert any(piece in line for line in found), piece


WHOLE: dict[str, Any] = {
    "proxy_location": "EveryNode",
    "http_options": {"host": "0.0.0.0", "port": 8000},
    "logging_config": {"log_level": "INFO"},
    "applications": [
        {
            "name": "a",
            "import_path": IMPORT_PATH,
            "runtime_env": {"env_vars": {"A": "b"}, "py_modules": ["https://example.com/x.zip"]},
            "args": {"engine": {"max_num_seqs": 4}, "kv_store": {"host_bytes": 0}, "advanced": {"num_threads": 1}},
            "deployments": [
                {
                    "name": "Replica",
                    "num_replicas": "auto",
                    "user_config": {"log_level": "debug", "engine": {"max_queued_requests": 3}},
                    "ray_actor_options": {"num_cpus": 1, "resources": {"x": 1}, "label_selector": {"a": "b"}},
                    "autoscaling_config": {
                        "max_replicas": 3,
                        "policy": {
                            "policy_function": "tournant.cluster.autoscaling:ServingPolicy",
                            "policy_kwargs": {},
                        },
                    },
                    "request_router_config": {"request_router_class": "tournant.cluster.kv_router:KVRouter"},
                    "gang_scheduling_config": {"gang_size": 1},
                    "placement_group_bundles": [{"CPU": 1}],
                    "placement_group_bundle_label_selector": [{"a": "b"}],
                    "deployment_actors": [{"name": "x", "actor_class": "their:Actor", "init_args": [1]}],
                    "backpressure_config": {"status_code": 429},
                }
            ],
        }
    ],
}
ODD: tuple[Any, ...] = (None, -1, "x", [None], {1: 2})


def places(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def test_whatever_stands_anywhere_is_judged_in_lines() -> None:
    assert check(WHOLE) == []
    refused = 0
    for path in places(WHOLE):
        for odd in ODD:
            changed = {"": copy.deepcopy(WHOLE)}
            inner: Any = changed
            for part in ("", *path)[:-1]:
                inner = inner[part]
            inner[("", *path)[-1]] = odd
            found = check(changed[""])
            assert all(line.strip() and "\n" not in line for line in found), (path, odd)
            refused += bool(found)
    assert refused > 150


def test_names_and_prefixes_of_applications_must_differ() -> None:
    one = {"name": "a", "import_path": IMPORT_PATH, "route_prefix": "/a"}
    two = {**one, "name": "b", "args": {"modle": 1}}
    found = check({"applications": [one, two]})
    assert found[0].startswith('applications: Found duplicate applications for route prefix "/a".')
    assert found[1:] == ["applications[1].args: unknown key modle; did you mean model?"]


def test_code_of_others_is_neither_imported_nor_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.import_module

    def only_known(name: str) -> Any:
        assert name.startswith(("ray.", "tournant.")), f"{name} was imported"
        return original(name)

    monkeypatch.setattr(importlib, "import_module", only_known)
    theirs = {
        "autoscaling_config": {"policy": {"policy_function": "their.policy:Policy", "policy_kwargs": {"any": 1}}},
        "request_router_config": {"request_router_class": "their.router.Router", "request_router_kwargs": {"any": 1}},
    }
    data = {
        "applications": [{"import_path": "their:app", "args": {"any": 1}, "deployments": [{"name": "X", **theirs}]}]
    }
    assert check(data) == []
    assert describe(data) == "default at / (not ours, its args are unchecked)"


def test_a_secret_that_is_wrong_is_not_printed() -> None:
    (line,) = check({**serve_file(), "http_options": {"ssl_keyfile_password": ["hunter2"]}})
    assert line == f"http_options.ssl_keyfile_password is {REDACTED}; it must be a valid string"


# ------------------------------------------------------------------ the files that ship


@configs
def test_a_shipped_file_is_valid_and_what_it_names_exists(path: Path) -> None:
    data = read_yaml(path)
    assert check(data) == []
    for application in data["applications"]:
        module, _, name = application["import_path"].partition(":")
        assert callable(getattr(importlib.import_module(module), name))


@configs
def test_a_shipped_file_says_how_to_run_it(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.startswith("#   ") and f"deploy/configs/{path.name}" in line]
    assert any("serve deploy" in line for line in commands)
    assert all(len(line) <= 124 for line in lines)
    if any("tournant serve" in line for line in commands):
        assert isinstance(load_config_file(path), ServeFile)


def test_there_is_a_file_for_each_way_to_run_the_service() -> None:
    assert {path.stem for path in CONFIGS} >= {
        "local",
        "single-gpu",
        "tp",
        "pp",
        "tp-pp",
        "several-models",
        "autoscaling",
        "high-throughput",
        "tiers",
        "resilient",
    }


def test_the_file_of_several_models_keeps_them_apart() -> None:
    (path,) = (path for path in CONFIGS if path.stem == "several-models")
    one, two = read_yaml(path)["applications"]
    assert one["name"] != two["name"]
    assert one["route_prefix"] != two["route_prefix"]
    assert parse_config(two["args"]).engine.max_num_seqs == parse_config(one["args"]).engine.max_num_seqs  # by an alias


# ------------------------------------------------------------------ reading


def laughs(form: str) -> str:
    """Eight levels of ten aliases each: 10^8 values from a kilobyte."""
    lines = ["a0: &a0 {k: v}"]
    lines += [form.format(name=f"a{level}", many=", ".join([f"*a{level - 1}"] * 10)) for level in range(1, 9)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (laughs("{name}: &{name} [{many}]"), f"holds more than {MAX_NODES} values once its aliases are written out"),
        (laughs("{name}: &{name}\n  <<: [{many}]"), f"holds more than {MAX_NODES} values"),
        ("a: &a [*a]", "holds an alias of what it is part of, line 1"),
        ("a: 1\n---\nb: 1", "holds several YAML documents; give each a file of its own"),
        ("a: {x: 1, x: 2}", "has the key x twice in one mapping, line 1"),
        ("a: {0x1: 1, 1: 2}", "has the key 1 twice in one mapping, line 1"),
        ("a: {yes: 1, true: 2}", "has the key true twice in one mapping, line 1"),
        ("a: &a {x: 1}\nb: {<<: *a, <<: *a}", "has the key << twice in one mapping, line 2"),
        ("a: 0x" + "f" * 5000, "has a number of more than 64 bits, line 1"),
        ("a: " + "9" * 5000, "is not YAML: Exceeds the limit"),
        ("a: !!timestamp x", "is not YAML: a value does not fit its tag"),
        ("a: 2024-99-99", "is not YAML: month must be in 1..12"),
        ("x" * (MAX_FILE_BYTES + 1), f"has more than {MAX_FILE_BYTES} bytes"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_ambiguous_or_would_not_end_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text)
    assert str(caught.value).startswith(words)


def test_aliases_in_reason_are_welcome() -> None:
    assert parse_yaml("a: &a {x: 1}\nb:\n  <<: *a\n  y: 2\nc: [*a, *a]") == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 2},
        "c": [{"x": 1}, {"x": 1}],
    }


@pytest.mark.parametrize(("name", "words"), [("no.yaml", "No such file or directory"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{tmp_path / name} cannot be read: {words}$"):
        read_yaml(tmp_path / name)


def test_args_alone_are_a_file_too_for_checking_and_for_serving(tmp_path: Path) -> None:
    path = tmp_path / "args.yaml"
    path.write_text("port: 9000\nengine: {max_num_seqs: 3}\n")
    assert check(read_yaml(path)) == []
    assert load_config_file(path) == ServeFile(config=parse_config({"port": 9000, "engine": {"max_num_seqs": 3}}))
    assert describe(read_yaml(path)).startswith("args of one service: the default model, 1 replica, device auto")


# ------------------------------------------------------------------ showing


@configs
def test_what_is_shown_is_complete_and_means_the_same(path: Path) -> None:
    data = read_yaml(path)
    shown = resolve(data)
    assert check(shown) == []
    assert resolve(shown) == shown
    for application, resolved in zip(data["applications"], shown["applications"], strict=True):
        config, again = parse_config(application.get("args") or {}), parse_config(resolved["args"])
        assert again.model_copy(update={"kv_store": config.kv_store}) == config
        assert (again.kv_store.host_bytes, again.kv_store.nvme_folder) == (
            config.kv_store.host_bytes,
            config.kv_store.nvme_folder,
        )
        told = {one["name"]: one for one in resolved["deployments"]}
        assert told.keys() == ({"Replica"} if config.ingress == "direct" else {"Replica", "Ingress"})
        assert {"max_ongoing_requests", "graceful_shutdown_timeout_s", "ray_actor_options"} <= told["Replica"].keys()
        for override in application.get("deployments", []):
            assert override.items() <= told[override["name"]].items()


def test_every_key_is_shown() -> None:
    args = all_args(parse_config({}))
    keys = set(args) | {
        f"{section}.{key}" for section, found in args.items() if isinstance(found, dict) for key in found
    }
    (fault,) = check({"model": None, "zzzzqqqq": 1})  # lists what there is, but keys for tests
    assert keys == set(fault.partition("known keys: ")[2].split(", ")) - {"host", "port"}


def test_secrets_are_left_out_by_name_and_by_type() -> None:
    secret = {
        "api_key": "a",
        "HF_TOKEN": "b",
        "ssl_keyfile_password": "c",
        "apiKeys": ["d"],
        "clientSecret": {"e": "f"},
    }
    harmless = {
        "block_tokens": 16,
        "max_keys": 5,
        "ssl_keyfile": "/x",
        "api_keys_file": "/y",
        "token": None,
        "model": "m",
    }
    assert redacted(secret) == dict.fromkeys(secret, REDACTED)
    assert redacted(harmless) == harmless
    assert redacted({"x": SecretStr("a"), "y": [{"password": "b"}], "url": "redis://me:pw@host:1"}) == {
        "x": REDACTED,
        "y": [{"password": REDACTED}],
        "url": f"redis://{REDACTED}@host:1",
    }
    assert not is_secret("monkey")
    data = serve_file(runtime_env={"env_vars": {"HF_TOKEN": "hunter2"}})
    assert "hunter2" not in yaml.safe_dump(resolve(data))


# ------------------------------------------------------------------ the commands


def test_the_commands_start_what_does_the_work_and_end_as_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    codes = iter([0, 1, -9])

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command[1:])
        return subprocess.CompletedProcess(command, next(codes))

    monkeypatch.setattr(config_cli.subprocess, "run", run)
    results = [
        CliRunner().invoke(app, ["config", *words]) for words in (["check", "a"], ["show", "-"], ["check", "b.yaml"])
    ]
    assert [result.exit_code for result in results] == [0, 1, 1]
    assert "ended by signal 9" in results[2].output
    assert [(words[-2], words[-1]) for words in calls] == [
        ("tournant.deploy.config_check", "a"),
        ("tournant.deploy.config_show", "-"),
        ("tournant.deploy.config_check", "b.yaml"),
    ]


def test_check_tells_all_faults_with_the_file_or_that_there_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump(serve_file(args={"modle": 1}, argz=1)))
    assert config_check.main([str(path)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        f"error: {path}: unknown key applications[0].argz; did you mean applications[0].args?",
        f"error: {path}: applications[0].args: unknown key modle; did you mean model?",
    ]
    path.write_text(yaml.safe_dump(serve_file({"name": "Replica", "autoscaling_config": {"max_replicas": 4}})))
    assert config_check.main([str(path)]) == 0
    assert capsys.readouterr().out == (
        f"{path} is valid: default at / (the default model, 1 to 4 replicas, device auto, ingress direct)\n"
    )
    assert config_check.main([str(tmp_path / "no.yaml")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'no.yaml'} cannot be read: No such file or directory\n"


def test_show_prints_yaml_that_can_be_read_again_or_the_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "service.yaml"
    path.write_text("port: 9000\n")
    assert config_show.main([str(path)]) == 0
    shown = parse_yaml(capsys.readouterr().out)
    assert shown["http_options"]["port"] == 9000
    assert shown["applications"][0]["args"]["engine"]["max_num_seqs"] == ServiceConfig().engine.max_num_seqs
    path.write_text("prt: 9000\nport: 1\n")
    assert config_show.main([str(path)]) == 1
    assert capsys.readouterr().err == f"error: {path}: unknown key prt; did you mean port?\n"


def test_the_command_works_as_it_is_installed(tmp_path: Path) -> None:
    """The only one that starts the process."""
    path = tmp_path / "-service.yaml"
    path.write_text(yaml.safe_dump(serve_file(args={"modle": 1})))
    result = CliRunner().invoke(app, ["config", "check", str(path)])
    assert result.exit_code == 1


def test_key_files_that_are_here_are_read_and_those_that_are_not_are_left_to_the_replicas(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    data = serve_file(args={"access": {"api_keys_file": str(keys)}})
    assert check(data) == []
    keys.write_text("a-key-that-is-long-enough")
    keys.chmod(0o644)
    (line,) = check(data)
    assert line.startswith(f"applications[0].args.access: {keys} has mode 0644")
    keys.chmod(0o600)
    assert check(data) == []
