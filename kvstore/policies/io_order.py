"""In which order waiting disk requests are served: first come, shortest seek, elevator.

Pure: requests in, requests out, counting how far the head travels. A position is a number of bytes on one line through
all segments; on NVMe there is no head, and the distance only says how scattered the accesses are.

Invariants:
 1. Every request pushed is taken exactly once.
 2. The seek distance is the sum of |begin of a request - end of the one served before|, the start position first.
 3. SCAN serves all it passes before it turns, so no request waits for more than two sweeps; SSTF gives no such bound.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

MERGE_BYTES = 1 << 20  # most bytes of one merged run: large requests are better served side by side; and
MERGE_REQUESTS = 64  # most requests of it


@dataclass(frozen=True, slots=True)
class IoRequest:
    """position, length: bytes; arrival: requests that had been taken when it came (the clock of this module)."""

    id: int
    position: int
    length: int
    arrival: int = 0


class IoOrder(Protocol):
    """A queue of requests and the place of the head. name: as in a configuration; seek_distance: travelled so far."""

    name: str
    head: int
    seek_distance: int

    def push(self, request: IoRequest) -> None:
        """A request arrives. Its id is unlike those waiting."""
        ...

    def take(self) -> tuple[IoRequest, ...]:
        """The next requests to serve, in order, each beginning where the one before it ends; () when none waits."""
        ...

    def __len__(self) -> int:
        """Requests waiting."""
        ...


class _Head:
    """Where the head is and how far it came."""

    def __init__(self, start: int = 0) -> None:
        self.head = start
        self.seek_distance = 0

    def _serve(self, request: IoRequest) -> None:
        self._seek(request.position)
        self.head += request.length

    def _seek(self, position: int) -> None:
        self.seek_distance += abs(position - self.head)
        self.head = position


class Fcfs(_Head):
    """First come, first served."""

    name = "fcfs"

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self._queue: deque[IoRequest] = deque()

    def push(self, request: IoRequest) -> None:
        """See IoOrder."""
        self._queue.append(request)

    def take(self) -> tuple[IoRequest, ...]:
        """See IoOrder."""
        if not self._queue:
            return ()
        request = self._queue.popleft()
        self._serve(request)
        return (request,)

    def __len__(self) -> int:
        return len(self._queue)


def _place(request: IoRequest) -> tuple[int, int]:
    return request.position, request.id


class _Sorted(_Head):
    """Requests by position."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self._waiting: list[IoRequest] = []

    def push(self, request: IoRequest) -> None:
        """See IoOrder."""
        insort(self._waiting, request, key=_place)

    def __len__(self) -> int:
        return len(self._waiting)


class Sstf(_Sorted):
    """Shortest seek first; the lower of two equally near ones. A far request waits as long as near ones come."""

    name = "sstf"

    def take(self) -> tuple[IoRequest, ...]:
        """See IoOrder."""
        if not self._waiting:
            return ()
        index = bisect_left(self._waiting, (self.head, -1), key=_place)
        if index and (index == len(self._waiting) or self._is_nearer(index - 1, index)):
            index = bisect_left(self._waiting, (self._waiting[index - 1].position, -1), key=_place)
        request = self._waiting.pop(index)
        self._serve(request)
        return (request,)

    def _is_nearer(self, lower: int, upper: int) -> bool:
        return self.head - self._waiting[lower].position <= self._waiting[upper].position - self.head


class Scan(_Sorted):
    """The elevator: upward to the last request, then downward, neighbours merged into one run.

    start: position of the head; upward: first direction; ends: lowest and highest position, if the head is to travel to
    the end before it turns; without them it turns at the last request (also called LOOK).
    """

    name = "scan"

    def __init__(self, start: int = 0, *, upward: bool = True, ends: tuple[int, int] | None = None) -> None:
        super().__init__(start)
        self._upward = upward
        self._ends = ends
        self._swept = start if upward else start + 1  # the sweep goes on at or above this, or below it

    def take(self) -> tuple[IoRequest, ...]:
        """See IoOrder."""
        if not self._waiting:
            return ()
        border = bisect_left(self._waiting, (self._swept, -1), key=_place)
        if border == (len(self._waiting) if self._upward else 0):
            self._turn()
        first, stop = self._run(border) if self._upward else self._run(border - 1)
        run = tuple(self._waiting[first:stop])
        del self._waiting[first:stop]
        for request in run:
            self._serve(request)
        self._swept = self.head if self._upward else run[0].position
        return run

    def _turn(self) -> None:
        if self._ends is not None:
            self._seek(self._ends[1] if self._upward else self._ends[0])
        self._upward = not self._upward

    def _run(self, index: int) -> tuple[int, int]:
        """Bounds of the run of neighbours that reaches from the request at `index` in the direction of the sweep."""
        first, last, size = index, index, self._waiting[index].length
        while last - first + 1 < MERGE_REQUESTS:
            lower = last if self._upward else first - 1
            if lower < 0 or lower + 1 >= len(self._waiting):
                break
            before, after = self._waiting[lower], self._waiting[lower + 1]
            size += after.length if self._upward else before.length
            if not before.length or before.position + before.length != after.position or size > MERGE_BYTES:
                break
            first, last = (first, last + 1) if self._upward else (first - 1, last)
        return first, last + 1


ORDERS: dict[str, Callable[[], IoOrder]] = {"fcfs": Fcfs, "sstf": Sstf, "scan": Scan}
