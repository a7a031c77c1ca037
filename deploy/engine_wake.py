"""Has Serve start an engine when requests wait and there is none: what goes over streams Serve does not see.

Owns one question to the engines' deployment at a time, which Serve counts as a waiting request until a replica answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

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
