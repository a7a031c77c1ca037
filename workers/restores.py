"""What comes back from lower tiers: lookups of waiting sequences, what is fetched for them, what is on its way into
device blocks.

Owns a `Read` for each sequence that is looked up or restored, the orders for it, and the blocks that a load writes.
Does not own sequences, block tables or admission (`Scheduler`); says when a sequence should wait, and how many blocks
it would get. Pure: time is an argument, in seconds.

Invariants (checked by `validate`):
 1. A block that a load may still write is held until `ReadEnded`, whatever happened to its sequence.
 2. A sequence waits at most for lookup_ms, then for restore_ms, MAX_LOOKUPS times, and once more for a load; with
    several batches in flight at least as many turns, as a rank of a later stage hears of a lookup behind these.
 3. Nothing is looked up ahead while waiting sequences want prefetch_share of the host pool; the first may have more.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tournant.kvstore.errors import InvariantViolation
from tournant.workers.block_manager import BlockManager
from tournant.workers.cost_model import CostModel
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.sequence import Sequence as Answer
from tournant.workers.tier_counts import Counts
from tournant.workers.transfer_messages import (
    HOST,
    NVME,
    REMOTE,
    EndRead,
    Fetch,
    Fetched,
    Found,
    Load,
    Loaded,
    Lookup,
    Order,
    ReadEnded,
)

MAX_LOOKUPS = 3  # of a sequence at each start: the device may drop blocks of its prefix while it waits
REFRESH_S = 10.0  # a pin lives longer than this; then it is looked up again


class ReadState(enum.Enum):
    """NOTHING: it was looked up, and there is nothing worth a load. ABANDONED: no sequence wants it any more."""

    LOOKING = "looking"
    FETCHING = "fetching"
    READY = "ready"
    LOADING = "loading"
    NOTHING = "nothing"
    ABANDONED = "abandoned"


_WANTING = (ReadState.LOOKING, ReadState.FETCHING, ReadState.READY)


@dataclass(eq=False, slots=True)
class Read:
    """One lookup and what follows from it. first: place in the chain of its first key; count: blocks it will get, those
    it asks for while nothing is known; skip: of these, what the device had by the time of the load; blocks: device
    blocks that the load may write, those handed to the sequence excluded; good: of the load, known to be right; turns:
    of the engine since the lookup.
    """

    number: int
    answer: Answer
    first: int
    state: ReadState
    deadline: float
    since: float
    tiers: bytes = b""
    count: int = 0
    skip: int = 0
    blocks: list[int] = field(default_factory=list)
    good: int = 0
    over: bool = False
    turns: int = 0
    waiting_nvme: int = 0
    ahead_nvme: int = 0
    waiting_remote: int = 0
    ahead_remote: int = 0
    waiting_host: int = 0
    ahead_host: int = 0


class Restores:
    """See the module. orders, counts: where orders and what is counted go; block_bytes: of a block in a slot;
    most_blocks: of all waiting reads; queues: the scheduler's lists of running, restoring and waiting sequences, which
    it alone changes; least_turns: of the engine that a read is waited for.
    """

    def __init__(
        self, config: OffloadConfig, blocks: BlockManager, costs: CostModel, orders: list[Order], counts: Counts
    ) -> None:
        self.block_bytes = 1
        self.most_blocks = 0
        self.least_turns = 1
        self.queues: tuple[Sequence[Answer], Sequence[Answer], Sequence[Answer]] = ((), (), ())
        self._config = config
        self._blocks = blocks
        self._costs = costs
        self._orders = orders
        self._counts = counts
        self._numbers = itertools.count(1)
        self._open: dict[int, Read] = {}  # until ReadEnded
        self._of: dict[Answer, Read] = {}
        self._lookups: dict[Answer, int] = {}  # since it began to wait
        self._below: dict[Answer, range] = {}  # places of its chain that were found below

    # ---- waiting

    def look_up(self, answer: Answer, first: int, keys: Sequence[bytes], now: float) -> None:
        """Ask what lies below of a chain from place `first` on."""
        read = Read(next(self._numbers), answer, first, ReadState.LOOKING, now + self._config.lookup_ms / 1e3, now)
        read.count = len(keys)
        self._open[read.number] = self._of[answer] = read
        self._lookups[answer] = self._lookups.get(answer, 0) + 1
        self._orders.append(Lookup(read.number, tuple(keys)))
        self._counts.add(lookups=1)

    def has_read(self, answer: Answer, now: float, num_shared: int | None = None) -> bool:
        """Whether a sequence need not be looked up (again) now. num_shared: blocks that the device has of it, if known;
        when it dropped some since the lookup, that is of no use any more.
        """
        read = self._of.get(answer)
        if read is not None and read.state is ReadState.READY and now - read.since > REFRESH_S:
            self._abandon(read)
            self._lookups[answer] -= 1
            return False
        if read is not None and num_shared is not None and read.first > num_shared:
            self._abandon(read)
            read = None
        return read is not None or self._lookups.get(answer, 0) >= MAX_LOOKUPS

    @property
    def has_room(self) -> bool:
        """Whether one more waiting sequence may want blocks."""
        return sum(read.count for read in self._of.values() if read.state in _WANTING) < self.most_blocks

    def expire(self, now: float) -> None:
        """Sequences wait no longer for what has passed its deadline."""
        for read in self._of.values():
            read.turns += 1
            due = now >= read.deadline and read.turns >= self.least_turns
            if due and read.state in (ReadState.LOOKING, ReadState.FETCHING):
                looking = read.state is ReadState.LOOKING
                self._counts.add(late_lookups=int(looking), cut_restores=int(not looking))
                self._give_up(read)

    def restorable(self, answer: Answer, num_shared: int) -> int | None:
        """Blocks after the `num_shared` that the device has which a load would bring now; None: wait a little."""
        read = self._of.get(answer)
        if read is None or read.first > num_shared:
            return 0
        if read.state in (ReadState.LOOKING, ReadState.FETCHING):
            return None
        if read.state is ReadState.READY:
            left = read.count - (num_shared - read.first)
            if left > 0:
                return left
            self._give_up(read)
        return 0

    def is_below(self, answer: Answer, place: int) -> bool:
        """Whether a block of a sequence's chain is known to lie below."""
        return place in self._below.get(answer, ())

    def lost(self) -> None:
        """Nothing lies below any more."""
        self._below.clear()

    def ended(self, answer: Answer) -> None:
        """A sequence has ended, or its chain is another one from now on."""
        self.forget(answer)
        self._below.pop(answer, None)

    def forget(self, answer: Answer) -> None:
        """A sequence starts, ends or is preempted: what was asked for it is not wanted any more."""
        read = self._of.get(answer)
        if read is not None:
            self._abandon(read)
        self._lookups.pop(answer, None)

    def _give_up(self, read: Read) -> None:
        """Nothing will be loaded; the sequence remembers that."""
        self._orders.append(EndRead(read.number))
        read.state, read.count = ReadState.NOTHING, 0
        self._settle_costs(read)

    def _abandon(self, read: Read) -> None:
        if not read.over and read.state not in (ReadState.NOTHING, ReadState.ABANDONED):
            self._orders.append(EndRead(read.number))
        del self._of[read.answer]
        read.state = ReadState.ABANDONED
        if read.over:
            self._release(read)
        self._settle_costs(read)

    # ---- loading

    def load(self, answer: Answer, num_shared: int, blocks: Sequence[int], now: float) -> None:
        """Bring what `restorable` promised into these blocks, whose references become the load's."""
        read = self._of[answer]
        if read.state is not ReadState.READY:
            raise InvariantViolation(f"sequence {answer.arrival} loads although its read is {read.state.value}")
        read.state = ReadState.LOADING
        read.skip = num_shared - read.first
        read.blocks = list(blocks)
        read.since, read.deadline = now, now + self._config.restore_ms / 1e3
        read.waiting_host = len(blocks) * self.block_bytes
        read.ahead_host = self._costs.began(HOST, read.waiting_host)
        self._blocks.become_held(blocks)
        self._orders.append(Load(read.number, read.skip, tuple(blocks)))

    def num_loading(self, answer: Answer) -> int:
        """Blocks of a sequence that are on their way to the device."""
        read = self._of.get(answer)
        return len(read.blocks) if read is not None and read.state is ReadState.LOADING else 0

    def loaded(self, answer: Answer, now: float) -> list[int] | None:
        """The good blocks of a sequence's load, whose references become the table's; None while it goes on."""
        read = self._of.get(answer)
        if read is None or read.state is not ReadState.LOADING:
            return []
        if not read.over and now < read.deadline:
            return None
        self._counts.add(restores=1, cut_restores=int(not read.over))
        if not read.over:
            self._orders.append(EndRead(read.number))
        good = read.blocks[: read.good]
        self._blocks.hand_over(good)
        read.blocks = read.blocks[read.good :]
        if read.over:
            self._release(read)
        del self._of[answer]
        self._lookups.pop(answer, None)
        read.state = ReadState.ABANDONED
        self._settle_costs(read)
        self._count_tiers(read, answer, len(good))
        return good

    def _count_tiers(self, read: Read, answer: Answer, num_good: int) -> None:
        """What a first start found where; a preempted sequence's own blocks are no hits. Those that another node had
        came out of RAM here.
        """
        if answer.cached_tokens is None:
            used = read.tiers[read.skip : read.skip + num_good]
            tokens = self._blocks.block_tokens
            host, nvme = (len(used) - used.count(NVME)) * tokens, used.count(NVME) * tokens
            answer.cached_by_tier = (0, host, nvme)

    def deadlines(self) -> Iterator[tuple[Answer, float]]:
        """When something happens to a read of a sequence even if no event comes."""
        for answer, read in self._of.items():
            if read.state in (ReadState.LOOKING, ReadState.FETCHING, ReadState.LOADING) and not read.over:
                yield answer, read.deadline

    # ---- events

    def on_found(self, event: Found, now: float) -> None:
        """Decide how much of what was found is wanted."""
        read = self._open.get(event.read)
        if read is None or read.state is not ReadState.LOOKING:
            return
        read.tiers = event.tiers[: read.count]  # a store that says more than it was asked is wrong
        self._below[read.answer] = range(read.first, read.first + len(read.tiers) - read.tiers.count(REMOTE))
        read.count = self._choose(read, now) if read.tiers else 0
        if not read.count:
            self._give_up(read)
            return
        read.state = ReadState.FETCHING
        read.deadline = now + self._config.restore_ms / 1e3
        read.waiting_nvme = read.tiers[: read.count].count(NVME) * self.block_bytes
        read.ahead_nvme = self._costs.began(NVME, read.waiting_nvme)
        read.waiting_remote = read.tiers[: read.count].count(REMOTE) * self.block_bytes
        read.ahead_remote = self._costs.began(REMOTE, read.waiting_remote)
        self._orders.append(Fetch(read.number, read.count))

    def _choose(self, read: Read, now: float) -> int:
        if self._config.restore == "always":
            return len(read.tiers)
        busy_s = self._busy_s(read.answer)
        decoding = sum(other.num_to_schedule <= 1 for other in self.queues[0])
        choice = self._costs.choose(read.tiers, read.first, self.block_bytes, now, busy_s, decoding)
        self._counts.add(
            chose_load=int(choice.count > 0),
            chose_recompute=int(choice.count == 0),
            estimated_load_seconds=choice.load_s,
            estimated_recompute_seconds=choice.compute_s,
        )
        return choice.count

    def _busy_s(self, answer: Answer) -> float:
        """Seconds of prompts that the device computes before this one, in the order of the scheduler's lists."""
        running, restoring, waiting = self.queues
        tokens = self._blocks.block_tokens
        ahead = [(other.num_scheduled, other.num_tokens) for other in running if other.num_to_schedule > 1]
        ahead += [
            ((len(other.block_table) + self.num_loading(other)) * tokens, other.num_tokens) for other in restoring
        ]
        for other in waiting:
            if other is answer:
                break
            read = self._of.get(other)
            ahead.append((0 if read is None else (read.first + read.count) * tokens, other.num_tokens))
        return sum(self._costs.compute_s(start, stop) or 0.0 for start, stop in ahead)

    def on_fetched(self, event: Fetched, now: float) -> None:
        """The leading blocks that are in host slots can be loaded."""
        read = self._open.get(event.read)
        if read is None:
            return
        here_s = event.seconds - event.remote_seconds
        if event.num_bytes:
            ahead = read.ahead_nvme if event.num_bytes >= read.waiting_nvme else 0
            self._costs.observe_transfer(NVME, ahead + event.num_bytes, here_s, now)
        if event.remote_bytes:
            ahead = read.ahead_remote if event.remote_bytes >= read.waiting_remote else 0
            self._costs.observe_transfer(REMOTE, ahead + event.remote_bytes, event.remote_seconds, now)
        self._settle_costs(read)
        if event.remote_blocks and read.answer in self._below:
            below = self._below[read.answer]
            self._below[read.answer] = range(below.start, max(below.stop, read.first + event.count))
        self._counts.add(
            remote_blocks=event.remote_blocks,
            remote_bytes=event.remote_bytes,
            remote_seconds=event.remote_seconds,
            remote_failures=int(event.remote_failed),
            fetched_bytes=event.num_bytes,
            fetch_seconds=here_s if event.num_bytes else 0.0,
            lost_blocks=max(0, read.count - event.count) if read.state is ReadState.FETCHING else 0,
        )
        if read.state is ReadState.FETCHING:
            read.count, read.since = min(read.count, event.count), now
            if read.count:
                read.state = ReadState.READY
            else:
                self._give_up(read)

    def on_loaded(self, event: Loaded) -> None:
        """Some blocks of a load are good already."""
        read = self._open.get(event.read)
        if read is not None and read.state is ReadState.LOADING:
            read.good = max(read.good, min(event.count, len(read.blocks)))

    def on_ended(self, event: ReadEnded, now: float) -> None:
        """The link touches nothing of a read any more."""
        read = self._open.pop(event.read, None)
        if read is None:
            raise InvariantViolation(f"read {event.read} ended twice or never began")
        read.over = True
        if event.num_bytes:
            ahead = read.ahead_host if event.num_bytes >= read.waiting_host > 0 else 0
            self._costs.observe_transfer(HOST, ahead + event.num_bytes, event.seconds, now)
        self._counts.add(
            loaded_blocks=event.count,
            loaded_bytes=event.num_bytes,
            load_seconds=event.seconds,
            actual_load_seconds=event.seconds,
            corrupt_blocks=event.corrupt,
        )
        if read.state is ReadState.LOADING:  # taken by `loaded`
            read.good = min(event.count, len(read.blocks))
            self._counts.add(lost_blocks=len(read.blocks) - read.good)
            self._settle_costs(read)
        elif read.state is ReadState.ABANDONED:
            self._release(read)
        else:  # nothing was found, or the store was lost
            read.state, read.count = ReadState.NOTHING, 0
            self._settle_costs(read)

    def _release(self, read: Read) -> None:
        self._blocks.release_held(read.blocks)
        read.blocks = []

    def _settle_costs(self, read: Read) -> None:
        """Nothing of this read is on its way any more, as far as estimates go."""
        self._costs.ended(NVME, read.waiting_nvme)
        self._costs.ended(REMOTE, read.waiting_remote)
        self._costs.ended(HOST, read.waiting_host)
        read.waiting_nvme = read.waiting_remote = read.waiting_host = 0

    # ---- checks

    def held(self) -> Iterator[list[int]]:
        """Blocks of every load."""
        return (read.blocks for read in {*self._open.values(), *self._of.values()})

    def validate(self) -> None:
        """Recount. Raises InvariantViolation."""
        for answer, read in self._of.items():
            if read.answer is not answer or read.state is ReadState.ABANDONED:
                raise InvariantViolation(f"read {read.number} is listed for another sequence than its own")
            if not read.over and self._open.get(read.number) is not read:
                raise InvariantViolation(f"read {read.number} goes on but is not listed as open")
            if answer.finish_reason is not None:
                raise InvariantViolation(f"sequence {answer.arrival} has ended, but read {read.number} goes on for it")
        for read in self._open.values():
            if read.blocks and read.state not in (ReadState.LOADING, ReadState.ABANDONED):
                raise InvariantViolation(f"read {read.number} is {read.state.value} but holds blocks")
