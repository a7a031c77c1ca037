"""The directory on Ray: one actor for each shard, how node stores tell it, and how others ask it.

Owns the actors' names, their life, the calls to them and what is done when one fails. What a shard knows is
kvstore/directory.py's, when stores tell it announcing.py's.

Invariants:
 1. Whatever a caller gets is a hint. A shard that is dead, hung or not there is a miss, within the caller's deadline.
 2. The number of a node follows from its Ray id, so that it is the same for all shards and all their lives.
 3. A shard ends for good when no store was heard of for a while; who tells it something makes it again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from tournant.cluster.announcing import Replies
from tournant.cluster.app_namespace import namespace_of
from tournant.cluster.metrics import DirectoryMetrics
from tournant.cluster.ray_metrics import RayBackend
from tournant.kvstore import directory
from tournant.kvstore.block import KEY_BYTES
from tournant.kvstore.directory import Announcement, Changes, DirectoryConfig, Heard, Position, shard_of

IDLE_EXIT_S = 60.0
TEND_S = 1.0
LOOKUP_S = 0.5
REST_S = 1.0  # how long a shard that was not there, or did not answer, is not asked
CALL_S = 10.0  # after which a reply to an announcement is not waited for any longer
MAX_CALLS = 16  # unanswered announcements of a node to a shard; what would come after them is lost
NUMBER_DIGITS = 16  # of a Ray node's id, which is random: 64 bits
_LOG = logging.getLogger("tournant.directory")


def number_of(node_id: str) -> int:
    """What the directory calls a Ray node (hexadecimal id). The same everywhere and always."""
    return int(node_id[:NUMBER_DIGITS], 16)


class Held(NamedTuple):
    """`num_keys` keys one after another that the same Ray nodes (ids) hold: in host slots, and on NVMe only."""

    num_keys: int
    host: tuple[str, ...]
    nvme: tuple[str, ...]


# -------------------------------------------------------------------- a shard


class DirectoryActor:
    """One shard. `find_shard` makes it."""

    def __init__(self, app: str, shard: int, config: DirectoryConfig, idle_exit_s: float) -> None:
        self._shard = shard
        self._idle_exit_s = idle_exit_s
        self._core = directory.Directory(config, int.from_bytes(os.urandom(8), "little"))
        self._ids: dict[int, str] = {}
        self._lock = threading.Lock()  # between calls, of which one runs at a time, and `_tend`
        self._heard_at = time.monotonic()
        self._metrics = DirectoryMetrics(app, shard, RayBackend())
        self._me = ray.get_runtime_context().current_actor
        threading.Thread(target=self._tend, daemon=True, name="tend").start()

    def announce(self, node_id: str, message: Announcement) -> Heard:
        """Take in what the store of a Ray node tells. Idempotent."""
        with self._lock:
            self._heard_at = time.monotonic()
            self._ids[message.node] = node_id
            return self._core.announce(_now_us(), message)

    def lookup(self, keys: bytes) -> list[tuple[int, tuple[str, ...], tuple[str, ...]]]:
        """Who holds the leading keys of a chain, as fields of `Held`, up to the first that nobody is known to hold.

        keys: one after another, KEY_BYTES each.
        """
        chain = [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
        with self._lock:
            runs = self._core.lookup(chain)
            return [(run.num_keys, self._named(run.host), self._named(run.nvme)) for run in runs]

    def _named(self, numbers: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self._ids[number] for number in numbers)

    def changes_since(self, position: Position) -> Changes:
        """See `kvstore.directory.Directory.changes_since`; the nodes' numbers are those of `number_of`."""
        with self._lock:
            return self._core.changes_since(position)

    def node_lost(self, node_id: str) -> None:
        """A store does not answer, or has ended: its entries go. One that lives is asked for everything again."""
        with self._lock:
            self._core.node_lost(number_of(node_id))

    def status(self) -> dict[str, Any]:
        """shard, pid, entries, nodes (Ray ids), and the counters of `DirectoryStats`."""
        with self._lock:
            facts = {"shard": self._shard, "pid": os.getpid(), "entries": len(self._core)}
            return facts | {"nodes": list(self._named(self._core.nodes))} | asdict(self._core.stats)

    def _tend(self) -> None:
        """Lose silent stores, count, and end when nobody needs this shard."""
        while time.monotonic() - self._heard_at < self._idle_exit_s:
            time.sleep(TEND_S)
            try:
                with self._lock:
                    self._core.expire(_now_us())
                    known = self._core.nodes
                    self._ids = {number: self._ids[number] for number in known}
                    stats, entries = replace(self._core.stats), len(self._core)
                self._metrics.record(stats, entries, len(known))
            except Exception:
                _LOG.exception("tending shard %d of the directory failed; trying again in %g s", self._shard, TEND_S)
        ray.kill(self._me, no_restart=True)


def find_shard(app: str, shard: int, config: DirectoryConfig | None = None, idle_exit_s: float = IDLE_EXIT_S) -> Any:
    """The actor of a shard, made if there is none. config, idle_exit_s: of one that is made. Does not wait until it
    runs.
    """
    actor_class = ray.remote(DirectoryActor).options(
        name=shard_name(shard),
        namespace=namespace_of(app),
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        scheduling_strategy="SPREAD",
    )
    return actor_class.remote(app, shard, config or DirectoryConfig(), idle_exit_s)


