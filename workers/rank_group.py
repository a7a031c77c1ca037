"""One group of ranks that run a model together: who is in it, and how they speak.

Owns the process groups of one writer id, over torch.distributed: a gloo group for agreeing while the model loads, and
for data one per stage (sums and joins) and one from stage to stage, over NCCL on GPUs, over gloo otherwise. What the
leader tells, and tokens on their way back, go over lines of rank_lines.py. What is said is parallel_runner.py's
business.

Invariants:
 1. A group belongs to one (model, writer id); a set of ranks that is started anew forms another. Nothing of the old one
    can reach the new one.
 2. Every wait is finite. A call that raises RankLost leaves a group that is good for nothing but `close`.
 3. The leader alone decides what is said; ranks never derive the number of collectives from what they measure.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed re-exports them untyped

from tournant.kvstore.errors import InvariantViolation
from tournant.workers.errors import ConfigError
from tournant.workers.messages import LOCAL_HOST, pack_frame
from tournant.workers.rank_lines import RankLine, form_lines
from tournant.workers.split import Split

MAX_OUTSTANDING = 64  # sends that a rank leaves open; more than batches in flight need
TOKEN = np.dtype("<i8")
BOUND_GLOO = "gloo_at"  # gloo that listens on an address of our choice, where torch's takes what the host's name means


class RankLost(RuntimeError):  # noqa: N818 - a state of the world
    """A rank of the group ended, fell silent or failed; the group must be formed anew. Names the first cause."""


@dataclass(frozen=True, slots=True)
class Membership:
    """A rank's place in a group. token: what its ranks alone know; timeout_s: longest wait for one another at work;
    forming_s: the same while models load. data: "gloo" or "nccl"; address: of this machine, at which other ranks reach
    this one.
    """

    model: str
    writer_id: int
    split: Split
    rank: int
    token: bytes = field(repr=False)
    data: str = "gloo"
    timeout_s: float = 60.0
    forming_s: float = 600.0
    address: str = LOCAL_HOST


def _gloo_at(found: Any, address: str) -> Any:
    """What torch calls to make a gloo group; found: its DistributedBackendOptions."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = found.timeout
    options.global_ranks_in_group = found.global_ranks_in_group
    options.group_name = found.group_id
    return gloo(found.store, found.group_rank, found.group_size, options)


dist.Backend.register_backend(BOUND_GLOO, _gloo_at, extended_api=True, devices=["cpu"])


def open_store(host: str, port: int = 0, *, timeout_s: float = 60.0) -> TCPStore:
    """The place where ranks find one another, listening on the given address only; port 0: any, see `.port`.

    It must outlive the groups formed by it.
    """
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def find_store(host: str, port: int, *, timeout_s: float = 60.0) -> TCPStore:
    """The same place, from another process. Raises RankLost when it cannot be reached in time."""
    with _lost(f"reach the group's store at {host}:{port}"):
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class StageRanks:
    """The ranks of one stage; see `models.split_layers.Ranks`. ordered: sums are added up in the order of ranks, so
    that a row's bits do not depend on the other rows.
    """

    def __init__(self, group: dist.ProcessGroup, size: int, rank: int, backend: str, *, ordered: bool) -> None:
        self._group: dist.ProcessGroup | None = group
        self._size = size
        self._backend = backend
        self._ordered = ordered
        self.rank = rank

    def leave(self) -> None:
        """Let go of the group: connections end with the last hold on it."""
        self._group = None

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, float32 inside in ordered mode. Raises RankLost."""
        if self._ordered:
            parts = self.gather(part)
            total = parts[0].float()
            for rank in range(1, self._size):
                total = total.add_(parts[rank])
            return total.to(part.dtype)
        moved = part.cpu() if self._backend == "gloo" else part
        with _lost("add up with the other ranks"):
            dist.all_reduce(moved, group=self._group)
        return moved.to(part.device)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[ranks, N, M] of every rank's [N, M]. Raises RankLost."""
        moved = part.cpu() if self._backend == "gloo" else part
        parts = torch.empty((self._size, *part.shape), dtype=part.dtype, device=moved.device)
        with _lost("gather from the other ranks"):
            dist.all_gather(list(parts.unbind(0)), moved.contiguous(), group=self._group)
        return parts.to(part.device)


