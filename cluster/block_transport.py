"""How the blocks of one node's store get to another node: what is asked, what is given, and who carries it.

Owns the form of both and the checks that need no bytes; a transport moves them. Ray's objects are the one there is: the
payloads lie in the giver's pool, are written into Ray's shared memory once, and are read there on the other node.

Invariants:
 1. A header that was changed on its way is none: it carries a digest of itself.
 2. Nobody waits for a node without a deadline. Whatever goes wrong on the way is a TransportFailed.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import RayActorError, RayError

from tournant.kvstore.block import Part, Version
from tournant.kvstore.record import checksum

BATCH_BYTES = 16 << 20  # of one object: some are under way at once
NUM_THREADS = 16  # that wait for objects; they outlive whoever has given up
_ROW = struct.Struct("<32sQQIQ")  # key, version, length, checksum
Payload = npt.NDArray[np.uint8]


class TransportFailed(Exception):  # noqa: N818 - a state of the world
    """A node did not give what it was asked for: it is gone (`is_gone`), late, or gives what makes no sense."""

    def __init__(self, message: str, is_gone: bool = False) -> None:
        super().__init__(message, is_gone)
        self.message = message
        self.is_gone = is_gone


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks of a chain, as many as a batch holds. part, weights_id, kv_form, tenant_check: of who will read them;
    slot_bytes: its largest block; timeout_s: for the giver.
    """

    keys: tuple[bytes, ...]
    part: Part
    weights_id: bytes
    kv_form: str
    tenant_check: bytes
    slot_bytes: int
    timeout_s: float


class Row(NamedTuple):
    """A block as its writer reported it. length: bytes; checksum: XXH3-64 of them."""

    key: bytes
    version: Version
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Header:
    """What is given, in order. digest: of rows and part."""

    part: Part
    rows: bytes
    digest: int

    @classmethod
    def of(cls, part: Part, rows: Sequence[Row]) -> Header:
        """The header of these blocks."""
        packed = b"".join(
            _ROW.pack(row.key, row.version.writer_id, row.version.counter, row.length, row.checksum) for row in rows
        )
        return cls(part, packed, _digest(part, packed))

    def checked(self, wanted: Wanted) -> list[Row]:
        """Its rows. Raises TransportFailed when they are not an answer to what was wanted."""
        if self.part != wanted.part or self.digest != _digest(self.part, self.rows) or len(self.rows) % _ROW.size:
            raise TransportFailed("a header is damaged, or of another part")
        found = [
            Row(key, Version(writer, counter), length, digest)
            for key, writer, counter, length, digest in _ROW.iter_unpack(self.rows)
        ]
        if tuple(row.key for row in found) != wanted.keys[: len(found)]:
            raise TransportFailed(f"{len(found)} blocks were given that are not the first of {len(wanted.keys)} wanted")
        if any(not 0 < row.length <= wanted.slot_bytes for row in found):
            raise TransportFailed(f"a block was given that is longer than {wanted.slot_bytes} bytes, or empty")
        return found


@dataclass(frozen=True, slots=True)
class Given:
    """The first of the wanted blocks: as many payloads as rows, of their lengths, once `checked`."""

    header: Header
    payloads: Sequence[Payload]

    def checked(self, wanted: Wanted) -> list[tuple[Row, Payload]]:
        """Each block with its bytes, which are not compared with their checksums yet. Raises TransportFailed."""
        rows = self.header.checked(wanted)
        if len(self.payloads) != len(rows):
            raise TransportFailed(f"{len(self.payloads)} payloads were given for {len(rows)} blocks")
        pairs = list(zip(rows, self.payloads, strict=True))
        for row, payload in pairs:
            if not isinstance(payload, np.ndarray) or payload.dtype != np.uint8 or payload.shape != (row.length,):
                raise TransportFailed("a payload is not the bytes that its row tells of")
        return pairs


class Pending(Protocol):
    """Blocks that were asked for."""

    def result(self, timeout_s: float) -> Given:
        """What has come. Raises TransportFailed."""
        ...


class BlockTransport(Protocol):
    """Reaches the stores of other nodes. For any number of threads."""

    def ask(self, node: str, wanted: Wanted) -> Pending:
        """Ask a node (Ray id) for blocks. Does not wait. Raises TransportFailed."""
        ...


class RayTransport:
    """Asks the actors beside the stores. actor_of: the actor of a Ray node, ValueError when there is none.

    An object is pulled over only when somebody waits for it, and its way takes some ms whatever its size: threads wait
    for what was asked for, so that several are on their way at once.
    """

    def __init__(self, actor_of: Any) -> None:
        self._actor_of = actor_of
        self._actors: dict[str, Any] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, "pulling")

    def ask(self, node: str, wanted: Wanted) -> Pending:
        """See `BlockTransport`."""
        try:
            actor = self._actors.get(node)
            if actor is None:
                actor = self._actors[node] = self._actor_of(node)
            call = actor.give.remote(wanted)
        except (ValueError, RayError) as error:
            raise self._failed(node, error) from None
        return _RayPending(self._threads.submit(self._pull, node, call, wanted.timeout_s))

    def _pull(self, node: str, call: Any, timeout_s: float) -> Given:
        """A call returns a header and the reference of the payloads, if there are any."""
        until = time.monotonic() + timeout_s
        try:
            header, payloads = ray.get(call, timeout=timeout_s)
            left = max(0.0, until - time.monotonic())
            return Given(header, ray.get(payloads[0], timeout=left) if payloads else [])
        except (RayError, TypeError, ValueError) as error:
            raise self._failed(node, error) from None

    def _failed(self, node: str, error: Exception) -> TransportFailed:
        """The next call looks the actor up again."""
        self._actors.pop(node, None)
        words = " ".join(str(error).strip().splitlines()[-1:])
        return TransportFailed(f"{type(error).__name__}: {words}", isinstance(error, RayActorError))


class _RayPending:
    def __init__(self, pulled: Future[Given]) -> None:
        self._pulled = pulled

    def result(self, timeout_s: float) -> Given:
        """See `Pending`."""
        try:
            return self._pulled.result(max(0.0, timeout_s))
        except TimeoutError:
            raise TransportFailed("nothing came in time") from None


def _digest(part: Part, rows: bytes) -> int:
    return checksum(repr(part).encode() + rows)
