"""The process of one rank beside the leader: `python -m tournant.workers.rank_process FD`.

Owns the line to the leader and the thread that watches whom it lives with; the rank itself runs on the main thread.

Guarantees:
 1. The process ends when the one that started it does (its pidfd, or the end of the inherited socket), and when the
    leader does (the end of the line), whatever it is doing.
 2. A rank that fails says why to the leader before it ends.
 3. A rank whose model folder holds other weights than the leader's, before or after it has read them, computes
    nothing.
 4. Its store link ends before the process does, when the leader says that it is over or the rank fails.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from contextlib import ExitStack
from typing import Any

from tournant.kvstore.errors import InvariantViolation
from tournant.workers.device import make_device
from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.local_cache import default_cache_dir
from tournant.workers.messages import FrameBuffer
from tournant.workers.model_folder import ModelFiles, check_folder, weights_id
from tournant.workers.models.described import DescribedModel
from tournant.workers.offload import open_rank_link
from tournant.workers.parallel_runner import RankServer, ShardRunner
from tournant.workers.rank_channel import BEATS, SILENCE_S, LeaderLine
from tournant.workers.rank_group import Membership, RankGroup, find_store
from tournant.workers.rank_launch import GroupPlace, join_from_wire

RECEIVE_BYTES = 1 << 16
logger = logging.getLogger("tournant.rank")


def watch(parent: int, connection: socket.socket, line: LeaderLine) -> None:
    """Thread: let the leader know that this rank lives; end the process when its parent or the leader is gone, which is
    no fault of this rank: a leader that has said that it is over may be gone before this rank is.
    """
    poller = select.poll()
    for descriptor in (parent, connection.fileno(), line.fileno()):
        poller.register(descriptor, select.POLLIN)
    while True:
        if poller.poll(SILENCE_S / BEATS * 1000):
            os._exit(0)
        try:
            line.beat()
        except OSError:
            os._exit(0)


def run_rank(place: GroupPlace, rank: int, device_index: int, line: LeaderLine, ends: ExitStack) -> None:
    """Join the group and follow its leader to the end. Raises what keeps it from doing so. ends: what is to be closed
    afterwards.
    """
    config, model = place.config, DescribedModel.from_wire(place.model)
    files = model.files
    device = make_device(config.device, device_index)
    check_folder(files.folder)
    check_weights(files)
    data = "nccl" if device.kind == "cuda" else "gloo"
    member = Membership(files.name, place.writer_id, place.split, rank, place.token, data=data, address=line.address)
    group = RankGroup(member, find_store(place.host, place.port), files.weights_id, ordered=config.deterministic)
    shard = ShardRunner(config, model, group, device)
    check_weights(files)
    server = RankServer(shard)
    if place.offload is not None:

        def send(events: list[Any]) -> None:
            try:
                line.send_event(events)
            except OSError:
                os._exit(0)

        server, link = open_rank_link(shard, place.offload, send)
        ends.callback(link.close)
    gc.collect()
    gc.freeze()
    server.serve()


def check_weights(files: ModelFiles) -> None:
    """Raises ConfigError when a folder holds other weights than the leader's."""
    if weights_id(files.folder, default_cache_dir()) != files.weights_id:
        raise ConfigError(
            f"the weights in {files.folder} are not those of rank 0; every machine needs the same files there"
        )


def first_frame(connection: socket.socket) -> tuple[GroupPlace, int, int, int]:
    """What this process is to be. Ends it when the parent is gone before it said so."""
    frames = FrameBuffer()
    while data := connection.recv(RECEIVE_BYTES):
        for message in frames.feed(data):
            return join_from_wire(message)
    raise SystemExit(0)


def main() -> None:
    """Entry point: the only argument is the number of an inherited, connected stream socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    connection = socket.socket(fileno=int(sys.argv[1]))
    place, rank, parent_pid, device_index = first_frame(connection)
    parent = os.pidfd_open(parent_pid)
    try:
        line = LeaderLine(place.host, place.channel_port, place.token, rank)
    except OSError as error:
        logger.error("rank %d cannot reach its leader at %s:%d: %s", rank, place.host, place.channel_port, error)
        raise SystemExit(1) from error
    threading.Thread(target=watch, args=(parent, connection, line), daemon=True, name="watch").start()
    ends = ExitStack()
    try:
        run_rank(place, rank, device_index, line, ends)
    except (ConfigError, ModelFormatError, InvariantViolation, OSError, MemoryError, ValueError, RuntimeError) as error:
        logger.exception("rank %d failed", rank)
        with contextlib.suppress(OSError):
            line.fail(error)
        raise SystemExit(1) from error
    finally:
        ends.close()
        line.close()


if __name__ == "__main__":
    main()
