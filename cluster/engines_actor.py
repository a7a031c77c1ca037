"""The registry of an application's engines as a named actor, and how replicas and frontends speak to it.

Owns the actor's name, its life, its clock and held calls; what is known is engine_members.py's. Replicas say every
HEARTBEAT_S that they live (`EngineAnnouncer`); a frontend has one call held that is answered when something is new
(`EngineWatch`). An actor that is started again knows nothing until they speak, which is soon; frontends keep what
works.

Invariants:
 1. Every call has a deadline, and may be repeated.
 2. The actor ends when nobody called for IDLE_S.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, cast

import ray

from tournant.cluster.engine_members import EngineMembers, Member, Members, MembersConfig, State, TooManyMembers
from tournant.cluster.named_actor import RETRY_S, NamedActor

ACTOR_NAME = "tournant-engines"
HEARTBEAT_S = 3.0  # a fifth of a lease
HOLD_S = 10.0  # a frontend's call is held this long
ANSWER_S = 5.0  # and answered this much later at most
LEAVE_S = 2.0
IDLE_S = 600.0
_LOG = logging.getLogger("tournant.engines")


class EnginesUnavailable(RuntimeError):  # noqa: N818 - names the fact
    """The registry did not answer in time."""


class EnginesActor:
    """See the module. idle_s: when it ends without calls. `EnginesClient` makes it."""

    def __init__(self, config: MembersConfig, idle_s: float) -> None:
        self._me = ray.get_runtime_context().current_actor
        self._members = EngineMembers(secrets.randbits(63), config)
        self._idle_s = idle_s
        self._heard = time.monotonic()
        self._told = self._members.known
        self._news = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    async def hear(self, member: Member) -> None:
        """A replica registers, changes, or only lives. Raises TooManyMembers."""
        self._watch()
        self._members.hear(_now_us(), member)
        self._wake()

    async def leave(self, replica: str) -> None:
        """A replica ends."""
        self._watch()
        self._members.leave(_now_us(), replica)
        self._wake()

    async def changes(self, known: tuple[int, int] | None, hold_s: float) -> Members:
        """Everybody, at once if that is not what the caller knows, else when it changes or after `hold_s`."""
        self._watch()
        end = time.monotonic() + hold_s
        while self._members.known == known and (left := end - time.monotonic()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)
        return self._members.members()

    def _wake(self) -> None:
        """Let held calls look again."""
        if self._members.known != self._told:
            self._told = self._members.known
            news, self._news = self._news, asyncio.Event()
            news.set()

    def _watch(self) -> None:
        self._heard = time.monotonic()
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._keep_watch())

    async def _keep_watch(self) -> None:
        """Notice leases that end though nobody calls; end when nobody has called for long."""
        while time.monotonic() - self._heard < self._idle_s:
            await asyncio.sleep(min(1.0, self._idle_s))
            self._members.expire(_now_us())
            self._wake()
        ray.kill(self._me, no_restart=True)


def _now_us() -> int:
    return int(time.monotonic() * 1e6)


class EnginesClient:
    """The registry of one application, on one event loop."""

    def __init__(self, app: str, config: MembersConfig | None = None, idle_s: float = IDLE_S) -> None:
        made_with = config or MembersConfig(), idle_s
        self._registry = NamedActor(app, ACTOR_NAME, EnginesActor, made_with, (TooManyMembers,))

    async def hear(self, member: Member) -> None:
        """Say that an engine is there. Raises EnginesUnavailable, TooManyMembers."""
        await self._call(lambda actor: actor.hear.remote(member), ANSWER_S)

    async def leave(self, replica: str) -> None:
        """Say that an engine ends. Raises EnginesUnavailable."""
        await self._call(lambda actor: actor.leave.remote(replica), ANSWER_S)

    async def changes(self, known: tuple[int, int] | None, hold_s: float = HOLD_S) -> Members:
        """Everybody, once it is not what is `known`, or after `hold_s`. Raises EnginesUnavailable."""
        return cast(Members, await self._call(lambda actor: actor.changes.remote(known, hold_s), hold_s + ANSWER_S))

    async def _call(self, call: Callable[[Any], Any], timeout_s: float) -> Any:
        try:
            return await self._registry.call(call, timeout_s)
        except TimeoutError as error:
            raise EnginesUnavailable(f"no answer about engines in {timeout_s:g} s: {error}") from None


class Registry(Protocol):
    """What `EnginesClient` gives to those below."""

    async def hear(self, member: Member) -> None:
        """See `EnginesClient.hear`."""

    async def leave(self, replica: str) -> None:
        """See `EnginesClient.leave`."""

    async def changes(self, known: tuple[int, int] | None) -> Members:
        """See `EnginesClient.changes`."""


class EngineAnnouncer:
    """A replica's part: says again and again what its engine is, at once when that changes. One event loop."""

    def __init__(self, registry: Registry, member: Member, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.member = member
        self._registry = registry
        self._heartbeat_s = heartbeat_s
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(self._keep_announcing())

    def change(self, *, state: State | None = None, weights_id: str | None = None, epoch: int | None = None) -> None:
        """What is other from now on."""
        member = self.member
        self.member = replace(
            member,
            state=member.state if state is None else state,
            weights_id=member.weights_id if weights_id is None else weights_id,
            epoch=member.epoch if epoch is None else epoch,
        )
        self._changed.set()

    async def stop(self) -> None:
        """Say that it ends, if that can be said quickly. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with suppress(TimeoutError, EnginesUnavailable):
            await asyncio.wait_for(self._registry.leave(self.member.replica), LEAVE_S)

    async def _keep_announcing(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._registry.hear(self.member)
            except (EnginesUnavailable, TooManyMembers) as error:
                _LOG.warning("frontends may not find this engine: %s", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._heartbeat_s)


class EngineWatch:
    """A frontend's part: tells `on_members` who there is, at once and whenever that changes. One event loop."""

    def __init__(self, registry: Registry, on_members: Callable[[tuple[Member, ...]], None]) -> None:
        self._registry = registry
        self._on_members = on_members
        self._task = asyncio.get_running_loop().create_task(self._keep_watching())

    async def stop(self) -> None:
        """Watch no more. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_watching(self) -> None:
        known: tuple[int, int] | None = None
        while True:
            try:
                found = await self._registry.changes(known)
            except EnginesUnavailable as error:
                _LOG.warning("%s", error)
                await asyncio.sleep(RETRY_S)
                continue
            if found.known != known:
                known = found.known
                self._on_members(found.members)
