"""The command line: flags and configuration are one schema, and every mistake is a line and exit code 2."""

from __future__ import annotations

import inspect
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tournant.deploy import cli
from tournant.deploy.access_config import AccessConfig
from tournant.deploy.config import ENGINE_KEYS, SERVICE_ADVANCED_KEYS, ServiceConfig, parse_config
from tournant.deploy.kv_store_config import KV_STORE_KEYS
from tournant.workers.config import EngineConfig


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, result.output


def test_flags_are_the_fields_of_the_configuration() -> None:
    flags = set(inspect.signature(cli.serve).parameters) - {"config"} - set(cli.TLS_FLAGS)
    service = set(ServiceConfig.model_fields) - {"engine", "kv_store", "access"} - SERVICE_ADVANCED_KEYS
    access = set(AccessConfig.model_fields) - {"public_metrics", "admin_host"}  # with others than the own machine: YAML
    assert flags == service | ENGINE_KEYS | KV_STORE_KEYS | access


@pytest.mark.parametrize(
    "name",
    [
        "host",
        "port",
        "num_replicas",
        "request_timeout_s",
        "max_num_seqs",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "max_queued_requests",
    ],
)
def test_help_tells_the_default(name: str) -> None:
    service = {name: field.default for name, field in ServiceConfig.model_fields.items()}
    default = service.get(name, getattr(EngineConfig(), name, None))
    (option,) = inspect.signature(cli.serve, eval_str=True).parameters[name].annotation.__metadata__
    assert f"[{default:g}]" in option.help if isinstance(default, float) else f"[{default}]" in option.help


