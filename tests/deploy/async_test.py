"""Run a coroutine as a test, on a loop of its own and never for ever."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable

TIME_LIMIT_S = 20.0


def async_test(function: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> None:
        async def limited() -> None:
            await asyncio.wait_for(function(*args, **kwargs), TIME_LIMIT_S)

        asyncio.run(limited())

    return run


async def settle() -> None:
    """Let every callback and task that can run now do so."""
    for _ in range(5):
        await asyncio.sleep(0)
