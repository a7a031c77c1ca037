"""The link of a group of ranks: over links that a test plays, and over real links to real store processes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from tests.workers.link_harness import BLOCK_BYTES, PATIENCE_S, Node, content, keys, node
from tournant.kvstore.block import Part, Version
from tournant.workers.block_images import PlainImages
from tournant.workers.device import CpuDevice
from tournant.workers.group_link import GroupLink, publishers
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.store_link import LinkIdentity, StoreLink
from tournant.workers.transfer_messages import (
    HOST,
    Attached,
    Copied,
    Detached,
    EndRead,
    Event,
    Fetch,
    Fetched,
    Found,
    Load,
    Lookup,
    Order,
    ReadEnded,
    Save,
    Saved,
    SaveEntry,
    Stash,
    Stashed,
    Unstash,
    Unstashed,
    Used,
)
from tournant.workers.transfer_wire import event_from_wire, event_to_wire, order_from_wire, order_to_wire

E_ = TypeVar("E_")
PARTS = (Part(0, 2, 0, 1), Part(0, 2, 1, 2))
_writers = itertools.count(200_000)  # other than those of link_harness.py

# ---- over links that a test plays


class PlayedLink:
    """The link of rank 0. said: what it says next."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.said: list[Event] = [Attached(1, (2,), 10, 100)]
        self.closed: list[float] = []

    def submit(self, orders: Sequence[Order]) -> None:
        self.orders += orders

    def take_events(self) -> list[Event]:
        said, self.said = self.said, []
        return said

    def close(self, flush_s: float) -> None:
        self.closed.append(flush_s)
        self.said.append(Detached("closed"))


class Played:
    """A group of three ranks at two stores."""

    def __init__(self) -> None:
        self.local = PlayedLink()
        self.told: list[tuple[tuple[int, ...], list[Order]]] = []
        self.wakes = 0
        self.now = 0.0
        self.link = GroupLink(self.local, ("s", "s", "t"), self._tell, self._wake, clock=lambda: self.now)

    def _tell(self, ranks: Sequence[int], orders: Sequence[Order]) -> None:
        self.told.append((tuple(ranks), list(orders)))

    def _wake(self) -> None:
        self.wakes += 1

    def attach(self) -> list[Event]:
        for rank in (1, 2):
            self.link.deliver(rank, [Attached(1, (3,), 10, 100)])
        return self.link.take_events()


def test_orders_go_to_their_ranks_in_order() -> None:
    group = Played()
    (attached,) = group.attach()
    assert attached.credit == (2,)  # type: ignore[attr-defined]
    orders: list[Order] = [Lookup(1, keys(2)), EndRead(1), Used(keys(1)), Used(keys(2)), Stash(2, 5)]
    group.link.submit(orders)
    assert group.local.orders == orders
    assert group.told == [((1, 2), orders[:2]), ((2,), orders[2:4]), ((1, 2), orders[4:])]


