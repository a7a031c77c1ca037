"""A rank of a replica on another node: a thin Ray actor that starts the rank's process as its child.

Owns that process, so that a rank that hangs in a collective can still be killed by the node it hangs on, and so that
what Ray starts stays light: torch is imported by the child alone. Where actors go is cluster/shard_actors.py's.

Invariants:
 1. The rank ends with this actor's process: it watches its parent.
 2. After `kill` nothing runs, and nothing is started any more.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import ray

from tournant.workers.rank_launch import GroupPlace, RankProcess

FIRST_GPU = 0  # Ray hides all GPUs but this actor's own


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rank and where it runs: host name, Ray's id of the node, process."""

    rank: int
    host: str
    node: str
    pid: int


class ShardActor:
    """See the module. Made with several threads: `kill` must not queue behind `wait`."""

    def __init__(self) -> None:
        logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        self._lock = threading.Lock()
        self._killed = False
        self._process: RankProcess | None = None

    def start(
        self, place: GroupPlace, rank: int, ranks_here: int | None, find_store: Callable[[], str] | None
    ) -> RankFacts:
        """Start the rank. ranks_here: ranks that share this node's cores; None = the place says how many threads each
        has. find_store: gives the socket of this node's store, where the place has tiers; None = the place's is it.
        Raises OSError, RuntimeError after `kill`, and what find_store raises.
        """
        if place.offload is not None and find_store is not None:
            place = replace(place, offload=replace(place.offload, store_socket=find_store()))
        if ranks_here is not None:
            place = replace(place, config=replace(place.config, num_threads=threads_of_one(ranks_here)))
        with self._lock:
            if self._killed:
                raise RuntimeError(f"rank {rank} was killed before it was started")
            self._process = process = RankProcess(place, rank, FIRST_GPU)
        return RankFacts(rank, socket.gethostname(), ray.get_runtime_context().get_node_id(), process.process.pid)

    def wait(self) -> str:
        """How the rank ended, once it has: "rank 1 on HOST: killed by signal 9"; empty when it ended well."""
        if self._process is None:
            return ""
        self._process.process.wait()
        return self._process.cause()

    def kill(self) -> None:
        """SIGKILL the rank; it is gone when this returns. Idempotent. Raises RuntimeError if the system leaves it."""
        with self._lock:
            self._killed = True
            process = self._process
        if process is None:
            return
        process.kill()
        try:
            process.wait()
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"process {process.process.pid} of rank {process.rank} does not end: {error}") from error


def threads_of_one(ranks_here: int) -> int:
    """CPU threads of each of so many ranks on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // ranks_here)
