"""HTTPS by the options that `tournant serve` gives to Serve's proxy, which serves with uvicorn as here."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
import uvicorn
from ray.serve.config import HTTPOptions
from typer.testing import CliRunner

from tests.deploy.async_test import async_test
from tests.deploy.fake_server import make
from tournant.deploy import cli
from tournant.deploy.http_client import open_client
from tournant.deploy.tls import check_tls
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.errors import ConfigError


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for this machine, signed by itself, and its key."""
    return make_pair(tmp_path, "one")


def make_pair(folder: Path, name: str) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    certificate, secret = folder / f"{name}.crt", folder / f"{name}.key"
    command = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    made = [
        *command.split(),
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(secret),
        "-out",
        str(certificate),
    ]
    subprocess.run(made, check=True, capture_output=True)
    return certificate, secret


@async_test
async def test_the_api_over_https(tokenizer: Tokenizer, pair: tuple[Path, Path]) -> None:
    plan = cli.make_plan(None, {"ssl_certfile": str(pair[0]), "ssl_keyfile": str(pair[1])})
    assert check_tls(plan.http_options)
    options = HTTPOptions(**plan.http_options)  # as Serve reads them
    config = uvicorn.Config(
        make(tokenizer, "abc").app,
        port=0,
        log_config=None,
        lifespan="off",
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.001)
    port = server.servers[0].sockets[0].getsockname()[1]

    def health(ca_file: Path | None) -> int:
        with open_client(f"https://127.0.0.1:{port}", 10.0, ca_file=ca_file) as client:
            return client.get("/health").status_code

    assert await asyncio.to_thread(health, pair[0]) == 200
    with pytest.raises(httpx.ConnectError, match="self-signed"):
        await asyncio.to_thread(health, None)
    server.should_exit = True
    await task


def test_the_ready_line_says_https(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"model": "m", "dtype": "bfloat16", "device": "cpu", "pool_tokens": 9000, "max_sequence_tokens": 8192}
    plan = cli.make_plan(None, {"ssl_certfile": str(pair[0]), "ssl_keyfile": str(pair[1]), "port": 8443})
    cli.ServiceRun(plan)._show_ready(facts | {"native_weights": False})
    assert "https://127.0.0.1:8443/v1 serves m" in capsys.readouterr().out


def test_files_that_cannot_be_used(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    certificate, key = (str(path) for path in pair)
    other = str(make_pair(tmp_path, "two")[1])
    empty = tmp_path / "empty"
    empty.touch()
    assert not check_tls({"root_path": "/x"})
    for options, said in (
        ({"ssl_certfile": certificate}, "ssl_keyfile is missing; HTTPS needs both"),
        ({"ssl_keyfile": key}, "ssl_certfile is missing"),
        ({"ssl_certfile": "/none.crt", "ssl_keyfile": key}, r"ssl_certfile /none\.crt cannot be read: No such file"),
        ({"ssl_certfile": certificate, "ssl_keyfile": "/none"}, "ssl_keyfile /none cannot be read: No such file"),
        ({"ssl_certfile": certificate, "ssl_keyfile": other}, "cannot be used together: .*must be PEM files"),
        ({"ssl_certfile": str(empty), "ssl_keyfile": key}, "cannot be used together"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_tls(options)


def test_the_command_line_says_so_before_anything_is_started(pair: tuple[Path, Path]) -> None:
    result = CliRunner().invoke(cli.app, ["serve", "--ssl-certfile", str(pair[0])])
    assert (result.exit_code, result.stderr) == (
        2, "error: ssl_keyfile is missing; HTTPS needs both ssl_certfile and ssl_keyfile\n",
    )  # fmt: skip


def test_tls_needs_no_older_protocol() -> None:
    assert ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).minimum_version >= ssl.TLSVersion.TLSv1_2
