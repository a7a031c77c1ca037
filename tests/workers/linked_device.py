"""A CPU that behaves as a GPU with a link does, and finds work on the same memory whose order nothing determines.

Every lane, and computing, is a queue with a vector clock. `follow_compute`, `hold_compute` and `wait` are the only ways
in which one learns of another, as on a GPU, where each runs when it likes. Copies in lanes, gathering, walks and what
threads of the CPU read and write themselves are noted with the clock they know; two of them on the same bytes, one a
write, of which the later does not know the earlier, are a race. Everything is carried out at once, in this order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tournant.kernels import ops, segments
from tournant.workers.device import CpuDevice, Lane, Mark
from tournant.workers.engine import Engine
from tournant.workers.model_runner import ModelRunner

COMPUTE = "compute"
Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    """What work did to bytes `low` to `high`. time: of its queue, None for a thread of the CPU."""

    what: str
    queue: str
    time: int | None
    writes: bool
    low: int
    high: int


@dataclass
class Races:
    """Knows all queues and what they did to `regions`, memory that stays what it is. found: races, as texts."""

    clocks: dict[str, Clock] = field(default_factory=lambda: {COMPUTE: {}})
    accesses: list[Access] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    regions: list[tuple[int, int]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    own: threading.local = field(default_factory=threading.local)

    @property
    def queue(self) -> str:
        """Where this thread's work goes."""
        return getattr(self.own, "queue", COMPUTE)

    @property
    def seen(self) -> Clock:
        """What this thread has waited for."""
        if not hasattr(self.own, "seen"):
            self.own.seen = {}
        found: Clock = self.own.seen
        return found

    def learn(self, clock: Clock, other: Clock) -> None:
        with self.lock:
            for name, time in other.items():
                clock[name] = max(clock.get(name, 0), time)

    def note(self, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], *, by_cpu: bool) -> None:
        """Work on dense tensors, by this thread itself or by the queue that it gives work to."""
        with self.lock:
            queue = threading.current_thread().name if by_cpu else self.queue
            clock, time = self.seen, None
            if not by_cpu:
                clock = self.clocks[queue]
                self.learn(clock, self.seen)
                time = clock[queue] = clock.get(queue, 0) + 1
            for tensor, is_write in [(one, False) for one in reads] + [(one, True) for one in writes]:
                low, high = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
                if any(start <= low and high <= end for start, end in self.regions):
                    self._add(Access(what, queue, time, is_write, low, high), clock)

    def _add(self, access: Access, clock: Clock) -> None:
        kept = []
        for other in self.accesses:
            touches = other.low < access.high and access.low < other.high
            known = other.time is None or clock.get(other.queue, 0) >= other.time
            if touches and not known and (other.writes or access.writes):
                self.found.append(f"{access.what} in {access.queue} beside {other.what} in {other.queue}")
            if not (known and access.low <= other.low and other.high <= access.high and access.writes):
                kept.append(other)
        self.accesses = [*kept, access]


class _Copies(TorchFunctionMode):
    """Notes what is copied in a lane."""

    def __init__(self, races: Races) -> None:
        super().__init__()
        self._races = races

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            target, source = args
            if not (target.is_contiguous() and source.is_contiguous()):
                raise AssertionError("a copy over the link that is not dense waits for the device")
            self._races.note("a copy", [source], [target], by_cpu=False)
        return func(*args, **(kwargs or {}))


class LinkedLane:
    def __init__(self, name: str, races: Races) -> None:
        self._name, self._races = name, races
        races.clocks[name] = {}

    def follow_compute(self) -> None:
        races = self._races
        races.learn(races.clocks[self._name], races.clocks[races.queue])

    def active(self) -> AbstractContextManager[object]:
        @contextmanager
        def entered() -> Iterator[None]:
            before, self._races.own.queue = self._races.queue, self._name
            try:
                with _Copies(self._races):
                    yield
            finally:
                self._races.own.queue = before

        return entered()

    def mark(self) -> Mark:
        with self._races.lock:
            return LinkedMark(dict(self._races.clocks[self._name]), self._races)


@dataclass
class LinkedMark:
    clock: Clock
    races: Races
    waited: bool = False

    def done(self) -> bool:
        return self.waited  # as late as may be

    def wait(self) -> None:
        self.waited = True
        self.races.learn(self.races.seen, self.clock)

    def hold_compute(self) -> None:
        self.races.learn(self.races.clocks[self.races.queue], self.clock)


class LinkedCpu(CpuDevice):
    """See the module."""

    has_link = True
    num_in_flight = 2

    def __init__(self) -> None:
        self.races = Races()
        self._lanes = 0

    def new_lane(self) -> Lane:
        self._lanes += 1
        return LinkedLane(f"lane {self._lanes}", self.races)

    def download(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        mark = LinkedMark(dict(self.races.clocks[COMPUTE]), self.races)

        def arrived() -> list[torch.Tensor]:
            mark.wait()
            return list(tensors)

        return arrived


def watch(engine: Engine, device: LinkedCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note what is done to the pool, the ring and the places of an engine on `device`, until the test ends."""
    if not isinstance(engine.runner, ModelRunner) or engine.runner.inputs.overflow is None:
        raise TypeError("this engine has nothing below its device")
    attention, races = engine.runner.inputs.overflow, device.races
    ring, below = attention.ring, attention.pool
    parts = [memory for part in [*ring.parts, ring.spare] for memory in (part.host, part.device)]
    tensors = [engine.runner.cache.tensor, below._memory, *(room.slices for room in below._rooms), *parts]
    races.regions += [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
    walk, gather, read = segments.walk, ops.gather_blocks, below.read_layer

    def noted_walk(out: torch.Tensor, q: torch.Tensor, places: segments.Places, *args: Any, **how: Any) -> None:
        dense = [tensor if tensor.is_contiguous() else tensor.transpose(0, 1) for tensor in places.tensors]
        races.note("a walk", dense, [], by_cpu=bool(how.get("on_cpu")))
        walk(out, q, places, *args, **how)

    def noted_gather(pool: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> None:
        races.note("gathering", [pool], [staging], by_cpu=False)
        gather(pool, ids, staging)

    def noted_read(layer: int, places: Sequence[int], target: torch.Tensor) -> frozenset[int]:
        races.note("a read", [], [target[: len(places)]], by_cpu=True)
        return read(layer, places, target)

    monkeypatch.setattr(segments, "walk", noted_walk)
    monkeypatch.setattr(ops, "gather_blocks", noted_gather)
    monkeypatch.setattr(below, "read_layer", noted_read)
