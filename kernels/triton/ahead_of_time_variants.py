"""The calls that ahead_of_time compiles: each kernel in the shapes that people use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tournant.kernels import segments
from tournant.kernels.flash_attention import Rule
from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import make_plan
from tournant.kernels.triton import flash_attention
from tournant.kernels.triton.backend import TritonKernels
from tournant.kernels.triton.card import Card

SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
HEADS, KV_HEADS, LAYERS, LAYER = 8, 2, 2, 1  # four heads per KV head, as in Llama 3 8B


@dataclass(frozen=True, slots=True)
class Variant:
    """A named call of the back end for a card; it is given CPU tensors and must not look at results."""

    label: str
    call: Callable[[Card], None]


def _attention(
    card: Card,
    queries: int,
    context: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_size: int,
    block_tokens: int,
    window: int,
    softcap: float,
) -> None:
    layout = KVLayout(LAYERS, KV_HEADS, block_tokens, head_size, kv_dtype)
    blocks = context // block_tokens
    kv_cache, scales = torch.empty(layout.shape(blocks), dtype=kv_dtype), layout.allocate_scales(blocks)
    plan = make_plan(np.arange(blocks)[None], [0, queries], [context], layout, HEADS)
    q = torch.empty(queries, HEADS, head_size, dtype=dtype)
    TritonKernels(card).paged_attention(
        torch.empty_like(q), q, kv_cache, LAYER, plan, 0.1, window=window, softcap=softcap, kv_scales=scales
    )


def attention(
    kind: str,
    dtype: torch.dtype,
    head_size: int,
    *,
    kv_dtype: torch.dtype | None = None,
    block_tokens: int = 64,
    window: int = 0,
    softcap: float = 0.0,
) -> Variant:
    """kind: "decode" (split, with its merge_splits), "prefill", or "chunk" (few queries, split)."""
    queries, context = {"decode": (1, 8192), "prefill": (4096, 4096), "chunk": (16, 8192)}[kind]
    label = f"{SHORT[dtype]} head {head_size}, blocks of {block_tokens}"
    label += f", KV {SHORT[kv_dtype]}" if kv_dtype else ""
    label += f", window {window}" if window else ""
    label += ", soft-cap" if softcap else ""
    label += ", few queries" if kind == "chunk" else ""
    shape = (dtype, kv_dtype or dtype, head_size, block_tokens, window, softcap)
    return Variant(label, lambda card: _attention(card, queries, context, *shape))


def _walk(card: Card, dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int, window: int) -> None:
    layout, context = KVLayout(LAYERS, KV_HEADS, 64, head_size, kv_dtype), 8192
    plan = segments.plan_pieces(1024, context, layout, HEADS, 4, 8)
    whole, ring = (torch.empty((4, layers, *layout.shape(1)[2:]), dtype=kv_dtype) for layers in (LAYERS, 1))
    table, q = torch.zeros(context // 64, dtype=torch.int32), torch.empty(1024, HEADS, head_size, dtype=dtype)
    state = segments.new_state(1024, HEADS, head_size, q.device)
    where = (q, q, (whole, ring), (LAYER, 0), table, plan)
    TritonKernels(card).walk_pieces(*where, 0.1, window, 0.0, state, goes_on=True)


def walk(dtype: torch.dtype, head_size: int, *, kv_dtype: torch.dtype | None = None, window: int = 0) -> Variant:
    """A chunk of 1024 tokens over a part of its sequence's KV."""
    label = f"{SHORT[dtype]} head {head_size}" + (f", KV {SHORT[kv_dtype]}" if kv_dtype else "")
    label += f", window {window}" if window else ""
    return Variant(label, lambda card: _walk(card, dtype, kv_dtype or dtype, head_size, window))


