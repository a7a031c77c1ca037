"""Ranks of a group restore what another node holds, each for its part; whatever fails there is a miss for all."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.remote_harness import HERE, THERE, Nodes
from tests.workers.link_harness import BLOCK_BYTES, keys
from tests.workers.test_group_link import PARTS, Ranks
from tournant.cluster.block_transport import Given
from tournant.kvstore.agent_wire import AGENT_SOCKET
from tournant.kvstore.block import Part
from tournant.workers.transfer_messages import HOST, REMOTE, Attached, Detached, EndRead, Fetch, Fetched, Load, Lookup

CHAIN = keys(6)


class Groups:
    """Groups over the stores "here", which has an agent, and "there"."""

    def __init__(self, folder: Path) -> None:
        self.nodes = Nodes(folder).start()
        self.agent = self.nodes.stores[HERE].socket.with_name(AGENT_SOCKET)
        self.made: list[Ranks] = []

    def group(self, *where: str, parts: Sequence[Part] = PARTS, **config: Any) -> Ranks:
        stores: list[Any] = [self.nodes.stores[name] for name in where]
        agents = [self.agent if name == HERE else None for name in where]
        found = Ranks(
            stores, parts, **{"agents": agents, "credit_blocks": 6, "lookup_ms": 20_000, "restore_ms": 60_000} | config
        )
        self.made.append(found)
        found.wait(Attached)
        return found

    def close(self) -> None:
        if self.nodes.peers.hang is not None:
            self.nodes.peers.hang.set()
        for ranks in self.made:
            ranks.close()
        self.nodes.close()


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Groups]:
    made = Groups(tmp_path)
    yield made
    made.close()


def test_every_rank_brings_its_part(groups: Groups) -> None:
    """Also ranks that hold the same heads: the second finds what the first has brought."""
    there = groups.group(THERE, THERE)
    entries = there.save(CHAIN)
    here = groups.group(HERE, HERE)
    found = here.lookup(CHAIN)
    assert found.tiers == bytes([REMOTE]) * 6
    fetched = here.fetch(found.read, 5)
    assert (fetched.count, fetched.num_bytes, fetched.remote_blocks, fetched.remote_failed) == (5, 0, 5, False)
    assert fetched.remote_bytes == 2 * 5 * BLOCK_BYTES
    assert 0 < fetched.remote_seconds <= fetched.seconds
    assert here.load(found.read, range(10, 15)) == 5
    assert here.holds(entries[:5], 10)
    again = here.lookup(CHAIN)
    assert again.tiers == bytes([HOST]) * 5 + bytes([REMOTE]), "what was brought is here"
    fetched = here.fetch(again.read, 5)
    assert (fetched.count, fetched.remote_blocks, fetched.remote_seconds) == (5, 0, 0.0)
    assert here.load(again.read, range(20, 25)) == 5
    chain = keys(3, "shared heads")
    entries = groups.group(THERE, THERE, parts=[PARTS[0]] * 2).save(chain)
    alike = groups.group(HERE, HERE, parts=[PARTS[0]] * 2)
    assert alike.bring(chain, 10) == 3
    assert alike.holds(entries, 10)
    assert len(groups.nodes.peers.asked) == 3, "a part is asked for once"


def test_only_who_lacks_a_block_brings_it_in_the_version_of_the_others(groups: Groups) -> None:
    entries = groups.group(THERE, HERE).save(CHAIN[:3])
    mixed = groups.group(HERE, HERE)
    found = mixed.lookup(CHAIN[:3])
    assert found.tiers == bytes([REMOTE]) * 3
    fetched = mixed.fetch(found.read, 3)
    assert (fetched.count, fetched.remote_blocks, fetched.remote_bytes) == (3, 3, 3 * BLOCK_BYTES)
    assert mixed.load(found.read, range(10, 13)) == 3
    assert mixed.holds(entries, 10)


def test_another_version_there_is_not_taken(groups: Groups) -> None:
    """The store here has the upper heads of one write, the node there gives the lower ones of the next."""
    groups.group(THERE, HERE).save(CHAIN[:3])
    groups.group(THERE, THERE).save(CHAIN[:1])
    mixed = groups.group(HERE, HERE)
    assert mixed.bring(CHAIN[:3], 10) == 0
    assert mixed.lookup(CHAIN[:3]).tiers == b"", "both ranks have it now, in no common version"
    own = mixed.save(CHAIN[:3])
    assert mixed.bring(CHAIN[:3], 10) == 3
    assert mixed.holds(own, 10)


def test_bytes_that_are_damaged_on_the_way_to_one_rank_cut_the_prefix(groups: Groups) -> None:
    entries = groups.group(THERE, THERE).save(CHAIN)

    def change(given: Given) -> Given:
        if given.header.part == PARTS[1]:
            given.payloads[4][0] ^= 1
        return given

    groups.nodes.peers.change = change
    here = groups.group(HERE, HERE)
    found = here.lookup(CHAIN)
    fetched = here.fetch(found.read, 6)
    assert (fetched.count, fetched.remote_blocks, fetched.remote_failed) == (4, 4, True)
    assert here.load(found.read, range(10, 14)) == 4
    assert here.holds(entries[:4], 10)


def test_a_node_that_hangs_or_an_agent_that_is_not_there(groups: Groups, tmp_path: Path) -> None:
    """What is here comes, in time; blocks that one rank cannot get are promised to nobody."""
    groups.group(THERE, THERE).save(CHAIN)
    here = groups.group(HERE, HERE, restore_ms=400)
    own = here.save(CHAIN[:2])
    hang = groups.nodes.peers.hang = threading.Event()
    found = here.lookup(CHAIN)
    assert found.tiers == bytes([HOST, HOST] + [REMOTE] * 4)
    here.link.submit([Fetch(found.read, 6), Load(found.read, 0, tuple(range(10, 16)))])
    assert here.ended(found.read) == 2
    assert here.holds(own, 10)
    (fetched,) = [event for event in here.events if isinstance(event, Fetched)]
    assert (fetched.count, fetched.remote_blocks, fetched.remote_failed) == (2, 0, True)
    hang.set()
    half = groups.group(HERE, HERE, agents=[groups.agent, tmp_path / "nobody"])
    assert half.lookup(CHAIN).tiers == bytes([HOST, HOST])


def test_a_read_that_ends_and_a_store_that_is_lost_meanwhile(groups: Groups) -> None:
    groups.group(THERE, THERE).save(CHAIN)
    here = groups.group(HERE, HERE)
    hang = groups.nodes.peers.hang = threading.Event()
    found = here.lookup(CHAIN)
    here.link.submit([Fetch(found.read, 6), EndRead(found.read)])
    assert here.ended(found.read) == 0
    found = here.lookup(CHAIN)
    here.link.submit([Fetch(found.read, 6), Load(found.read, 0, tuple(range(10, 16))), Lookup(99, keys(2, "else"))])
    groups.nodes.stores[HERE].kill()
    assert here.ended(found.read) == 0
    assert here.ended(99) == 0
    here.wait(Detached)
    assert not any(isinstance(event, Fetched) for event in here.events)
    hang.set()
