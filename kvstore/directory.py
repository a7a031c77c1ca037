"""One shard of the directory: which nodes hold which blocks, host or NVMe. Pure: no clock, I/O, thread or randomness.

Owns a bounded, advisory index key -> nodes, what it has heard of each node, and a bounded log of changes for routers.
A wrong entry costs a miss: who follows one asks the node's store, which alone decides what is read (STORE.md).

Invariants:
 1. Announcements of a store are applied in the order of `seq`, each once. What comes twice or late changes nothing.
 2. A shard that lacks a message, or knows nothing of a store, asks: `Heard.question`. Only the announcement that
    answers this very question begins anew, so that a late message of a dead store cannot take the place of a live one.
 3. At most `max_keys` keys, those announced last; `max_holders` nodes of a key, `max_nodes` nodes, `log_keys` changes.
 4. Positions of the log begin at the shard's incarnation: one of an earlier life is told to start over.
 5. Who starts over is given the keys of one list in pages, and what has changed since that list was made: what an
    answer says of a key holds when it is made, so that pages and changes may come in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import NamedTuple
from weakref import WeakValueDictionary

from tournant.kvstore.errors import InvariantViolation, StoreConfigError

HOST, NVME, GONE = 0, 1, 2  # where a node holds a block: readable in host slots, on NVMe only, not at all
EVICTED_AT_ONCE = 64  # a 64th of a full index leaves at a time
ROUTE_BYTES = 2  # at the end of a key; the same in all keys of a chain
MAX_SHARDS = 64  # of one directory
_U64 = (1 << 64) - 1


def shard_of(key: bytes, num_shards: int) -> int:
    """The shard that answers for a block, and so for its whole chain: keys of a chain end with the same bytes."""
    return int.from_bytes(key[-ROUTE_BYTES:], "little") % num_shards


# -------------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a node store tells one shard. seq: 1, 2, 3, ... in the life of the store (incarnation) and for this shard.

    host, nvme, gone: keys by where the node holds them now. answers: the question that this message begins to answer:
    all that was known of the node is void, and what it holds follows from here on; 0 = none.
    """

    node: int
    incarnation: int
    seq: int
    host: tuple[bytes, ...] = ()
    nvme: tuple[bytes, ...] = ()
    gone: tuple[bytes, ...] = ()
    answers: int = 0


@dataclass(frozen=True, slots=True)
class Heard:
    """The reply to announcement `seq`. question: asks for everything that the node holds, from anew; 0 = go on."""

    incarnation: int
    seq: int
    question: int = 0


class Run(NamedTuple):
    """`num_keys` keys one after another that the same nodes hold: in host slots, and on NVMe only. Numbers rise."""

    num_keys: int
    host: tuple[int, ...]
    nvme: tuple[int, ...]


class Position(NamedTuple):
    """Up to where a copy has heard a shard. at: in its log; list_at, given: of a list of keys, where in the log it was
    made and how many were given; None = all of them, or all that are wanted.
    """

    at: int
    list_at: int = 0
    given: int | None = None


Entry = tuple[bytes, tuple[int, ...], tuple[int, ...]]  # key, nodes in host, nodes on NVMe only; none = no entry


@dataclass(frozen=True, slots=True)
class Changes:
    """What a copy has to take in, in this order. position: what to ask with next; start_over: empty the copy first.

    lost: nodes to be taken out of all entries; entries: what holds now; older: the same, of keys that have not changed
    since an earlier answer unless they are in `entries` too, the one announced last first.
    """

    position: Position
    start_over: bool
    lost: tuple[int, ...]
    entries: tuple[Entry, ...]
    older: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """Limits of one shard. changes: most changes of one answer; silent_us: how long a store may say nothing until its
    entries go.
    """

    max_keys: int = 1_000_000
    max_holders: int = 16
    max_nodes: int = 4096
    log_keys: int = 65_536
    changes: int = 8192
    silent_us: int = 10_000_000

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value < 1:
                raise StoreConfigError(f"{item.name} is {value}; it must be 1 or more")


