"""The process an engine lives in: `python -m tournant.workers.engine_process FD`.

Owns the socket to its parent (a `ProcessEngineClient`) and the thread that reads it; the engine itself runs on the main
thread. Frames are those of messages.py.

Guarantees:
 1. The process ends when its parent does (the parent's pidfd or the end of the socket says so), whatever it is doing.
 2. Between steps it says something at least every BEAT_S, whether there is anything to say or not.
 3. A failed step ends the requests it held with "error"; three in a row end the process, and the client reports why.
    With other ranks one is enough, and so is the loss of a rank at any time: the last frame tells the first cause.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch

from tournant.kernels.layout import KVLayout
from tournant.kvstore.errors import InvariantViolation
from tournant.workers.config import EngineConfig
from tournant.workers.device import Device, make_device
from tournant.workers.engine import Engine, Runner
from tournant.workers.engine_watchdog import BEAT_S
from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.fp8_images import lower_kv_form
from tournant.workers.messages import (
    EngineInfo,
    EngineStats,
    FrameBuffer,
    RequestOutput,
    StartMessage,
    StepMessage,
    info_to_wire,
    pack_frame,
    request_from_wire,
    start_from_wire,
    step_to_wire,
)
from tournant.workers.model_runner import ModelRunner
from tournant.workers.models.described import DescribedModel
from tournant.workers.offload import open_group_link, open_link
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.parallel_runner import ShardRunner
from tournant.workers.rank_channel import LAST_WORDS_S
from tournant.workers.rank_group import RankLost
from tournant.workers.rank_leader import RankLeader, split_of
from tournant.workers.transfer_messages import Link

MAX_FAILED_STEPS = 3
ATTACH_S = 5.0  # most seconds that readiness waits for the node store
FLUSH_S = 2.0  # most seconds to copy down what is only on the device when the engine is told to end
RECEIVE_BYTES = 1 << 18
logger = logging.getLogger("tournant.engine")


class EngineServer:
    """Serves one client over `connection` until it goes away."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._inbox: deque[list[Any]] = deque()
        self._wake = threading.Event()
        self._frames = FrameBuffer()
        self._writer_id = int.from_bytes(os.urandom(8), "little")
        self._sending = threading.Lock()
        self._ending = threading.Lock()  # taken once, by whoever ends the process
        self._ready = False
        self._leader: RankLeader | None = None

    def run(self) -> None:
        """Load what the first frame names, say "ready" or "failed", then serve."""
        start = start_from_wire(self._first_message())
        parent = os.pidfd_open(start.parent_pid)
        threading.Thread(target=self._read, args=(parent,), daemon=True, name="reader").start()
        try:
            engine, info = self._build(start)
            engine.attach(self._rest, ATTACH_S)
        except RankLost as error:
            self._end_without_rank(error)
        except (ConfigError, ModelFormatError, OSError, MemoryError, ValueError, RuntimeError) as error:
            self._give_up(type(error).__name__, str(error))
        self._ready = True
        self._send(info_to_wire(info))
        self._serve(engine)

    def _build(self, start: StartMessage) -> tuple[Engine, EngineInfo]:
        model = DescribedModel.from_wire(start.model)
        split = split_of(start.config, model.decoder)
        if split.size == 1:
            return build_engine(start.config, model, self._writer_id, offload=start.offload, wake=self._wake.set)
        device = make_device(start.config.device)
        self._leader = leader = RankLeader(start, split, self._writer_id, device, self._give_up)
        self._send(["forming", leader.place.to_wire()])
        config, wake = leader.place.config, self._wake.set
        return build_engine(config, model, self._writer_id, device, start.offload, wake, leader)

    def _give_up(self, kind: str, cause: str) -> NoReturn:
        """End the process, from any thread, and tell the client why."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread is at it
        if self._leader is not None:
            logger.error("the ranks of this engine end: %s", cause)
        try:
            self._send(["dead", cause] if self._ready else ["failed", kind, cause])
        finally:
            os._exit(1)

    def _end_without_rank(self, error: RankLost) -> NoReturn:
        """End because a rank is lost. The thread that hears of ranks knows best why: it ends the process, if it can."""
        threading.Event().wait(2 * LAST_WORDS_S)
        self._give_up(type(error).__name__, str(error))

    def _first_message(self) -> list[Any]:
        while True:
            data = self._connection.recv(RECEIVE_BYTES)
            if not data:
                raise SystemExit(0)
            for message in self._frames.feed(data):
                return message

    def _read(self, parent: int) -> None:
        """Reader thread: frames into the inbox; ends the whole process when the parent is gone."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        poller.register(parent, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if parent in ready:
                os._exit(0)
            data = self._connection.recv(RECEIVE_BYTES)
            if not data:
                os._exit(0)
            try:
                self._inbox.extend(self._frames.feed(data))
            except ValueError:
                logger.exception("the client sent a frame that is not ours; ending")
                os._exit(1)
            self._wake.set()

    def _serve(self, engine: Engine) -> None:
        failed, step = 0, 0
        told_stats, told_at = EngineStats(), time.monotonic()
        while True:
            if (wait_s := engine.wait_s()) != 0:
                self._wake.wait(BEAT_S if wait_s is None else min(wait_s, BEAT_S))
            self._wake.clear()
            told = bool(self._inbox)  # an abort yields no output, but other numbers
            outputs = self._handle_inbox(engine)
            if engine.has_work or engine.has_tiers:
                try:
                    outputs += engine.step()
                    failed = 0
                except RankLost as error:
                    self._end_without_rank(error)
                except (RuntimeError, ValueError, KeyError, IndexError, MemoryError, InvariantViolation) as error:
                    failed += 1
                    logger.exception("step %d failed", step)
                    if self._leader is not None:  # the ranks are not at the same step any more
                        self._give_up(type(error).__name__, f"rank 0: {type(error).__name__}: {error}")
                    outputs += engine.fail_all(f"the engine could not compute a step: {type(error).__name__}")
                    if failed >= MAX_FAILED_STEPS:
                        raise
            rests = engine.has_tiers and engine.wait_s() is None  # then its numbers would not be told later
            due = time.monotonic() - told_at >= BEAT_S
            if outputs or told or due or (rests and engine.stats() != told_stats):
                step += 1
                told_stats, told_at = engine.stats(), time.monotonic()
                self._send(step_to_wire(StepMessage(self._writer_id, step, outputs, told_stats)))

    def _handle_inbox(self, engine: Engine) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while self._inbox:
            message = self._inbox.popleft()
            match message[0]:
                case "submit":
                    outputs += _add(engine, message)
                case "abort":
                    for request_id in message[1]:
                        engine.abort(request_id)
                case "abort_answer":
                    engine.abort_answer(message[1], message[2])
                case "reset":
                    self._send(["reply", message[1], engine.reset_prefix_cache()])
                case "validate":
                    self._send(["reply", message[1], _validate(engine)])
                case "close":
                    self._close(engine)
                case kind:
                    raise ValueError(f"unknown message kind {kind!r}")
        return outputs

    def _close(self, engine: Engine) -> NoReturn:
        try:
            engine.flush(self._rest, FLUSH_S)
            engine.close()
        except RankLost as error:
            self._end_without_rank(error)
        if self._leader is not None:
            self._leader.close()
        raise SystemExit(0)

    def _rest(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _send(self, message: list[Any]) -> None:
        with self._sending:
            self._connection.sendall(pack_frame(message))


def _add(engine: Engine, message: list[Any]) -> list[RequestOutput]:
    """Queue a request; one that makes no sense is answered with "error" instead of ending the engine."""
    try:
        return engine.add_request(request_from_wire(message))
    except (TypeError, ValueError, KeyError, IndexError, OverflowError, InvariantViolation) as error:
        logger.exception("a request was refused")
        engine.abort(message[1])
        first = message[9]
        return [
            RequestOutput(message[1], index, [], "error", error=f"the request makes no sense: {error}")
            for index in range(first, first + message[3].get("n", 1))
        ]


def _validate(engine: Engine) -> str:
    try:
        engine.validate()
    except InvariantViolation as error:
        return str(error)
    return ""


def _dtype_of(computing: torch.dtype, layout: KVLayout) -> str:
    """What it computes in, and the form of KV on the device, as EngineConfig calls it, where that is another."""
    name = str(computing).removeprefix("torch.")
    return name if layout.dtype == computing else f"{name} with {layout.kv_form} KV"


def build_engine(
    config: EngineConfig,
    model: DescribedModel,
    writer_id: int,
    device: Device | None = None,
    offload: OffloadConfig | None = None,
    wake: Callable[[], None] = lambda: None,
    leader: RankLeader | None = None,
) -> tuple[Engine, EngineInfo]:
    """An engine with its model loaded, and what it says of itself; device: see `ModelRunner`; offload: its tiers below
    the device; wake: called from another thread when these have news for the engine; leader: of its ranks, if there are
    others.

    Raises ConfigError, ModelFormatError, RankLost.
    """
    if leader is None:
        runner = ModelRunner(config, model, device)
        steps: Runner = runner
    else:
        runner = shard = ShardRunner(config, model, leader.form(model.files), device)
        steps = parallel = leader.lead(shard)
    decoder, layout = runner.decoder_config, runner.layout
    info = EngineInfo(
        writer_id=writer_id,
        pid=os.getpid(),
        max_model_len=decoder.max_model_len,
        pool_tokens=runner.cache.num_blocks * layout.block_tokens,
        block_tokens=layout.block_tokens,
        max_num_seqs=config.max_num_seqs,
        max_queued_requests=config.max_queued_requests,
        vocab_size=decoder.vocab_size,
        eos_token_ids=decoder.eos_token_ids,
        dtype=_dtype_of(runner.decoder.dtype, layout),
        device=runner.device.kind,
        namespace=runner.namespace
        if offload is None
        else replace(runner.namespace, kv_form=lower_kv_form(layout, offload)),
        rope_switch=decoder.rope_switch,
        long_layout_id=runner.long_layout_id,
        overflow_tokens=runner.overflow_blocks * layout.block_tokens,
    )
    link: Link | None = None
    if offload is not None and leader is not None:
        steps, group_link = open_group_link(parallel, offload, wake)
        leader.deliver_to(group_link.deliver)
        link = group_link
    elif offload is not None:
        steps, link = open_link(runner, offload, writer_id, wake)
    engine = Engine(config, steps, info, link, offload)
    gc.collect()
    gc.freeze()  # what was loaded lives as long as the process: the collector need not look at it again
    return engine, info


def main() -> None:
    """Entry point: the only argument is the number of an inherited, connected stream socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    EngineServer(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
