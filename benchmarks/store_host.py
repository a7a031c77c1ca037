"""The block store's host tier and socket: copies beside memcpy, time of a read's first answer, cost of reports, memory.

A store process of its own serves over a unix socket, as on a node; the client is this process. memcpy means the same
assignment between buffers of this process, of the same sizes in the same order, in the same rounds.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.common import (
    BenchmarkError,
    Cell,
    Options,
    Report,
    Samples,
    Table,
    at_least,
    at_most,
    interleave,
    run_main,
    say,
    timed,
)
from tournant.kvstore.block import Part, Version
from tournant.kvstore.client import Identity, StoreClient, connect
from tournant.kvstore.config import PAGE_BYTES, StoreConfig
from tournant.kvstore.events import Attach, Attached, Reported, ReportEntry, Send
from tournant.kvstore.events import Report as StoreReport
from tournant.kvstore.groups import Handle
from tournant.kvstore.node_store import NodeStore
from tournant.kvstore.store_process import StoreProcess, start_store

BLOCKS = {"360 KiB": 360 << 10, "2 MiB": 2 << 20}
PART = Part(0, 1, 0, 1)
WEIGHTS = bytes(32)
STEP = 32  # blocks of one report where bytes are moved
CREDIT = 96  # slots lent where bytes are moved
CHAIN = 512
REPORT_RATE = 16_000  # blocks/s
REPORT = 64  # blocks of one report that the bar is for
MIN_COPY, MAX_OPEN_MS, MAX_CPU_SHARE, MAX_INDEX_GIB = 0.7, 0.5, 0.3, 1.0


def run(options: Options) -> Report:
    """All sections."""
    report = Report("Block store: host tier")
    copies(options, report)
    opens(options, report)
    reports(options, report)
    index_memory(options, report)
    return report


@contextmanager
def served(host_bytes: int, slot_bytes: int, credit: int) -> Iterator[tuple[StoreClient, StoreProcess]]:
    """A store process and a client that stores whole blocks."""
    with tempfile.TemporaryDirectory(prefix="tournant-bench-") as folder:
        process = start_store(StoreConfig(host_bytes=host_bytes), Path(folder) / "socket")
        try:
            identity = Identity(WEIGHTS, "bf16", 1, PART, (PART,), slot_bytes, credit)
            with connect(Path(folder) / "socket", identity, 60.0) as client:
                yield client, process
        finally:
            process.stop()


def key_of(number: int) -> bytes:
    """A key that no other number has."""
    return number.to_bytes(32, "big")


# -------------------------------------------------------------------- bytes


def copies(options: Options, report: Report) -> None:
    """Writing blocks into the pool and reading them back, all checks and messages included."""
    total = (32 if options.quick else 256) << 20
    rows = [row for name, length in BLOCKS.items() for row in _copies(name, length, total, options.rounds)]
    notes = [
        f"{total >> 20} MiB, at least {STEP} blocks. A write is the copy, its checksum and a report of {STEP} blocks "
        "that is not awaited; a read is open, fetch, the copy, its checksum and the check of the generation.",
    ]
    columns = ("what", "GB/s ours", "GB/s memcpy", "ours / memcpy", "bar")
    report.add(Table("Host tier through a client", columns, rows, notes))


def _copies(name: str, length: int, total: int, rounds: int) -> list[list[Cell]]:
    say(f"host tier, blocks of {name}")
    count = max(1, total // length // STEP) * STEP
    populated = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    source, target, copied = (memoryview(mmap.mmap(-1, count * length, flags=populated)) for _ in range(3))
    source[:] = np.random.default_rng(5).bytes(len(source))
    pieces = [slice(index * length, (index + 1) * length) for index in range(count)]
    rounds_written = itertools.count(1)
    with served(max(4 * total, 5 * CREDIT * length), length, CREDIT) as (client, _):

        def memcpy() -> None:
            for piece in pieces:
                copied[piece] = source[piece]

        keys: list[bytes] = []

        def write() -> None:
            start = next(rounds_written) * count
            keys[:] = [key_of(start + index) for index in range(count)]
            for first in range(0, count, STEP):
                entries = [
                    client.write(keys[index], Version(1, start + index), source[pieces[index]], depth=index)
                    for index in range(first, first + STEP)
                ]
                taken = [entry for entry in entries if entry is not None]
                client.post(taken)
                replies = client.collect() if client.credit >= STEP else [client.publish([])]
                if any(reply.refused for reply in replies) or len(taken) < STEP:
                    raise BenchmarkError("the store did not take a block")

        def read() -> None:
            handles = opened(client, keys)
            if client.copy_out(keys, handles, [target[piece] for piece in pieces]) < count:
                raise BenchmarkError("a block was lost")

        write()
        read()
        if target != source:
            raise BenchmarkError("other bytes came back than were written")
        found = interleave({"memcpy": timed(memcpy), "write": timed(write), "read": timed(read)}, rounds)
    rates = {which: seconds.map(lambda value: count * length / 1e9 / value) for which, seconds in found.items()}
    rows: list[list[Cell]] = []
    for which in ("write", "read"):
        ratio = rates[which].over(rates["memcpy"])
        rows.append([f"{which}, {name}", rates[which], rates["memcpy"], ratio, at_least(MIN_COPY, ratio)])
    return rows


def opened(client: StoreClient, keys: Sequence[bytes]) -> list[Handle]:
    """Open and fetch a chain; the handles of all its blocks. The read is closed: nothing here evicts."""
    read, answer = client.open(keys)
    picks = [handles[0].version for handles in answer.handles()]
    handles = [found[0] for found in client.fetch(read, picks).handles()]
    client.close_read(read)
    if len(handles) != len(keys):
        raise BenchmarkError(f"{len(handles)} of {len(keys)} blocks were found")
    return handles


# -------------------------------------------------------------------- messages


def opens(options: Options, report: Report) -> None:
    """Open and pin of a chain, beside the shortest question that can be asked."""
    times = 20 if options.quick else 300
    with served(64 << 20, PAGE_BYTES, 1024) as (client, _):
        keys = [key_of(number) for number in range(CHAIN)]
        for first in range(0, CHAIN, 64):
            entries = [client.write(key_of(n), Version(1, n + 1), bytes(64), n) for n in range(first, first + 64)]
            client.publish([entry for entry in entries if entry is not None])

        def chain() -> float:
            return _median_ms(lambda: client.open(keys), client, times, CHAIN)

        def nothing() -> float:
            return _median_ms(lambda: client.open([b"?" * 32]), client, times, 0)

        found = interleave({"chain": chain, "nothing": nothing}, options.rounds)
    rows: list[list[Cell]] = [
        [f"open + pin, chain of {CHAIN} blocks", found["chain"], at_most(MAX_OPEN_MS, found["chain"])],
        ["open of an unknown key", found["nothing"], ""],
    ]
    note = f"Median of {times} calls per round; the read before is closed, and that done, before each."
    report.add(Table("First answer through the socket", ("call", "ms", "bar"), rows, [note]))


def _median_ms(call: Callable[[], tuple[int, object]], client: StoreClient, times: int, wanted: int) -> float:
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        read, answer = call()
        seconds.append(time.perf_counter() - begun)
        if len(getattr(answer, "counts", b"")) != wanted:
            raise BenchmarkError("the chain is not whole")
        client.close_read(read)
        client.publish([])  # comes back when the close is done
    return statistics.median(seconds) * 1e3


def reports(options: Options, report: Report) -> None:
    """CPU time of the store per reported block, pool full, each report evicting as many blocks as it brings."""
    blocks = 3_200 if options.quick else 32_000
    rows: list[list[Cell]] = []
    for size in (16, REPORT):
        with served(64 << 20, PAGE_BYTES, 1024) as (client, process):
            numbers = itertools.count(1)
            report_blocks(client, numbers, 17_000, size)  # until the pool is full
            shares = []
            for _ in range(options.rounds):
                before = cpu_s(process.process.pid)
                report_blocks(client, numbers, blocks, size)
                shares.append((cpu_s(process.process.pid) - before) / blocks * REPORT_RATE)
        share = Samples(tuple(shares))
        rows.append([f"reports of {size} blocks", share, at_most(MAX_CPU_SHARE, share) if size == REPORT else ""])
    note = f"Share of a core that the store process needs at {REPORT_RATE:,} blocks/s, from the CPU time of {blocks:,}."
    report.add(Table("Server CPU", ("what", "share of a core", "bar"), rows, [note]))


def report_blocks(client: StoreClient, numbers: Iterator[int], blocks: int, size: int) -> None:
    """Report blocks without writing them: what the messages alone cost."""
    for _ in range(blocks // size):
        entries = []
        for number in itertools.islice(numbers, size):
            lent = client.take_slot()
            if lent is None:
                raise BenchmarkError("no slot is lent")
            version = Version(1, number)
            entries.append(ReportEntry(key_of(number), version, lent.page, lent.generation, PAGE_BYTES, 0))
        client.publish(entries)


def cpu_s(pid: int) -> float:
    """CPU time of a process's main thread, seconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


