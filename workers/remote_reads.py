"""What a link asks the agent of its node: who else holds blocks of a chain, and to bring them into the store here.

Owns the connection to the agent, the questions under way with their deadlines, and the pause after the agent failed.
Runs on the link's thread and never waits. What is asked, and what becomes of the answers, is link_reads.py's.

Invariants:
 1. Every question is answered by one call back, in time: with what came, or with None.
 2. Whatever the agent does or does not do, the link goes on as if there were none.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tournant.kvstore.agent_client import AgentClient
from tournant.kvstore.agent_wire import MAX_KEYS, AgentAnswer, Brought, Located
from tournant.kvstore.block import Part
from tournant.kvstore.errors import StoreUnavailable

REST_S = 10.0  # how long an agent that failed, or was late with blocks, is not asked
LATE_S = 1.0  # the same for one that was late with telling who has them
MAX_OPEN = 32  # questions that it owes an answer; with more it has failed
_LOG = logging.getLogger("tournant.tiers")
_A = TypeVar("_A", Located, Brought)


@dataclass(frozen=True, slots=True)
class RemoteIdentity:
    """Of the engine: as in `LinkIdentity`; slot_bytes: sizes of its blocks. locate_s, bring_s: how long it waits."""

    weights_id: bytes
    kv_form: str
    tenant_check: bytes
    part: Part
    slot_bytes: tuple[int, ...]
    locate_s: float
    bring_s: float


@dataclass(frozen=True, slots=True)
class _Asked:
    until: float
    kind: type[Located] | type[Brought]
    done: Callable[[AgentAnswer | None], None]


class RemoteReads:
    """See the module. path: of the agent's socket, where none may listen; clock: seconds."""

    def __init__(self, path: Path, identity: RemoteIdentity, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._who, self._clock = path, identity, clock
        self._client: AgentClient | None = None
        self._asked: dict[int, _Asked] = {}
        self._rests_until = 0.0

    def locate(self, keys: Sequence[bytes], done: Callable[[Located | None], None]) -> int:
        """Ask who else holds the leading ones of these keys; number of the question, 0 when nobody can be asked."""
        wanted, part = keys[:MAX_KEYS], self._who.part
        return self._ask(lambda client: client.locate(wanted, part), self._who.locate_s, Located, done)

    def bring(self, node: str, keys: Sequence[bytes], depth: int, done: Callable[[Brought | None], None]) -> int:
        """Ask for blocks of a node; number of the question, 0 when nobody can be asked."""
        who = self._who
        identity = who.weights_id, who.kv_form, who.tenant_check
        return self._ask(
            lambda client: client.bring(node, keys, depth, who.part, identity, who.slot_bytes, who.bring_s),
            who.bring_s,
            Brought,
            done,
        )

    def forget(self, question: int) -> None:
        """The answer is not wanted any more."""
        self._asked.pop(question, None)

    def advance(self) -> None:
        """Take in answers, and give up what is late. Calls back."""
        if self._client is not None:
            try:
                for answer in self._client.take():
                    self._answered(answer)
            except StoreUnavailable as error:
                self._rest(str(error))
        now = self._clock()
        for number in [number for number, asked in self._asked.items() if asked.until <= now]:
            late = self._asked.pop(number, None)
            if late is not None:  # or a call back has ended all
                self._rests_until = max(self._rests_until, now + (LATE_S if late.kind is Located else REST_S))
                late.done(None)

    def next_time(self) -> float:
        """When `advance` must be called even if nothing arrives."""
        return min((asked.until for asked in self._asked.values()), default=float("inf"))

    def register(self, poll: select.poll) -> None:
        """Have a poll wake up when `advance` has something to do."""
        if self._client is not None:
            poll.register(self._client.fileno(), select.POLLIN | (select.POLLOUT if self._client.has_unsent else 0))

    def close(self) -> None:
        """Ask nothing more, call nobody back. Idempotent."""
        self._asked.clear()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _ask(
        self,
        ask: Callable[[AgentClient], int],
        wait_s: float,
        kind: type[_A],
        done: Callable[[_A | None], None],
    ) -> int:
        now = self._clock()
        if now < self._rests_until:
            return 0
        try:
            if self._client is None:
                self._client = AgentClient(self._path)
            if self._client.num_open >= MAX_OPEN:
                raise StoreUnavailable(f"it owes {MAX_OPEN} answers")
            number = ask(self._client)
        except StoreUnavailable as error:
            self._rest(str(error))
            return 0
        self._asked[number] = _Asked(
            now + wait_s, kind, lambda answer: done(answer if isinstance(answer, kind) else None)
        )
        return number

    def _answered(self, answer: AgentAnswer) -> None:
        asked = self._asked.pop(answer.request, None)
        if asked is not None:
            asked.done(answer)

    def _rest(self, why: str) -> None:
        """The agent failed: whatever is open is answered without it, and it is not asked for a while."""
        asked, had_client = list(self._asked.values()), self._client is not None
        self.close()
        self._rests_until = self._clock() + REST_S
        if had_client:
            _LOG.warning("the agent at %s is left alone for %g s: %s", self._path, REST_S, why)
        for one in asked:
            one.done(None)