def find_directory(app: str, num_shards: int) -> list[Any]:
    """The actors of all shards, made where there are none."""
    return [find_shard(app, shard) for shard in range(num_shards)]


def shard_name(shard: int) -> str:
    """Name of a shard's actor in its application's namespace."""
    return f"tournant-directory-{shard}"


def _now_us() -> int:
    return time.monotonic_ns() // 1000


# -------------------------------------------------------------------- its callers


class RayShards:
    """How the store of one Ray node reaches the shards; see `announcing.Shards`. Of one thread."""

    def __init__(self, app: str, node_id: str) -> None:
        self._app = app
        self._node_id = node_id
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, tuple[int, float]] = {}  # reference of a reply -> shard, when it was sent

    def send(self, shard: int, message: Announcement) -> None:
        """See `announcing.Shards`. Makes the shard when there is none."""
        if sum(one == shard for one, _ in self._calls.values()) >= MAX_CALLS:
            return
        actor = self._actors.get(shard)
        if actor is None:
            actor = self._actors[shard] = find_shard(self._app, shard)
        self._calls[actor.announce.remote(self._node_id, message)] = (shard, time.monotonic())

    def replies(self) -> Replies:
        """See `announcing.Shards`. The next message to a shard that failed goes to whoever has its name then."""
        if not self._calls:
            return ()
        heard: list[tuple[int, Heard]] = []
        ready, late = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        for reply in ready:
            shard, _ = self._calls.pop(reply)
            try:
                heard.append((shard, ray.get(reply)))
            except RayError as error:
                self._failed(shard, error)
        for reply in late:
            shard, sent_at = self._calls[reply]
            if time.monotonic() - sent_at > CALL_S:
                del self._calls[reply]
                self._failed(shard, f"no answer within {CALL_S:g} s")
        return tuple(heard)

    def _failed(self, shard: int, why: object) -> None:
        if self._actors.pop(shard, None) is not None:
            _LOG.warning("shard %d of the directory is looked up again: %s", shard, str(why).strip().split("\n")[-1])

    def leave(self) -> None:
        """See `announcing.Shards`."""
        for actor in list(self._actors.values()):  # the thread that sends may hang, and go on
            actor.node_lost.remote(self._node_id)


class Directory:
    """Who in the cluster holds which blocks, as its shards know. For any number of threads."""

    def __init__(self, app: str, num_shards: int) -> None:
        self.app = app
        self.num_shards = num_shards
        self._actors: dict[int, Any] = {}
        self._rests_until: dict[int, float] = {}

    def lookup(self, keys: Sequence[bytes], timeout_s: float = LOOKUP_S) -> list[Held]:
        """Who holds the leading keys of a chain, in runs, up to the first key that nobody is known to hold.

        A hint: ask the node. A shard that fails or does not answer in time knows nothing; it is not asked again for
        REST_S then. Raises ValueError for what is no key.
        """
        if not set(map(len, keys)) <= {KEY_BYTES}:
            raise ValueError(f"a key does not have {KEY_BYTES} bytes")
        deadline = time.monotonic() + timeout_s
        found: list[Held] = []
        calls = [(shard, chain, self._ask(shard, chain)) for shard, chain in self._by_shard(keys)]
        for shard, chain, call in calls:
            held = self._answer(shard, chain, call, deadline)
            found += held
            if sum(run.num_keys for run in held) * KEY_BYTES < len(chain):
                break
        return found

    def node_lost(self, node_id: str) -> None:
        """Tell all shards that a node's store does not answer, so that nobody follows its entries. Does not wait."""
        for shard in range(self.num_shards):
            actor = self._actor(shard)
            if actor is not None:
                actor.node_lost.remote(node_id)

    def _by_shard(self, keys: Sequence[bytes]) -> Iterable[tuple[int, bytes]]:
        """All keys of a chain are of one shard; should they not be, stretches of them, in order."""
        for shard, stretch in groupby(keys, lambda key: shard_of(key, self.num_shards)):
            yield shard, b"".join(stretch)

    def _actor(self, shard: int) -> Any | None:
        """None while the shard rests, and when there is none."""
        if time.monotonic() < self._rests_until.get(shard, 0.0):
            return None
        actor = self._actors.get(shard)
        if actor is None:
            try:
                actor = self._actors[shard] = ray.get_actor(shard_name(shard), namespace=namespace_of(self.app))
            except ValueError:
                self._rest(shard)
        return actor

    def _rest(self, shard: int) -> None:
        self._rests_until[shard] = time.monotonic() + REST_S

    def _ask(self, shard: int, chain: bytes) -> Any | None:
        actor = self._actor(shard)
        return None if actor is None else actor.lookup.remote(chain)

    def _answer(self, shard: int, chain: bytes, call: Any | None, deadline: float) -> list[Held]:
        """A shard that has died is looked up by its name once more."""
        for _ in range(2):
            if call is None:
                return []
            try:
                return [Held(*run) for run in ray.get(call, timeout=max(0.0, deadline - time.monotonic()))]
            except GetTimeoutError:
                break
            except RayActorError:
                self._actors.pop(shard, None)
                call = self._ask(shard, chain)
            except RayError as error:
                _LOG.warning("shard %d of the directory failed: %s", shard, error)
                break
        self._rest(shard)
        return []
