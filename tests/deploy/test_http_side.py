"""The operators' routes on a port of their own, by real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.asgi_client import fetch
from tests.deploy.async_test import async_test
from tests.deploy.fake_server import ASK, CHAT, make
from tests.deploy.fake_weights import FakeRollout
from tests.deploy.keys import KEYS, bearer, tenants, write_secret
from tournant.cluster.metrics import MetricsRegistry, PrometheusBackend
from tournant.deploy import http_side
from tournant.deploy.access_config import AccessConfig
from tournant.deploy.http_server import HttpOptions
from tournant.deploy.http_side import HttpSide
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.errors import ConfigError

WEIGHTS, RESET = "/admin/weights", "/reset_prefix_cache"


def side(tokenizer: Tokenizer, **config: Any) -> HttpSide:
    backend, server = PrometheusBackend(), make(tokenizer, "abc")
    return HttpSide(
        AccessConfig(**config),
        lambda: server.frontend,
        HttpOptions(("m",)),
        MetricsRegistry("m", backend),
        backend,
        FakeRollout(),
    )


@asynccontextmanager
async def operators(found: HttpSide) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the port, once it is there."""
    try:
        while found.admin_address is None:
            await asyncio.sleep(0.001)
        async with httpx.AsyncClient(base_url="http://{}:{}".format(*found.admin_address)) as client:
            yield client
    finally:
        await found.close()


@async_test
async def test_a_port_of_their_own_needs_their_key(tokenizer: Tokenizer, tmp_path: Path) -> None:
    found = side(
        tokenizer,
        admin_port=0,
        admin_key_file=str(write_secret(tmp_path / "admin", KEYS["root"])),
        api_keys_file=str(write_secret(tmp_path / "keys", tenants("ann"))),
    )
    async with operators(found) as client:
        assert (await client.get("/health")).status_code == 200
        for method, path in (("GET", WEIGHTS), ("POST", WEIGHTS), ("POST", RESET), ("GET", "/metrics"), ("GET", "/x")):
            for headers, status in (({}, 401), (bearer("bob"), 401), (bearer("ann"), 403)):
                answer = await client.request(method, path, headers=headers)
                assert (answer.status_code, path) == (status, path)
        assert (await client.get(WEIGHTS, headers=bearer("root"))).status_code == 200
        assert (await client.post(WEIGHTS, headers=bearer("root"), json={"model": "x"})).status_code == 202
        assert (await client.post(RESET, headers=bearer("root"))).json() == {"success": True}
        assert "vllm_num_requests_running" in (await client.get("/metrics", headers=bearer("root"))).text
        assert (await client.post(CHAT, headers=bearer("root"), json=ASK)).status_code == 404
        address = found.admin_address
    assert found.admin_address is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address or ("", 0)).close()


@async_test
async def test_beside_the_api_there_is_none_of_it_then(tokenizer: Tokenizer, tmp_path: Path) -> None:
    found = side(tokenizer, admin_port=0)
    for path in (WEIGHTS, RESET):
        assert (await fetch(found.app, "POST", path, {})).status == 404
    async with operators(found) as client:  # without a key, but from this machine
        assert (await client.get(WEIGHTS)).status_code == 200
        assert (await client.get(WEIGHTS, headers={"x-forwarded-for": "10.0.0.1"})).status_code == 403


@async_test
async def test_without_such_a_port_they_are_beside_the_api_for_this_machine(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for config, headers in (
        ({}, {}),
        ({"api_keys_file": str(write_secret(tmp_path / "keys", tenants("ann")))}, bearer("ann")),
    ):
        found = side(tokenizer, **config)
        assert (await fetch(found.app, "POST", RESET, None, headers)).json == {"success": True}
        assert (await fetch(found.app, "GET", WEIGHTS, None, headers)).status == 200
        for path in (RESET, WEIGHTS):
            call = await fetch(found.app, "POST", path, {}, headers, {"client": ("10.0.0.7", 5)})
            assert (call.status, call.error["code"]) == (403, "not_loopback")
        await found.close()


@async_test
async def test_a_port_that_another_replica_has_is_taken_over_when_it_ends(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_side, "RETRY_S", 0.001)
    first = side(tokenizer, admin_port=0)
    async with operators(first) as client:
        assert (await client.get("/health")).status_code == 200
        port = first.admin_address[1] if first.admin_address else 0
        second, third = side(tokenizer, admin_port=port), side(tokenizer, admin_port=port)
        while caplog.text.count("for operators cannot be had") < 2:
            await asyncio.sleep(0.001)
        await third.close()  # while it waits
    async with operators(second) as client:
        assert second.admin_address == ("127.0.0.1", port)
        assert (await client.get("/health")).status_code == 200


@async_test
async def test_files_that_cannot_be_used_are_told_at_the_start(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keys cannot be read: No such file"):
        side(tokenizer, api_keys_file=str(tmp_path / "keys"))
    key = write_secret(tmp_path / "k", KEYS["root"], 0o644)
    with pytest.raises(ConfigError, match="has mode 0644"):
        side(tokenizer, admin_port=0, admin_key_file=str(key))
