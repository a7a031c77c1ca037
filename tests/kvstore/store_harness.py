"""What tests of the store's shells share: stores behind a socket or in this process, payloads, small helpers.

Payloads are PRF(key, version, part): whoever reads a block knows which bytes its writer must have written (I2).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from tournant.kvstore.admin import Status, StatusQuery, VerifiedBlocks, VerifyBlocks
from tournant.kvstore.block import Part, Version
from tournant.kvstore.client import Identity, StoreClient, ask, connect
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.events import Reported, ReportEntry
from tournant.kvstore.local_store import LocalStore
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.read_group import choose
from tournant.kvstore.shell import NvmePlace
from tournant.kvstore.slots import SlotState
from tournant.kvstore.store_process import StoreProcess, start_store
from tournant.kvstore.wire import Query

WHOLE = Part(0, 2, 0, 2)
HALVES = (Part(0, 2, 0, 1), Part(0, 2, 1, 2))
WEIGHTS = b"w" * 32
SLOT = 8192
PATIENCE_S = 30.0
_writers = itertools.count(1)


def payload(key: bytes, version: Version, part: Part, length: int = SLOT) -> bytes:
    """The bytes that this version of this part must have."""
    numbers = (version.writer_id, version.counter, part.layer_start, part.layer_stop, part.head_start, part.head_stop)
    return hashlib.shake_128(key + repr(numbers).encode()).digest(length)


def keys(count: int, name: str = "") -> list[bytes]:
    """Keys of a chain."""
    return [hashlib.sha256(f"{name}/{number}".encode()).digest() for number in range(count)]


def writer(credit: int = 8, part: Part = WHOLE, parts: tuple[Part, ...] = (), **changes: Any) -> Identity:
    """A rank of a new group; of `writer_id` if that is among the changes."""
    fields = {"writer_id": next(_writers), "slot_bytes": SLOT, **changes}
    return Identity(WEIGHTS, "bf16", part=part, local_parts=parts or (part,), credit=credit, **fields)


READER = Identity(WEIGHTS, "bf16")


def entry(client: StoreClient, key: bytes, counter: int) -> ReportEntry | None:
    """Write one block; what to report of it."""
    part = client.identity.part
    assert part is not None
    version = Version(client.identity.writer_id, counter)
    return client.write(key, version, payload(key, version, part, client.identity.slot_bytes))


def write(client: StoreClient, chain: Sequence[bytes], first: int = 1) -> int:
    """Write and report a chain in steps of the client's credit; how many blocks of it were taken before a slot
    lacked.
    """
    done = 0
    while done < len(chain):
        step = list(itertools.islice(chain, done, done + max(1, client.credit)))
        entries = [entry(client, key, first + done + number) for number, key in enumerate(step)]
        taken = [one for one in entries if one is not None]
        reply: Reported = client.publish(taken)
        assert not reply.refused
        if not taken:
            return done
        done += len(taken)
    return done


def read(
    client: StoreClient, chain: Sequence[bytes], parts: Sequence[Part] = (WHOLE,), slot_bytes: int = SLOT
) -> list[Version]:
    """Read a chain, all parts of each block, and check every byte that counts as read; the versions of its good
    prefix.
    """
    number, answer = client.open(chain)
    picks = choose([answer], parts)
    fetched = client.fetch(number, [pick.version for pick in picks]) if picks else answer
    good: list[Version] = []
    for key, pick, handles in zip(chain, picks, fetched.handles(), strict=False):
        targets = [memoryview(bytearray(slot_bytes)) for _ in handles]
        if client.copy_out([key] * len(handles), handles, targets) < len(handles):
            break
        for handle, target in zip(handles, targets, strict=True):
            part = fetched.parts[handle.part]
            assert handle.version == pick.version
            assert target == payload(key, handle.version, part, handle.length), "I2: other bytes than were written"
        good.append(pick.version)
    client.close_read(number)
    return good


class Store:
    """A store under test. kind: "socket" (own process) or "local" (this process)."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        folder.chmod(0o700)
        self.socket = folder / "store.socket"
        self.nvme_folder = folder / "nvme"
        self.process: StoreProcess | None = None
        self.local: LocalStore | None = None
        self._clients: list[StoreClient] = []

    def start(
        self, host_bytes: int = 4 << 20, nvme: NvmeConfig | None = None, drain_s: float = 10.0, **config: Any
    ) -> Store:
        """Start it; with an NVMe tier if `nvme` is given."""
        made = StoreConfig(host_bytes=host_bytes, **config)
        if self.kind == "local":
            place = None if nvme is None else NvmePlace(self.nvme_folder, nvme)
            self.local = LocalStore(made, place)
        else:
            folder = None if nvme is None else self.nvme_folder
            self.process = start_store(made, self.socket, nvme_folder=folder, nvme=nvme, drain_s=drain_s)
        return self

    def attach(self, identity: Identity, timeout_s: float = PATIENCE_S) -> StoreClient:
        """A client, closed at the end of the test."""
        if self.local is not None:
            client = self.local.attach(identity, timeout_s)
        else:
            client = connect(self.socket, identity, timeout_s)
        self._clients.append(client)
        return client

    def ask(self, query: Query) -> Any:
        """An operator's query."""
        return self.local.ask(query) if self.local is not None else ask(self.socket, query, PATIENCE_S)

    def status(self) -> Status:
        """Counters and gauges."""
        return cast(Status, self.ask(StatusQuery()))

    def pages(self, state: SlotState) -> int:
        """Pages of the pool in a state."""
        return dict(self.status().pages)[state]

    def wait_for(self, condition: Callable[[Status], bool]) -> Status:
        """Ask until a condition holds. Fails after PATIENCE_S."""
        end = time.monotonic() + PATIENCE_S
        while not condition(found := self.status()):
            assert time.monotonic() < end, f"still not so: {found}"
            select.select([], [], [], 0.005)
        return found

    def wait_for_disk(self) -> None:
        """Until every block in host slots lies on NVMe too."""
        self.wait_for(lambda found: found.nvme_records >= found.blocks)

    def verify(self) -> VerifiedBlocks:
        """Check every block in every tier; the sums."""
        total = VerifiedBlocks(0, True, 0, 0, 0, 0)
        while total.more:
            page = cast(VerifiedBlocks, self.ask(VerifyBlocks(total.after)))
            sums = (getattr(total, n) + getattr(page, n) for n in ("host_good", "host_bad", "nvme_good", "nvme_bad"))
            total = VerifiedBlocks(page.after, page.more, *sums)
        return total

    def stop(self) -> None:
        """An orderly end. Clients are over."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        if self.local is not None:
            self.local.shell.core.validate()
            assert self.local.close()
            self.local = None
        elif self.process is not None:
            assert self.process.stop() == 0
            self.process = None

    def kill(self) -> None:
        """kill -9 of the store's process."""
        assert self.process is not None
        self.process.kill()
        self.process = None

    def close(self) -> None:
        """At the end of a test, whatever happened."""
        if self.process is not None and not self.process.alive:
            self.process = None
        self.stop()


def exit_of(pid: int) -> int:
    """Wait for a child; its wait status."""
    return os.waitpid(pid, 0)[1]


def forked(body: Callable[[], int], limit_s: float = PATIENCE_S) -> int:
    """Run a body in a forked child for up to `limit_s` seconds, 0 = no limit; its pid. The child never returns here."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        code = body()
    finally:
        os._exit(code)


def folder_bytes(folder: Path) -> int:
    """What the files of a folder take of the disk."""
    total = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # deleted meanwhile
            total += path.stat().st_blocks * 512
    return total
