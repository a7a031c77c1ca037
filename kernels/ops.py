"""The operations a model calls, dispatched by device: Triton for CUDA tensors; C, or plain PyTorch, for the CPU's.

Owns: argument checks and the choice of back end. Does not own memory: callers allocate caches, tables and `out`.
Common to all: activations are bfloat16, float16 or float32 on one device, all of one call with the same dtype; KV has
that dtype too, or is fp8: float8_e5m2, or float8_e4m3fn with `kv_scales` of KVLayout.allocate_scales, which storing
keeps and attention reads (see kernels/layout.py). Arithmetic is float32. A call that raises ValueError has written
nothing. On CUDA nothing waits for the device, so slots and positions out of range are not refused there: their rows are
left alone.

Invariant (back end "c"): the bits of a row's result depend on that row (and the KV it attends to) alone, never on the
number of rows, batch mates, chunk sizes or threads. Stored e4m3 codes are the exception: they depend on which tokens of
their block were stored together.
"""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tournant.kernels import quantized, reference
from tournant.kernels.checks import (
    DTYPES,
    check_cache,
    check_gated,
    check_heads,
    check_images,
    check_plan,
    check_pool,
    check_staging,
    check_store,
    refuse,
)
from tournant.kernels.cpu.build import KernelBuildError, load
from tournant.kernels.cpu.native import NativeKernels
from tournant.kernels.layers import FusedLayers
from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import AttentionPlan, BlocksBelow, make_plan
from tournant.kernels.quantized import QuantizedMatrix

__all__ = [
    "MAX_HEADS_PER_KV_HEAD",
    "AttentionPlan",
    "MissingBackendError",
    "backend",
    "copy_blocks",
    "decode_blocks",
    "decoder_layers",
    "encode_blocks",
    "gather_blocks",
    "gelu_mul",
    "paged_attention",
    "plan_attention",
    "quantized_linear",
    "refill_plan",
    "rms_norm",
    "rope_store_kv",
    "scatter_blocks",
    "select_backend",
    "silu_mul",
    "static_decode_plan",
    "store_kv",
]

MAX_HEADS_PER_KV_HEAD = 96  # TILE_ROWS of kernels/cpu/attention.h


TRITON_MODULE = "tournant.kernels.triton.backend"

_Kernels = Any  # NativeKernels, TritonKernels or the module `reference`: the same functions

_lock = threading.Lock()
_chosen: _Kernels | None = None  # serves CPU tensors
_CPU = torch.device("cpu")


class MissingBackendError(RuntimeError):
    """What a device needs to compute is not installed."""


def _triton_module() -> Any:
    try:
        return importlib.import_module(TRITON_MODULE)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("triton"):
            raise
        raise MissingBackendError("computing on a GPU needs Triton; install tournant[cuda]") from error


@functools.cache
def _on_cuda(device: torch.device) -> _Kernels:
    module = _triton_module()
    return module.TritonKernels(module.Card.of(device))


def _interpreted() -> _Kernels:
    module = _triton_module()
    if not module.interpreted():
        raise MissingBackendError(
            "Triton's interpreter is off; only tests run CPU tensors through it, choose c or torch"
        )
    return module.TritonKernels(module.Card.of(_CPU))


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
    """Choose what serves CPU tensors in this process: "c" (compiled, else "torch" with a warning), "torch", or, for
    tests, "triton" under Triton's interpreter; tells which.

    Without a call the first operation chooses "c" with the default cache folder. Raises MissingBackendError for
    "triton" when the interpreter is off.
    """
    global _chosen
    if name not in ("c", "torch", "triton"):
        raise ValueError(f'back end is {name!r}; it must be "c", "torch" or "triton"')
    with _lock:
        if name == "triton":
            _chosen = _interpreted()
        else:
            _chosen = reference if name == "torch" else _compiled(cache_folder)
    return backend()


