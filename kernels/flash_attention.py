"""Attention for training: forward and backward tile by tile, so that no matrix of queries times keys is ever kept.

Owns: the checks, the autograd function, and the CPU's twin of kernels/triton/flash_attention.py, which CUDA tensors
take (and CPU tensors under Triton's interpreter, see `ops.select_backend`). Does not own caches, blocks or masks of
padding: q, k and v are dense tensors of whole sequences; serving has `ops.paged_attention`.

The formulas are FlashAttention-2's (Dao 2023, "FlashAttention-2: Faster Attention with Better Parallelism and Work
Partitioning", algorithms 1 and 2). With s = scale q k^T over the keys that a row sees, capped by c if there is one:
  forward    p = exp(s - lse), out = p v; only lse = log(sum(exp(s))) is kept of s;
  backward   p is computed again, dv = p^T dout, ds = p (dout v^T - delta) with delta = sum(dout out) of each row,
             dq = scale ds k, dk = scale ds^T q; with a soft-cap, ds is first multiplied by 1 - (s / c)^2.
The gradients of a KV head are sums over the query heads that read it.

Invariants:
 1. What a call leaves for its backward is q, k, v, out and lse: linear in the number of tokens. Beside them a pass
    takes float32 copies of the same size and a few tiles.
 2. Query i of Q stands at position K - Q + i of K keys, so that the last chunk of a longer sequence attends to all of
    it; every row sees at least one key.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from tournant.kernels import ops
from tournant.kernels.checks import DTYPES, refuse

__all__ = ["Rule", "flash_attention"]

TRITON_MODULE = "tournant.kernels.triton.flash_attention"
MAX_HEAD_SIZE = 256
QUERY_TILE, KEY_TILE = 128, 256  # of the twin: a tile of scores of a few heads stays in a core's cache
NEVER = -1.0e30  # below every score, yet finite: what a row has seen before its first key


class Rule(NamedTuple):
    """How scores are made: see `flash_attention`. window and softcap are 0 where there is none."""

    scale: float
    causal: bool
    window: int
    softcap: float

    @property
    def factor(self) -> float:
        """What a product of q and k is multiplied by, before the cap's tanh where there is one."""
        return self.scale / self.softcap if self.softcap else self.scale


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """softmax(scale q k^T) v, differentiable once in q, k and v; memory grows with tokens, not with their square.

    q [batch, heads, Q, hs], k and v [batch, kv_heads, K, hs], hs <= 256: bfloat16, float16 or float32, all the same, on
    one device; float64 on the CPU, for checks. Query head h reads KV head h // (heads // kv_heads). Arithmetic is
    float32 (on a GPU, products are of q's dtype). Returns [batch, heads, Q, hs] that lies token by token in memory.

    scale: hs ** -0.5 unless given; causal: query i sees keys 0 to K - Q + i, so K >= Q; window: how many of these it
    sees at most, the last ones, 0 = all; softcap: scores become softcap * tanh(score / softcap), 0 = as they are.
    Raises ValueError before anything is computed; MissingBackendError for a GPU without Triton.
    """
    _check(q, k, v)
    rule = Rule(q.shape[3] ** -0.5 if scale is None else scale, causal, window, softcap)
    _check_rule(rule, q.shape[2], k.shape[2])
    out: torch.Tensor = _FlashAttention.apply(q, k, v, rule)  # type: ignore[no-untyped-call]
    return out


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    size = q.shape[-1] if q.ndim else 0
    if q.ndim != 4 or not 1 <= size <= MAX_HEAD_SIZE or not (q.dtype in DTYPES or _for_checks(q)):
        raise refuse("q", q, f"bfloat16, float16 or float32 [batch, heads, queries, hs], hs at most {MAX_HEAD_SIZE}")
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 4 or (x.shape[0], x.shape[3], x.dtype, x.device) != (len(q), size, q.dtype, q.device):
            raise refuse(name, x, f"{q.dtype} [{len(q)}, kv_heads, keys, {size}] on {q.device}")
    if v.shape != k.shape:
        raise refuse("v", v, f"of k's shape {tuple(k.shape)}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads and k {k.shape[1]}; the former must be a multiple of the latter")


