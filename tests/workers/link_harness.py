"""What tests of the link share: a small pool of blocks with known bytes, a store process, and waiting for events."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from tournant.kvstore.admin import Status, StatusQuery
from tournant.kvstore.block import Part, Version
from tournant.kvstore.client import ask
from tournant.kvstore.config import PAGE_BYTES, StoreConfig
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.slots import SlotState
from tournant.kvstore.store_process import StoreProcess, start_store
from tournant.workers.block_images import PlainImages
from tournant.workers.device import CpuDevice
from tournant.workers.offload_config import Faults, OffloadConfig
from tournant.workers.store_link import LinkIdentity, StoreLink
from tournant.workers.transfer_messages import (
    Attached,
    BlockImages,
    Event,
    Fetch,
    Fetched,
    Found,
    Load,
    Lookup,
    Order,
    ReadEnded,
    Save,
    Saved,
    SaveEntry,
)

PATIENCE_S = 30.0
BLOCK_BYTES = 3 * PAGE_BYTES - 96
PART = Part(0, 2, 0, 2)
_writers = itertools.count(100_000)  # other than those of store_harness.py
E_ = TypeVar("E_")


def keys(count: int, name: str = "") -> tuple[bytes, ...]:
    """Keys of a chain."""
    return tuple(hashlib.sha256(f"{name}/{number}".encode()).digest() for number in range(count))


def content(key: bytes, version: Version) -> bytes:
    """The bytes that this version of a block has."""
    return hashlib.shake_128(key + repr((version.writer_id, version.counter)).encode()).digest(BLOCK_BYTES)


class Engine:
    """The engine's side of one link: a pool of blocks, and all events so far."""

    def __init__(self, socket: Path, num_blocks: int = 64, *, timeout_s: float = PATIENCE_S, **config: Any) -> None:
        self.pool = torch.zeros((num_blocks, BLOCK_BYTES), dtype=torch.uint8)
        self.rows = self.pool.numpy()
        self.writer_id = next(_writers)
        self.events: list[Event] = []
        self._numbers, self._counters = itertools.count(1), itertools.count(1)
        self._happened = threading.Event()
        self.images: BlockImages = PlainImages(CpuDevice(), self.pool)
        if "images" in config:
            self.images = config.pop("images")(self.images)
        agent = config.pop("agent", None)
        sharing = config.pop("num_sharing", 1)
        identity = LinkIdentity(b"w" * 32, "bf16", self.writer_id, PART, num_sharing=sharing)
        made = OffloadConfig(str(socket), **{"credit_blocks": 8} | config)
        wake = self._happened.set
        self.link = StoreLink(socket, identity, self.images, made, wake, timeout_s=timeout_s, agent=agent)

    def submit(self, *orders: Order) -> None:
        self.link.submit(orders)

    def number(self) -> int:
        return next(self._numbers)

    def version(self) -> Version:
        return Version(self.writer_id, next(self._counters))

    def poll(self) -> None:
        self.events += self.link.take_events()

    def wait(self, kind: type[E_], wanted: Callable[[E_], bool] = lambda event: True, after: int = 0) -> E_:
        """The first such event after so many others. Fails when none comes."""
        end = time.monotonic() + PATIENCE_S
        while True:
            self._happened.clear()
            self.poll()
            for event in self.events[after:]:
                if isinstance(event, kind) and wanted(event):
                    return event
            assert self._happened.wait(max(0.0, end - time.monotonic())), f"no {kind.__name__}: {self.events[after:]}"

    def attached(self, after: int = 0) -> Attached:
        return self.wait(Attached, after=after)

    def fill(self, chain: Sequence[bytes], first: int = 0) -> list[SaveEntry]:
        """Write blocks of a chain into the pool; entries to save them."""
        entries = []
        for depth, key in enumerate(chain):
            version = self.version()
            self.rows[first + depth] = np.frombuffer(content(key, version), np.uint8)
            entries.append(SaveEntry(first + depth, key, version, 10, depth))
        return entries

    def save(self, entries: Sequence[SaveEntry], copiers: int = 1) -> Saved:
        """Save in steps of at most 8, and wait; the last answer."""
        found = None
        for start in range(0, len(entries), 8):
            save = self.number()
            self.submit(Save(save, tuple(entries[start : start + 8]), copiers))
            found = self.wait(Saved, lambda event: event.save == save)  # noqa: B023 - waited for here
            assert found.ok, found
            assert not found.refused, found
        assert found is not None
        return found

    def lookup(self, chain: Sequence[bytes]) -> Found:
        read = self.number()
        self.submit(Lookup(read, tuple(chain)))
        return self.wait(Found, lambda event: event.read == read)

    def fetch(self, read: int, count: int) -> Fetched:
        self.submit(Fetch(read, count))
        return self.wait(Fetched, lambda event: event.read == read)

    def load(self, read: int, blocks: Sequence[int], skip: int = 0) -> ReadEnded:
        self.submit(Load(read, skip, tuple(blocks)))
        return self.ended(read)

    def ended(self, read: int) -> ReadEnded:
        return self.wait(ReadEnded, lambda event: event.read == read)

    def bring(self, chain: Sequence[bytes], first: int) -> ReadEnded:
        """Look up, fetch and load a chain into blocks from `first` on."""
        found = self.lookup(chain)
        if not found.tiers:
            return self.ended(found.read)
        fetched = self.fetch(found.read, len(found.tiers))
        return self.load(found.read, range(first, first + fetched.count))

    def holds(self, entries: Sequence[SaveEntry], first: int) -> bool:
        """Whether blocks from `first` on have the bytes of these entries."""
        return all(
            self.rows[first + place].tobytes() == content(entry.key, entry.version)
            for place, entry in enumerate(entries)
        )

    def close(self, flush_s: float = 5.0) -> None:
        self.link.close(flush_s)
        self.poll()


