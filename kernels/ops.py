"""The operations a model calls, dispatched to the C back end or to the plain-PyTorch twins.

Owns: argument checks and the choice of back end. Does not own memory: callers allocate caches, tables and `out`.
Common to all: activations and KV are bfloat16, float16 or float32 on one device, all of one call with the same dtype;
arithmetic is float32. A call that raises ValueError has written nothing.

Invariant (back end "c"): the bits of a row's result depend on that row (and the KV it attends to) alone, never on the
number of rows, batch mates, chunk sizes or threads.
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from types import ModuleType

import numpy.typing as npt
import torch

from tournant.kernels import reference
from tournant.kernels.cpu.build import KernelBuildError, load
from tournant.kernels.cpu.native import NativeKernels
from tournant.kernels.layout import KV_FORMS, KVLayout
from tournant.kernels.plan import AttentionPlan, make_plan

__all__ = [
    "MAX_HEADS_PER_KV_HEAD",
    "AttentionPlan",
    "backend",
    "copy_blocks",
    "gelu_mul",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rope_store_kv",
    "select_backend",
    "silu_mul",
    "store_kv",
]

MAX_HEADS_PER_KV_HEAD = 96  # TILE_ROWS of kernels/cpu/attention.h


_Kernels = NativeKernels | ModuleType  # the C back end, or `reference`: the same functions

_lock = threading.Lock()
_chosen: _Kernels | None = None


def _choose() -> _Kernels:
    global _chosen
    with _lock:
        if _chosen is None:
            _chosen = _compiled(None)
        return _chosen


def _compiled(cache_folder: Path | None) -> _Kernels:
    try:
        return NativeKernels(load(cache_folder))
    except KernelBuildError as error:
        warnings.warn(
            f"the fast CPU kernels are off, plain PyTorch serves instead (many times slower): {error}", stacklevel=4
        )
        return reference


def select_backend(name: str, cache_folder: Path | None = None) -> str:
    """Choose the CPU back end of this process: "c" (compiled, else "torch" with a warning) or "torch"; tells which.

    Without a call the first operation chooses "c" with the default cache folder.
    """
    global _chosen
    if name not in ("c", "torch"):
        raise ValueError(f'back end is {name!r}; it must be "c" or "torch"')
    with _lock:
        _chosen = reference if name == "torch" else _compiled(cache_folder)
    return backend()


def backend() -> str:
    """ "c" when the compiled kernels serve the CPU, else "torch". The first call may compile for a few seconds."""
    return "c" if isinstance(_chosen or _choose(), NativeKernels) else "torch"


def _kernels(x: torch.Tensor) -> _Kernels:
    if not x.is_cpu:
        return reference
    return _chosen or _choose()


def _refuse(name: str, x: torch.Tensor, wanted: str) -> ValueError:
    return ValueError(f"{name} is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; it must be {wanted}")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x[N, H] normalised in float32, rounded to the dtype, then times weight[H]; returns a new [N, H].

    A float32 weight for another activation dtype is multiplied before the rounding (Gemma's order). With `residual`
    [N, H]: residual += x in the activation dtype, in place, then the norm of that sum. Rows of x may be strided; weight
    and residual are dense.
    """
    dtype, shape = x.dtype, x.shape
    if len(shape) != 2 or x.stride(1) != 1 or dtype not in KV_FORMS:
        raise _refuse("x", x, "bfloat16, float16 or float32 [N, H] with dense rows")
    if weight.shape != shape[1:] or weight.dtype not in (dtype, torch.float32) or not weight.is_contiguous():
        raise _refuse("weight", weight, f"dense {dtype} [{shape[1]}]")
    if residual is not None and (residual.shape != shape or residual.dtype != dtype or not residual.is_contiguous()):
        raise _refuse("residual", residual, f"dense {dtype} {tuple(shape)}")
    result: torch.Tensor = _kernels(x).rms_norm(x, weight, eps, residual)
    return result


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up[N, 2I] = gate | up; returns a new [N, I], rounded once."""
    _check_gated(gate_up)
    result: torch.Tensor = _kernels(gate_up).silu_mul(gate_up)
    return result


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, gelu in its tanh form, for gate_up[N, 2I] = gate | up; returns a new [N, I], rounded once."""
    _check_gated(gate_up)
    result: torch.Tensor = _kernels(gate_up).gelu_mul(gate_up)
    return result


def _check_gated(gate_up: torch.Tensor) -> None:
    shape = gate_up.shape
    if len(shape) != 2 or shape[1] % 2 or gate_up.stride(1) != 1 or gate_up.dtype not in KV_FORMS:
        raise _refuse("gate_up", gate_up, "bfloat16, float16 or float32 [N, 2I] with dense rows")


def _check_cache(kv_cache: torch.Tensor, layer: int) -> None:
    shape = kv_cache.shape
    if len(shape) != 6 or shape[2] != 2 or kv_cache.dtype not in KV_FORMS or not kv_cache.is_contiguous():
        raise _refuse("kv_cache", kv_cache, "a dense tensor of KVLayout.allocate")
    if not 0 <= layer < shape[1]:
        raise ValueError(f"layer is {layer}; the KV cache holds layers 0 to {shape[1] - 1}")


def _check_heads(name: str, x: torch.Tensor, rows: int, heads: int, kv_cache: torch.Tensor) -> None:
    shape, strides, size = x.shape, x.stride(), kv_cache.shape[5]
    if (
        shape != (rows, heads, size)
        or x.dtype != kv_cache.dtype
        or strides[2] != 1
        or (strides[1] != size and heads != 1)
    ):
        raise _refuse(name, x, f"{kv_cache.dtype} [{rows}, {heads}, {size}] with dense heads")


