"""Launches either attention kernel: they take the same arguments."""

from __future__ import annotations

import math
from typing import Any

import torch

from tournant.kernels.triton.fp8 import as_bytes, form_of
from tournant.kernels.triton.merge_splits import merge_splits
from tournant.kernels.triton.plan import Work

LOG2E = math.log2(math.e)


def launch_attention(
    kernel: Any,
    out: torch.Tensor,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    work: Work,
    scale: float,
    window: int,
    softcap: float,
    lse: torch.Tensor | None,
    kv_scales: torch.Tensor | None,
) -> None:
    """Serve the tiles of `work`: the kernel, then merge_splits where KV is split. Arguments: see paged_decode."""
    _, _, _, kv_heads, block_tokens, head_size = kv_cache.shape
    block_stride, layer_stride, value_stride = kv_cache.stride()[:3]
    shape, split = work.shape, work.num_splits > 1
    kernel[(len(work.tiles), kv_heads, work.num_splits)](
        work.partial if split else out,
        work.partial_lse if split else lse,
        q,
        as_bytes(kv_cache),
        kv_scales,
        block_tables,
        work.tiles,
        layer,
        out.stride(0),
        q.stride(0),
        block_stride,
        layer_stride,
        value_stride,
        0 if kv_scales is None else kv_scales.stride(0),
        block_tables.stride(0),
        scale / softcap if softcap else 1.0,
        (softcap or scale) * LOG2E,
        window=window,
        softcap=bool(softcap),
        form=form_of(kv_cache),
        split=split,
        group=q.shape[1] // kv_heads,
        head_size=head_size,
        block_tokens=block_tokens,
        block_m=shape.block_m,
        block_n=shape.block_n,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        enable_fp_fusion=True,  # Triton 3.10 turns it off unless asked
    )
    if work.partial is not None and work.partial_lse is not None:
        merge_splits(out, lse, work.partial, work.partial_lse, work.tiles)