# -------------------------------------------------------------------- memory


def index_memory(options: Options, report: Report) -> None:
    """Resident memory of the core with many blocks, in a process of its own."""
    blocks = 20_000 if options.quick else 1_000_000
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.write(writable, str(_grown_by_index(blocks)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writable)
    text = os.read(readable, 100)
    os.close(readable)
    if os.waitpid(pid, 0)[1]:
        raise BenchmarkError("the process that fills an index failed")
    gib = Samples((int(text) / (1 << 30) * (1_000_000 / blocks),))
    rows: list[list[Cell]] = [[f"{blocks:,} blocks of one part in host slots", gib, at_most(MAX_INDEX_GIB, gib)]]
    report.add(Table("Memory of the index", ("what", "GiB per million blocks", "bar"), rows))


def _grown_by_index(blocks: int) -> int:
    step = 512
    pages = blocks // 3 * 4 + 4 * step
    core = NodeStore(StoreConfig(host_bytes=pages * PAGE_BYTES, chunk_bytes=pages * PAGE_BYTES), 1, b"")
    gc.collect()
    before = _resident_bytes()
    attach = Attach(1, WEIGHTS, "bf16", b"", 1, PART, (PART,), PAGE_BYTES, step)
    lent = [pair for out in core.step(0, attach) if isinstance(out, Send) for pair in _lent(out)]
    for seq in range(1, blocks // step + 1):
        entries = tuple(
            ReportEntry(os.urandom(32), Version(1, seq * step + n), page, generation, PAGE_BYTES, seq * step + n)
            for n, (page, generation) in enumerate(lent)
        )
        out = core.step(seq, StoreReport(1, seq, entries))
        lent = [pair for one in out if isinstance(one, Send) for pair in _lent(one)]
    del entries, out
    gc.collect()
    if len(core.residency.index.by_gid) != blocks // step * step:
        raise BenchmarkError("blocks were evicted")
    return _resident_bytes() - before


def _lent(send: Send) -> tuple[tuple[int, int], ...]:
    return send.reply.lent if isinstance(send.reply, Attached | Reported) else ()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


if __name__ == "__main__":
    run_main(run, __doc__)