def _check_store(
    k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor
) -> None:
    _check_cache(kv_cache, layer)
    rows, kv_heads = len(k), kv_cache.shape[3]
    _check_heads("k", k, rows, kv_heads, kv_cache)
    _check_heads("v", v, rows, kv_heads, kv_cache)
    if slot_mapping.shape != (rows,) or slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        raise _refuse("slot_mapping", slot_mapping, f"dense int64 [{rows}]")


def store_kv(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor) -> None:
    """Write k and v [N, kv_heads, hs] to token slots int64 [N] of one layer of the KV tensor; slot -1 is skipped."""
    _check_store(k, v, kv_cache, layer, slot_mapping)
    _kernels(k).store_kv(k, v, kv_cache, layer, slot_mapping)


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

    Example: head size 16, rotary_dim 2, cos_sin[p] = (0, 1), that is a quarter turn: a head (1, 2, 3, ...) becomes
    (-2, 1, 3, ...).
    """
    _check_store(k, v, kv_cache, layer, slot_mapping)
    rows = len(k)
    _check_heads("q", q, rows, q.shape[1], kv_cache)
    size, rotary = kv_cache.shape[5], cos_sin.shape[-1]
    if (
        cos_sin.ndim != 2
        or cos_sin.dtype != torch.float32
        or not cos_sin.is_contiguous()
        or rotary > size
        or rotary % 2
    ):
        raise _refuse("cos_sin", cos_sin, f"dense float32 [max_pos, rotary_dim], rotary_dim even and at most {size}")
    if positions.shape != (rows,) or positions.dtype not in (torch.int64, torch.int32) or not positions.is_contiguous():
        raise _refuse("positions", positions, f"dense int64 or int32 [{rows}]")
    _kernels(q).rope_store_kv(q, k, v, cos_sin, positions, kv_cache, layer, slot_mapping)


def copy_blocks(kv_cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy whole blocks src[i] to dst[i] (dense int64 [M]) over all layers.

    No block may be written twice, or be both a source and a destination. Raises ValueError.
    """
    _check_cache(kv_cache, 0)
    for name, ids in (("src", src), ("dst", dst)):
        if ids.ndim != 1 or ids.dtype != torch.int64 or not ids.is_contiguous() or len(ids) != len(src):
            raise _refuse(name, ids, f"dense int64 [{len(src)}]")
    if not len(src):
        return
    sources, targets = src.tolist(), dst.tolist()
    low, high = min(*sources, *targets), max(*sources, *targets)
    if low < 0 or high >= len(kv_cache):
        raise ValueError(f"block ids reach from {low} to {high}; the KV cache holds blocks 0 to {len(kv_cache) - 1}")
    written = set(targets)
    if len(written) != len(targets) or not written.isdisjoint(sources):
        raise ValueError("a block is written twice, or is both source and destination; copy in several calls")
    _kernels(kv_cache).copy_blocks(kv_cache, src, dst)


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
    (int32 [S]) positions; num_heads: query heads of this shard, at most 96 per KV head. Raises ValueError.
    """
    if num_heads > MAX_HEADS_PER_KV_HEAD * layout.num_kv_heads:
        raise ValueError(
            f"{num_heads} heads over {layout.num_kv_heads} KV heads: more than {MAX_HEADS_PER_KV_HEAD} each"
        )
    return make_plan(block_tables, query_start, context_lens, layout, num_heads)


def paged_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    plan: AttentionPlan,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    lse: torch.Tensor | None = None,
) -> None:
    """Causal attention of every query row over its sequence's KV, read in place through the block table.

    out, q [N, heads, hs] with N >= plan.num_tokens, rows may be strided; rows beyond plan.num_tokens are padding and
    get zeros in out. The KV of the query rows themselves must have been stored. Query head h reads KV head
    h // (heads // kv_heads). Each row walks its KV in pieces of 256 tokens, folded in order.

    window: keys a row sees, its own included, 0 = all before it; softcap: scores become
    softcap * tanh(score / softcap), 0 = as they are; lse: float32 [N, heads], gets the natural
    log of the sum of the exponentials of a row's scores.
    """
    _check_cache(kv_cache, layer)
    layout, shape = plan.layout, kv_cache.shape
    if shape[3] != layout.num_kv_heads or shape[4] != layout.block_tokens or shape[5] != layout.head_size:
        raise _refuse("kv_cache", kv_cache, f"of the plan's layout {layout}")
    if shape[0] < plan.num_blocks_needed:
        raise ValueError(
            f"a block table names block {plan.num_blocks_needed - 1}; the KV cache holds {shape[0]} blocks"
        )
    rows = len(q)
    _check_heads("q", q, rows, plan.num_heads, kv_cache)
    _check_heads("out", out, rows, plan.num_heads, kv_cache)
    if rows < plan.num_tokens:
        raise ValueError(f"q has {rows} rows; the plan has {plan.num_tokens} tokens")
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be positive")
    if window < 0 or not 0 <= softcap < float("inf"):
        raise ValueError(f"window is {window} and softcap {softcap}; neither may be negative or infinite")
    if lse is not None and not (lse.dtype == torch.float32 and lse.shape == q.shape[:2] and lse.is_contiguous()):
        raise _refuse("lse", lse, f"dense float32 {tuple(q.shape[:2])}")
    _kernels(q).paged_attention(out, q, kv_cache, layer, plan, scale, window, softcap, lse)
