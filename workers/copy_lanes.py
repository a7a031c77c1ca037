"""The two threads that copy between device blocks and slots of the host pool: one down, one up, both at once.

Owns those threads and the order of copies in each direction. Touches no socket: slots and generations are memory that
stays mapped until every job that uses it has been told back.

Invariants:
 1. A job belongs to whoever claims it first: a lane to carry it out, or the link to end it unbegun. Each is told back
    by its lane, exactly once, if the lane claimed it.
 2. After `stop` a lane copies nothing more of a job than what it has begun.
 3. What counts as loaded was compared with its checksum after the copy, and its slot's generation before and after.
 4. No exception leaves a lane: a block that cannot be copied is a block that was not copied.
"""

from __future__ import annotations

import itertools
import logging
import queue
import reprlib
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tournant.kvstore.groups import Handle
from tournant.kvstore.host_tier import HostMemory
from tournant.kvstore.record import checksum
from tournant.kvstore.report_book import Lent
from tournant.kvstore.token_bucket import Pace
from tournant.workers.faults import BlockFaults, flip_bit
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.transfer_messages import BlockImages, Copied, Event, Loaded, ReadEnded

PIECE_BLOCKS = 8  # copied, then checked, then told
LOG_EVERY_S = 10.0  # at most one line of blocks that cannot be copied
_LOG = logging.getLogger("tournant.tiers")


@dataclass(slots=True, eq=False)
class Job:
    """Common to both directions. number: of the order; memory: that its slots lie in; since: when it was ordered;
    on_end: what the link does with it when it has ended, on the link's thread.
    """

    number: int
    memory: HostMemory
    blocks: Sequence[int]
    since: float
    on_end: Callable[..., None]
    stop: bool = False
    _claimed: threading.Lock = field(default_factory=threading.Lock)

    def claim(self) -> bool:
        """Whether the caller is the first to ask: it ends this job then."""
        return self._claimed.acquire(blocking=False)


@dataclass(slots=True, eq=False)
class CopyDown(Job):
    """Blocks into lent slots. places: slot and bytes of each; checksums: filled in by the lane, None = not copied."""

    places: Sequence[tuple[Lent, int]] = ()
    copiers: int = 1
    checksums: list[int | None] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class CopyUp(Job):
    """Slots into blocks, up to the first that is not good. quiet: tell nobody but the link; good: how many are;
    bad: number of a block whose bytes were wrong, -1 = none.
    """

    handles: Sequence[Handle] = ()
    quiet: bool = False
    good: int = 0
    bad: int = -1


