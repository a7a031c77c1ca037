"""An engine is asked for while somebody waits, once at a time, whatever comes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray import serve
from ray.serve._private.common import ReplicaState
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview, ServeStatus

from tests.deploy.async_test import async_test, settle
from tournant.deploy.engine_wake import EngineWake, engines_come, first_engine


@async_test
async def test_one_question_at_a_time() -> None:
    asked: list[asyncio.Future[None]] = []

    def ask() -> asyncio.Future[None]:
        asked.append(asyncio.get_running_loop().create_future())
        return asked[-1]

    wake = EngineWake(ask, pause_s=0.0)
    for _ in range(3):
        wake.want()
        await settle()
    assert len(asked) == 1
    asked[0].set_exception(RayServeException("no replica could be started"))
    await settle()
    wake.want()
    await settle()
    assert len(asked) == 2
    await wake.stop()
    await wake.stop()
    assert asked[1].cancelled()


@async_test
async def test_an_ingress_waits_as_long_as_an_engine_comes() -> None:
    ready, looks = asyncio.Event(), []

    def come() -> bool:
        looks.append(None)
        if len(looks) == 3:
            loop.call_soon_threadsafe(ready.set)
        return True

    loop = asyncio.get_running_loop()
    assert await first_engine(ready, come, look_s=0.001, limit_s=60.0)
    assert len(looks) >= 3
    assert await first_engine(ready, lambda: False, look_s=0.001, limit_s=0.0)


@async_test
async def test_an_ingress_does_not_wait_when_no_engine_comes_or_for_ever() -> None:
    ready = asyncio.Event()
    assert not await first_engine(ready, lambda: False, look_s=0.001, limit_s=60.0)
    assert not await first_engine(ready, lambda: True, look_s=0.001, limit_s=0.01)


@pytest.mark.parametrize("states", [dict, lambda states: {ReplicaState(name): count for name, count in states.items()}])
def test_engines_come_while_serve_has_or_starts_any(monkeypatch: pytest.MonkeyPatch, states: Any) -> None:
    """Serve says the names of states, though its types say that they are an enumeration's."""

    def come(**counts: int) -> bool:
        found = DeploymentStatusOverview("UPDATING", "UNSPECIFIED", states(counts), "")
        status = ServeStatus(applications={"a": ApplicationStatusOverview("DEPLOYING", "", 0.0, {"Replica": found})})
        monkeypatch.setattr(serve, "status", lambda: status)
        return engines_come("a", "Replica")

    assert come(STARTING=1)
    assert come(STOPPING=2, RUNNING=1)
    assert not come(STOPPING=2, STARTING=0)
    assert not come()
    assert not engines_come("b", "Replica")
