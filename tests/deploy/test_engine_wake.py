"""An engine is asked for while somebody waits, once at a time, whatever comes of it."""

from __future__ import annotations

import asyncio

from ray.serve.exceptions import RayServeException

from tests.deploy.async_test import async_test, settle
from tournant.deploy.engine_wake import EngineWake


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
