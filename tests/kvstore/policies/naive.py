"""Slow twins of the eviction policies, each a direct reading of its rule, and one driver for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tournant.kvstore.policies.by_kind import LEAVING_ORDER
from tournant.kvstore.policies.cost_aware import SCALE
from tournant.kvstore.policies.eviction import BlockInfo, EvictionPolicy


@dataclass
class Known:
    """What a naive model keeps of a block. used: number of the last use; entered: number of the insertion."""

    info: BlockInfo
    entered: int
    used: int
    uses: int = 1
    value: int = 0


@dataclass
class Naive:
    """Sorts everything whenever a victim is asked for."""

    blocks: dict[int, Known] = field(default_factory=dict)
    clock: int = 0
    age: int = 0
    left: int = 0

    def insert(self, block: int, info: BlockInfo) -> None:
        self.clock += 1
        self.blocks[block] = Known(info, self.clock, self.clock)
        self.entered(self.blocks[block])

    def touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.clock += 1
            known = self.blocks[block]
            known.used = self.clock
            known.uses += 1
            self.touched(known)

    def remove(self, block: int) -> None:
        lowest = min(known.value for known in self.blocks.values())
        known = self.blocks.pop(block)
        self.removed(known, lowest)

    def order(self) -> list[int]:
        return sorted(self.blocks, key=lambda block: (self.rank(self.blocks[block]), self.blocks[block].used))

    def entered(self, known: Known) -> None: ...

    def touched(self, known: Known) -> None: ...

    def removed(self, known: Known, lowest: int) -> None: ...

    def rank(self, known: Known) -> int:
        return 0


class NaiveLru(Naive):
    pass


class NaiveKind(Naive):
    def rank(self, known: Known) -> int:
        return [int(kind) for kind in LEAVING_ORDER].index(known.info.kind)


class NaiveLfu(Naive):
    def entered(self, known: Known) -> None:
        known.value = self.age + 1

    def touched(self, known: Known) -> None:
        known.value = self.age + known.uses

    def removed(self, known: Known, lowest: int) -> None:
        if known.value == lowest:
            self.age = max(self.age, known.value)

    def rank(self, known: Known) -> int:
        return known.value


class NaiveCost(NaiveLfu):
    def entered(self, known: Known) -> None:
        known.value = self.age + self.worth(known)

    def touched(self, known: Known) -> None:
        known.value = self.age + self.worth(known) * min(known.uses, 4)

    def worth(self, known: Known) -> int:
        return max(1, known.info.cost_us * SCALE // known.info.size_bytes)


class NaiveHeat(Naive):
    """value: epoch + heat; `age` is the epoch."""

    def entered(self, known: Known) -> None:
        known.value = self.age

    def touched(self, known: Known) -> None:
        known.value = min(max(known.value, self.age) + 1, self.age + 3)

    def removed(self, known: Known, lowest: int) -> None:
        self.left += 1
        if self.left > len(self.blocks):
            self.left = 0
            self.age += 1

    def rank(self, known: Known) -> int:
        return known.value


class Driver:
    """Requests over a small cache, as a store core makes them; checks what holds for every policy after each."""

    def __init__(self, policy: EvictionPolicy, capacity: int, naive: Naive | None = None) -> None:
        self.policy = policy
        self.naive = naive
        self.capacity = capacity
        self.block_of: dict[int, int] = {}
        self.key_of: dict[int, int] = {}
        self.next_block = 0
        self.log: list[int] = []

    def request(self, keys: Sequence[int], info: BlockInfo, now_us: int, skip: int = 0) -> None:
        """All keys of a chain, head first. skip: victims passed over, as if they were pinned."""
        self.policy.begin_request(keys, now_us)
        run = [self.block_of[key] for key in reversed(keys) if key in self.block_of]
        self.policy.touch_run(run, now_us)
        if self.naive:
            self.naive.touch(run)
        for depth in range(len(keys) - 1, -1, -1):
            if keys[depth] not in self.block_of:
                if len(self.block_of) >= self.capacity:
                    self.evict(skip)
                self.insert(keys[depth], depth, info, now_us)
        self.check()

    def insert(self, key: int, depth: int, info: BlockInfo, now_us: int) -> None:
        self.next_block += 1
        self.block_of[key], self.key_of[self.next_block] = self.next_block, key
        info = BlockInfo(info.size_bytes, info.cost_us, info.kind, depth, key)
        self.policy.insert(self.next_block, info, now_us)
        if self.naive:
            self.naive.insert(self.next_block, info)

    def evict(self, skip: int) -> None:
        victims = self.policy.victims()
        passed = [next(victims) for _ in range(min(skip + 1, len(self.block_of)))]
        self.remove(passed[-1])

    def remove(self, block: int) -> None:
        self.log.append(block)
        self.policy.remove(block)
        if self.naive:
            self.naive.remove(block)
        del self.block_of[self.key_of.pop(block)]

    def check(self) -> None:
        self.policy.validate()
        order = list(self.policy.victims())
        assert sorted(order) == sorted(self.key_of), "every resident block once"
        assert len(self.policy) == len(order)
        assert list(self.policy.victims()) == order, "asking changes nothing"
        if self.naive:
            assert order == self.naive.order()
