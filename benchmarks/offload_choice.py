"""Load or recompute, in virtual time: the real engine and planner over a device and links that are only numbers.

Owns a clock that jumps from event to event, a device that takes so long per batch, and a link whose lanes carry so many
bytes a second, first come, first served, as the copies and the disk of the real one do. Estimates start unlearned in
every run. Nothing waits and nothing is random but the trace, so every machine gets the same figures.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.common import BenchmarkError
from benchmarks.traces import Trace
from tournant.kvstore.block import Namespace
from tournant.workers.batch import Batch, StepResult
from tournant.workers.config import EngineConfig
from tournant.workers.engine import Engine
from tournant.workers.messages import EngineInfo, EngineRequest, EngineStats
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.sampling_params import SamplingParams
from tournant.workers.transfer_messages import (
    HOST,
    NVME,
    Attached,
    Copied,
    DropStash,
    EndRead,
    Event,
    Fetch,
    Fetched,
    Found,
    Lent,
    Load,
    Lookup,
    Order,
    ReadEnded,
    Save,
    Saved,
    Stash,
    Stashed,
    Unstash,
    Unstashed,
    Used,
)

VOCAB = 1 << 24
CREDIT = 64
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Machine:
    """Sizes and speeds: blocks of the device pool and of the host pool; bytes of a block; seconds per prompt token at
    position 0 and more per token of position, per step, per step that decodes, and per lookup; bytes per second of RAM
    (each direction) and of the disk.
    """

    host_bytes_per_s: float
    nvme_bytes_per_s: float
    pool_blocks: int = 256
    host_blocks: int = 1024
    block_bytes: int = 360 << 10
    token_s: float = 1 / 1400
    position_s: float = 1.5e-7
    step_s: float = 0.001
    decode_s: float = 0.006
    lookup_s: float = 0.0005

    def break_even(self, position: float, block_tokens: int) -> float:
        """Bytes per second at which a block is loaded from RAM as fast as it is computed at this position."""
        return self.block_bytes / (block_tokens * (self.token_s + self.position_s * position))


@dataclass(slots=True)
class Clock:
    """Virtual seconds."""

    now: float = 0.0


class VirtualDevice:
    """Takes its time and makes tokens up; see `Runner`."""

    num_in_flight = 1

    def __init__(self, machine: Machine, clock: Clock) -> None:
        self._machine, self._clock = machine, clock

    def run(self, batch: Batch) -> _VirtualStep:
        """See `Runner`."""
        machine, seconds = self._machine, self._machine.step_s
        for start, count in zip(batch.starts, batch.counts, strict=True):
            if count > 1:
                seconds += count * (machine.token_s + machine.position_s * (start + count / 2))
        seconds += machine.decode_s * (1 in batch.counts)
        return _VirtualStep(StepResult([0] * len(batch.sampling)), self._clock, self._clock.now + seconds)


@dataclass(slots=True)
class _VirtualStep:
    done: StepResult
    clock: Clock
    ends_at: float

    def result(self) -> StepResult:
        self.clock.now = max(self.clock.now, self.ends_at)
        return self.done


@dataclass(slots=True)
class _Job:
    """on_end: gets when it ended and the share that was carried."""

    number: int
    seconds: float
    on_end: Callable[[float, float], None]
    began: float = 0.0


class _Lane:
    """Jobs one after another."""

    def __init__(self) -> None:
        self._jobs: deque[_Job] = deque()

    def add(self, job: _Job, now: float) -> None:
        job.began = now  # of the first one; the others begin when the one before them ends
        self._jobs.append(job)

    @property
    def ends_at(self) -> float:
        return self._jobs[0].began + self._jobs[0].seconds if self._jobs else NEVER

    def advance(self, now: float) -> None:
        """End what is over by now."""
        while (end := self.ends_at) <= now:
            self._pop_first(end, 1.0)

    def cancel(self, number: int, now: float) -> bool:
        """End a job early; False when there is no such job."""
        for job in self._jobs:
            if job.number == number:
                if job is self._jobs[0]:
                    self._pop_first(now, (now - job.began) / job.seconds)
                else:
                    self._jobs.remove(job)
                    job.on_end(now, 0.0)
                return True
        return False

    def _pop_first(self, end: float, share: float) -> None:
        job = self._jobs.popleft()
        if self._jobs:
            self._jobs[0].began = end
        job.on_end(end, share)


class VirtualLink:
    """A link and the store below it: a host pool of some blocks, least recently used ones go to a disk without limit;
    see `Link`.
    """

    def __init__(self, machine: Machine, clock: Clock) -> None:
        self._machine, self._clock = machine, clock
        self._up, self._down, self._disk = _Lane(), _Lane(), _Lane()
        self._host: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._on_disk: set[bytes] = set()
        self._reads: dict[int, tuple[bytes, ...]] = {}
        self._order = itertools.count()
        self._coming: list[tuple[float, int, Event]] = []  # a heap
        size = machine.block_bytes
        self._tell(0.0, Attached(1, (CREDIT,), size, machine.host_blocks * size))

    def submit(self, orders: Sequence[Order]) -> None:
        """See `Link`."""
        self._advance()
        for order in orders:
            self._carry_out(order, self._clock.now)

    def take_events(self) -> list[Event]:
        """See `Link`: what has happened by now."""
        self._advance()
        events = []
        while self._coming and self._coming[0][0] <= self._clock.now:
            events.append(heapq.heappop(self._coming)[2])
        return events

    def close(self, flush_s: float) -> None:
        """See `Link`."""

    @property
    def next_event_at(self) -> float:
        """When something happens next if nothing is ordered."""
        first = self._coming[0][0] if self._coming else NEVER
        return min(first, self._up.ends_at, self._down.ends_at, self._disk.ends_at)

    def _advance(self) -> None:
        for lane in (self._up, self._down, self._disk):
            lane.advance(self._clock.now)

    def _tell(self, when: float, *events: Event) -> None:
        for event in events:
            heapq.heappush(self._coming, (when, next(self._order), event))

    def _carry_out(self, order: Order, now: float) -> None:
        machine, size = self._machine, self._machine.block_bytes
        block_s = size / machine.host_bytes_per_s
        match order:
            case Lookup(read, keys):
                there = lambda key: key in self._host or key in self._on_disk  # noqa: E731 - one use, one line
                self._reads[read] = found = tuple(itertools.takewhile(there, keys))
                tiers = bytes(HOST if key in self._host else NVME for key in found)
                self._tell(now + machine.lookup_s, Found(read, tiers, machine.lookup_s))
            case Fetch(read, count) if read in self._reads:
                self._fetch(read, self._reads[read][:count], now)
            case Load(read, _, blocks) if read in self._reads:

                def loaded(end: float, share: float) -> None:
                    del self._reads[read]
                    good = int(share * len(blocks) + 1e-9)
                    self._tell(end, ReadEnded(read, good, good * size, end - now))

                self._up.add(_Job(read, len(blocks) * block_s, loaded), now)
            case EndRead(read) if read in self._reads:
                if not self._up.cancel(read, now):
                    self._disk.cancel(read, now)
                    del self._reads[read]
                    self._tell(now, ReadEnded(read, 0))
            case Save(save, entries):

                def saved(end: float, share: float) -> None:
                    for entry in entries:
                        self._put(entry.key)
                    self._tell(end, Copied(save, len(entries) * size, end - now), Saved(save, True, (), len(entries)))

                self._down.add(_Job(-save, len(entries) * block_s, saved), now)
            case Used(keys):
                for key in reversed(keys):
                    if key in self._host:
                        self._host.move_to_end(key)
            case Stash(stash, _):

                def stashed(end: float, share: float) -> None:
                    self._tell(end, Copied(stash, size, end - now), Stashed(stash, True))

                self._down.add(_Job(-stash, block_s, stashed), now)
            case Unstash(stash, _):
                back = lambda end, share: self._tell(end, Unstashed(stash, True, 1))  # noqa: E731
                self._up.add(_Job(-stash, block_s, back), now)
            case DropStash():
                self._tell(now, Lent(1))

    def _fetch(self, read: int, keys: tuple[bytes, ...], now: float) -> None:
        from_disk = [key for key in keys if key not in self._host]
        num_bytes = len(from_disk) * self._machine.block_bytes

        def fetched(end: float, share: float) -> None:
            for key in from_disk[: int(share * len(from_disk) + 1e-9)]:
                self._put(key)
            if share == 1:
                self._tell(end, Fetched(read, len(keys), num_bytes, end - now))

        if from_disk:
            self._disk.add(_Job(read, num_bytes / self._machine.nvme_bytes_per_s, fetched), now)
        else:
            fetched(now, 1.0)

    def _put(self, key: bytes) -> None:
        self._on_disk.discard(key)
        self._host[key] = None
        self._host.move_to_end(key)
        if len(self._host) > self._machine.host_blocks:
            self._on_disk.add(self._host.popitem(last=False)[0])


# -------------------------------------------------------------------- runs


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy made of a trace: virtual seconds until the last answer, and the engine's counters."""

    total_s: float
    stats: EngineStats


