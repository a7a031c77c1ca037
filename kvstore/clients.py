"""Who is attached to a store, with which credit, and who may be.

Owns the lists of clients and of groups of ranks (writers). node_store.py lends, takes reports and reacts to exits.

Invariants:
 1. One open client stores a part of a writer's blocks; all clients of a writer name the same local parts.
 2. Credits of all clients and hard pins together stay within `max_lent_share` of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tournant.kvstore.block import KEY_BYTES
from tournant.kvstore.config import PAGE_BYTES, StoreConfig
from tournant.kvstore.events import Attach, Reported
from tournant.kvstore.groups import MAX_COPIES, Group
from tournant.kvstore.record import MAX_KV_FORM_BYTES, MAX_PAYLOAD_BYTES
from tournant.kvstore.residency import Residency
from tournant.kvstore.slots import Slot

MAX_PARTS = 4096
TOO_MUCH_LENT = "pages would be lent or pinned"  # in a refusal that asking for less credit may help against


@dataclass(slots=True)
class Client:
    """weights, part: numbers, part -1 for a reader; pages: of its slots; lent: page -> slot; seq, reply: its last
    report and the answer to it; hard: request number -> groups pinned for reading in place; open: it is served.
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


@dataclass(slots=True)
class Writer:
    """A group of ranks. incomplete: gid -> group that lacks parts, oldest first; reports: highest of its ranks."""

    local_parts: tuple[int, ...]
    clients: int = 0
    reports: int = 0
    incomplete: dict[int, Group] = field(default_factory=dict)


class ClientTable:
    """All clients by their numbers and all writers by their ids."""

    def __init__(self, config: StoreConfig, residency: Residency, tenant_check: bytes) -> None:
        self._config = config
        self._residency = residency
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
            return f"{len(self.by_number)} clients are attached; at most {config.max_clients} may be"
        if event.tenant_check != self._tenant_check:
            return "the tenant secret is another one than this store's; configure the same secret for all replicas"
        form = event.kv_form.encode()
        if len(event.weights_id) != KEY_BYTES or not 0 < len(form) <= MAX_KV_FORM_BYTES or b"\0" in form:
            return (
                f"weights_id must have {KEY_BYTES} bytes and kv_form a name of up to {MAX_KV_FORM_BYTES} bytes, "
                "none of them zero"
            )
        if event.part is None:
            return None if not event.credit else "a reader without a part asks for credit; it must be 0"
        pages = -(-event.slot_bytes // PAGE_BYTES)
        if not 1 <= event.slot_bytes <= MAX_PAYLOAD_BYTES or not pool.slots_for(pages):
            return (
                f"slot_bytes is {event.slot_bytes}; a slot must fit into one chunk of the pool and one record, which "
                f"have {min(config.chunk_bytes, config.host_bytes)} and {MAX_PAYLOAD_BYTES} bytes"
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
        limit = int(pool.num_pages * config.max_lent_share)
        asked = self.credit_pages() + hard_pages + event.credit * pages
        if event.credit < 0 or asked > limit:
            return (
                f"credit of {event.credit} slots of {pages} pages: {asked} {TOO_MUCH_LENT}, "
                f"at most {limit} may be; ask for less or give the store more host_bytes"
            )
        return self._writer_problem(event)

    def _writer_problem(self, event: Attach) -> str | None:
        writer = self.writers.get(event.writer_id)
        if writer is None:
            return None
        parts = self._residency.index.parts
        if event.local_parts != tuple(parts[number] for number in writer.local_parts):
            return f"writer {event.writer_id} has attached with other local_parts; a new group needs a new writer id"
        for other in self.by_number.values():
            attach = other.attach
            if attach.part is None or attach.writer_id != event.writer_id:
                continue
            if attach.weights_id != event.weights_id:
                return f"writer {event.writer_id} has attached with other weights; a new group needs a new writer id"
            if other.open and attach.part == event.part:
                return f"another client of writer {event.writer_id} stores this part"
        return None
