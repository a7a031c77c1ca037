"""Attention of a sequence's newest rows over a range of its keys, which lie in up to three tensors: a walk that goes on
from the state of the one before it. See kernels/segments.py, whose `walk` this carries out on a GPU.

Tiles, their order and their arithmetic are those of paged_prefill in a deterministic plan, and a state keeps all of a
row, so walks over all keys give the bits of one call over them, wherever blocks lie and wherever the walks are cut.

table int32 [blocks]: 4 * id + source of every block of the sequence, block `id` of tensor `source`; tensors: shaped as
kernels/layout.py says, each block's layer dense, of one dtype, not float8_e4m3fn; layers: which of each tensor to read;
state float32 [rows, heads, head_size + PARTIAL_EXTRA]: of every row its sums, their maximum in units of log2 and its
total, 0 when it saw nothing; out, q [rows, heads, head_size], heads dense, rows may be strided. The range must begin at
a multiple of block_n and end at one or after the last key.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tournant.kernels.plan import PARTIAL_EXTRA
from tournant.kernels.triton.attention_launch import LOG2E
from tournant.kernels.triton.attention_tile import NEVER, attend, load_queries, look_up, read_tile
from tournant.kernels.triton.fp8 import as_bytes, form_of
from tournant.kernels.triton.paged_prefill import seen_by_all
from tournant.kernels.triton.plan import Work

UNIT: tl.constexpr = tl.constexpr(16)  # elements: places of blocks are counted so, and known to be aligned
NUM_SOURCES = 3


@triton.jit
def _apart(ptr, other_ptr, unit_bytes: tl.constexpr):
    """Units from one tensor to another."""
    return (other_ptr.to(tl.int64) - ptr.to(tl.int64)) // unit_bytes


@triton.jit
def _find(table_ptr, start, last, strides, shifts, block_tokens: tl.constexpr, block_n: tl.constexpr):
    """Units from the first tensor to the blocks of the tile at `start`."""
    entry = look_up(table_ptr, start, last, block_tokens, block_n)
    source, number = entry % 4, (entry // 4).to(tl.int64)
    others = tl.where(source == 1, number * strides[1] + shifts[0], number * strides[2] + shifts[1])
    return tl.where(source == 0, number * strides[0], others)


@triton.jit
def _fold(
    acc,
    peak,
    total,
    q,
    positions,
    kv_ptr,
    table_ptr,
    strides,
    shifts,
    low,
    high,
    last,
    value_stride,
    cap_scale,
    log2_scale,
    masked: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    form: tl.constexpr,
    head_size: tl.constexpr,
    block_tokens: tl.constexpr,
    block_n: tl.constexpr,
):
    """Fold the tiles from `low` up to `high` into (acc, peak, total)."""
    block = _find(table_ptr, low, last, strides, shifts, block_tokens, block_n)
    for start in range(low, high, block_n):
        following = _find(table_ptr, start + block_n, last, strides, shifts, block_tokens, block_n)
        acc, peak, total = attend(
            acc, peak, total, q, positions, kv_ptr, None, block, start, last, value_stride, UNIT, 0, 0,
            cap_scale, log2_scale, masked, window, softcap, form, head_size, block_tokens, block_n,
        )  # fmt: skip
        block = following
    return acc, peak, total


@triton.jit
def _load_state(kept_ptr, valid, fresh, head_size: tl.constexpr, block_m: tl.constexpr):
    """(acc, peak, total) of a tile's rows, where nothing was seen as when `fresh`."""
    dims = tl.arange(0, triton.next_power_of_2(head_size))
    acc = tl.zeros([block_m, triton.next_power_of_2(head_size)], tl.float32)
    peak, total = tl.full([block_m], NEVER, tl.float32), tl.zeros([block_m], tl.float32)
    if fresh == 0:
        total = tl.load(kept_ptr + head_size + 1, mask=valid, other=0.0)
        some = total > 0.0
        peak = tl.load(kept_ptr + head_size, mask=some, other=NEVER)
        mask = some[:, None] & (dims < head_size)[None, :]
        acc = tl.load(kept_ptr[:, None] + dims[None, :], mask=mask, other=0.0)
    return acc, peak, total