def test_help_is_printed_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Square brackets are markup to the printer unless they are escaped."""
    monkeypatch.setenv("COLUMNS", "250")
    code, output = run("serve", "--help")
    assert code == 0
    told = [
        parameter.annotation.__metadata__[0].help
        for parameter in inspect.signature(cli.serve, eval_str=True).parameters.values()
    ]
    defaults = [text[text.index("[") :] for text in told if "[" in text]
    assert len(defaults) >= 12
    assert not [default for default in defaults if default not in output]
    assert "\\[" not in output


@pytest.mark.parametrize(
    ("native", "said"),
    [(True, "m in bfloat16, weights as quantised in the file, on cpu, KV"), (False, "m in bfloat16 on cpu, KV")],
)
def test_the_ready_line_says_how_weights_are_multiplied(
    capsys: pytest.CaptureFixture[str], native: bool, said: str
) -> None:
    facts = {"model": "m", "dtype": "bfloat16", "device": "cpu", "pool_tokens": 9000, "max_sequence_tokens": 8192}
    cli.ServiceRun(cli.make_plan(None, {}))._show_ready(facts | {"native_weights": native})
    assert said in capsys.readouterr().out


def test_the_question_that_is_printed_is_the_one_of_readme_and_examples() -> None:
    root = Path(__file__).parents[2]
    for path in (
        root / "README.md",
        *(root / "examples" / f"{name}.py" for name in ("handles", "openai_client", "offline")),
    ):
        assert f'"{cli.QUESTION}"' in path.read_text(encoding="utf-8"), path


def test_version() -> None:
    code, output = run("version")
    assert code == 0
    assert output.strip()[0].isdigit()


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["--port", "99999"], ["error: port is 99999; it must be less than or equal to 65535"]),
        (
            ["--dtype", "int4", "--max-num-seqs", "0"],
            [
                "error: engine.dtype is 'int4'; it must be one of auto, bfloat16, float16, float32",
                "error: engine.max_num_seqs is 0; it must be a whole number from 1 to 4096",
            ],
        ),
        (["--kv-cache-bytes", "lots"], ["error: engine.kv_cache_bytes is 'lots'; write 1073741824, 512MiB or 1.5GiB"]),
        (["--ingress", "both"], ["error: ingress is 'both'; it must be one of 'direct', 'resilient'"]),
        (
            ["--host-bytes", "4EiB"],
            ["error: kv_store.host_bytes is '4EiB'; write 1073741824, 512MiB or 1.5GiB"],
        ),
        (
            ["--nvme-bytes", "1GiB", "--nvme-folder", "kv", "--host-bytes", "0"],
            [
                "error: kv_store.nvme_bytes is set; it needs kv_store.host_bytes above 0, through which every block "
                "passes"
            ],
        ),
        (["--config", "/no/such.yaml"], ["error: /no/such.yaml cannot be read: No such file or directory"]),
    ],
)
def test_a_wrong_configuration_is_told_and_nothing_starts(arguments: list[str], lines: list[str]) -> None:
    code, output = run("serve", *arguments)
    assert code == 2
    assert output.splitlines() == lines


def test_a_port_in_use_is_told_before_the_slow_steps() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, output = run("serve", "--port", str(taken.getsockname()[1]))
    assert code == 2
    assert "Address already in use; choose another with --port" in output


def test_flags_go_before_the_file_and_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "s.yaml").write_text(
        "http_options: {port: 9}\n"
        "applications: [{import_path: 'tournant.deploy.app:build_app',"
        " args: {engine: {max_num_seqs: 5, dtype: float32}, advanced: {num_threads: 1}}}]\n"
    )
    monkeypatch.chdir(tmp_path)
    flags = {"model": "model", "cache_dir": "c", "max_num_seqs": 7, "kv_cache_bytes": "1MiB", "deterministic": False}
    plan = cli.make_plan(Path("s.yaml"), flags)
    assert plan.config == parse_config(
        {
            "model": str(tmp_path / "model"),
            "cache_dir": str(tmp_path / "c"),
            "port": 9,
            "engine": {"max_num_seqs": 7, "dtype": "float32", "kv_cache_bytes": 1 << 20},
            "advanced": {"num_threads": 1},
        }
    )


def test_flags_of_the_store_go_to_their_section_and_the_folder_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"host_bytes": "1GiB", "nvme_bytes": "4GiB", "nvme_folder": "kv", "kv_cache_dtype": "fp8_e4m3"}
    config = cli.make_plan(None, flags).config
    assert config.to_args() == {
        "engine": {"kv_cache_dtype": "fp8_e4m3"},
        "kv_store": {"host_bytes": 1 << 30, "nvme_bytes": 4 << 30, "nvme_folder": str(tmp_path / "kv")},
    }


def test_more_memory_than_there_is_is_refused_before_anything_starts() -> None:
    code, output = run("serve", "--host-bytes", "15TiB")
    assert code == 2
    assert output.startswith(f"error: kv_store.host_bytes is {15 << 40}; it must be at most ")


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (None, ""),
        ({"host_pages": 256}, "KV store: 1.0 MiB of RAM (tournant kv status)\n"),
        ({"error": "it is gone"}, "KV store: it is gone\n"),
    ],
)
def test_the_store_has_a_line(capsys: pytest.CaptureFixture[str], facts: dict[str, object] | None, line: str) -> None:
    cli._show_store(facts, None)
    assert capsys.readouterr().out == line


def test_the_line_of_a_warm_start_tells_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"nvme_cap_bytes": 2 << 30, "adopted": 1234, "refused_records": 5, "corrupt_records": 6}
    cli._show_store({"host_pages": 256, **found}, "/kv")
    assert "up to 2.0 GiB in /kv: adopted 1,234, refused 5, corrupt 6" in capsys.readouterr().out


def test_a_hub_id_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.make_plan(None, {"model": "org/name"}).config.model == "org/name"


def test_ray_gets_a_fresh_secret_and_no_other_clusters_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("OTHER", "kept")
    first, second = cli.ray_environment(), cli.ray_environment()
    assert "RAY_ADDRESS" not in first
    assert first["RAY_AUTH_MODE"] == "token"
    assert first["OTHER"] == "kept"
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]


def test_chat_without_a_server_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, output = run("chat", "--url", f"http://127.0.0.1:{port}")
    assert code == 1
    assert output.startswith(f"error: no answer from http://127.0.0.1:{port}")
    assert len(output.splitlines()) == 1
