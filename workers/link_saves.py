"""Blocks of one kind on their way from an engine into one attached store: saves with their reports, and stashes.

Owns which order holds which slot that is lent to the client of that kind. Runs on the link's thread, never waits; the
copies are copy_lanes.py's.

Invariants:
 1. Every save and stash is answered once; a save that has lost slots to refusals or failed copies says how many it has
    back.
 2. A lent slot is free in the client, in a job, in an unanswered report, or a stash.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from tournant.kvstore.client import StoreClient
from tournant.kvstore.events import Reported, ReportEntry
from tournant.kvstore.groups import Handle
from tournant.kvstore.host_tier import HostMemory
from tournant.kvstore.report_book import Lent as LentSlot
from tournant.workers.attachment import Attachment
from tournant.workers.copy_lanes import CopyDown, CopyUp
from tournant.workers.transfer_messages import (
    Copied,
    DropStash,
    Lent,
    Save,
    Saved,
    Stash,
    Stashed,
    Unstash,
    Unstashed,
)

REFILL_S, LAST_REFILL_S = 0.25, 2.0  # between two questions for slots that the store could not lend


@dataclass(slots=True)
class _Saving:
    """A save until it is answered. indexes: of the entries that have a slot; refused: of the others; left: reports
    that are not answered.
    """

    order: Save
    indexes: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    left: int = 0
    num_lent: int = 0


class LinkSaves:
    """See the module. Methods raise StoreUnavailable, and ValueError for a reply that fits no report; then `lose` is to
    be called.
    """

    def __init__(self, attachment: Attachment, kind: int) -> None:
        self._at = attachment
        self._kind = kind
        self._client = attachment.clients[kind]
        self._image_bytes = self._client.identity.slot_bytes
        self._jobs: dict[int, CopyDown | CopyUp] = {}
        self._saving: dict[int, _Saving] = {}  # saves whose reports are not answered
        self._reports: dict[int, tuple[_Saving, list[int]] | None] = {}  # None: asks only for slots
        self._stashes: dict[int, Handle] = {}
        self._dropped: set[int] = set()  # stashes that nobody wants when they are copied
        self._refill_s = REFILL_S
        self._refill_at = attachment.clock() + REFILL_S

    @property
    def num_reports(self) -> int:
        """Reports that are not answered."""
        return len(self._reports)

    # ---- saves

    def save(self, order: Save, since: float) -> None:
        """Copy down what there are slots for; the rest is refused. Nothing, where another rank stores this part."""
        if not self._at.publishes:
            self._at.emit(Copied(order.save, 0, 0.0))
            self._at.emit(Saved(order.save, True, (), len(order.entries)))
            return
        saving = _Saving(order)
        places: list[tuple[LentSlot, int]] = []
        for index in range(len(order.entries)):
            lent = self._client.take_slot()
            if lent is None:
                saving.refused.append(index)
            else:
                saving.indexes.append(index)
                places.append((lent, self._image_bytes))
        if not places:
            self._at.emit(Copied(order.save, 0, 0.0))
            self._at.emit(Saved(order.save, False, tuple(saving.refused), 0))
            return
        blocks = [order.entries[index].block for index in saving.indexes]
        job = CopyDown(
            order.save,
            self._at.memory,
            blocks,
            since,
            partial(self._save_copied, saving),
            places=places,
            copiers=order.copiers,
        )
        self._begin(job)

    def _save_copied(self, saving: _Saving, job: CopyDown) -> None:
        """Report what was copied."""
        del self._jobs[job.number]
        if self._at.over:
            self._at.emit(Saved(job.number, False, (), 0))
            return
        entries: list[ReportEntry] = []
        indexes: list[int] = []
        for index, (lent, length), digest in zip(saving.indexes, job.places, job.checksums, strict=True):
            if digest is None:
                self._client.put_back(lent)
                saving.refused.append(index)
                saving.num_lent += 1
                continue
            one = saving.order.entries[index]
            place = (lent.page, lent.generation, length, digest)
            entries.append(ReportEntry(one.key, one.version, *place, cost_us=one.cost_us, depth=one.depth))
            indexes.append(index)
        if not entries:
            self._at.emit(Saved(job.number, False, tuple(sorted(saving.refused)), saving.num_lent))
            return
        self._saving[job.number] = saving
        step = self._at.status.max_entries
        for start in range(0, len(entries), step):
            seq = self._client.post(entries[start : start + step])
            saving.left += 1
            self._reports[seq] = (saving, indexes[start : start + step])
            self._at.expect("report", seq, self._kind)

    def reported(self, message: Reported) -> None:
        """The store has answered a report."""
        self._at.settle("report", message.seq, self._kind)
        check_lent(self._at.memory, self._client, [page for page, _ in message.lent])
        found = self._reports.pop(message.seq, None)
        if found is None:
            self._refill_s = REFILL_S if message.lent else min(2 * self._refill_s, LAST_REFILL_S)
            if message.lent:
                self._at.emit(Lent(len(message.lent), self._kind))
            return
        saving, indexes = found
        if len(set(message.refused)) < len(message.refused) or max(message.refused, default=0) >= len(indexes):
            raise ValueError(f"the store refuses entries {reprlib.repr(message.refused)} of {len(indexes)}")
        saving.refused += [indexes[place] for place in message.refused]
        saving.num_lent += len(message.lent) + len(message.refused)
        saving.left -= 1
        if not saving.left:
            number = saving.order.save
            del self._saving[number]
            self._at.emit(Saved(number, True, tuple(sorted(saving.refused)), saving.num_lent))

    # ---- slots that the store could not lend at once

    def refill_at(self) -> float:
        """When `refill` has something to do."""
        short = self._client.num_lent < self._client.identity.credit
        return self._refill_at if short and not self._reports else float("inf")

    def refill(self) -> None:
        """Ask for slots that are missing."""
        if self._at.clock() >= self.refill_at():
            self._refill_at = self._at.clock() + self._refill_s
            seq = self._client.post(())
            self._reports[seq] = None
            self._at.expect("report", seq, self._kind)

    # ---- stashes

    def stash(self, order: Stash, since: float) -> None:
        """Copy a block into a slot and keep it."""
        lent = self._client.take_slot()
        if lent is None:
            self._at.emit(Copied(order.stash, 0, 0.0))
            self._at.emit(Stashed(order.stash, False))
            return
        job = CopyDown(
            order.stash,
            self._at.memory,
            [order.block],
            since,
            self._stash_copied,
            places=[(lent, self._image_bytes)],
        )
        self._begin(job)

    def _stash_copied(self, job: CopyDown) -> None:
        del self._jobs[job.number]
        dropped = job.number in self._dropped
        self._dropped.discard(job.number)
        if self._at.over:
            self._at.emit(Stashed(job.number, False))
            return
        (lent, length), (digest,) = job.places[0], job.checksums
        if digest is None or dropped:
            self._client.put_back(lent)
            self._at.emit(Stashed(job.number, False, 1))
            return
        self._stashes[job.number] = Handle(0, 0, 0, length, lent.page, lent.generation, digest)
        self._at.emit(Stashed(job.number, True))

    def unstash(self, order: Unstash, since: float) -> None:
        """Copy a stash back; its slot is free then."""
        handle = self._stashes.pop(order.stash, None)
        if handle is None:
            self.drop_stash(DropStash(order.stash))
            self._at.emit(Unstashed(order.stash, False))
            return
        job = CopyUp(
            order.stash,
            self._at.memory,
            [order.block],
            since,
            self._unstashed,
            handles=[handle],
            quiet=True,
        )
        self._begin(job)

    def _unstashed(self, job: CopyUp) -> None:
        del self._jobs[job.number]
        num_lent = 0
        if not self._at.over:
            self._client.put_back(_slot_of(job.handles[0]))
            num_lent = 1
        self._at.emit(Unstashed(job.number, job.good == 1, num_lent))

    def drop_stash(self, order: DropStash) -> None:
        """The slot of a stash is free, now or once it is copied."""
        handle = self._stashes.pop(order.stash, None)
        if handle is not None:
            self._client.put_back(_slot_of(handle))
            self._at.emit(Lent(1, self._kind))
        elif order.stash in self._jobs:
            self._dropped.add(order.stash)

    # ---- the end

    def lose(self) -> None:
        """The store is lost: all are answered, those that are being copied with their jobs."""
        self._stashes.clear()
        self._reports.clear()
        for number in self._saving:
            self._at.emit(Saved(number, False, (), 0))
        self._saving.clear()
        for job in list(self._jobs.values()):
            if self._at.stop(job):
                if isinstance(job, CopyDown):
                    self._at.emit(Copied(job.number, 0, self._at.clock() - job.since))
                job.on_end(job)

    def _begin(self, job: CopyDown | CopyUp) -> None:
        self._jobs[job.number] = job
        self._at.begin(job)


def check_lent(memory: HostMemory, client: StoreClient, pages: Iterable[int]) -> None:
    """Slots that a store has just lent are in its pool, and no more than were asked for. Raises ValueError."""
    if client.num_lent > client.identity.credit:
        raise ValueError(f"the store lends {client.num_lent} slots; it was asked for {client.identity.credit}")
    for page in pages:
        memory.slot(page, client.identity.slot_bytes)


def check_all_lent(memory: HostMemory, client: StoreClient) -> None:
    """`check_lent` for all that a client that has just attached was lent."""
    free = list(iter(client.take_slot, None))
    for lent in free:
        client.put_back(lent)
    check_lent(memory, client, [lent.page for lent in free])


def _slot_of(handle: Handle) -> LentSlot:
    return LentSlot(handle.page, handle.generation)