@triton.jit(do_not_specialize=["fresh", "final", "begin", "end", "stride_0", "stride_1", "stride_2"])
def paged_walk_kernel(
    out_ptr,
    state_ptr,
    q_ptr,
    kv_ptr,
    second_ptr,
    third_ptr,
    table_ptr,
    tiles_ptr,
    fresh,
    final,
    begin,
    end,
    stride_0,
    stride_1,
    stride_2,
    out_stride,
    q_stride,
    value_stride,
    cap_scale,
    log2_scale,
    window: tl.constexpr,
    softcap: tl.constexpr,
    form: tl.constexpr,
    unit_bytes: tl.constexpr,
    extra: tl.constexpr,
    group: tl.constexpr,
    head_size: tl.constexpr,
    block_tokens: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """One program: a tile of rows, a KV head. Keys from `begin` up to `end`."""
    _, row, num_rows, first = read_tile(tiles_ptr)
    q, query = load_queries(q_ptr, q_stride, row, num_rows, form, group, head_size, block_m)
    positions, last = first + query, first + num_rows - 1
    seen = tl.maximum(first - window + 1, 0) // block_n * block_n if window > 0 else 0
    low, high = tl.maximum(seen, begin), tl.minimum(last + 1, end)
    full_low, full_high = seen_by_all(low, high, first, last, window, block_n)
    strides = (stride_0, stride_1, stride_2)
    shifts = (_apart(kv_ptr, second_ptr, unit_bytes), _apart(kv_ptr, third_ptr, unit_bytes))
    kv_ptr += tl.program_id(1) * (block_tokens * head_size)
    rows = tl.arange(0, block_m)
    valid = (rows // group < num_rows) & (rows // group < block_m // group)
    place, head = (row + query).to(tl.int64), tl.program_id(1) * group + rows % group
    kept_ptr = state_ptr + (place * (tl.num_programs(1) * group) + head) * (head_size + extra)
    acc, peak, total = _load_state(kept_ptr, valid, fresh, head_size, block_m)
    if window > 0:
        acc, peak, total = _fold(
            acc, peak, total, q, positions, kv_ptr, table_ptr, strides, shifts, low, full_low, last, value_stride,
            cap_scale, log2_scale, True, window, softcap, form, head_size, block_tokens, block_n,
        )  # fmt: skip
    acc, peak, total = _fold(
        acc, peak, total, q, positions, kv_ptr, table_ptr, strides, shifts, full_low, full_high, last, value_stride,
        cap_scale, log2_scale, False, window, softcap, form, head_size, block_tokens, block_n,
    )  # fmt: skip
    acc, peak, total = _fold(
        acc, peak, total, q, positions, kv_ptr, table_ptr, strides, shifts, full_high, high, last, value_stride,
        cap_scale, log2_scale, True, window, softcap, form, head_size, block_tokens, block_n,
    )  # fmt: skip
    some, dims = total > 0.0, tl.arange(0, q.shape[1])
    inside = (dims < head_size)[None, :]
    if final != 0:
        found = acc / tl.where(some, total, 1.0)[:, None]
        places = (place * out_stride + head * head_size)[:, None] + dims[None, :]
        tl.store(out_ptr + places, found.to(out_ptr.dtype.element_ty), mask=valid[:, None] & inside)
    else:
        tl.store(kept_ptr[:, None] + dims[None, :], acc, mask=(valid & some)[:, None] & inside)
        tl.store(kept_ptr + head_size, peak, mask=valid)
        tl.store(kept_ptr + head_size + 1, total, mask=valid)


def paged_walk(
    out: torch.Tensor,
    q: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    layers: Sequence[int],
    table: torch.Tensor,
    work: Work,
    keys: tuple[int, int],
    scale: float,
    state: torch.Tensor,
    *,
    window: int,
    softcap: float,
    fresh: bool,
    final: bool,
) -> None:
    """Fold keys[0] up to keys[1] into the rows of `work.tiles`. fresh: what is in their states does not matter; final:
    they are written to out, and what is in the states afterwards does not matter.
    """
    _, _, _, kv_heads, block_tokens, head_size = tensors[0].shape
    shape, unit_bytes = work.shape, 16 * tensors[0].itemsize
    sources = [as_bytes(tensor[:, layer]) for tensor, layer in zip(tensors, layers, strict=True)]
    sources += [sources[0]] * (NUM_SOURCES - len(sources))
    paged_walk_kernel[(len(work.tiles), kv_heads)](
        out,
        state,
        q,
        *sources,
        table,
        work.tiles,
        int(fresh),
        int(final),
        *keys,
        *(source.stride(0) // 16 for source in sources),
        out.stride(0),
        q.stride(0),
        tensors[0].stride(2),
        scale / softcap if softcap else 1.0,
        (softcap or scale) * LOG2E,
        window=window,
        softcap=bool(softcap),
        form=form_of(tensors[0]),
        unit_bytes=unit_bytes,
        extra=PARTIAL_EXTRA,
        group=q.shape[1] // kv_heads,
        head_size=head_size,
        block_tokens=block_tokens,
        block_m=shape.block_m,
        block_n=shape.block_n,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        enable_fp_fusion=True,
    )
