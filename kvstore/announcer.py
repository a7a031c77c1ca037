"""What a node store tells the directory: which blocks came, moved to NVMe only, or went. Off the path of requests.

Owns which keys have changed since they were told, and one stream of numbered announcements per shard. Where a block
lies is asked from the index when it is told, not when it changed: a key is told once however often it changed, and two
versions of a key are one entry. Sending, and what becomes of messages, is the shell's.

Invariants:
 1. In the path of a request a change costs one entry in a dict, and nothing without a directory.
 2. At most `max_changed` keys wait after a `trim`; with more they are forgotten, a sequence number is left out, and the
    shards ask for everything.
 3. Everything is told in pieces of at most `batch` keys, so that no call takes long.
 4. A message may be lost: the next one, at the latest after `heartbeat_us`, shows it by its number.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from tournant.kvstore.directory import Announcement, Heard, shard_of
from tournant.kvstore.errors import StoreConfigError
from tournant.kvstore.groups import Group
from tournant.kvstore.residency import Residency


@dataclass(frozen=True, slots=True)
class AnnouncerConfig:
    """node: number of this node in the cluster, 0 or more; num_shards: shards of the directory, the same for all."""

    node: int
    num_shards: int = 1
    max_changed: int = 65_536
    batch: int = 4096
    heartbeat_us: int = 1_000_000

    def __post_init__(self) -> None:
        for item in fields(self):
            value, least = getattr(self, item.name), 0 if item.name == "node" else 1
            if value < least:
                raise StoreConfigError(f"{item.name} is {value}; it must be {least} or more")


@dataclass(slots=True)
class AnnouncerStats:
    """Since the start. keys: told, in changes or in full; full: how often everything was told to a shard."""

    messages: int = 0
    keys: int = 0
    overflows: int = 0
    full: int = 0


@dataclass(slots=True)
class _Stream:
    """To one shard. begun: seq of the last message that answered a question; todo: keys that a full one still tells."""

    seq: int
    begun: int = 0
    answers: int = 0
    sent_us: int | None = None
    todo: list[bytes] = field(default_factory=list)
    next: int = 0


class Announcer:
    """See the module. residency: of the store; this announcer is told of its changes from now on.

    last_seq: above all numbers that an earlier announcer of the same store may have used.
    """

    def __init__(self, config: AnnouncerConfig, incarnation: int, residency: Residency, last_seq: int = 0) -> None:
        self.config = config
        self.incarnation = incarnation
        self.stats = AnnouncerStats()
        self._by_key = residency.index.by_key
        self._changed: dict[bytes, None] = {}
        self._streams = [_Stream(last_seq) for _ in range(config.num_shards)]
        residency.on_changed = self._changed.setdefault  # no frame of Python: it is called for each block

    @property
    def num_changed(self) -> int:
        """Keys that wait to be told."""
        return len(self._changed)

    def trim(self) -> None:
        """Keep the bound. Called at every tick, also when nobody polls."""
        if len(self._changed) > self.config.max_changed:
            self._changed.clear()
            self.stats.overflows += 1
            for stream in self._streams:
                stream.seq += 1

    def poll(self, now_us: int) -> list[tuple[int, Announcement]]:
        """What is to be sent now: (shard, message), at most one for each shard. Lost messages are asked for again."""
        self.trim()
        out = []
        for shard, (stream, keys) in enumerate(zip(self._streams, self._next_changes(), strict=True)):
            keys += self._next_of_all(stream, shard)
            silent = stream.sent_us is None or not 0 <= now_us - stream.sent_us < self.config.heartbeat_us
            if keys or stream.answers or silent:
                stream.sent_us = now_us
                out.append((shard, self._message(stream, keys)))
        return out

    def _next_changes(self) -> list[list[bytes]]:
        """Up to `batch` keys that changed, the first first, by shard."""
        changed, count = self._changed, self.config.num_shards
        if len(changed) <= self.config.batch:
            keys = list(changed)
            changed.clear()
        else:
            keys = [key for key, _ in zip(changed, range(self.config.batch), strict=False)]
            for key in keys:
                del changed[key]
        if count == 1:
            return [keys]
        shards: list[list[bytes]] = [[] for _ in range(count)]
        for key in keys:
            shards[shard_of(key, count)].append(key)
        return shards

    def _next_of_all(self, stream: _Stream, shard: int) -> list[bytes]:
        """The next piece of everything, for one shard; all there is from the message on that answers its question."""
        if stream.answers:
            stream.todo, stream.next = list(self._by_key), 0
            self.stats.full += 1
        if not stream.todo:
            return []
        piece = stream.todo[stream.next : stream.next + self.config.batch]
        stream.next += len(piece)
        if stream.next >= len(stream.todo):
            stream.todo = []
        count = self.config.num_shards
        return piece if count == 1 else [key for key in piece if shard_of(key, count) == shard]

    def _message(self, stream: _Stream, keys: list[bytes]) -> Announcement:
        stream.seq += 1
        answers, stream.answers = stream.answers, 0
        if answers:
            stream.begun = stream.seq
        host: list[bytes] = []
        nvme: list[bytes] = []
        gone: list[bytes] = []
        for key, group in zip(keys, map(self._by_key.get, keys), strict=True):
            if group is None:
                gone.append(key)
            elif group.in_policy:
                host.append(key)
            else:
                _slow_tier(group, host, nvme, gone).append(key)
        self.stats.messages += 1
        self.stats.keys += len(host) + len(nvme) + len(gone)
        return Announcement(
            self.config.node, self.incarnation, stream.seq, tuple(host), tuple(nvme), tuple(gone), answers
        )

    def heard(self, shard: int, reply: Heard) -> None:
        """A shard's reply. One that asks is answered from the next poll on; late and repeated ones do no harm."""
        stream = self._streams[shard]
        if reply.incarnation != self.incarnation or not reply.question or reply.seq < stream.begun:
            return
        stream.answers = reply.question


def _slow_tier(first: Group, host: list[bytes], nvme: list[bytes], gone: list[bytes]) -> list[bytes]:
    """Where the versions of a key lie whose newest is not in host slots."""
    group: Group | None = first
    found = gone
    while group is not None:
        if group.in_policy:
            return host
        if group.complete and group.on_nvme:
            found = nvme
        group = group.older
    return found
