"""The roll-out of an application as a named actor, and the client that replicas and users speak to it with.

Owns the actor's name, its life, the clock and held calls; what is decided is weights_rollout.py's. Every replica calls
again and again; a call that has nothing to say is held until there is, or for HOLD_S.

The target is kept in the actor's memory and, with every order, in each replica's: an actor that Ray starts again only
listens for a while and takes the newest plan that it hears of. When the last replica ends too, nothing is left, and the
configured model is epoch 0: who wants to keep what an update brought writes it into the configuration. A deployment
with another configured model has another actor, so that a new configuration is never overruled by an old update.

Invariants:
 1. Every call has a deadline, and may be repeated.
 2. An update is confirmed only when a replica knows of it, so that it outlives the actor.
 3. The actor ends when no replica called for IDLE_S.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import ray
from ray.util.annotations import RayDeprecationWarning

from tournant.cluster.named_actor import NamedActor
from tournant.cluster.weights_rollout import (
    Action,
    Order,
    Phase,
    Report,
    Rollout,
    RolloutConfig,
    Status,
    UpdateNameTaken,
    UpdateRunning,
    UpdateUnavailable,
)

HOLD_S = 10.0  # a report is held this long
ANSWER_S = 5.0  # and answered this much later at most: together less than a follower's silence
ASK_S = 30.0
WATCH_S = 2.0
IDLE_S = 600.0


class WeightsActor:
    """See the module. model: the configured one; idle_s: when it ends without replicas. `WeightsClient` makes it."""

    def __init__(self, model: str | None, config: RolloutConfig, idle_s: float) -> None:
        context = ray.get_runtime_context()
        self._me = context.current_actor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RayDeprecationWarning)  # Ray's own: this asks in a way that it deprecates
            anew = bool(context.was_current_actor_reconstructed)
        self._rollout = Rollout(model, config, _now_us(), settling=anew)
        self._idle_s = idle_s
        self._heard = time.monotonic()
        self._known_epoch = 0  # the newest that a replica has heard of
        self._news = asyncio.Event()
        self._woken = (0, 0)  # what held calls have been woken for
        self._watcher: asyncio.Task[None] | None = None

    async def report(self, report: Report, hold_s: float) -> Order:
        """Answer a replica, at once if there is something new to it, else within `hold_s`."""
        self._watch()
        self._heard = time.monotonic()
        if report.seen is not None:
            self._known_epoch = max(self._known_epoch, report.seen.target.epoch)
        order = self._rollout.hear(_now_us(), report)
        self._wake()
        end = time.monotonic() + hold_s
        while _says_nothing(report, order) and (left := end - time.monotonic()) > 0:
            await self._wait(left)
            order = self._rollout.order(_now_us(), report.replica)
        return order

    async def update(self, model: str | None, tag: str) -> int:
        """Begin an update; its epoch, once a replica knows of it. Errors: as of `Rollout.update`."""
        self._watch()
        epoch = self._rollout.update(_now_us(), model, tag)
        self._wake()
        end = time.monotonic() + HOLD_S
        while self._known_epoch < epoch and (left := end - time.monotonic()) > 0:
            await self._wait(left)
        return epoch

    async def status(self) -> Status:
        """What everybody does."""
        self._watch()
        return self._rollout.status(_now_us())

    async def _wait(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout_s)

    def _wake(self) -> None:
        """Let held calls look again."""
        changes = (self._rollout.num_changes, self._known_epoch)
        if changes == self._woken:
            return
        self._woken = changes
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _watch(self) -> None:
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._keep_watch())

    async def _keep_watch(self) -> None:
        """Notice silence and deadlines though nobody calls; end when nobody has called for long."""
        while time.monotonic() - self._heard < self._idle_s:
            await asyncio.sleep(min(WATCH_S, self._idle_s))
            self._rollout.status(_now_us())
            self._wake()
        ray.kill(self._me, no_restart=True)


def _says_nothing(report: Report, order: Order) -> bool:
    waits = report.phase in (Phase.JOINING, Phase.SERVING) and order.action in (Action.WAIT, Action.STAY)
    return waits and order.plan == report.seen


def _now_us() -> int:
    return int(time.monotonic() * 1e6)


class WeightsClient:
    """The roll-out as replicas and users see it, on one event loop.

    app: name of the application; model: the configured one, which every replica of the application has.
    """

    def __init__(
        self, app: str, model: str | None, config: RolloutConfig | None = None, idle_s: float = IDLE_S
    ) -> None:
        made_with = model, config or RolloutConfig(), idle_s
        name = f"tournant-weights-{hashlib.sha256(repr(model).encode()).hexdigest()[:8]}"
        self._rollout = NamedActor(
            app, name, WeightsActor, made_with, (UpdateNameTaken, UpdateRunning, UpdateUnavailable)
        )

    @property
    def name(self) -> str:
        """The actor's name, in the namespace of the application."""
        return self._rollout.name

    async def report(self, report: Report, hold_s: float = HOLD_S) -> Order:
        """Report and get an order. Raises UpdateUnavailable when there is no answer in time."""
        return cast(Order, await self._call(lambda actor: actor.report.remote(report, hold_s), hold_s + ANSWER_S))

    async def update(self, model: str | None, tag: str) -> int:
        """Begin an update and return its epoch. Errors: as of `Rollout.update`."""
        return int(await self._call(lambda actor: actor.update.remote(model, tag), ASK_S))

    async def status(self) -> Status:
        """What everybody does. Raises UpdateUnavailable when there is no answer in time."""
        return cast(Status, await self._call(lambda actor: actor.status.remote(), ASK_S))

    async def _call(self, call: Callable[[Any], Any], timeout_s: float) -> Any:
        try:
            return await self._rollout.call(call, timeout_s)
        except TimeoutError as error:
            raise UpdateUnavailable(f"no answer about weights in {timeout_s:g} s: {error}; try again") from None
