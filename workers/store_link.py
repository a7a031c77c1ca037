"""An engine's link to the node store: one thread that owns the store's clients, and two lanes that copy.

Owns the thread, its inbox, the way to a store (attach, attach again for ever) and the end. What is open with a store
is link_session.py's, copies are copy_lanes.py's. Guarantees: transfer_messages.py.

Invariants:
 1. The link's thread never waits but in `poll`, and never copies a block; attaching is done beside it.
 2. At most one session is open, with a client for each size of image, as a client has slots of one size. Its pool is
    unmapped, and its `Detached` emitted, when no lane uses it any more.
 3. An order is meant for the attachment of which the engine has heard last, and carried out there or not at all, as one
    after its end is answered as without a store. `Leave` alone is for whatever is attached.
 4. Nothing that a store says or leaves out ends the thread. One that makes no sense is lost, and tried again ever less
    often, as one that refuses is.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tournant.kvstore.admin import Status, StatusQuery
from tournant.kvstore.block import Part
from tournant.kvstore.client import TIMEOUT_S, Identity, StoreClient, ask, connect
from tournant.kvstore.clients import TOO_MUCH_LENT
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.errors import StoreRefused, StoreUnavailable
from tournant.kvstore.host_tier import PageLock
from tournant.kvstore.slots import SlotState
from tournant.workers.attachment import Attachment
from tournant.workers.copy_lanes import CopyLanes, Job, one_line
from tournant.workers.link_saves import check_all_lent
from tournant.workers.link_session import LinkSession, refuse
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.remote_reads import RemoteIdentity, RemoteReads
from tournant.workers.transfer_messages import (
    Attached,
    BlockImages,
    Detached,
    Event,
    Leave,
    Order,
    Refused,
    writer_of,
)

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 2.0
LAST_REFUSAL_S = 120.0  # between attempts at a store that refuses or makes no sense
STEADY_S = 60.0  # a store that made sense for so long is tried again soon
CLOSE_S = 2.0  # most seconds for a copy that is under way when the link is closed
MAX_DEPTH = 1 << 24  # of a block in its chain: the most tokens that lower_kv_dtype_from may name
# of the credit, in slots, where none is configured: one of so many in the pool, but at least and at most so many, and
# never more than half of what is left of the share that a store lends if not told otherwise, as there are other engines
CREDIT_SHARE, LEAST_CREDIT, MAX_CREDIT = 32, 16, 256
LENT_SHARE = 4
MAX_COMPLAINTS = 100  # that are told apart
MAX_REASON = 1000  # characters of a store's own words
SHUTTING_DOWN = "shutting down"  # in a refusal of a store that will be gone soon
_LOG = logging.getLogger("tournant.tiers")


@dataclass(frozen=True, slots=True)
class LinkIdentity:
    """Who the engine is to a store; as in `kvstore.client.Identity`.

    in_group: it is a rank of a group, and reads the versions that its leader picks; local_parts: what the ranks of its
    group that use this store publish there, each part once, its own among them, the same for all of them; empty when it
    is alone there. publishes: False where another rank of the group publishes the same part at this store; this one
    then reads it, and has slots for stashes. num_sharing: ranks of its group that use this store; they attach at once.
    """

    weights_id: bytes
    kv_form: str
    writer_id: int
    part: Part
    tenant_check: bytes = b""
    in_group: bool = False
    publishes: bool = True
    local_parts: tuple[Part, ...] = ()
    num_sharing: int = 1


@dataclass(frozen=True, slots=True)
class _Ordered:
    """attachment: number of the one that it is meant for, 0 = of none."""

    order: Order
    since: float
    attachment: int


@dataclass(frozen=True, slots=True)
class _Found:
    """An attempt to attach has ended. clients: none when it failed for this reason; refused: the store said so; broken:
    what it said makes no sense.
    """

    clients: tuple[StoreClient, ...]
    status: Status | None
    reason: str = ""
    refused: bool = False
    broken: bool = False


@dataclass(frozen=True, slots=True)
class _Close:
    """End, at the latest at this time."""

    until: float


class StoreLink:
    """`Link` to the store at a socket, whether one listens there or not. See the module.

    images: of the engine's blocks; wake: called from any thread when events are there to be taken; timeout_s: of every
    request to the store; page_lock: see `HostMemory`; clock: seconds; agent: socket of the node's agent, which knows of
    other nodes' blocks, whether one listens there or not; None = nobody is asked for them.
    """

    def __init__(
        self,
        socket: Path,
        identity: LinkIdentity,
        images: BlockImages,
        config: OffloadConfig,
        wake: Callable[[], object],
        *,
        timeout_s: float = TIMEOUT_S,
        page_lock: PageLock | None = None,
        clock: Callable[[], float] = time.monotonic,
        agent: Path | None = None,
    ) -> None:
        self._agent = agent
        self._socket, self._identity, self._images, self._config = socket, identity, images, config
        self._own_writer = secrets.randbits(64)  # of what this link alone keeps
        self._sizes = image_sizes(images)
        self._timeout_s, self._page_lock, self._clock = timeout_s, page_lock, clock
        self._wake = wake
        self._events: deque[Event] = deque()
        self._inbox: deque[_Ordered | Job | _Found | _Close] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # guards `_gone` and the bell's end
        self._gone = False
        self._session: LinkSession | None = None
        self._num_attachments = self._num_heard_of = 0  # in all, and of which the engine knows
        self._meant = 0  # attachment that orders are for, as far as the engine knows
        self._attaching = False
        self._attach_at = clock()
        self._retry_s = FIRST_RETRY_S
        self._close_by: float | None = None
        self._attached_at = clock()
        self._refusal = ""  # the last one
        self._complaints: set[str] = set()  # that were logged since a store was attached
        self._lanes = CopyLanes(images, config, self._emit, self._post, clock)
        self._thread = threading.Thread(target=self._run, name="store-link", daemon=True)
        self._thread.start()

    # ---- the engine's side

    def submit(self, orders: Sequence[Order]) -> None:
        """See `Link`. After `close` orders are answered as without a store."""
        now = self._clock()
        with self._lock:
            gone = self._gone
            if not gone:
                self._inbox.extend(_Ordered(order, now, self._meant) for order in orders)
                os.eventfd_write(self._bell, 1)
        if gone:
            for order in orders:
                refuse(order, self._emit)

    def take_events(self) -> list[Event]:
        """See `Link`."""
        found: list[Event] = []
        with suppress(IndexError):
            while True:
                found.append(self._events.popleft())
        for event in found:
            if isinstance(event, Attached):
                self._num_heard_of += 1
                self._meant = self._num_heard_of
            elif isinstance(event, Detached):
                self._meant = 0
        return found

    def close(self, flush_s: float) -> None:
        """See `Link`: saves are answered, or the time is over; all that is open ends. Idempotent.

        A copy that does not end within CLOSE_S after that is given up; it may touch device blocks until this process
        ends.
        """
        self._post(_Close(self._clock() + flush_s))
        self._thread.join(flush_s + CLOSE_S)
        if self._thread.is_alive():
            _LOG.error(
                "the link to the store at %s does not end: a copy hangs; it ends with this process", self._socket
            )

    def _emit(self, event: Event) -> None:
        """From any thread."""
        self._events.append(event)
        self._wake()

    def _post(self, what: Job | _Found | _Close) -> None:
        """Into the inbox, from any thread; what comes after the end is dropped."""
        with self._lock:
            if not self._gone:
                self._inbox.append(what)
                os.eventfd_write(self._bell, 1)
                return
        if isinstance(what, _Found):
            _close(what.clients)

    # ---- the link's thread

    def _run(self) -> None:
        while not self._is_over():
            self._wait()
            while self._inbox:
                self._take(self._inbox.popleft())
            if self._session is not None:
                self._session.advance()
                self._detach_if_lost()
            elif not self._attaching and self._close_by is None and self._clock() >= self._attach_at:
                self._attaching = True
                threading.Thread(target=self._attach, name="store-attach", daemon=True).start()
        self._lanes.close()
        with self._lock:
            self._gone = True
            os.close(self._bell)
        while self._inbox:
            self._take(self._inbox.popleft())

    def _is_over(self) -> bool:
        """Whether to end; once it is time to, what is open ends first."""
        if self._close_by is None:
            return False
        session = self._session
        if session is None:
            return not self._inbox
        if self._clock() >= self._close_by or not (session.busy or self._inbox):
            session.lose("this link is closed")
            self._detach_if_lost()
        return self._session is None and not self._inbox

    def _wait(self) -> None:
        """Until something arrives or it is time for something."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        session, times = self._session, []
        if session is not None and not session.attachment.over:
            for client in session.attachment.clients:
                poll.register(client.fileno(), select.POLLIN | (select.POLLOUT if client.has_unsent else 0))
            if session.remote is not None:
                session.remote.register(poll)
            times.append(session.next_time())
            if self._close_by is not None:
                times.append(self._close_by)
        if session is None and not self._attaching:
            times.append(self._attach_at)
        left = min(times, default=float("inf")) - self._clock()
        poll.poll(None if left == float("inf") else max(0.0, left) * 1000)
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _take(self, what: _Ordered | Job | _Found | _Close) -> None:
        if isinstance(what, _Ordered):
            meant = what.attachment == self._num_attachments or isinstance(what.order, Leave)
            if self._session is not None and meant:
                self._session.order(what.order, what.since)
            else:
                refuse(what.order, self._emit)
        elif isinstance(what, Job):
            if self._session is not None:  # it is there as long as a job is
                self._session.job_ended(what)
        elif isinstance(what, _Found):
            self._attached(what)
        else:
            self._close_by = what.until if self._close_by is None else min(what.until, self._close_by)

    # ---- a store comes and goes

    def _attached(self, found: _Found) -> None:
        self._attaching = False
        clients, status = found.clients, found.status
        if not clients or status is None:
            odd = found.refused or found.broken
            self._retry_s = min(2 * self._retry_s, LAST_REFUSAL_S if odd else LAST_RETRY_S)
            self._attach_at = self._clock() + self._retry_s
            if odd:
                self._complain("refuses this engine" if found.refused else "makes no sense", found.reason)
            if found.refused:
                alone = status is not None and not status.clients
                self._emit(Refused(found.reason, alone and found.reason == self._refusal))
            self._refusal = found.reason if found.refused else ""
            return
        if self._gone or self._close_by is not None:
            _close(clients)
            return
        self._attached_at, self._refusal = self._clock(), ""
        self._complaints.clear()
        who = self._identity
        attachment = Attachment(
            clients,
            status,
            who.part,
            self._lanes,
            self._emit,
            self._clock,
            in_group=who.in_group,
            publishes=who.publishes,
        )
        self._session = LinkSession(attachment, self._remote())
        self._num_attachments += 1
        credit = tuple(client.credit for client in clients)
        _LOG.info("attached to the store at %s with %s slots", self._socket, " and ".join(map(str, credit)))
        host_bytes = attachment.memory.num_pages * PAGE_BYTES
        self._emit(Attached(clients[0].incarnation, credit, self._images.slot_bytes, host_bytes))

    def _remote(self) -> RemoteReads | None:
        """The way to other nodes' blocks."""
        who, config = self._identity, self._config
        if self._agent is None:
            return None
        waits = config.lookup_ms / 2000, config.restore_ms / 2000  # the engine waits so long for both together
        identity = RemoteIdentity(who.weights_id, who.kv_form, who.tenant_check, who.part, self._sizes, *waits)
        return RemoteReads(self._agent, identity, self._clock)

    def _complain(self, what: str, reason: str) -> None:
        """Once for each reason."""
        if reason not in self._complaints and len(self._complaints) < MAX_COMPLAINTS:
            self._complaints.add(reason)
            _LOG.warning("the store at %s %s: %s", self._socket, what, reason)

    def _detach_if_lost(self) -> None:
        session = self._session
        if session is None or not session.ended:
            return
        self._session = None
        odd = session.broken and self._clock() < self._attached_at + STEADY_S
        self._retry_s = min(2 * self._retry_s, LAST_REFUSAL_S) if odd else FIRST_RETRY_S
        self._attach_at = self._clock() + self._retry_s
        reason = session.attachment.over
        _close(session.attachment.clients)
        if self._close_by is None:
            _LOG.warning("the store at %s is lost: %s", self._socket, reason)
        self._emit(Detached(reason))

    def _attach(self) -> None:
        """Thread of one attempt: ends by the deadlines of two requests."""
        status: Status | None = None
        try:
            answer = ask(self._socket, StatusQuery(), self._timeout_s)
            if not isinstance(answer, Status):
                raise ValueError(f"the store answers {type(answer).__name__} when it is asked for its status")
            status = answer
            found = _Found(self._connect(self._credit(status)), status)
        except StoreRefused as error:
            reason = str(error)[:MAX_REASON]
            found = _Found((), status, reason, refused=SHUTTING_DOWN not in reason)
        except StoreUnavailable as error:
            found = _Found((), None, str(error))
        except Exception as error:
            found = _Found((), None, one_line(error)[:MAX_REASON], broken=True)
        self._post(found)

    def _credit(self, status: Status) -> int:
        if self._config.credit_blocks is not None:
            return self._config.credit_blocks
        slot_pages = -(-self._images.slot_bytes // PAGE_BYTES)
        slots, lent = status.host_pages // slot_pages, -(-dict(status.pages).get(SlotState.LENT, 0) // slot_pages)
        left = (slots // LENT_SHARE - lent) // 2 // self._identity.num_sharing
        return max(1, min(max(slots // CREDIT_SHARE, LEAST_CREDIT), MAX_CREDIT, left))

    def _connect(self, credit: int) -> tuple[StoreClient, ...]:
        """A client for each size of image, which share the credit; with half of it as long as the first one leaves too
        little for the other. Raises StoreRefused, StoreUnavailable, ValueError for what is lent: then none is attached.
        """
        while True:
            clients: list[StoreClient] = []
            try:
                for kind, size in enumerate(self._sizes):
                    page_lock = None if clients else self._page_lock
                    identity = self._identity_of(kind, size, max(1, credit // len(self._sizes)))
                    client = connect(self._socket, identity, self._timeout_s, page_lock, waits=False)
                    clients.append(client)
                    check_all_lent(clients[0].memory, client)
                if len({client.incarnation for client in clients}) > 1:
                    raise StoreUnavailable("the store was started anew between two clients")
                return tuple(clients)
            except StoreRefused as error:
                _close(clients)
                if len(self._sizes) == 1 or credit <= len(self._sizes) or TOO_MUCH_LENT not in str(error):
                    raise
            except BaseException:
                _close(clients)
                raise
            credit //= 2

    def _identity_of(self, kind: int, slot_bytes: int, credit: int) -> Identity:
        who = self._identity
        writer_id, parts = who.writer_id, who.local_parts or (who.part,)
        if not who.publishes:  # a store takes a part of one writer from one client
            writer_id, parts = self._own_writer, (who.part,)
        writer_id = writer_of(writer_id, kind)
        return Identity(who.weights_id, who.kv_form, writer_id, who.part, parts, slot_bytes, credit, who.tenant_check)


def _close(clients: Sequence[StoreClient]) -> None:
    """End all of them."""
    for client in clients:
        try:
            client.close()
        except RuntimeError:  # of a device that cannot undo a page lock
            _LOG.exception("the pool of a store cannot be given back")


def image_sizes(images: BlockImages) -> tuple[int, ...]:
    """Bytes of the images of each kind of block: one size, or that of a chain's first blocks and that of later ones."""
    return tuple(dict.fromkeys((images.image_bytes(0), images.image_bytes(MAX_DEPTH))))
