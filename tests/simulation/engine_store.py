"""What lies below the engine in the simulator: blocks by key, in two tiers, which may vanish, rot or be refused.

Knows nothing of slots and connections (world.py tests the real core): here it only has to be as unreliable as a cache
may be. Also the link's records of what it has under way. A payload is what a block held, as in engine_device.py, one
tuple per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tournant.kvstore.block import Version
from tournant.workers.transfer_messages import HOST, NVME, Load, Save, Stash, Unstash

if TYPE_CHECKING:
    from tests.simulation.engine_world import EngineWorld

Payload = tuple[tuple[int, ...], ...]


@dataclass(eq=False, slots=True)
class Stored:
    """One block. pins: reads that need it where it is; corrupt: its bytes changed under the checksum."""

    key: bytes
    version: Version
    payload: Payload
    tier: int
    pins: int = 0
    corrupt: bool = False
    gone: bool = False


class SimStore:
    """A node store with room for so many blocks per tier."""

    def __init__(self, world: EngineWorld, host_blocks: int, nvme_blocks: int) -> None:
        self.world = world
        self.room = {HOST: host_blocks, NVME: nvme_blocks}
        self.blocks: dict[bytes, Stored] = {}
        self.versions: set[Version] = set()
        self.incarnation = 1
        self.lent: dict[int, int] = {}  # credit by link, as long as its process lives

    def put(self, key: bytes, version: Version, payload: Payload) -> bool:
        """Take a block. False: refused. I3: a version names one write."""
        if version in self.versions:
            self.world.violated("I3", f"{version} is written twice")
        self.versions.add(version)
        if self.world.strikes("refused save", 6):
            return False
        old = self.blocks.get(key)
        if old is not None and old.pins:
            return True
        if old is not None:
            self._drop(old)
        if not self._make_room(HOST):
            return False
        self.blocks[key] = Stored(key, version, payload, HOST)
        return True

    def find(self, keys: tuple[bytes, ...]) -> list[Stored]:
        """The leading run that is here."""
        found: list[Stored] = []
        for key in keys:
            stored = self.blocks.get(key)
            if stored is None:
                break
            found.append(stored)
        return found

    def promote(self, stored: Stored) -> bool:
        """Bring a block into RAM. False: lost meanwhile, or no room."""
        if stored.gone:
            return False
        if stored.tier == NVME:
            if not self._make_room(HOST):
                return False
            stored.tier = HOST
        return True

    def lose(self, stored: Stored) -> None:
        """Gone, pinned or not: pins have a limit, and disks fail."""
        self._drop(stored)

    def lose_any(self, count: int) -> None:
        """Blocks leave, as other engines need the room."""
        for _ in range(min(count, len(self.blocks))):
            self._drop(self.world.rng.choice(list(self.blocks.values())))

    def rot_any(self) -> None:
        """Bits of one block flip."""
        if self.blocks:
            self.world.rng.choice(list(self.blocks.values())).corrupt = True

    def restart(self, *, keep: bool) -> None:
        """A new process; `keep`: what lay on NVMe is found again."""
        self.incarnation += 1
        self.lent.clear()
        for stored in list(self.blocks.values()):
            stored.pins = 0
            if not keep or stored.tier == HOST:
                self._drop(stored)

    def _make_room(self, tier: int) -> bool:
        held = [stored for stored in self.blocks.values() if stored.tier == tier]
        if len(held) < self.room[tier]:
            return True
        free = [stored for stored in held if not stored.pins]
        if not free:
            return False
        victim = self.world.rng.choice(free)
        if tier == HOST and self.room[NVME] and self._make_room(NVME):
            victim.tier = NVME
        else:
            self._drop(victim)
        return True

    def _drop(self, stored: Stored) -> None:
        stored.gone = True
        if self.blocks.get(stored.key) is stored:
            del self.blocks[stored.key]


@dataclass(eq=False, slots=True)
class Reading:
    """A read that has not ended. progress: good blocks of the load, per rank; busy: ranks that still copy."""

    number: int
    keys: tuple[bytes, ...]
    since: float
    found: list[Stored] | None = None
    wanted: int | None = None
    fetched: int | None = None
    load: Load | None = None
    progress: list[int] = field(default_factory=list)
    told: int = 0
    busy: int = 0
    corrupt: int = 0
    ending: bool = False


@dataclass(eq=False, slots=True)
class Copying:
    """A save, stash or unstash whose copies go on. payloads: per rank, contents of its blocks."""

    order: Save | Stash | Unstash
    blocks: tuple[int, ...]
    since: float
    busy: int
    payloads: list[list[tuple[int, ...]]]
    fails: bool = False
