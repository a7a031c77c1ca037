"""Configuration of one node store: validated once, frozen, never overwritten after construction."""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass

from tournant.kvstore.errors import StoreConfigError

PAGE_BYTES = 4096  # slots, records and segments are whole pages, so that direct I/O can address them
CHUNK_BYTES = 64 << 20
MAX_SEGMENT_BYTES = 1 << 40
MAX_HOST_BYTES = 1 << 44  # a page number has 32 bits in messages
MAX_NVME_BYTES = 1 << 60
MAX_RUN_RECORDS = 64  # of one write; keeps a run below the 1,024 buffers of one system call
MAX_US = 86_400_000_000  # a day
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?")


def parse_bytes(text: str) -> int:
    """Bytes of "1073741824", "512MiB", "1.5 GiB" or "2GB". Raises ValueError with what to write instead."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError("write 1073741824, 512MiB or 1.5GiB")
    unit = found[2] or "B"
    number = float(found[1]) * (1024 if "i" in unit else 1000) ** "BKMGT".index(unit[0])
    if not number < 1 << 62:
        raise ValueError("that is more than any machine has")
    return int(found[1]) if found[1].isdecimal() and unit == "B" else int(number)


def shown(value: object) -> str:
    """A value in a message: short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python does not print every number
        return f"a number of {value.bit_length()} bits"
    return reprlib.repr(value)


def check_range(name: str, value: float, least: float, most: float) -> None:
    """Raises StoreConfigError, also for what is no number."""
    if not least <= value <= most:
        raise StoreConfigError(f"{name} is {shown(value)}; it must be {least} to {most}")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """What an operator chooses about a node store.

    host_bytes: size of the pool in RAM; chunk_bytes: size of a part of it with slots of one size, 0 = 64 MiB, or half
    of the pool where that is less, so that two sizes have room; nvme_bytes: most bytes in the folder, 0 = no NVMe tier;
    segment_bytes: size of one file there; prefetch_blocks: blocks behind the end of an opened chain that are loaded
    from NVMe before they are asked for, 0 = none; eviction, admission: names from `policies`; copy_start,
    copy_parallel, copy_stop: watermarks of STORE.md section 4 as shares of the pool; num_copiers: writes to disk at
    once above `copy_parallel`.

    Shares of the pool: max_lent_share for lent and hard-pinned slots together, max_pinned_share for soft pins.
    Times in microseconds: pin_us a soft pin lives, fetch_us a fetch may take, io_us until an I/O counts as hung,
    disk_retry_us until a full or failed disk is tried again. incomplete_reports: reports of its writer after which a
    block that still lacks parts is dropped.
    """

    host_bytes: int
    chunk_bytes: int = 0
    nvme_bytes: int = 0
    segment_bytes: int = 64 << 20
    eviction: str = "lru"
    admission: str = "all"
    prefetch_blocks: int = 0
    copy_start: float = 0.70
    copy_parallel: float = 0.90
    copy_stop: float = 0.50
    num_copiers: int = 4
    max_lent_share: float = 0.25
    max_pinned_share: float = 0.50
    pin_us: int = 30_000_000
    fetch_us: int = 2_000_000
    io_us: int = 10_000_000
    disk_retry_us: int = 30_000_000
    incomplete_reports: int = 64
    records_per_write: int = 16
    records_per_read: int = 8
    checkpoint_segments: int = 16
    max_clients: int = 256
    max_reads: int = 64
    max_keys: int = 16_384
    max_entries: int = 8_192

    def __post_init__(self) -> None:
        for name, least, most in _LIMITS:
            check_range(name, getattr(self, name), least, most)
        for name in ("host_bytes", "chunk_bytes", "segment_bytes"):
            if getattr(self, name) % PAGE_BYTES:
                raise StoreConfigError(f"{name} is {getattr(self, name)}; it must be a multiple of {PAGE_BYTES}")
        if self.nvme_bytes and self.nvme_bytes < 2 * self.segment_bytes:
            raise StoreConfigError(
                f"nvme_bytes is {self.nvme_bytes}; it must be 0 or at least two segments of {self.segment_bytes} bytes"
            )
        for name in ("copy_stop", "copy_start", "copy_parallel", "max_lent_share", "max_pinned_share"):
            if not 0 < getattr(self, name) <= 1:
                raise StoreConfigError(f"{name} is {shown(getattr(self, name))}; it must be above 0 and at most 1")
        if not self.copy_stop <= self.copy_start <= self.copy_parallel:
            raise StoreConfigError(
                f"copy_stop is {self.copy_stop}, copy_start {self.copy_start}, copy_parallel {self.copy_parallel}; "
                "they must rise"
            )
        if self.prefetch_blocks > self.max_keys:
            raise StoreConfigError(
                f"prefetch_blocks is {self.prefetch_blocks}; it must be 0 to {self.max_keys} (max_keys)"
            )

    @property
    def bytes_per_chunk(self) -> int:
        """Of every chunk but the last one, which may be shorter."""
        half = -(-self.host_bytes // (2 * PAGE_BYTES)) * PAGE_BYTES
        return min(self.chunk_bytes or min(CHUNK_BYTES, half), self.host_bytes)


_LIMITS = (
    ("host_bytes", PAGE_BYTES, MAX_HOST_BYTES),
    ("chunk_bytes", 0, MAX_HOST_BYTES),
    ("segment_bytes", PAGE_BYTES, MAX_SEGMENT_BYTES),
    ("nvme_bytes", 0, MAX_NVME_BYTES),
    ("prefetch_blocks", 0, 1 << 16),
    ("num_copiers", 1, 1024),
    ("pin_us", 1, MAX_US),
    ("fetch_us", 1, MAX_US),
    ("io_us", 1, MAX_US),
    ("disk_retry_us", 1, MAX_US),
    ("incomplete_reports", 1, 1 << 30),
    ("records_per_write", 1, MAX_RUN_RECORDS),
    ("records_per_read", 1, 1024),
    ("checkpoint_segments", 1, 1 << 20),
    ("max_clients", 1, 1 << 14),
    ("max_reads", 1, 1 << 20),
    ("max_keys", 1, 1 << 15),  # what fits into a request of wire.py
    ("max_entries", 1, 1 << 14),
)
