"""The store link of a rank beside the leader: orders come from the leader, events go there.

Owns the thread that sends events, so that the link's own threads never wait for the leader. What an order means is
store_link.py's business; that events of all ranks become one answer is group_merge.py's.

Invariant: events are sent in the order of the link, by one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tournant.workers.transfer_messages import Link, Order
from tournant.workers.transfer_wire import event_to_wire

SEND_S = 10.0  # most time for the leader to take the last events


class RankLink:
    """See the module. open_link: makes the link, told what to call when it has events; send: takes events in their
    plain form, at once or never: a leader that is gone is the sender's business.
    """

    def __init__(self, open_link: Callable[[Callable[[], object]], Link], send: Callable[[list[Any]], object]) -> None:
        self._send = send
        self._came = threading.Event()
        self._ending = False
        self._link = open_link(self._came.set)
        self._thread = threading.Thread(target=self._forward, name="rank-link", daemon=True)
        self._thread.start()

    def submit(self, orders: Sequence[Order]) -> None:
        """Orders of the leader, behind all steps told before."""
        self._link.submit(orders)

    def close(self) -> None:
        """End the link, and tell the leader how what was open has ended. Afterwards no device block is touched, unless
        by a copy that hangs. Idempotent.
        """
        self._link.close(0.0)
        self._ending = True
        self._came.set()
        self._thread.join(SEND_S)

    def _forward(self) -> None:
        ending = False
        while not ending:
            self._came.wait()
            self._came.clear()
            ending = self._ending
            if events := self._link.take_events():
                self._send([event_to_wire(event) for event in events])
