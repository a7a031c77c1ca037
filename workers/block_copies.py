"""Whole blocks between the device pool and memory of the CPU, beside computing.

Owns: one lane for each direction, so that both links of a GPU are busy at once, and one staging buffer for each, which
makes one large copy of scattered blocks. Does not own pool or host memory, and does not decide what moves.

Rules for the caller, who alone knows what a block is used for:
 1. A block that is being read may not be given to computing that writes it before the mark is done (or
    `mark.hold_compute()` was called).
 2. A block that is being written may be read by computing only after `mark.hold_compute()`.
 3. Host memory may be neither changed nor freed before the mark is done. On a GPU it should be page-locked
    (`Device.host_buffer`): other memory is copied at a fraction of the speed and holds up this thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tournant.kernels import ops
from tournant.workers.device import Device, Mark


class BlockCopies:
    """Copies for one pool: any dense tensor whose first axis is the block, as the KV tensor or its scales.

    staging_blocks: blocks that one piece of a copy moves; more make fewer and larger pieces. A GPU's memory holds
    2 * staging_blocks blocks more.
    """

    def __init__(self, device: Device, pool: torch.Tensor, staging_blocks: int) -> None:
        self._device = device
        self._pool = pool
        self._piece = staging_blocks
        self._out, self._in = device.new_lane(), device.new_lane()
        self._staging = [self._allocate(staging_blocks) for _ in range(2)] if device.kind == "cuda" else []

    def read(self, blocks: Sequence[int], host: torch.Tensor) -> Mark:
        """host[i] = pool[blocks[i]], as the pool is after all computing given so far.

        host: dense tensor of the CPU, of the pool's dtype and block shape, or uint8 [len(blocks), bytes of a block].
        """
        self._out.follow_compute()
        with self._out.active():
            for ids, part in self._pieces(blocks, host):
                if not self._staging:
                    ops.gather_blocks(self._pool, ids, part)
                    continue
                staging = self._staging[0][: len(part)]
                ops.gather_blocks(self._pool, ids, staging)
                part.copy_(staging, non_blocking=True)
        return self._out.mark()

    def write(self, host: torch.Tensor, blocks: Sequence[int]) -> Mark:
        """pool[blocks[i]] = host[i], after all computing given so far, which may still read those blocks."""
        self._in.follow_compute()
        with self._in.active():
            for ids, part in self._pieces(blocks, host):
                staging = part
                if self._staging:
                    staging = self._staging[1][: len(part)]
                    staging.copy_(part, non_blocking=True)
                ops.scatter_blocks(staging, ids, self._pool)
        return self._in.mark()

    def _allocate(self, num_blocks: int) -> torch.Tensor:
        return torch.empty((num_blocks, *self._pool.shape[1:]), dtype=self._pool.dtype, device=self._pool.device)

    def _pieces(self, blocks: Sequence[int], host: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(ids on the device, their part of `host` as blocks of the pool) of each piece."""
        images = host.view(self._pool.dtype).view(-1, *self._pool.shape[1:])
        if len(images) != len(blocks):
            raise ValueError(f"{len(blocks)} blocks do not fit host memory of {len(images)} blocks; lend as many")
        for start in range(0, len(blocks), self._piece):
            part = images[start : start + self._piece]
            (ids,) = self._device.upload([np.asarray(blocks[start : start + self._piece], dtype=np.int64)])
            yield ids, part
