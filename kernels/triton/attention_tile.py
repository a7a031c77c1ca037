"""What both attention kernels do with one tile of KV: find it through the block table, score, mask, fold in.

Owns: the jitted helpers. A tile holds `block_m` rows, the queries of `group` heads that share a KV head: row r is query
r // group and head r % group of the program's KV head. Scores are kept in units of log2, so that the softmax is exp2
and the factor log2(e) costs nothing.

Invariants:
 1. Block-table entries and KV beyond a sequence's last visible token are never read, so they may hold anything.
 2. The bits of a row depend on its query, its position, its KV and the tile sizes alone: a tile that a row does not see
    leaves its state as it is, and unmasked tiles use the same arithmetic as masked ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tournant.kernels.triton.fp8 import E4M3_FACTOR, decode

NEVER: tl.constexpr = tl.constexpr(-1.0e30)  # below every score, yet finite: NEVER - NEVER is 0, not NaN
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
TWO_LOG2E: tl.constexpr = tl.constexpr(2.8853900817779268)
TILE_FIELDS: tl.constexpr = tl.constexpr(4)  # of plan.Work.tiles: sequence, first row, number of rows, first position


@triton.jit
def read_tile(tiles_ptr):
    """The four fields of this program's tile."""
    place = tiles_ptr + tl.program_id(0) * TILE_FIELDS
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)


@triton.jit
def load_queries(
    q_ptr,
    q_stride,
    row,
    num_rows,
    form: tl.constexpr,
    group: tl.constexpr,
    head_size: tl.constexpr,
    block_m: tl.constexpr,
):
    """q [block_m, padded head size] of this program's KV head, and the query number of each row (rows past the last
    query repeat its number and hold zeros).
    """
    rows = tl.arange(0, block_m)
    dims = tl.arange(0, triton.next_power_of_2(head_size))
    query, head = rows // group, tl.program_id(1) * group + rows % group
    mask = ((query < num_rows) & (query < block_m // group))[:, None] & (dims < head_size)[None, :]
    places = (row + query).to(tl.int64) * q_stride + head * head_size
    q = tl.load(q_ptr + places[:, None] + dims[None, :], mask=mask, other=0.0)
    if form != "plain" and q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)  # where decoded fp8 is exact
    return q, tl.minimum(query, num_rows - 1)


@triton.jit
def split_range(begin, end, block_n: tl.constexpr):
    """This program's share of the KV tiles that cover tokens begin (a multiple of block_n) to end: its token range."""
    share = tl.cdiv(tl.cdiv(end - begin, block_n), tl.num_programs(2)) * block_n
    low = begin + tl.program_id(2) * share
    return low, tl.minimum(low + share, end)


@triton.jit
def look_up(table_ptr, start, last, block_tokens: tl.constexpr, block_n: tl.constexpr):
    """Physical blocks of the tile at `start`: one id where a block holds the tile, else one id per token. Loops look
    the next tile up one round ahead: an address that waits for a load of its own round is pipelined two rounds deep
    and costs Triton one of its buffers.
    """
    if block_tokens >= block_n:
        return tl.load(table_ptr + tl.maximum(tl.minimum(start, last), 0) // block_tokens)
    else:
        tokens = tl.maximum(tl.minimum(start + tl.arange(0, block_n), last), 0)
        return tl.load(table_ptr + tokens // block_tokens)


@triton.jit
def _load_kv(place, mask, form: tl.constexpr, dtype: tl.constexpr):
    stored = tl.load(place) if mask is None else tl.load(place, mask=mask, other=0)
    return stored if form == "plain" else decode(stored, form).to(dtype)


@triton.jit
def attend(
    acc,
    peak,
    total,
    q,
    positions,
    kv_ptr,
    scales_ptr,
    block,
    start,
    last,
    value_offset,
    block_stride,
    value_scale_offset,
    scale_stride,
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
    """Fold tokens start to start + block_n, which lie in the blocks `block`, into (acc, peak, total). last: the last
    token that may be loaded, heeded when `masked`; without that every row sees the whole tile.
    """
    tokens = start + tl.arange(0, block_n)
    loaded = tl.minimum(tokens, last) if masked else tokens
    block = block.to(tl.int64)
    places = block * block_stride + (loaded % block_tokens) * head_size
    padded: tl.constexpr = triton.next_power_of_2(head_size)
    dims = tl.arange(0, padded)
    k_mask = None if padded == head_size else (dims < head_size)[:, None]
    v_mask = None if padded == head_size else (dims < head_size)[None, :]
    k = _load_kv(kv_ptr + places[None, :] + dims[:, None], k_mask, form, q.dtype)  # transposed by its strides
    s = tl.dot(q, k, input_precision="ieee")
    if form == "e4m3":
        factor = tl.load(scales_ptr + block * scale_stride) * E4M3_FACTOR
        s *= factor if block_tokens >= block_n else factor[None, :]
    if softcap:
        s = 1.0 - 2.0 / (tl.exp2(s * (cap_scale * TWO_LOG2E)) + 1.0)  # tanh
    if masked:
        visible = tokens[None, :] <= positions[:, None]
        if window > 0:
            visible &= tokens[None, :] > positions[:, None] - window
        s = tl.where(visible, s, float("-inf"))
    higher = tl.maximum(peak, tl.max(s, 1) * log2_scale)
    p = tl.exp2(s * log2_scale - higher[:, None])
    fade = tl.exp2(peak - higher)
    total = total * fade + tl.sum(p, 1)
    v = _load_kv(kv_ptr + value_offset + places[:, None] + dims[None, :], v_mask, form, q.dtype)
    if form == "e4m3":
        factor = tl.load(scales_ptr + value_scale_offset + block * scale_stride) * E4M3_FACTOR
        p *= factor if block_tokens >= block_n else factor[None, :]
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, higher, total


@triton.jit
def store_rows(
    acc,
    peak,
    total,
    out_ptr,
    lse_ptr,
    out_stride,
    row,
    num_rows,
    split: tl.constexpr,
    group: tl.constexpr,
    head_size: tl.constexpr,
    block_m: tl.constexpr,
):
    """Divide and store. With `split`, out [tile * queries + query, head, split, head_size] and lse (log2) likewise in
    float32, for merge_splits; else out [row, head, head_size] and lse [row, head] (natural logarithm).
    """
    rows = tl.arange(0, block_m)
    dims = tl.arange(0, triton.next_power_of_2(head_size))
    query, head = rows // group, tl.program_id(1) * group + rows % group
    heads = tl.num_programs(1) * group
    valid = (query < num_rows) & (query < block_m // group)
    some = total > 0.0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, peak + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    if split:
        place = (tl.program_id(0) * (block_m // group) + query).to(tl.int64) * heads + head
        place = place * tl.num_programs(2) + tl.program_id(2)
        tl.store(lse_ptr + place, lse, mask=valid)
        out_place = place * head_size
        valid &= some  # merge_splits does not read what has weight 0
    else:
        if lse_ptr is not None:
            tl.store(lse_ptr + (row + query).to(tl.int64) * heads + head, lse * LN2, mask=valid)
        out_place = (row + query).to(tl.int64) * out_stride + head * head_size
    mask = valid[:, None] & (dims < head_size)[None, :]
    tl.store(out_ptr + out_place[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
