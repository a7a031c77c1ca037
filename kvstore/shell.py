"""The hands of a node store core: carries its instructions out, and brings back what became of them.

Owns the core, the host pool, the NVMe tier, one thread that checks payloads, and the clock. server.py and
local_store.py put a socket or a function call in front of it; neither touches the core otherwise.

Invariants:
 1. Everything but payload checks and disk I/O happens on the one thread that calls `handle` and `pump`.
 2. Generations are in the table before a reply of the same step is returned.
 3. Other threads only append to `_arrived` and write to `wake_fd`; `pump` turns that into events.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tournant.kvstore.announcer import Announcer, AnnouncerConfig
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.disk_events import (
    CheckpointDone,
    CloseSegment,
    DeleteSegment,
    DiskError,
    DiskEvent,
    DiskInstruction,
    ReadDone,
    ReadRecords,
    ReadResult,
    Recovery,
    SegmentClosed,
    SegmentDeleted,
    WriteDone,
    WriteRecords,
)
from tournant.kvstore.disk_io import DiskIO
from tournant.kvstore.errors import StoreConfigError
from tournant.kvstore.events import (
    Adopt,
    AdoptEntry,
    Disconnect,
    Drained,
    Fill,
    GaveWay,
    Send,
    SetGenerations,
    Tick,
    Verified,
    Verify,
)
from tournant.kvstore.host_tier import HostMemory
from tournant.kvstore.node_store import Event, Instruction, NodeStore
from tournant.kvstore.nvme_tier import NvmeConfig, NvmeTier
from tournant.kvstore.record import checksum

TICK_US = 50_000
CLOSE_S = 10.0  # most seconds for calls to the disk that have begun
_BUSY = DiskError("io", "too many requests wait for the disk")
_LOG = logging.getLogger(__name__)

ForClients = Send | Disconnect | Drained
_FOR_CLIENTS = (Send, Disconnect, Drained)  # isinstance is slow on a union


@dataclass(frozen=True, slots=True)
class NvmePlace:
    """Where the NVMe tier lies and how it works. disk: system calls, for tests."""

    folder: Path
    config: NvmeConfig
    disk: DiskIO | None = None


class StoreShell:
    """See the module. Raises StoreConfigError, FolderRefused or OSError; nothing is held then."""

    def __init__(
        self, config: StoreConfig, memory: HostMemory, nvme: NvmePlace | None = None, tenant_check: bytes = b""
    ) -> None:
        if (nvme is None) != (config.nvme_bytes == 0):
            raise StoreConfigError(
                f"nvme_bytes is {config.nvme_bytes} and the NVMe folder is {None if nvme is None else nvme.folder}; "
                "set both or neither"
            )
        self.memory = memory
        self.core = NodeStore(config, int.from_bytes(os.urandom(8), "little"), tenant_check)
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.nvme = nvme
        self.announcer: Announcer | None = None
        self._tier: NvmeTier | None = None
        self._arrived: deque[DiskEvent | Verified | Callable[[], None]] = deque()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._adopted: Sequence[bytes | memoryview] = ()
        self._next_tick_us = 0
        try:
            if nvme is not None:
                self._tier = NvmeTier(nvme.folder, nvme.config, memory.pool, self._arrive, nvme.disk)
                found = self._tier.open()
                _warn_of_little_room(config.nvme_bytes, nvme.folder, found, self._tier)
                self.core.recover(found)
        except BaseException:
            os.close(self.wake_fd)
            raise
        self._checker = threading.Thread(target=self._check, name="checker", daemon=True)
        self._checker.start()

    # ---- events in, replies out

    def handle(self, event: Event) -> list[ForClients]:
        """One event through the core; what is left of its instructions for whoever holds the clients, in order."""
        replies: list[ForClients] = []
        refused: list[DiskEvent] = []
        self._carry_out(self.core.step(now_us(), event), replies, refused)
        while refused:
            self._carry_out(self.core.step(now_us(), refused.pop(0)), replies, refused)
        return replies

    def adopt(self, entries: Sequence[AdoptEntry], payloads: Sequence[bytes | memoryview]) -> list[ForClients]:
        """Take in parts that came from elsewhere, whole and verified, with their bytes; as `handle`."""
        self._adopted = payloads
        replies = self.handle(Adopt(tuple(entries)))
        self._adopted = ()
        return replies

    def pump(self) -> list[ForClients]:
        """What other threads have brought, and a tick when it is time. Call when `wake_fd` is readable or time is
        up.
        """
        replies: list[ForClients] = []
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        for _ in range(len(self._arrived)):
            arrived = self._arrived.popleft()
            if callable(arrived):
                arrived()
            else:
                replies += self.handle(arrived)
        if self.until_tick_s() <= 0:
            self._next_tick_us = now_us() + TICK_US
            replies += self.handle(Tick())
            if self.announcer is not None:
                self.announcer.trim()
        return replies

    def announce(self, config: AnnouncerConfig) -> Announcer:
        """Have changes gathered for a directory from now on. What is polled from the announcer is the caller's to send;
        another configuration makes a new one, the same gives the same.
        """
        if self.announcer is None or self.announcer.config != config:
            self.announcer = Announcer(config, self.core.incarnation, self.core.residency, last_seq=now_us())
        return self.announcer

    def until_tick_s(self) -> float:
        """Seconds until `pump` must be called even if nothing arrives."""
        return max(0.0, (self._next_tick_us - now_us()) / 1e6)

    def _carry_out(self, instructions: list[Instruction], replies: list[ForClients], refused: list[DiskEvent]) -> None:
        for instruction in instructions:
            if isinstance(instruction, SetGenerations):
                self.memory.set_generations(instruction.pairs)
            elif isinstance(instruction, _FOR_CLIENTS):
                replies.append(instruction)
            elif isinstance(instruction, Fill):
                for place, page in instruction.targets:
                    payload = self._adopted[place]
                    self.memory.slot(page, len(payload))[:] = payload
            elif isinstance(instruction, Verify):
                self._verify(instruction)
            elif isinstance(instruction, GaveWay):
                _LOG.warning(
                    "refused %d records whose KV is stored as %s: the engines keep it as %s now",
                    instruction.records, ", ".join(instruction.old_forms), instruction.kv_form,
                )  # fmt: skip
            elif self._tier is None or not self._tier.submit(instruction):
                refused.append(_not_taken(instruction))

    # ---- the checker thread

    def off_loop(self, job: Callable[[], None], done: Callable[[], None]) -> None:
        """Run `job` on the checker thread, then `done` in `pump`."""

        def run() -> None:
            job()
            self._arrive(done)

        self._jobs.put(run)

    def _verify(self, check: Verify) -> None:
        def run() -> None:
            good = checksum(self.memory.slot(check.page, check.length)) == check.checksum
            self._arrive(Verified(check.io, good))

        self._jobs.put(run)

    def _check(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _arrive(self, what: DiskEvent | Verified | Callable[[], None]) -> None:
        """Called from any thread."""
        self._arrived.append(what)
        os.eventfd_write(self.wake_fd, 1)

    def close(self) -> bool:
        """End the threads; the core is not asked any more. False when a call to the disk still hangs: the pool must
        stay mapped until this process ends.
        """
        self._jobs.put(None)
        self._checker.join(CLOSE_S)
        if (self._tier is not None and not self._tier.close(CLOSE_S)) or self._checker.is_alive():
            _LOG.warning("the disk hangs: the folder stays locked until this process ends")
            return False
        os.close(self.wake_fd)
        return True


def _warn_of_little_room(nvme_bytes: int, folder: Path, found: Recovery, tier: NvmeTier) -> None:
    """The store works on a disk that is smaller than its cap, but never gets that far."""
    held = found.foreign_bytes + sum(segment.allocated for segment in found.segments)
    with suppress(OSError):
        free = tier.free_bytes()
        if nvme_bytes > held + free:
            _LOG.warning(
                "nvme_bytes is %d, but there is room for %d bytes in %s: %d are in use there and %d of the disk are "
                "free; blocks are kept as long as there is room: lower nvme_bytes, or free some of the disk",
                nvme_bytes, held + free, folder, held, free,
            )  # fmt: skip


def now_us() -> int:
    """Microseconds of a clock that no one sets."""
    return time.monotonic_ns() // 1000


def _not_taken(instruction: DiskInstruction) -> DiskEvent:
    """The answer to an instruction that the tier did not take."""
    if isinstance(instruction, WriteRecords):
        return WriteDone(instruction.io, _BUSY, ())
    if isinstance(instruction, ReadRecords):
        return ReadDone(instruction.io, tuple(ReadResult("error", _BUSY.message, _BUSY) for _ in instruction.reads))
    if isinstance(instruction, CloseSegment):
        return SegmentClosed(instruction.io, instruction.segment, _BUSY)
    if isinstance(instruction, DeleteSegment):
        return SegmentDeleted(instruction.io, instruction.segment, _BUSY)
    return CheckpointDone(instruction.io, _BUSY)