def backend(device: torch.device = _CPU) -> str:
    """What serves tensors of a device: "c", "torch" or "triton". The first call may compile for a few seconds.

    Raises MissingBackendError for a CUDA device without Triton.
    """
    kernels = _kernels_of(device)
    if kernels is reference:
        return "torch"
    return "c" if isinstance(kernels, NativeKernels) else "triton"


def _kernels_of(device: torch.device) -> _Kernels:
    return _on_cuda(device) if device.type == "cuda" else _chosen or _choose()


def kernels_for(x: torch.Tensor) -> _Kernels:
    return (_chosen or _choose()) if x.is_cpu else _on_cuda(x.device)


def cpu_kernels() -> _Kernels:
    """What serves memory of the CPU beside a GPU: never Triton's interpreter."""
    found = _chosen or _choose()
    return found if found is reference or isinstance(found, NativeKernels) else _beside_triton()


@functools.cache
def _beside_triton() -> _Kernels:
    return _compiled(None)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x[N, H] normalised in float32, rounded to the dtype, then times weight[H]; returns a new [N, H].

    A float32 weight for another activation dtype is multiplied before the rounding (Gemma's order). With `residual`
    [N, H]: residual += x in the activation dtype, in place, then the norm of that sum. Rows of x may be strided; weight
    and residual are dense.
    """
    dtype, shape = x.dtype, x.shape
    if len(shape) != 2 or x.stride(1) != 1 or dtype not in DTYPES:
        raise refuse("x", x, "bfloat16, float16 or float32 [N, H] with dense rows")
    if weight.shape != shape[1:] or weight.dtype not in (dtype, torch.float32) or not weight.is_contiguous():
        raise refuse("weight", weight, f"dense {dtype} [{shape[1]}]")
    if residual is not None and (residual.shape != shape or residual.dtype != dtype or not residual.is_contiguous()):
        raise refuse("residual", residual, f"dense {dtype} {tuple(shape)}")
    result: torch.Tensor = kernels_for(x).rms_norm(x, weight, eps, residual)
    return result


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up[N, 2I] = gate | up; returns a new [N, I], rounded once."""
    check_gated(gate_up)
    result: torch.Tensor = kernels_for(gate_up).silu_mul(gate_up)
    return result


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, gelu in its tanh form, for gate_up[N, 2I] = gate | up; returns a new [N, I], rounded once."""
    check_gated(gate_up)
    result: torch.Tensor = kernels_for(gate_up).gelu_mul(gate_up)
    return result


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    *,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Write k and v [N, kv_heads, hs] to token slots int64 [N] of one layer of the KV tensor; slot -1 is skipped.

    fp8 saturates. e4m3: a scale is the least power of two at which its values so far fit; it begins anew with the
    block's first token, and when it grows, tokens that are there are coded again. Rows of one block must lie within
    block_tokens rows of each other, as rows of one sequence do.
    """
    check_store(k, v, kv_cache, layer, slot_mapping, kv_scales)
    kernels_for(k).store_kv(k, v, kv_cache, layer, slot_mapping, kv_scales=kv_scales)


def rope_store_kv(
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
    """Rotate q in place and write rotated k and v to their token slots.

    q [N, heads, hs], k and v [N, kv_heads, hs]: the last two axes dense, rows may be strided (slices of one fused qkv
    output); cos_sin float32 [max_pos, rotary_dim] = cos half | sin half, rotary_dim <= hs, pairs (i, i + rotary_dim/2)
    are rotated, the rest of a head is copied; positions int64 or int32 [N]; slot_mapping int64 [N], -1 marks a padding
    row, which is left alone. k itself is not changed. fp8: see `store_kv`.

    Example: head size 16, rotary_dim 2, cos_sin[p] = (0, 1), that is a quarter turn: a head (1, 2, 3, ...) becomes
    (-2, 1, 3, ...).
    """
    check_store(k, v, kv_cache, layer, slot_mapping, kv_scales)
    rows = len(k)
    check_heads("q", q, rows, q.shape[1], kv_cache, k.dtype)
    size, rotary = kv_cache.shape[5], cos_sin.shape[-1]
    if (
        cos_sin.ndim != 2
        or cos_sin.dtype != torch.float32
        or not cos_sin.is_contiguous()
        or rotary > size
        or rotary % 2
    ):
        raise refuse("cos_sin", cos_sin, f"dense float32 [max_pos, rotary_dim], rotary_dim even and at most {size}")
    if positions.shape != (rows,) or positions.dtype not in (torch.int64, torch.int32) or not positions.is_contiguous():
        raise refuse("positions", positions, f"dense int64 or int32 [{rows}]")
    kernels_for(q).rope_store_kv(q, k, v, cos_sin, positions, kv_cache, layer, slot_mapping, kv_scales=kv_scales)


def copy_blocks(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy whole blocks src[i] to dst[i] (dense int64 [M]) of a pool as `gather_blocks` knows it.

    No block may be written twice, or be both a source and a destination. Raises ValueError.
    """
    check_pool(pool)
    for name, ids in (("src", src), ("dst", dst)):
        if ids.ndim != 1 or ids.dtype != torch.int64 or not ids.is_contiguous() or len(ids) != len(src):
            raise refuse(name, ids, f"dense int64 [{len(src)}]")
    if not len(src):
        return
    sources, targets = src.tolist(), dst.tolist()
    low, high = min(*sources, *targets), max(*sources, *targets)
    if low < 0 or high >= len(pool):
        raise ValueError(f"block ids reach from {low} to {high}; the KV cache holds blocks 0 to {len(pool) - 1}")
    written = set(targets)
    if len(written) != len(targets) or not written.isdisjoint(sources):
        raise ValueError("a block is written twice, or is both source and destination; copy in several calls")
    kernels_for(pool).copy_blocks(pool, src, dst)


def gather_blocks(pool: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> None:
    """staging[i] = pool[ids[i]] for dense int64 ids [M] on the pool's device; a negative id skips its place.

    pool: any dense tensor whose first axis is the block and whose blocks are a multiple of 8 bytes, as the KV tensor
    and its scales; staging: dense, of the same dtype and block shape, at least M blocks. Raises ValueError.
    """
    check_staging(pool, ids, staging)
    _block_mover(pool).gather_blocks(pool, ids, staging)


def scatter_blocks(staging: torch.Tensor, ids: torch.Tensor, pool: torch.Tensor) -> None:
    """pool[ids[i]] = staging[i], as `gather_blocks` the other way round; no id may occur twice. Raises ValueError."""
    check_staging(pool, ids, staging)
    _block_mover(pool).scatter_blocks(staging, ids, pool)


def _block_mover(pool: torch.Tensor) -> _Kernels:
    kernels = kernels_for(pool)
    return reference if isinstance(kernels, NativeKernels) else kernels  # torch copies a block as fast as memcpy


def encode_blocks(pool: torch.Tensor, ids: torch.Tensor, images: torch.Tensor, dtype: torch.dtype) -> None:
    """images[i] = pool[ids[i]] as fp8: the byte image of such a block in the same layout with `dtype`, float8_e4m3fn or
    float8_e5m2, with the scales that storing all its tokens at once would give.

    pool: a KV tensor that is not fp8; ids: dense int64 [M] on its device; images: uint8 [M, image bytes] there, rows
    dense. On the CPU one thread works, without the interpreter's lock, and several may at once. Raises ValueError.
    """
    check_images(pool, ids, images, dtype)
    _block_coder(pool).encode_blocks(pool, ids, images, dtype)


def decode_blocks(images: torch.Tensor, dtype: torch.dtype, ids: torch.Tensor, pool: torch.Tensor) -> None:
    """pool[ids[i]] = images[i], as `encode_blocks` the other way round; no id may occur twice. Raises ValueError."""
    check_images(pool, ids, images, dtype)
    _block_coder(pool).decode_blocks(images, dtype, ids, pool)


def _block_coder(pool: torch.Tensor) -> _Kernels:
    kernels = kernels_for(pool)
    return kernels if isinstance(kernels, NativeKernels) else reference  # torch's operations do on a GPU


def plan_attention(
    block_tables: torch.Tensor | npt.ArrayLike,
    query_start: torch.Tensor | npt.ArrayLike,
    context_lens: torch.Tensor | npt.ArrayLike,
    layout: KVLayout,
    num_heads: int,
    *,
    deterministic: bool = False,
    below: BlocksBelow | None = None,
) -> AttentionPlan:
    """Check one step and describe it to `paged_attention` of all its layers; the first of them prepares it (uploads
    it, cuts it into work) for the others.

    block_tables int32 [S, max_blocks], physical block ids, entries beyond a context are not read; query_start int32
    [S+1], rows query_start[s] to query_start[s+1] of q belong to sequence s and are the last of its context_lens[s]
    (int32 [S]) positions; num_heads: query heads of this shard, at most 96 per KV head; deterministic: the bits of a
    row's attention must not depend on its step; below: on a CPU, where blocks lie that the KV cache does not have.
    Raises ValueError.
    """
    if num_heads > MAX_HEADS_PER_KV_HEAD * layout.num_kv_heads:
        raise ValueError(
            f"{num_heads} heads over {layout.num_kv_heads} KV heads: more than {MAX_HEADS_PER_KV_HEAD} each"
        )
    return make_plan(
        block_tables, query_start, context_lens, layout, num_heads, deterministic=deterministic, below=below
    )


def static_decode_plan(
    layout: KVLayout, num_heads: int, num_seqs: int, max_blocks: int, device: torch.device
) -> AttentionPlan:
    """A plan of `num_seqs` rows, each the only one of a sequence of up to max_blocks blocks, whose arrays on the device
    stay where they are: capture calls with it in a CUDA graph, then `refill_plan` and replay. As made, every row is
    padding. Triton only: raises ValueError where another back end serves `device`.
    """
    kernels = _kernels_of(device)
    if backend(device) != "triton":
        raise ValueError(f"a static plan needs the Triton back end; {backend(device)} serves {device}")
    rows = np.arange(num_seqs + 1)
    plan = make_plan(np.zeros((num_seqs, 1)), rows, np.ones(num_seqs), layout, num_heads)
    plan.native = kernels.static_plan(layout, num_heads, num_seqs, max_blocks, device)
    return plan


def refill_plan(static: AttentionPlan, plan: AttentionPlan) -> None:
    """Put a step of at most as many sequences, with one query row each, into a static plan, on the current stream; rows
    beyond the step's are padding and get zeros. Raises ValueError when it does not fit; then nothing has changed.
    """
    _kernels_of(static.native.block_tables.device).refill(static.native, plan)


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
    *,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Causal attention of every query row over its sequence's KV, read in place through the block table.

    out, q [N, heads, hs] with N >= plan.num_tokens, rows may be strided; rows beyond plan.num_tokens are padding and
    get zeros in out. The KV of the query rows themselves must have been stored. Query head h reads KV head
    h // (heads // kv_heads). Each row walks its KV in pieces of 256 tokens, folded in order.

    window: keys a row sees, its own included, 0 = all before it; softcap: scores become
    softcap * tanh(score / softcap), 0 = as they are; lse: float32 [N, heads], gets the natural
    log of the sum of the exponentials of a row's scores.
    """
    check_cache(kv_cache, layer, kv_scales)
    check_plan(kv_cache, plan)
    rows = len(q)
    check_heads("q", q, rows, plan.num_heads, kv_cache, q.dtype)
    check_heads("out", out, rows, plan.num_heads, kv_cache, q.dtype)
    if rows < plan.num_tokens:
        raise ValueError(f"q has {rows} rows; the plan has {plan.num_tokens} tokens")
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be positive")
    if window < 0 or not 0 <= softcap < float("inf"):
        raise ValueError(f"window is {window} and softcap {softcap}; neither may be negative or infinite")
    if lse is not None and not (lse.dtype == torch.float32 and lse.shape == q.shape[:2] and lse.is_contiguous()):
        raise refuse("lse", lse, f"dense float32 {tuple(q.shape[:2])}")
    kernels = kernels_for(q)
    if plan.below is not None and kernels is not reference and not isinstance(kernels, NativeKernels):
        raise ValueError("the plan has blocks below, which Triton's kernels do not read; walk them (segments.walk)")
    kernels.paged_attention(out, q, kv_cache, layer, plan, scale, window, softcap, lse, kv_scales=kv_scales)


def quantized_linear(out: torch.Tensor, x: torch.Tensor, matrix: QuantizedMatrix) -> None:
    """out[N, O] = x[N, I] times the transpose of the matrix, plus its bias, on the CPU.

    Rows of x are quantised to int8, each group of 32 elements with a float32 scale, to the nearest, ties to even; dots
    of groups are whole numbers, everything else float32, rounded once to out's dtype, which is x's or float32. Rows of
    both may be strided. A row with NaN or infinity gives no finite output. Bits are the same for every back end.
    """
    if x.ndim != 2 or x.shape[1] != matrix.columns or x.stride(1) != 1 or x.dtype not in DTYPES or not x.is_cpu:
        raise refuse("x", x, f"bfloat16, float16 or float32 [N, {matrix.columns}] with dense rows on the CPU")
    if out.shape != (len(x), matrix.outputs) or out.stride(1) != 1 or out.dtype not in (x.dtype, torch.float32):
        raise refuse("out", out, f"{x.dtype} or float32 {(len(x), matrix.outputs)} with dense rows")
    kernels = kernels_for(x)
    chosen = kernels if isinstance(kernels, NativeKernels) else quantized
    chosen.quantized_linear(out, x, matrix)


def decoder_layers(
    layers: FusedLayers,
    hidden: torch.Tensor,
    residual: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: AttentionPlan,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Carry out all layers in one call of the C back end, layer i in layer i of the KV cache; bits as by single calls.

    hidden, residual: dense [N, hidden] of layers.dtype, both changed in place: hidden is normed for layer 0 before and
    for what follows the layers after; positions, slot_mapping: as `rope_store_kv` has them. Raises ValueError, also
    where another back end serves.
    """
    kernels = kernels_for(hidden)
    if not isinstance(kernels, NativeKernels):
        raise ValueError(f"fused layers need the C back end; {backend(hidden.device)} serves {hidden.device}")
    check_cache(kv_cache, len(layers.parts) - 1, kv_scales)
    layout, rows = plan.layout, len(hidden)
    for name, x in (("hidden", hidden), ("residual", residual)):
        if x.shape != (rows, layers.hidden_size) or x.dtype != layers.dtype or not x.is_contiguous():
            raise refuse(name, x, f"dense {layers.dtype} {(rows, layers.hidden_size)}")
    check_plan(kv_cache, plan)
    heads = (layers.num_heads, layers.num_kv_heads, layers.head_size)
    if heads != (plan.num_heads, layout.num_kv_heads, layout.head_size):
        raise refuse("kv_cache", kv_cache, f"of the plan's layout {layout}, which must be that of the layers")
    if rows < plan.num_tokens or (kv_cache.itemsize > 1 and kv_cache.dtype != layers.dtype):
        raise refuse("kv_cache", kv_cache, f"{layers.dtype} or fp8, for {plan.num_tokens} tokens in {rows} rows")
    for name, x, dtypes in (
        ("positions", positions, (torch.int64, torch.int32)),
        ("slot_mapping", slot_mapping, (torch.int64,)),
    ):
        if x.shape != (rows,) or x.dtype not in dtypes or not x.is_contiguous():
            raise refuse(name, x, f"dense {dtypes[0]} [{rows}]")
    kernels.decoder_layers(layers, hidden, residual, kv_cache, plan, positions, slot_mapping, kv_scales=kv_scales)
