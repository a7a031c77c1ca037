"""Records with known payloads, and a tier whose events can be waited for."""

from __future__ import annotations

import mmap
import queue
from pathlib import Path
from typing import Any

import numpy as np

from tournant.kvstore.block import Part, Version
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_events import DiskEvent, DiskInstruction, RecordAt, RecordRead, RecordToWrite, Recovery
from tournant.kvstore.disk_io import DiskIO
from tournant.kvstore.nvme_tier import NvmeConfig, NvmeTier
from tournant.kvstore.record import RecordHeader, checksum, padded

WAIT_S = 20.0
PART = Part(0, 2, 0, 1)
WEIGHTS = b"\x77" * 32


def payload(number: int, length: int) -> bytes:
    """Bytes that only this number has."""
    return np.random.default_rng(number).bytes(length)


def header(number: int, length: int, *, kv_form: str = "bf16", data: bytes | None = None) -> RecordHeader:
    """Header of the payload with this number."""
    digest = checksum(payload(number, length) if data is None else data)
    return RecordHeader(number.to_bytes(32, "big"), Version(1 << 63, number), PART, WEIGHTS, kv_form, length, digest)


class Pool:
    """Host pool of some pages, slots handed out one after another."""

    def __init__(self, pages: int) -> None:
        self.view = memoryview(mmap.mmap(-1, pages * PAGE_BYTES))
        self._pages = pages
        self._next = 0

    def slot(self, length: int) -> int:
        """First page of a slot; wraps around."""
        need = padded(length) // PAGE_BYTES
        if self._next + need > self._pages:
            self._next = 0
        self._next += need
        return self._next - need

    def put(self, data: bytes) -> int:
        """A slot that holds these bytes."""
        slot = self.slot(len(data))
        self.view[slot * PAGE_BYTES : slot * PAGE_BYTES + len(data)] = data
        return slot

    def get(self, slot: int, length: int) -> bytes:
        """Bytes of a slot."""
        return bytes(self.view[slot * PAGE_BYTES : slot * PAGE_BYTES + length])


class TestTier:
    """An open NvmeTier and its events."""

    __test__ = False

    def __init__(self, folder: Path, disk: DiskIO | None = None, pool: Pool | None = None, **config: Any) -> None:
        self.pool = Pool(2048) if pool is None else pool
        self.events: queue.Queue[DiskEvent] = queue.Queue()
        self.early: dict[int, DiskEvent] = {}
        self.tier = NvmeTier(folder, NvmeConfig(**config), self.pool.view, self.events.put, disk)
        self.found: Recovery = self.tier.open()

    def wait(self, io: int) -> Any:
        """The event of an instruction."""
        while io not in self.early:
            event = self.events.get(timeout=WAIT_S)
            if event.io in self.early:
                raise AssertionError(f"two events for {event.io}")
            self.early[event.io] = event
        return self.early.pop(io)

    def do(self, instruction: DiskInstruction) -> Any:
        """Carry out one instruction."""
        if not self.tier.submit(instruction):
            raise AssertionError("the tier took nothing")
        return self.wait(instruction.io)

    def to_write(self, number: int, length: int, **fields: Any) -> RecordToWrite:
        """A record in a slot."""
        data = payload(number, length)
        return RecordToWrite(header(number, length, **fields), self.pool.put(data))

    def to_read(self, record: RecordAt) -> RecordRead:
        """A read into a slot full of other bytes."""
        slot = self.pool.put(b"\xee" * record.header.length)
        return RecordRead(record.segment, record.offset, record.size, record.header, slot)

    def close(self) -> bool:
        """Close the tier."""
        return self.tier.close(WAIT_S)