class Pipe:
    """From a rank to its likes in other stages: hidden states forward, tokens and log-probabilities back to stage 0.

    Sends return at once, whether or not anyone receives yet. All raise RankLost. lines: of this rank.
    """

    def __init__(self, member: Membership, forward: dist.ProcessGroup, lines: Mapping[int, RankLine]) -> None:
        split, rank = member.split, member.rank
        self._forward: dist.ProcessGroup | None = forward
        self._backend = member.data
        self._next, self._previous = rank + split.tensor, rank - split.tensor
        first, last = rank % split.tensor, rank % split.tensor + split.size - split.tensor
        self._line = lines.get(first if rank == last else last)
        self._open: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def leave(self) -> None:
        """Let go of the group: connections end with the last hold on it."""
        self._forward = None
        self._open.clear()

    def send_on(self, residual: torch.Tensor) -> None:
        """To the stage after this one."""
        moved = residual.cpu() if self._backend == "gloo" else residual
        self._send(moved.contiguous(), self._next)

    def receive(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """From the stage before this one."""
        found = torch.empty(shape, dtype=dtype, device="cpu" if self._backend == "gloo" else device)
        with _lost("receive from the stage before"):
            dist.recv(found, self._previous, group=self._forward)
        return found.to(device)

    @property
    def _back(self) -> RankLine:
        if self._line is None:
            raise InvariantViolation("no tokens begin or end their way at a stage between the first and the last")
        return self._line

    def return_step(self, tokens: torch.Tensor, logprobs: list[Any] | None, counts: Mapping[str, float]) -> None:
        """Tokens int64 [N] of a step from the last stage, and plain types behind them; to the first stage. counts: by
        name, what was counted here since the call before.
        """
        with _lost("return tokens"):
            data = tokens.cpu().numpy().astype(TOKEN).tobytes()
            self._back.send(pack_frame(["step", data, logprobs, dict(counts)]))

    def take_step(self, count: int) -> tuple[npt.NDArray[np.int64], list[Any] | None, dict[str, float]]:
        """What `return_step` sent, in the order of steps; waits for it. Raises InvariantViolation, too, when it is not
        of so many tokens.
        """
        line = self._back
        with _lost("receive tokens"):
            message = line.receive()
        match message:
            case ["step", bytes(data), (list() | None) as logprobs, dict(counts)] if (
                len(data) == count * TOKEN.itemsize
            ):
                return np.frombuffer(bytearray(data), TOKEN), logprobs, counts
        raise InvariantViolation(f"{line.name} returned something else than a step of {count} tokens")

    def _send(self, tensor: torch.Tensor, to: int) -> None:
        with _lost("send to another stage"):
            self._open.append((dist.isend(tensor, to, group=self._forward), tensor))
            _reap(self._open)


class RankGroup:
    """The ranks of one replica under one writer id. One per process at a time, since torch has one default group.

    Formed when constructed. Raises ConfigError when ranks do not all have the same `weights_id`, RankLost when one does
    not come within `forming_s`. ordered: see `StageRanks`.
    """

    def __init__(self, member: Membership, store: Store, weights_id: bytes, *, ordered: bool) -> None:
        self.member = member
        self._store = PrefixStore(f"{member.model}/{member.writer_id:016x}", store)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._told = threading.Event()  # since the last look of the thread that keeps the group awake
        self._lost: RankLost | None = None
        self._keeper: threading.Thread | None = None
        self._lines: dict[int, RankLine] = {}
        self.stage: StageRanks | None = None
        self.pipe: Pipe | None = None
        split, rank, forming = member.split, member.rank, timedelta(seconds=member.forming_s)
        with _lost("form a group"):
            dist.init_process_group(
                BOUND_GLOO,
                store=self._store,
                rank=rank,
                world_size=split.size,
                timeout=forming,
                pg_options=member.address,
            )
        try:
            self.agree("weights_id", weights_id)
            with _lost("form the groups of a split"):
                self._lines = self._form_lines()
                self.stage, self.pipe = self._data_groups(ordered)
        except BaseException:
            self.close()
            raise

    def _form_lines(self) -> dict[int, RankLine]:
        member = self.member
        times = {"forming_s": member.forming_s, "timeout_s": member.timeout_s}

        def get(name: str) -> str:
            found: bytes = self._store.get(name)
            return found.decode()

        return form_lines(member.split, member.rank, member.token, member.address, self._store.set, get, **times)

    def _group(self, ranks: list[int], backend: str) -> Any:
        timeout = timedelta(seconds=self.member.timeout_s)
        if backend == "gloo":
            return dist.new_group(ranks, timeout=timeout, backend=BOUND_GLOO, pg_options=self.member.address)
        return dist.new_group(ranks, timeout=timeout, backend=backend)

    def _data_groups(self, ordered: bool) -> tuple[StageRanks | None, Pipe | None]:
        """Every rank makes every group, in the same order."""
        member, split = self.member, self.member.split
        stage, pipe = None, None
        if split.tensor > 1:
            groups = [self._group(list(split.ranks_of(index)), member.data) for index in range(split.pipeline)]
            mine, place = groups[split.stage_of(member.rank)], member.rank % split.tensor
            stage = StageRanks(mine, split.tensor, place, member.data, ordered=ordered)
        if split.pipeline > 1:
            pipe = Pipe(member, self._group(list(range(split.size)), member.data), self._lines)
        return stage, pipe

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that tells."""
        return self.member.rank == 0

    def agree(self, what: str, value: bytes) -> None:
        """Return when all ranks called this with the same value. Raises ConfigError naming those that differ from rank
        0, RankLost.
        """
        own = torch.frombuffer(bytearray(hashlib.sha256(value).digest()), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.member.split.size)]
        with _lost(f"agree on {what}"):
            dist.all_gather(parts, own)
        if others := [rank for rank, part in enumerate(parts) if not torch.equal(part, parts[0])]:
            raise ConfigError(
                f"ranks {', '.join(map(str, others))} of {self.member.model} have another {what} than rank 0; all need "
                "the same"
            )

    def least(self, value: int) -> int:
        """The least of all ranks' values; all must call. Raises RankLost."""
        found = torch.tensor([value])
        with _lost("agree on a number"):
            dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def share(self, what: str, text: str) -> list[str]:
        """What every rank says, by rank; all must call. Raises RankLost."""
        with _lost(f"hear the {what} of all ranks"):
            self._store.set(f"{what}/{self.member.rank}", text)
            return [self._store.get(f"{what}/{rank}").decode() for rank in range(self.member.split.size)]

    def wait_for_all(self) -> None:
        """Return when all ranks called this. Raises RankLost."""
        with _lost("wait for all ranks"):
            dist.barrier()

    def start(self) -> None:
        """Everyone is ready: from now on a leader without anything to tell says so in time. Raises RankLost."""
        self.wait_for_all()
        if self.leads:
            self._keeper = threading.Thread(target=self._keep_awake, daemon=True, name="keep-awake")
            self._keeper.start()

    def _keep_awake(self) -> None:
        while not self._ended.wait(self.member.timeout_s / 4):
            if self._told.is_set():
                self._told.clear()
                continue
            try:
                self.tell(["idle"])
            except RankLost as error:
                self._lost = error
                return

    def tell(self, message: list[Any]) -> None:
        """Send plain types from the leader to all ranks, in order; returns before they have it. Raises RankLost, also
        for an earlier message. Safe from several threads.
        """
        if self._lost is not None:
            raise RankLost(str(self._lost))
        frame = pack_frame(message)
        with self._lock, _lost("tell the other ranks"):
            for line in self._lines.values():
                line.send(frame)
        self._told.set()

    def hear(self) -> list[Any]:
        """The leader's next message; waits for it. Raises RankLost, InvariantViolation for what is no frame."""
        with _lost("hear from the leader"):
            return self._lines[0].receive()

    def settle(self) -> None:
        """Return when the system has taken everything told. Raises RankLost."""
        with self._lock, _lost("tell the other ranks"):
            for line in self._lines.values():
                line.settle()

    def report(self, error: BaseException) -> None:
        """Leave word of why this rank ends, for `first_cause`. Nothing happens when the leader is gone."""
        text = f"rank {self.member.rank} on {socket.gethostname()}: {type(error).__name__}: {error}"
        try:
            number = self._store.add("failures", 1)
            self._store.set(f"failure/{number}", text[:2000])
        except RuntimeError:  # torch's DistStoreError is one
            return

    def first_cause(self) -> str:
        """What the first rank that failed had to say; empty when none could."""
        try:
            found = self._store.check(["failure/1"])
            return self._store.get("failure/1").decode("utf-8", "replace") if found else ""
        except RuntimeError:
            return ""

    def close(self) -> None:
        """Leave the group; what others wait for from this rank fails. Idempotent."""
        self._ended.set()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None
        if dist.is_initialized():
            dist.destroy_process_group()
        for holder in (self.stage, self.pipe):
            if holder is not None:
                holder.leave()
        for line in self._lines.values():
            line.close()


class _lost:  # noqa: N801 - a function in all but its speed: it is entered several times a step
    """Within it, what a peer that is gone, silent or in disagreement raises is a RankLost."""

    __slots__ = ("_doing",)

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError | OSError):  # RuntimeError: torch's, and LineLost
            raise RankLost(f"could not {self._doing}: {error}") from error


def _reap(sent: deque[tuple[dist.Work | None, torch.Tensor]], most: int = MAX_OUTSTANDING) -> None:
    """Forget what has arrived; wait where more than so much has not."""
    while sent and (sent[0][0] is None or sent[0][0].is_completed() or len(sent) > most):
        work, _ = sent.popleft()
        if work is not None:
            work.wait()
