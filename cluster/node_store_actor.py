"""The node store of a Ray node: one actor per node and application that starts it, supervises it, says where it is,
tells the directory what it holds, and exchanges blocks with other nodes.

Owns the actor's name, its placement and its end; the process is node_store.py's. The actor outlives the replicas that
made it and ends, with the store, when no engine was attached for a while.

Invariants:
 1. All replicas of an application on a node get one store, or an error that names what they disagree about.
 2. The socket's path is the same for as long as the Ray node lives, whatever dies meanwhile.
 3. Every call has a deadline.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tournant.cluster.announcing import Announcing, Replies
from tournant.cluster.app_namespace import namespace_of
from tournant.cluster.block_giver import BlockGiver
from tournant.cluster.block_transport import Header, RayTransport, Wanted
from tournant.cluster.directory_actor import Directory, RayShards, number_of
from tournant.cluster.node_store import STOP_MARGIN_S, StoreKeeper, StorePlan
from tournant.cluster.remote_blocks import RemoteBlocks
from tournant.cluster.run_folder import STORE_SOCKET, RunFolder
from tournant.kvstore.admin import Announcements, PollAnnouncements
from tournant.kvstore.agent_wire import AGENT_SOCKET
from tournant.kvstore.client import ask
from tournant.kvstore.errors import StoreConfigError, StoreRefused, StoreUnavailable

FIND_S = 180.0
RETRY_S = 0.2
ASK_S = 5.0  # for what a store has to tell the directory
MAX_CALLS = 64  # at once: replicas of a node that start together
_LOG = logging.getLogger("tournant.node_store")


class NodeStoreActor:
    """See the module. folder: private to this user, where the socket's folder is made; None = a run folder of its own.

    `find_store` makes it. Errors of a store that cannot start come from `socket`, not from here.
    """

    def __init__(self, plan: StorePlan, folder: str | None, app: str) -> None:
        _log_to_stderr()
        context = ray.get_runtime_context()
        self._run_folder: RunFolder | None = None
        if folder is None:
            self._run_folder = RunFolder(name=_digest(context, app))
            folder = str(self._run_folder.path)
        self._me = context.current_actor
        home = Path(folder, STORE_SOCKET).parent
        # made by a process before this one, whose store may still be copying down
        patience_s = plan.drain_s + STOP_MARGIN_S if home.exists() else 0.0
        socket, node = Path(folder, STORE_SOCKET), context.get_node_id()
        self._announcing = _announcing(socket, app, node, plan.directory_shards)
        self._giver = BlockGiver(socket)
        self._agent = _agent(socket, app, node, plan.directory_shards, self._giver)
        self._keeper = StoreKeeper(plan, home, patience_s=patience_s, on_idle=self._end)

    def socket(self, plan: StorePlan) -> str:
        """Where engines attach, once the store is ready.

        Raises StoreRefused when the store runs by another plan, StoreConfigError when it cannot start (this actor ends
        then), StoreUnavailable when it is not ready in time or ending.
        """
        if differences := self._keeper.plan.differences(plan):
            self._refuse(differences)
        try:
            return str(self._keeper.wait_ready())
        except StoreConfigError:
            self._end_store()
            raise

    def status(self) -> dict[str, Any]:
        """socket, pid, starts, and the facts of `kvstore.admin.Status`. Raises StoreUnavailable, StoreRefused."""
        keeper = self._keeper
        facts = {"socket": str(keeper.socket), "pid": keeper.pid, "starts": keeper.num_starts}
        return facts | asdict(keeper.status())

    def give(self, wanted: Wanted) -> tuple[Header, list[Any]]:
        """Blocks of this node's store for another node: what they are, and the reference of their bytes, if there are
        any.
        """
        header, payloads = self._giver.give(wanted, ray.put)
        return header, [] if payloads is None else [payloads]

    def stop(self) -> None:
        """Let the store copy down, within its limit, and end it. The caller ends the actor then."""
        self._end_store()
        if self._run_folder is not None:
            self._run_folder.remove()

    def _end_store(self) -> None:
        if self._announcing is not None:
            self._announcing.stop()
        if self._agent is not None:
            self._agent.stop()
        self._giver.end_idle(0.0)
        self._keeper.stop()
        with suppress(OSError):
            self._keeper.socket.parent.rmdir()  # as none is there that a process left which died

    def _refuse(self, differences: list[str]) -> None:
        """Say why a plan cannot be followed; a store that nobody uses makes room for it instead."""
        if not self._keeper.status().clients:
            self._end()
            raise StoreUnavailable("the store had another configuration and no client; it makes room")
        raise StoreRefused(
            f"the node store runs with {'; '.join(differences)}; engines are attached to it: give all replicas of a "
            "node the same configuration, or end those that run before you change it"
        )

    def _end(self) -> None:
        """For good: Ray does not start it again."""
        _LOG.info("no engine uses the store at %s; it ends", self._keeper.socket)
        self.stop()
        ray.kill(self._me, no_restart=True)


def find_store(plan: StorePlan, app: str, folder: str | None = None, timeout_s: float = FIND_S) -> str:
    """Socket of this Ray node's store for an application, started if none runs. Blocks.

    Raises StoreConfigError when it cannot start or the node has too little memory for it, StoreRefused when one runs
    by another plan, StoreUnavailable when none is ready in time.
    """
    node = ray.get_runtime_context().get_node_id()
    _check_memory(plan.store.host_bytes, node)
    end = time.monotonic() + timeout_s + plan.store.host_bytes / (1 << 30)
    actor_class = ray.remote(NodeStoreActor).options(
        name=_name(node),
        namespace=namespace_of(app),
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        memory=plan.store.host_bytes,
        max_restarts=-1,
        max_concurrency=MAX_CALLS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    problem = "its actor was not placed on the node"
    while (left := end - time.monotonic()) > 0:
        actor: Any = actor_class.remote(plan, folder, app)
        try:
            return str(ray.get(actor.socket.remote(plan), timeout=left))
        except (StoreConfigError, StoreRefused) as error:
            if isinstance(error, StoreConfigError):
                ray.kill(actor, no_restart=True)
            raise getattr(error, "cause", error) from None  # without Ray's report of where it came from
        except GetTimeoutError:
            break
        except (RayActorError, StoreUnavailable) as error:  # it died, or it is just ending
            problem = str(error).strip().splitlines()[-1]
            time.sleep(min(RETRY_S, max(0.0, left)))
    raise StoreUnavailable(f"the node store was not ready after {timeout_s:g} s: {problem}")


def stop_store(app: str, timeout_s: float) -> None:
    """End this Ray node's store for an application, after it has copied down, and its actor. None is no error.

    Raises GetTimeoutError or RayActorError; the store ends with its actor's process then.
    """
    try:
        actor = ray.get_actor(_name(ray.get_runtime_context().get_node_id()), namespace=namespace_of(app))
    except ValueError:
        return
    ray.get(actor.stop.remote(), timeout=timeout_s)
    ray.kill(actor, no_restart=True)


def _announcing(socket: Path, app: str, node: str, num_shards: int) -> Announcing | None:
    """What tells the directory, running; None without one."""
    if not num_shards:
        return None
    number = number_of(node)

    def poll(heard: Replies) -> Announcements:
        return cast(Announcements, ask(socket, PollAnnouncements(number, num_shards, tuple(heard)), ASK_S))

    announcing = Announcing(poll, RayShards(app, node), num_shards, _is_alone)
    announcing.start()
    return announcing


def _agent(socket: Path, app: str, node: str, num_shards: int, giver: BlockGiver) -> RemoteBlocks | None:
    """What brings blocks of other nodes, listening; None without a directory that knows of them."""
    if not num_shards:
        return None

    def actor_of(other: str) -> Any:
        return ray.get_actor(_name(other), namespace=namespace_of(app))

    directory = Directory(app, num_shards)
    path, transport = socket.with_name(AGENT_SOCKET), RayTransport(actor_of)
    try:
        return RemoteBlocks(path, socket, node, directory.lookup, transport, directory.node_lost, giver.end_idle)
    except StoreConfigError as error:
        _LOG.error("engines of this node get no blocks of other nodes: %s", error)
        return None


def _is_alone() -> bool:
    """Whether this is the only node of the Ray cluster."""
    return len([node for node in ray.nodes() if node["Alive"]]) < 2


def _name(node: str) -> str:
    return f"tournant-store-{node}"


def _digest(context: Any, app: str) -> str:
    """Name of the run folder: the same for every process of one actor name, another one for other applications."""
    return hashlib.sha256(f"{context.namespace}/{app}/{context.get_node_id()}".encode()).hexdigest()[:8]


def _check_memory(host_bytes: int, node: str) -> None:
    """Raises StoreConfigError when Ray would wait without an end for memory that the node does not have."""
    has = next((int(one["Resources"].get("memory", 0)) for one in ray.nodes() if one["NodeID"] == node), 0)
    if host_bytes > has:
        raise StoreConfigError(
            f"host_bytes is {host_bytes}; Ray hands out {has} bytes of memory on this node: choose less, or tell Ray "
            "more (ray start --memory)"
        )


def _log_to_stderr() -> None:
    """Logs of this actor, as those of the store process, reach Ray's log of it."""
    logger = logging.getLogger("tournant")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
