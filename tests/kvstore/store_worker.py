"""One rank under load, the body of a process: writes, reads, records what happened, until it is killed.

Both ranks of a writer make the same choices from its id, so that their parts meet.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import time
from pathlib import Path

from tests.helpers.history import HistoryFile, Record
from tests.kvstore.store_harness import HALVES, READER, SLOT, keys, payload, writer
from tournant.kvstore.block import Part, Version
from tournant.kvstore.client import StoreClient, connect
from tournant.kvstore.errors import StoreRefused, StoreUnavailable
from tournant.kvstore.events import ReportEntry
from tournant.kvstore.groups import Handle
from tournant.kvstore.read_group import choose
from tournant.kvstore.record import checksum

CHAINS, LENGTH = 12, 16
PATIENCE_S = 30.0
now = time.monotonic_ns


def chain_of(number: int) -> list[bytes]:
    """Keys of one of the chains that all workers share."""
    return keys(LENGTH, f"chain {number}")


def fields_of(part: Part) -> tuple[int, int, int, int]:
    """A part in a record."""
    return part.layer_start, part.layer_stop, part.head_start, part.head_stop


def oracle(key: str, version: tuple[int, int], part: tuple[int, int, int, int]) -> int:
    """See `history.Oracle`."""
    return checksum(payload(bytes.fromhex(key), Version(*version), Part(*part)))


class Worker:
    """One attachment."""

    def __init__(self, client: StoreClient, history: HistoryFile, actor: str) -> None:
        self.client = client
        self.history = history
        self.actor = actor
        self._known: set[tuple[int, int]] = set()
        self._note_lends()

    def _note_lends(self) -> None:
        fresh = [lent for lent in self.client._book.free if (lent.page, lent.generation) not in self._known]
        self._known.update((lent.page, lent.generation) for lent in fresh)
        self.history.add(Record(self.actor, "lend", slot=self._slot(lent), invoke=now()) for lent in fresh)

    def _slot(self, at: ReportEntry | Handle | object) -> tuple[int, int, int]:
        return self.client.incarnation, at.page, at.generation  # type: ignore[attr-defined]

    def write(self, chain: list[bytes], first: int) -> None:
        """Write as many blocks as there is credit for, and report them."""
        part = self.client.identity.part
        assert part is not None
        entries = []
        for counter, key in enumerate(chain, start=first):
            version = Version(self.client.identity.writer_id, counter)
            one = self.client.write(key, version, payload(key, version, part))
            if one is not None:
                entries.append(one)
        asked = [
            Record(
                self.actor, "report", first, one.key.hex(), fields_of(part),
                (one.version.writer_id, one.version.counter), self._slot(one), one.checksum, "info", now(),
            )
            for one in entries
        ]  # fmt: skip
        self.history.add(asked)
        reply = self.client.publish(entries)
        done = [
            Record(*[getattr(one, name) for name in Record.__slots__[:8]], "fail" if n in reply.refused else "ok",
            one.invoke, now()) for n, one in enumerate(asked)
        ]  # fmt: skip
        self.history.add(done)
        self._note_lends()

    def read(self, chain: list[bytes]) -> int:
        """Read a chain with both parts of each block; how many blocks were accepted."""
        begun = now()
        read, answer = self.client.open(chain)
        picks = choose([answer], HALVES)
        fetched = self.client.fetch(read, [pick.version for pick in picks]) if picks else answer
        accepted: list[Record] = []
        for key, handles in zip(chain, fetched.handles() if picks else [], strict=False):
            targets = [memoryview(bytearray(SLOT)) for _ in handles]
            if self.client.copy_out([key] * len(handles), handles, targets) < len(handles):
                break
            for handle, target in zip(handles, targets, strict=True):
                name = (key.hex(), fields_of(fetched.parts[handle.part]), (handle.writer_id, handle.counter))
                accepted.append(
                    Record(self.actor, "accept", read, *name, self._slot(handle), checksum(target), "ok", begun, now())
                )
        self.client.close_read(read)
        blocks = len({record.key for record in accepted})
        outcome = Record(self.actor, "open", read, outcome="ok" if blocks else "fail", invoke=begun, back=now())
        self.history.add([outcome, *accepted])
        return blocks


def attach(path: Path, writer_id: int, rank: int) -> StoreClient:
    """Attach as soon as a store listens."""
    identity = writer(credit=8, part=HALVES[rank], parts=HALVES, writer_id=writer_id) if writer_id else READER
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return connect(path, identity, PATIENCE_S)
        except StoreUnavailable:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)  # between two tries, until the store is there


def work(path: Path, history: HistoryFile, writer_id: int, rank: int, partner: socket.socket, output: int) -> int:
    """Be one rank, in step with its partner; writes a byte to `output` per step. Never ends by itself but with 3, when
    the store refuses it, or 4, when its partner has ended.
    """
    rng = random.Random(writer_id)
    steps = itertools.count(1)
    for attachment in itertools.count():
        try:
            worker = Worker(attach(path, writer_id, rank), history, f"{os.getpid()}.{attachment}")
        except StoreRefused:
            return 3
        try:
            while True:
                partner.send(b".")
                if not partner.recv(1):
                    return 4
                chain, start, other = rng.randrange(CHAINS), rng.choice((0, 0, 8)), rng.randrange(CHAINS)
                worker.write(chain_of(chain)[start : start + 8], next(steps) * LENGTH)
                worker.read(chain_of(other))
                os.write(output, b".")
        except StoreUnavailable:
            worker.client.close()
        except ConnectionError:
            return 4
    return 0
