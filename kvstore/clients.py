"""Who is attached to a store, with which credit, and who may be.

Owns the lists of clients and of groups of ranks (writers). node_store.py lends, takes reports and reacts to exits.

Invariants:
 1. One open client stores a part of a writer's blocks; all clients of a writer name the same local parts.
 2. Credits of all clients and hard pins together stay within `max_lent_share` of the pool.
 3. All clients of the same weights keep KV in the same numeric form.
 4. A client that adopts is no writer and no user of its weights: it is admitted while another client uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tournant.kvstore.block import KEY_BYTES
from tournant.kvstore.config import PAGE_BYTES, StoreConfig
from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.events import Attach, Reported, ReportEntry
from tournant.kvstore.groups import MAX_COPIES, Group
from tournant.kvstore.record import MAX_KV_FORM_BYTES, MAX_PAYLOAD_BYTES
from tournant.kvstore.residency import Residency
from tournant.kvstore.slots import Slot
from tournant.kvstore.weights import WeightsTable

MAX_PARTS = 4096
MAX_CREDIT = 1 << 16  # slots of one client: the list of them must fit into a reply
_MAX_U64 = (1 << 64) - 1
TOO_MUCH_LENT = "pages would be lent or pinned"  # in a refusal that asking for less credit may help against


@dataclass(slots=True)
class Client:
    """attach: with the credit it was given; weights, part: numbers, part -1 for a reader; pages: of its slots; lent:
    page -> slot; seq, reply: its last report and the answer to it; hard: request number -> groups pinned for reading in
    place; open: it is served.
    """

    attach: Attach
    weights: int
    part: int
    pages: int
    lent: dict[int, Slot] = field(default_factory=dict)
    seq: int = 0
    reply: Reported | None = None
    hard: dict[int, list[Group]] = field(default_factory=dict)
    newest_hard: int = 0
    open: bool = True

    def slot_of(self, entry: ReportEntry) -> Slot | None:
        """The lent slot that an entry names, None when it is not lent to this client or the entry has no right form."""
        slot = self.lent.get(entry.page)
        if slot is None or slot.generation != entry.generation:
            return None
        good = (
            0 <= entry.version.writer_id <= _MAX_U64
            and 0 <= entry.version.counter <= _MAX_U64
            and len(entry.key) == KEY_BYTES
            and 0 <= slot.pages * PAGE_BYTES - entry.length < PAGE_BYTES
            and 0 <= entry.checksum <= _MAX_U64
        )
        return slot if good else None


@dataclass(slots=True)
class Writer:
    """A group of ranks. incomplete: gid -> group that lacks parts, oldest first; reports: highest of its ranks."""

    local_parts: tuple[int, ...]
    clients: int = 0
    reports: int = 0
    incomplete: dict[int, Group] = field(default_factory=dict)


class ClientTable:
    """All clients by their numbers and all writers by their ids."""

    def __init__(self, config: StoreConfig, residency: Residency, weights: WeightsTable, tenant_check: bytes) -> None:
        self._config = config
        self._residency = residency
        self._weights = weights
        self._tenant_check = tenant_check
        self.by_number: dict[int, Client] = {}
        self.writers: dict[int, Writer] = {}

    def serving(self, number: int) -> Client | None:
        """The client, or None when it is not attached or its service has ended."""
        client = self.by_number.get(number)
        return client if client is not None and client.open else None

    def credit_pages(self) -> int:
        """Pages that are or may be lent: a client that is served no more gets no new ones."""
        return sum(
            (client.attach.credit if client.open else len(client.lent)) * client.pages
            for client in self.by_number.values()
        )

    def problem(self, event: Attach, hard_pages: int) -> str | None:
        """Why this client cannot be served, or None."""
        config, pool = self._config, self._residency.pool
        if event.client in self.by_number:
            return "this connection has attached already"
        if len(self.by_number) >= config.max_clients:
            return (
                f"{len(self.by_number)} clients are attached and max_clients is {config.max_clients}; an engine takes "
                "one client for each size of its blocks: raise max_clients, or end another engine"
            )
        if event.tenant_check != self._tenant_check:
            return "the tenant secret is another one than this store's; configure the same secret for all replicas"
        form = event.kv_form.encode()
        if len(event.weights_id) != KEY_BYTES or not 0 < len(form) <= MAX_KV_FORM_BYTES or b"\0" in form:
            return (
                f"weights_id must have {KEY_BYTES} bytes and kv_form a name of up to {MAX_KV_FORM_BYTES} bytes, "
                "none of them zero"
            )
        if not self._weights.has_room_for(event.weights_id, event.kv_form):
            return "this store knows blocks of too many weights; start it again, or another one"
        if (problem := self._form_problem(event)) is not None:
            return problem
        if event.adopts and (event.part is None or not self.in_use(event.weights_id, event.kv_form)):
            return "a client that adopts needs a part, and an engine of its weights and kv_form that is attached here"
        if event.part is None:
            return None if not event.credit else "a reader without a part asks for credit; it must be 0"
        pages = -(-event.slot_bytes // PAGE_BYTES)
        if not 1 <= event.slot_bytes <= MAX_PAYLOAD_BYTES or not pool.slots_for(pages):
            return (
                f"slot_bytes is {event.slot_bytes}; a slot must fit into one chunk of the pool and one record, which "
                f"have {pool.chunk_pages * PAGE_BYTES} and {MAX_PAYLOAD_BYTES} bytes: give the store more host_bytes "
                "(and chunk_bytes, if that is set), or make blocks smaller"
            )
        if len(event.local_parts) > MAX_COPIES:
            return f"local_parts lists {len(event.local_parts)} parts; a block may have {MAX_COPIES} on one node"
        if len(self._residency.index.parts) + len(event.local_parts) > MAX_PARTS:
            return f"this store knows {len(self._residency.index.parts)} parts; at most {MAX_PARTS} may be"
        if event.part not in event.local_parts or len(set(event.local_parts)) != len(event.local_parts):
            return "local_parts must list this client's part and every other one once"
        sizes = {client.pages for client in self.by_number.values() if client.attach.credit} - {pages}
        if event.credit and len(sizes) >= pool.chunks_for(pages) and not pool.has_way_to(pages):
            return (
                f"slots of {pages} pages need a chunk of the pool for themselves; {pool.chunks_for(pages)} chunks are "
                f"large enough and the slots of {len(sizes)} other sizes in use have them: "
                "give the store more host_bytes, or smaller chunk_bytes"
            )
        if event.credit < 0:
            return f"credit is {event.credit}; it must be 0 or more"
        credit, limit = self._credit_for(event), self._lent_limit
        asked = self.credit_pages() + hard_pages + credit * pages
        if credit and asked > limit:
            return (
                f"credit of {credit} slots of {pages} pages: {asked} {TOO_MUCH_LENT}, at most {limit} may be, "
                f"max_lent_share {config.max_lent_share:g} of the pool; ask for less, end other engines, or give the "
                "store more host_bytes"
            )
        return self._writer_problem(event)

    def in_use(self, weights_id: bytes, kv_form: str) -> bool:
        """Whether an engine or a reader of these weights in this form is attached."""
        entries, counts = self._weights.entries, self._residency.use_count
        return any(
            count and (entries[number].weights_id, entries[number].kv_form) == (weights_id, kv_form)
            for number, count in counts.items()
        )

    @property
    def _lent_limit(self) -> int:
        return int(self._residency.pool.num_pages * self._config.max_lent_share)

    def _credit_for(self, event: Attach) -> int:
        """What it gets of the credit it asks for: if that is more than all clients together may have, half of it, so
        that there is room for another client.
        """
        most = self._lent_limit // max(1, -(-event.slot_bytes // PAGE_BYTES))
        credit = event.credit if event.credit <= most else max(1, most // 2)
        return min(credit, MAX_CREDIT)

    def admit(self, event: Attach) -> Client:
        """List a client that `problem` has nothing against."""
        index, use_count = self._residency.index, self._residency.use_count
        number = self._weights.number(event.weights_id, event.kv_form)
        if number is None:
            raise InvariantViolation("a client is admitted for whose weights there is no room")
        part = -1
        if event.part is not None:
            part = index.part_number(event.part)
            parts = tuple(index.part_number(p) for p in event.local_parts)
            if not event.adopts:
                self.writers.setdefault(event.writer_id, Writer(parts)).clients += 1
            event = replace(event, credit=self._credit_for(event))
        client = Client(event, number, part, -(-event.slot_bytes // PAGE_BYTES))
        self.by_number[event.client] = client
        use_count[number] = use_count.get(number, 0) + (not event.adopts)
        return client

    def _form_problem(self, event: Attach) -> str | None:
        for number in self._weights.in_other_forms(event.weights_id, event.kv_form):
            if count := self._residency.use_count.get(number):
                return (
                    f"{count} attached clients keep KV of these weights as {self._weights.entries[number].kv_form!r}, "
                    f"this one brings {event.kv_form!r}; give all engines of a node the same kv_cache_dtype and "
                    "lower_kv_dtype (kv_form), or end those that are attached"
                )
        return None

    def _writer_problem(self, event: Attach) -> str | None:
        writer = self.writers.get(event.writer_id)
        if writer is None or event.adopts:
            return None
        parts = self._residency.index.parts
        if event.local_parts != tuple(parts[number] for number in writer.local_parts):
            return f"writer {event.writer_id} has attached with other local_parts; a new group needs a new writer id"
        for other in self.by_number.values():
            attach = other.attach
            if attach.part is None or attach.adopts or attach.writer_id != event.writer_id:
                continue
            if attach.weights_id != event.weights_id:
                return f"writer {event.writer_id} has attached with other weights; a new group needs a new writer id"
            if other.open and attach.part == event.part:
                return f"another client of writer {event.writer_id} stores this part"
        return None
