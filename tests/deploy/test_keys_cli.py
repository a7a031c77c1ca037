"""`tournant keys`, and the flags by which other commands send a key."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.deploy.fake_server import make
from tests.deploy.fake_weights import FakeRollout
from tests.deploy.keys import KEYS, access_for, tenants, write_secret
from tests.deploy.test_openai_client import listening
from tournant.deploy import cli
from tournant.deploy.access import parse_keys
from tournant.deploy.tokenizer import Tokenizer


def run(*words: object) -> Result:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def test_a_new_key_is_printed_once_with_its_line(tmp_path: Path) -> None:
    found = run("keys", "new", "team-1")
    assert found.exit_code == 0
    key, line = found.stdout.splitlines()
    assert key not in line
    ring = parse_keys(tmp_path, f"tenants:\n{line}\n".encode())
    tenant = ring.find(key.encode())
    assert tenant is not None
    assert (tenant.name, tenant.share_cache) == ("team-1", False)
    assert len(key) >= 43
    assert run("keys", "new", "team-1").stdout.splitlines()[0] != key


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "é", "a\n"])
def test_names_that_are_none(name: str) -> None:
    found = run("keys", "new", name)
    assert (found.exit_code, found.stdout) == (2, "")
    assert "is no name" in found.stderr


def test_commands_send_the_key_of_a_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    server = make(tokenizer, "a", weights=FakeRollout(), access=access_for(tmp_path, tenants("ann")))
    key = write_secret(tmp_path / "key", KEYS["ann"] + "\n")
    with listening(server.app) as url:
        assert run("weights", "status", "--url", url, "--key-file", key).exit_code == 0
        without = run("weights", "status", "--url", url)
        assert (without.exit_code, "an API key is needed" in without.stderr) == (1, True)
        assert "(HTTP 401)" in run("chat", "--url", url).stderr
        assert f"m at {url}" in run("chat", "--url", url, "--key-file", key).stdout
    for flags in (("--key-file", tmp_path / "none"), ("--ca-file", tmp_path / "none"), ("--ca-file", key)):
        for command in (("weights", "status"), ("chat",)):
            found = run(*command, *flags)
            assert (found.exit_code, found.stderr.startswith(f"error: {flags[1]}: ")) == (2, True), found.output


def test_serve_checks_the_files_first(tmp_path: Path) -> None:
    keys = write_secret(tmp_path / "keys", tenants("ann"), 0o644)
    found = run("serve", "--api-keys-file", keys)
    assert (found.exit_code, f"{keys} has mode 0644" in found.stderr) == (2, True)
    found = run("serve", "--admin-key-file", keys)
    assert (found.exit_code, "access.admin_key_file needs access.admin_port" in found.stderr) == (2, True)


def test_paths_of_flags_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    access = cli.make_plan(None, {"api_keys_file": "keys", "admin_port": 0, "admin_key_file": "~/k"}).config.access
    assert access.api_keys_file == str(tmp_path / "keys")
    assert access.admin_key_file == str(Path("~/k").expanduser())
    assert access.admin_port == 0
