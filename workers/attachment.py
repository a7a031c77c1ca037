"""One attached node store as the link sees it: clients, limits, who owes an answer, which copies use its memory.

Owns the deadlines of requests and the list of jobs in the lanes. Knows nothing of reads and saves (link_reads.py,
link_saves.py). Used on the link's thread alone; never waits.

Invariants:
 1. A request that is not answered by its deadline makes the store count as lost (`problem`).
 2. A job is listed from `begin` until its lane has told it back, or `stop` has taken it out of the lane's hands; the
    pool is unmapped only while none is listed.
 3. All clients are of one store and are lost together. They map the same pool; slots of all of them are reached through
    the first one's mapping, which alone is locked for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tournant.kvstore.admin import Status
from tournant.kvstore.block import Part
from tournant.kvstore.client import StoreClient
from tournant.workers.copy_lanes import CopyDown, CopyLanes, CopyUp, Job
from tournant.workers.transfer_messages import Event


class Attachment:
    """See the module. clients: one per kind of block, with slots of its size; the first one reads, too; status: of the
    store when it was attached, for its limits; part: what the engine stores of a block; emit: takes events for the
    engine; over: why nothing more is asked of the store, "" while it serves; in_group, publishes: as in `LinkIdentity`.
    """

    def __init__(
        self,
        clients: Sequence[StoreClient],
        status: Status,
        part: Part,
        lanes: CopyLanes,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
        *,
        in_group: bool = False,
        publishes: bool = True,
    ) -> None:
        self.clients = clients
        self.client = clients[0]
        self.memory = self.client.memory
        self.status = status
        self.part = part
        self.emit = emit
        self.clock = clock
        self.in_group = in_group
        self.publishes = publishes
        self.over = ""
        self._lanes = lanes
        self._jobs: dict[Job, None] = {}
        self._deadlines: dict[tuple[str, int, int], float] = {}  # (what, number, client) of requests, the oldest first
        self._unsent_since: float | None = None

    # ---- answers that are due

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room in a connection."""
        return any(client.has_unsent for client in self.clients)

    def expect(self, what: str, number: int, client: int = 0) -> None:
        """A request was sent that the store answers. client: which one sent it."""
        self._deadlines[what, number, client] = self.clock() + self.client.timeout_s

    def settle(self, what: str, number: int, client: int = 0) -> None:
        """It was answered, or the answer is not wanted any more."""
        self._deadlines.pop((what, number, client), None)

    def problem(self) -> str:
        """Why the store counts as lost now, "" if it does not. After everything that has arrived was taken in."""
        now, limit = self.clock(), self.client.timeout_s
        if self.has_unsent:
            self._unsent_since = now if self._unsent_since is None else self._unsent_since
            if now >= self._unsent_since + limit:
                return f"it has read nothing for {limit:g} s"
        else:
            self._unsent_since = None
        oldest = next(iter(self._deadlines.items()), None)
        if oldest is not None and now >= oldest[1]:
            return f"it did not answer a request ({oldest[0][0]}) within {limit:g} s"
        return ""

    def next_deadline(self) -> float:
        """When `problem` may have something to say."""
        first = next(iter(self._deadlines.values()), float("inf"))
        return first if self._unsent_since is None else min(first, self._unsent_since + self.client.timeout_s)

    # ---- copies

    @property
    def num_copying(self) -> int:
        """Jobs that use the memory of the store."""
        return len(self._jobs)

    def begin(self, job: CopyDown | CopyUp) -> None:
        """Give a job to its lane."""
        self._jobs[job] = None
        self._lanes.submit(job)

    def ended(self, job: Job) -> None:
        """A lane has told a job back."""
        del self._jobs[job]
        job.on_end(job)

    def stop(self, job: Job) -> bool:
        """Copy nothing more of a job. True when its lane had not begun it: it will not be told back."""
        job.stop = True
        if not job.claim():
            return False
        del self._jobs[job]
        return True