def replay(trace: Trace, machine: Machine, restore: str, users: int = 4, max_tokens: int = 4) -> Outcome:
    """Serve the requests of a trace in order, `users` at once, each of which sends the next one when it has its answer.

    Raises BenchmarkError when the engine comes to a halt, InvariantViolation when a final recount fails.
    """
    clock = Clock()
    link = VirtualLink(machine, clock)
    engine = _engine(trace, machine, restore, link, clock)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
    queue = deque(enumerate(trace.requests))
    sent: set[int] = set()
    while queue or sent:
        while queue and len(sent) < users:
            number, request = queue.popleft()
            sent.add(number)
            if refused := engine.add_request(EngineRequest(number, _prompt(request.keys, trace.block_tokens), params)):
                raise BenchmarkError(f"request {number} was refused: {refused[0].error}")
        for output in engine.step():
            if output.finish_reason is not None:
                sent.remove(output.request_id)
        if sent and (len(sent) == users or not queue) and (wait_s := engine.wait_s()) != 0:
            until = min(link.next_event_at, NEVER if wait_s is None else clock.now + wait_s)
            if until == NEVER:
                raise BenchmarkError(f"with restore {restore} the engine waits for nothing at {clock.now} s")
            clock.now = max(clock.now, until)
    engine.validate()
    return Outcome(clock.now, engine.stats())


def _prompt(keys: Sequence[int], block_tokens: int) -> list[int]:
    """Tokens that are the same for the same keys, and one that keeps the last block from being whole."""
    return [(key * block_tokens + offset) % VOCAB for key in keys for offset in range(block_tokens)] + [0]


def _engine(trace: Trace, machine: Machine, restore: str, link: VirtualLink, clock: Clock) -> Engine:
    tokens = trace.block_tokens
    info = EngineInfo(
        writer_id=1,
        pid=0,
        max_model_len=1 << 20,
        pool_tokens=machine.pool_blocks * tokens,
        block_tokens=tokens,
        max_num_seqs=64,
        max_queued_requests=1024,
        vocab_size=VOCAB,
        eos_token_ids=(),
        dtype="virtual",
        device="virtual",
        namespace=Namespace(b"w" * 32, "virtual", "virtual", b"l" * 32),
    )
    offload = OffloadConfig("unused", restore=restore)
    return Engine(EngineConfig(), VirtualDevice(machine, clock), info, link, offload, lambda: clock.now)
