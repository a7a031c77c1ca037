"""Which tile of an attention matrix lies where, and which one moves next: the decisions of a score arena.

Owns sizes, places, pins and the order of reads; knows no bytes, threads, clock or disk. score_arena.py asks `plan`
after every event and carries the moves out.

Tiles are made on the device, pinned; `release` lets them move. Two rules drive them down: above `START` of a tier's
capacity its tiles leave until `STOP` is reached, one at a time, and `MAX_DOWN` at a time above `HURRY`; and a tile that
is wanted on the device, by `add` or `pin`, makes itself room. What leaves is what frees most bytes per read still to
come, then what is read last; KV goes only when nothing else is left. What is read next comes back up while its tier is
below `START`.

Invariants (`validate`):
 1. A tile is in exactly one tier, or on its way between two that are next to each other and counted in both.
 2. No tier holds more than its capacity; sizes add up.
 3. A tile that moves is not pinned, and none that is pinned or moves is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from tournant.kvstore.errors import InvariantViolation

START, HURRY, STOP = 0.70, 0.90, 0.50
MAX_DOWN, MAX_UP = 4, 2
LOOK_AHEAD = 16  # reads that prefetching looks at
Key = Hashable


class Tier(IntEnum):
    """From the fastest down. BOTTOM is a disk; its room is the disk's business."""

    DEVICE = 0
    HOST = 1
    BOTTOM = 2


class Kind(Enum):
    """What a tile holds."""

    SCORES = "scores"
    KV = "kv"


@dataclass(frozen=True, slots=True)
class Move:
    """A copy to be made from one tier to the one next to it."""

    key: Key
    num_bytes: int
    source: Tier
    target: Tier


@dataclass(slots=True)
class _Tile:
    num_bytes: int
    kind: Kind
    tier: Tier = Tier.DEVICE
    move: Move | None = None
    pins: int = 1
    was_read: bool = False
    reads: deque[int] = field(default_factory=deque)  # places in the schedule

    @property
    def rests(self) -> bool:
        return self.move is None and not self.pins


