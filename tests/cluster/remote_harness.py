"""Two node stores on one machine, an agent beside the first, and a transport between them that tests can break."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.kvstore.store_harness import READER, SLOT, WEIGHTS, WHOLE, Store, read, writer
from tournant.cluster.block_giver import BlockGiver
from tournant.cluster.block_transport import Given, Pending, TransportFailed, Wanted
from tournant.cluster.directory_actor import Held
from tournant.cluster.remote_blocks import RemoteBlocks
from tournant.kvstore.agent_client import AgentClient
from tournant.kvstore.agent_wire import AGENT_SOCKET, AgentAnswer, Brought
from tournant.kvstore.block import Part, Version

PATIENCE_S = 30.0
IDENTITY = (WEIGHTS, "bf16", b"")
HERE, THERE = "here", "there"
Change = Callable[[Given], Given]


class Peers:
    """A transport to stores of this test. change: what becomes of an answer on its way; hang: until it is set, nobody
    answers; asked: keys of every call.
    """

    def __init__(self) -> None:
        self.givers: dict[str, BlockGiver] = {}
        self.change: Change = lambda given: given
        self.hang: threading.Event | None = None
        self.asked: list[tuple[bytes, ...]] = []

    def ask(self, node: str, wanted: Wanted) -> Pending:
        self.asked.append(wanted.keys)
        if node not in self.givers:
            raise TransportFailed("there is no such node", is_gone=True)
        return _Pending(self, node, wanted)


class _Pending:
    def __init__(self, peers: Peers, node: str, wanted: Wanted) -> None:
        self.peers, self.node, self.wanted = peers, node, wanted

    def result(self, timeout_s: float) -> Given:
        peers = self.peers
        if peers.hang is not None and not peers.hang.wait(timeout_s):
            raise TransportFailed("no answer in time")
        header, copied = peers.givers[self.node].give(self.wanted, lambda views: [view.copy() for view in views])
        return peers.change(Given(header, copied or []))


class Nodes:
    """Stores "here", with an agent, and "there"; who holds what is said by `held`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stores: dict[str, Store] = {}
        self.peers = Peers()
        self.held: Callable[[Sequence[bytes]], list[Held]] = lambda chain: [Held(len(chain), (THERE,), ())]
        self.agent: RemoteBlocks | None = None
        self.gone: list[str] = []
        self.clients: list[AgentClient] = []

    def start(self, **there: Any) -> Nodes:
        for name, config in ((HERE, {}), (THERE, there)):
            (self.folder / name).mkdir(mode=0o700)
            self.stores[name] = Store("socket", self.folder / name).start(**config)
        self.peers.givers[THERE] = BlockGiver(self.stores[THERE].socket)
        here = self.stores[HERE].socket
        path = here.with_name(AGENT_SOCKET)
        self.agent = RemoteBlocks(path, here, HERE, lambda chain, _: self.held(chain), self.peers, self.gone.append)
        self.engine = self.stores[HERE].attach(writer())  # whose weights are in use here
        return self

    def ask(self) -> AgentClient:
        self.clients.append(AgentClient(self.stores[HERE].socket.with_name(AGENT_SOCKET)))
        return self.clients[-1]

    def bring(self, chain: Sequence[bytes], timeout_s: float = PATIENCE_S, **changes: Any) -> Brought:
        given = {"node": THERE, "depth": 0, "part": WHOLE, "identity": IDENTITY, "slot_bytes": (SLOT,), **changes}
        client = self.ask()
        client.bring(keys=chain, timeout_s=timeout_s, **given)
        answer = answer_of(client)
        assert isinstance(answer, Brought)
        return answer

    def here(self, chain: Sequence[bytes], part: Part = WHOLE) -> list[Version]:
        """Versions of the blocks that can be read here; their bytes are compared."""
        return read(self.stores[HERE].attach(READER), chain, [part])

    def close(self) -> None:
        if self.peers.hang is not None:
            self.peers.hang.set()
        for client in self.clients:
            client.close()
        if self.agent is not None:
            self.agent.stop()
        for giver in self.peers.givers.values():
            giver.end_idle(0.0)
        for store in self.stores.values():
            store.close()


def answer_of(client: AgentClient) -> AgentAnswer:
    end = time.monotonic() + PATIENCE_S
    while not (found := client.take()):
        assert time.monotonic() < end
        select.select([client], [client] if client.has_unsent else [], [], 1.0)
    return found[0]
