"""Keys over HTTP: who is let in, whose cached blocks are shared, what quotas answer, and that no route is forgotten."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.asgi_client import Call, fetch, start
from tests.deploy.async_test import async_test, settle
from tests.deploy.fake_server import ASK, CHAT, COMPLETIONS, PROMPT, Server, make
from tests.deploy.fake_weights import FakeRollout
from tests.deploy.keys import KEYS, Clock, access_for, bearer, tenants, write_secret
from tournant.deploy.access import (
    MAX_KEYS,
    RESERVED_SALT,
    Access,
    cache_salt,
    digest_of,
    parse_keys,
    parse_one_key,
)
from tournant.deploy.access_config import AccessConfig
from tournant.deploy.errors import RequestError
from tournant.deploy.http_server import public_routes
from tournant.deploy.quota import Tenant
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.errors import ConfigError

LONG = {"prompt": "x" * 64, "max_tokens": 1, "temperature": 0}


def served(tokenizer: Tokenizer, access: Access, **engine: Any) -> Server:
    return make(tokenizer, "abc", access=access, weights=FakeRollout(), **engine)


@async_test
async def test_with_keys_every_route_needs_one_but_health(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The table of the server itself is gone through, so a new route is in this test."""
    for config, public in (({}, {"/health"}), ({"public_metrics": True}, {"/health", "/metrics"})):
        access = access_for(tmp_path, tenants("ann"), **config)
        server = served(tokenizer, access)
        pairs = [(path, method) for path, handlers in server.app.routes.items() for method in handlers]
        assert len(pairs) >= 12
        assert set(public_routes(access)) == public
        for path, method in [*pairs, ("/v1/models/m", "GET"), ("/nothing", "GET"), ("/health/", "GET"), (CHAT, "PUT")]:
            for headers in ({}, {"authorization": "Bearer tn-nobody-0123456789"}):
                call = await fetch(server.app, method, path, {} if method == "POST" else None, headers)
                assert (call.status == 401) == (path not in public), (path, method)
        assert server.engine.submitted == []


@async_test
async def test_without_keys_everybody_may_come_in(tokenizer: Tokenizer) -> None:
    server = served(tokenizer, Access(AccessConfig()))
    assert (await fetch(server.app, "POST", CHAT, ASK)).status == 200
    assert server.engine.submitted[0].cache_salt is None


@async_test
@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        ("Bearer", "missing_api_key"),
        ("Bearer  ", "missing_api_key"),
        (f"Basic {KEYS['ann']}", "missing_api_key"),
        (KEYS["ann"], "missing_api_key"),
        (f"Bearer {KEYS['ann']} x", "missing_api_key"),
        ("Bearer " + "x" * 100_000, "missing_api_key"),
        (f"Bearer {KEYS['ann'][:-1]}", "invalid_api_key"),
        (f"Bearer {KEYS['ann']}x", "invalid_api_key"),
        (f"Bearer {digest_of(KEYS['ann']).hex()}", "invalid_api_key"),
        (f"Bearer {KEYS['ann']}", None),
        (f"bearer  {KEYS['ann']} ", None),
    ],
)
async def test_what_a_wrong_key_is_told(tokenizer: Tokenizer, tmp_path: Path, header: str | None, code: str) -> None:
    server = served(tokenizer, access_for(tmp_path, tenants("ann", "bob")))
    call = await fetch(server.app, "POST", CHAT, ASK, {} if header is None else {"authorization": header})
    if code is None:
        assert call.status == 200
        return
    assert (call.status, call.error["code"], call.error["type"]) == (401, code, "invalid_request_error")
    assert call.headers["www-authenticate"].startswith("Bearer")
    assert KEYS["ann"] not in call.text
    assert server.engine.submitted == []


