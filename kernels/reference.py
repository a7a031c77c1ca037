"""Plain-PyTorch twins of every kernel: the meaning of the fast ones, and the back end where no compiler is found.

Same signatures as the fast kernels; arguments were checked by `ops`. Clear before fast: loops over sequences are
allowed here. Activations and KV are bfloat16, float16 or float32; arithmetic is float32. The twins do not promise that
a row's bits are independent of its batch; the C back end does.
"""

from __future__ import annotations

import torch

from tournant.kernels.plan import AttentionPlan


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    """x[N, H] normalised in float32, rounded to its dtype, then times weight[H]; see `ops.rms_norm`."""
    if residual is not None:
        residual += x
        x = residual
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled.to(x.dtype) * weight) if weight.dtype == x.dtype else (scaled * weight).to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up[N, 2I] = gate | up, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate), the tanh form, * up of gate_up[N, 2I] = gate | up, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    low, high, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1).to(x.dtype)


def row_error(
    row: int,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
) -> ValueError:
    """The error for a row whose slot or position is out of range."""
    found, allowed = f"slot {int(slot_mapping[row])}", f"slots -1 to {kv_cache.shape[0] * kv_cache.shape[4] - 1}"
    if positions is not None and cos_sin is not None:
        found += f" at position {int(positions[row])}"
        allowed += f" and positions 0 to {len(cos_sin) - 1}"
    return ValueError(f"row {row} has {found}; allowed are {allowed}")


def store_kv(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor) -> None:
    """Write k and v [N, kv_heads, hs] to their token slots of one layer; slot -1 is skipped."""
    block_tokens = kv_cache.shape[4]
    bad = (slot_mapping < -1) | (slot_mapping >= len(kv_cache) * block_tokens)
    if bad.any():
        raise row_error(int(bad.nonzero()[0]), slot_mapping, kv_cache)
    rows = (slot_mapping >= 0).nonzero().squeeze(-1)
    slots = slot_mapping[rows]
    blocks, offsets = slots // block_tokens, slots % block_tokens
    kv_cache[blocks, layer, 0, :, offsets] = k[rows].to(kv_cache.dtype)
    kv_cache[blocks, layer, 1, :, offsets] = v[rows].to(kv_cache.dtype)


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
    """Rotate q in place, write rotated k and v to their token slots; rows with slot -1 are left alone."""
    real = slot_mapping >= 0
    bad = (slot_mapping < -1) | (slot_mapping >= len(kv_cache) * kv_cache.shape[4])
    bad |= real & ((positions < 0) | (positions >= len(cos_sin)))
    if bad.any():
        raise row_error(int(bad.nonzero()[0]), slot_mapping, kv_cache, positions, cos_sin)
    rows = real.nonzero().squeeze(-1)
    cos, sin = cos_sin[positions[rows].long()].unsqueeze(1).chunk(2, dim=-1)
    q[rows] = _rotated(q[rows], cos, sin)
    store_kv(_rotated(k[rows], cos, sin), v[rows], kv_cache, layer, slot_mapping[rows])


def copy_blocks(kv_cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy whole blocks src[i] to dst[i], all sources read before any destination is written."""
    kv_cache[dst] = kv_cache[src]


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
    """Causal attention of q[N, heads, hs] over the paged KV of its sequences, into out; see `ops.paged_attention`."""
    group = plan.num_heads // plan.layout.num_kv_heads
    block_tokens, device = plan.layout.block_tokens, kv_cache.device
    out[plan.num_tokens :] = 0
    for seq, context in enumerate(plan.context_lens.tolist()):
        first, last = plan.query_start[seq : seq + 2].tolist()
        if first == last:
            continue
        table = torch.from_numpy(plan.block_tables[seq, : -(-context // block_tokens)]).long().to(device)
        blocks = kv_cache[table, layer].float()  # [blocks, 2, kv_heads, block_tokens, hs]
        keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,hkd->hqk", q[first:last].float(), keys) * scale
        position = torch.arange(context - (last - first), context, device=device)
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        key = torch.arange(context, device=device)
        hidden = key > position[:, None]
        if window:
            hidden |= key <= position[:, None] - window
        scores.masked_fill_(hidden, float("-inf"))
        if lse is not None:
            lse[first:last] = scores.logsumexp(-1).t()
        out[first:last] = torch.einsum("hqk,hkd->qhd", scores.softmax(-1), values).to(out.dtype)
