"""Which leading blocks of a prompt are where, as one router knows. Pure: no clock, I/O, thread or randomness.

Owns two bounded copies of what others know better: where in the cluster blocks lie, by node and tier, as the shards of
the directory say (`DirectoryCopy`); and what this router itself sent to which replica, whose device has it then
(`RouterIndex.note`). Both are hints: following a wrong one costs a prompt that is computed though it lies elsewhere.

Invariants:
 1. An entry is what its shard said last. One that the shard dropped, or that a lost shard said, is not there.
 2. At most `max_keys` entries, those said last, and `max_hints` hints, those of the latest requests.
 3. A key that a replica has a hint of has one for its whole chain: hints leave from a chain's end.
 4. A look-up costs at most `max_probes` keys, however long the chain; of a longer one every n-th is looked at.
 5. One thread may change a DirectoryCopy while any number of others look things up; a RouterIndex is one thread's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby, islice
from typing import NamedTuple
from weakref import WeakValueDictionary

from tournant.kvstore.directory import Changes, Run, shard_of
from tournant.kvstore.errors import InvariantViolation
from tournant.workers.errors import ConfigError

MAX_KEYS = 400_000
LEAVE_AT_ONCE = 64  # a 64th of what is too much leaves at a time

_Nodes = tuple[int, ...]


class Prefix(NamedTuple):
    """Leading blocks of a chain that a replica can use, by the fastest tier that each is in. Tiers may alternate."""

    device: int = 0
    host: int = 0
    nvme: int = 0


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Limits. max_keys: entries of all shards, about 170 bytes each; max_hints: of all replicas, as large; max_probes:
    keys of a chain that one look-up looks at.
    """

    max_keys: int = MAX_KEYS
    max_hints: int = 200_000
    max_probes: int = 128

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value < 1:
                raise ConfigError(f"{item.name} of a router is {value}; it must be 1 or more")


class _Holders:
    """Nodes of an entry, in host slots and on NVMe only. Shared by all entries of a shard that have the same."""

    __slots__ = ("__weakref__", "places")

    def __init__(self, places: tuple[_Nodes, _Nodes]) -> None:
        self.places = places


class _Shard:
    """What one shard of the directory said."""

    __slots__ = ("entries", "shared", "silent")

    def __init__(self) -> None:
        self.entries: dict[bytes, _Holders] = {}  # those said longest ago first
        self.shared: WeakValueDictionary[tuple[_Nodes, _Nodes], _Holders] = WeakValueDictionary()
        self.silent = False


_NOWHERE: tuple[_Nodes, _Nodes] = ((), ())


