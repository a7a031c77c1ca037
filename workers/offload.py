"""Puts an engine's link to its node store together: images of the runner's blocks, who the engine is, faults for tests.

Owns nothing; engine_process.py calls it once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tournant.kvstore.block import Part
from tournant.workers.engine import Runner
from tournant.workers.faults import DelayedRunner, FollowingImages
from tournant.workers.fp8_images import lower_kv_form, make_images
from tournant.workers.model_runner import ModelRunner
from tournant.workers.offload_config import OffloadConfig
from tournant.workers.store_link import LinkIdentity, StoreLink


def open_link(
    runner: ModelRunner, config: OffloadConfig, writer_id: int, wake: Callable[[], None]
) -> tuple[Runner, StoreLink]:
    """What the engine runs its steps with, and the link of its pool. wake: called when the link has events.

    writer_id: of the engine's group of ranks, new at every start.
    """
    layout = runner.layout
    images = make_images(runner.device, runner.cache, config, deterministic=runner.config.deterministic)
    steps: Runner = runner
    if config.faults.kernel_delay_ms:
        delayed = DelayedRunner(runner, config.faults.kernel_delay_ms)
        steps, images = delayed, FollowingImages(images, delayed)
    identity = LinkIdentity(
        weights_id=runner.namespace.weights_id,
        kv_form=lower_kv_form(layout, config),
        writer_id=writer_id,
        part=Part(0, layout.num_layers, 0, layout.num_kv_heads),
    )
    return steps, StoreLink(
        Path(config.store_socket), identity, images, config, wake, page_lock=runner.device.page_lock
    )
