"""The operations a model calls, dispatched to the C back end or to the plain-PyTorch twins.

Owns: argument checks and the choice of back end. Does not own memory: callers allocate caches, tables and `out`.
Common to all: activations and KV are bfloat16, float16 or float32 on one device, all of one call with the same dtype;
arithmetic is float32. A call that raises ValueError or TypeError has written nothing.

Invariant (back end "c"): the bits of a row's result depend on that row (and the KV it attends to) alone, never on the
number of rows, batch mates, chunk sizes or threads.
"""

from __future__ import annotations

import numpy.typing as npt
import torch

from tournant.kernels import reference
from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import AttentionPlan, make_plan

__all__ = [
    "AttentionPlan",
    "backend",
    "copy_blocks",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rope_store_kv",
    "silu_mul",
    "store_kv",
]


def backend() -> str:
    """ "c" when the compiled kernels serve the CPU, else "torch"."""
    return "torch"


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x[N, H] normalised in float32, rounded to the dtype, then times weight[H]; returns a new [N, H].

    With `residual` [N, H]: residual += x in the activation dtype, in place, then the norm of that sum.
    """
    return reference.rms_norm(x, weight, eps, residual)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up[N, 2I] = gate | up; returns a new [N, I], rounded once."""
    return reference.silu_mul(gate_up)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor
) -> None:
    """Write k and v [N, kv_heads, hs] to token slots int64 [N] of one layer of the KV tensor; slot -1 is skipped."""
    reference.store_kv(k, v, kv_cache, layer, slot_mapping)


def rope_store_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate q in place and write rotated k and v to their token slots.

    q [N, heads, hs], k and v [N, kv_heads, hs]: the last two axes dense, rows may be strided (slices of one fused qkv
    output); cos_sin float32 [max_pos, rotary_dim] = cos half | sin half, rotary_dim <= hs, pairs (i, i + rotary_dim/2)
    are rotated, the rest of a head is copied; positions int64 or int32 [N]; slot_mapping int64 [N], -1 marks a padding
    row, which is left alone. k itself is not changed.
    """
    reference.rope_store_kv(q, k, v, cos_sin, positions, kv_cache, layer, slot_mapping)


def copy_blocks(kv_cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy whole blocks src[i] to dst[i] (int64 [M]); no block may be both a source and a destination."""
    reference.copy_blocks(kv_cache, src, dst)


def plan_attention(
    block_tables: torch.Tensor | npt.ArrayLike,
    query_start: torch.Tensor | npt.ArrayLike,
    context_lens: torch.Tensor | npt.ArrayLike,
    layout: KVLayout,
    num_heads: int,
) -> AttentionPlan:
    """Check one step and prepare it for `paged_attention` of all its layers.

    block_tables int32 [S, max_blocks], physical block ids, entries beyond a context are not read; query_start int32
    [S+1], rows query_start[s] to query_start[s+1] of q belong to sequence s and are the last of its context_lens[s]
    (int32 [S]) positions; num_heads: query heads of this shard. Raises ValueError.
    """
    return make_plan(block_tables, query_start, context_lens, layout, num_heads)


def paged_attention(
    out: torch.Tensor, q: torch.Tensor, kv_cache: torch.Tensor, layer: int, plan: AttentionPlan, scale: float
) -> None:
    """Causal attention of every query row over its sequence's KV, read in place through the block table.

    out, q [N, heads, hs] with N >= plan.num_tokens; rows beyond plan.num_tokens are padding and get zeros in out. The
    KV of the query rows themselves must have been stored. Query head h reads KV head h // (heads // kv_heads).
    """
    reference.paged_attention(out, q, kv_cache, layer, plan, scale)
