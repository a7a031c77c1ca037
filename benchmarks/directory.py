"""Block look-ups per second of one shard of the directory, in chains of 512: alone, and through its actor.

A chain is whole on one of four nodes and half on another one, so that a look-up answers two runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import ray

from benchmarks.common import Cell, Options, Report, Table, at_least, interleave, run_main, say
from benchmarks.own_ray import own_ray
from tournant.cluster.directory_actor import Directory as Caller
from tournant.cluster.directory_actor import find_shard
from tournant.kvstore.block import KEY_BYTES
from tournant.kvstore.directory import Announcement, Directory, DirectoryConfig

LONG = 512
NODES = 4
MIN_BLOCKS_PER_S = 20_000
APP = "benchmark"


def run(options: Options) -> Report:
    """The core, then the actor."""
    report = Report("Directory")
    chains = _chains(4 if options.quick else 200)
    messages = _messages(chains)
    _core(options, report, chains, messages)
    with own_ray():
        _actor(options, report, chains, messages)
    return report


def _chains(count: int) -> list[tuple[bytes, ...]]:
    rng = random.Random(0)
    return [tuple(rng.randbytes(KEY_BYTES - 2) + bytes(2) for _ in range(LONG)) for _ in range(count)]


def _messages(chains: list[tuple[bytes, ...]]) -> list[Announcement]:
    """What the stores tell after their greeting: each chain is whole on one node, and begins on another one."""
    out = []
    for number, chain in enumerate(chains):
        for node, keys in ((number % NODES, chain), ((number + 1) % NODES, chain[: LONG // 2])):
            out.append(Announcement(node, 1, 0, host=keys))
    return out


def _told(announce: Callable[[Announcement], int], messages: list[Announcement]) -> None:
    """Greet as every node, answer the question, tell everything. announce: a message -> the question of its reply."""
    seqs = dict.fromkeys(range(NODES), 2)
    for node in seqs:
        question = announce(Announcement(node, 1, 1))
        announce(Announcement(node, 1, 2, answers=question))
    for one in messages:
        seqs[one.node] += 1
        announce(Announcement(one.node, 1, seqs[one.node], host=one.host))


def _core(options: Options, report: Report, chains: list[tuple[bytes, ...]], messages: list[Announcement]) -> None:
    say("a shard alone")
    shard = Directory(DirectoryConfig(), 1)
    _told(lambda message: shard.announce(0, message).question, messages)

    def lookups() -> float:
        start = time.process_time()
        for chain in chains:
            shard.lookup(chain)
        return len(chains) * LONG / (time.process_time() - start)

    def announcements() -> float:
        fresh = Directory(DirectoryConfig(), 2)
        start = time.process_time()
        _told(lambda message: fresh.announce(0, message).question, messages)
        return sum(len(one.host) for one in messages) / (time.process_time() - start)

    found = interleave({f"look-up of {LONG}": lookups, "announcement": announcements}, options.rounds)
    rows: list[list[Cell]] = [
        [name, value, at_least(MIN_BLOCKS_PER_S, value) if name != "announcement" else ""]
        for name, value in found.items()
    ]
    report.add(Table("a shard alone, CPU time", ["call", "blocks/s", "bar"], rows, [f"{len(shard):,} entries"]))


def _actor(options: Options, report: Report, chains: list[tuple[bytes, ...]], messages: list[Announcement]) -> None:
    say("a shard in its actor")
    actor = find_shard(APP, 0)
    _told(lambda message: int(ray.get(actor.announce.remote(f"{message.node:056x}", message)).question), messages)
    caller = Caller(APP, 1)

    def lookups() -> float:
        start = time.perf_counter()
        for chain in chains:
            if sum(run.num_keys for run in caller.lookup(chain, 60.0)) != LONG:
                raise RuntimeError("the shard does not find what it was told")
        return len(chains) * LONG / (time.perf_counter() - start)

    try:
        found = interleave({f"look-up of {LONG}": lookups}, options.rounds)
    finally:
        ray.kill(actor)
    rows: list[list[Cell]] = [
        [name, value, at_least(MIN_BLOCKS_PER_S, value), value.map(lambda blocks: LONG / blocks * 1e3)]
        for name, value in found.items()
    ]
    report.add(Table("a shard in its actor, one caller", ["call", "blocks/s", "bar", "milliseconds per call"], rows))


if __name__ == "__main__":
    run_main(run, __doc__)
