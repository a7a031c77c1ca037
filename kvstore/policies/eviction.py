"""What every eviction policy is: an order in which resident blocks leave.

Owns the protocol and what it knows of a block. The store core owns which blocks are resident, pinned and where they
lie; a policy sees small integers and times, and never bytes.

Invariants:
 1. A policy holds exactly the blocks inserted and not yet removed, and `victims` names each of them once.
 2. The order depends on the calls and their arguments alone: no clock, no random number, no order of a hash.
 3. Blocks of one request leave tail first, as far as the policy knows their order: a block whose ancestors are gone
    can never be hit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Kind(IntEnum):
    """What a block holds, as far as it tells how long to keep it.

    PROMPT: KV that a prompt was computed into; OUTPUT: KV of generated tokens; LARGE: large and rarely read again, such
    as the states of images; SMALL: small and hot, such as the states that a whole sequence is resumed from.
    """

    PROMPT = 0
    OUTPUT = 1
    LARGE = 2
    SMALL = 3


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What a policy may know of a block when it comes in.

    size_bytes: what it occupies; cost_us: time to compute it again, the same for all blocks of a request, because dear
    tails would outlive their heads; kind: a `Kind`; depth: place in its chain, the first block is 0; key: the name that
    outlives eviction, empty = unknown.
    """

    size_bytes: int = 1
    cost_us: int = 1
    kind: int = Kind.PROMPT
    depth: int = 0
    key: Hashable = b""


class EvictionPolicy(Protocol):
    """An order of leaving. Times are microseconds of one clock that never goes back.

    Every method raises InvariantViolation when it is told of a block that it does not hold, or to insert one that it
    does; nothing else is promised of the policy afterwards.
    """

    def begin_request(self, keys: Sequence[Hashable], now_us: int) -> None:
        """A request asks for the chain `keys`, head first, whether resident or not. Comes before its `touch_run`."""
        return

    def insert(self, block: int, info: BlockInfo, now_us: int) -> None:
        """A block becomes resident. Those of one request come tail first where the caller can choose."""
        ...

    def touch_run(self, blocks: Sequence[int], now_us: int) -> None:
        """A request used these resident blocks, tail first. At most once for each request."""
        ...

    def remove(self, block: int) -> None:
        """A block leaves, whether it was a victim or is dropped."""
        ...

    def victims(self) -> Iterator[int]:
        """Blocks, the one to lose first before all others. Valid until the next call of any method."""
        ...

    def __len__(self) -> int:
        """Blocks held."""
        ...

    def validate(self) -> None:
        """Recount from scratch. Raises InvariantViolation."""
        ...
