"""A link and the store below it inside the test process: orders are carried out when they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.workers.fake_runner import FakeRunner
from tournant.workers.transfer_messages import (
    HOST,
    NVME,
    REMOTE,
    Attached,
    Copied,
    Detached,
    DropStash,
    EndRead,
    Event,
    Fetch,
    Fetched,
    Found,
    Lent,
    Load,
    Lookup,
    Order,
    ReadEnded,
    Save,
    Saved,
    Stash,
    Stashed,
    Unstash,
    Unstashed,
    Used,
)

BLOCK_BYTES = 1000
Image = dict[int, int]  # offset in the block -> KV


@dataclass
class FakeStore:
    """What several fake links share. elsewhere: blocks that only another node has until they are fetched; used: chains
    whose requests have ended, in order.
    """

    images: dict[bytes, Image] = field(default_factory=dict)
    on_nvme: set[bytes] = field(default_factory=set)
    elsewhere: set[bytes] = field(default_factory=set)
    used: list[tuple[bytes, ...]] = field(default_factory=list)
    versions: set[tuple[int, int]] = field(default_factory=set)


class FakeLink:
    """See `Link`. credit: of each kind of block; hold: types of orders that are not answered until `let_go`; speed:
    bytes per second it claims; free: slots that it has lent and no order has taken.
    """

    def __init__(
        self, runner: FakeRunner, store: FakeStore, credit: tuple[int, ...] = (16,), speed: float = 1e12
    ) -> None:
        self.runner = runner
        self.store = store
        self.credit = credit
        self.free = list(credit)
        self.speed = speed
        self.hold: tuple[type, ...] = ()
        self.held: list[Order] = []
        self.orders: list[Order] = []
        self.fail_saves = False
        self._events: list[Event] = [Attached(1, credit, BLOCK_BYTES, 1000 * BLOCK_BYTES)]
        self._reads: dict[int, tuple[bytes, ...]] = {}
        self._stashes: dict[int, Image] = {}

    def submit(self, orders: Sequence[Order]) -> None:
        """See `Link`."""
        for order in orders:
            self.orders.append(order)
            self._take_slots(order)
            if isinstance(order, self.hold):
                self.held.append(order)
            else:
                self._carry_out(order)

    def _take_slots(self, order: Order) -> None:
        if isinstance(order, Save):
            self.free[order.kind] -= len(order.entries)
            writers = {entry.version.writer_id for entry in order.entries}
            assert len(writers) == 1, "one kind, one writer"
            assert (writers == {1}) == (order.kind == 0)
        elif isinstance(order, Stash):
            self.free[0] -= 1
        assert min(self.free) >= 0, f"{order} has no credit"

    def let_go(self) -> None:
        """Answer what was held."""
        held, self.held = self.held, []
        for order in held:
            self._carry_out(order)

    def take_events(self) -> list[Event]:
        """See `Link`."""
        events, self._events = self._events, []
        return events

    def close(self, flush_s: float) -> None:
        """See `Link`."""

    def lose(self) -> None:
        """The store dies and comes back empty."""
        self._events += [ReadEnded(read, 0) for read in self._reads]
        self._reads.clear()
        self._stashes.clear()
        self.store.images.clear()
        self.free = list(self.credit)
        self._events += [Detached("lost"), Attached(2, self.credit, BLOCK_BYTES, 1000 * BLOCK_BYTES)]

    def _tier(self, key: bytes) -> int:
        if key in self.store.elsewhere:
            return REMOTE
        return NVME if key in self.store.on_nvme else HOST

    def _image(self, block: int) -> Image:
        return {o: self.runner.kv[block, o] for o in range(self.runner.block_tokens) if (block, o) in self.runner.kv}

    def _write(self, block: int, image: Image) -> None:
        for offset in range(self.runner.block_tokens):
            self.runner.kv.pop((block, offset), None)
        self.runner.kv |= {(block, offset): value for offset, value in image.items()}

    def _carry_out(self, order: Order) -> None:
        match order:
            case Lookup(read, keys):
                found = tuple(key for key in keys if key in self.store.images)
                missing = next((i for i, key in enumerate(keys) if key not in self.store.images), len(keys))
                self._reads[read] = found[:missing]
                self._events.append(Found(read, bytes(map(self._tier, found[:missing])), 0.0))
            case Fetch(read, count) if read in self._reads:
                tiers = bytes(map(self._tier, self._reads[read][:count]))
                num_bytes, remote = tiers.count(NVME) * BLOCK_BYTES, tiers.count(REMOTE)
                seconds = remote * BLOCK_BYTES / self.speed
                self.store.elsewhere.difference_update(self._reads[read][:count])
                far = (remote, remote * BLOCK_BYTES, seconds)
                self._events.append(Fetched(read, count, num_bytes, seconds + num_bytes / self.speed, *far))
            case Load(read, skip, blocks) if read in self._reads:
                good = 0
                for block, key in zip(blocks, self._reads.pop(read)[skip:], strict=False):
                    if key not in self.store.images:
                        break
                    self._write(block, self.store.images[key])
                    good += 1
                num_bytes = good * BLOCK_BYTES
                self._events.append(ReadEnded(read, good, num_bytes, num_bytes / self.speed))
            case EndRead(read) if any(isinstance(held, Load) and held.read == read for held in self.held):
                return  # it copies: the read ends with that
            case EndRead(read) if self._reads.pop(read, None) is not None:
                self._events.append(ReadEnded(read, 0))
            case Save(save, entries, _, kind):
                for entry in entries if not self.fail_saves else ():
                    name = (entry.version.writer_id, entry.version.counter)
                    assert name not in self.store.versions
                    self.store.versions.add(name)
                    image = self._image(entry.block)
                    assert len(image) == self.runner.block_tokens
                    self.store.images[entry.key] = image
                num_bytes = len(entries) * BLOCK_BYTES
                self._events.append(Copied(save, num_bytes, num_bytes / self.speed))
                self.free[kind] += len(entries)
                self._events.append(Saved(save, not self.fail_saves, (), len(entries)))
            case Used(keys):
                self.store.used.append(keys)
            case Stash(stash, block):
                self._stashes[stash] = self._image(block)
                self._events += [Copied(stash, BLOCK_BYTES, 0.0), Stashed(stash, True)]
            case Unstash(stash, block):
                image = self._stashes.pop(stash, None)
                if image is not None:
                    self._write(block, image)
                    self.free[0] += 1
                self._events.append(Unstashed(stash, image is not None, int(image is not None)))
            case DropStash(stash) if self._stashes.pop(stash, None) is not None:
                self.free[0] += 1
                self._events.append(Lent(1))
