"""Blocks of another node's store, brought into this one's by its agent: without Ray, whatever the other node does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.remote_harness import HERE, IDENTITY, PATIENCE_S, THERE, Change, Nodes, answer_of
from tests.kvstore.store_harness import HALVES, SLOT, WHOLE, Store, keys, write, writer
from tournant.cluster import block_adopter, block_transport, remote_blocks
from tournant.cluster.block_giver import BlockGiver
from tournant.cluster.block_transport import Given, Header, Row, TransportFailed, Wanted
from tournant.cluster.directory_actor import Held
from tournant.kvstore.agent_wire import Brought, Located
from tournant.kvstore.block import Part, Version
from tournant.kvstore.errors import StoreUnavailable
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.slots import SlotState


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.close()


def test_blocks_come_under_their_writers_versions(nodes: Nodes) -> None:
    there = nodes.start().stores[THERE].attach(writer())
    chain = keys(40)
    assert write(there, chain) == len(chain)
    brought = nodes.bring(chain)
    assert (brought.count, brought.num_bytes, brought.failed) == (40, 40 * SLOT, False)
    wanted = [Version(there.identity.writer_id, counter) for counter in range(1, 41)]
    assert nodes.here(chain) == wanted
    assert nodes.stores[HERE].status().adopted == 40
    again = nodes.bring(chain)
    assert (again.count, again.num_bytes, again.failed) == (40, 0, False), "it asks for nothing that is here"
    assert len(nodes.peers.asked) == 1


def test_many_batches_and_a_chain_that_ends_early(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_adopter, "BATCH_BYTES", 5 * SLOT)
    monkeypatch.setattr("tournant.cluster.block_giver.BATCH_BYTES", 5 * SLOT)
    chain = keys(60)
    write(nodes.start().stores[THERE].attach(writer()), chain[:43])
    assert nodes.bring(chain).count == 43
    assert len(nodes.here(chain)) == 43
    assert all(len(asked) <= 5 for asked in nodes.peers.asked)


def test_blocks_on_nvme_and_a_part_of_a_block(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start(host_bytes=64 * SLOT, nvme=NvmeConfig(), nvme_bytes=64 << 20, segment_bytes=1 << 20)
    there, chain = nodes.stores[THERE], keys(100)
    upper = there.attach(writer(part=HALVES[1], parts=(HALVES[1],)))
    for start in range(0, 100, 8):
        write(upper, chain[start : start + 8], start + 1)
        there.wait_for_disk()
    nodes.stores[HERE].attach(writer(part=HALVES[1]))
    assert nodes.bring(chain, part=WHOLE).count == 0, "another part is of no use"
    assert nodes.bring(chain, part=HALVES[1]).count == 100
    assert len(nodes.here(chain, HALVES[1])) == 100


def test_two_sizes_of_blocks(nodes: Nodes) -> None:
    small = SLOT // 2
    nodes.start(chunk_bytes=1 << 20)
    there, chain = nodes.stores[THERE], keys(12)
    write(there.attach(writer()), chain[:4])
    write(there.attach(writer(slot_bytes=small)), chain[4:])
    assert nodes.bring(chain).count == 4, "of an engine with one size"
    nodes.peers.change = lambda given: given
    nodes.agent._rests_until.clear()  # type: ignore[union-attr]
    assert nodes.bring(chain, slot_bytes=(SLOT, small)).count == 12


def _rows(given: Given) -> list[Row]:
    wanted = Wanted(
        tuple(given.header.rows[start : start + 32] for start in range(0, len(given.header.rows), 60)),
        given.header.part, b"", "", b"", 1 << 30, 0.0,
    )  # fmt: skip
    return given.header.checked(wanted)


def flipped(given: Given) -> Given:
    given.payloads[2][7] ^= 1
    return given


def with_rows(change: Callable[[list[Row]], list[Row]], part: Part = WHOLE) -> Change:
    return lambda given: Given(Header.of(part, change(_rows(given))), given.payloads)


def too_much(given: Given) -> Given:
    rows, more = _rows(given), keys(1, "more")[0]
    return Given(Header.of(WHOLE, [*rows, rows[0]._replace(key=more)]), [*given.payloads, given.payloads[0]])


WRONG: dict[str, tuple[Change, int]] = {  # blocks that are good before what is wrong
    "a bit of a payload": (flipped, 2),
    "bytes of another block": (lambda given: Given(given.header, [given.payloads[1]] * 6), 0),
    "a damaged header": (
        lambda given: Given(replace(given.header, rows=given.header.rows[:-1] + b"x"), given.payloads), 0,
    ),
    "another part": (with_rows(lambda rows: rows, HALVES[0]), 0),
    "another key": (with_rows(lambda rows: [rows[1], *rows[1:]]), 0),
    "more than was asked for": (too_much, 0),
    "a payload less": (lambda given: Given(given.header, given.payloads[:-1]), 0),
    "a longer payload": (lambda given: Given(given.header, [np.zeros(9 * SLOT, np.uint8)] * 6), 0),
    "a block that fits no slot": (with_rows(lambda rows: [row._replace(length=1 << 30) for row in rows]), 0),
    "a shorter block": (
        lambda given: Given(
            Header.of(WHOLE, [row._replace(length=100) for row in _rows(given)]), [one[:100] for one in given.payloads]
        ), 0,
    ),
    "another checksum": (with_rows(lambda rows: [rows[0], rows[1]._replace(checksum=5), *rows[2:]]), 1),
    "no array": (lambda given: Given(given.header, [b"x" * SLOT] * 6), 0),  # type: ignore[list-item]
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_not_adopted_and_its_node_left_alone(nodes: Nodes, wrong: str) -> None:
    chain = keys(6)
    write(nodes.start().stores[THERE].attach(writer()), chain)
    nodes.peers.change, good = WRONG[wrong]
    brought = nodes.bring(chain)
    assert (brought.count, brought.failed) == (good, True)
    nodes.peers.change = lambda given: given
    assert len(nodes.here(chain)) == good
    client = nodes.ask()
    client.locate(chain, WHOLE)
    assert answer_of(client) == Located(1, 0, ""), "it is not named for a while"
    assert nodes.bring(chain) == Brought(1, 0, 0, 0, True)
    assert len(nodes.peers.asked) == 1
    nodes.agent._rests_until.clear()  # type: ignore[union-attr]
    assert nodes.bring(chain).count == 6
    lent = nodes.stores[HERE].pages(SlotState.LENT)
    assert lent == (8 + 8) * SLOT // 4096, "no slot is lost"


def test_a_version_is_taken_as_it_is_told_and_never_made_up(nodes: Nodes) -> None:
    """The same key under two versions: both are kept apart, and a copy of one never overwrites the other."""
    chain = keys(3)
    there = nodes.start().stores[THERE].attach(writer())
    write(there, chain)
    write(nodes.engine, chain[:1])
    assert nodes.bring(chain).count == 3
    found = nodes.here(chain)
    assert [version.writer_id for version in found] == [nodes.engine.identity.writer_id] + 2 * [
        there.identity.writer_id
    ]


def test_a_node_that_hangs_is_given_up_in_time(nodes: Nodes) -> None:
    chain = keys(6)
    write(nodes.start().stores[THERE].attach(writer()), chain)
    nodes.peers.hang = threading.Event()
    brought = nodes.bring(chain, timeout_s=0.2)
    assert (brought.count, brought.failed) == (0, True)
    assert nodes.bring(chain, timeout_s=PATIENCE_S).failed, "it rests: nothing waits for it again"
    write(nodes.engine, chain[:2])
    assert nodes.gone == []
    assert nodes.bring(chain, node="nowhere").failed
    assert nodes.gone == ["nowhere"]


def test_a_store_that_is_lost_there_is_a_miss(nodes: Nodes) -> None:
    chain = keys(6)
    write(nodes.start().stores[THERE].attach(writer()), chain)
    nodes.stores[THERE].kill()
    brought = nodes.bring(chain)
    assert (brought.count, brought.num_bytes, brought.failed) == (0, 0, False)


def test_a_store_that_is_lost_here_is_attached_again(nodes: Nodes) -> None:
    chain = keys(6)
    write(nodes.start().stores[THERE].attach(writer()), chain)
    assert nodes.bring(chain).count == 6
    nodes.stores[HERE].kill()
    assert nodes.bring(chain).count == 0
    nodes.stores[HERE].start()
    assert nodes.bring(chain).count == 0, "no engine of these weights is here"
    nodes.stores[HERE].attach(writer())
    assert nodes.bring(chain).count == 6
    assert len(nodes.here(chain)) == 6


def test_the_node_with_the_longest_prefix_is_named(nodes: Nodes) -> None:
    chain = keys(10)
    nodes.start().held = lambda _: [Held(4, ("a", HERE), ("b", "c")), Held(3, (HERE,), ("b", "c")), Held(2, ("c",), ())]
    client = nodes.ask()
    client.locate(chain, WHOLE)
    assert answer_of(client) == Located(1, 9, "c")
    nodes.held = lambda _: [Held(4, ("b", "a"), ("c",)), Held(3, (HERE,), ())]
    client.locate(chain, WHOLE)
    assert answer_of(client) == Located(2, 4, "a")
    nodes.held = lambda _: []
    client.locate(chain, WHOLE)
    assert answer_of(client) == Located(3, 0, "")


def test_a_node_with_other_parts_is_taken_for_another_one(nodes: Nodes) -> None:
    """And not asked for that chain in that part again for a while."""
    chain, upper = keys(6), HALVES[1]
    write(nodes.start().stores[THERE].attach(writer(part=upper, parts=(upper,))), chain)
    (nodes.folder / "a").mkdir(mode=0o700)
    other = nodes.stores["a"] = Store("socket", nodes.folder / "a").start()
    write(other.attach(writer(part=HALVES[0], parts=(HALVES[0],))), chain)
    nodes.peers.givers["a"] = BlockGiver(other.socket)
    nodes.held = lambda rest: [Held(len(rest), ("a", THERE), ())]
    client = nodes.ask()
    client.locate(chain, upper)
    assert answer_of(client) == Located(1, 6, "a"), "the first of two alike"
    nodes.stores[HERE].attach(writer(part=upper))
    brought = nodes.bring(chain, node="a", part=upper)
    assert (brought.count, brought.num_bytes, brought.failed) == (6, 6 * SLOT, False)
    assert len(nodes.here(chain, upper)) == 6
    client.locate(chain, upper)
    assert answer_of(client) == Located(2, 6, THERE)
    client.locate(chain, HALVES[0])
    assert answer_of(client) == Located(3, 6, "a"), "it is as good as any for another part"
    assert len(nodes.peers.asked) == 2
    assert nodes.bring(chain, part=WHOLE).count == 0
    assert len(nodes.peers.asked) == 4, "both were asked, once"


def test_questions_at_once_share_what_comes(nodes: Nodes) -> None:
    chain = keys(30)
    write(nodes.start().stores[THERE].attach(writer()), chain)
    clients = [nodes.ask() for _ in range(6)]
    for client in clients:
        client.bring(THERE, chain, 0, WHOLE, IDENTITY, (SLOT,), PATIENCE_S)
    answers = [answer_of(client) for client in clients]
    assert all(isinstance(one, Brought) and one.count == 30 for one in answers)
    assert sum(one.num_bytes for one in answers if isinstance(one, Brought)) == 30 * SLOT


def test_an_agent_that_is_idle_is_no_client(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_blocks, "IDLE_S", 0.0)
    monkeypatch.setattr(remote_blocks, "TICK_S", 0.05)
    chain = keys(3)
    write(nodes.start().stores[THERE].attach(writer()), chain)
    assert nodes.bring(chain).count == 3
    nodes.stores[HERE].wait_for(lambda status: status.clients == 1)
    nodes.peers.givers[THERE].end_idle(0.0)
    nodes.stores[THERE].wait_for(lambda status: status.clients == 1)
    assert nodes.bring([*chain, *keys(1, "no")]).count == 3


def test_rubbish_ends_a_link_and_nobody_else(nodes: Nodes) -> None:
    chain = keys(3)
    write(nodes.start().stores[THERE].attach(writer()), chain)
    client = nodes.ask()
    client._sock.send(b"\x04\0\0\0rubb")
    with pytest.raises(StoreUnavailable, match="closed"):
        answer_of(client)
    assert nodes.bring(chain).count == 3


def test_an_agent_that_ends_leaves_no_socket(nodes: Nodes) -> None:
    client = nodes.start().ask()
    assert nodes.agent is not None
    nodes.agent.stop()
    with pytest.raises(StoreUnavailable):
        answer_of(client)
    with pytest.raises(StoreUnavailable, match="no agent can be reached"):
        nodes.ask()


def test_a_transport_says_what_failed() -> None:
    transport = block_transport.RayTransport(lambda node: (_ for _ in ()).throw(ValueError(f"no actor of {node}")))
    with pytest.raises(TransportFailed, match="no actor of b"):
        transport.ask("b", Wanted((), WHOLE, b"", "", b"", 1, 1.0))


def test_credit_that_lacked_once_is_asked_for_again(nodes: Nodes) -> None:
    """While others pin or have lent the whole pool the adopter gets no slot; it must not stay without one."""
    chain = keys(6)
    nodes.start()
    write(nodes.stores[THERE].attach(writer()), chain)
    assert nodes.bring(chain[:1]).count == 1
    (adopter,) = nodes.agent._adopters.values()  # type: ignore[union-attr]
    (client,) = adopter._clients.values()
    taken = [client.take_slot() for _ in range(client.credit)]
    client.post([], [slot for slot in taken if slot is not None])
    assert client.credit == 0
    assert nodes.bring(chain).count == 6
