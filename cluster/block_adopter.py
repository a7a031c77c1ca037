"""Blocks of other nodes into the store of this node: asked for in batches, verified, copied into lent slots, reported.

Owns the adopting clients of the store, one for each size of an engine's blocks, and the order of batches of one engine
kind. Which node is asked is remote_blocks.py's, who carries the bytes block_transport.py's.

Invariants:
 1. A block is reported only when the bytes in its slot have the checksum that its writer gave, under that version.
 2. At most MAX_BATCHES batches are under way on a node, AHEAD of one adopter, whoever asks for them.
 3. What is here already is not asked for: asking twice brings nothing twice.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tournant.cluster.block_transport import (
    BATCH_BYTES,
    BlockTransport,
    Payload,
    Pending,
    Row,
    TransportFailed,
    Wanted,
)
from tournant.kvstore.admin import Status, StatusQuery
from tournant.kvstore.agent_wire import Bring
from tournant.kvstore.block import Part
from tournant.kvstore.client import Identity, StoreClient, ask, connect
from tournant.kvstore.clients import TOO_MUCH_LENT
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.errors import StoreRefused
from tournant.kvstore.events import ReportEntry
from tournant.kvstore.record import checksum

MAX_BATCHES, AHEAD = 8, 2
CREDIT_BYTES, MAX_CREDIT = 16 << 20, 64  # of slots that the store lends for each size of blocks
CREDIT_SHARE = 64  # and no more than one of so many in the pool
Key = tuple[Part, bytes, str, bytes, tuple[int, ...]]


def key_of(question: Bring) -> Key:
    """Questions with the same one have one adopter."""
    return question.part, question.weights_id, question.kv_form, question.tenant_check, question.slot_bytes


@dataclass(slots=True)
class Outcome:
    """Leading blocks that were copied or are here, bytes that came, why no more came from the other node, and whether
    that is because it is gone; has_none: it said that it has nothing of what is not here, in this part.
    """

    count: int = 0
    num_bytes: int = 0
    problem: str = ""
    is_gone: bool = False
    has_none: bool = False


@dataclass(frozen=True, slots=True)
class _Asked:
    wanted: Wanted
    pending: Pending


class BlockAdopter:
    """See the module. socket: of the store; permits: of batches, shared by all adopters. Of one thread at a time, which
    holds `lock`. Methods raise StoreUnavailable, StoreRefused: the adopter is closed then, and may be used again.
    """

    def __init__(self, socket: Path, transport: BlockTransport, permits: threading.BoundedSemaphore) -> None:
        self.lock = threading.Lock()
        self.used_at = time.monotonic()
        self._socket = socket
        self._transport = transport
        self._permits = permits
        self._clients: dict[int, StoreClient] = {}  # size of a block -> client with slots for it
        self._asked: deque[_Asked] = deque()

    def bring(self, question: Bring, until: float) -> Outcome:
        """Bring what is not here, up to the first block that does not come by `until`."""
        outcome = Outcome()
        try:
            self._attach(question, until)
            outcome.count = self._present(question.keys, question.part)
            self._bring(question, until, outcome)
        except TransportFailed as error:
            outcome.problem, outcome.is_gone = error.message, error.is_gone
        except BaseException:
            self.close()
            raise
        finally:
            self._forget_asked()
            self.used_at = time.monotonic()
        return outcome

    def close(self) -> None:
        """Leave the store. Idempotent."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    # ---- this node's store

    def _attach(self, question: Bring, until: float) -> None:
        for size in question.slot_bytes:
            credit = self._credit(size) if size not in self._clients else 0
            while size not in self._clients:
                identity = Identity(
                    question.weights_id, question.kv_form, 0, question.part, (question.part,), size, credit,
                    question.tenant_check, adopts=True,
                )  # fmt: skip
                try:
                    self._clients[size] = connect(self._socket, identity, max(0.001, until - time.monotonic()))
                except StoreRefused as error:
                    if credit == 1 or TOO_MUCH_LENT not in str(error):
                        raise
                    credit //= 2

    def _credit(self, size: int) -> int:
        """Slots to ask for: engines need most of what a store lends."""
        status = ask(self._socket, StatusQuery())
        pages = status.host_pages if isinstance(status, Status) else 0
        return max(1, min(MAX_CREDIT, CREDIT_BYTES // size, pages * PAGE_BYTES // size // CREDIT_SHARE))

    def _present(self, keys: Sequence[bytes], part: Part) -> int:
        """How many leading blocks are here."""
        client = next(iter(self._clients.values()))
        number, answer = client.open(keys)
        client.close_read(number)
        count = 0
        for handles in answer.handles():
            if not any(answer.parts[handle.part] == part for handle in handles):
                break
            count += 1
        return count

    # ---- from the other node

    def _bring(self, question: Bring, until: float, outcome: Outcome) -> None:
        batch = max(1, BATCH_BYTES // max(question.slot_bytes))
        asked = outcome.count  # keys before this one are here or were asked for
        while outcome.count < len(question.keys):
            while asked < len(question.keys) and self._ask(question, asked, batch, until):
                asked += batch
            if not self._asked:
                return  # all batches of this node are under way for others, until the deadline
            one = self._asked.popleft()
            try:
                given = one.pending.result(until - time.monotonic())
                blocks = given.checked(one.wanted)
                outcome.has_none = not blocks and not outcome.num_bytes
                taken = self._adopt(blocks, question.depth + outcome.count, outcome)
                del given, blocks
            finally:
                self._permits.release()
            if not taken:
                return
            if taken < len(one.wanted.keys):  # what a small pool pins at once, or all there is
                self._forget_asked()
                asked = outcome.count

    def _ask(self, question: Bring, start: int, batch: int, until: float) -> bool:
        """Ask for one more batch if there is room: the first waits for that, the second does not."""
        left = until - time.monotonic()
        first = not self._asked
        if len(self._asked) >= AHEAD or left <= 0:
            return False
        if not (self._permits.acquire(timeout=left) if first else self._permits.acquire(blocking=False)):
            return False
        wanted = Wanted(
            question.keys[start : start + batch],
            question.part,
            question.weights_id,
            question.kv_form,
            question.tenant_check,
            max(question.slot_bytes),
            max(0.0, until - time.monotonic()),
        )
        try:
            self._asked.append(_Asked(wanted, self._transport.ask(question.node, wanted)))
        except BaseException:
            self._permits.release()
            raise
        return True

    def _forget_asked(self) -> None:
        while self._asked:
            self._asked.popleft()
            self._permits.release()

    def _adopt(self, blocks: Sequence[tuple[Row, Payload]], depth: int, outcome: Outcome) -> int:
        """Copy, verify and report blocks in order; how many the store has now. Raises TransportFailed for wrong bytes,
        once those before them are reported.
        """
        done = 0
        problem = ""
        entries: dict[int, list[ReportEntry]] = {size: [] for size in self._clients}
        for place, (row, payload) in enumerate(blocks):
            size = next((one for one in self._clients if row.length <= one and _fills(row, one)), 0)
            if not size:
                problem = f"a block of {row.length} bytes was given; this engine's have {sorted(self._clients)}"
                break
            client = self._clients[size]
            lent = client.take_slot()
            if lent is None:
                done += self._report(entries)
                if not client.credit:
                    client.publish([])  # the store lends what it lacked before
                lent = client.take_slot()
            if lent is None:
                break
            slot = client.slot_view(lent.page, row.length)
            slot[:] = payload.data
            outcome.num_bytes += row.length
            if checksum(slot) != row.checksum:
                client.put_back(lent)
                problem = "the bytes of a block are not those that its writer reported"
                break
            entries[size].append(
                ReportEntry(
                    row.key, row.version, lent.page, lent.generation, row.length, row.checksum, depth=depth + place
                )
            )
        done += self._report(entries)
        outcome.count += done
        if problem:
            raise TransportFailed(problem)
        return done

    def _report(self, entries: dict[int, list[ReportEntry]]) -> int:
        """Report what was copied; how many blocks. What the store refuses is here already, in most cases."""
        count = 0
        for size, listed in entries.items():
            if listed:
                self._clients[size].publish(listed)
                count += len(listed)
                listed.clear()
        return count


def _fills(row: Row, size: int) -> bool:
    """Whether a block takes all pages of a slot for blocks of a size."""
    return -(-row.length // PAGE_BYTES) == -(-size // PAGE_BYTES)
