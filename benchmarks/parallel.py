"""What ranks of a replica say to one another per step: from rank 0 to all others and the tokens back, on the CPU.

Nothing is computed. The message is a decode step of 32 sequences, which every rank reads, the answer its tokens from
the last rank; every rank has a process of its own on this machine. Beside ours: a compiled graph of Ray, and plain
calls of actors, where rank 0 is the driver and the others are actors, which all answer, as they must. The bound is the
same bytes over plain TCP, sent to all and answered by the last.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import numpy as np
import ray
import torch
from ray.dag import InputNode, MultiOutputNode

from benchmarks.common import BenchmarkError, Cell, Options, Report, Samples, Table, interleave, run_main, say
from benchmarks.own_ray import own_ray
from tournant.workers.batch import Batch
from tournant.workers.batch_messages import batch_from_wire, batch_to_wire
from tournant.workers.messages import pack_frame
from tournant.workers.rank_group import Membership, RankGroup, find_store, open_store
from tournant.workers.split import Split

HOST = "127.0.0.1"
SEQUENCES = 32
SIZES = (2, 4)
WAIT_S = 120.0  # most for an answer of a compiled graph, on a machine that has much else to do
OURS, GRAPH, CALLS, BOUND = "Tournant", "Ray compiled graph", "Ray actor calls", "bound: TCP"
SPAWN = multiprocessing.get_context("spawn")  # a forked process may not use gloo
Latency = tuple[float, float]  # p50 and p99 of steps, in microseconds


def run(options: Options) -> Report:
    """Measure all ways in turn, for two ranks and then (not in quick form) for four."""
    report = Report("Ranks")
    steps = 20 if options.quick else 1000
    rows: list[list[Cell]] = []
    with own_ray():
        for size in SIZES[:1] if options.quick else SIZES:
            say(f"{size} ranks")
            rows += _rows(size, options, steps)
    message, answer = len(_message()), SEQUENCES * 8
    notes = [f"told: {message} bytes per step; back: {SEQUENCES} tokens, {answer} bytes; {steps} steps a round"]
    columns = ["ranks, way", "p50 microseconds", "p99 microseconds", "x the bound", "p50 / ours"]
    report.add(Table("control path of a step", columns, rows, notes))
    return report


def _rows(size: int, options: Options, steps: int) -> list[list[Cell]]:
    tails: dict[str, list[float]] = {}
    with ExitStack() as stack:
        ways: dict[str, Callable[[int], Latency]] = {
            BOUND: stack.enter_context(closing(_Echo(size))).latency,
            OURS: stack.enter_context(closing(_Processes(size))).latency,
            GRAPH: stack.enter_context(_compiled_graph(size)),
            CALLS: stack.enter_context(_actor_calls(size)),
        }

        def contestant(name: str) -> Callable[[], float]:
            tails[name] = []

            def once() -> float:
                median, tail = ways[name](steps)
                tails[name].append(tail)
                return median

            return once

        found = interleave({name: contestant(name) for name in ways}, options.rounds)
    return [
        [
            f"{size} ranks, {name}",
            median,
            Samples(tuple(tails[name][1:])),
            "" if name == BOUND else median.over(found[BOUND]),
            "" if name == OURS else median.over(found[OURS]),
        ]
        for name, median in found.items()
    ]


def _latency(once: Callable[[], object], steps: int) -> Latency:
    microseconds = []
    for _ in range(steps):
        start = time.perf_counter()
        once()
        microseconds.append((time.perf_counter() - start) * 1e6)
    return statistics.median(microseconds), sorted(microseconds)[steps * 99 // 100]


def _message() -> bytes:
    """As it is told to ranks."""
    return pack_frame(["batch", 0, 0, batch_to_wire(_decode_step())])


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


def _check(tokens: Any) -> None:
    if len(tokens) != SEQUENCES or tokens[-1] != SEQUENCES - 1:
        raise BenchmarkError("other tokens came back")


# -------------------------------------------------------------------- ours


class _Processes:
    """A group of ranks, each in a process; every rank is a stage, so that tokens come back from the last one."""

    def __init__(self, size: int) -> None:
        self._store = open_store(HOST)
        pipes = [SPAWN.Pipe() for _ in range(size)]
        self._leader, token = pipes[0][0], os.urandom(32)
        self._running = [
            SPAWN.Process(target=_rank, args=(self._store.port, size, rank, token, pipe), daemon=True)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process in self._running:
            process.start()
        if self._leader.recv() != "ready":
            raise BenchmarkError("the ranks did not form a group")

    def latency(self, steps: int) -> Latency:
        """Of so many steps, asked of the leader."""
        self._leader.send(steps)
        found: Latency = self._leader.recv()
        return found

    def close(self) -> None:
        """End all processes."""
        self._leader.send(0)
        for process in self._running:
            process.join(10)
            process.kill()


def _rank(port: int, size: int, rank: int, token: bytes, pipe: Connection) -> None:
    """Entry point of a rank."""
    torch.set_num_threads(1)
    member = Membership("benchmark", 1, Split(1, size), rank, token)
    group = RankGroup(member, find_store(HOST, port), b"", ordered=False)
    try:
        if group.leads:
            pipe.send("ready")
            while steps := pipe.recv():
                pipe.send(_latency(_leading(group), steps))
            group.tell(["end"])
            group.settle()
        else:
            _follow(group)
    finally:
        group.close()


def _leading(group: RankGroup) -> Callable[[], None]:
    if (pipe := group.pipe) is None:
        raise BenchmarkError("a group of one stage")
    batch = _decode_step()

    def once() -> None:
        group.tell(["batch", 0, 0, batch_to_wire(batch)])
        tokens, *_ = pipe.take_step(SEQUENCES)
        _check(tokens)

    return once


def _follow(group: RankGroup) -> None:
    last = group.member.rank == group.member.split.size - 1
    sampled = torch.arange(SEQUENCES)
    while (message := group.hear())[0] != "end":
        batch_from_wire(message[3])
        if last and group.pipe is not None:
            group.pipe.return_step(sampled, None, {})


# -------------------------------------------------------------------- Ray


@ray.remote(num_cpus=0)
class _Rank:
    """A rank as an actor."""

    def __init__(self, returns: bool) -> None:
        self._tokens = np.arange(SEQUENCES).tobytes() if returns else b""

    def step(self, message: bytes) -> bytes:
        """Read a batch; its tokens, if this is the last rank."""
        batch_from_wire(msgpack.unpackb(message)[3])
        return self._tokens


def _actors(size: int) -> list[Any]:
    return [_Rank.remote(rank == size - 1) for rank in range(1, size)]  # type: ignore[attr-defined]


def _packed() -> bytes:
    return bytes(msgpack.packb(["batch", 0, 0, batch_to_wire(_decode_step())]))


@contextmanager
def _compiled_graph(size: int) -> Iterator[Callable[[int], Latency]]:
    """Shared memory from the driver to every actor and back."""
    actors = _actors(size)
    with InputNode() as message:
        graph = MultiOutputNode([actor.step.bind(message) for actor in actors]).experimental_compile(
            _submit_timeout=WAIT_S
        )

    def once() -> None:
        _check(np.frombuffer(ray.get(graph.execute(_packed()), timeout=WAIT_S)[-1], np.int64))

    try:
        yield lambda steps: _latency(once, steps)
    finally:
        graph.teardown(kill_actors=True)


@contextmanager
def _actor_calls(size: int) -> Iterator[Callable[[int], Latency]]:
    actors = _actors(size)

    def once() -> None:
        message = _packed()
        _check(np.frombuffer(ray.get([actor.step.remote(message) for actor in actors])[-1], np.int64))

    try:
        yield lambda steps: _latency(once, steps)
    finally:
        for actor in actors:
            ray.kill(actor)


# -------------------------------------------------------------------- the bound


class _Echo:
    """Processes that take as many bytes as a step has; the last one answers with as many as its tokens have."""

    def __init__(self, size: int) -> None:
        self._connections: list[socket.socket] = []
        self._processes = []
        with socket.create_server((HOST, 0)) as listener:
            for rank in range(1, size):
                address = listener.getsockname()[1]
                process = SPAWN.Process(target=_answer, args=(address, rank == size - 1), daemon=True)
                process.start()
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._processes.append(process)
                self._connections.append(connection)

    def latency(self, steps: int) -> Latency:
        """Of so many round trips."""
        message = bytes(len(_message()))

        def once() -> None:
            for connection in self._connections:
                connection.sendall(message)
            _receive(self._connections[-1], SEQUENCES * 8)

        return _latency(once, steps)

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()


def _receive(connection: socket.socket, count: int) -> bool:
    while count and (data := connection.recv(count)):
        count -= len(data)
    return not count


def _answer(port: int, returns: bool) -> None:
    """Entry point of another end."""
    size = len(_message())
    with socket.create_connection((HOST, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _receive(connection, size):
            if returns:
                connection.sendall(bytes(SEQUENCES * 8))


if __name__ == "__main__":
    run_main(run, __doc__)
