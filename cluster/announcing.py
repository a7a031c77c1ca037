"""The pump between a node store and the directory: asks the store what it has to tell, sends it, gives replies back.

Owns one thread, when it asks, and nothing of what is told: what is lost between the two is asked for again
(kvstore/announcer.py). Knows no Ray: how the store is asked and how shards are reached is injected.

Invariants:
 1. Nothing is asked of the store as long as the node is alone: there is nobody to tell. A cluster that has grown once
    is told of for good, so that one which shrinks and grows again needs no second look.
 2. A shard that does not answer holds up no other one, and no store that does not answer holds up `stop`.
 3. Whatever goes wrong is logged, and the next round comes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from tournant.kvstore.admin import Announcements
from tournant.kvstore.directory import Announcement, Heard
from tournant.kvstore.errors import StoreRefused, StoreUnavailable

BUSY_S = 0.25  # until the next round, for each shard that had to be told something: a call costs some ms of CPU in all
IDLE_S = 0.5  # at most, while nothing changes
MUCH_S, MUCH_KEYS = 0.02, 2048  # after one message that large: more of the same kind waits
ALONE_S = 5.0  # until a node that is alone looks around again
STOP_S = 2.0
Replies = Sequence[tuple[int, Heard]]  # (shard, its reply)
_LOG = logging.getLogger("tournant.node_store")


class Shards(Protocol):
    """How the shards of a directory are reached. No call waits for a shard."""

    def send(self, shard: int, message: Announcement) -> None:
        """Tell a shard; what cannot be sent is lost."""
        ...

    def replies(self) -> Replies:
        """Replies that have come since the last call."""
        ...

    def leave(self) -> None:
        """Tell all shards that this node holds nothing any more."""
        ...


class Announcing:
    """See the module. poll: gives the store replies and gets what is to be sent; raises StoreUnavailable, StoreRefused,
    within a few seconds, when there is no store. is_alone: whether no other node could look anything up.
    """

    def __init__(
        self, poll: Callable[[Replies], Announcements], shards: Shards, num_shards: int, is_alone: Callable[[], bool]
    ) -> None:
        self._poll = poll
        self._shards = shards
        self._num_shards = num_shards
        self._is_alone = is_alone
        self._alone = True
        self._pause = IDLE_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="announcing")

    def start(self) -> None:
        """Begin, on a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Announce nothing more, and have this node's entries dropped. Idempotent."""
        if not self._stopping.is_set():
            self._stopping.set()
            if self._thread.is_alive():
                self._thread.join(STOP_S)
            if not self._alone:
                self._shards.leave()

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            try:
                pause = self.round()
            except Exception:
                _LOG.exception("announcing to the directory failed; trying again in %g s", IDLE_S)
                pause = IDLE_S

    def round(self) -> float:
        """One exchange with the store and the shards; seconds until the next one."""
        if self._alone:
            self._alone = self._is_alone()
            if self._alone:
                return ALONE_S
        try:
            answer = self._poll(self._shards.replies())
        except (StoreUnavailable, StoreRefused):  # it starts; whether it does is its keeper's business
            return IDLE_S
        counts = []
        for shard, message in answer.messages:
            if shard < self._num_shards:
                self._shards.send(shard, message)
                counts.append(len(message.host) + len(message.nvme) + len(message.gone) + (message.answers > 0))
        told = sum(count > 0 for count in counts)
        if not told:
            self._pause = min(2 * self._pause, IDLE_S)
        else:
            self._pause = MUCH_S if max(counts) >= MUCH_KEYS else told * BUSY_S
        return self._pause