class Node:
    """A store process under test."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o700)
        self.socket = folder / "store.socket"
        self.nvme_folder = folder / "nvme"
        self.process: StoreProcess | None = None
        self._engines: list[Engine] = []

    def start(self, blocks: int = 128, nvme: NvmeConfig | None = None, **config: Any) -> Node:
        made = StoreConfig(blocks * 3 * PAGE_BYTES, **config)
        folder = None if nvme is None else self.nvme_folder
        self.process = start_store(made, self.socket, nvme_folder=folder, nvme=nvme, drain_s=0.0)
        return self

    def engine(self, **config: Any) -> Engine:
        """An engine whose link is closed at the end of the test."""
        found = Engine(self.socket, **config)
        self._engines.append(found)
        return found

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    def status(self) -> Status:
        return cast(Status, ask(self.socket, StatusQuery(), PATIENCE_S))

    def wait_for(self, condition: Callable[[Status], bool]) -> Status:
        end = time.monotonic() + PATIENCE_S
        while not condition(found := self.status()):
            assert time.monotonic() < end, f"still not so: {found}"
            threading.Event().wait(0.005)
        return found

    def at_rest(self, credit: int) -> None:
        """No read, no pin, and exactly the standing credit lent."""
        lent = credit * 3
        self.wait_for(
            lambda found: (found.open_reads, found.pinned_pages, dict(found.pages)[SlotState.LENT]) == (0, 0, lent)
        )

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        if self.process is not None:
            self.process.kill()


@contextmanager
def node(folder: Path) -> Iterator[Node]:
    """A store process, ended with its engines."""
    found = Node(folder)
    try:
        yield found
    finally:
        found.close()


def faulty(**faults: float) -> dict[str, Faults]:
    """Configuration of an engine with these faults."""
    return {"faults": Faults(**faults)}  # type: ignore[arg-type]


class Gate:
    """Images whose copies wait until the test lets them go on, so that a test can act in the middle of one."""

    def __init__(self, images: BlockImages) -> None:
        self._images = images
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.slot_bytes = images.slot_bytes

    def image_bytes(self, depth: int) -> int:
        return self._images.image_bytes(depth)

    def _wait(self) -> None:
        self.entered.set()
        assert self.go_on.wait(PATIENCE_S)

    def save(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        self._wait()
        self._images.save(blocks, slots)

    def load(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        self._wait()
        self._images.load(slots, blocks)
