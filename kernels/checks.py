"""Checks of what operations are given, common to all back ends. All raise ValueError that names what is wanted.

Owns the words of these refusals; the operations are in ops.py.
"""

from __future__ import annotations

import torch

from tournant.kernels.layout import KV_FORMS, KVLayout
from tournant.kernels.plan import AttentionPlan

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refuse(name: str, x: torch.Tensor, wanted: str) -> ValueError:
    """The error for a tensor that is not what it must be."""
    return ValueError(f"{name} is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; it must be {wanted}")


def check_gated(gate_up: torch.Tensor) -> None:
    """gate_up [N, 2I] with dense rows."""
    shape = gate_up.shape
    if len(shape) != 2 or shape[1] % 2 or gate_up.stride(1) != 1 or gate_up.dtype not in DTYPES:
        raise refuse("gate_up", gate_up, "bfloat16, float16 or float32 [N, 2I] with dense rows")


def check_cache(kv_cache: torch.Tensor, layer: int, kv_scales: torch.Tensor | None) -> None:
    """A KV tensor that holds `layer`, with scales where its form has them."""
    shape = kv_cache.shape
    if len(shape) != 6 or shape[2] != 2 or kv_cache.dtype not in KV_FORMS or not kv_cache.is_contiguous():
        raise refuse("kv_cache", kv_cache, "a dense tensor of KVLayout.allocate")
    if not 0 <= layer < shape[1]:
        raise ValueError(f"layer is {layer}; the KV cache holds layers 0 to {shape[1] - 1}")
    if (kv_scales is not None) != (kv_cache.dtype == torch.float8_e4m3fn):
        raise ValueError(f"kv_cache is {kv_cache.dtype}; float8_e4m3fn, and nothing else, needs kv_scales")
    if kv_scales is not None and not (
        kv_scales.shape == shape[:4] and kv_scales.dtype == torch.float32 and kv_scales.is_contiguous()
    ):
        raise refuse("kv_scales", kv_scales, f"dense float32 {tuple(shape[:4])}")


def check_plan(kv_cache: torch.Tensor, plan: AttentionPlan) -> None:
    """A checked KV tensor of a plan's layout that holds, with the blocks below, all blocks that the plan reads."""
    layout, shape, below = plan.layout, kv_cache.shape, plan.below
    if shape[3:] != (layout.num_kv_heads, layout.block_tokens, layout.head_size):
        raise refuse("kv_cache", kv_cache, f"of the plan's layout {layout}")
    if below is None:
        if shape[0] < plan.num_blocks_needed:
            raise ValueError(
                f"a block table names block {plan.num_blocks_needed - 1}; the KV cache holds {shape[0]} blocks"
            )
        return
    tensor = below.tensor
    of_layers = tensor.shape[1:] == shape[1:] and (not len(tensor) or tensor[0, 0].is_contiguous())
    if not of_layers or tensor.dtype != kv_cache.dtype or tensor.dtype == torch.float8_e4m3fn or not tensor.is_cpu:
        raise refuse("KV below", tensor, f"{kv_cache.dtype} without scales on the CPU, as kv_cache but for the blocks")
    if not kv_cache.is_cpu:
        raise ValueError(f"kv_cache is on {kv_cache.device}; blocks below are read in place by the CPU alone")
    if not 0 <= below.first <= shape[0] or plan.num_blocks_needed > below.first + len(tensor):
        raise ValueError(
            f"a block table names block {plan.num_blocks_needed - 1}; the KV cache holds {shape[0]} blocks, and "
            f"{len(tensor)} from {below.first} on are below"
        )


def check_heads(name: str, x: torch.Tensor, rows: int, heads: int, kv_cache: torch.Tensor, dtype: torch.dtype) -> None:
    """Rows of heads. dtype: of the call's activations; that of the KV cache unless it is fp8."""
    shape, strides, size = x.shape, x.stride(), kv_cache.shape[5]
    if kv_cache.itemsize > 1:
        dtype = kv_cache.dtype
    if (
        shape != (rows, heads, size)
        or x.dtype != dtype
        or dtype not in DTYPES
        or strides[2] != 1
        or (strides[1] != size and heads != 1)
    ):
        raise refuse(name, x, f"{dtype} [{rows}, {heads}, {size}] with dense heads")


def check_store(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    """Arguments of `ops.store_kv`."""
    check_cache(kv_cache, layer, kv_scales)
    rows, kv_heads = len(k), kv_cache.shape[3]
    check_heads("k", k, rows, kv_heads, kv_cache, k.dtype)
    check_heads("v", v, rows, kv_heads, kv_cache, k.dtype)
    if slot_mapping.shape != (rows,) or slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        raise refuse("slot_mapping", slot_mapping, f"dense int64 [{rows}]")


def check_pool(pool: torch.Tensor) -> None:
    """A pool whose blocks can be moved."""
    if pool.stride(0) * pool.itemsize % 8 or not pool.is_contiguous():
        raise refuse("pool", pool, "dense, its blocks a multiple of 8 bytes")


def check_images(pool: torch.Tensor, ids: torch.Tensor, images: torch.Tensor, dtype: torch.dtype) -> None:
    """Arguments of `ops.encode_blocks`."""
    if pool.ndim != 6 or pool.dtype not in DTYPES or not pool.is_contiguous():
        raise refuse("pool", pool, "a dense bfloat16, float16 or float32 tensor of KVLayout.allocate")
    if ids.ndim != 1 or ids.dtype != torch.int64 or not ids.is_contiguous() or ids.device != pool.device:
        raise refuse("ids", ids, f"dense int64 [M] on {pool.device}")
    if pool.is_cpu and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(pool):
        raise ValueError(f"block ids reach from {int(ids.min())} to {int(ids.max())}; the pool has {len(pool)} blocks")
    _, num_layers, _, kv_heads, tokens, size = pool.shape
    image = KVLayout(num_layers, kv_heads, tokens, size, dtype).block_bytes
    if (images.shape, images.dtype, images.device) != ((len(ids), image), torch.uint8, pool.device) or (
        images.stride(1) != 1
    ):
        raise refuse("images", images, f"uint8 {(len(ids), image)} on {pool.device} with dense rows")


def check_staging(pool: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Arguments of `ops.gather_blocks`."""
    check_pool(pool)
    if ids.ndim != 1 or ids.dtype != torch.int64 or not ids.is_contiguous() or ids.device != pool.device:
        raise refuse("ids", ids, f"dense int64 [M] on {pool.device}")
    if (staging.dtype, staging.shape[1:], staging.device) != (pool.dtype, pool.shape[1:], pool.device) or not (
        staging.is_contiguous() and len(staging) >= len(ids)
    ):
        raise refuse("staging", staging, f"dense {pool.dtype} {(len(ids), *pool.shape[1:])} on {pool.device}")
