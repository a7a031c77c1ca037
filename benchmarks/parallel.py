"""What ranks of a replica say to one another per step: from rank 0 to all others and the tokens back, on the CPU.

Nothing is computed. The message is a decode step of 32 sequences, the answer its tokens from the last rank; every rank
has a process of its own, over gloo on this machine. The bound is a round trip of as many bytes over one plain TCP
connection between two processes.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection

import torch

from benchmarks.common import BenchmarkError, Options, Report, Table, interleave, run_main
from tournant.workers.batch import Batch
from tournant.workers.batch_messages import batch_from_wire, batch_to_wire
from tournant.workers.rank_group import CONTROL_BYTES, Membership, RankGroup, find_store, open_store
from tournant.workers.split import Split

HOST = "127.0.0.1"
SEQUENCES = 32
SPAWN = multiprocessing.get_context("spawn")  # a forked process may not use gloo


def run(options: Options) -> Report:
    """Measure the bound, two ranks and four ranks in turn."""
    report = Report("Ranks")
    steps = 50 if options.quick else 1000
    with ExitStack() as stack:
        groups = {size: stack.enter_context(closing(_Processes(size))) for size in (2, 4)}
        echo = stack.enter_context(closing(_Echo()))
        found = interleave(
            {"tcp": lambda: echo.p50_us(steps), **{str(size): _asking(group, steps) for size, group in groups.items()}},
            options.rounds,
        )
    rows = [["TCP round trip, 2 processes", found["tcp"], ""]]
    for size in groups:
        name = str(size)
        rows.append([f"{size} ranks", found[name], found[name].over(found["tcp"])])
    notes = [f"told: {CONTROL_BYTES} bytes per step; back: {SEQUENCES} tokens of 8 bytes from the last rank"]
    report.add(Table("control path of a step, p50", ["", "microseconds", "x TCP"], rows, notes))
    return report


def _asking(group: _Processes, steps: int) -> Callable[[], float]:
    return lambda: group.p50_us(steps)


def _p50_us(once: Callable[[], object], steps: int) -> float:
    """Median of single runs, in microseconds."""
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


class _Processes:
    """A group of ranks, each in a process; every rank is a stage, so that tokens come back from the last one."""

    def __init__(self, size: int) -> None:
        self._store = open_store(HOST)
        pipes = [SPAWN.Pipe() for _ in range(size)]
        self._leader = pipes[0][0]
        split = (1, size)
        self._running = [
            SPAWN.Process(target=_rank, args=(self._store.port, split, rank, pipe), daemon=True)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process in self._running:
            process.start()
        if self._leader.recv() != "ready":
            raise BenchmarkError("the ranks did not form a group")

    def p50_us(self, steps: int) -> float:
        """Microseconds of a step, asked of the leader."""
        self._leader.send(steps)
        found: float = self._leader.recv()
        return found

    def close(self) -> None:
        """End all processes."""
        self._leader.send(0)
        for process in self._running:
            process.join(10)
            process.kill()


def _rank(port: int, split: tuple[int, int], rank: int, pipe: Connection) -> None:
    """Entry point of a rank."""
    torch.set_num_threads(1)
    member = Membership("benchmark", 1, Split(*split), rank)
    group = RankGroup(member, find_store(HOST, port), b"", ordered=False)
    try:
        if group.leads:
            pipe.send("ready")
            while steps := pipe.recv():
                pipe.send(_lead(group, steps))
            group.tell(["end"])
            group.settle()
        else:
            _follow(group)
    finally:
        group.close()


def _lead(group: RankGroup, steps: int) -> float:
    if (pipe := group.pipe) is None:
        raise BenchmarkError("a group of one stage")
    data = batch_to_wire(_decode_step())

    def once() -> None:
        back = pipe.expect_tokens(SEQUENCES)
        group.tell(["batch", 0, 0, data])
        if back.wait()[-1] != SEQUENCES - 1:
            raise BenchmarkError("other tokens came back")

    return _p50_us(once, steps)


def _follow(group: RankGroup) -> None:
    last = group.member.rank == group.member.split.size - 1
    while (message := group.hear())[0] != "end":
        batch = batch_from_wire(message[3])
        if last and group.pipe is not None:
            group.pipe.return_tokens(torch.tensor(batch.rows))


def _decode_step() -> Batch:
    rows = list(range(SEQUENCES))
    return Batch(
        step=1,
        rows=rows,
        starts=[1000 + row for row in rows],
        counts=[1] * SEQUENCES,
        rope_offsets=[0] * SEQUENCES,
        token_ids=[row * 97 for row in rows],
        sampling=rows,
        block_updates=[(0, 62, [5])],
    )


class _Echo:
    """A process that answers as many bytes as a step has with as many as its tokens have."""

    def __init__(self) -> None:
        with socket.create_server((HOST, 0)) as listener:
            self._process = SPAWN.Process(target=_answer, args=(listener.getsockname()[1],), daemon=True)
            self._process.start()
            self._connection, _ = listener.accept()
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def p50_us(self, steps: int) -> float:
        """Microseconds of a round trip."""
        message = bytes(CONTROL_BYTES)

        def once() -> None:
            self._connection.sendall(message)
            _receive(self._connection, SEQUENCES * 8)

        return _p50_us(once, steps)

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join()


def _receive(connection: socket.socket, count: int) -> bool:
    while count and (data := connection.recv(count)):
        count -= len(data)
    return not count


def _answer(port: int) -> None:
    """Entry point of the other end."""
    with socket.create_connection((HOST, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _receive(connection, CONTROL_BYTES):
            connection.sendall(bytes(SEQUENCES * 8))


if __name__ == "__main__":
    run_main(run, __doc__)
