"""Attention for training: forward, dq and dk/dv kernels that compute scores again instead of keeping them.

FlashAttention-2 (Dao 2023, algorithms 1 and 2); what is computed, the shapes and `Rule`: kernels/flash_attention.py.
q [batch, heads, Q, hs], k and v [batch, kv_heads, K, hs] of one dtype, rows dense, other strides free. The wrappers
allocate the rest, token by token: out, dq [batch, Q, heads, hs], dk, dv [batch, K, kv_heads, hs] of that dtype, lse
(natural logarithm) and delta float32 [batch, heads, Q]. Nothing is padded: rows and keys that fill a last tile up are
neither read nor written.

Invariants:
 1. Every element is written by one program, without atomic operations: results do not depend on the order of programs.
    A program of dk/dv walks over all query heads that read its KV head, and so sums over the group.
 2. Scores are in units of log2 until they are exponentials; a row that is not there has an lse of infinity, so that its
    probabilities, and with them its share of dk and dv, are zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tournant.kernels.flash_attention import Rule
from tournant.kernels.triton.attention_tile import LN2, NEVER, TWO_LOG2E
from tournant.kernels.triton.card import Card
from tournant.kernels.triton.tiles import TileShape, prefill_shape

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(ptr, first, limit, stride, bounded: tl.constexpr, head_size: tl.constexpr, block: tl.constexpr):
    """Rows first to first + block of one head [block, padded head size]; `bounded`: zeros from row `limit` on."""
    padded: tl.constexpr = triton.next_power_of_2(head_size) if head_size > 16 else 16
    rows, dims = tl.arange(0, block), tl.arange(0, padded)
    places = ptr + tl.cast(first, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    if bounded:
        return tl.load(places, mask=(rows < limit - first)[:, None] & (dims < head_size)[None, :], other=0.0)
    elif padded != head_size:
        return tl.load(places, mask=(dims < head_size)[None, :], other=0.0)
    else:
        return tl.load(places)


@triton.jit
def _store(ptr, x, first, limit, stride, head_size: tl.constexpr, block: tl.constexpr):
    """Write what `_rows` would read."""
    rows, dims = tl.arange(0, block), tl.arange(0, x.shape[1])
    places = ptr + tl.cast(first, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    tl.store(places, x.to(ptr.dtype.element_ty), mask=(rows < limit - first)[:, None] & (dims < head_size)[None, :])


@triton.jit
def _capped(s, cap_scale, softcap: tl.constexpr):
    """Products of q and k as they are, or their tanh where there is a soft-cap."""
    if softcap:
        return 1.0 - 2.0 / (tl.exp2(s * (cap_scale * TWO_LOG2E)) + 1.0)
    else:
        return s


@triton.jit
def _visible(positions, keys, num_keys, causal: tl.constexpr, window: tl.constexpr):
    """Which keys each position sees; the two broadcast."""
    if window > 0:
        return (keys <= positions) & (keys > positions - window)
    elif causal:
        return keys <= positions
    else:
        return keys < num_keys


@triton.jit
def _key_ranges(
    start, num_queries, num_keys, causal: tl.constexpr, window: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr,
):  # fmt: skip
    """Of the queries start to start + block_m: the first key that one of them sees, rounded down to a tile, the tiles
    that all of them see in full (from, to), and the end of what one sees.
    """
    first = start + num_keys - num_queries
    last = tl.minimum(start + block_m, num_queries) - 1 + num_keys - num_queries
    low = tl.maximum(first - window + 1, 0) // block_n * block_n if window > 0 else 0
    high = last + 1 if causal else num_keys
    full_high = (tl.minimum(first + 1, high) if causal else high) // block_n * block_n
    full_low = tl.cdiv(tl.maximum(last - window + 1, 0), block_n) * block_n if window > 0 else 0
    full_low = tl.minimum(full_low, tl.cdiv(high, block_n) * block_n)
    return low, full_low, tl.maximum(full_low, full_high), high


@triton.jit
def _query_tile(
    q_ptr, k_ptr, v_ptr, q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, num_queries, num_keys,
    group: tl.constexpr, head_size: tl.constexpr, block_m: tl.constexpr,
):  # fmt: skip
    """A program's tile of queries (the last, which see most keys, first), of a head, of a sequence: (first, rows, their
    positions, q, K and V of the head, its index among all, where it begins in tensors written token by token).
    """
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_m
    head, batch, heads = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(1)
    k_ptr += batch * k_batch + (head // group).to(tl.int64) * k_head
    v_ptr += batch * v_batch + (head // group).to(tl.int64) * v_head
    q_ptr += batch * q_batch + head.to(tl.int64) * q_head
    q = _rows(q_ptr, start, num_queries, q_row, True, head_size, block_m)
    rows = start + tl.arange(0, block_m)
    positions = tl.minimum(rows, num_queries - 1) + (num_keys - num_queries)
    place = (batch * num_queries * heads + head) * head_size
    return start, rows, positions, q, k_ptr, v_ptr, batch * heads + head, place


@triton.jit
def _forward_tile(
    acc, peak, total, q, positions, k_ptr, v_ptr, start, num_keys, k_row, v_row, cap_scale, log2_scale,
    masked: tl.constexpr, causal: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr, head_size: tl.constexpr,
    block_n: tl.constexpr,
):  # fmt: skip
    """Fold keys start to start + block_n into (acc, peak, total)."""
    k = _rows(k_ptr, start, num_keys, k_row, masked, head_size, block_n)
    s = _capped(tl.dot(q, tl.trans(k), input_precision="ieee"), cap_scale, softcap)
    if masked:
        keys = start + tl.arange(0, block_n)
        s = tl.where(_visible(positions[:, None], keys[None, :], num_keys, causal, window), s, float("-inf"))
    higher = tl.maximum(peak, tl.max(s, 1) * log2_scale)
    p = tl.exp2(s * log2_scale - higher[:, None])
    fade = tl.exp2(peak - higher)
    total = total * fade + tl.sum(p, 1)
    v = _rows(v_ptr, start, num_keys, v_row, masked, head_size, block_n)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, higher, total


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def flash_forward_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    num_queries, num_keys, cap_scale, log2_scale,
    causal: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr, group: tl.constexpr, head_size: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """One program: see `_query_tile`."""
    start, rows, positions, q, k_ptr, v_ptr, index, place = _query_tile(
        q_ptr, k_ptr, v_ptr, q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, num_queries, num_keys, group,
        head_size, block_m,
    )  # fmt: skip
    low, full_low, full_high, high = _key_ranges(start, num_queries, num_keys, causal, window, block_m, block_n)
    acc = tl.zeros([block_m, q.shape[1]], tl.float32)
    peak, total = tl.full([block_m], NEVER, tl.float32), tl.zeros([block_m], tl.float32)
    if window > 0:
        for at in range(low, full_low, block_n):
            acc, peak, total = _forward_tile(
                acc, peak, total, q, positions, k_ptr, v_ptr, at, num_keys, k_row, v_row, cap_scale, log2_scale,
                True, causal, window, softcap, head_size, block_n,
            )  # fmt: skip
    for at in range(full_low, full_high, block_n):
        acc, peak, total = _forward_tile(
            acc, peak, total, q, positions, k_ptr, v_ptr, at, num_keys, k_row, v_row, cap_scale, log2_scale,
            False, causal, window, softcap, head_size, block_n,
        )  # fmt: skip
    for at in range(full_high, high, block_n):
        acc, peak, total = _forward_tile(
            acc, peak, total, q, positions, k_ptr, v_ptr, at, num_keys, k_row, v_row, cap_scale, log2_scale,
            True, causal, window, softcap, head_size, block_n,
        )  # fmt: skip
    tl.store(lse_ptr + index * num_queries + rows, (peak + tl.log2(total)) * LN2, mask=rows < num_queries)
    stride = tl.num_programs(1) * head_size
    _store(out_ptr + place, acc / total[:, None], start, num_queries, stride, head_size, block_m)


@triton.jit
def _dscores(s, p, dp, delta, softcap: tl.constexpr):
    """The gradient of products of q and k but for `scale`; s: `_capped`, the tanh of a soft-cap."""
    ds = p * (dp - delta)
    if softcap:
        ds *= 1.0 - s * s
    return ds


@triton.jit
def _dq_tile(
    dq, q, dout, lse, delta, positions, k_ptr, v_ptr, start, num_keys, k_row, v_row, cap_scale, log2_scale,
    masked: tl.constexpr, causal: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr, head_size: tl.constexpr,
    block_n: tl.constexpr,
):  # fmt: skip
    """dq with the share of keys start to start + block_n."""
    k = _rows(k_ptr, start, num_keys, k_row, masked, head_size, block_n)
    v = _rows(v_ptr, start, num_keys, v_row, masked, head_size, block_n)
    s = _capped(tl.dot(q, tl.trans(k), input_precision="ieee"), cap_scale, softcap)
    p = tl.exp2(s * log2_scale - lse[:, None])
    if masked:
        keys = start + tl.arange(0, block_n)
        p = tl.where(_visible(positions[:, None], keys[None, :], num_keys, causal, window), p, 0.0)
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
    ds = _dscores(s, p, dp, delta[:, None], softcap)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def flash_dq_kernel(
    dq_ptr, delta_ptr, q_ptr, k_ptr, v_ptr, dout_ptr, out_ptr, lse_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, num_queries, num_keys, scale, cap_scale, log2_scale,
    causal: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr, group: tl.constexpr, head_size: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """One program: see `_query_tile`. Also writes delta, for dk and dv."""
    start, rows, positions, q, k_ptr, v_ptr, index, place = _query_tile(
        q_ptr, k_ptr, v_ptr, q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, num_queries, num_keys, group,
        head_size, block_m,
    )  # fmt: skip
    there, stride = rows < num_queries, tl.num_programs(1) * head_size
    dout = _rows(dout_ptr + place, start, num_queries, stride, True, head_size, block_m)
    out = _rows(out_ptr + place, start, num_queries, stride, True, head_size, block_m)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    row = index * num_queries
    tl.store(delta_ptr + row + rows, delta, mask=there)
    lse = tl.load(lse_ptr + row + rows, mask=there, other=float("inf")) * LOG2E
    low, full_low, full_high, high = _key_ranges(start, num_queries, num_keys, causal, window, block_m, block_n)
    dq = tl.zeros([block_m, q.shape[1]], tl.float32)
    if window > 0:
        for at in range(low, full_low, block_n):
            dq = _dq_tile(
                dq, q, dout, lse, delta, positions, k_ptr, v_ptr, at, num_keys, k_row, v_row, cap_scale, log2_scale,
                True, causal, window, softcap, head_size, block_n,
            )  # fmt: skip
    for at in range(full_low, full_high, block_n):
        dq = _dq_tile(
            dq, q, dout, lse, delta, positions, k_ptr, v_ptr, at, num_keys, k_row, v_row, cap_scale, log2_scale,
            False, causal, window, softcap, head_size, block_n,
        )  # fmt: skip
    for at in range(full_high, high, block_n):
        dq = _dq_tile(
            dq, q, dout, lse, delta, positions, k_ptr, v_ptr, at, num_keys, k_row, v_row, cap_scale, log2_scale,
            True, causal, window, softcap, head_size, block_n,
        )  # fmt: skip
    _store(dq_ptr + place, dq * scale, start, num_queries, stride, head_size, block_m)


@triton.jit
def _dkv_tile(
    dk, dv, k, v, keys, q_ptr, dout_ptr, lse_ptr, delta_ptr, start, num_queries, num_keys, q_row, dout_row, cap_scale,
    log2_scale, masked: tl.constexpr, causal: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr,
    head_size: tl.constexpr, block_m: tl.constexpr,
):  # fmt: skip
    """dk (without scale) and dv with the share of queries start to start + block_m of one head. Tiles are transposed,
    [keys, queries], so that probabilities are left operands as they come. Keys that are not there may make anything of
    their own rows, which nobody stores.
    """
    q = _rows(q_ptr, start, num_queries, q_row, True, head_size, block_m)
    rows = start + tl.arange(0, block_m)
    there = rows < num_queries
    lse = tl.load(lse_ptr + rows, mask=there, other=float("inf")) * LOG2E
    s = _capped(tl.dot(k, tl.trans(q), input_precision="ieee"), cap_scale, softcap)
    p = tl.exp2(s * log2_scale - lse[None, :])
    if masked:
        positions = rows + (num_keys - num_queries)
        p = tl.where(_visible(positions[None, :], keys[:, None], num_keys, causal, window), p, 0.0)
    dout = _rows(dout_ptr, start, num_queries, dout_row, True, head_size, block_m)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
    dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
    delta = tl.load(delta_ptr + rows, mask=there, other=0.0)
    ds = _dscores(s, p, dp, delta[None, :], softcap)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _query_ranges(
    start, num_queries, num_keys, causal: tl.constexpr, window: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr,
):  # fmt: skip
    """Of the keys start to start + block_n: the first query that sees one of them, rounded down to a tile, the tiles
    that see all of them (from, to), and the end of what sees one. Queries that are not there see everything.
    """
    shift = num_keys - num_queries
    if causal:
        low = tl.maximum(start - shift, 0) // block_m * block_m
        full_low = tl.cdiv(tl.maximum(start + block_n - 1 - shift, 0), block_m) * block_m
        if window > 0:
            high = tl.minimum(num_queries, start + block_n - 1 + window - shift)
            full_high = tl.maximum(start + window - shift, 0) // block_m * block_m
        else:
            high = num_queries
            full_high = tl.cdiv(num_queries, block_m) * block_m
        full_low = tl.minimum(full_low, tl.cdiv(tl.maximum(high, 0), block_m) * block_m)
        return low, full_low, tl.maximum(full_low, tl.minimum(full_high, high)), high
    else:
        return 0, 0, num_queries, num_queries


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def flash_dkv_kernel(
    dk_ptr, dv_ptr, q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, num_queries, num_keys, scale, cap_scale, log2_scale,
    causal: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr, group: tl.constexpr, head_size: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """One program: a tile of keys, a KV head, a sequence; all query heads that read it, one after another."""
    start, kv_head, batch = tl.program_id(0) * block_n, tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_heads = tl.num_programs(1)
    heads = kv_heads * group
    k_ptr += batch * k_batch + kv_head.to(tl.int64) * k_head
    v_ptr += batch * v_batch + kv_head.to(tl.int64) * v_head
    k = _rows(k_ptr, start, num_keys, k_row, True, head_size, block_n)
    v = _rows(v_ptr, start, num_keys, v_row, True, head_size, block_n)
    keys = start + tl.arange(0, block_n)
    low, full_low, full_high, high = _query_ranges(start, num_queries, num_keys, causal, window, block_m, block_n)
    dk, dv = tl.zeros([block_n, k.shape[1]], tl.float32), tl.zeros([block_n, k.shape[1]], tl.float32)
    for member in range(group):
        head = kv_head.to(tl.int64) * group + member
        own_q_ptr = q_ptr + batch * q_batch + head * q_head
        own_dout_ptr = dout_ptr + (batch * num_queries * heads + head) * head_size
        row = (batch * heads + head) * num_queries
        for at in range(low, full_low, block_m):
            dk, dv = _dkv_tile(
                dk, dv, k, v, keys, own_q_ptr, own_dout_ptr, lse_ptr + row, delta_ptr + row, at, num_queries, num_keys,
                q_row, heads * head_size, cap_scale, log2_scale, True, causal, window, softcap, head_size, block_m,
            )  # fmt: skip
        for at in range(full_low, full_high, block_m):
            dk, dv = _dkv_tile(
                dk, dv, k, v, keys, own_q_ptr, own_dout_ptr, lse_ptr + row, delta_ptr + row, at, num_queries, num_keys,
                q_row, heads * head_size, cap_scale, log2_scale, False, causal, window, softcap, head_size, block_m,
            )  # fmt: skip
        if window > 0:
            for at in range(full_high, high, block_m):
                dk, dv = _dkv_tile(
                    dk, dv, k, v, keys, own_q_ptr, own_dout_ptr, lse_ptr + row, delta_ptr + row, at, num_queries,
                    num_keys, q_row, heads * head_size, cap_scale, log2_scale, True, causal, window, softcap, head_size,
                    block_m,
                )  # fmt: skip
    place, stride = (batch * num_keys * kv_heads + kv_head) * head_size, kv_heads * head_size
    _store(dk_ptr + place, dk * scale, start, num_keys, stride, head_size, block_n)
    _store(dv_ptr + place, dv, start, num_keys, stride, head_size, block_n)


# -------------------------------------------------------------------- launches


def backward_shapes(card: Card, head_size: int, itemsize: int) -> tuple[TileShape, TileShape]:
    """Tiles of dq and of dk/dv: the largest that do not spill at head sizes 64 and 128, not yet measured on a card.

    dk/dv keeps two accumulators and both of K and V, so at 128 half as many keys; float32 has no tensor cores.
    """
    if itemsize == 4:
        return TileShape(32, 16, 8, 2), TileShape(16, 32, 8, 2)
    if head_size > 128:
        return TileShape(64, 32, 8, 2), TileShape(16, 64, 8, 2)
    columns = TileShape(32, 128, 8, 2) if head_size <= 64 else TileShape(32, 64, 8, 3 if card.arch >= 90 else 2)
    return TileShape(128, 32, 8, 2), columns


def _token_major(like: torch.Tensor) -> torch.Tensor:
    batch, heads, tokens, size = like.shape
    return torch.empty((batch, tokens, heads, size), dtype=like.dtype, device=like.device).transpose(1, 2)


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _common(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule, shape: TileShape) -> dict[str, object]:
    """What all three kernels are told, by keyword."""
    names = ("batch", "head", "row")
    strides = {
        f"{name}_{axis}": x.stride(at) for name, x in (("q", q), ("k", k), ("v", v)) for at, axis in enumerate(names)
    }
    return strides | {
        "num_queries": q.shape[2],
        "num_keys": k.shape[2],
        "cap_scale": rule.factor,
        "log2_scale": (rule.softcap or rule.scale) * LOG2E.value,
        "causal": rule.causal,
        "window": rule.window,
        "softcap": bool(rule.softcap),
        "group": q.shape[1] // k.shape[1],
        "head_size": q.shape[3],
        "block_m": shape.block_m,
        "block_n": shape.block_n,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
        "enable_fp_fusion": True,  # Triton 3.10 turns it off unless asked
    }


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule, card: Card | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse. card: what tile sizes are chosen for, that of q's device unless given."""
    q, k, v = _dense_rows(q), _dense_rows(k), _dense_rows(v)
    out, lse = _token_major(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if out.numel():
        shape = prefill_shape(card or Card.of(q.device), q.shape[3], q.itemsize, 1, q.shape[2])
        grid = (triton.cdiv(q.shape[2], shape.block_m), q.shape[1], len(q))
        flash_forward_kernel[grid](out, lse, q, k, v, **_common(q, k, v, rule, shape))
    return out, lse


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rule: Rule,
    card: Card | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv from what `forward` returned and out's gradient, of any strides."""
    q, k, v, dout = _dense_rows(q), _dense_rows(k), _dense_rows(v), dout.transpose(1, 2).contiguous()
    dq, dk, dv, delta = _token_major(q), _token_major(k), _token_major(v), torch.empty_like(lse)
    rows, columns = backward_shapes(card or Card.of(q.device), q.shape[3], q.itemsize)
    if dq.numel():
        grid = (triton.cdiv(q.shape[2], rows.block_m), q.shape[1], len(q))
        options = _common(q, k, v, rule, rows)
        flash_dq_kernel[grid](dq, delta, q, k, v, dout, out, lse, scale=rule.scale, **options)
    if dk.numel():
        grid = (triton.cdiv(k.shape[2], columns.block_n), k.shape[1], len(k))
        options = _common(q, k, v, rule, columns)
        flash_dkv_kernel[grid](dk, dv, q, k, v, dout, lse, delta, scale=rule.scale, **options)
    return dq, dk, dv
