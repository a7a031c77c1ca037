"""A node store process kept running: started, watched, started again when it has died, ended. Without Ray.

Owns the process, one thread that watches it, and its socket, whose path never changes, so that engines attach again.
The store itself is kvstore's; who shares one is node_store_actor.py's business.

Invariants:
 1. At most one process of a keeper runs; after `stop` none does.
 2. A store that died, or has not answered for UNANSWERED questions in a row, is started again, later each time until
    one has lived for a while.
 3. Whatever goes wrong here is logged, and told to who waits for a store; the thread ends by `stop` or idleness alone.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import cast

from tournant.kvstore.admin import Status, StatusQuery
from tournant.kvstore.client import ask
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.directory import MAX_SHARDS
from tournant.kvstore.errors import StoreConfigError, StoreUnavailable
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.store_process import START_S, StoreProcess, start_store

DRAIN_S = 10.0
IDLE_EXIT_S = 300.0
STOP_MARGIN_S = 5.0  # beyond its drain, until it is killed
BACKOFF_S, MAX_BACKOFF_S = 0.25, 30.0
LIVED_S = 60.0  # a store that lived this long is started again at once
ASK_S, UNANSWERED = 10.0, 3
POOL_BYTES_PER_S = 1 << 30  # at which the slowest machine fills a pool at the start
_LOG = logging.getLogger("tournant.node_store")


@dataclass(frozen=True, slots=True)
class StorePlan:
    """A node store as it is to run. nvme_folder, nvme: of the NVMe tier, if it has one; drain_s: most seconds in which
    it copies down at its end; idle_exit_s: a store of a cluster's node ends when no engine was attached for so long;
    directory_shards: of the directory that the stores of a cluster tell what they hold, 0 = none.
    """

    store: StoreConfig
    nvme_folder: str | None = None
    nvme: NvmeConfig = field(default_factory=NvmeConfig)
    drain_s: float = DRAIN_S
    idle_exit_s: float = IDLE_EXIT_S
    directory_shards: int = 1

    def __post_init__(self) -> None:
        for name, least in (("drain_s", 0.0), ("idle_exit_s", 0.1)):
            if not least <= getattr(self, name) <= 86_400:
                raise StoreConfigError(f"{name} is {getattr(self, name)}; it must be {least:g} to 86400 seconds")
        if not 0 <= self.directory_shards <= MAX_SHARDS:
            raise StoreConfigError(f"directory_shards is {self.directory_shards}; it must be 0 to {MAX_SHARDS}")

    def differences(self, other: StorePlan) -> list[str]:
        """ "host_bytes 1, not 2" for everything in which this one is not the other."""
        found = []
        for mine, theirs in ((self.store, other.store), (self.nvme, other.nvme), (self, other)):
            for name in (item.name for item in fields(mine) if item.name not in ("store", "nvme")):
                ours, others = getattr(mine, name), getattr(theirs, name)
                if ours != others:
                    found.append(f"{name} {ours}, not {others}")
        return found


class StoreKeeper:
    """See the module. folder: of the socket, private to this user, made if it is not there.

    patience_s: how long failures to start are tried again before they are told, while an earlier store may still be
    ending; on_idle: called from the keeper's thread when no client was attached for `plan.idle_exit_s`, after the store
    has ended, and the keeper with it.
    """

    def __init__(
        self, plan: StorePlan, folder: Path, *, patience_s: float = 0.0, on_idle: Callable[[], None] | None = None
    ) -> None:
        self.plan = plan
        self.socket = folder / "socket"
        self.num_starts = 0
        self._on_idle = on_idle
        self._patient_until = time.monotonic() + patience_s
        self._used = time.monotonic()
        self._changed = threading.Condition()
        self._stopping = False
        self._running: StoreProcess | None = None
        self._process: StoreProcess | None = None  # the last one, whether it is told to anybody or not
        self._failure: Exception | None = None
        self._wake, self._wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._keep, daemon=True, name="node-store")
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the store process that runs now."""
        running = self._running
        return None if running is None else running.process.pid

    def wait_ready(self, timeout_s: float | None = None) -> Path:
        """The socket, once the store listens there; counts as use.

        Raises StoreConfigError with what the store said when it cannot start, StoreUnavailable when it does not in time
        or is ending.
        """
        limit = self.start_s if timeout_s is None else timeout_s
        with self._changed:
            self._used = time.monotonic()
            self._changed.wait_for(lambda: self._running or self._failure or self._stopping, limit)
            if self._stopping:
                raise StoreUnavailable(f"the store at {self.socket} is ending")
            if self._running is not None:
                return self.socket
            raise self._failure or StoreUnavailable(f"the store at {self.socket} was not ready after {limit:g} s")

    @property
    def start_s(self) -> float:
        """How long a start may take."""
        return START_S + self.plan.store.host_bytes / POOL_BYTES_PER_S

    def status(self) -> Status:
        """Counters and gauges of the running store. Raises StoreUnavailable, StoreRefused."""
        return cast(Status, ask(self.socket, StatusQuery(), ASK_S))

    def stop(self) -> None:
        """Let the store copy down what is dirty, for `plan.drain_s` at most, and end it. Idempotent."""
        with self._changed:
            self._stopping = True
            running = self._running
            self._changed.notify_all()
        if self._wakes >= 0:
            os.write(self._wakes, b"x")
        if running is not None:
            running.stop(self.plan.drain_s + STOP_MARGIN_S)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._close_pipe()

    # ---- the thread

    def _keep(self) -> None:
        delay = BACKOFF_S
        while not self._stopping:
            began = time.monotonic()
            try:
                if self._run_one():
                    return
            except Exception as error:
                _LOG.exception("keeping the store at %s failed; trying again in %g s", self.socket, delay)
                self._end_failed(error)
            if time.monotonic() - began > LIVED_S:
                delay = BACKOFF_S
            if not self._stopping:
                select.select([self._wake], [], [], delay)
                delay = min(2 * delay, MAX_BACKOFF_S)

    def _run_one(self) -> bool:
        """One store from its start to its end; whether it ended for want of clients, and this keeper with it."""
        running = self._start()
        if running is None:
            return False
        self._process = running
        pidfd = os.pidfd_open(running.process.pid)  # nobody else has waited for it
        try:
            self._publish(running)
            idle = self._watch(running, pidfd)
        finally:
            os.close(pidfd)
        if idle:
            self.stop()
            if self._on_idle is not None:
                self._on_idle()
            return True
        with self._changed:
            self._running = None
        if not self._stopping:
            _LOG.warning("the store at %s died (exit code %s); starting it again", self.socket, running.stop())
        return False

    def _end_failed(self, error: Exception) -> None:
        """No store of a failed attempt goes on unwatched, and nobody waits for one."""
        with self._changed:
            self._running, self._failure = None, StoreUnavailable(f"the store at {self.socket}: {error!r:.500}")
            self._changed.notify_all()
        if self._process is not None:
            self._process.stop(self.plan.drain_s + STOP_MARGIN_S)

    def _start(self) -> StoreProcess | None:
        plan = self.plan
        try:
            return start_store(
                plan.store,
                self.socket,
                nvme_folder=None if plan.nvme_folder is None else Path(plan.nvme_folder),
                nvme=plan.nvme,
                drain_s=plan.drain_s,
                timeout_s=self.start_s,
            )
        except (StoreConfigError, StoreUnavailable, OSError) as error:
            if time.monotonic() > self._patient_until:
                _LOG.error("the store at %s cannot be started: %s", self.socket, error)
                with self._changed:
                    self._failure = StoreUnavailable(str(error)) if isinstance(error, OSError) else error
                    self._changed.notify_all()
            return None

    def _publish(self, running: StoreProcess) -> None:
        with self._changed:
            self.num_starts += 1
            self._running, self._failure, self._used = running, None, time.monotonic()
            self._changed.notify_all()
            stopping = self._stopping
        if stopping:
            running.stop(self.plan.drain_s + STOP_MARGIN_S)
            return
        status = self._asked()
        if status is not None and self.plan.nvme_folder is not None:
            _LOG.info(
                "the store found in %s: adopted %d, refused %d, corrupt %d",
                self.plan.nvme_folder, status.adopted, status.refused_records, status.corrupt_records,
            )  # fmt: skip

    def _watch(self, running: StoreProcess, pidfd: int) -> bool:
        """Return when the process has ended (False), or was idle for too long (True)."""
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        unanswered = 0
        while not poll.poll(1000 * min(5.0, self.plan.idle_exit_s / 4)):
            status = self._asked()
            unanswered = 0 if status is not None else unanswered + 1
            if unanswered >= UNANSWERED and not self._stopping:
                _LOG.error("the store at %s has not answered %d times; it is killed", self.socket, unanswered)
                running.kill()
            if status is not None and status.clients:
                self._used = time.monotonic()
            elif self._is_idle():
                return True
        return False

    def _asked(self) -> Status | None:
        """The status, or None when there is no answer, for whatever reason."""
        try:
            return self.status()
        except Exception as error:
            if not self._stopping:
                _LOG.warning("the store at %s does not answer: %s: %s", self.socket, type(error).__name__, error)
            return None

    def _is_idle(self) -> bool:
        """Whether it is to end for want of clients; from then on nobody gets the socket."""
        with self._changed:
            if self._on_idle is None or time.monotonic() - self._used < self.plan.idle_exit_s:
                return False
            self._stopping = True
            return True

    def _close_pipe(self) -> None:
        for fd in (self._wake, self._wakes):
            if fd >= 0:
                os.close(fd)
        self._wake = self._wakes = -1
