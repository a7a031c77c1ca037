"""Which engines there are, as replicas say it of themselves. Pure: time is an argument, in microseconds.

Owns the leases. It is what frontends find engines by, not what they believe: whether an engine serves, its stream says.
Nothing here is kept for long, so a registry that begins again is whole as soon as every replica has spoken once.

Invariants:
 1. A member is known for `lease_us` after its last word, or until it leaves; one that has left is not heard again.
 2. `version` grows with every change of what is known, and begins at a number that no other registry had: (incarnation,
    version) names one state for ever. A word that says nothing new changes nothing.
 3. Memory is bounded: `max_members`, and as many names of those that have left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["serving", "draining"]


class TooManyMembers(RuntimeError):  # noqa: N818 - names the fact
    """There are as many engines as the registry holds."""


@dataclass(frozen=True, slots=True)
class Member:
    """An engine and where its streams are served. replica: a name that no other replica ever has; token: what frontends
    must say; node: Ray's id of its node; weights_id: in hex; epoch: of its weights.
    """

    replica: str
    host: str
    port: int
    token: bytes
    node: str
    weights_id: str
    epoch: int
    state: State = "serving"

    def __repr__(self) -> str:
        return f"<engine of {self.replica} at {self.host}:{self.port}, {self.state}>"  # without its token


@dataclass(frozen=True, slots=True)
class Members:
    """Everybody, in the order in which they came, and which state of the registry this is."""

    incarnation: int
    version: int
    members: tuple[Member, ...]

    @property
    def known(self) -> tuple[int, int]:
        """What to ask for news since."""
        return self.incarnation, self.version


@dataclass(frozen=True, slots=True)
class MembersConfig:
    """lease_us: how long a silent member is believed in; max_members: at most so many."""

    lease_us: int = 15_000_000
    max_members: int = 4096


class EngineMembers:
    """See the module. incarnation: a number that no other registry of the application had."""

    def __init__(self, incarnation: int, config: MembersConfig | None = None) -> None:
        self.config = config or MembersConfig()
        self._incarnation = incarnation
        self._version = 0
        self._members: dict[str, tuple[Member, int]] = {}  # replica -> what it said last, and until when it is believed
        self._left: dict[str, None] = {}  # the first that left first

    @property
    def known(self) -> tuple[int, int]:
        """Names what is known now."""
        return self._incarnation, self._version

    def hear(self, now_us: int, member: Member) -> None:
        """A replica registers, changes, or only lives. Raises TooManyMembers when it is new and there is no room."""
        self.expire(now_us)
        if member.replica in self._left:
            return
        known = self._members.get(member.replica)
        if known is None and len(self._members) >= self.config.max_members:
            raise TooManyMembers(f"there are {len(self._members)} engines, of at most {self.config.max_members}")
        self._members[member.replica] = (member, now_us + self.config.lease_us)
        self._version += known is None or known[0] != member

    def leave(self, now_us: int, replica: str) -> None:
        """A replica ends; what it says from now on was said before. Unknown ones are remembered too."""
        self.expire(now_us)
        self._version += self._members.pop(replica, None) is not None
        self._left[replica] = None
        if len(self._left) > self.config.max_members:
            del self._left[next(iter(self._left))]

    def expire(self, now_us: int) -> None:
        """Forget whose lease is over."""
        for replica in [name for name, (_, until) in self._members.items() if until <= now_us]:
            del self._members[replica]
            self._version += 1

    def next_expiry_us(self) -> int | None:
        """When the first lease is over, None without members."""
        return min((until for _, until in self._members.values()), default=None)

    def members(self) -> Members:
        """Everybody."""
        return Members(self._incarnation, self._version, tuple(member for member, _ in self._members.values()))
