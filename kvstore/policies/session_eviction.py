"""Blocks of sessions that are not expected back leave first.

Every turn keeps its blocks in one run, ordered by depth; a run leaves from its deepest block. Runs are ranked by the
return index of their session's class and idle time (return_index.py, sessions.py): a priority, not a filter, so that
with ample room everything stays. Blocks that several sessions use are in runs of a class of their own, whose hazard of
return is counted.

Invariants:
 1. Every block has one run, which counts its blocks; a run without any is in no list.
 2. Lists of a class are ordered by the time of the last use, because a run enters at the end.
 3. Only the ends of each list are candidates: the index rises to one maximum and falls, so its minimum is at an end.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain

from tournant.kvstore.errors import InvariantViolation
from tournant.kvstore.policies.eviction import BlockInfo, EvictionPolicy
from tournant.kvstore.policies.return_index import (
    NUM_BUCKETS,
    at_risk,
    bucket_of,
    hazards_counted,
    return_index,
)
from tournant.kvstore.policies.sessions import Session, SessionConfig, SessionTracker

_PRIOR_HAZARD = 0.1  # per bucket of idle time, before anything was counted: falls with idle time, as LRU wants it
_OLD_COUNTS = 65_536
_SLACK = 16  # entries that a run may hold beside four times its own blocks
_BLOCK_BITS = 40
_BLOCK_MASK = (1 << _BLOCK_BITS) - 1


class _Run:
    """Blocks that one request used last. live: blocks that are the run's own.

    An entry is depth and block in one integer; some are of blocks that have left or moved to another run.
    upper: entries, the deepest last; lower: those deeper than all of `upper`, deepest first. So blocks may come head
    first or tail first, and the deepest is at hand.
    """

    __slots__ = ("label", "live", "lower", "number", "seen_us", "session", "upper")

    def __init__(self, number: int, label: int, session: Session | None, seen_us: int) -> None:
        self.number = number
        self.label = label
        self.session = session
        self.seen_us = seen_us
        self.upper: list[int] = []
        self.lower: deque[int] = deque()
        self.live = 0

    def add(self, entry: int) -> None:
        """O(1) unless blocks come in no order at all."""
        upper, lower = self.upper, self.lower
        if lower and entry >= lower[-1]:
            upper.extend(reversed(lower))
            lower.clear()
        if not upper or entry > upper[-1]:
            lower.append(entry)
        else:
            insort(upper, entry)

    def deepest(self) -> int:
        """The deepest entry; there is one."""
        return self.lower[0] if self.lower else self.upper[-1]

    def drop_deepest(self) -> None:
        """Forget it."""
        if self.lower:
            self.lower.popleft()
        else:
            self.upper.pop()


class SessionEviction(EvictionPolicy):
    """Which session returns, as an eviction priority. Needs `begin_request`, and `BlockInfo.key` and `depth`."""

    def __init__(self, config: SessionConfig | None = None) -> None:
        self.tracker = SessionTracker(config, self._is_shared)
        self._shared_label = self.tracker.num_labels
        self._lists: list[OrderedDict[int, _Run]] = [OrderedDict() for _ in range(self._shared_label + 1)]
        self._run_of: dict[int, _Run] = {}
        self._entry: dict[int, int] = {}
        self._key: dict[int, Hashable] = {}
        self._shared_keys: dict[Hashable, None] = {}
        self._runs: dict[int, _Run] = {}  # session number -> its run, while that has blocks
        self._num_runs = 0
        self._now_us = 0
        self._begun_us = -1
        self._current: _Run | None = None
        self._victim: _Run | None = None
        self._returned = [0.0] * NUM_BUCKETS  # uses of shared blocks, by idle time before
        self._censored = [0.0] * NUM_BUCKETS  # shared blocks that left unused
        self._shared_index: list[float] = []
        self._index: list[list[float]] = []
        self._refresh()

    def _is_shared(self, key: Hashable) -> bool:
        return key in self._shared_keys

    # ---- requests

    def begin_request(self, keys: Sequence[Hashable], now_us: int) -> None:
        """See EvictionPolicy. What is left of the turn that is continued belongs to the new turn from now on."""
        session, previous = self.tracker.begin(keys, now_us)
        self._now_us = max(self._now_us, now_us)
        self._begun_us = now_us
        self._victim = None
        run = None if previous is None else self._runs.pop(previous.number, None)
        if run is None:
            run = self._new_run(session.label, session)
        else:
            run.session = session
            self._runs[session.number] = run
            self._used_whole(run, session.label)
        self._current = run
        if self._index is not self.tracker.index:
            self._refresh()

    def _used_whole(self, run: _Run, label: int) -> None:
        """All blocks of a run were used now; it may change its class."""
        del self._lists[run.label][run.number]
        run.label = label
        run.seen_us = self._now_us
        self._lists[label][run.number] = run

    def _new_run(self, label: int, session: Session | None) -> _Run:
        self._num_runs += 1
        return _Run(self._num_runs, label, session, self._now_us)

    def _refresh(self) -> None:
        self._index = self.tracker.index
        waiting = list(self._censored)
        for run in self._lists[self._shared_label].values():
            waiting[bucket_of(self._now_us - run.seen_us)] += run.live
        risk = at_risk(self._returned, waiting)
        hazards = hazards_counted(self._returned, risk, [_PRIOR_HAZARD] * NUM_BUCKETS)
        self._shared_index = return_index(hazards)
        if sum(self._returned) + sum(self._censored) > _OLD_COUNTS:
            self._returned = [count / 2 for count in self._returned]
            self._censored = [count / 2 for count in self._censored]

    # ---- blocks

    def insert(self, block: int, info: BlockInfo, now_us: int) -> None:
        """See EvictionPolicy. Blocks are below 2^40."""
        if block in self._run_of or not 0 <= block <= _BLOCK_MASK:
            raise InvariantViolation(f"block {block} is inserted twice or is not below {_BLOCK_MASK + 1}")
        self._now_us = max(self._now_us, now_us)
        self._entry[block] = (info.depth << _BLOCK_BITS) | block
        self._key[block] = info.key
        self._put(block, self._run_for(info.key))

    def _run_for(self, key: Hashable) -> _Run:
        """The run of the turn that asked for this key last; nobody's, when none is remembered."""
        session = self.tracker.session_of(key)
        if session is None:
            return self._nobodys()
        current = self._current
        if current is not None and current.session is session:
            return current
        run = self._runs.get(session.number)
        return run if run is not None else self._new_run(session.label, session)

    def _nobodys(self) -> _Run:
        """A run without a session, of a middle class."""
        if self._current is None or self._current.session is not None:
            self._current = self._new_run(self.tracker.config.num_chances // 2, None)
        return self._current

    def _put(self, block: int, run: _Run) -> None:
        """The block is the run's own from now on."""
        self._run_of[block] = run
        if not run.live:
            run.upper.clear()
            run.lower.clear()
            run.seen_us = self._now_us  # its request may have begun long before its first block came
            self._lists[run.label][run.number] = run
            if run.session is not None:
                self._runs[run.session.number] = run
        run.live += 1
        run.add(self._entry[block])

    def _take(self, run: _Run) -> None:
        """One block is no longer the run's own; `_run_of` says so already."""
        run.live -= 1
        if not run.live:
            del self._lists[run.label][run.number]
            if run.session is not None:
                del self._runs[run.session.number]
            if self._victim is run:
                self._victim = None
        elif len(run.upper) + len(run.lower) > 4 * run.live + _SLACK:
            self._forget_others(run)

    def _forget_others(self, run: _Run) -> None:
        """Keep entries of the run's own blocks only."""
        run.upper = list(map(self._entry.__getitem__, self._tail_first(run)))
        run.upper.reverse()
        run.lower.clear()

    def touch_run(self, blocks: Sequence[int], now_us: int) -> None:
        """See EvictionPolicy. Without a `begin_request` at the same time the blocks become nobody's."""
        if self._begun_us != now_us:
            self._now_us = max(self._now_us, now_us)
            self._current = None
        current = self._nobodys() if self._current is None else self._current
        run_of, last, first = self._run_of, current, 0
        for place, block in enumerate(blocks):
            run = run_of.get(block)
            if run is not last:
                if run is None:
                    raise InvariantViolation(f"block {block} is touched and not resident")
                self._used(blocks[first:place], last, current)
                last, first = run, place
        self._used(blocks[first:], last, current)

    def _used(self, blocks: Sequence[int], run: _Run, current: _Run) -> None:
        """The current request used these blocks of one run."""
        if run is current or not blocks:
            return
        label, target = self._shared_label, None
        if run.label == label:
            self._returned[bucket_of(self._now_us - run.seen_us)] += len(blocks)
        elif run.session is None:
            target = current
        else:
            self.tracker.observe_gap(run.session, self._now_us - run.seen_us)
            self._shared_keys.update((self._key[block], None) for block in blocks)
        if target is None and len(blocks) == run.live:
            if run.session is not None:
                del self._runs[run.session.number]
                run.session = None
            self._used_whole(run, label)
            return
        if target is None:
            target = self._new_run(label, None)
        for block in blocks:
            self._put(block, target)
            self._take(run)

    def remove(self, block: int) -> None:
        """See EvictionPolicy."""
        run = self._run_of.pop(block, None)
        if run is None:
            raise InvariantViolation(f"block {block} is removed and not resident")
        if run.deepest() == self._entry.pop(block):
            run.drop_deepest()
        self._take(run)
        key = self._key.pop(block)
        if run.label == self._shared_label:
            self._censored[bucket_of(self._now_us - run.seen_us)] += 1.0
            self._shared_keys.pop(key, None)

    # ---- victims

    def victims(self) -> Iterator[int]:
        """See EvictionPolicy. O(classes) to find a run, O(1) for its further blocks."""
        first = self._victim
        if first is None:
            first = self._victim = self._worst()
        if first is None:
            return
        yield from self._tail_first(first)
        for run in self._ranked():
            if run is not first:
                yield from self._tail_first(run)

    def _tail_first(self, run: _Run) -> Iterator[int]:
        """The run's own blocks, of which there are some."""
        run_of, before = self._run_of, -1
        while run_of.get(run.deepest() & _BLOCK_MASK) is not run:
            run.drop_deepest()
        for entry in chain(run.lower, reversed(run.upper)):
            block = entry & _BLOCK_MASK
            if entry != before and run_of.get(block) is run:
                yield block
            before = entry

    def _index_of(self, label: int) -> list[float]:
        return self._shared_index if label == self._shared_label else self._index[label]

    def _worst(self) -> _Run | None:
        """The run with the lowest index, the older of two equals."""
        now_us, best, lowest = self._now_us, None, float("inf")
        for label, runs in enumerate(self._lists):
            if runs:
                index = self._index_of(label)
                oldest, newest = next(iter(runs.values())), next(reversed(runs.values()))
                value = index[bucket_of(now_us - oldest.seen_us)]
                if value < lowest or (value == lowest and best is not None and oldest.seen_us < best.seen_us):
                    best, lowest = oldest, value
                value = index[bucket_of(now_us - newest.seen_us)]
                if value < lowest:
                    best, lowest = newest, value
        return best

    def _ranked(self) -> Iterator[_Run]:
        """All runs, lowest index first as far as the ends of the lists show it."""
        ends: list[tuple[float, int, int, _Run, Iterator[_Run]]] = []
        left = [len(runs) for runs in self._lists]

        def push(label: int, end: Iterator[_Run]) -> None:
            if left[label]:
                left[label] -= 1
                run = next(end)
                index = self._index_of(label)[bucket_of(self._now_us - run.seen_us)]
                heapq.heappush(ends, (index, run.seen_us, run.number, run, end))

        for label, runs in enumerate(self._lists):
            push(label, iter(runs.values()))
            push(label, reversed(runs.values()))
        while ends:
            _, _, _, run, end = heapq.heappop(ends)
            yield run
            push(run.label, end)

    def __len__(self) -> int:
        return len(self._run_of)

    def validate(self) -> None:
        """See EvictionPolicy."""
        self.tracker.validate()
        listed = 0
        for label, runs in enumerate(self._lists):
            for run in runs.values():
                own = list(self._tail_first(run))
                if run.label != label or not run.live or len(own) != run.live:
                    raise InvariantViolation(f"run {run.number} has {len(own)} blocks and counts {run.live}")
                if run.session is not None and self._runs.get(run.session.number) is not run:
                    raise InvariantViolation(f"run {run.number} is not the run of its session")
                listed += run.live
            times = [run.seen_us for run in runs.values()]
            if times != sorted(times):
                raise InvariantViolation(f"the runs of class {label} are not in the order of time")
        if not listed == len(self._run_of) == len(self._entry) == len(self._key):
            raise InvariantViolation(f"{len(self._run_of)} blocks are held, the runs have {listed}")
