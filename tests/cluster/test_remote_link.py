"""An engine's link restores blocks that only another node holds, and is no worse off for a node or agent that fails."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.remote_harness import HERE, THERE, Nodes
from tests.workers.link_harness import BLOCK_BYTES, Engine, keys
from tournant.cluster.block_transport import Given
from tournant.cluster.directory_actor import Held
from tournant.kvstore.agent_wire import AGENT_SOCKET
from tournant.kvstore.socket_transport import peer_credentials
from tournant.workers import remote_reads
from tournant.workers.transfer_messages import HOST, REMOTE, EndRead, Fetch, Fetched, Load, Lookup


class Link:
    """Engines "here", whose link asks the agent, and "there"."""

    def __init__(self, folder: Path) -> None:
        self.nodes = Nodes(folder).start()
        self.engines: list[Engine] = []
        self.there = self._engine(THERE)
        self.chain = keys(20)
        self.entries = self.there.fill(self.chain)
        self.there.save(self.entries)
        self.here = self.engine_here()

    def engine_here(self, agent: Path | None = None, **config: int) -> Engine:
        """One more engine on the node with the agent."""
        path = self.nodes.stores[HERE].socket.with_name(AGENT_SOCKET)
        return self._engine(HERE, agent=agent or path, **config)

    def _engine(self, name: str, **config: object) -> Engine:
        waits = {"lookup_ms": 20_000, "restore_ms": 60_000} | config
        engine = Engine(self.nodes.stores[name].socket, **waits)
        engine.attached()
        self.engines.append(engine)
        return engine

    def close(self) -> None:
        if self.nodes.peers.hang is not None:
            self.nodes.peers.hang.set()
        for engine in self.engines:
            engine.close()
        self.nodes.close()


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    made = Link(tmp_path)
    yield made
    made.close()


def test_blocks_of_another_node_are_restored(link: Link) -> None:
    here = link.here
    found = here.lookup(link.chain)
    assert found.tiers == bytes([REMOTE]) * 20
    fetched = here.fetch(found.read, 20)
    assert (fetched.count, fetched.num_bytes, fetched.remote_blocks) == (20, 0, 20)
    assert (fetched.remote_bytes, fetched.remote_failed) == (20 * BLOCK_BYTES, False)
    assert 0 < fetched.remote_seconds <= fetched.seconds
    assert here.load(found.read, range(20)).count == 20
    assert here.holds(link.entries, 0)
    again = here.lookup(link.chain)
    assert again.tiers == bytes([HOST]) * 20, "it is here now"
    here.submit(EndRead(again.read))
    here.ended(again.read)


def test_a_local_prefix_is_gone_on_with(link: Link) -> None:
    """Only what is wanted comes, and only what is not here."""
    here = link.here
    own = here.fill(link.chain[:5], first=40)
    here.save(own)
    link.nodes.held = lambda chain: [Held(15, (THERE,), ())]
    found = here.lookup([*link.chain, *keys(2, "nowhere")])
    assert found.tiers == bytes([HOST]) * 5 + bytes([REMOTE]) * 15
    fetched = here.fetch(found.read, 12)
    assert (fetched.count, fetched.remote_blocks) == (12, 7)
    assert here.load(found.read, range(12)).count == 12
    assert here.holds(own, 0)
    assert here.holds(link.entries[5:12], 5)
    only_local = here.lookup(link.chain)
    assert only_local.tiers == bytes([HOST]) * 12 + bytes([REMOTE]) * 8
    assert here.fetch(only_local.read, 12).remote_blocks == 0
    assert here.load(only_local.read, range(12)).count == 12


def test_a_node_that_fails_leaves_what_is_here(link: Link) -> None:
    here = link.here
    here.save(here.fill(link.chain[:5], first=40))
    link.nodes.peers.givers.clear()
    found = here.lookup(link.chain)
    fetched = here.fetch(found.read, 20)
    assert (fetched.count, fetched.remote_blocks, fetched.remote_failed) == (5, 0, True)
    assert here.load(found.read, range(20)).count == 5
    assert here.lookup(link.chain).tiers == bytes([HOST]) * 5, "it rests"


def test_corrupt_bytes_end_the_prefix(link: Link) -> None:
    def change(given: Given) -> Given:
        given.payloads[8][0] ^= 1
        return given

    link.nodes.peers.change = change
    found = link.here.lookup(link.chain)
    fetched = link.here.fetch(found.read, 20)
    assert (fetched.count, fetched.remote_blocks, fetched.remote_failed) == (8, 8, True)
    assert link.here.load(found.read, range(20)).count == 8
    assert link.here.holds(link.entries[:8], 0)


def test_a_read_that_ends_while_blocks_are_on_their_way(link: Link) -> None:
    link.nodes.peers.hang = threading.Event()
    here = link.here
    found = here.lookup(link.chain)
    here.submit(Fetch(found.read, 20), EndRead(found.read))
    assert here.ended(found.read).count == 0
    link.nodes.peers.hang.set()
    again = here.lookup(link.chain)
    here.submit(Fetch(again.read, 20), Load(again.read, 0, tuple(range(20))))
    assert here.ended(again.read).count == 20
    assert not [event for event in here.events if isinstance(event, Fetched) and event.read == found.read]


def test_a_store_that_is_lost_meanwhile_ends_all(link: Link) -> None:
    link.nodes.peers.hang = threading.Event()
    here = link.here
    found = here.lookup(link.chain)
    here.submit(Fetch(found.read, 20), Load(found.read, 0, tuple(range(20))))
    here.submit(Lookup(901, keys(3, "else")))
    link.nodes.stores[HERE].kill()
    assert here.ended(found.read).count == 0
    assert here.ended(901).count == 0


def test_a_node_that_hangs_is_waited_for_half_as_long_as_a_restore(link: Link) -> None:
    here = link.engine_here(restore_ms=400)
    here.save(here.fill(link.chain[:5], first=40))
    link.nodes.peers.hang = threading.Event()
    found = here.lookup(link.chain)
    fetched = here.fetch(found.read, 20)
    assert (fetched.count, fetched.remote_failed) == (5, True)
    assert here.load(found.read, range(5)).count == 5


Behaviour = Callable[[socket.socket], object]


def _rubbish(connection: socket.socket) -> None:
    connection.recv(1 << 20)
    connection.sendall(b"\x04\0\0\0rubb")


def _unasked(connection: socket.socket) -> None:
    connection.recv(1 << 20)
    connection.sendall(b"\x05\0\0\0\x94\x40\x63\x01\xa1")


BAD_AGENTS: dict[str, Behaviour] = {
    "closes": lambda connection: connection.close(),
    "says nothing": lambda connection: connection,
    "sends rubbish": _rubbish,
    "answers what nobody asked": _unasked,
}


@pytest.mark.parametrize("name", BAD_AGENTS)
def test_a_bad_agent_is_none(link: Link, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_reads, "REST_S", 1e6)
    monkeypatch.setattr(remote_reads, "LATE_S", 1e6)
    path = tmp_path / "bad"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    kept: list[object] = []

    def serve() -> None:
        connection, _ = listener.accept()
        kept.append(connection)
        assert peer_credentials(connection)[0]
        BAD_AGENTS[name](connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    here = link.engine_here(agent=path, lookup_ms=200)
    own = here.fill(link.chain[:3], first=40)
    here.save(own)
    assert here.bring(link.chain, 0).count == 3
    assert here.bring(link.chain, 0).count == 3, "it is not asked again for a while"
    assert here.holds(own, 0)
    thread.join()
    listener.close()


def test_no_agent_is_no_remote_block(link: Link, tmp_path: Path) -> None:
    here = link.engine_here(agent=tmp_path / "nobody")
    assert here.lookup(link.chain).tiers == b""
    assert link.there.lookup(link.chain).tiers == bytes([HOST]) * 20