@dataclass(slots=True)
class DirectoryStats:
    """Since the start."""

    applied: int = 0
    stale: int = 0
    questions: int = 0
    evicted: int = 0
    looked_up: int = 0
    found: int = 0
    nodes_lost: int = 0


# -------------------------------------------------------------------- the shard


class _Holders:
    """Nodes of an entry, each in one of two sorted tuples. Shared by all entries that have the same."""

    __slots__ = ("__weakref__", "host", "nvme")

    def __init__(self, host: tuple[int, ...], nvme: tuple[int, ...]) -> None:
        self.host = host
        self.nvme = nvme


class _Node:
    """What was heard of a node. asked: the incarnation that an open question went to; listed: entries may name it."""

    __slots__ = ("asked", "heard_us", "incarnation", "listed", "question", "seq")

    def __init__(self, now_us: int) -> None:
        self.incarnation: int | None = None
        self.seq = 0
        self.question = 0
        self.asked: int | None = None
        self.heard_us = now_us
        self.listed = False


_NOBODY = _Holders((), ())


class Directory:
    """See the module. incarnation: random 64 bits, new at every start of the shard."""

    def __init__(self, config: DirectoryConfig, incarnation: int) -> None:
        self.config = config
        self.stats = DirectoryStats()
        self._index: dict[bytes, _Holders] = {}  # the oldest announced first
        self._shared: WeakValueDictionary[tuple[tuple[int, ...], tuple[int, ...]], _Holders] = WeakValueDictionary()
        self._nodes: dict[int, _Node] = {}
        self._next_question = incarnation & _U64 or 1
        self._log: deque[bytes | int] = deque(maxlen=config.log_keys)  # keys that changed, nodes that were lost
        self._clock_us = 0  # advances with `now_us`, never goes back
        self._last_now_us: int | None = None
        self._end = incarnation  # position behind the newest entry of the log
        self._list: list[bytes] = []  # what the index had at `_list_at`, that announced last first, while it is read
        self._list_at: int | None = None
        self._list_read_us = 0

    def __len__(self) -> int:
        """Keys that have an entry."""
        return len(self._index)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes that have announced something, in order of their numbers."""
        return tuple(sorted(number for number, node in self._nodes.items() if node.incarnation is not None))

    # ---- from node stores

    def announce(self, now_us: int, message: Announcement) -> Heard:
        """Take a message of a store in. Idempotent: the same again changes nothing."""
        self._advance(now_us)
        node = self._nodes.get(message.node)
        if node is None:
            node = self._admit(message.node)
        if self._answers(node, message):
            self._begin(node, message)
        elif self._is_stale(node, message):
            self.stats.stale += 1
            return Heard(message.incarnation, message.seq)
        elif not self._is_next(node, message):
            return Heard(message.incarnation, message.seq, self._ask(node, message.incarnation))
        node.seq = message.seq
        node.heard_us = self._clock_us
        node.listed = node.listed or bool(message.host or message.nvme)
        for where, keys in ((HOST, message.host), (NVME, message.nvme), (GONE, message.gone)):
            self._apply(message.node, keys, where)
        self.stats.applied += 1
        return Heard(message.incarnation, message.seq)

    @staticmethod
    def _answers(node: _Node, message: Announcement) -> bool:
        return message.answers != 0 and (message.answers, message.incarnation) == (node.question, node.asked)

    @staticmethod
    def _is_stale(node: _Node, message: Announcement) -> bool:
        return message.incarnation == node.incarnation and message.seq <= node.seq

    @staticmethod
    def _is_next(node: _Node, message: Announcement) -> bool:
        return message.incarnation == node.incarnation and message.seq == node.seq + 1

    def _begin(self, node: _Node, message: Announcement) -> None:
        self._drop_entries(message.node, node)
        node.incarnation, node.question = message.incarnation, 0

    def _advance(self, now_us: int) -> None:
        if self._last_now_us is not None:
            self._clock_us += max(0, now_us - self._last_now_us)
        self._last_now_us = now_us

    def _admit(self, number: int) -> _Node:
        if len(self._nodes) >= self.config.max_nodes:
            self.node_lost(min(self._nodes, key=lambda other: (self._nodes[other].heard_us, other)))
        node = self._nodes[number] = _Node(self._clock_us)
        return node

    def _ask(self, node: _Node, incarnation: int) -> int:
        """The number of the open question to this store; a store that has come in between makes it another one."""
        if not node.question or node.asked != incarnation:
            node.question, node.asked = self._next_question, incarnation
            self._next_question = self._next_question % _U64 + 1
            self.stats.questions += 1
        return node.question

    def _apply(self, number: int, keys: Iterable[bytes], where: int) -> None:
        index, log = self._index, self._log
        moved: dict[_Holders, _Holders] = {}  # few different ones: a message is a handful of runs
        changed = 0
        for key in keys:
            old = index.get(key, _NOBODY)
            new = moved.get(old)
            if new is None:
                new = moved[old] = self._moved(old, number, where)
            if old is not _NOBODY and (where != GONE or new is _NOBODY):
                del index[key]  # and in again, at the end: a dict keeps the order of coming in
            if new is not _NOBODY:
                index[key] = new
            if new is not old:
                log.append(key)
                changed += 1
        self._end += changed
        if len(index) > self.config.max_keys:
            self._evict()

    def _evict(self) -> None:
        """Make room for a while: the front of a dict is slow to find, so it is looked for once for many keys."""
        most = self.config.max_keys
        oldest = list(islice(self._index, len(self._index) - most + most // EVICTED_AT_ONCE))
        for key in oldest:
            del self._index[key]
        self._log.extend(oldest)
        self._end += len(oldest)
        self.stats.evicted += len(oldest)

    def _moved(self, old: _Holders, number: int, where: int) -> _Holders:
        """The holders of an entry after a node has it at another place."""
        host, nvme = self._places(old, number, where)
        if (host, nvme) == (old.host, old.nvme):
            return old
        if not host and not nvme:
            return _NOBODY
        return self._shared.setdefault((host, nvme), _Holders(host, nvme))

    def _places(self, old: _Holders, number: int, where: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Nodes in host and on NVMe then. A node too many is not listed."""
        host = tuple(node for node in old.host if node != number)
        nvme = tuple(node for node in old.nvme if node != number)
        if where != GONE and len(host) + len(nvme) < self.config.max_holders:
            if where == HOST:
                host = tuple(sorted((*host, number)))
            else:
                nvme = tuple(sorted((*nvme, number)))
        return host, nvme

    def _drop_entries(self, number: int, node: _Node) -> None:
        """Take a node out of all entries: one pass over the index."""
        if not node.listed:
            return
        node.listed = False
        changed = False
        nowhere: set[_Holders] = set()
        for holders in dict.fromkeys(self._index.values()):
            host, nvme = self._places(holders, number, GONE)
            if not host and not nvme:
                nowhere.add(holders)
            elif (host, nvme) != (holders.host, holders.nvme):  # changed where it is, for all its entries at once
                self._shared.pop((holders.host, holders.nvme), None)
                holders.host, holders.nvme = host, nvme
                self._shared.setdefault((host, nvme), holders)
                changed = True
        if nowhere:
            changed = True
            for key in [key for key, holders in self._index.items() if holders in nowhere]:
                del self._index[key]
        if changed:
            self._log.append(number)
            self._end += 1

    def node_lost(self, number: int) -> None:
        """The node does not answer, or was taken away: its entries go. It may announce again at any time."""
        node = self._nodes.pop(number, None)
        if node is not None:
            self._drop_entries(number, node)
            self.stats.nodes_lost += 1

    def expire(self, now_us: int) -> tuple[int, ...]:
        """Lose the nodes whose stores have said nothing for `silent_us`; which they were. now_us: any clock;
        jumps do no harm but that a jump ahead loses all until they announce again.
        """
        self._advance(now_us)
        limit = self.config.silent_us
        if self._clock_us - self._list_read_us > limit:
            self._list, self._list_at = [], None
        late = sorted(number for number, node in self._nodes.items() if self._clock_us - node.heard_us > limit)
        for number in late:
            self.node_lost(number)
        return tuple(late)

    # ---- from readers and routers

    def lookup(self, keys: Sequence[bytes]) -> list[Run]:
        """Who holds the leading keys of a chain, in runs, up to the first key that nobody is known to hold. A hint."""
        get = self._index.get
        runs: list[Run] = []
        start, found = 0, len(keys)
        last: _Holders | None = None
        for place, key in enumerate(keys):
            holders = get(key)
            if holders is last and last is not None:
                continue
            if holders is None:
                found = place
                break
            if last is None:
                last = holders
            elif (holders.host, holders.nvme) != (last.host, last.nvme):
                runs.append(Run(place - start, last.host, last.nvme))
                start, last = place, holders
        if last is not None:
            runs.append(Run(found - start, last.host, last.nvme))
        self.stats.looked_up += len(keys)
        self.stats.found += found
        return runs

    def changes_since(self, position: Position) -> Changes:
        """What has changed since an answer's position, at most `config.changes` at once: ask again until it stays.

        A position that the log does not reach starts over with all entries, those announced last first. Any may be
        passed.
        """
        log, most = self._log, self.config.changes
        at, list_at, given = position
        start_over = not 0 <= self._end - at <= len(log)
        if start_over:
            at = list_at = self._listed()
            given = 0
        lost: dict[int, None] = {}
        keys: dict[bytes, None] = {}
        behind = self._end - at
        first = len(log) - behind
        for item in islice(log, first, first + most):
            if isinstance(item, int):
                lost[item] = None
            else:
                keys[item] = None
        older: list[bytes] = []
        if given is not None:
            if list_at != self._list_at:
                list_at, given = self._listed(), 0
            self._list_read_us = self._clock_us
            older = self._list[max(0, given) : max(0, given) + most - len(keys)]
            given = max(0, given) + len(older)
            if given >= len(self._list):
                given = None
        following = Position(at + min(behind, most), list_at, given)
        return Changes(following, start_over, tuple(lost), self._entries(keys), self._entries(older))

    def _listed(self) -> int:
        """Where in the log the list of keys was made: now, unless there is one, which the log reaches for long yet."""
        if self._list_at is None or self._end - self._list_at > self.config.log_keys // 2:
            self._list, self._list_at = list(reversed(self._index)), self._end
        return self._list_at

    def _entries(self, keys: Iterable[bytes]) -> tuple[Entry, ...]:
        held = ((key, self._index.get(key, _NOBODY)) for key in keys)
        return tuple((key, one.host, one.nvme) for key, one in held)

    def validate(self) -> None:
        """Recount from scratch. Raises InvariantViolation."""
        config = self.config
        for name, count, most in (
            ("keys", len(self._index), config.max_keys),
            ("nodes", len(self._nodes), config.max_nodes),
            ("changes in the log", len(self._log), config.log_keys),
            ("keys in its list", len(self._list), config.max_keys),
        ):
            if count > most:
                raise InvariantViolation(f"the directory has {count} {name}; at most {most}")
        for holders in set(self._index.values()):
            listed = [*holders.host, *holders.nvme]
            if not 1 <= len(listed) <= config.max_holders or len(set(listed)) != len(listed):
                raise InvariantViolation(f"an entry lists the nodes {listed}; 1 to {config.max_holders}, each once")
            for number in listed:
                node = self._nodes.get(number)
                if node is None or not node.listed:
                    raise InvariantViolation(f"an entry names node {number}, of which nothing was heard")
