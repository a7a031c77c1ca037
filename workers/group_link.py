"""The leader's link to the node stores of all ranks of its group: its own rank's link, and those of the others.

Owns the inbox of what other ranks say, and the order in which ranks are told; what follows from it is group_merge.py's.

Invariants:
 1. All orders and events pass through one thread, the engine's; `deliver` alone may be called from any other.
 2. Ranks are told in the order of the merge.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from tournant.kvstore.block import Part
from tournant.workers.group_merge import GroupMerge
from tournant.workers.transfer_messages import Attached, Detached, Event, Link, Order

LEADER = 0


def publishers(stores: Sequence[str], parts: Sequence[Part]) -> list[tuple[bool, tuple[Part, ...]]]:
    """By rank, `LinkIdentity.publishes` and `.local_parts`, from the store that each uses and the part that it holds:
    the first rank with a part at a store publishes it there, as every store must have what its ranks read.
    """
    found = []
    for rank, (store, part) in enumerate(zip(stores, parts, strict=True)):
        here = [other for other, name in enumerate(stores) if name == store]
        publishes = next(other for other in here if parts[other] == part) == rank
        found.append((publishes, tuple(dict.fromkeys(parts[other] for other in here))))
    return found


class GroupLink:
    """`Link` of a group of ranks. See the module.

    local: the link of rank 0, which calls the same `wake`; stores: by rank, a name of the node store it uses; tell:
    hands orders to these other ranks, in order, raises what ends the group when a rank is gone; wake: called from any
    thread when events are there to be taken; clock: seconds.
    """

    def __init__(
        self,
        local: Link,
        stores: Sequence[str],
        tell: Callable[[Sequence[int], Sequence[Order]], None],
        wake: Callable[[], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local, self._tell, self._wake, self._clock = local, tell, wake, clock
        self._merge = GroupMerge(stores)
        self._inbox: deque[tuple[int, Event]] = deque()
        self._came = threading.Condition()  # guards the inbox
        self._closed = False

    def submit(self, orders: Sequence[Order]) -> None:
        """See `Link`. After `close` orders are answered as without a store. Raises what `tell` raises."""
        for order in orders:
            self._merge.order(order)
        self._send()
        if self._merge.has_events:
            self._wake()

    def take_events(self) -> list[Event]:
        """See `Link`. Raises what `tell` raises."""
        if not self._closed:
            for event in self._local.take_events():
                self._merge.event(LEADER, event)
            self._take_inbox()
            self._send()
        return self._merge.take_events()

    def deliver(self, rank: int, events: Sequence[Event]) -> None:
        """What the link of another rank says, in order. From any thread."""
        with self._came:
            self._inbox.extend((rank, event) for event in events)
            self._came.notify_all()
        self._wake()

    def close(self, flush_s: float) -> None:
        """See `Link`: waits for the other ranks' answers to saves, too. They end their links themselves, so only their
        end makes sure that their device blocks are not touched any more. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        until = self._clock() + flush_s
        self._local.close(flush_s)
        for event in self._local.take_events():
            if not isinstance(event, Attached | Detached):  # the others need not leave their stores for this end
                self._merge.event(LEADER, event)
        self._take_inbox()
        with self._came:
            while self._merge.is_saving and (left := until - self._clock()) > 0:
                self._came.wait(left)
                self._take_inbox()
        self._merge.end("this link is closed")
        self._merge.take_orders()

    def validate(self) -> None:
        """Recount. Raises InvariantViolation."""
        self._merge.validate()

    def _take_inbox(self) -> None:
        with self._came:
            came = list(self._inbox)
            self._inbox.clear()
        for rank, event in came:
            self._merge.event(rank, event)

    def _send(self) -> None:
        """Hand over what the merge has for ranks: what goes to the same ones in a row, at once."""
        local: list[Order] = []
        batch: list[Order] = []
        batched: tuple[int, ...] = ()
        for ranks, order in self._merge.take_orders():
            if LEADER in ranks:
                local.append(order)
            others = tuple(rank for rank in ranks if rank != LEADER)
            if not others:
                continue
            if batch and others != batched:
                self._tell(batched, batch)
                batch = []
            batched = others
            batch.append(order)
        if batch:
            self._tell(batched, batch)
        if local:
            self._local.submit(local)
