"""What an operator writes wrongly is one line that says what to do; what is right survives the way to the replica."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from tournant.deploy import config as module
from tournant.deploy.config import (
    ADVANCED_KEYS,
    ENGINE_KEYS,
    SERVICE_ADVANCED_KEYS,
    ServeFile,
    ServiceConfig,
    load_config_file,
    parse_config,
)
from tournant.deploy.kv_store_config import KV_STORE_KEYS
from tournant.deploy.yaml_file import MAX_FILE_BYTES
from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "deploy/configs"
LOCAL_YAML, TIERS_YAML = CONFIGS / "local.yaml", CONFIGS / "tiers.yaml"
FULL: dict[str, Any] = {
    "model": "/models/x",
    "served_model_name": "x",
    "host": "0.0.0.0",
    "port": 8123,
    "num_replicas": 2,
    "request_timeout_s": 30.0,
    "max_body_bytes": 4096,
    "log_level": "warning",
    "cache_dir": "/cache",
    "engine": {"dtype": "float32", "max_num_seqs": 3, "deterministic": True, "kv_cache_bytes": 1 << 20},
    "kv_store": {"host_bytes": 1 << 30, "nvme_bytes": 4 << 30, "nvme_folder": "/nvme"},
    "advanced": {
        "block_tokens": 32,
        "num_threads": 1,
        "restore": "never",
        "nvme_persist": False,
        "weights_drain_s": 5.0,
    },
}


def faults(data: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"modle": "x"}, "unknown key modle; did you mean model?"),
        ({"max_num_seqs": 3}, "unknown key max_num_seqs; did you mean engine.max_num_seqs?"),
        (
            {"engine": {"max_model_length": 3}},
            "unknown key engine.max_model_length; did you mean engine.max_model_len?",
        ),
        ({"engine": {"block_tokens": 16}}, "unknown key engine.block_tokens; did you mean advanced.block_tokens?"),
        (
            {"engine": {"quantization": "native"}},
            "unknown key engine.quantization; did you mean advanced.quantization?",
        ),
        (
            {"engine": {"max_num_batched_tokens": 512}},
            "unknown key engine.max_num_batched_tokens; did you mean advanced.max_num_batched_tokens?",
        ),
        (
            {"advanced": {"tensor_parallel_size": 2}},
            "unknown key advanced.tensor_parallel_size; did you mean engine.tensor_parallel_size?",
        ),
        (
            {"advanced": {"pipeline_parallel_size": 2}},
            "unknown key advanced.pipeline_parallel_size; did you mean engine.pipeline_parallel_size?",
        ),
        ({"weights_drain_s": 3}, "unknown key weights_drain_s; did you mean advanced.weights_drain_s?"),
        (
            {"advanced": {"weights_drain_s": -1}},
            "advanced.weights_drain_s is -1; it must be greater than or equal to 0",
        ),
        ({"advanced": {"num_thread": 1}}, "unknown key advanced.num_thread; did you mean advanced.num_threads?"),
        ({"engine": {"dtype": "int4"}}, "engine.dtype is 'int4'; it must be one of auto, bfloat16, float16, float32"),
        ({"engine": {"max_num_seqs": 0}}, "engine.max_num_seqs is 0; it must be a whole number from 1 to 4096"),
        ({"engine": {"max_num_seqs": True}}, "engine.max_num_seqs is True; it must be a whole number from 1 to 4096"),
        ({"engine": {"max_num_seqs": "8"}}, "engine.max_num_seqs is '8'; it must be a whole number from 1 to 4096"),
        ({"advanced": {"block_tokens": 24}}, "advanced.block_tokens is 24; it must be a power of two"),
        (
            {"engine": {"kv_cache_bytes": "1 GiBB"}},
            "engine.kv_cache_bytes is '1 GiBB'; write 1073741824, 512MiB or 1.5GiB",
        ),
        ({"max_body_bytes": "many"}, "max_body_bytes is 'many'; write 1073741824, 512MiB or 1.5GiB"),
        ({"max_body_bytes": "1B"}, "max_body_bytes is '1B'; it must be greater than or equal to 1024"),
        ({"engine": [1]}, "engine is [1]; it must be a mapping of names to values"),
        ({"port": 0}, "port is 0; it must be greater than or equal to 1"),
        ({"port": "8000"}, "port is '8000'; it must be a valid integer"),
        ({"num_replicas": 1.5}, "num_replicas is 1.5; it must be a valid integer"),
        ({"request_timeout_s": 0}, "request_timeout_s is 0; it must be greater than 0"),
        ({"served_model_name": ""}, "served_model_name is ''; it should have at least 1 character"),
        ({"ingress": "both"}, "ingress is 'both'; it must be one of 'direct', 'resilient'"),
        ({"log_level": "loud"}, "log_level is 'loud'; it must be one of 'debug', 'info', 'warning', 'error'"),
        ([1], "the configuration is [1]; it must be a mapping of names to values"),
    ],
)
def test_a_fault_is_one_line_that_says_what_to_do(data: Any, line: str) -> None:
    assert faults(data) == [line]


def test_all_faults_are_told_at_once() -> None:
    lines = faults({"port": 0, "modle": 1, "engine": {"dtype": "x", "max_num_seqs": 0}, "advanced": {"num_threads": 0}})
    assert sorted(line.split()[0] for line in lines) == [
        "advanced.num_threads",
        "engine.dtype",
        "engine.max_num_seqs",
        "port",
        "unknown",
    ]


def test_a_key_near_nothing_lists_the_known_ones() -> None:
    (line,) = faults({"advanced": {"zzzqqq": 1}})
    assert line.startswith("unknown key advanced.zzzqqq; known keys: advanced.admission, ")
    assert not any(name in line for name in ("engine.", "advanced.faults", "allow_faults"))
    (line,) = faults({"zzzqqq": 1})
    assert "faults" not in line
    assert all(name in line for name in ("served_model_name", "engine.deterministic", "advanced.num_threads"))


def test_a_configuration_survives_the_way_to_the_replica() -> None:
    config = parse_config(FULL)
    assert config.to_args() == FULL
    assert parse_config(config.to_args()) == config
    none = {"kv_store": {"host_bytes": 0}}
    assert parse_config(none).to_args() == none  # no store, not the default size
    assert ServiceConfig().to_args() == {}
    plan = ServeFile(config=config, deployment_options={"max_queued_requests": 3})
    assert ServeFile.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize(
    ("options", "replicas"),
    [
        ({}, (3, 3)),
        ({"num_replicas": 2}, (2, 2)),
        ({"autoscaling_config": {"max_replicas": 4}}, (1, 4)),
        ({"autoscaling_config": {"min_replicas": 0, "max_replicas": 4}}, (0, 4)),
        ({"autoscaling_config": {"min_replicas": 0, "initial_replicas": 2, "max_replicas": 4}}, (2, 4)),
        ({"autoscaling_config": {"max_replicas": "4"}}, (1, 1)),  # which Serve refuses
        ({"num_replicas": "auto"}, (1, 1)),
    ],
)
def test_a_file_says_how_many_replicas_there_may_be(options: dict[str, Any], replicas: tuple[int, int]) -> None:
    assert ServeFile(config=parse_config({"num_replicas": 3}), deployment_options=options).replicas == replicas


def test_every_engine_field_belongs_to_one_section_and_the_first_page_stays_short() -> None:
    assert {field.name for field in fields(EngineConfig)} == ENGINE_KEYS | ADVANCED_KEYS
    assert not ENGINE_KEYS & ADVANCED_KEYS
    of_service = ServiceConfig.model_fields.keys() - {"engine", "kv_store", "access"} - SERVICE_ADVANCED_KEYS
    assert len(of_service) + len(ENGINE_KEYS) + len(KV_STORE_KEYS) <= 25


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2048", 2048),
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("7000 B", 7000),
        ("2KiB", 2048),
        ("1TiB", 1 << 40),
    ],
)
def test_bytes_can_be_written_with_a_unit(text: str, number: int) -> None:
    assert parse_config({"engine": {"kv_cache_bytes": text}}).engine.kv_cache_bytes == number


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
def test_known_keys_are_those_of_serve() -> None:
    from ray import serve
    from ray.serve import schema

    assert set(schema.ServeDeploySchema.model_fields) == module.SERVE_KEYS
    assert set(schema.HTTPOptionsSchema.model_fields) == module.HTTP_KEYS
    assert set(schema.ServeApplicationSchema.model_fields) == module.APPLICATION_KEYS
    assert set(schema.DeploymentSchema.model_fields) == module.DEPLOYMENT_KEYS
    assert set(inspect.signature(serve.deployment).parameters) >= module.DEPLOYMENT_KEYS
    for path in CONFIGS.glob("*.yaml"):
        schema.ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))


def test_the_shipped_file_holds_the_defaults() -> None:
    assert load_config_file(LOCAL_YAML) == ServeFile()


def test_the_shipped_example_with_tiers_has_both() -> None:
    kv_store = load_config_file(TIERS_YAML).config.kv_store
    plan = kv_store.plan(on_gpu=False, limit_bytes=8 << 30)
    assert plan is not None
    assert (plan.store.host_bytes, plan.store.nvme_bytes) == (1 << 30, 4 << 30)
    assert plan.nvme_folder == str(Path("~/.cache/tournant/kv").expanduser())


def test_the_shipped_examples_of_splits_have_one_each() -> None:
    tp, pp = (load_config_file(CONFIGS / f"{name}.yaml").config.engine for name in ("tp", "pp"))
    assert (tp.tensor_parallel_size, tp.pipeline_parallel_size) == (3, 1)  # what the default model allows
    assert (pp.tensor_parallel_size, pp.pipeline_parallel_size) == (1, 2)


def write(folder: Path, data: Any) -> Path:
    path = folder / "service.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def serve_file(**application: Any) -> dict[str, Any]:
    return {"applications": [{"name": "tournant", "import_path": "tournant.deploy.app:build_app", **application}]}


def test_a_file_says_where_to_listen_and_what_serve_is_told(tmp_path: Path) -> None:
    overrides = [{"name": "Replica", "max_queued_requests": 7}]
    data = serve_file(args={"model": "x"}, deployments=overrides, route_prefix="/a")
    data |= {"http_options": {"host": "0.0.0.0", "port": 9, "keep_alive_timeout_s": 5}, "proxy_location": "EveryNode"}
    plan = load_config_file(write(tmp_path, data))
    assert (plan.config.host, plan.config.port, plan.config.model) == ("0.0.0.0", 9, "x")
    assert plan.deployment_options == {"max_queued_requests": 7}
    assert plan.http_options == {"keep_alive_timeout_s": 5}
    assert (plan.route_prefix, plan.proxy_location) == ("/a", "EveryNode")


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({**serve_file(), "aplications": []}, "unknown key aplications; did you mean applications?"),
        (
            {**serve_file(), "grpc_options": {}},
            "grpc_options is known to Serve, but `tournant serve` does not carry it out; use `serve deploy`",
        ),
        (
            {**serve_file(), "http_options": {"prot": 1}},
            "unknown key http_options.prot; did you mean http_options.port?",
        ),
        ({**serve_file(), "http_options": {"port": 0}}, "port is 0; it must be greater than or equal to 1"),
        (
            {**serve_file(), "proxy_location": "Here"},
            "proxy_location is 'Here'; it must be one of 'Disabled', 'HeadOnly', 'EveryNode'",
        ),
        ({"applications": []}, "applications must be a list of one application, tournant"),
        (
            {"applications": [{"import_path": "a:b"}]},
            "applications[0].import_path is 'a:b'; it must be tournant.deploy.app:build_app",
        ),
        (serve_file(arg={}), "unknown key applications[0].arg; did you mean applications[0].args?"),
        (
            serve_file(runtime_env={}),
            "applications[0].runtime_env is known to Serve, but `tournant serve` does not carry it out; "
            "use `serve deploy`",
        ),
        (serve_file(args={"port": 1}), "args.port: the address of a Serve file stands in http_options, not in args"),
        (serve_file(args={"egnine": {}}), "unknown key egnine; did you mean engine?"),
        (
            serve_file(deployments=[{"name": "replica"}]),
            "applications[0].deployments[0].name is 'replica'; it must be Replica",
        ),
        (
            serve_file(deployments=[{"name": "Replica", "num_replica": 1}]),
            "num_replica; did you mean applications[0].deployments[0].num_replicas?",
        ),
        (serve_file(name=3), "name is 3; it must be a valid string"),
        ("[1, 2]", "the file is [1, 2]; it must be a mapping of names to values"),
        ("", "the file is None; it must be a mapping of names to values"),
        ("a: !!python/object/apply:os.system [x]", "is not YAML: could not determine a constructor"),
        ("a: [", "is not YAML: while parsing"),
        ("a: " + "[" * 5000, "is not YAML"),
        ("a" * (MAX_FILE_BYTES + 1), f"has more than {MAX_FILE_BYTES} bytes"),
    ],
)
def test_a_fault_of_a_file_names_the_file(tmp_path: Path, data: Any, line: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(ConfigError) as caught:
        load_config_file(path)
    assert str(caught.value).startswith(str(path))
    assert line in str(caught.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml cannot be read: No such file or directory$"):
        load_config_file(tmp_path / "no.yaml")
