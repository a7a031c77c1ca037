"""An ingress without an engine: it has Serve start one, which does not see what goes over streams, and waits for it.

Owns one question to the engines' deployment at a time, which Serve counts as a waiting request until a replica answers,
and how long an ingress that is new waits before it lets itself be found without an engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

COMING = ("STARTING", "UPDATING", "RECOVERING", "RUNNING", "PENDING_MIGRATION")  # not those that stop
logger = logging.getLogger("tournant.resilient")


class EngineWake:
    """See the module. ask: answered by any engine, whatever with; pause_s: between two questions."""

    def __init__(self, ask: Callable[[], Awaitable[object]], pause_s: float = 1.0) -> None:
        self._ask = ask
        self._pause_s = pause_s
        self._asking: asyncio.Task[None] | None = None

    def want(self) -> None:
        """Somebody waits for an engine. Cheap, on the event loop."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._wake())

    async def stop(self) -> None:
        """Ask no more. Idempotent."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _wake(self) -> None:
        try:
            await self._ask()
        except (RayError, RayServeException) as error:
            logger.warning("no engine answers: %s", error)
        await asyncio.sleep(self._pause_s)


def engines_come(app_name: str, deployment: str) -> bool:
    """Whether Serve has engines or starts some. False when it does not say so; blocks."""
    try:
        status = serve.status().applications[app_name].deployments[deployment]
    except (RayError, RayServeException, KeyError) as error:
        logger.warning("what Serve does about engines is not known: %s", error)
        return False
    return any(count and state in COMING for state, count in status.replica_states.items())  # names, or equal to them


async def first_engine(ready: asyncio.Event, come: Callable[[], bool], look_s: float, limit_s: float) -> bool:
    """Wait until there is an engine. False when none comes, by a look every so often, or not within the limit."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    while not ready.is_set():
        try:
            await asyncio.wait_for(ready.wait(), look_s)
        except TimeoutError:
            if loop.time() >= end or not await asyncio.to_thread(come):
                return ready.is_set()
    return True
