"""The gate before an engine: open, or closed for a while in which requests wait and the engine is changed.

Owns who waits outside, who is on the way in (its prompt being encoded), who is inside, and what happens to each when
the engine behind the gate is changed. It knows no engines and no requests: who is inside is a `Guest`. One event loop.

Invariants:
 1. While the gate is closed nobody comes in; at most `max_waiting` answers wait, more are refused at once (Overloaded).
 2. Nobody is on the way in while the engine is changed: what was encoded for one engine is never given to the other.
 3. A guest that has delivered nothing is given to the next engine; one that has delivered ends with an error.
 4. Whatever happens to a change, the gate opens again, and every wait has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from tournant.deploy.errors import GenerationFailed
from tournant.workers.errors import Overloaded

ENTERING_S = 60.0  # for prompts to be encoded that were let in before the gate closed


class Guest(Protocol):
    """A request that an engine works on."""

    @property
    def delivered(self) -> bool:
        """Whether whoever reads it may have seen something of an answer."""

    def withdraw(self) -> None:
        """Take it back from the engine and forget what was generated; it is not over, and its time runs on."""

    def submit_again(self) -> None:
        """Give it to the engine of now, from the start. Raises whatever a new request may meet."""

    def fail(self, error: GenerationFailed) -> None:
        """End its unfinished answers with an error."""


class AdmissionGate:
    """See the module. Counts are of answers, of which a request may have several."""

    def __init__(self) -> None:
        self._closed = False
        self._max_waiting = 0
        self._num_waiting = self._num_entering = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._guests: dict[Guest, None] = {}  # in the order in which they came
        self._leaving = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Whether requests wait."""
        return self._closed

    @property
    def num_pending(self) -> int:
        """Answers that wait outside or are on the way in."""
        return self._num_waiting + self._num_entering

    @asynccontextmanager
    async def entry(self, num_answers: int, timeout_s: float) -> AsyncIterator[None]:
        """The way in: encode the prompt and submit it inside this block, which begins when the gate is open.

        Raises Overloaded when too many wait, GenerationFailed ("timeout") when it is closed for longer than timeout_s.
        """
        if self._closed:
            await self._wait_outside(num_answers, timeout_s)
        self._num_entering += num_answers
        try:
            yield
        finally:
            self._num_entering -= num_answers
            self._leaving.set()

    async def _wait_outside(self, num_answers: int, timeout_s: float) -> None:
        if self._num_waiting + num_answers > self._max_waiting:
            raise Overloaded(
                f"the weights are being changed and {self._num_waiting} answers wait for that, of at most "
                f"{self._max_waiting}; try again later"
            )
        self._num_waiting += num_answers
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            raise GenerationFailed(
                f"the request took longer than its limit of {timeout_s:g} s, while the weights were being changed",
                "timeout",
            ) from None
        finally:
            self._num_waiting -= num_answers
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def enter(self, guest: Guest) -> None:
        """A request has been given to the engine."""
        self._guests[guest] = None

    def leave(self, guest: Guest) -> None:
        """A request is over. Unknown ones are ignored."""
        self._guests.pop(guest, None)
        self._leaving.set()

    async def change(self, swap: Callable[[], Awaitable[None]], drain_s: float | None, max_waiting: int) -> None:
        """Close the gate, let those inside finish for `drain_s`, change the engine by `swap`, and open it again.

        drain_s None: only what comes from now on is for another engine, and those inside stay where they are.
        Who is inside still then is withdrawn and submitted again, or ends with an error, as invariant 3 says; also when
        swap raises, which is passed on. Raises RuntimeError when a change is under way, TimeoutError when a prompt was
        not encoded in time: nothing has happened then.
        """
        if self._closed:
            raise RuntimeError("the engine is being changed already")
        self._closed, self._max_waiting = True, max_waiting
        withdrawn: list[Guest] = []
        try:
            await self._until(lambda: not self._num_entering, ENTERING_S)
            if drain_s is not None:
                try:
                    await self._until(lambda: not self._guests, drain_s)
                except TimeoutError:
                    withdrawn = self._clear(drain_s)
            await swap()
        finally:
            self._open(withdrawn)

    async def _until(self, true: Callable[[], bool], timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while not true():
                self._leaving.clear()
                await self._leaving.wait()

    def _clear(self, drain_s: float) -> list[Guest]:
        """Empty the engine. Returns the guests that have delivered nothing."""
        withdrawn = []
        for guest in list(self._guests):
            if guest.delivered:
                guest.fail(
                    GenerationFailed(
                        f"the weights are being changed and the answer was not complete {drain_s:g} s later; send the "
                        "request again",
                        "weights_changed",
                    )
                )
            else:
                guest.withdraw()
                withdrawn.append(guest)
        return withdrawn

    def _open(self, withdrawn: list[Guest]) -> None:
        """First those who were inside, then those who waited, in their order."""
        for guest in withdrawn:
            if guest not in self._guests:
                continue  # it ended meanwhile
            try:
                guest.submit_again()
            except (ValueError, RuntimeError) as error:  # as it is, the engine of now cannot have it
                guest.fail(GenerationFailed(f"after the weights were changed: {error}", "weights_changed"))
        self._closed = False
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