class TileLedger:
    """The tiles of one arena.

    device_bytes, host_bytes: capacities; host_bytes 0: nothing leaves the device; bottom: whether there is a disk below
    the host; forgets: tiles that reach the bottom are done with, as in an export.
    """

    def __init__(self, device_bytes: int, host_bytes: int, *, bottom: bool, forgets: bool = False) -> None:
        if bottom and not host_bytes:
            raise ValueError("tiles reach the bottom through the host: host_bytes must be above 0")
        self._capacity = {Tier.DEVICE: device_bytes, **({Tier.HOST: host_bytes} if host_bytes else {})}
        self._tiers = [*self._capacity, *([Tier.BOTTOM] if bottom else [])]
        self._forgets = forgets
        self._tiles: dict[Key, _Tile] = {}
        self.used = dict.fromkeys(self._tiers, 0)
        self._leaving = dict.fromkeys(self._tiers, 0)
        self._moving: set[Key] = set()
        self._draining: set[Tier] = set()
        self._flushing = False
        self._schedule: Sequence[Key] = ()
        self._next_read = 0
        self._unknown: dict[Key, deque[int]] = {}  # reads of tiles that are not there yet
        self._wanted: Key | None = None  # a tile below the device that is waited for
        self._wanted_bytes = 0  # on the device, for a new tile

    def schedule(self, keys: Sequence[Key]) -> None:
        """Say in which order tiles will be read, once, before they are added."""
        if self._tiles:
            raise InvariantViolation("the order of reads must be known before the first tile is there")
        self._schedule = keys
        for place, key in enumerate(keys):
            self._unknown.setdefault(key, deque()).append(place)

    def add(self, key: Key, num_bytes: int, kind: Kind = Kind.SCORES) -> bool:
        """Take room on the device for a new tile, pinned. False: there is none; `plan` makes some."""
        if key in self._tiles:
            raise InvariantViolation(f"tile {key} is there already")
        if not self._fits(Tier.DEVICE, num_bytes):
            self._wanted_bytes = num_bytes
            return False
        self._wanted_bytes = 0
        self._tiles[key] = _Tile(num_bytes, kind, reads=self._unknown.pop(key, deque()))
        self.used[Tier.DEVICE] += num_bytes
        return True

    def pin(self, key: Key) -> bool:
        """Read the tile that the schedule says is next. False: it is not on the device; `plan` brings it."""
        tile = self._tiles[key]
        if self._next_read >= len(self._schedule) or self._schedule[self._next_read] != key:
            raise InvariantViolation(f"tile {key} is not the next one of the schedule")
        if tile.tier != Tier.DEVICE or tile.move is not None:
            self._wanted = key
            return False
        self._wanted = None
        self._next_read += 1
        tile.reads.popleft()
        tile.was_read = True
        tile.pins += 1
        return True

    def release(self, key: Key) -> None:
        """The end of writing or reading a tile."""
        tile = self._tiles[key]
        if not tile.pins:
            raise InvariantViolation(f"tile {key} is released, but not pinned")
        tile.pins -= 1

    def knows(self, key: Key) -> bool:
        """Whether there is such a tile."""
        return key in self._tiles

    def spent(self, key: Key) -> bool:
        """Whether the last read of a tile is over."""
        tile = self._tiles[key]
        return tile.was_read and not tile.reads and tile.rests

    def drop(self, key: Key) -> Tier:
        """Forget a tile that rests; says where it lay."""
        tile = self._tiles[key]
        if not tile.rests:
            raise InvariantViolation(f"tile {key} is dropped while it is {'pinned' if tile.pins else 'copied'}")
        self.used[tile.tier] -= tile.num_bytes
        del self._tiles[key]
        return tile.tier

    def flush(self) -> None:
        """From now on every tile goes down to the last tier as soon as it rests."""
        self._flushing = True

    @property
    def num_moving(self) -> int:
        """Moves that were planned and have neither landed nor failed."""
        return len(self._moving)

    @property
    def settled(self) -> bool:
        """Whether all tiles rest in the last tier."""
        return all(tile.rests and tile.tier == self._tiers[-1] for tile in self._tiles.values())

    def landed(self, move: Move) -> None:
        """A move was carried out: the tile is where it was sent, and the room it left is free."""
        tile = self._end(move)
        self.used[move.source] -= move.num_bytes
        tile.tier = move.target
        if self._forgets and move.target == Tier.BOTTOM:
            self.drop(move.key)

    def failed(self, move: Move) -> None:
        """A move was not carried out: the tile is where it was."""
        self._end(move)
        self.used[move.target] -= move.num_bytes

    def plan(self) -> list[Move]:
        """The moves to begin now, in order of urgency; they count as begun."""
        moves: list[Move] = []
        if self._wanted is not None:
            self._bring(self._wanted, moves)
        if self._wanted_bytes:
            self._make_room(Tier.DEVICE, self._wanted_bytes, moves)
        for tier in self._tiers[:-1]:
            self._drain(tier, moves)
        if self._wanted is None and not self._flushing:
            self._prefetch(moves)
        return moves

    def _bring(self, key: Key, moves: list[Move]) -> None:
        tile = self._tiles[key]
        if tile.move is not None or tile.tier == Tier.DEVICE:
            return
        above = Tier(tile.tier - 1)
        if self._fits(above, tile.num_bytes):
            self._begin(key, above, moves)
        else:
            self._make_room(above, tile.num_bytes, moves)

    def _make_room(self, tier: Tier, num_bytes: int, moves: list[Move]) -> None:
        """Send tiles down until so many bytes of a tier are free, or will be."""
        for key in list(self._victims(tier)):
            if self.used[tier] - self._leaving[tier] + num_bytes <= self._capacity[tier]:
                return
            if not self._send_down(key, moves):
                return

    def _drain(self, tier: Tier, moves: list[Move]) -> None:
        capacity = self._capacity[tier]
        if self.used[tier] >= START * capacity:
            self._draining.add(tier)
        copiers = MAX_DOWN if self._flushing or self.used[tier] >= HURRY * capacity else 1
        victims: Iterator[Key] | None = None
        while True:
            if self.used[tier] - self._leaving[tier] <= STOP * capacity:
                self._draining.discard(tier)
            if not self._flushing and tier not in self._draining:
                return
            if sum(1 for key in self._moving if self._leaves(key, tier)) >= copiers:
                return
            victims = iter(list(self._victims(tier))) if victims is None else victims
            key = next(victims, None)
            if key is None or not self._send_down(key, moves):
                return

    def _leaves(self, key: Key, tier: Tier) -> bool:
        move = self._tiles[key].move
        return move is not None and move.source == tier and move.target > tier

    def _send_down(self, key: Key, moves: list[Move]) -> bool:
        """Begin to move a tile one tier down; where that is full, room is made there and False says not now."""
        tile = self._tiles[key]
        if tile.tier == self._tiers[-1]:
            return False
        below = Tier(tile.tier + 1)
        if not self._fits(below, tile.num_bytes + self._kept_free(below)):
            self._make_room(below, tile.num_bytes + self._kept_free(below), moves)
            return False
        self._begin(key, below, moves)
        return True

    def _kept_free(self, tier: Tier) -> int:
        """Bytes of a tier that are for the tile that is waited for, on its way up through it."""
        if self._wanted is None or tier != Tier.HOST:
            return 0
        tile = self._tiles[self._wanted]
        return tile.num_bytes if tile.tier == Tier.BOTTOM and tile.move is None else 0

    def _prefetch(self, moves: list[Move]) -> None:
        rising = sum(1 for key in self._moving if (move := self._tiles[key].move) and move.target < move.source)
        for place in range(self._next_read, min(self._next_read + LOOK_AHEAD, len(self._schedule))):
            if rising >= MAX_UP:
                return
            key = self._schedule[place]
            tile = self._tiles.get(key)
            if tile is None or not tile.rests or tile.tier == Tier.DEVICE:
                continue
            above = Tier(tile.tier - 1)
            if above not in self._draining and self.used[above] + tile.num_bytes < START * self._capacity[above]:
                self._begin(key, above, moves)
                rising += 1

    def _victims(self, tier: Tier) -> Iterator[Key]:
        """Tiles of a tier that may leave it, those first whose going helps most and hurts least."""
        resting = [
            (key, tile) for key, tile in self._tiles.items() if tile.tier == tier and tile.rests and key != self._wanted
        ]
        resting.sort(key=lambda item: self._rank(item[1]))
        return (key for key, _ in resting)

    @staticmethod
    def _rank(tile: _Tile) -> tuple[bool, float, int]:
        worth = tile.num_bytes / (1 + len(tile.reads))
        return tile.kind is Kind.KV, -worth, -tile.reads[0] if tile.reads else 0

    def _fits(self, tier: Tier, num_bytes: int) -> bool:
        capacity = self._capacity.get(tier)
        return capacity is None or self.used[tier] + num_bytes <= capacity

    def _begin(self, key: Key, target: Tier, moves: list[Move]) -> None:
        tile = self._tiles[key]
        tile.move = move = Move(key, tile.num_bytes, tile.tier, target)
        self.used[target] += tile.num_bytes
        self._leaving[tile.tier] += tile.num_bytes
        self._moving.add(key)
        moves.append(move)

    def _end(self, move: Move) -> _Tile:
        tile = self._tiles[move.key]
        if tile.move != move:
            raise InvariantViolation(f"{move} has ended, but it is {tile.move} that was begun")
        tile.move = None
        self._leaving[move.source] -= move.num_bytes
        self._moving.discard(move.key)
        return tile

    def places(self) -> dict[Key, tuple[Tier, Tier | None]]:
        """Where every tile is, and where it is on its way to."""
        return {key: (tile.tier, tile.move.target if tile.move else None) for key, tile in self._tiles.items()}

    def validate(self) -> None:
        """Recount everything. Raises InvariantViolation."""
        used, leaving = dict.fromkeys(self._tiers, 0), dict.fromkeys(self._tiers, 0)
        for key, tile in self._tiles.items():
            used[tile.tier] += tile.num_bytes
            if (tile.move is not None) != (key in self._moving):
                raise InvariantViolation(f"tile {key}: its move is {tile.move}, but it is counted otherwise")
            if tile.move is not None:
                if tile.pins or tile.move.source != tile.tier or abs(tile.move.target - tile.tier) != 1:
                    raise InvariantViolation(f"tile {key} of {tile.tier.name} with {tile.pins} pins moves: {tile.move}")
                used[tile.move.target] += tile.num_bytes
                leaving[tile.tier] += tile.num_bytes
            if tile.pins < 0 or (tile.pins and tile.tier != Tier.DEVICE):
                raise InvariantViolation(f"tile {key} of {tile.tier.name} has {tile.pins} pins")
            if list(tile.reads) != sorted(tile.reads) or (tile.reads and tile.reads[0] < self._next_read):
                raise InvariantViolation(f"tile {key} has reads {tile.reads}; the next one is {self._next_read}")
        if used != self.used or leaving != self._leaving or not self._moving <= self._tiles.keys():
            raise InvariantViolation(f"counted {used}, leaving {leaving}; booked {self.used}, {self._leaving}")
        for tier, capacity in self._capacity.items():
            if used[tier] > capacity:
                raise InvariantViolation(f"{tier.name} holds {used[tier]} bytes of {capacity}")
