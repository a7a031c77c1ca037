"""HTTPS by the options that `tournant serve` gives to Serve's proxy, which serves with uvicorn as here."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from ipaddress import IPv4Address
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

x509 = pytest.importorskip("cryptography.x509", reason="cryptography, which makes the certificate, is not installed")
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for this machine, signed by itself, and its key."""
    return make_pair(tmp_path, "one")


def make_pair(folder: Path, name: str) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, secret = folder / f"{name}.crt", folder / f"{name}.key"
    certificate.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
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
