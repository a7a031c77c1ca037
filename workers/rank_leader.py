"""The leader's side of a group of rank processes: where it forms, who has come, and how it ends.

Owns the store of torch.distributed and the `RankChannel` of one group, and what the ranks' store links say until there
is a link to take it. What is done about a lost rank is decided by
whoever gave `on_lost`; who starts the ranks, by whoever is told the place.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tournant.workers.config import EngineConfig
from tournant.workers.device import Device
from tournant.workers.messages import StartMessage
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.decoder_config import DecoderConfig
from tournant.workers.parallel import check_split
from tournant.workers.parallel_runner import ParallelRunner, ShardRunner
from tournant.workers.rank_channel import RankChannel
from tournant.workers.rank_group import Membership, RankGroup, open_store
from tournant.workers.rank_launch import GroupPlace
from tournant.workers.split import Split
from tournant.workers.transfer_messages import Event
from tournant.workers.transfer_wire import event_from_wire

END_S = 2.0  # most time for the other ranks to end when they are told to


def split_of(config: EngineConfig, decoder: DecoderConfig) -> Split:
    """The split a configuration wants, if this model allows it. Raises ConfigError."""
    tensor, pipeline = config.tensor_parallel_size, config.pipeline_parallel_size
    if tensor == pipeline == 1:
        return Split()
    return check_split(decoder, tensor, pipeline)


class RankLeader:
    """Opens a place for a group; the other ranks can come from then on. on_lost: see `RankChannel`."""

    def __init__(
        self,
        start: StartMessage,
        split: Split,
        writer_id: int,
        device: Device,
        on_lost: Callable[[str, str], None],
    ) -> None:
        self._lock = threading.Lock()  # guards the two below
        self._early: list[tuple[int, list[Event]]] = []
        self._deliver: Callable[[int, Sequence[Event]], None] | None = None
        self._runner: ParallelRunner | None = None
        self._store = open_store(start.host)
        token = secrets.token_bytes(32)
        self._channel = RankChannel(start.host, split.size, token, self._hear, on_lost)
        self._data = "nccl" if device.kind == "cuda" else "gloo"
        threads = start.config.num_threads or max(1, len(os.sched_getaffinity(0)) // split.size)
        self.place = GroupPlace(
            host=start.host,
            port=self._store.port,
            channel_port=self._channel.port,
            token=token,
            writer_id=writer_id,
            config=replace(start.config, device=device.kind, num_threads=threads),
            model=start.model,
            split=split,
            offload=start.offload,
        )

    def form(self, files: ModelFiles) -> RankGroup:
        """The group that computes a model, once all ranks are in it. Raises ConfigError, RankLost."""
        place = self.place
        member = Membership(
            files.name, place.writer_id, place.split, 0, place.token, data=self._data, address=place.host
        )
        return RankGroup(member, self._store, files.weights_id, ordered=place.config.deterministic)

    def lead(self, shard: ShardRunner) -> ParallelRunner:
        """What gives this rank's share of batches, and those of all others, their batches."""
        self._runner = ParallelRunner(shard)
        return self._runner

    def deliver_to(self, deliver: Callable[[int, Sequence[Event]], None]) -> None:
        """Where the events of the other ranks' store links go from now on, those that have come already first."""
        with self._lock:
            for rank, events in self._early:
                deliver(rank, events)
            self._early.clear()
            self._deliver = deliver

    def _hear(self, rank: int, data: list[Any]) -> None:
        """Events have come. Raises ValueError for what is none."""
        if self.place.offload is None:
            raise ValueError(f"rank {rank} sends events of a store link; this engine has no tiers below the device")
        events = [event_from_wire(event) for event in data]
        with self._lock:
            if self._deliver is None:  # few: without orders a link only says that it has its store, or has lost it
                self._early.append((rank, events))
            else:
                self._deliver(rank, events)

    def close(self) -> None:
        """Let all ranks end, which end their store links, and wait for it a moment."""
        self._channel.end()
        if self._runner is not None:
            self._runner.close()
        self._channel.close(END_S)
