"""What a node gives of its own store to others: it reads there as any reader, and hands on what it has verified.

Owns its reader clients, a few for each kind of blocks, which leave the store when they were not used for a while.

Invariant: a block is given under the version and checksum that its writer reported, while a read pins it; who gets it
compares the bytes again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from tournant.cluster.block_transport import BATCH_BYTES, Header, Payload, Row, Wanted
from tournant.kvstore.client import Identity, StoreClient, connect
from tournant.kvstore.errors import StoreRefused, StoreUnavailable
from tournant.kvstore.groups import Handle
from tournant.kvstore.read_group import Answer, choose

IDLE_S = 10.0
MAX_READERS = 4  # at once
_T = TypeVar("_T")
_Key = tuple[bytes, str, bytes]


class BlockGiver:
    """See the module. socket: of the store. For any number of threads."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._places = threading.BoundedSemaphore(MAX_READERS)
        self._lock = threading.Lock()
        self._idle: list[tuple[_Key, StoreClient, float]] = []

    def give(self, wanted: Wanted, export: Callable[[list[Payload]], _T]) -> tuple[Header, _T | None]:
        """The first of the wanted blocks that are here and fit into a batch; their bytes as `export` makes them of
        views into the pool, which it must not keep. No blocks, and None, when the store does not serve.
        """
        nothing = Header.of(wanted.part, []), None
        until = time.monotonic() + wanted.timeout_s
        if not self._places.acquire(timeout=max(0.0, wanted.timeout_s)):
            return nothing
        try:
            client = self._reader(wanted, until)
            found = self._read(client, wanted, until, export)
        except (StoreUnavailable, StoreRefused):  # a client that raised is over
            return nothing
        finally:
            self._places.release()
        with self._lock:
            self._idle.append((_key(wanted), client, time.monotonic()))
        return found or nothing

    def end_idle(self, idle_s: float = IDLE_S) -> None:
        """Let clients leave the store that were not used for so long."""
        with self._lock:
            old = [one for one in self._idle if time.monotonic() - one[2] >= idle_s]
            self._idle = [one for one in self._idle if one not in old]
        for _, client, _ in old:
            client.close()

    def _reader(self, wanted: Wanted, until: float) -> StoreClient:
        with self._lock:
            for place, (key, client, _) in enumerate(self._idle):
                if key == _key(wanted):
                    del self._idle[place]
                    return client
        identity = Identity(wanted.weights_id, wanted.kv_form, tenant_check=wanted.tenant_check)
        return connect(self._socket, identity, max(0.001, until - time.monotonic()))

    def _read(
        self, client: StoreClient, wanted: Wanted, until: float, export: Callable[[list[Payload]], _T]
    ) -> tuple[Header, _T] | None:
        try:
            number, answer = client.open(wanted.keys, until - time.monotonic())
            picks = choose([answer], [wanted.part])[: self._that_fit(answer, wanted)]
            found = None
            if picks:
                fetched = client.fetch(number, [pick.version for pick in picks], until - time.monotonic())
                found = self._export(client, wanted, fetched, export)
            client.close_read(number)
            return found
        except BaseException:
            client.close()
            raise

    def _that_fit(self, answer: Answer, wanted: Wanted) -> int:
        """How many leading blocks make a batch."""
        total = count = 0
        for handles in answer.handles():
            total += max((one.length for one in handles if answer.parts[one.part] == wanted.part), default=0)
            if total > BATCH_BYTES and count:
                break
            count += 1
        return count

    def _export(
        self, client: StoreClient, wanted: Wanted, fetched: Answer, export: Callable[[list[Payload]], _T]
    ) -> tuple[Header, _T] | None:
        rows: list[Row] = []
        payloads: list[Payload] = []
        for key, handles in zip(wanted.keys, fetched.handles(), strict=False):
            handle = _of_part(handles, fetched, wanted)
            if handle is None or handle.length > wanted.slot_bytes or not client.intact(key, handle):
                break
            rows.append(Row(key, handle.version, handle.length, handle.checksum))
            payloads.append(np.frombuffer(client.memory.slot(handle.page, handle.length), np.uint8))
        return (Header.of(wanted.part, rows), export(payloads)) if rows else None


def _of_part(handles: list[Handle], fetched: Answer, wanted: Wanted) -> Handle | None:
    return next((one for one in handles if one.generation and fetched.parts[one.part] == wanted.part), None)


def _key(wanted: Wanted) -> _Key:
    return wanted.weights_id, wanted.kv_form, wanted.tenant_check
