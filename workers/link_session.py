"""One attached store, from `Attached` to the unmapping of its pool: which order and which reply goes where.

Runs on the link's thread and never waits. Reads are link_reads.py's, saves and stashes link_saves.py's, once per kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from tournant.kvstore.errors import StoreUnavailable
from tournant.kvstore.events import Fetched, Opened
from tournant.kvstore.socket_transport import SENDS_RUBBISH
from tournant.workers.attachment import Attachment
from tournant.workers.copy_lanes import Job, one_line
from tournant.workers.link_reads import LinkReads
from tournant.workers.link_saves import LinkSaves
from tournant.workers.remote_reads import RemoteReads
from tournant.workers.transfer_messages import (
    Bring,
    Copied,
    DropStash,
    EndRead,
    Event,
    Fetch,
    Found,
    Leave,
    Load,
    Lookup,
    Order,
    ReadEnded,
    Save,
    Saved,
    Stash,
    Stashed,
    Unstash,
    Unstashed,
    Used,
)


def refuse(order: Order, emit: Callable[[Event], None]) -> None:
    """The answer to an order while there is no store."""
    match order:
        case Lookup():
            emit(Found(order.read, b"", 0.0))
            emit(ReadEnded(order.read, 0))
        case Save():
            emit(Copied(order.save, 0, 0.0))
            emit(Saved(order.save, False, (), 0))
        case Stash():
            emit(Copied(order.stash, 0, 0.0))
            emit(Stashed(order.stash, False))
        case Unstash():
            emit(Unstashed(order.stash, False))
        case Bring() | Fetch() | Load() | EndRead() | Used() | DropStash() | Leave():
            return
        case _:
            assert_never(order)


class LinkSession:
    """See the module. broken: the store is lost because it said what makes no sense; remote: asks for blocks of other
    nodes, None where that is not done.
    """

    def __init__(self, attachment: Attachment, remote: RemoteReads | None = None) -> None:
        self.attachment = attachment
        self.broken = False
        self.remote = remote
        self._reads = LinkReads(attachment, remote)
        self._saves = [LinkSaves(attachment, kind) for kind in range(len(attachment.clients))]

    @property
    def busy(self) -> bool:
        """Whether a copy, a report or a message is under way."""
        at = self.attachment
        return bool(at.num_copying or at.has_unsent or any(saves.num_reports for saves in self._saves))

    @property
    def ended(self) -> bool:
        """Whether the store is lost and no copy uses its memory any more."""
        return bool(self.attachment.over) and not self.attachment.num_copying

    def next_time(self) -> float:
        """When `advance` must be called even if nothing arrives."""
        times = [self.attachment.next_deadline(), *(saves.refill_at() for saves in self._saves)]
        return min(times if self.remote is None else [*times, self.remote.next_time()])

    def advance(self) -> None:
        """Take in what the store has sent; give it up when it is late."""
        if not self.attachment.over:
            self._guarded(self._advance)

    def order(self, order: Order, since: float) -> None:
        """Carry an order out, or begin to. since: when it was given."""
        if self.attachment.over:
            refuse(order, self.attachment.emit)
        else:
            self._guarded(lambda: self._order(order, since))

    def job_ended(self, job: Job) -> None:
        """A lane has told a job back."""
        self._guarded(lambda: self.attachment.ended(job))

    def lose(self, why: str) -> None:
        """Nothing more is asked of the store: end what is open; what is being copied ends with its job."""
        if not self.attachment.over:
            self.attachment.over = why
            self._reads.lose()
            if self.remote is not None:
                self.remote.close()
            for saves in self._saves:
                saves.lose()

    def _guarded(self, step: Callable[[], None]) -> None:
        """Whatever goes wrong, the store counts as lost and everything open ends."""
        try:
            step()
        except StoreUnavailable as error:
            self.broken = SENDS_RUBBISH in str(error)
            self.lose(str(error))
        except Exception as error:  # a reply that makes no sense
            self.broken = True
            self.lose(one_line(error))

    def _advance(self) -> None:
        for client, saves in zip(self.attachment.clients, self._saves, strict=True):
            for message in client.take():
                if isinstance(message, Opened):
                    self._reads.opened(message)
                elif isinstance(message, Fetched):
                    self._reads.fetched(message)
                else:
                    saves.reported(message)
        if self.remote is not None:
            self.remote.advance()
        if problem := self.attachment.problem():
            self.lose(problem)
            return
        for saves in self._saves:
            saves.refill()

    def _order(self, order: Order, since: float) -> None:
        match order:
            case Lookup():
                self._reads.lookup(order, since)
            case Bring():
                self._reads.bring(order, since)
            case Fetch():
                self._reads.fetch(order, since)
            case Load():
                self._reads.load(order, since)
            case EndRead():
                self._reads.end(order)
            case Save():
                self._saves[order.kind].save(order, since)
            case Used():
                self.attachment.client.used(order.keys[: self.attachment.status.max_keys])
            case Stash():
                self._saves[0].stash(order, since)
            case Unstash():
                self._saves[0].unstash(order, since)
            case DropStash():
                self._saves[0].drop_stash(order)
            case Leave():
                self.lose("a rank of the group has lost its store")
            case _:
                assert_never(order)