def _for_checks(q: torch.Tensor) -> bool:
    return q.is_cpu and q.dtype == torch.float64


def _check_rule(rule: Rule, num_queries: int, num_keys: int) -> None:
    if not 0 < rule.scale < float("inf"):
        raise ValueError(f"scale is {rule.scale}; it must be positive")
    if isinstance(rule.window, bool) or not isinstance(rule.window, int):
        raise ValueError(f"window is {rule.window!r}; it must be a whole number of keys, 0 for all")
    if rule.window < 0 or not 0 <= rule.softcap < float("inf"):
        raise ValueError(f"window is {rule.window}, softcap {rule.softcap}; neither may be negative or infinite")
    if rule.window and not rule.causal:
        raise ValueError(f"window is {rule.window}; only causal attention has one")
    if not num_keys or (rule.causal and num_queries > num_keys):
        raise ValueError(
            f"{num_queries} queries over {num_keys} keys: the queries are the last of the keys' positions, so there "
            "must be at least as many keys (and one key at least)"
        )


_Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Rule], tuple[torch.Tensor, torch.Tensor]]


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        run, ctx.run_back = _passes(q)
        out, lse = run(q, k, v, rule)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rule = rule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.run_back(dout, *ctx.saved_tensors, ctx.rule), None


def _passes(q: torch.Tensor) -> tuple[_Forward, Callable[..., tuple[torch.Tensor, ...]]]:
    if _for_checks(q) or ops.backend(q.device) != "triton":
        return forward, backward
    module = importlib.import_module(TRITON_MODULE)  # Triton is optional; `ops.backend` has seen that it is there
    return module.forward, module.backward


# -------------------------------------------------------------------- the twin


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """out [batch, heads, Q, hs] and lse [batch, heads, Q], the natural log of the sum of a row's exponentials, in
    float32 (float64 for float64). Arguments as `flash_attention` has them, checked.
    """
    kv_heads, num_queries = k.shape[1], q.shape[2]
    queries, keys, values = grouped(q, kv_heads) * rule.factor, ungrouped(k), ungrouped(v)
    out = torch.empty(queries.shape, dtype=q.dtype)
    lse = torch.empty(queries.shape[:3], dtype=queries.dtype)
    for rows, columns in tiles(rule, num_queries, k.shape[2]):
        q_tile = queries[:, :, rows].flatten(1, 2)
        acc = torch.zeros_like(q_tile)
        peak, total = torch.full_like(acc[..., :1], NEVER), torch.zeros_like(acc[..., :1])
        for column in columns:
            s = logits(q_tile, keys[:, column], rule)
            hide(s, unseen(rule, rows, column, k.shape[2] - num_queries), float("-inf"))
            acc, peak, total = fold(acc, peak, total, s, values[:, column])
        shape = out[:, :, rows].shape
        out[:, :, rows] = acc.div_(total).view(shape)
        lse[:, :, rows] = peak.add_(total.log_()).view(shape[:3])
    return by_token(out, q), lse.view(q.shape[:3])


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rule: Rule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, each of its tensor's shape and dtype, from what `forward` returned and out's gradient."""
    kv_heads, num_queries = k.shape[1], q.shape[2]
    queries, keys, values = grouped(q, kv_heads) * rule.factor, ungrouped(k), ungrouped(v)
    douts = grouped(dout, kv_heads)
    delta = (douts * grouped(out, kv_heads)).sum(3)
    lse = lse.view(delta.shape)
    dq, dk, dv = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    for rows, columns in tiles(rule, num_queries, k.shape[2]):
        q_tile, dout_tile = (x[:, :, rows].flatten(1, 2) for x in (queries, douts))
        row_lse, row_delta = (x[:, :, rows].flatten(1, 2)[..., None] for x in (lse, delta))
        dq_tile = torch.zeros_like(q_tile)
        for column in columns:
            s = logits(q_tile, keys[:, column], rule)
            p = weights(s, row_lse, unseen(rule, rows, column, k.shape[2] - num_queries))
            dv[:, column].baddbmm_(p.mT, dout_tile)
            ds = dlogits(s, p, torch.bmm(dout_tile, values[:, column].mT), row_delta, rule)
            dq_tile.baddbmm_(ds, keys[:, column])
            dk[:, column].baddbmm_(ds.mT, q_tile)
        dq[:, :, rows] = dq_tile.mul_(rule.factor).view(dq[:, :, rows].shape)
    return by_token(dq, q), by_token(dk, k), by_token(dv, v)


def grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[batch, heads, Q, hs] as [batch * kv_heads, heads per KV head, Q, hs], to compute with."""
    result: torch.Tensor = _to_work(x).unflatten(1, (kv_heads, -1)).flatten(0, 1)
    return result


