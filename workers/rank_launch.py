"""Starting and killing the processes of ranks 1, 2, ... of a group; rank 0 is the engine process, which is not among
them.

Owns `GroupPlace`, which is all that a rank needs to know, and the launcher of ranks on this machine. Neither torch nor
Ray is imported: what launches ranks on other machines stays light.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from tournant.workers.config import EngineConfig
from tournant.workers.messages import LOCAL_HOST, pack_frame
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.split import Split

KILL_S = 30.0  # most time for the system to take killed processes away


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Where a group of ranks forms, and as what.

    host: address of the leader; port: of the store of torch.distributed; channel_port, token: of the `RankChannel`;
    config: with `device` and `num_threads` decided, since all ranks must have the same; model: as of
    `DescribedModel.to_wire`.
    """

    host: str
    port: int
    channel_port: int
    token: bytes
    writer_id: int
    config: EngineConfig
    model: list[Any]
    split: Split
    offload: OffloadConfig | None = None

    def to_wire(self) -> list[Any]:
        """As plain types."""
        offload = None if self.offload is None else asdict(self.offload)
        split = [self.split.tensor, self.split.pipeline]
        addresses = [self.host, self.port, self.channel_port, self.token]
        return [*addresses, self.writer_id, asdict(self.config), self.model, split, offload]

    @classmethod
    def from_wire(cls, data: list[Any]) -> GroupPlace:
        """Inverse of `to_wire`. Raises ValueError or TypeError when it is no place."""
        host, port, channel_port, token, writer_id, config, model, (tensor, pipeline), offload = data
        return cls(
            host,
            port,
            channel_port,
            token,
            writer_id,
            EngineConfig(**config),
            model,
            Split(tensor, pipeline),
            None if offload is None else OffloadConfig.from_plain(offload),
        )


def join_to_wire(place: GroupPlace, rank: int, parent_pid: int, device_index: int) -> list[Any]:
    """["join", ...]: the first and only frame a rank process gets. device_index: which GPU it is to use, if any."""
    return ["join", parent_pid, rank, device_index, place.to_wire()]


def join_from_wire(message: list[Any]) -> tuple[GroupPlace, int, int, int]:
    """Inverse of `join_to_wire`. Raises ValueError or TypeError when it is something else."""
    kind, parent_pid, rank, device_index, place = message
    if kind != "join":
        raise ValueError(f"a rank process was told {kind!r} first")
    return GroupPlace.from_wire(place), rank, parent_pid, device_index


class RankLauncher(Protocol):
    """Starts the ranks of one group. Methods are called from threads, `kill` and `causes` also while `start` runs."""

    @property
    def host(self) -> str:
        """Address of the engine's machine at which its ranks find it."""

    def start(self, place: GroupPlace) -> None:
        """Start ranks 1, 2, ...; may take seconds. Called once. Raises ConfigError, OSError or RuntimeError when it
        cannot; some may run then, until `kill`.
        """

    def kill(self) -> None:
        """End all ranks at once, stopped ones too; they are gone when it returns. None is started later. Idempotent."""

    def causes(self) -> list[str]:
        """What is known of ranks that ended by themselves, not well: "rank 1 on HOST: killed by signal 9"."""


class RankProcess:
    """One rank on this machine. device_index: which GPU it uses, if the engine is on GPUs."""

    def __init__(self, place: GroupPlace, rank: int, device_index: int) -> None:
        self.rank = rank
        self._connection, theirs = socket.socketpair()
        with theirs:
            # -P keeps the current folder off the module path: a bare `kernels` there would shadow others' packages
            command = [sys.executable, "-P", "-m", "tournant.workers.rank_process", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        try:
            self._connection.sendall(pack_frame(join_to_wire(place, rank, os.getpid(), device_index)))
        except OSError:  # it ended already; `cause` tells
            return

    def cause(self) -> str:
        """How it ended by itself; empty while it runs, and when it ended well."""
        code = self.process.poll()
        if not code:
            return ""
        how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}; see its log"
        return f"rank {self.rank} on {socket.gethostname()}: {how}"

    def kill(self) -> None:
        """End it; returns at once. Idempotent."""
        self.process.send_signal(signal.SIGKILL)
        self._connection.close()

    def wait(self) -> None:
        """Return when it is gone. Raises subprocess.TimeoutExpired when the system does not take it away."""
        self.process.wait(KILL_S)


class LocalRanks:
    """`RankLauncher` of processes on this machine, reachable from it alone. Where there are GPUs, rank r uses GPU r."""

    host = LOCAL_HOST

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._killed = False
        self.processes: list[RankProcess] = []
        self._causes: list[str] = []

    def start(self, place: GroupPlace) -> None:
        """See `RankLauncher.start`. Raises OSError."""
        for rank in range(1, place.split.size):
            with self._lock:
                if self._killed:
                    return
                self.processes.append(RankProcess(place, rank, rank))

    def kill(self) -> None:
        """See `RankLauncher.kill`."""
        self.causes()
        with self._lock:
            self._killed = True
            for process in self.processes:
                process.kill()
            for process in self.processes:
                process.wait()

    def causes(self) -> list[str]:
        """See `RankLauncher.causes`."""
        with self._lock:
            if not self._killed:
                self._causes = [cause for process in self.processes if (cause := process.cause())]
            return list(self._causes)
