"""Engines over several ranks: rank 0 in the test process, the others in processes that join one group after another."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.workers.harness import Session, files_of, make_engine
from tests.workers.rank_worker import work
from tournant.workers.config import EngineConfig
from tournant.workers.engine import Engine
from tournant.workers.messages import EngineInfo
from tournant.workers.models.families import describe, read_decoder_config
from tournant.workers.parallel import check_split
from tournant.workers.parallel_runner import ParallelRunner, ShardRunner
from tournant.workers.rank_group import Membership, RankGroup, open_store

TOKEN = b"t" * 32
TIMEOUT_S = 20.0
NUM_NEW = 12
LEAST_GAP = 5e-3


@dataclass(frozen=True)
class Rank:
    """A process that runs a rank, and the pipe to it."""

    process: BaseProcess
    pipe: Connection

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.process.pid or 0, number)

    def ending(self) -> str:
        """How its last group ended."""
        try:
            found: str = json.loads(self.pipe.recv_bytes())
        except EOFError:
            return "the process ended"
        return found


class Ranks:
    """Processes for ranks 1, 2, ...; started when first needed, used for one group after another.

    They are forked off one that has imported everything and done nothing, because imports take seconds.
    """

    def __init__(self) -> None:
        self.running: list[Rank] = []
        self._groups = 0

    def start(self, count: int) -> None:
        """Have at least so many processes."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.workers.rank_worker"])
        for _ in range(count - len(self.running)):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.running.append(Rank(process, ours))

    def next_writer_id(self) -> int:
        """One that no group had."""
        self._groups += 1
        return self._groups << 32 | os.getpid()

    def kill(self, index: int) -> None:
        """Kill a process, and forget it."""
        rank = self.running.pop(index)
        rank.process.kill()
        rank.process.join()

    def close(self) -> None:
        """End all processes."""
        while self.running:
            self.kill(0)


class Replica:
    """An engine whose other ranks run in processes of `ranks`. weights_id, others_folder: what these take for
    their own.
    """

    def __init__(
        self,
        ranks: Ranks,
        folder: Path,
        tensor: int,
        pipeline: int,
        weights_id: bytes = b"",
        others_folder: Path | None = None,
        timeout_s: float = TIMEOUT_S,
        num_blocks: int = 200,
        **fields: Any,
    ) -> None:
        decoder = read_decoder_config(folder)
        split = check_split(decoder, tensor, pipeline)
        token_bytes = decoder.num_layers * 2 * decoder.num_kv_heads * decoder.head_size * 4
        defaults: dict[str, Any] = {"dtype": "float32", "deterministic": True, "device": "cpu", "num_threads": 1}
        defaults |= {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
        config = EngineConfig(**defaults | {"kv_cache_bytes": num_blocks * 16 * token_bytes} | fields)
        ranks.start(split.size - 1)
        self._store = open_store("127.0.0.1")
        writer_id = ranks.next_writer_id()
        self.others = ranks.running[: split.size - 1]
        members = [Membership("m", writer_id, split, rank, TOKEN, timeout_s=timeout_s) for rank in range(split.size)]
        for member in members[1:]:
            plain = asdict(member) | {"token": TOKEN.hex()}
            order = {"member": plain, "config": asdict(config), "folder": str(others_folder or folder)}
            order |= {"port": self._store.port, "weights_id": weights_id.hex()}
            self.others[member.rank - 1].pipe.send_bytes(json.dumps(order).encode())
        files = files_of(folder)
        self.group = RankGroup(members[0], self._store, files.weights_id, ordered=config.deterministic)
        self.shard = ShardRunner(config, describe(files, config), self.group)
        self.runner = ParallelRunner(self.shard)
        self.engine = Engine(config, self.runner, info_of(self.shard, writer_id))

    def close(self) -> list[str]:
        """End the group; how it ended on each other rank."""
        self.runner.close()
        return [rank.ending() for rank in self.others]


def info_of(shard: ShardRunner, writer_id: int) -> EngineInfo:
    """What an engine on this rank says of itself."""
    decoder, layout = shard.decoder_config, shard.layout
    return EngineInfo(
        writer_id=writer_id,
        pid=os.getpid(),
        max_model_len=decoder.max_model_len,
        pool_tokens=shard.cache.num_blocks * layout.block_tokens,
        block_tokens=layout.block_tokens,
        max_num_seqs=shard.config.max_num_seqs,
        max_queued_requests=shard.config.max_queued_requests,
        vocab_size=decoder.vocab_size,
        eos_token_ids=decoder.eos_token_ids,
        dtype="float32",
        device="cpu",
        namespace=shard.namespace,
        overflow_tokens=shard.overflow_blocks * layout.block_tokens,
    )


@contextmanager
def replica(ranks: Ranks, folder: Path, tensor: int, pipeline: int, **fields: Any) -> Iterator[Session]:
    """A session with an engine over tensor x pipeline ranks, whose group ends well."""
    running = Replica(ranks, folder, tensor, pipeline, **fields)
    try:
        yield Session(running.engine)
    finally:
        endings = running.close()
    assert endings == [""] * len(endings)


def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random bytes as prompts."""
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class Chosen:
    prompts: list[list[int]]
    answers: list[list[int]]


@cache
def without_near_ties(folder: Path, lengths: tuple[int, ...]) -> Chosen:
    """A prompt of each length, and what a single process answers, which is far from answering anything else.

    It is asked for the two best logits of every token, and of eight random prompts the first serves for which they
    always differ by more than LEAST_GAP. Sums in another order move logits of these models by about 1e-5.
    """
    session = Session(make_engine(folder, num_blocks=400))
    chosen = Chosen([], [])
    for length in lengths:
        for prompt in prompts_of((length,) * 8, seed=length):
            request = session.submit(prompt, max_tokens=NUM_NEW, logprobs=2)
            session.drain()
            tops = [item.top for output in session.outputs[request] for item in output.logprobs or []]
            if min(best - second for (_, best), (_, second) in tops) > LEAST_GAP:
                chosen.prompts.append(prompt)
                chosen.answers.append(session.tokens(request))
                break
    assert len(chosen.prompts) == len(lengths), "no prompt without near ties was found"
    return chosen