def _training(card: Card, dtype: torch.dtype, head_size: int, rule: Rule) -> None:
    q, k, v = (torch.empty(1, heads, 4096, head_size, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out, lse = flash_attention.forward(q, k, v, rule, card)
    flash_attention.backward(out, q, k, v, out, lse, rule, card)


def training(
    dtype: torch.dtype, head_size: int, *, causal: bool = True, window: int = 0, softcap: float = 0.0
) -> Variant:
    """Forward, dq and dk/dv of 4096 tokens."""
    label = f"{SHORT[dtype]} head {head_size}" + ("" if causal else ", not causal")
    label += (f", window {window}" if window else "") + (", soft-cap" if softcap else "")
    rule = Rule(0.1, causal, window, softcap)
    return Variant(label, partial(_training, dtype=dtype, head_size=head_size, rule=rule))


def _store(card: Card, dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int, fused: bool) -> None:
    kernels = TritonKernels(card)
    layout = KVLayout(LAYERS, KV_HEADS, 64, head_size, kv_dtype)
    kv_cache, scales = torch.empty(layout.shape(4), dtype=kv_dtype), layout.allocate_scales(4)
    qkv = torch.empty(32, HEADS + 2 * KV_HEADS, head_size, dtype=dtype)
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    slots, positions = torch.arange(32), torch.arange(32)
    if fused:
        cos_sin = torch.empty(128, head_size)
        kernels.rope_store_kv(q, k, v, cos_sin, positions, kv_cache, LAYER, slots, kv_scales=scales)
    else:
        kernels.store_kv(k, v, kv_cache, LAYER, slots, kv_scales=scales)


def _rows(card: Card, dtype: torch.dtype) -> None:
    kernels, size = TritonKernels(card), 4096
    x, weight, gate_up = (torch.empty(shape, dtype=dtype) for shape in ((32, size), (size,), (32, 2 * size)))
    kernels.rms_norm(x, weight, 1e-5, torch.empty_like(x))
    kernels.rms_norm(x, weight.float(), 1e-5, None)
    kernels.silu_mul(gate_up)
    kernels.gelu_mul(gate_up)
    heads, lse = torch.empty(32, HEADS, 128, dtype=dtype), torch.empty(32, HEADS)
    kernels.rope(heads, torch.empty(128, 128), torch.arange(32), heads)
    kernels.merge_states(heads, lse, heads, lse, torch.empty_like(heads), torch.empty_like(lse))


def _copies(card: Card) -> None:
    kernels, pool, ids = TritonKernels(card), torch.empty(4, 1 << 14), torch.arange(2)
    kernels.gather_blocks(pool, ids, torch.empty(2, 1 << 14))
    kernels.scatter_blocks(torch.empty(2, 1 << 14), ids, pool)
    kernels.copy_blocks(pool, ids, ids + 2)


def _small(dtype: torch.dtype, head_size: int) -> list[Variant]:
    label = f"{SHORT[dtype]} head {head_size}"
    return [Variant(label, partial(_store, dtype=dtype, kv_dtype=dtype, head_size=head_size, fused=True))]


def _others(dtype: torch.dtype) -> list[Variant]:
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    return [
        Variant(f"{SHORT[dtype]} head 128", partial(_store, dtype=dtype, kv_dtype=dtype, head_size=128, fused=False)),
        Variant(
            f"{SHORT[dtype]} head 128, KV e5m2", partial(_store, dtype=dtype, kv_dtype=e5m2, head_size=128, fused=False)
        ),
        Variant(
            f"{SHORT[dtype]} head 128, KV e4m3", partial(_store, dtype=dtype, kv_dtype=e4m3, head_size=128, fused=False)
        ),
        Variant(f"{SHORT[dtype]} rows of 4096", partial(_rows, dtype=dtype)),
        Variant("blocks of 64 KiB", _copies),
    ]


def quick_variants() -> list[Variant]:
    """What must not spill (bf16 and fp16 at head sizes 64 and 128), and one of everything else."""
    found = [
        attention(kind, dtype, head_size)
        for kind in ("decode", "prefill")
        for head_size in (64, 128)
        for dtype in (torch.bfloat16, torch.float16)
    ]
    found += [attention("decode", torch.bfloat16, 128, kv_dtype=torch.float8_e4m3fn)]
    found += [training(torch.bfloat16, 64), training(torch.bfloat16, 128)]
    found += [walk(torch.bfloat16, 64), walk(torch.bfloat16, 128)]
    return found + _small(torch.bfloat16, 128) + _others(torch.bfloat16)


def full_variants() -> list[Variant]:
    """The table of docs/kernels.md."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    found = []
    for kind in ("decode", "prefill"):
        found += [attention(kind, dtype, size) for size in (64, 80, 96, 128, 256) for dtype in (bf16, fp16, fp32)]
        found += [attention(kind, bf16, size, block_tokens=16) for size in (64, 128)]
        for kv_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            found += [attention(kind, bf16, 128, kv_dtype=kv_dtype, block_tokens=tokens) for tokens in (16, 64)]
        found += [attention(kind, bf16, 128, window=4096), attention(kind, bf16, 256, window=4096, softcap=50.0)]
    found += [attention("chunk", bf16, size) for size in (64, 128)]
    found += [walk(dtype, size) for size in (64, 128, 256) for dtype in (bf16, fp16, fp32)]
    found += [walk(bf16, 128, window=4096), walk(bf16, 128, kv_dtype=torch.float8_e5m2)]
    found += [training(dtype, size) for size in (64, 80, 128, 256) for dtype in (bf16, fp16, fp32)]
    found += [training(bf16, 128, causal=False), training(bf16, 128, window=4096), training(bf16, 256, softcap=50.0)]
    for dtype in (bf16, fp32):
        found += [variant for size in (64, 80, 96, 128, 256) for variant in _small(dtype, size)]
    return found + _others(bf16)