def test_events_of_other_ranks_come_from_any_thread_and_wake() -> None:
    group = Played()
    group.attach()
    group.link.submit([Lookup(1, keys(1))])
    before = group.wakes
    threads = [
        threading.Thread(target=group.link.deliver, args=(rank, [Found(1, b"", 0.0), ReadEnded(1, 0)]))
        for rank in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert group.wakes == before + 2
    assert group.link.take_events() == []
    group.local.said += [Found(1, b"", 0.0), ReadEnded(1, 0)]
    assert group.link.take_events() == [Found(1, b"", 0.0), ReadEnded(1, 0)]


def test_what_is_answered_at_once_wakes() -> None:
    group = Played()
    group.link.submit([Lookup(1, keys(1))])
    assert group.wakes == 1
    assert group.link.take_events() == [Found(1, b"", 0.0), ReadEnded(1, 0)]
    assert group.local.orders == []
    assert group.told == []


def test_closing_waits_for_saves_of_other_ranks() -> None:
    group = Played()
    group.attach()
    entry = SaveEntry(1, keys(1)[0], Version(1, 1), 1, 0)
    group.link.submit([Save(1, (entry,)), Lookup(2, keys(1))])
    group.local.said += [Copied(1, 1, 0.0), Saved(1, True, (), 1)]
    answer = [Copied(1, 1, 0.0), Saved(1, True, (), 1)]
    late = threading.Thread(target=lambda: [group.link.deliver(rank, answer) for rank in (1, 2)])
    late.start()
    group.link.close(60.0)
    late.join()
    assert group.local.closed == [60.0]
    events = group.link.take_events()
    assert events[:2] == [Copied(1, 3, 0.0), Saved(1, True, (), 1)]
    assert events[2:] == [Found(2, b"", 0.0), ReadEnded(2, 0), Detached("this link is closed")]
    group.link.close(60.0)
    group.link.submit([Lookup(3, keys(1))])
    assert group.link.take_events() == [Found(3, b"", 0.0), ReadEnded(3, 0)]
    assert not any(isinstance(order, Lookup) and order.read == 3 for order in group.local.orders)


def test_closing_waits_no_longer_than_it_may() -> None:
    group = Played()
    group.attach()
    group.link.submit([Save(1, (SaveEntry(1, keys(1)[0], Version(1, 1), 1, 0),))])
    group.link.close(0.0)
    assert group.link.take_events() == [Copied(1, 0, 0.0), Saved(1, False, (), 0), Detached("this link is closed")]


def test_every_store_gets_every_part_of_its_ranks_once() -> None:
    assert publishers(["s", "s", "t", "t", "t"], [*PARTS, PARTS[0], PARTS[0], PARTS[1]]) == [
        (True, PARTS), (True, PARTS), (True, PARTS), (False, PARTS), (True, PARTS),
    ]  # fmt: skip


# ---- over real links


class Ranks:
    """A group of ranks in one process, each with a pool of blocks and a link of its own. agents: of each rank's node;
    config: of the links.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        parts: Sequence[Part],
        num_blocks: int = 32,
        agents: Sequence[Path | None] | None = None,
        **config: int,
    ) -> None:
        self.writer_id = next(_writers)
        self.parts = parts
        self.pools = [torch.zeros((num_blocks, BLOCK_BYTES), dtype=torch.uint8) for _ in nodes]
        self.rows = [pool.numpy() for pool in self.pools]
        self.events: list[Event] = []
        self._numbers, self._counters = itertools.count(1), itertools.count(1)
        self._happened = threading.Event()
        self._order = [threading.Lock() for _ in nodes]
        self._links: list[StoreLink] = []
        self._ready = threading.Event()
        names = [str(at.socket) for at in nodes]
        places = publishers(names, parts)
        for rank, (at, part) in enumerate(zip(nodes, parts, strict=True)):
            publishes, local_parts = places[rank]
            identity = LinkIdentity(
                b"w" * 32, "bf16", self.writer_id, part, in_group=True, publishes=publishes, local_parts=local_parts
            )
            images = PlainImages(CpuDevice(), self.pools[rank])
            made = OffloadConfig(str(at.socket), **{"credit_blocks": 4} | config)  # type: ignore[arg-type]
            wake: Callable[[], object] = self._happened.set if rank == 0 else lambda rank=rank: self._pass_on(rank)
            agent = None if agents is None else agents[rank]
            self._links.append(StoreLink(at.socket, identity, images, made, wake, timeout_s=PATIENCE_S, agent=agent))
        self.link = GroupLink(self._links[0], names, self._tell, self._happened.set)
        self._ready.set()

    def _tell(self, ranks: Sequence[int], orders: Sequence[Order]) -> None:
        for rank in ranks:
            self._links[rank].submit([order_from_wire(order_to_wire(order)) for order in orders])

    def _pass_on(self, rank: int) -> None:
        self._ready.wait(PATIENCE_S)
        with self._order[rank]:
            events = self._links[rank].take_events()
            self.link.deliver(rank, [event_from_wire(event_to_wire(event)) for event in events])

    def wait(self, kind: type[E_], wanted: Callable[[E_], bool] = lambda event: True, after: int = 0) -> E_:
        end = time.monotonic() + PATIENCE_S
        while True:
            self._happened.clear()
            self.events += self.link.take_events()
            self.link.validate()
            for event in self.events[after:]:
                if isinstance(event, kind) and wanted(event):
                    return event
            assert self._happened.wait(max(0.0, end - time.monotonic())), f"no {kind.__name__}: {self.events[after:]}"

    def number(self) -> int:
        return next(self._numbers)

    def bytes_of(self, key: bytes, version: Version, rank: int) -> bytes:
        return content(key + repr(self.parts[rank]).encode(), version)

    def save(self, chain: Sequence[bytes]) -> list[SaveEntry]:
        entries = []
        for place, key in enumerate(chain):
            version = Version(self.writer_id, next(self._counters))
            for rank, rows in enumerate(self.rows):
                rows[place] = np.frombuffer(self.bytes_of(key, version, rank), np.uint8)
            entries.append(SaveEntry(place, key, version, 10, place))
        number = self.number()
        self.link.submit([Save(number, tuple(entries))])
        saved = self.wait(Saved, lambda event: event.save == number)
        assert (saved.ok, saved.refused) == (True, ())
        return entries

    def lookup(self, chain: Sequence[bytes]) -> Found:
        number = self.number()
        self.link.submit([Lookup(number, tuple(chain))])
        return self.wait(Found, lambda event: event.read == number)

    def fetch(self, read: int, count: int) -> Fetched:
        self.link.submit([Fetch(read, count)])
        return self.wait(Fetched, lambda event: event.read == read)

    def load(self, read: int, blocks: Sequence[int]) -> int:
        self.link.submit([Load(read, 0, tuple(blocks))])
        return self.ended(read)

    def ended(self, read: int) -> int:
        return self.wait(ReadEnded, lambda event: event.read == read).count

    def bring(self, chain: Sequence[bytes], first: int) -> int:
        found = self.lookup(chain)
        if not found.tiers:
            return self.ended(found.read)
        fetched = self.fetch(found.read, len(found.tiers))
        return self.load(found.read, range(first, first + fetched.count))

    def holds(self, entries: Sequence[SaveEntry], first: int) -> bool:
        """Whether all ranks have their parts of these entries in blocks from `first` on."""
        return all(
            rows[first + place].tobytes() == self.bytes_of(entry.key, entry.version, rank)
            for rank, rows in enumerate(self.rows)
            for place, entry in enumerate(entries)
        )

    def close(self) -> None:
        for link in self._links[1:]:
            link.close(0.0)
        self.link.close(0.0)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Store processes and groups of ranks that end with the test."""
    with ExitStack() as stack:

        def make_nodes(count: int) -> list[Node]:
            found = []
            for number in range(count):
                folder = tmp_path / str(number)
                folder.mkdir()
                found.append(stack.enter_context(node(folder)).start())
            return found

        def make_ranks(nodes: Sequence[Node], parts: Sequence[Part]) -> Ranks:
            ranks = Ranks(nodes, parts)
            stack.callback(ranks.close)
            ranks.wait(Attached)
            return ranks

        yield lambda what, *rest: make_nodes(what) if isinstance(what, int) else make_ranks(what, *rest)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_each_rank_brings_back_its_part(make: Callable[..., Any], num_nodes: int) -> None:
    nodes = make(num_nodes)
    ranks = make([nodes[0], nodes[-1]], PARTS)
    entries = ranks.save(keys(4))
    assert ranks.bring(keys(4), 10) == 4
    assert ranks.holds(entries, 10)
    assert ranks.bring(keys(3, "other"), 10) == 0


def test_two_groups_that_wrote_the_same_blocks(make: Callable[..., Any]) -> None:
    """The second rank's store has lost what the first group wrote: both read what the second one did."""
    nodes = make(2)
    first = make(nodes, PARTS)
    first.save(keys(3))
    nodes[1].kill()
    first.wait(Detached)
    nodes[1].start()
    first.wait(Attached, after=len(first.events))
    assert first.bring(keys(3), 10) == 0
    second = make(nodes, PARTS)
    entries = second.save(keys(2))
    assert first.bring(keys(3), 10) == 2
    assert first.holds(entries, 10)


def test_a_group_that_lost_one_store_has_its_credit_again_at_both(make: Callable[..., Any]) -> None:
    nodes = make(2)
    ranks = make(nodes, PARTS)
    number = ranks.number()
    ranks.link.submit([Stash(number, 7)])
    assert ranks.wait(Stashed).ok
    nodes[1].kill()
    assert ranks.wait(Detached).reason.startswith("rank 1: ")
    nodes[1].start()
    again = ranks.wait(Attached, after=len(ranks.events))
    assert again.credit == (4,)
    for at in nodes:
        at.at_rest(4)
    ranks.link.submit([Unstash(number, 8)])
    assert not ranks.wait(Unstashed).ok


def test_ranks_that_share_a_part(make: Callable[..., Any]) -> None:
    """One of them publishes it, both read it; each puts away its own growing block."""
    (at,) = make(1)
    ranks = make([at, at], [PARTS[0], PARTS[0]])
    entries = ranks.save(keys(4))
    assert at.status().reported == 4
    assert ranks.bring(keys(4), 10) == 4
    assert ranks.holds(entries, 10)
    for rank, rows in enumerate(ranks.rows):
        rows[20] = rank + 1
    number = ranks.number()
    ranks.link.submit([Stash(number, 20)])
    assert ranks.wait(Stashed).ok
    ranks.link.submit([Unstash(number, 21)])
    assert ranks.wait(Unstashed).ok
    assert [int(rows[21].max()) for rows in ranks.rows] == [1, 2]
    assert [int(rows[21].min()) for rows in ranks.rows] == [1, 2]


def test_a_rank_shows_its_versions_and_reads_the_one_that_is_picked(make: Callable[..., Any]) -> None:
    """Without a leader: the newest is shown first, the older one is named and comes."""
    (at,) = make(1)
    old, new = make([at], [PARTS[0]]), make([at], [PARTS[0]])
    (first,), (second,) = old.save(keys(1)), new.save(keys(1))
    link = old._links[0]
    for version, entry in ((first.version, first), (second.version, second)):
        number = old.number()
        link.submit([Lookup(number, keys(1))])
        events: list[Event] = []
        end = time.monotonic() + PATIENCE_S
        while not any(isinstance(event, Fetched) for event in events):
            assert time.monotonic() < end
            old._happened.wait(0.01)
            came = link.take_events()
            events += came
            if any(isinstance(event, Found) for event in came):
                link.submit([Fetch(number, 1, (version,)), Load(number, 0, (10,))])
        shown = next(event.versions for event in events if isinstance(event, Found))
        names = [(entry.version.writer_id, entry.version.counter, HOST) for entry in (second, first)]
        assert shown == (tuple(names),)
        while not any(isinstance(event, ReadEnded) for event in events):
            assert time.monotonic() < end
            old._happened.wait(0.01)
            events += link.take_events()
        assert old.holds([entry], 10)
