"""A replica's part in weights updates: it asks what to start with, reports what it runs, and changes in its turn.

Owns the conversation with the roll-out and the time limit of a turn. What a change does is passed in (`Change`); what
is decided is the roll-out's.

Invariants:
 1. It reports all the time, also while it starts and changes: silence means that it is gone.
 2. A turn ends within its time, by a change, by a failure, or by `lost`: then the replica must be replaced.
 3. Without an answer from the roll-out a running replica goes on with what it has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from tournant.cluster.weights_actor import HOLD_S
from tournant.cluster.weights_follower import Follower
from tournant.cluster.weights_rollout import Action, Order, Phase, Report, UpdateUnavailable, Weights
from tournant.deploy.engine_swap import EngineSwap, SwapFailed
from tournant.deploy.frontend import Frontend
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.engine_server import EngineServer
from tournant.workers.errors import ConfigError, EngineDeadError, ModelFormatError
from tournant.workers.model_folder import ModelFiles

JOIN_S = 120.0
PAUSE_S = 1.0  # between reports that are answered at once, and after one without an answer
LEAVE_S = 2.0
CHANGE_ERRORS = (ConfigError, ModelFormatError, EngineDeadError, OSError)
Change = Callable[[Weights], Awaitable[str]]
"""Changes to weights and returns their weights_id in hex. Raises CHANGE_ERRORS or SwapFailed; then it serves what it
served before, unless a SwapFailed says that it does not."""

_LOG = logging.getLogger("tournant.weights")


class Reporting(Protocol):
    """What carries reports: `cluster.weights_actor.WeightsClient`."""

    async def report(self, report: Report, hold_s: float) -> Order:
        """The answer. Raises UpdateUnavailable when there is none in time."""


class WeightsLoop:
    """See the module. replica: a name that no other replica ever has. All methods are called on one event loop."""

    def __init__(self, replica: str, client: Reporting, change: Change, hold_s: float = HOLD_S) -> None:
        self.follower = Follower(replica)
        self.lost = ""  # why this replica must be replaced
        self.on_epoch: Callable[[int], None] = lambda epoch: None  # called when what it serves has another epoch
        self._epoch = 0
        self._client = client
        self._change = change
        self._hold_s = hold_s
        self._changing: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._accepted = asyncio.Event()

    @property
    def weights(self) -> Weights | None:
        """What it serves or starts with; None before `join`."""
        return self.follower.weights

    async def join(self) -> Weights:
        """The weights to start with. From now on it reports until `stop`.

        Raises UpdateUnavailable when there is no answer within JOIN_S.
        """
        end = time.monotonic() + JOIN_S
        problem = "the roll-out has only begun to listen"
        while self.follower.weights is None:
            if self.lost or time.monotonic() > end:
                raise UpdateUnavailable(f"no weights to start with in {JOIN_S:g} s: {self.lost or problem}")
            try:
                await self._exchange()
            except UpdateUnavailable as error:
                problem = str(error)
                await asyncio.sleep(PAUSE_S)
        self._hurry()
        return self.follower.weights

    async def started(self, weights_id: str) -> None:
        """It could serve; weights_id: hex, of what it found. Returns when the roll-out lets it.

        Raises ConfigError when others run other bytes of the same model.
        """
        self.follower.started(weights_id)
        self._hurry()
        await self._accepted.wait()
        if self.lost:
            raise ConfigError(self.lost)

    async def stop(self) -> None:
        """Say that this replica ends, if that can be said quickly. Idempotent."""
        tasks = [task for task in (self._reporting, self._changing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.follower.phase is not Phase.LEAVING:
            self.follower.leave("the replica was ended")
        with suppress(TimeoutError, UpdateUnavailable):
            await asyncio.wait_for(self._client.report(self.follower.report(), 0.0), LEAVE_S)

    def _hurry(self) -> None:
        """Report anew now: what is on its way says what is no longer so."""
        if self._reporting is not None:
            self._reporting.cancel()
        self._reporting = asyncio.get_running_loop().create_task(self._keep_reporting())

    async def _keep_reporting(self) -> None:
        """Until it is known that this replica is lost."""
        while True:
            phase = self.follower.phase
            try:
                await self._exchange()
            except UpdateUnavailable as error:
                _LOG.warning("%s", error)
                phase = Phase.CHANGING
            else:
                if self.lost:
                    return
            if phase is not Phase.SERVING:  # the answer is not held
                await asyncio.sleep(PAUSE_S)

    async def _exchange(self) -> None:
        """One report and what its answer makes of it."""
        report = self.follower.report()
        order = await self._client.report(report, self._hold_s)
        action = self.follower.take(report.number, order)
        if action is Action.LEAVE:
            self._lose(order.reason)
        elif action is Action.CHANGE:
            self._changing = asyncio.get_running_loop().create_task(self._take_turn(order.left_us / 1e6))
        if self.follower.accepted:
            self._accepted.set()
        if self.follower.phase is Phase.SERVING and self.weights is not None and self.weights.epoch != self._epoch:
            self._epoch = self.weights.epoch
            self.on_epoch(self._epoch)

    def _lose(self, why: str) -> None:
        _LOG.error("this replica must be replaced: %s", why)
        self.lost = why
        self._accepted.set()

    async def _take_turn(self, left_s: float) -> None:
        """Change to the target, or say why not, or be replaced."""
        target = self.follower.target
        if target is None:
            return
        _LOG.info("changing to the weights of epoch %d, %s", target.epoch, target.model)
        limit = asyncio.timeout(left_s)
        try:
            async with limit:
                self.follower.changed(await self._change(target))
        except (SwapFailed, *CHANGE_ERRORS) as error:
            why = f"it took longer than {left_s:g} s to change its weights" if limit.expired() else str(error)
            if limit.expired() or (isinstance(error, SwapFailed) and not error.serving):
                self.follower.leave(why)
                self._lose(why)
            else:
                _LOG.warning("the weights of epoch %d could not be loaded: %s", target.epoch, why)
                self.follower.failed(why)
        except Exception as error:  # nobody knows what this replica serves now
            _LOG.exception("the change to the weights of epoch %d broke", target.epoch)
            why = f"{type(error).__name__}: {error}"
            self.follower.leave(why)
            self._lose(why)
        else:
            _LOG.info("this replica serves the weights of epoch %d", target.epoch)
        self._hurry()


def weights_change(
    frontend: Frontend, engine: EngineSwap, resolve: Callable[[str | None], ModelFiles], drain_s: float
) -> Change:
    """The change of a replica that serves `frontend` from `engine`. resolve: from a model to its files, called in
    a thread; drain_s: how long running requests may go on. What can be known of the new weights is known, and what can
    be fetched is fetched, before the first request has to wait.
    """

    async def change(weights: Weights) -> str:
        files = await _files_of(weights, resolve)
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, files.folder)

        async def swap() -> Tokenizer:
            await engine.swap(files)
            frontend.epoch = weights.epoch
            return tokenizer

        await frontend.change_weights(swap, drain_s)
        return files.weights_id.hex()

    return change


def stream_change(
    server: EngineServer,
    engine: EngineSwap,
    resolve: Callable[[str | None], ModelFiles],
    drain_s: float,
    tell: Callable[[], None],
) -> Change:
    """The change of a replica that serves `engine` to frontends elsewhere, who resume what is not over after drain_s.
    tell: called when it drains, and when it serves again; the rest as of `weights_change`.
    """

    async def change(weights: Weights) -> str:
        files = await _files_of(weights, resolve)
        epoch, model = server.epoch, server.model
        server.begin_drain(drain_s)
        tell()
        try:
            await server.drained()
            await engine.swap(files)
            epoch, model = weights.epoch, weights.model
        finally:
            server.serve_again(epoch, model)
            tell()
        return files.weights_id.hex()

    return change


async def _files_of(weights: Weights, resolve: Callable[[str | None], ModelFiles]) -> ModelFiles:
    """The files of weights here. Raises ConfigError when they are not those that others have."""
    files = await asyncio.to_thread(resolve, weights.model)
    weights_id = files.weights_id.hex()
    if weights.weights_id not in ("", weights_id):
        raise ConfigError(
            f"{weights.model!r} is {weights_id[:12]} here and {weights.weights_id[:12]} where it was loaded first; "
            "give every node the same files, then update again"
        )
    return files
