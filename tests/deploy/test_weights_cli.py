"""`tournant weights` against a real server whose roll-out is a fake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from tests.deploy.fake_server import make
from tests.deploy.fake_weights import FakeRollout
from tests.deploy.test_openai_client import listening
from tournant.cluster.weights_rollout import Status, UpdateUnavailable
from tournant.deploy import weights_cli
from tournant.deploy.cli import app
from tournant.deploy.tokenizer import Tokenizer


class Moving(FakeRollout):
    """Whenever somebody looks, one replica more has changed. failure: why none of them can."""

    failure = ""

    async def status(self) -> Status:
        found = await super().status()
        self.turn(self.failure if self.core.plan.failed == 0 else "")
        return found


@pytest.fixture
def rollout() -> Moving:
    return Moving()


@pytest.fixture
def url(tokenizer: Tokenizer, rollout: Moving, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(weights_cli, "POLL_S", 0.001)
    with listening(make(tokenizer, "a", weights=rollout).app) as address:
        yield address


def weights(*words: object) -> Result:
    return CliRunner().invoke(app, ["weights", *(str(word) for word in words)])


def test_an_update_is_followed_until_all_replicas_have_changed(url: str, rollout: Moving) -> None:
    found = weights("update", "org/new", "--url", url)
    assert found.exit_code == 0, found.output
    assert found.stdout == "update 1 is done: 2 replicas run org/new, weights 222222222222, as epoch 1\n"
    assert [model for model, _ in rollout.asked] == ["org/new"]


def test_a_failure_is_told_once_it_is_undone(url: str, rollout: Moving) -> None:
    rollout.failure = "tensor x is missing"
    found = weights("update", "org/new", "--url", url)
    assert found.exit_code == 1
    told = "error: update 1 failed, and all replicas have the weights from before: replica a: tensor x is missing\n"
    assert found.stderr.endswith(told)
    shown = weights("status", "--url", url).output
    assert "state failed\nepoch 2\nmodel old\n" in shown
    assert "failed_epoch 1\nerror replica a: tensor x is missing\n" in shown
    assert f"replica b serving, epoch 2, weights {'1' * 12}\n" in shown


def test_without_waiting_it_only_begins(url: str, rollout: Moving) -> None:
    found = weights("update", "org/new", "--url", url, "--no-wait")
    assert (found.exit_code, found.stdout) == (
        0, "update 1 has begun; `tournant weights status` shows how it gets on\n",
    )  # fmt: skip
    second = weights("update", "org/other", "--url", url)
    assert (second.exit_code, "epoch 1 is not over" in second.stderr) == (1, True)
    assert len({tag for _, tag in rollout.asked}) == 2


def test_a_path_is_made_absolute(url: str, rollout: Moving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path)
    assert weights("update", "new", "--url", url, "--no-wait").exit_code == 0
    assert rollout.asked[0][0] == str(tmp_path / "new")


def test_a_lost_answer_is_asked_for_again_under_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_cli, "POLL_S", 0.0)
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        assert json.loads(request.content) == {"model": "m"}
        if len(keys) < 3:
            raise httpx.ReadError("connection reset")
        return httpx.Response(202, json={"epoch": 4})

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://a") as client:
        assert weights_cli._begin(client, "m") == 4
    assert (len(keys), len(set(keys))) == (3, 1)


def test_a_service_that_is_away_for_a_while_is_waited_for(url: str, rollout: Moving) -> None:
    polls = 0
    original = rollout.core.status

    def status(now_us: int) -> Status:
        nonlocal polls
        polls += 1
        if polls < 4:
            raise UpdateUnavailable("the update service has begun anew")
        return original(now_us)

    rollout.core.status = status  # type: ignore[method-assign]
    assert weights("update", "org/new", "--url", url).exit_code == 0
    assert polls > 4


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_cli, "POLL_S", 0.0)
    for words in (("status",), ("update", "m")):
        found = weights(*words, "--url", "127.0.0.1:9")
        assert (found.exit_code, found.stderr.startswith("error: no answer from http://127.0.0.1:9: ")) == (1, True)
