"""The tiers below the device, as an engine sees them: what goes down and when, what comes back, what it is worth.

Owns the orders to the link and what its events mean; the choice of blocks to save. What comes back is restores.py's,
growing blocks of preempted sequences stashes.py's, versions and credit write_credit.py's. Does not own sequences or
blocks: it is asked by `Scheduler`, and holds blocks in `BlockManager` while they are copied. Pure: time is an argument,
in seconds.

Invariants (checked by `validate`):
 1. A block is held from the order to copy it until `Copied`.
 2. A version names one save of one block; only sealed blocks are saved, so only what an earlier step finished.
 3. Orders to save never exceed the credit; the blocks of one are of one kind.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.policies.watermarks import Watermarks
from tournant.workers.batch import Batch
from tournant.workers.block_manager import BlockManager, CopyState
from tournant.workers.cost_model import CostModel
from tournant.workers.messages import TierStats
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.restores import Restores
from tournant.workers.sequence import Sequence as Answer
from tournant.workers.stashes import Stashes
from tournant.workers.tier_counts import Counts
from tournant.workers.transfer_messages import (
    HOST,
    NVME,
    REMOTE,
    Attached,
    Copied,
    Detached,
    Event,
    Fetched,
    Found,
    Lent,
    Loaded,
    Order,
    ReadEnded,
    Refused,
    Save,
    Saved,
    SaveEntry,
    Stashed,
    Unstashed,
    Used,
)
from tournant.workers.write_credit import WriteCredit

SAVE_BLOCKS = 32  # of one order: the device blocks of a save are given back together
SEARCHED_BLOCKS = 1024  # the coldest, among which those are looked for whose kind has credit
MAX_ALLOWANCE_S = 0.1  # of copying that may be saved up below the watermarks
FIRST_COPY_RATE = 2e9  # bytes per second, until a copy was seen
RETRY_S, MAX_RETRY_S = 0.1, 5.0  # after a save failed
MAX_USES = 1024  # chains that wait for their last block to arrive below


@dataclass(frozen=True, slots=True)
class Restored:
    """What came back: blocks after those the device had; tail: the block of a stash behind them, None without."""

    blocks: list[int]
    tail: int | None
    tail_tokens: int


@dataclass(slots=True)
class _Saving:
    entries: tuple[SaveEntry, ...]
    kind: int
    copied: bool = False


@dataclass(slots=True)
class _Use:
    keys: tuple[bytes, ...]
    missing: int


class Tiering:
    """See the module. writer_id: of the engine's group of ranks. orders: taken and emptied by the engine."""

    def __init__(self, config: OffloadConfig, blocks: BlockManager, writer_id: int) -> None:
        self.config = config
        self.orders: list[Order] = []
        self.costs = CostModel(blocks.block_tokens)
        self.counts = Counts()
        self.restores = Restores(config, blocks, self.costs, self.orders, self.counts)
        self._numbers = itertools.count(1)  # of saves, stashes and uses
        self.stashes = Stashes(blocks, self.orders, self._numbers)
        self.attached = False
        self.refusal = ""  # why the store there is serves this engine neither now nor later
        self._blocks = blocks
        self._group = WriteCredit(writer_id, blocks.blocks_for(config.lower_kv_dtype_from))
        self._watermarks = Watermarks(config.copy_start, config.copy_parallel, config.copy_stop, config.num_copiers)
        self._saving: dict[int, _Saving] = {}
        self._uses: OrderedDict[int, _Use] = OrderedDict()
        self._uses_of: dict[bytes, list[int]] = {}
        self._allowance_s = 0.0
        self._retry_at, self._retry_s = 0.0, RETRY_S

    # ---- events

    def on_event(self, event: Event, now: float) -> None:
        """Book what the link says."""
        match event:
            case Attached():
                self._on_attached(event)
            case Detached():
                self.attached = False
                self._group.detached()
                self.counts.add(store_losses=1)
                self._blocks.nothing_is_below()
                self.stashes.lost()
                self.restores.lost()
            case Refused():
                self.counts.add(store_refusals=1)
                self.refusal = event.reason if event.lasting else ""
            case Found():
                self.restores.on_found(event, now)
            case Fetched():
                self.restores.on_fetched(event, now)
            case Loaded():
                self.restores.on_loaded(event)
            case ReadEnded():
                self.restores.on_ended(event, now)
            case Copied():
                self._on_copied(event, now)
            case Saved():
                self._on_saved(event, now)
            case Stashed():
                self.stashes.on_stashed(event)
                self._group.replied(0, event.num_lent)
            case Unstashed():
                self.stashes.on_unstashed(event)
                self._group.replied(0, event.num_lent)
            case Lent():
                self._group.replied(event.kind, event.num_lent)

    def _on_attached(self, event: Attached) -> None:
        self.attached, self.refusal = True, ""
        self._group.attached(event.credit)
        self.restores.block_bytes = event.slot_bytes
        self.restores.most_blocks = int(self.config.prefetch_share * event.host_bytes) // event.slot_bytes

    def observe(self, batch: Batch, seconds: float) -> None:
        """Learn what a step cost."""
        prefills = [(start, count) for start, count in zip(batch.starts, batch.counts, strict=True) if count > 1]
        tokens = sum(count for _, count in prefills)
        positions = sum(count * (start + count / 2) for start, count in prefills)
        self.costs.observe_step(tokens, positions / max(tokens, 1), len(batch.counts) - len(prefills), seconds)

    # ---- what comes back

    def look_ahead(
        self, waiting: Sequence[Answer], missing: Callable[[Answer], tuple[int, list[bytes]]], now: float
    ) -> None:
        """Look up the prefixes of sequences that are next. missing: what the device lacks of one: (blocks it has, keys
        behind them); no keys when it is not to be looked up.
        """
        self.restores.expire(now)
        if not self._asks:
            return
        for place, answer in enumerate(waiting[: max(1, self.config.prefetch_requests)]):
            if not self.restores.has_read(answer, now) and (place == 0 or self.restores.has_room):
                first, keys = missing(answer)
                if keys:
                    self.restores.look_up(answer, first, keys, now)

    def restorable(self, answer: Answer, first: int, keys: Sequence[bytes], now: float, *, is_next: bool) -> int | None:
        """Blocks that a load would bring now behind the `first` that the device has; None: it should wait a little.

        is_next: no other sequence waits before it.
        """
        found: int | None = 0
        if not keys:
            self.restores.forget(answer)
        else:
            if self._asks and not self.restores.has_read(answer, now, first):
                if not is_next and not self.restores.has_room:
                    return None
                self.restores.look_up(answer, first, keys, now)
            found = self.restores.restorable(answer, first)
        if found is not None and self.stashes.tokens(answer) // self._blocks.block_tokens != first + found:
            self.stashes.drop(answer)
        return found

    @property
    def _asks(self) -> bool:
        return self.attached and self.config.restore != "never"

    def begin(self, answer: Answer, first: int, blocks: Sequence[int], tail: int | None, now: float) -> None:
        """Bring blocks and, if given, the stash, into device blocks, whose references become the copies'."""
        if blocks:
            self.restores.load(answer, first, blocks, now)
        else:
            self.restores.forget(answer)
        if tail is not None:
            self.stashes.bring_back(answer, tail)

    def restored(self, answer: Answer, now: float) -> Restored | None:
        """What came back for a sequence; None while it is on its way. References become the table's."""
        if self.stashes.is_coming(answer):
            return None
        wanted = self.restores.num_loading(answer)
        tokens = self.stashes.tokens(answer)
        blocks = self.restores.loaded(answer, now)
        if blocks is None:
            return None
        if len(blocks) < wanted:
            self.stashes.drop(answer)
        return Restored(blocks, self.stashes.take(answer), tokens)

    def forget(self, answer: Answer) -> None:
        """A sequence starts without restoring, ends, or is preempted: nothing of its reads is wanted any more."""
        self.restores.forget(answer)
        self.stashes.drop(answer)

    def chain_ended(self, answer: Answer) -> None:
        """A sequence ends, or has another chain of keys from now on."""
        self.forget(answer)
        self.restores.ended(answer)

    def is_below(self, answer: Answer, place: int) -> bool:
        """Whether a block of a sequence's chain is known to lie below."""
        return self.restores.is_below(answer, place)

    # ---- what goes down

    def preempted(self, answer: Answer, now: float) -> None:
        """A running sequence is about to lose its blocks: copy them down when loading them will be cheaper."""
        computed, table = answer.num_computed, answer.block_table
        full = answer.num_sealed
        if not self.attached or not self._is_worth_a_swap(full, computed, now):
            return
        # a lossy form would round the growing block, which is no cached one: it is computed again then
        tail = computed - full * self._blocks.block_tokens if self.config.lower_kv_dtype == "same" else 0
        dirty = [block for block in table[:full] if self._blocks.is_dirty(block)]
        chosen = self._group.within(dirty, self._depth, len(dirty))
        if sum(map(len, chosen)) < len(dirty) or len(chosen[0]) + bool(tail) > self._group.credits[0]:
            return
        self._save(chosen, copiers=1)
        self.counts.add(swapped=1)
        if tail and not answer.num_in_flight:
            self._group.take_one()
            self.stashes.keep(answer, table[full], computed)
            self.counts.add(stashed=1)

    def _is_worth_a_swap(self, num_blocks: int, num_tokens: int, now: float) -> bool:
        if self.config.restore != "auto":
            return self.config.restore == "always"
        compute_s = self.costs.compute_s(0, num_tokens)
        load_s = self.costs.load_s(num_blocks, 0, self.restores.block_bytes, now)
        return compute_s is None or load_s is None or load_s < compute_s

    def ended(self, answer: Answer) -> None:
        """A sequence has ended: its blocks count as used now, below too, once the last of them is there."""
        self.chain_ended(answer)
        if not self.attached or not answer.num_sealed:
            return
        use = _Use(tuple(answer.keys[: answer.num_sealed]), 0)
        number = next(self._numbers)
        for key in use.keys:
            if self._blocks.copy_state(key) in (CopyState.DIRTY, CopyState.SAVING):
                use.missing += 1
                self._uses_of.setdefault(key, []).append(number)
        self._uses[number] = use
        if not use.missing or len(self._uses) > MAX_USES:
            self._used(number if not use.missing else next(iter(self._uses)))

    def _used(self, number: int) -> None:
        use = self._uses.pop(number)
        self.orders.append(Used(use.keys))
        for key in use.keys if use.missing else ():
            waiting = [other for other in self._uses_of.get(key, ()) if other != number]
            if waiting:
                self._uses_of[key] = waiting
            else:
                self._uses_of.pop(key, None)

    def _arrived(self, key: bytes) -> None:
        for number in self._uses_of.pop(key, ()):
            self._uses[number].missing -= 1
            if not self._uses[number].missing:
                self._used(number)

    def plan_saves(self, now: float, step_s: float, *, idle: bool) -> None:
        """Order copies of dirty blocks: as watermarks say, all when the engine has nothing else to do, else within a
        share of the step.
        """
        blocks = self._blocks
        if not self.attached or not blocks.num_dirty:
            return
        copiers = self._watermarks.copiers(blocks.num_used_clean, blocks.num_dirty, blocks.num_blocks)
        self._allowance_s = min(self._allowance_s + self.config.publish_share * step_s, MAX_ALLOWANCE_S)
        count = blocks.num_dirty
        if not copiers and not idle:
            block_s = self.restores.block_bytes / (self.costs.copy_down_rate(now) or FIRST_COPY_RATE)
            count = min(count, int(self._allowance_s / block_s))
            self._allowance_s -= count * block_s
        if not count or now < self._retry_at:
            return
        chosen = self._coldest(count)
        self.counts.add(skipped_saves=int(count > sum(map(len, chosen))))
        self._save(chosen, max(1, copiers))

    def _coldest(self, count: int) -> list[list[int]]:
        """Up to `count` dirty blocks that there is credit for, by kind."""
        credits = self._group.credits
        searched = min(count, credits[0]) if len(credits) == 1 else SEARCHED_BLOCKS
        return self._group.within(self._blocks.coldest_dirty(searched), self._depth, count)

    def _depth(self, block: int) -> int:
        return self._blocks.content(block)[1]

    def _save(self, chosen: Sequence[Sequence[int]], copiers: int) -> None:
        """Order blocks of each kind down."""
        for kind, blocks in enumerate(chosen):
            for start in range(0, len(blocks), SAVE_BLOCKS):
                self._save_some(kind, blocks[start : start + SAVE_BLOCKS], copiers)

    def _save_some(self, kind: int, chosen: Sequence[int], copiers: int) -> None:
        contents = [self._blocks.content(block) for block in chosen]
        refs = self._group.mint(kind, [key for key, _ in contents])
        entries = []
        for block, ref, (_, depth) in zip(chosen, refs, contents, strict=True):
            start = depth * self._blocks.block_tokens
            cost_s = self.costs.compute_s(start, start + self._blocks.block_tokens) or 0.0
            entries.append(SaveEntry(block, ref.key, ref.version, int(cost_s * 1e6), depth))
        self._blocks.begin_saving(chosen)
        number = next(self._numbers)
        self._saving[number] = _Saving(tuple(entries), kind)
        self.orders.append(Save(number, tuple(entries), copiers, kind))

    def _on_copied(self, event: Copied, now: float) -> None:
        saving = self._saving.get(event.number)
        if saving is None:
            self.stashes.on_copied(event.number)
            return
        self._release(saving)
        if event.num_bytes:
            self.costs.observe_copy_down(event.num_bytes, event.seconds, now)
        self.counts.add(saved_bytes=event.num_bytes, save_seconds=event.seconds)

    def _release(self, saving: _Saving) -> None:
        if not saving.copied:
            saving.copied = True
            self._blocks.release_held([entry.block for entry in saving.entries])

    def _on_saved(self, event: Saved, now: float) -> None:
        saving = self._saving.pop(event.save)
        if not saving.copied:
            raise InvariantViolation(f"save {event.save} was answered before its blocks were copied")
        failed = set(event.refused) if event.ok else set(range(len(saving.entries)))
        for index, entry in enumerate(saving.entries):
            self._blocks.end_saving(entry.block, entry.key, saved=index not in failed)
            if index not in failed:
                self._arrived(entry.key)
        self._group.replied(saving.kind, event.num_lent)
        self.counts.add(saved_blocks=len(saving.entries) - len(failed), refused_saves=len(failed))
        if len(failed) < len(saving.entries):  # single blocks that failed go again with others
            self._retry_s = RETRY_S
        else:
            self._retry_at, self._retry_s = now + self._retry_s, min(self._retry_s * 2, MAX_RETRY_S)

    # ---- numbers and checks

    def next_deadline(self) -> float | None:
        """When something is to be done even if no event comes; None for never."""
        # one whose stash is on its way waits for that alone
        times = [time for answer, time in self.restores.deadlines() if not self.stashes.is_coming(answer)]
        if self.attached and any(self._coldest(1)):
            times.append(self._retry_at)
        return min(times, default=None)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is on its way and nothing is left that could go down now."""
        return not self._saving and not (self.attached and self._blocks.num_dirty)

    def stats(self, now: float) -> TierStats:
        """Counters and gauges."""
        blocks = self._blocks
        return self.counts.stats(
            attached=int(self.attached),
            dirty_blocks=blocks.num_dirty,
            pressure=(blocks.num_used_clean + blocks.num_dirty) / blocks.num_blocks,
            dropped_dirty=blocks.num_dropped_dirty,
            bytes_per_second_host=self.costs.bytes_per_second(HOST, now) or 0.0,
            bytes_per_second_nvme=self.costs.bytes_per_second(NVME, now) or 0.0,
            bytes_per_second_remote=self.costs.bytes_per_second(REMOTE, now) or 0.0,
            prefill_tokens_per_second=self.costs.prefill_tokens_per_second,
        )

    def held(self) -> Iterator[list[int]]:
        """Blocks that copies hold."""
        for saving in self._saving.values():
            if not saving.copied:
                yield [entry.block for entry in saving.entries]
        yield from self.restores.held()
        yield from self.stashes.held()

    def validate(self) -> None:
        """Recount. Raises InvariantViolation."""
        self.restores.validate()
        self._group.validate()
        versions = [entry.version for saving in self._saving.values() for entry in saving.entries]
        if len(set(versions)) != len(versions):
            raise InvariantViolation("two saves under way share a version")
        counted: dict[int, int] = {}
        for waiting in self._uses_of.values():
            for number in waiting:
                counted[number] = counted.get(number, 0) + 1
        if counted != {number: use.missing for number, use in self._uses.items() if use.missing}:
            raise InvariantViolation("chains that wait for their last block to arrive below are listed wrongly")