class CopyLanes:
    """See the module. emit: takes events for the engine; tell: takes jobs that have ended; both from any thread."""

    def __init__(
        self,
        images: BlockImages,
        config: OffloadConfig,
        emit: Callable[[Event], None],
        tell: Callable[[Job], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        faults = config.faults
        self._images = images
        self._emit, self._tell, self._clock = emit, tell, clock
        self._down_pace, self._up_pace = Pace(config.host_bytes_per_s), Pace(config.host_bytes_per_s)
        self._save_faults = BlockFaults(faults.save_delay_ms, faults.fail_every_save, faults.flip_every_save)
        self._load_faults = BlockFaults(faults.load_delay_ms, faults.fail_every_load, faults.flip_every_load)
        self._down: queue.SimpleQueue[CopyDown | None] = queue.SimpleQueue()
        self._up: queue.SimpleQueue[CopyUp | None] = queue.SimpleQueue()
        self._log_at, self._num_failed = clock(), 0  # when to write the next line; blocks since the last one
        self._copiers = ThreadPoolExecutor(config.num_copiers, "copier")  # starts threads when they are needed
        self._threads = [
            threading.Thread(target=self._serve_down, name="copies-down", daemon=True),
            threading.Thread(target=self._serve_up, name="copies-up", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: CopyDown | CopyUp) -> None:
        """Queue a job in its direction."""
        if isinstance(job, CopyDown):
            self._down.put(job)
        else:
            self._up.put(job)

    def close(self) -> None:
        """End the threads once what was submitted is over."""
        self._down.put(None)
        self._up.put(None)
        for thread in self._threads:
            thread.join()
        self._copiers.shutdown()

    # ---- down

    def _serve_down(self) -> None:
        while (job := self._down.get()) is not None:
            if job.claim():
                self._carry_down(job)
            del job  # or its memory would be held until the next one comes

    def _carry_down(self, job: CopyDown) -> None:
        count = len(job.blocks)
        job.checksums = [None] * count
        shares = min(job.copiers, count)
        bounds = [count * number // shares for number in range(shares + 1)] if shares else [0]
        parts = [
            self._copiers.submit(self._copy_down, job, start, stop) for start, stop in itertools.pairwise(bounds[1:])
        ]
        if shares:
            self._copy_down(job, 0, bounds[1])
        for part in parts:
            part.result()
        copied = sum(place[1] for place, found in zip(job.places, job.checksums, strict=True) if found is not None)
        self._emit(Copied(job.number, copied, self._clock() - job.since))
        self._tell(job)

    def _copy_down(self, job: CopyDown, start: int, stop: int) -> None:
        """Blocks number `start` up to `stop`."""
        faults = self._save_faults
        step = 1 if faults.active else PIECE_BLOCKS
        for first in range(start, stop, step):
            if job.stop:
                return
            last = min(first + step, stop)
            fails, flips = faults.next_block() if faults.active else (False, False)
            try:
                if fails:
                    raise RuntimeError("a fault that was asked for")
                slots = [job.memory.slot(lent.page, length) for lent, length in job.places[first:last]]
                self._images.save(job.blocks[first:last], slots)
                found = [checksum(slot) for slot in slots]
            except Exception as error:
                self._note(error, "down", job.blocks[first:last])
                continue
            if flips:
                flip_bit(slots[0])
            self._down_pace.spend(sum(map(len, slots)))
            job.checksums[first:last] = found

    # ---- up

    def _serve_up(self) -> None:
        while (job := self._up.get()) is not None:
            if job.claim():
                self._carry_up(job)
            del job

    def _carry_up(self, job: CopyUp) -> None:
        count, moved = len(job.blocks), 0
        step = 1 if self._load_faults.active else PIECE_BLOCKS
        while job.good < count and not job.stop:
            last = min(job.good + step, count)
            wanted, before = last - job.good, job.good
            try:
                moved += self._copy_up(job, last)
            except Exception as error:
                self._note(error, "up", job.blocks[before:last])
                break
            if job.good - before < wanted:
                break
            if job.good < count and not job.quiet:
                self._emit(Loaded(job.number, job.good))
        if not job.quiet:
            seconds = self._clock() - job.since
            self._emit(ReadEnded(job.number, job.good, moved, seconds, int(job.bad >= 0)))
        self._tell(job)

    def _copy_up(self, job: CopyUp, last: int) -> int:
        """Blocks from the first that is not good yet up to `last`; raises `job.good`. Returns the bytes copied."""
        faults, memory, generations = self._load_faults, job.memory, job.memory.generations
        handles = job.handles[job.good : last]
        slots: list[memoryview] = []
        for handle in handles:
            if handle.generation < 1 or generations[handle.page] != handle.generation:
                break
            slots.append(memory.slot(handle.page, handle.length))
        if not slots:
            return 0
        if faults.active:
            fails, flips = faults.next_block()
            if fails:
                return 0
            if flips:
                flip_bit(slots[0])
        self._images.load(slots, job.blocks[job.good : job.good + len(slots)])
        size = sum(map(len, slots))
        self._up_pace.spend(size)
        for handle, slot in zip(handles, slots, strict=False):
            good = checksum(slot) == handle.checksum  # after the copy: what changed meanwhile shows here or below
            if generations[handle.page] != handle.generation:
                break
            if not good:
                job.bad = job.good
                break
            job.good += 1
        return size

    def _note(self, error: Exception, way: str, blocks: Sequence[int]) -> None:
        """Blocks cannot be copied. Not exact between threads, which only shifts a line."""
        self._num_failed += len(blocks)
        if self._clock() >= self._log_at:
            count, self._num_failed, self._log_at = self._num_failed, 0, self._clock() + LOG_EVERY_S
            text = "%d blocks could not be copied since the last such line, of them %s %s: %s"
            _LOG.warning(text, count, reprlib.repr(list(blocks)), way, one_line(error))


def one_line(error: Exception) -> str:
    """What went wrong, and where unless the text says enough. A text, because an error holds on to views of slots."""
    if isinstance(error, RuntimeError):  # what a device or a store says
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(one.filename).name}:{one.lineno})" for one in place)
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
