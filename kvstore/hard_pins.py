"""Pins of blocks that kernels read in place: no time limit, until they are unpinned or their client has exited.

Invariants:
 1. All blocks of a request are pinned or none; the same request again pins nothing twice.
 2. A request at or below the newest one that was unpinned or refused is over, also when it comes late.
 3. Pinned pages and credits stay within `max_lent_share` of the pool.
"""

from __future__ import annotations

from tournant.kvstore.clients import Client
from tournant.kvstore.events import HardPin, HardPinned
from tournant.kvstore.groups import Group
from tournant.kvstore.residency import Residency

MAX_REQUESTS = 64  # per client


class HardPins:
    """Who holds what is kept with the client; `pages`: host pages pinned, a group counted once per pin."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.pages = 0

    def pin(self, client: Client, event: HardPin, credit_pages: int) -> HardPinned:
        """Pin what is asked if all of it is in host slots and there is room; the reply tells."""
        groups = client.hard.get(event.request)
        if groups is None:
            groups = [] if event.request <= client.newest_hard else self._wanted(client, event, credit_pages)
            client.newest_hard = max(client.newest_hard, event.request)
            if groups:
                client.hard[event.request] = groups
                self.pages += sum(group.host_pages for group in groups)
            for group in groups:
                self._residency.pin(group)
        rows = b"".join(group.rows or group.pack() for group in groups)
        counts = bytes(len(group.copies) for group in groups)
        return HardPinned(event.request, bool(groups), counts, rows, tuple(self._residency.index.parts))

    def _wanted(self, client: Client, event: HardPin, credit_pages: int) -> list[Group]:
        find = self._residency.index.find
        found = [find(key, version.writer_id, version.counter) for key, version in event.refs]
        groups = [group for group in found if group is not None and group.complete and group.in_host]
        if len(groups) != len(event.refs) or len(client.hard) >= MAX_REQUESTS:
            return []
        pages = sum(group.host_pages for group in groups)
        limit = int(self._residency.pool.num_pages * self._residency.config.max_lent_share)
        return groups if credit_pages + self.pages + pages <= limit else []

    def unpin(self, client: Client, request: int) -> None:
        """The kernels have ended; a request that comes only now is over already."""
        client.newest_hard = max(client.newest_hard, request)
        groups = client.hard.pop(request, ())
        self.pages -= sum(group.host_pages for group in groups)
        for group in groups:
            self._residency.unpin(group)

    def unpin_all(self, client: Client) -> None:
        """The client has exited."""
        for request in list(client.hard):
            self.unpin(client, request)
