"""The same queue of disk requests under each I/O order: who is served when, how far the head travels, who waits.

Owns the text form of a queue and the replay; the orders are policies/io_order.py. A trace comes from `NvmeTier.trace`,
a file, or a person.

Text form: one request a line, `arrival position length`, arrival counted in requests taken before; from # on a line is
a comment. Or one line of positions with commas between them, all waiting from the start, length 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tournant.kvstore.policies.io_order import Fcfs, IoOrder, IoRequest, Scan, Sstf

MAX_TRACE_REQUESTS = 1_000_000
MAX_POSITION = 1 << 63


class TraceError(ValueError):
    """A trace that cannot be read; the message names the line and what it should be."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request in the order of service. wait: requests served between its arrival and it; way: how far the head
    travelled between its arrival and it.
    """

    request: IoRequest
    wait: int
    way: int


@dataclass(frozen=True, slots=True)
class Replay:
    """A queue under one order. runs: calls to the disk, fewer than requests where neighbours were merged."""

    order: str
    served: tuple[Served, ...]
    seek_distance: int
    runs: int

    @property
    def mean_wait(self) -> float:
        """Mean of the waits, 0 for an empty queue."""
        return sum(one.wait for one in self.served) / max(1, len(self.served))

    @property
    def mean_way(self) -> float:
        """Mean of the ways, 0 for an empty queue."""
        return sum(one.way for one in self.served) / max(1, len(self.served))

    @property
    def max_wait(self) -> int:
        """The longest wait, 0 for an empty queue."""
        return max((one.wait for one in self.served), default=0)


def parse_trace(text: str) -> tuple[IoRequest, ...]:
    """Requests of a queue in its text form, numbered from 0. Raises TraceError."""
    lines = [(number, line.partition("#")[0].split()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, fields) for number, fields in lines if fields]
    if len(lines) == 1 and (len(lines[0][1]) == 1 or "," in "".join(lines[0][1])):
        number, fields = lines[0]
        rows = [(number, ["0", field, "0"]) for field in "".join(fields).split(",") if field]
    else:
        rows = lines
    if len(rows) > MAX_TRACE_REQUESTS:
        raise TraceError(f"the trace has {len(rows)} requests; at most {MAX_TRACE_REQUESTS} are replayed")
    return tuple(_request(index, number, fields) for index, (number, fields) in enumerate(rows))


def _request(index: int, number: int, fields: Sequence[str]) -> IoRequest:
    try:
        arrival, position, length = (int(field) for field in fields)
    except ValueError:
        raise TraceError(f"line {number} is {' '.join(fields)!r:.100}; it must be `arrival position length`") from None
    if not all(0 <= value < MAX_POSITION for value in (arrival, position, length)):
        raise TraceError(f"line {number} is {' '.join(fields)!r:.100}; numbers must be from 0 to below 2**63")
    return IoRequest(index, position, length, arrival)


def format_trace(requests: Iterable[IoRequest]) -> str:
    """The text form of requests."""
    lines = [f"{request.arrival} {request.position} {request.length}" for request in requests]
    return "\n".join(["# arrival position length", *lines, ""])


def replay(requests: Sequence[IoRequest], order: IoOrder) -> Replay:
    """Serve a queue: a request is seen once as many were served as its arrival says, or when nothing else waits."""
    coming = sorted(requests, key=lambda request: request.arrival)
    served: list[Served] = []
    travelled: dict[int, int] = {}  # by request, when it came
    next_one = runs = 0
    while len(served) < len(coming):
        now = len(served)
        if not len(order) and next_one < len(coming):
            now = max(now, coming[next_one].arrival)
        while next_one < len(coming) and coming[next_one].arrival <= now:
            travelled[coming[next_one].id] = order.seek_distance
            order.push(coming[next_one])
            next_one += 1
        run = order.take()
        runs += 1
        for request in run:
            way = order.seek_distance - travelled[request.id]
            served.append(Served(request, max(0, len(served) - request.arrival), way))
    return Replay(order.name, tuple(served), order.seek_distance, runs)


def compare(
    requests: Sequence[IoRequest], start: int = 0, *, upward: bool = True, ends: tuple[int, int] | None = None
) -> tuple[Replay, ...]:
    """A queue under FCFS, SSTF and SCAN, the head at `start`; `upward`, `ends`: see `Scan`."""
    orders: tuple[IoOrder, ...] = (Fcfs(start), Sstf(start), Scan(start, upward=upward, ends=ends))
    return tuple(replay(requests, order) for order in orders)
