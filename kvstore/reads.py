"""Reads of clients: open, fetch, close; their pins and deadlines.

Owns `Read`s and which groups each one pins. Loading from NVMe is done by the tier manager; a read only waits for it.

Invariants:
 1. A read is named by (client, counter). Opening the same one again gives the same answer and pins nothing twice; a
    counter at or below the last closed one is over and gives an empty answer.
 2. Pins of a read end at its close, at its deadline, at the end of its client's service, whichever is first. A reader
    that copies later than that learns from the generation that its bytes may be others (I7, P8).
 3. Soft pins hold at most `max_pinned_share` of the pool; an open is cut there.
 4. A fetch is answered once: when all picked blocks are in host slots, when one failed, or at its deadline.
"""

from __future__ import annotations

from tournant.kvstore.block import Version
from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.events import Fetched, Opened
from tournant.kvstore.groups import Group
from tournant.kvstore.residency import Residency


class Read:
    """One open read. groups: what it pins, per key the versions it was shown; deadline_us: when its pins end.

    waiting: picked groups whose load is not finished, None before the fetch; answered: the reply that a repeated
    message gets again.
    """

    __slots__ = ("answered", "client", "counter", "deadline_us", "groups", "picks", "waiting")

    def __init__(self, client: int, counter: int, deadline_us: int) -> None:
        self.client = client
        self.counter = counter
        self.deadline_us = deadline_us
        self.groups: list[list[Group]] = []
        self.picks: list[Group] = []
        self.waiting: dict[int, Group] | None = None
        self.answered: Opened | Fetched | None = None


class ReadTable:
    """All reads of all clients."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._limit = int(residency.pool.num_pages * residency.config.max_pinned_share)
        self.reads: dict[tuple[int, int], Read] = {}
        self._newest: dict[int, int] = {}  # client -> highest counter opened
        self.waiting_for: dict[int, list[Read]] = {}  # gid -> reads whose fetch waits for its load
        self.num_cut_by_pins = 0

    def open(self, client: int, counter: int, keys: tuple[bytes, ...], now_us: int) -> Opened:
        """Pin what there is of a chain, up to the first key without a complete version."""
        read = self.reads.get((client, counter))
        if read is not None:
            return read.answered if isinstance(read.answered, Opened) else self._empty(counter)
        if counter <= self._newest.get(client, 0):
            return self._empty(counter)
        self._newest[client] = counter
        residency, limit = self._residency, self._limit
        by_key, pin = residency.index.by_key, residency.pin
        residency.policy.begin_request(keys, now_us)
        read = Read(client, counter, now_us + residency.config.pin_us)
        newest: list[Group] = []
        rows: list[bytes] = []
        counts = bytearray()
        for key in keys:
            group = by_key.get(key)
            if group is None:
                break
            versions = [group] if group.complete else []
            if group.older is not None and group.older.complete:
                versions.append(group.older)
            if not versions:
                break
            if residency.pinned_pages >= limit:
                self.num_cut_by_pins += 1
                break
            count = 0
            for group in versions:
                pin(group)
                rows.append(group.rows or group.pack())
                count += len(group.copies)
            counts.append(count)
            newest.append(versions[0])
            read.groups.append(versions)
        residency.touched(newest, now_us)
        reply = Opened(counter, bytes(counts), b"".join(rows), tuple(residency.index.parts))
        if newest:
            self.reads[client, counter] = read
            read.answered = reply
        return reply

    def _empty(self, counter: int) -> Opened:
        return Opened(counter, b"", b"", ())

    def find(self, client: int, counter: int) -> Read | None:
        """An open read, or None when it is over."""
        return self.reads.get((client, counter))

    def pick(self, read: Read, versions: tuple[Version, ...]) -> None:
        """Keep the chosen version of each of the first keys; all other pins end. What is not there cuts the rest."""
        kept: list[Group] = []
        for shown, version in zip(read.groups, versions, strict=False):
            chosen = next((group for group in shown if group.version == version and not group.dead), None)
            if chosen is None:
                break
            kept.append(chosen)
        for place, shown in enumerate(read.groups):
            chosen = kept[place] if place < len(kept) else None
            for group in shown:
                if group is not chosen:
                    self._residency.unpin(group)
        read.groups = [[group] for group in kept]
        read.picks = kept
        read.waiting = {}

    def wait(self, read: Read, group: Group) -> None:
        """The fetch of this read waits for the load of a group."""
        if read.waiting is None:
            raise InvariantViolation(f"read {read.counter} waits for a load before its fetch")
        if group.gid in read.waiting:  # a chain that names a key twice
            return
        read.waiting[group.gid] = group
        self.waiting_for.setdefault(group.gid, []).append(read)

    def loaded(self, group: Group) -> list[Read]:
        """The load of a group has ended, well or not: the reads whose fetch can be answered now."""
        ready = []
        for read in self.waiting_for.pop(group.gid, ()):
            if read.waiting is None:
                raise InvariantViolation(f"read {read.counter} waits without a fetch")
            del read.waiting[group.gid]
            if not read.waiting:
                ready.append(read)
        return ready

    def _stop_waiting(self, read: Read) -> None:
        for gid in read.waiting or ():
            waiting = self.waiting_for[gid]
            waiting.remove(read)
            if not waiting:
                del self.waiting_for[gid]

    def answer(self, read: Read) -> Fetched:
        """The picked blocks in host slots, up to the first that is not there. The pins of the others end."""
        self._stop_waiting(read)
        read.waiting = {}
        rows: list[bytes] = []
        counts = bytearray()
        for group in read.picks:
            if group.dead or not group.in_host:
                break
            rows.append(group.rows or group.pack())
            counts.append(len(group.copies))
        for group in read.picks[len(counts) :]:
            self._residency.unpin(group)
        read.picks = read.picks[: len(counts)]
        read.groups = [[group] for group in read.picks]
        reply = Fetched(read.counter, bytes(counts), b"".join(rows), tuple(self._residency.index.parts))
        read.answered = reply
        return reply

    def close(self, client: int, counter: int) -> None:
        """All pins of a read end. A read that is not open, or not yet, is over from now on."""
        self._newest[client] = max(counter, self._newest.get(client, 0))
        read = self.reads.pop((client, counter), None)
        if read is None:
            return
        self._stop_waiting(read)
        for shown in read.groups:
            for group in shown:
                self._residency.unpin(group)

    def close_client(self, client: int) -> None:
        """The service of a client has ended."""
        for owner, counter in [name for name in self.reads if name[0] == client]:
            self.close(owner, counter)
        self._newest.pop(client, None)

    def newest(self, client: int) -> int:
        """The highest counter of a client that was opened or closed; 0 for none."""
        return self._newest.get(client, 0)

    def open_reads(self, client: int) -> int:
        """How many reads of a client are open."""
        return sum(owner == client for owner, _ in self.reads)

    def over(self, counter: int) -> Fetched:
        """The answer to a fetch of a read that is over, or never was."""
        return Fetched(counter, b"", b"", ())

    def expired(self, now_us: int) -> list[Read]:
        """Reads whose deadline has passed."""
        return [read for read in self.reads.values() if read.deadline_us <= now_us]

    def pin_counts(self) -> dict[int, int]:
        """Group id -> pins held by reads, recounted."""
        counts: dict[int, int] = {}
        for read in self.reads.values():
            for shown in read.groups:
                for group in shown:
                    counts[group.gid] = counts.get(group.gid, 0) + 1
        return counts
