"""Puts the links of an engine's ranks to their node stores together: images of the runner's blocks, who each rank is,
what passes between ranks, faults for tests.

Owns nothing; engine_process.py and rank_process.py call it once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tournant.kvstore.agent_wire import AGENT_SOCKET
from tournant.kvstore.block import Part
from tournant.workers.engine import Runner
from tournant.workers.faults import DelayedRunner, FollowingImages, LateSteps
from tournant.workers.fp8_images import lower_kv_form, make_images
from tournant.workers.group_link import GroupLink, publishers
from tournant.workers.model_runner import ModelRunner
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.parallel import shards_of
from tournant.workers.parallel_runner import ParallelRunner, RankServer, ShardRunner
from tournant.workers.rank_link import RankLink
from tournant.workers.store_link import LinkIdentity, StoreLink
from tournant.workers.transfer_messages import BlockImages, Order

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def open_link(
    runner: ModelRunner, config: OffloadConfig, writer_id: int, wake: Callable[[], object]
) -> tuple[Runner, StoreLink]:
    """What an engine of one rank runs its steps with, and the link of its pool. wake: called when the link has events.

    writer_id: of the engine, new at every start.
    """
    images, layout = _images(runner, config), runner.layout
    identity = LinkIdentity(
        weights_id=runner.namespace.weights_id,
        kv_form=lower_kv_form(layout, config),
        writer_id=writer_id,
        part=Part(0, layout.num_layers, 0, layout.num_kv_heads),
    )
    if not config.faults.kernel_delay_ms:
        return runner, _store_link(runner, config, identity, images, wake)
    delayed = DelayedRunner(runner, config.faults.kernel_delay_ms)
    return delayed, _store_link(runner, config, identity, FollowingImages(images, delayed), wake)


def open_group_link(
    runner: ParallelRunner, config: OffloadConfig, wake: Callable[[], object]
) -> tuple[Runner, GroupLink]:
    """The same for an engine of several ranks, of which each calls `open_rank_link` meanwhile. Raises RankLost."""
    shard, steps, tell = runner.shard, runner, runner.tell
    images, stores = _images(shard, config), _stores(shard, config)
    if not config.faults.kernel_delay_ms:
        link = _store_link(shard, config, _identity(shard, config, stores), images, wake)
        return steps, GroupLink(link, stores, tell, wake)
    delayed = DelayedRunner(runner, config.faults.kernel_delay_ms)

    def tell_late(ranks: Sequence[int], orders: Sequence[Order]) -> None:
        delayed.behind(partial(tell, ranks, orders))

    link = _store_link(shard, config, _identity(shard, config, stores), FollowingImages(images, delayed), wake)
    return delayed, GroupLink(link, stores, tell_late, wake)


def open_rank_link(
    shard: ShardRunner, config: OffloadConfig, send: Callable[[list[Any]], object]
) -> tuple[RankServer, RankLink]:
    """What follows the leader on another rank, and its link. send: takes events for the leader. Raises RankLost."""
    images, stores = _images(shard, config), _stores(shard, config)
    late = LateSteps(config.faults.kernel_delay_ms) if config.faults.kernel_delay_ms else None
    if late is not None:
        images = FollowingImages(images, late)
    link = RankLink(partial(_store_link, shard, config, _identity(shard, config, stores), images), send)
    if late is None:
        return RankServer(shard, link.submit), link
    return RankServer(shard, link.submit, late.carry_out), link


def _images(runner: ModelRunner, config: OffloadConfig) -> BlockImages:
    return make_images(runner.device, runner.cache, config, deterministic=runner.config.deterministic)


def _stores(shard: ShardRunner, config: OffloadConfig) -> list[str]:
    """Names of the stores of all ranks. Two ranks on one machine, in one container, mean the same by the same path."""
    machine = f"{BOOT_ID.read_text().strip()}/{socket.gethostname()}"
    return shard.group.share("node store", f"{machine}:{Path(config.store_socket).resolve()}")


def _identity(shard: ShardRunner, config: OffloadConfig, stores: Sequence[str]) -> LinkIdentity:
    """Of this rank, among those whose stores these are."""
    member = shard.group.member
    parts = [one.part for one in shards_of(shard.shard.whole, member.split)]
    publishes, local_parts = publishers(stores, parts)[member.rank]
    return LinkIdentity(
        weights_id=shard.namespace.weights_id,
        kv_form=lower_kv_form(shard.layout, config),
        writer_id=member.writer_id,
        part=parts[member.rank],
        in_group=True,
        publishes=publishes,
        local_parts=local_parts,
        num_sharing=stores.count(stores[member.rank]),
    )


def _store_link(
    runner: ModelRunner,
    config: OffloadConfig,
    identity: LinkIdentity,
    images: BlockImages,
    wake: Callable[[], object],
) -> StoreLink:
    store, page_lock = Path(config.store_socket), runner.device.page_lock
    agent = store.with_name(AGENT_SOCKET)  # listens on nodes of a cluster
    return StoreLink(store, identity, images, config, wake, page_lock=page_lock, agent=agent)