@async_test
async def test_the_log_names_the_tenant_and_no_key(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = served(tokenizer, access_for(tmp_path, tenants("ann")))
    caplog.set_level("DEBUG")
    await fetch(server.app, "POST", CHAT, ASK, bearer("ann"))
    await fetch(server.app, "POST", CHAT, ASK, {"authorization": "Bearer tn-guess-0123456789"})
    assert '"tenant": "ann"' in caplog.text
    assert KEYS["ann"] not in caplog.text
    assert "guess" not in caplog.text


# ---------------------------------------------------------------- the file


def test_forms_of_a_file(tmp_path: Path) -> None:
    yaml = f"tenants:\n- name: ann\n  digests: [{digest_of(KEYS['ann']).hex()}]\n  max_outstanding: 3\n"
    assert parse_keys(tmp_path, yaml.encode()).find(KEYS["ann"].encode()) == Tenant("ann", max_outstanding=3)
    only = parse_keys(tmp_path, f"{KEYS['bob']}\n".encode())
    assert only.find(KEYS["bob"].encode()) == Tenant("default")
    assert only.find(KEYS["ann"].encode()) is None
    assert parse_one_key(tmp_path, f" {KEYS['root']}\n".encode()) == digest_of(KEYS["root"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "the file must be a mapping"),
        ("short", "must hold one key of 16 to 512"),
        ("tenants: []", "tenants: List should have at least 1 item"),
        ("users: []", "the file has something else than tenants"),
        ("tenants: [{name: ann, keys: [SECRET-0123456789], quota: 1}]", r"tenants\.0 has something else than name,"),
        ("tenants: [{keys: [SECRET-0123456789]}]", r"tenants\.0\.name is missing"),
        ("tenants: [{name: a b, keys: [SECRET-0123456789]}]", r"tenants\.0\.name must have 1 to 64 letters"),
        ("tenants: [{name: ann}]", "tenant ann has no keys; `tournant keys new ann` makes one"),
        ("tenants: [{name: ann, keys: [SECRET]}]", r"tenants\.0\.keys\.0 must have 16 to 512 printable"),
        ("tenants: [{name: ann, digests: [SECRET]}]", r"tenants\.0\.digests\.0 must have 64 hexadecimal"),
        (
            "tenants: [{name: a, keys: [SECRET-0123456789], max_outstanding: 0}]",
            "max_outstanding: it should be greater",
        ),
        ("tenants: [{name: a, keys: [SECRET-0123456789]}, {name: a, keys: [SECRET-0123456789x]}]", "two tenants a;"),
        (
            "tenants: [{name: a, keys: [SECRET-0123456789]}, {name: b, keys: [SECRET-0123456789]}]",
            "a key is there twice",
        ),
        ("tenants:\n- *SECRET-0123456789", "is not YAML that can be read, line 2"),
        ("tenants:\n- {name: a, SECRET-0123456789: 1, SECRET-0123456789: 2}", "is not YAML that can be read, line 2"),
        ("- !!python/object:SECRET {}", "is not YAML that can be read"),
    ],
)
def test_a_wrong_file_is_told_without_what_it_holds(content: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        parse_keys(Path("/etc/keys"), content.encode())
    assert "SECRET" not in str(error.value)
    assert all(line.startswith("/etc/keys") for line in str(error.value).splitlines())


def test_keys_are_bounded() -> None:
    keys = [f"key-{number:016}" for number in range(MAX_KEYS + 1)]
    with pytest.raises(ConfigError, match=rf"{MAX_KEYS + 1} keys; at most {MAX_KEYS}"):
        parse_keys(Path("k"), str({"tenants": [{"name": "a", "keys": keys}]}).encode())


@async_test
async def test_a_changed_file_holds_from_the_next_second_on(tokenizer: Tokenizer, tmp_path: Path) -> None:
    clock = Clock()
    server = served(tokenizer, access_for(tmp_path, tenants("ann", max_outstanding=1), clock), auto=False)

    async def ask(name: str) -> Call:
        call = start(server.app, "POST", CHAT, ASK, bearer(name))
        while not call.sent and not server.engine.running:
            await asyncio.sleep(0)
        return call

    running = await ask("ann")
    write_secret(tmp_path / "keys", tenants("ann", "bob", max_outstanding=1))
    assert (await ask("bob")).task.done() or server.engine.running  # within the second either may be
    clock.now += 1.0
    second = await fetch(server.app, "POST", CHAT, ASK, bearer("ann"))
    assert second.status == 429  # what ann had outstanding she still has
    write_secret(tmp_path / "keys", tenants("bob"))
    clock.now += 1.0
    assert (await fetch(server.app, "POST", CHAT, ASK, bearer("ann"))).status == 401
    while server.engine.running:
        server.engine.step()
        await settle()
    await running.task
    assert running.status == 200


# ---------------------------------------------------------------- cached blocks


@async_test
async def test_tenants_share_no_blocks_unless_both_want_to(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Equal keys are a hit: the engine looks blocks up by nothing else (case 23)."""
    content = tenants("ann", "bob")
    server = served(tokenizer, access_for(tmp_path, content))

    async def keys(name: str, **body: Any) -> list[bytes]:
        call = await fetch(server.app, "POST", COMPLETIONS, LONG | body, bearer(name))
        assert call.status == 200
        request = server.engine.submitted[-1]
        info = server.engine.info
        assert info.namespace_for(len(request.token_ids)).digest(request.cache_salt) == request.namespace_digest
        return request.keys

    ann, bob = await keys("ann"), await keys("bob")
    assert len(ann) == 4
    assert await keys("ann") == ann
    assert not set(ann) & set(bob)
    salted = await keys("ann", cache_salt="s")
    assert not set(salted) & (set(ann) | set(bob) | set(await keys("bob", cache_salt="s")))
    assert await keys("ann", cache_salt="s") == salted
    assert await keys("ann", cache_salt="") != ann
    server = served(tokenizer, access_for(tmp_path, tenants("ann", "bob", share_cache=True)))
    assert await keys("ann") == await keys("bob")
    assert await keys("ann", cache_salt="s") == await keys("bob", cache_salt="s")


@async_test
async def test_nobody_can_name_the_blocks_of_a_tenant(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ann = cache_salt(Tenant("ann"), None)
    assert ann is not None
    for access in (Access(AccessConfig()), access_for(tmp_path, tenants("bob", share_cache=True))):
        server = served(tokenizer, access)
        for salt in (ann, RESERVED_SALT):
            call = await fetch(server.app, "POST", COMPLETIONS, LONG | {"cache_salt": salt}, bearer("bob"))
            assert (call.status, call.error["param"]) == (400, "cache_salt")


def test_names_and_salts_cannot_be_shifted_into_each_other() -> None:
    pairs = [("a", "b"), ("ab", ""), ("ab", None), ("a", None), ("a", "\x00b"), ("a", "\x01"), ("a", "")]
    assert len({cache_salt(Tenant(name), salt) for name, salt in pairs}) == len(pairs)
    with pytest.raises(RequestError, match="257 bytes; at most 256"):
        cache_salt(Tenant("a"), "x" * 257)
    assert cache_salt(Tenant("a", share_cache=True), "x") == cache_salt(None, "x") == "x"


# ---------------------------------------------------------------- quotas


@async_test
@pytest.mark.parametrize("stream", [False, True])
async def test_a_tenant_beyond_its_quota_is_told_when_to_come_again(
    tokenizer: Tokenizer, tmp_path: Path, stream: bool
) -> None:
    clock = Clock()
    limits = {"requests_per_minute": 6, "tokens_per_minute": 600}
    server = served(tokenizer, access_for(tmp_path, tenants("ann", "bob", **limits), clock))
    body = PROMPT | {"stream": stream}
    for _ in range(6):
        assert (await fetch(server.app, "POST", COMPLETIONS, body, bearer("ann"))).status == 200
    call = await fetch(server.app, "POST", COMPLETIONS, body, bearer("ann"))
    assert (call.status, call.headers["retry-after"]) == (429, "10")
    assert (call.error["type"], call.error["code"]) == ("rate_limit_error", "quota_exceeded")
    assert "ann has used its 6 requests a minute" in call.error["message"]
    assert (await fetch(server.app, "POST", COMPLETIONS, body, bearer("bob"))).status == 200
    assert (await fetch(server.app, "GET", "/v1/models", None, bearer("ann"))).status == 200
    clock.now += 10
    assert (await fetch(server.app, "POST", COMPLETIONS, body, bearer("ann"))).status == 200


@async_test
async def test_prompt_and_answer_are_booked(tokenizer: Tokenizer, tmp_path: Path) -> None:
    clock = Clock()
    server = served(tokenizer, access_for(tmp_path, tenants("ann", tokens_per_minute=60), clock))
    body = {"prompt": [1] * 50, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    assert (await fetch(server.app, "POST", COMPLETIONS, body, bearer("ann"))).status == 200
    call = await fetch(server.app, "POST", COMPLETIONS, PROMPT, bearer("ann"))
    assert (call.status, call.headers["retry-after"]) == (429, "31")  # 30 of debt and one
    clock.now += 31
    call = await fetch(server.app, "POST", COMPLETIONS, body, bearer("ann"))
    assert (call.status, call.headers["retry-after"]) == (429, "49")
    assert len(server.engine.submitted) == 1


@async_test
async def test_outstanding_requests_end_with_their_clients(tokenizer: Tokenizer, tmp_path: Path) -> None:
    server = served(tokenizer, access_for(tmp_path, tenants("ann", max_outstanding=2)), auto=False)
    calls = [start(server.app, "POST", CHAT, ASK | {"stream": place == 1}, bearer("ann")) for place in range(2)]
    await settle()
    assert len(server.engine.running) == 2
    assert (await fetch(server.app, "POST", CHAT, ASK, bearer("ann"))).status == 429
    calls[1].disconnect()
    await calls[1].task
    call = start(server.app, "POST", CHAT, ASK, bearer("ann"))
    await settle()
    assert len(server.engine.running) == 2
    for one in (call, calls[0]):
        one.disconnect()
        await one.task


@async_test
async def test_what_the_service_refuses_is_not_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    content = tenants("ann", requests_per_minute=1, tokens_per_minute=10)
    server = served(tokenizer, access_for(tmp_path, content))
    for _ in range(3):
        bad = PROMPT | {"logit_bias": {"512": 1}}
        assert (await fetch(server.app, "POST", COMPLETIONS, bad, bearer("ann"))).status == 400
    server.engine.restart()
    for _ in range(3):
        assert (await fetch(server.app, "POST", COMPLETIONS, PROMPT, bearer("ann"))).status == 503
    server.engine.restarting = False
    assert (await fetch(server.app, "POST", COMPLETIONS, PROMPT, bearer("ann"))).status == 200
    assert (await fetch(server.app, "POST", COMPLETIONS, PROMPT, bearer("ann"))).status == 429
