"""A detached actor of an application that outlives replicas: found or made by its name, again when it died.

Owns the options of such an actor and the retries of a call to it. What it does, and what a caller is told when it does
not answer, are the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError

from tournant.cluster.app_namespace import namespace_of

RETRY_S = 0.2
MAX_CALLS = 8192  # at once: one of each replica, some of users


class NamedActor:
    """See the module; on one event loop. actor_class is made with `args`; errors: what its methods raise."""

    def __init__(
        self, app: str, name: str, actor_class: type, args: tuple[Any, ...], errors: tuple[type[Exception], ...]
    ) -> None:
        self.name = name
        self._app = app
        self._class = actor_class
        self._args = args
        self._errors = errors
        self._actor: Any = None

    async def call(self, call: Callable[[Any], Any], timeout_s: float) -> Any:
        """The answer to a call that may be made twice. Raises TimeoutError with what was wrong last, and `errors`."""
        problem = "it did not answer"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        if self._actor is None:
                            self._actor = await asyncio.to_thread(self._find)
                        return await call(self._actor)
                    except self._errors as error:
                        raise getattr(error, "cause", error) from None  # without Ray's report of where it came from
                    except (RayActorError, ValueError) as error:  # it died; or it ended while it was looked up
                        self._actor = None
                        problem = str(error).strip().splitlines()[-1]
                        await asyncio.sleep(RETRY_S)
        except TimeoutError:
            raise TimeoutError(problem) from None

    def _find(self) -> Any:
        actor_class: Any = ray.remote(self._class).options(
            name=self.name,
            namespace=namespace_of(self._app),
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=MAX_CALLS,
            scheduling_strategy="DEFAULT",  # else it is in the placement group of a replica, and ends with that
        )
        return actor_class.remote(*self._args)
