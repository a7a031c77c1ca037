"""A node store inside the process of one embedded engine: the same core, pool, tiers and client, without a socket.

Owns the shell and which replies are for which client. It has no thread of its own: every call of a client also takes in
what the disk has done and lets time pass, so nothing can wait for a lock; an owner without work to do calls `pump`.

Rules: one thread owns the store and all its clients. A closed client counts as an exited process: nothing may still
read or write its slots then.
"""

from __future__ import annotations

import itertools
import select
import time
from collections import deque
from dataclasses import replace
from typing import cast

from tournant.kvstore.admin_desk import AdminDesk
from tournant.kvstore.client import TIMEOUT_S, Identity, StoreClient
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.errors import StoreUnavailable
from tournant.kvstore.events import ClientExited, ClientMessage, Disconnect, Drain, Drained, Refused, Reply, Send
from tournant.kvstore.host_tier import HostMemory, PageLock
from tournant.kvstore.shell import ForClients, NvmePlace, StoreShell
from tournant.kvstore.wire import Answer, Query, Request

DRAIN_S = 10.0


class LocalStore:
    """See the module. Raises StoreConfigError when memory or folder cannot be had, FolderRefused, OSError.

    page_lock: see `HostMemory`.
    """

    def __init__(
        self,
        config: StoreConfig,
        nvme: NvmePlace | None = None,
        tenant_check: bytes = b"",
        page_lock: PageLock | None = None,
    ) -> None:
        self.memory = HostMemory.create(config.host_bytes, page_lock)
        try:
            self.shell = StoreShell(config, self.memory, nvme, tenant_check)
        except BaseException:
            self.memory.close()
            raise
        self._desk = AdminDesk(self.shell)
        self._inboxes: dict[int, deque[Reply]] = {}
        self._numbers = itertools.count(1)
        self._drained = self.closed = False
        self._woken = select.poll()
        self._woken.register(self.shell.wake_fd, select.POLLIN)

    def attach(self, identity: Identity, timeout_s: float = TIMEOUT_S) -> StoreClient:
        """A client of this store. Raises StoreRefused; nothing was changed then."""
        return StoreClient(_LocalTransport(self, next(self._numbers)), identity, timeout_s)

    def pump(self) -> None:
        """Take in what the disk has done and let time pass. Never waits."""
        self._deliver(self.shell.pump())

    def handle(self, message: ClientMessage | ClientExited, inbox: deque[Reply]) -> None:
        """A message of a client, whose replies go to `inbox` from now on."""
        if self.closed:
            raise StoreUnavailable("the store was closed")
        self._inboxes.setdefault(message.client, inbox)
        self._deliver(self.shell.handle(message))
        self.pump()
        if isinstance(message, ClientExited):
            del self._inboxes[message.client]

    def wait(self, inbox: deque[Reply], deadline: float) -> None:
        """Let the disk work until there is a reply or the deadline has passed."""
        while not inbox and not self.closed:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._woken.poll(min(left, self.shell.until_tick_s()) * 1000)
            self.pump()

    def _deliver(self, instructions: list[ForClients]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(client, reply) if client in self._inboxes:
                    self._inboxes[client].append(reply)
                case Disconnect(client, reason) if client in self._inboxes:
                    self._inboxes[client].append(Refused(reason))
                case Drained():
                    self._drained = True

    def ask(self, query: Query) -> Answer:
        """Answer an operator's query (admin.py)."""
        self.pump()
        answers: list[Answer] = []
        self._desk.answer(query, answers.append, self._deliver)
        while not answers:
            self._woken.poll(self.shell.until_tick_s() * 1000)
            self.pump()
        return answers[0]

    def close(self, drain_s: float = DRAIN_S) -> bool:
        """Copy down what is dirty, for up to `drain_s` seconds, then end. Idempotent.

        False when a call to the disk still hangs: its folder and the pool are held until this process ends.
        """
        if self.closed:
            return True
        if drain_s > 0:
            self._deliver(self.shell.handle(Drain()))
            deadline = time.monotonic() + drain_s
            while not self._drained and time.monotonic() < deadline:
                self._woken.poll(self.shell.until_tick_s() * 1000)
                self.pump()
        self.closed = True
        ended = self.shell.close()
        if ended:
            self.memory.close()
        return ended

    def __enter__(self) -> LocalStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LocalTransport:
    """`client.Transport` by function calls."""

    def __init__(self, store: LocalStore, number: int) -> None:
        self._store = store
        self._number = number
        self._inbox: deque[Reply] = deque()
        self._closed = False

    def send(self, message: Request, deadline: float) -> None:
        """See `client.Transport`."""
        self._store.handle(replace(cast(ClientMessage, message), client=self._number), self._inbox)

    def receive(self, deadline: float) -> Answer | None:
        """See `client.Transport`."""
        if not self._inbox and not self._store.closed:
            self._store.pump()
            self._store.wait(self._inbox, deadline)
        return self._inbox.popleft() if self._inbox else None

    def flush(self) -> None:
        """See `client.Transport`: a function call has room for everything."""

    @property
    def has_unsent(self) -> bool:
        """See `client.Transport`."""
        return False

    def fileno(self) -> int:
        """See `client.Transport`: what the disk has done. Other replies are there when a call returns."""
        return self._store.shell.wake_fd

    def memory(self) -> HostMemory:
        """See `client.Transport`."""
        return self._store.memory

    def close(self) -> None:
        """See `client.Transport`."""
        if not self._closed:
            self._closed = True
            if not self._store.closed:
                self._store.handle(ClientExited(self._number), self._inbox)
