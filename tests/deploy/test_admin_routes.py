"""Weights over HTTP: who may change them, what is answered, and that a repeated wish is one update."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.asgi_client import fetch
from tests.deploy.async_test import async_test
from tests.deploy.fake_server import error_of, make
from tests.deploy.fake_weights import FakeRollout
from tournant.cluster.weights_rollout import UpdateUnavailable
from tournant.deploy.tokenizer import Tokenizer

PATH = "/admin/weights"
WISH = {"model": "/models/new"}


@async_test
async def test_an_update_is_begun_and_its_status_told(tokenizer: Tokenizer) -> None:
    rollout = FakeRollout()
    app = make(tokenizer, "a", weights=rollout).app
    begun = await fetch(app, "POST", PATH, WISH, {"x-request-id": "one"})
    assert (begun.status, begun.json) == (202, {"epoch": 1, "status_url": PATH})
    assert rollout.asked == [("/models/new", "one")]
    found = await fetch(app, "GET", begun.json["status_url"])
    assert found.json == rollout.core.status(0).to_plain()
    assert (found.json["state"], found.json["epoch"], len(found.json["replicas"])) == ("running", 1, 2)
    rollout.turn()
    rollout.turn()
    assert (await fetch(app, "GET", PATH)).json["state"] == "done"


@async_test
async def test_a_repeated_wish_is_one_update_and_another_one_is_refused_meanwhile(tokenizer: Tokenizer) -> None:
    rollout = FakeRollout()
    server = make(tokenizer, "a", weights=rollout)
    key = {"idempotency-key": "one"}
    for request_id in ("r1", "r2"):
        begun = await fetch(server.app, "POST", PATH, WISH, key | {"x-request-id": request_id})
        assert (begun.status, begun.json["epoch"]) == (202, 1)
    call, error = await error_of(server, PATH, {"model": "/models/other"})
    assert (call.status, error["code"], error["type"]) == (409, "update_running", "conflict_error")
    assert "epoch 1 is not over" in error["message"]
    call = await fetch(server.app, "POST", PATH, {"model": "/models/other"}, key)
    error = call.json["error"]
    assert (call.status, error["code"], error["param"]) == (409, "update_name_taken", "idempotency-key")


@async_test
async def test_null_is_the_default_model_and_what_is_no_model_is_refused(tokenizer: Tokenizer) -> None:
    rollout = FakeRollout()
    server = make(tokenizer, "a", weights=rollout)
    for body, param in (
        ({}, "model"),
        ({"model": ""}, "model"),
        ({"model": "x" * 4097}, "model"),
        ({"model": 7}, "model"),
        (WISH | {"wait": True}, "wait"),
    ):
        call, error = await error_of(server, PATH, body)
        assert (call.status, error["param"]) == (400, param)
    for key in ("x" * 129, "a b", "é"):
        call, error = await error_of(server, PATH, WISH, headers={"idempotency-key": key})
        assert (call.status, error["param"]) == (400, "idempotency-key")
    assert rollout.asked == []
    assert (await fetch(server.app, "POST", PATH, {"model": None})).status == 202
    assert [model for model, _ in rollout.asked] == [None]


@async_test
async def test_without_an_answer_of_the_rollout_clients_are_told_to_come_again(tokenizer: Tokenizer) -> None:
    rollout = FakeRollout()
    rollout.error = UpdateUnavailable("no replica is there")
    server = make(tokenizer, "a", weights=rollout)
    for method, body in (("GET", None), ("POST", WISH)):
        call, error = await error_of(server, PATH, body, method)
        assert (call.status, call.headers["retry-after"], error["message"]) == (503, "1", "no replica is there")


@async_test
@pytest.mark.parametrize(
    ("client", "headers", "status"),
    [
        (("127.0.0.1", 5), {}, 200),
        (("127.8.8.8", 5), {}, 200),
        (("::1", 5), {}, 200),
        (("::ffff:127.0.0.1", 5), {}, 200),
        (("10.0.0.7", 5), {}, 403),
        (("::ffff:10.0.0.7", 5), {}, 403),
        (("localhost", 5), {}, 403),
        (None, {}, 403),
        (("127.0.0.1", 5), {"x-forwarded-for": "127.0.0.1"}, 403),
        (("127.0.0.1", 5), {"x-forwarded-for": ""}, 403),
        (("127.0.0.1", 5), {"forwarded": "for=10.0.0.7"}, 403),
        (("127.0.0.1", 5), {"origin": "https://example.org"}, 403),
    ],
)
async def test_only_this_machine_may(tokenizer: Tokenizer, client: Any, headers: dict[str, str], status: int) -> None:
    rollout = FakeRollout()
    app = make(tokenizer, "a", weights=rollout).app
    assert (await fetch(app, "GET", PATH, None, headers, {"client": client})).status == status
    call = await fetch(app, "POST", PATH, WISH, headers, {"client": client})
    assert call.status == (202 if status == 200 else status)
    assert len(rollout.asked) == (status == 200)
    if status == 403:
        assert "is only for clients on the machine that it runs on" in call.error["message"]
        assert (call.error["code"], call.error["type"]) == ("not_loopback", "permission_error")


@async_test
async def test_other_methods_and_servers_without_a_rollout(tokenizer: Tokenizer) -> None:
    call, _ = await error_of(make(tokenizer, "a", weights=FakeRollout()), PATH, {}, method="PUT")
    assert (call.status, call.headers["allow"]) == (405, "GET, POST")
    assert (await error_of(make(tokenizer, "a"), PATH, {}))[0].status == 404