class DirectoryCopy:
    """What the shards of a directory say. num_shards: 0 = there is no directory."""

    def __init__(self, num_shards: int, max_keys: int = MAX_KEYS) -> None:
        self.max_keys = max_keys
        self._shards = [_Shard() for _ in range(num_shards)]

    def __len__(self) -> int:
        """Keys that have an entry."""
        return sum(len(shard.entries) for shard in self._shards)

    @property
    def num_shards(self) -> int:
        """Shards of the directory."""
        return len(self._shards)

    def apply(self, number: int, changes: Changes) -> None:
        """Take in what a shard said, and that it speaks."""
        shard = self._shards[number]
        shard.silent = False
        if changes.start_over:
            shard.entries, shard.shared = {}, WeakValueDictionary()
        for node in changes.lost:
            _lose(shard, node)
        entries, shared = shard.entries, shard.shared

        def holders(places: tuple[_Nodes, _Nodes]) -> _Holders:
            return shared.get(places) or shared.setdefault(places, _Holders(places))

        for key, host, nvme in changes.entries:
            entries.pop(key, None)  # and in again, at the end: a dict keeps the order of coming in
            if host or nvme:
                entries[key] = holders((host, nvme))
        if changes.older:
            older = {
                key: holders((host, nvme))
                for key, host, nvme in reversed(changes.older)
                if (host or nvme) and key not in entries
            }
            shard.entries = entries = older | entries
        _leave(entries, self._share())

    def _share(self) -> int:
        """Entries that one shard may have."""
        return max(1, self.max_keys // len(self._shards))

    def full(self, number: int) -> bool:
        """Whether there is no room for what a shard announced before what it said."""
        return len(self._shards[number].entries) >= self._share() - self._share() // LEAVE_AT_ONCE

    def drop(self, number: int, *, silent: bool) -> None:
        """Forget what a shard said. silent: it should speak, but does not; else there is none, which says nothing."""
        shard = self._shards[number]
        shard.entries, shard.shared = {}, WeakValueDictionary()
        shard.silent = silent

    def silent(self, keys: Sequence[bytes]) -> bool:
        """Whether the shard that answers for a chain does not speak: then its blocks may be anywhere."""
        return bool(keys) and bool(self._shards) and self._shard(keys[0]).silent

    def _shard(self, key: bytes) -> _Shard:
        return self._shards[shard_of(key, len(self._shards))]

    def runs(self, chain: Sequence[bytes], at_least: int) -> list[Run]:
        """Stretches of a chain in the same places, up to the first key in none from `at_least` on."""
        if not self._shards:
            return []
        get = self._shard(chain[0]).entries.get
        found: list[Run] = []
        done = 0
        for held, same in groupby(map(get, chain)):
            if held is None and done >= at_least:
                break
            count = len(list(same))
            found.append(Run(count, *(_NOWHERE if held is None else held.places)))
            done += count
        return found

    def validate(self) -> None:
        """Recount. Raises InvariantViolation."""
        if len(self) > max(self.max_keys, len(self._shards)):
            raise InvariantViolation(f"a router's copy of the directory has {len(self)} keys; at most {self.max_keys}")
        if any(one.places == _NOWHERE for shard in self._shards for one in set(shard.entries.values())):
            raise InvariantViolation("an entry of a router's copy of the directory names no node")


class RouterIndex:
    """See the module. directory: shared by all routers of a process, or of this one alone."""

    def __init__(self, directory: DirectoryCopy, config: IndexConfig | None = None) -> None:
        self.directory = directory
        self.config = config or IndexConfig()
        self._hints: dict[str, dict[bytes, None]] = {}  # replica -> keys, those of the oldest request first

    def note(self, replica: str, keys: Sequence[bytes], capacity: int | None = None) -> None:
        """A request with these keys was sent to a replica. capacity: blocks of its device, None = unknown."""
        known = self._hints.get(replica)
        if known is None:
            known = self._hints[replica] = {}
            for others in self._hints.values():
                _leave(others, self._share())
        most = self._share() if capacity is None else min(self._share(), capacity)
        for key in reversed(keys[:most]):  # the head last, so that it is the last to leave
            known.pop(key, None)
            known[key] = None
        _leave(known, most)

    def _share(self) -> int:
        """Hints that one replica may have."""
        return max(1, self.config.max_hints // max(1, len(self._hints)))

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget what was sent to all replicas but these."""
        for replica in self._hints.keys() - set(replicas):
            del self._hints[replica]

    def lookup(self, keys: Sequence[bytes], replicas: Sequence[tuple[str, int | None]]) -> list[Prefix]:
        """What each replica can use of a chain. replicas: its id, and the directory's number of its node, if known."""
        if not keys:
            return [Prefix()] * len(replicas)
        stride = -(-len(keys) // self.config.max_probes)
        probes = keys[stride - 1 :: stride]
        hinted = [self._hinted(replica, probes) for replica, _ in replicas]
        runs = self.directory.runs(probes, max(hinted, default=0))
        found: list[Prefix] = []
        for device, (_, node) in zip(hinted, replicas, strict=True):
            host, nvme = (0, 0) if node is None else _on_node(node, device, runs)
            found.append(Prefix(device * stride, host * stride, nvme * stride))
        return found

    def _hinted(self, replica: str, probes: Sequence[bytes]) -> int:
        """How many leading probes a replica has hints of (invariant 3)."""
        known = self._hints.get(replica)
        if not known or probes[0] not in known:
            return 0
        low, high = 1, len(probes)
        while low < high:
            middle = (low + high + 1) // 2
            if probes[middle - 1] in known:
                low = middle
            else:
                high = middle - 1
        return low

    def validate(self) -> None:
        """Recount. Raises InvariantViolation."""
        self.directory.validate()
        count = sum(map(len, self._hints.values()))
        if count > max(self.config.max_hints, len(self._hints)):
            raise InvariantViolation(f"a router has {count} hints; at most {self.config.max_hints}")


def _on_node(node: int, device: int, runs: Sequence[Run]) -> tuple[int, int]:
    """Probes in a node's host slots and on its NVMe that go on, without a gap, behind the first `device`."""
    at = host = nvme = 0
    for count, in_host, on_nvme in runs:
        start, at = at, at + count
        if at <= device:
            continue
        beyond = at - max(start, device)
        if node in in_host:
            host += beyond
        elif node in on_nvme:
            nvme += beyond
        else:
            break
    return host, nvme


def _lose(shard: _Shard, node: int) -> None:
    """Take a node out of all entries: changed where it is, for all entries with the same holders at once."""
    nowhere = False
    for holders in set(shard.entries.values()):
        host, nvme = holders.places
        if node not in host and node not in nvme:
            continue
        shard.shared.pop(holders.places, None)
        places = (tuple(one for one in host if one != node), tuple(one for one in nvme if one != node))
        holders.places = places
        if places == _NOWHERE:
            nowhere = True
        else:
            shard.shared.setdefault(places, holders)
    if nowhere:
        for key in [key for key, holders in shard.entries.items() if holders.places == _NOWHERE]:
            del shard.entries[key]


def _leave(known: dict[bytes, _Holders] | dict[bytes, None], most: int) -> None:
    """Keep the latest: the front of a dict is slow to find, so that many leave at once."""
    if len(known) > most:
        for key in list(islice(known, len(known) - most + most // LEAVE_AT_ONCE)):
            del known[key]