def ungrouped(x: torch.Tensor) -> torch.Tensor:
    """[batch, kv_heads, K, hs] as [batch * kv_heads, K, hs], to compute with."""
    return _to_work(x).flatten(0, 1)


def _to_work(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def by_token(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x, grouped or not, in the shape and dtype of `like` [batch, heads, tokens, hs], token by token in memory."""
    batch, heads, tokens, size = like.shape
    result: torch.Tensor = torch.empty((batch, tokens, heads, size), dtype=like.dtype).transpose(1, 2)
    result.copy_(x.view(like.shape))
    return result


def tiles(rule: Rule, num_queries: int, num_keys: int) -> Iterator[tuple[slice, list[slice]]]:
    """Tiles of queries, each with the tiles of the keys that any of its rows sees."""
    for start in range(0, num_queries, QUERY_TILE):
        rows = slice(start, min(start + QUERY_TILE, num_queries))
        first = rows.start + num_keys - num_queries
        low = max(first - rule.window + 1, 0) if rule.window else 0
        high = rows.stop + num_keys - num_queries if rule.causal else num_keys
        yield rows, [slice(at, min(at + KEY_TILE, high)) for at in range(low, high, KEY_TILE)]


def unseen(rule: Rule, rows: slice, column: slice, shift: int) -> torch.Tensor | None:
    """[queries, keys] of a tile, true where the row does not see the key; None where all see all. shift: the position
    of query 0.
    """
    first, last = rows.start + shift, rows.stop - 1 + shift
    if not rule.causal or (column.stop - 1 <= first and (not rule.window or column.start > last - rule.window)):
        return None
    positions, places = torch.arange(first, last + 1)[:, None], torch.arange(column.start, column.stop)
    found = places > positions
    return found | (places <= positions - rule.window) if rule.window else found


def logits(q_tile: torch.Tensor, keys: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Scores [pairs, heads per KV head * queries, keys] of queries that have been multiplied by rule.factor."""
    s = torch.bmm(q_tile, keys.mT)
    return s.tanh_().mul_(rule.softcap) if rule.softcap else s


def hide(s: torch.Tensor, hidden: torch.Tensor | None, value: float) -> None:
    """Set what is hidden, for every head of the group, in place."""
    if hidden is not None:
        s.unflatten(1, (-1, len(hidden))).masked_fill_(hidden, value)


def fold(
    acc: torch.Tensor, peak: torch.Tensor, total: torch.Tensor, s: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take a tile's scores, which are overwritten, into the running (weighted sum, peak, sum of exponentials)."""
    higher = torch.maximum(peak, s.amax(2, keepdim=True))
    p = s.sub_(higher).exp_()
    fade = peak.sub_(higher).exp_()
    return acc.mul_(fade).baddbmm_(p, values), higher, total.mul_(fade).add_(p.sum(2, keepdim=True))


def weights(s: torch.Tensor, lse: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """The probabilities again, from scores and lse [pairs, rows, 1]."""
    p = (s - lse).exp_()
    hide(p, hidden, 0.0)
    return p


def dlogits(s: torch.Tensor, p: torch.Tensor, dp: torch.Tensor, delta: torch.Tensor, rule: Rule) -> torch.Tensor:
    """The gradient of what `logits` multiplied, in place of dp = dout v^T; s: the scores, hidden ones as they were."""
    ds = dp.sub_(delta).mul_(p)
    return ds.mul_(s.square().mul_(-1 / rule.softcap).add_(rule.softcap)) if rule.softcap else ds
