"""The Triton back end as one object: what `ops` dispatches to for tensors on a GPU (or under Triton's interpreter).

Owns: the choice of kernels for a step. Methods mirror the functions of `reference`. Nothing here waits for the device,
so out-of-range slots and positions cannot raise: their rows are left alone. fp8 KV: kv_cache of torch.float8_e5m2, or
of torch.float8_e4m3fn with `kv_scales` of `KVLayout.allocate_scales`, beside the pool and copied with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import PIECE_TOKENS, AttentionPlan
from tournant.kernels.triton import gated, merge_states, rms_norm, rope, rope_store_kv, store_kv, store_kv_e4m3
from tournant.kernels.triton.block_copy import copy_blocks, gather_blocks, scatter_blocks
from tournant.kernels.triton.card import Card
from tournant.kernels.triton.fp8 import form_of
from tournant.kernels.triton.paged_decode import paged_decode
from tournant.kernels.triton.paged_prefill import paged_prefill
from tournant.kernels.triton.paged_walk import paged_walk
from tournant.kernels.triton.plan import DevicePlan, device_plan, refill, static_decode_plan


def interpreted() -> bool:
    """Whether the kernels were imported under Triton's interpreter, so that they run on CPU tensors."""
    return not isinstance(rms_norm.rms_norm_kernel, triton.JITFunction)


class TritonKernels:
    """One per device. card: what tile sizes are chosen for."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """See `ops.rms_norm`; x may also be [N, heads, H]."""
        return rms_norm.rms_norm(x, weight, eps, residual)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `ops.silu_mul`."""
        return gated.silu_mul(gate_up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `ops.gelu_mul`."""
        return gated.gelu_mul(gate_up)

    def rope(self, x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Rotate x [N, heads, hs] into out, which may be x."""
        rope.rope(x, cos_sin, positions, out)

    def store_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """See `ops.store_kv`; kv_cache may be fp8. Raises ValueError when e4m3 comes without scales."""
        if form_of(kv_cache) != "e4m3":
            store_kv.store_kv(k, v, kv_cache, layer, slot_mapping)
        elif kv_scales is None:
            raise ValueError("kv_cache holds float8_e4m3fn codes; give kv_scales [blocks, layers, 2, kv_heads]")
        else:
            store_kv_e4m3.store_kv_e4m3(k, v, kv_cache, kv_scales, layer, slot_mapping)

    def rope_store_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """See `ops.rope_store_kv`. With fp8 KV the rotated keys take a detour through memory."""
        if form_of(kv_cache) == "plain":
            rope_store_kv.rope_store_kv(q, k, v, cos_sin, positions, kv_cache, layer, slot_mapping)
            return
        rotated = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        real = torch.where(slot_mapping < 0, -1, positions)  # padding rows keep their q
        rope.rope(q, cos_sin, real, q)
        rope.rope(k, cos_sin, positions, rotated)
        self.store_kv(rotated, v, kv_cache, layer, slot_mapping, kv_scales=kv_scales)

    def copy_blocks(self, kv_cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
        """See `ops.copy_blocks`; src and dst may be on the CPU."""
        device = kv_cache.device
        copy_blocks(kv_cache, src.to(device, non_blocking=True), dst.to(device, non_blocking=True))

    def gather_blocks(self, pool: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> None:
        """staging[i] = pool[ids[i]], a negative id skips its place."""
        gather_blocks(pool, ids, staging)

    def scatter_blocks(self, staging: torch.Tensor, ids: torch.Tensor, pool: torch.Tensor) -> None:
        """pool[ids[i]] = staging[i], a negative id skips its place."""
        scatter_blocks(staging, ids, pool)

    def merge_states(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        a: torch.Tensor,
        lse_a: torch.Tensor,
        b: torch.Tensor,
        lse_b: torch.Tensor,
    ) -> None:
        """Two attention results over disjoint KV become one; out and lse may be a and lse_a."""
        merge_states.merge_states(out, lse, a, lse_a, b, lse_b)

    def prepare(self, plan: AttentionPlan, device: torch.device) -> DevicePlan:
        """Upload a step. `paged_attention` does it by itself the first time it sees a plan."""
        return device_plan(plan, self._card, device)

    def static_plan(
        self, layout: KVLayout, num_heads: int, num_seqs: int, max_blocks: int, device: torch.device
    ) -> DevicePlan:
        """A plan for CUDA graphs of decode steps: set it as `plan.native`, capture, then `refill` and replay."""
        return static_decode_plan(layout, num_heads, num_seqs, max_blocks, self._card, device)

    def refill(self, static: DevicePlan, plan: AttentionPlan) -> None:
        """Put a decode step into a static plan. Raises ValueError when it does not fit."""
        refill(static, plan)

    def paged_attention(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        plan: AttentionPlan,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        lse: torch.Tensor | None = None,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """See `ops.paged_attention`, and paged_decode for the keywords. Raises ValueError when e4m3 lacks scales."""
        if kv_scales is None and form_of(kv_cache) == "e4m3":
            raise ValueError("kv_cache holds float8_e4m3fn codes; give kv_scales [blocks, layers, 2, kv_heads]")
        native = plan.native
        if native is None:
            native = plan.native = self.prepare(plan, q.device)
        if len(out) > plan.num_tokens:
            out[plan.num_tokens :].zero_()
            if lse is not None:
                lse[plan.num_tokens :] = float("-inf")
        for kernel, work in ((paged_decode, native.decode), (paged_prefill, native.prefill)):
            if work is not None:
                kernel(
                    out,
                    q,
                    kv_cache,
                    layer,
                    native.block_tables,
                    work,
                    scale,
                    window=window,
                    softcap=softcap,
                    lse=lse,
                    kv_scales=kv_scales,
                )

    def walk_pieces(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        layers: Sequence[int],
        table: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        window: int,
        softcap: float,
        state: torch.Tensor,
        *,
        goes_on: bool,
    ) -> None:
        """See `segments.walk`; table: see paged_walk."""
        native = plan.native
        if native is None:
            native = plan.native = self.prepare(plan, q.device)
        first, end = plan.pieces
        context = int(plan.context_lens[0])
        paged_walk(
            out,
            q,
            tensors,
            layers,
            table,
            native.prefill,
            (first * PIECE_TOKENS, min(end * PIECE_TOKENS, context)),
            scale,
            state,
            window=window,
            softcap=softcap,
            fresh=first == 0 and not goes_on,
            final=end * PIECE_TOKENS >= context,
        )
