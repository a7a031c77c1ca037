"""Configuration of one node store: validated once, frozen, never overwritten after construction."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tournant.kvstore.errors import StoreConfigError

PAGE_BYTES = 4096  # slots, records and segments are whole pages, so that direct I/O can address them
CHUNK_BYTES = 64 << 20
MAX_SEGMENT_BYTES = 1 << 40
MAX_NVME_BYTES = 1 << 60
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


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """What an operator chooses about a node store.

    host_bytes: size of the pool in RAM; nvme_bytes: most bytes in the folder, 0 = no NVMe tier; segment_bytes: size of
    one file there; prefetch_blocks: blocks behind the end of an opened chain that are loaded from NVMe before they are
    asked for, 0 = none; eviction, admission: names from `policies`; copy_start, copy_parallel, copy_stop: watermarks of
    STORE.md section 4 as shares of the pool; num_copiers: writes to disk at once above `copy_parallel`.

    Shares of the pool: max_lent_share for lent and hard-pinned slots together, max_pinned_share for soft pins.
    Times in microseconds: pin_us a soft pin lives, fetch_us a fetch may take, io_us until an I/O counts as hung,
    disk_retry_us until a full or failed disk is tried again. incomplete_reports: reports of its writer after which a
    block that still lacks parts is dropped.
    """

    host_bytes: int
    chunk_bytes: int = CHUNK_BYTES
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
        if self.host_bytes < PAGE_BYTES or self.host_bytes % PAGE_BYTES:
            raise StoreConfigError(
                f"host_bytes is {self.host_bytes}; it must be a multiple of {PAGE_BYTES}, at least one page"
            )
        if self.chunk_bytes < PAGE_BYTES or self.chunk_bytes % PAGE_BYTES:
            raise StoreConfigError(f"chunk_bytes is {self.chunk_bytes}; it must be a multiple of {PAGE_BYTES}")
        if self.nvme_bytes and self.nvme_bytes < 2 * self.segment_bytes:
            raise StoreConfigError(
                f"nvme_bytes is {self.nvme_bytes}; it must be 0 or at least two segments of {self.segment_bytes} bytes"
            )
        if not PAGE_BYTES <= self.segment_bytes <= MAX_SEGMENT_BYTES or self.segment_bytes % PAGE_BYTES:
            raise StoreConfigError(
                f"segment_bytes is {self.segment_bytes}; it must be a multiple of {PAGE_BYTES}, at most "
                f"{MAX_SEGMENT_BYTES}"
            )
        if self.nvme_bytes > MAX_NVME_BYTES:
            raise StoreConfigError(f"nvme_bytes is {self.nvme_bytes}; it must be at most {MAX_NVME_BYTES}")
        if not 0 < self.copy_stop <= self.copy_start <= self.copy_parallel <= 1:
            raise StoreConfigError(
                f"copy_stop is {self.copy_stop}, copy_start {self.copy_start}, copy_parallel {self.copy_parallel}; "
                "they must rise from above 0 to at most 1"
            )
        for name in ("max_lent_share", "max_pinned_share"):
            if not 0 < getattr(self, name) <= 1:
                raise StoreConfigError(f"{name} is {getattr(self, name)}; it must be above 0 and at most 1")
        if not 0 <= self.prefetch_blocks <= self.max_keys:
            raise StoreConfigError(
                f"prefetch_blocks is {self.prefetch_blocks}; it must be 0 to {self.max_keys} (max_keys)"
            )
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise StoreConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")


_POSITIVE = (
    "num_copiers",
    "pin_us",
    "fetch_us",
    "io_us",
    "disk_retry_us",
    "incomplete_reports",
    "records_per_write",
    "records_per_read",
    "checkpoint_segments",
    "max_clients",
    "max_reads",
    "max_keys",
    "max_entries",
)
