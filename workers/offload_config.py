"""Configuration of an engine's side of the tiers: how device blocks leave for the node store and come back.

Validated once, frozen. The store's own settings are kvstore/config.py's.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field, fields
from typing import Any

from tournant.workers.errors import ConfigError

RESTORES = ("auto", "always", "never")
LOWER_KV_DTYPES = ("same", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults that tests switch on; all off by default. Never set in a service.

    kernel_delay_ms: every step completes that much later, beside the engine's thread; save_delay_ms, load_delay_ms:
    before each copied block; fail_every_save, fail_every_load: every n-th block fails, 0 = none; flip_every_save,
    flip_every_load: a bit of every n-th block is flipped in its slot after its checksum was made.
    """

    kernel_delay_ms: float = 0.0
    save_delay_ms: float = 0.0
    load_delay_ms: float = 0.0
    fail_every_save: int = 0
    fail_every_load: int = 0
    flip_every_save: int = 0
    flip_every_load: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not _is_number(value) or not value >= 0:
                raise ConfigError(f"faults.{item.name} is {reprlib.repr(value)}; it must be a number of 0 or more")


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """What an operator chooses about an engine's tiers below the device.

    store_socket: of the node store; credit_blocks: slots that the store lends for blocks on their way down, None = a
    32nd of its pool, but 16 to 256, and at most half of what is left of the quarter that all engines may have;
    copy_start, copy_parallel, copy_stop: watermarks of STORE.md section 4 as shares of the device pool; num_copiers:
    threads that copy down above copy_parallel; publish_share: share of a step's time that copying down may take below
    copy_start; restore: "auto" estimates per request how much of its prefix is worth loading, "always" loads all,
    "never" none; lookup_ms: longest wait for a lookup, restore_ms: for the blocks of a request, until the rest is
    computed; prefetch_requests: waiting requests whose prefix is looked up and brought into RAM; prefetch_share: most
    of the host pool that these may hold; lower_kv_dtype: form of KV in RAM and on NVMe, "same" as on the device;
    lower_kv_dtype_from: only for blocks that begin at this token or later; host_bytes_per_s: emulated link between
    device and RAM, each direction, 0 = off; faults: for tests.
    """

    store_socket: str
    credit_blocks: int | None = None
    copy_start: float = 0.70
    copy_parallel: float = 0.90
    copy_stop: float = 0.50
    num_copiers: int = 2
    publish_share: float = 0.05
    restore: str = "auto"
    lookup_ms: int = 100
    restore_ms: int = 5_000
    prefetch_requests: int = 8
    prefetch_share: float = 0.25
    lower_kv_dtype: str = "same"
    lower_kv_dtype_from: int = 0
    host_bytes_per_s: int = 0
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        for name in ("copy_stop", "copy_start", "copy_parallel"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value <= 1:
                raise ConfigError(f"{name} is {reprlib.repr(value)}; it must be a number above 0 and at most 1")
        if not self.copy_stop <= self.copy_start <= self.copy_parallel:
            raise ConfigError(
                f"copy_stop is {self.copy_stop}, copy_start {self.copy_start}, copy_parallel {self.copy_parallel}; "
                "they must rise in this order"
            )
        for name in ("publish_share", "prefetch_share"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= 1:
                raise ConfigError(f"{name} is {reprlib.repr(value)}; it must be a number from 0 to 1")
        for name, known in (("restore", RESTORES), ("lower_kv_dtype", LOWER_KV_DTYPES)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"{name} is {reprlib.repr(value)}; it must be one of {', '.join(known)}")
        limits = {
            "credit_blocks": (1, 8192),
            "num_copiers": (1, 16),
            "lookup_ms": (1, 60_000),
            "restore_ms": (1, 600_000),
            "prefetch_requests": (0, 48),
            "lower_kv_dtype_from": (0, 1 << 24),
            "host_bytes_per_s": (0, 1 << 44),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is None and name == "credit_blocks":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} is {reprlib.repr(value)}; it must be a whole number from {low} to {high}")

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> OffloadConfig:
        """Inverse of `dataclasses.asdict`."""
        return cls(**{**data, "faults": Faults(**data["faults"])})


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
