"""Decode steps captured once per number of sequences and replayed: a launch for a whole model instead of hundreds.

Owns the static tensors that captured steps read, one set per size, and the choice of size. A step of n sequences with
one token each runs in the smallest captured size of at least n; its other rows are padding (slot -1, no context), which
store nothing and get zeros from attention. Everything else runs eagerly.

Invariants:
 1. A captured step reads only its static tensors, the weights and the KV pool with its scales; none of them ever moves.
 2. Static tensors are filled on the stream that replays, so a step in flight is not disturbed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tournant.kernels import ops
from tournant.workers.device import Device
from tournant.workers.forward_input import ForwardInput
from tournant.workers.kv_cache import KVCache
from tournant.workers.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class _Captured:
    static: ForwardInput
    replay: Callable[[], torch.Tensor]


class DecodeGraphs:
    """Captures a decoder over a KV pool for each of `sizes` sequences of up to max_blocks blocks; empty sizes: never.

    The back end must be Triton (static plans). Capturing stores nothing in the pool.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, device: Device, sizes: tuple[int, ...], max_blocks: int
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._device = device
        self._max_blocks = max_blocks
        # the largest first: the others fit into its scratch memory
        self._captured = {size: self._capture(size) for size in sorted(sizes, reverse=True)}
        self._sizes = tuple(sorted(sizes))

    def size_for(self, step: ForwardInput) -> int | None:
        """The captured size that serves a step; None when it must run eagerly."""
        if not step.only_decodes:
            return None
        return next((size for size in self._sizes if size >= step.num_tokens), None)

    def run(self, step: ForwardInput) -> torch.Tensor | None:
        """Hidden states [size, hidden] of a step, its own rows first; None when it must run eagerly.

        The tensor is overwritten by the next run of its size.
        """
        size = self.size_for(step)
        if size is None:
            return None
        static, count = self._captured[size].static, step.num_tokens
        static.input_ids[:count].copy_(step.input_ids[:count])
        static.rope_positions[:count].copy_(step.rope_positions[:count])
        static.slot_mapping.fill_(-1)
        static.slot_mapping[:count].copy_(step.slot_mapping[:count])
        ops.refill_plan(static.plan, step.plan)
        return self._captured[size].replay()

    def _capture(self, size: int) -> _Captured:
        device, config = self._device.torch_device, self._decoder.config
        static = ForwardInput(
            input_ids=torch.zeros(size, dtype=torch.int64, device=device),
            rope_positions=torch.zeros(size, dtype=torch.int64, device=device),
            slot_mapping=torch.full((size,), -1, dtype=torch.int64, device=device),
            sample_rows=torch.arange(size, device=device),
            sample_seqs=torch.arange(size, device=device),
            num_tokens=size,
            only_decodes=True,
            plan=ops.static_decode_plan(self._cache.layout, config.num_heads, size, self._max_blocks, device),
        )
        cache = self._cache
        return _Captured(
            static, self._device.capture(lambda: self._decoder.forward(static, cache.tensor, kv_scales=cache.scales))
        )
