"""A bounded place on the device for tiles of attention matrices, with host memory and a file below it.

Owns the buffers, the threads that copy between tiers, and the file at the bottom. What moves when is decided by
tile_ledger.py, which is asked under one lock after every event; copies run outside of it, both directions at once.

One thread uses an arena: it says the order of its reads, makes tiles (`new`, `done`), reads them (`read`, `done`) and
closes. Between, tiles move by themselves. float32 only.

Guarantees:
 1. Memory that was handed out (`peak_bytes`) never exceeds device_bytes + host_bytes.
 2. A failed copy ends the arena: the next call raises its error. `close` waits for copies that run; nothing is left.
 3. No wait without an end: when nothing moves and there is no room, `ArenaFull` tells sizes and what to raise.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from types import TracebackType
from typing import Protocol

import numpy as np
import torch

from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.errors import InvariantViolation
from tournant.workers.device import CpuDevice, Device
from tournant.workers.spill_file import SpillFile
from tournant.workers.tile_ledger import MAX_DOWN, MAX_UP, Kind, Move, Tier, TileLedger

Key = Hashable


class ArenaFull(RuntimeError):  # noqa: N818 - a state of the world
    """The tiles that are needed at once do not fit; the message tells sizes and what to raise."""


class Bottom(Protocol):
    """The tier below host memory. Called by several threads, for one tile by one at a time."""

    def write(self, key: Key, tile: torch.Tensor) -> None:
        """Keep a tile (float32, on the CPU, as `ScoreArena.new` shaped it). Raises OSError."""

    def read(self, key: Key, tile: torch.Tensor) -> None:
        """Fill a tile with what was written, which is forgotten. Raises OSError."""

    def close(self) -> None:
        """End. Idempotent."""


class SpillBottom:
    """Tiles in a spill file of this arena alone."""

    def __init__(self, file: SpillFile) -> None:
        self.file = file
        self._places: dict[Key, tuple[int, int]] = {}

    def write(self, key: Key, tile: torch.Tensor) -> None:
        """See Bottom."""
        size = -(-tile.nbytes // PAGE_BYTES) * PAGE_BYTES
        place = self.file.take(size)
        try:
            self.file.write(place, _bytes_of(tile))
        except OSError:
            self.file.give_back(place, size)
            raise
        self._places[key] = place, size

    def read(self, key: Key, tile: torch.Tensor) -> None:
        """See Bottom."""
        place, size = self._places[key]
        self.file.read(place, _bytes_of(tile))
        del self._places[key]
        self.file.give_back(place, size)

    def close(self) -> None:
        """See Bottom."""
        self.file.close()


def _bytes_of(tile: torch.Tensor) -> memoryview:
    found: memoryview = tile.numpy().data.cast("B")
    return found


class _Pool:
    """Buffers of one tier. Freed ones are kept for the next of their size as long as the capacity allows it."""

    def __init__(self, device: Device, capacity: int, *, on_host: bool) -> None:
        self._device, self._capacity, self._on_host = device, capacity, on_host
        self._free: dict[int, list[torch.Tensor]] = {}
        self.held = self.peak = 0  # bytes, the free ones included

    def take(self, num_bytes: int) -> torch.Tensor:
        if free := self._free.get(num_bytes):
            return free.pop()
        while self.held + num_bytes > self._capacity:
            size = next((size for size, free in self._free.items() if free), None)
            if size is None:
                raise InvariantViolation(f"{self.held} of {self._capacity} bytes are held; {num_bytes} more are asked")
            self._free[size].pop()
            self.held -= size
        self.held += num_bytes
        self.peak = max(self.peak, self.held)
        shape = (num_bytes // 4,)
        with torch.inference_mode(False):  # threads that are in no such mode write to it, too
            if self._on_host:
                return self._device.host_buffer(shape, torch.float32)
            return torch.empty(shape, dtype=torch.float32, device=self._device.torch_device)

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free.setdefault(buffer.nbytes, []).append(buffer)


@dataclass(slots=True)
class ArenaStats:
    """Bytes. peak_bytes: most memory handed out at once, device and host; moved: copied from a tier to the next."""

    peak_bytes: int = 0
    moved: dict[tuple[Tier, Tier], int] = field(default_factory=dict)


class ScoreArena:
    """Tiles by key. bottom: closed with the arena, None = tiles stay in memory; forgets: as of TileLedger."""

    def __init__(
        self,
        device_bytes: int,
        host_bytes: int = 0,
        bottom: Bottom | None = None,
        *,
        device: Device | None = None,
        forgets: bool = False,
    ) -> None:
        self._device = device or CpuDevice()
        self._ledger = TileLedger(device_bytes, host_bytes, bottom=bottom is not None, forgets=forgets)
        self._limits = f"device_bytes is {device_bytes}, host_bytes {host_bytes}"
        self._bottom = bottom
        self._pools: dict[Tier, _Pool] = {
            Tier.DEVICE: _Pool(self._device, device_bytes, on_host=False),
            Tier.HOST: _Pool(self._device, host_bytes, on_host=True),
        }
        self._shapes: dict[Key, tuple[int, ...]] = {}
        self._buffers: dict[tuple[Key, Tier], torch.Tensor] = {}
        self._down, self._up = self._device.new_lane(), self._device.new_lane()
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(2 * MAX_DOWN + MAX_UP, thread_name_prefix="tiles")
        self._error: BaseException | None = None
        self._closed = False
        self._stats = ArenaStats()

    def schedule(self, keys: Sequence[Key]) -> None:
        """The order of all reads; before the first tile."""
        self._ledger.schedule(keys)

    def new(self, key: Key, shape: tuple[int, ...], kind: Kind = Kind.SCORES) -> torch.Tensor:
        """Memory of the device for a tile, undefined float32 of `shape`, until `done`. Waits for room; raises ArenaFull
        or the error of a copy.
        """
        num_bytes = -(-4 * prod(shape) // PAGE_BYTES) * PAGE_BYTES
        with self._changed:
            while not self._ledger.add(key, num_bytes, kind):
                self._wait(f"a tile of {num_bytes} bytes")
            self._shapes[key] = shape
            self._buffers[key, Tier.DEVICE] = self._pools[Tier.DEVICE].take(num_bytes)
            self._go_on()
            return self._view(key, Tier.DEVICE)

    def read(self, key: Key) -> torch.Tensor:
        """A tile on the device, until `done`. Waits for it; raises ArenaFull or the error of a copy."""
        with self._changed:
            while not self._ledger.pin(key):
                self._wait(f"tile {key}")
            self._go_on()
            return self._view(key, Tier.DEVICE)

    def done(self, key: Key) -> None:
        """A tile was written or read; it is gone after its last read."""
        self._down.follow_compute()  # copies of this tile come after what wrote it,
        self._up.follow_compute()  # and into its memory after what read it
        with self._changed:
            self._ledger.release(key)
            if self._ledger.spent(key):
                self._free(key, self._ledger.drop(key))
                del self._shapes[key]
            self._go_on()

    def flush(self) -> None:
        """Return when all tiles are at the bottom. Raises ArenaFull or the error of a copy."""
        with self._changed:
            self._ledger.flush()
            while not self._ledger.settled:
                self._wait("a flush")
            self._check()

    def close(self) -> None:
        """Wait for copies that run, free everything. Idempotent."""
        with self._changed:
            self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._buffers.clear()
        if self._bottom is not None:
            self._bottom.close()

    def __enter__(self) -> ScoreArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def stats(self) -> ArenaStats:
        """What was handed out and copied so far."""
        with self._changed:
            peak = sum(pool.peak for pool in self._pools.values())
            return ArenaStats(peak, dict(self._stats.moved))

    def validate(self) -> None:
        """Check places against buffers. Raises InvariantViolation."""
        with self._changed:
            self._ledger.validate()
            wanted = {
                (key, tier)
                for key, (place, target) in self._ledger.places().items()
                for tier in (place, target)
                if tier is not None and tier != Tier.BOTTOM
            }
            if wanted != self._buffers.keys():
                raise InvariantViolation(f"buffers of {sorted(map(str, wanted ^ self._buffers.keys()))} are amiss")
            for tier, pool in self._pools.items():
                used = sum(buffer.nbytes for (_, place), buffer in self._buffers.items() if place == tier)
                if used != self._ledger.used.get(tier, 0) or used > pool.held:
                    raise InvariantViolation(f"{tier.name}: buffers of {used} bytes are in use, {pool.held} are held")

    def _view(self, key: Key, tier: Tier) -> torch.Tensor:
        shape = self._shapes[key]
        return self._buffers[key, tier][: prod(shape)].view(shape)

    def _free(self, key: Key, tier: Tier) -> None:
        if tier != Tier.BOTTOM:
            self._pools[tier].give_back(self._buffers.pop((key, tier)))

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait(self, what: str) -> None:
        """Begin what can be begun and wait for the next copy to end."""
        self._go_on()
        self._check()
        if not self._ledger.num_moving:
            used = ", ".join(f"{tier.name.lower()} holds {held}" for tier, held in self._ledger.used.items())
            advice = "raise device_bytes or host_bytes, or let tiles go to a disk"
            raise ArenaFull(f"there is no room on the device for {what}: {self._limits}; {used}; {advice}")
        self._changed.wait()

    def _go_on(self) -> None:
        """Begin the moves that are to be made now; called with the lock."""
        if self._closed or self._error is not None:
            return
        for move in self._ledger.plan():
            if move.target != Tier.BOTTOM:
                self._buffers[move.key, move.target] = self._pools[move.target].take(move.num_bytes)
            self._threads.submit(self._carry_out, move)

    def _carry_out(self, move: Move) -> None:
        error: BaseException | None = None
        try:
            self._copy(move)
        except BaseException as caught:  # handed to the thread that uses the arena
            error = caught
        with self._changed:
            if error is None:
                self._ledger.landed(move)
                self._stats.moved[move.source, move.target] = (
                    self._stats.moved.get((move.source, move.target), 0) + move.num_bytes
                )
                self._free(move.key, move.source)
                if not self._ledger.knows(move.key):
                    del self._shapes[move.key]
            else:
                self._ledger.failed(move)
                self._free(move.key, move.target)
                self._error = self._error or error
            self._go_on()
            self._changed.notify_all()

    def _copy(self, move: Move) -> None:
        with self._changed:
            views: dict[Tier, torch.Tensor] = {
                tier: self._view(move.key, tier) for tier in (move.source, move.target) if tier != Tier.BOTTOM
            }
        if Tier.BOTTOM in (move.source, move.target):
            if self._bottom is None:
                raise InvariantViolation("a tile was sent to a tier that is not there")
            (self._bottom.write if move.target == Tier.BOTTOM else self._bottom.read)(move.key, views[Tier.HOST])
            return
        source, target = views[move.source], views[move.target]
        if self._device.kind == "cpu":
            np.copyto(target.numpy(), source.numpy())  # one thread's work, without the interpreter's lock
            return
        lane = self._down if move.target > move.source else self._up
        with self._changed:  # one at a time gives work to a lane
            with lane.active():
                target.copy_(source, non_blocking=True)
            mark = lane.mark()
        mark.wait()
