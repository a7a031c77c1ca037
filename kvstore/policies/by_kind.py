"""Priority by kind: large and rarely read again first, small and hot last, least recently used within a kind.

Owns which kind a block is of; each kind has a list of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.policies.eviction import BlockInfo, EvictionPolicy, Kind
from tournant.kvstore.policies.lru import Lru

LEAVING_ORDER = (Kind.LARGE, Kind.OUTPUT, Kind.PROMPT, Kind.SMALL)


class ByKind(EvictionPolicy):
    """All blocks of one kind leave before the first of the next one."""

    def __init__(self) -> None:
        self._lists = {int(kind): Lru() for kind in LEAVING_ORDER}
        self._list_of: dict[int, Lru] = {}

    def insert(self, block: int, info: BlockInfo, now_us: int) -> None:
        """See EvictionPolicy. A kind that is not a `Kind` counts as PROMPT."""
        if block in self._list_of:
            raise InvariantViolation(f"block {block} is inserted twice")
        found = self._lists.get(info.kind, self._lists[Kind.PROMPT])
        found.insert(block, info, now_us)
        self._list_of[block] = found

    def touch_run(self, blocks: Sequence[int], now_us: int) -> None:
        """See EvictionPolicy."""
        for block in blocks:
            found = self._list_of.get(block)
            if found is None:
                raise InvariantViolation(f"block {block} is touched and not resident")
            found.touch_run((block,), now_us)

    def remove(self, block: int) -> None:
        """See EvictionPolicy."""
        found = self._list_of.pop(block, None)
        if found is None:
            raise InvariantViolation(f"block {block} is removed and not resident")
        found.remove(block)

    def victims(self) -> Iterator[int]:
        """See EvictionPolicy."""
        for found in self._lists.values():
            yield from found.victims()

    def __len__(self) -> int:
        return len(self._list_of)

    def validate(self) -> None:
        """See EvictionPolicy."""
        for found in self._lists.values():
            for block in found.victims():
                if self._list_of.get(block) is not found:
                    raise InvariantViolation(f"block {block} is in the list of another kind")
        if sum(map(len, self._lists.values())) != len(self._list_of):
            raise InvariantViolation("a block is missing in the list of its kind")
