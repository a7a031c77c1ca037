"""Plain-PyTorch twins of what only the GPU back end does: windows, soft-caps, log-sum-exps, fp8 KV, staging copies.

Same signatures as the fast kernels; clear before fast; float32 arithmetic. The base set is in reference.py.
"""

from __future__ import annotations

import torch

from tournant.kernels.plan import AttentionPlan

E4M3_MAX, E5M2_MAX = 448.0, 57344.0
MIN_SCALE_EXPONENT = -60


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, *, unit_offset: bool = False
) -> torch.Tensor:
    """Norm over the last axis of x; with unit_offset times (1 + weight) in float32 before the only rounding."""
    if residual is not None:
        residual += x
        x = residual
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * (1 + weight.float())).to(x.dtype) if unit_offset else scaled.to(x.dtype) * weight


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up of gate_up[N, 2I] = gate | up with the tanh approximation, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def rope(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """Rotate the rows of x [N, heads, hs] whose position lies in the table into out."""
    rows = ((positions >= 0) & (positions < len(cos_sin))).nonzero().squeeze(-1)
    cos, sin = cos_sin[positions[rows].long()].unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    low, high, rest = x[rows].float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    out[rows] = torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1).to(out.dtype)


def store_kv_e5m2(
    k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor
) -> None:
    """Write k and v [N, kv_heads, hs] as e5m2, saturated; slots outside the pool are skipped."""
    block_tokens = kv_cache.shape[4]
    rows = ((slot_mapping >= 0) & (slot_mapping < len(kv_cache) * block_tokens)).nonzero().squeeze(-1)
    blocks, offsets = slot_mapping[rows] // block_tokens, slot_mapping[rows] % block_tokens
    for which, x in enumerate((k, v)):
        codes = x[rows].float().clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2)
        kv_cache.view(torch.uint8)[blocks, layer, which, :, offsets] = codes.view(torch.uint8)


def _e4m3_scale(largest: torch.Tensor) -> torch.Tensor:
    """The least power of two s with largest <= 448 s, at least 2^-60; elementwise."""
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [0.5, 1)
    needed = torch.where(mantissa > E4M3_MAX / 512, exponent - 8, exponent - 9)
    needed = torch.where(largest > 0, needed, MIN_SCALE_EXPONENT).clamp(min=MIN_SCALE_EXPONENT)
    return torch.ldexp(torch.ones_like(largest), needed)


def store_kv_e4m3(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
) -> None:
    """Write k and v as e4m3 codes of value / scale; kv_scales [blocks, layers, 2, kv_heads] grow as needed."""
    block_tokens = kv_cache.shape[4]
    valid = (slot_mapping >= 0) & (slot_mapping < len(kv_cache) * block_tokens)
    for block in (slot_mapping[valid] // block_tokens).unique().tolist():
        rows = (valid & (slot_mapping // block_tokens == block)).nonzero().squeeze(-1)
        offsets = slot_mapping[rows] % block_tokens
        first = int(offsets.min())
        for which, x in enumerate((k, v)):
            codes = kv_cache[block, layer, which]  # [kv_heads, block_tokens, hs]
            values = x[rows].float().transpose(0, 1)
            scale = _e4m3_scale(values.abs().amax(dim=(1, 2)))
            if first > 0:
                before = kv_scales[block, layer, which].clone()
                scale = torch.maximum(scale, before)
                old = codes[:, :first].float() * (before / scale)[:, None, None]
                codes[:, :first] = old.to(torch.float8_e4m3fn)
            kv_scales[block, layer, which] = scale
            scaled = (values / scale[:, None, None]).clamp(-E4M3_MAX, E4M3_MAX)
            codes.view(torch.uint8)[:, offsets] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def paged_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    plan: AttentionPlan,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    lse: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """`reference.paged_attention` with what kernels/triton/paged_decode.py adds to it."""
    group = plan.num_heads // plan.layout.num_kv_heads
    block_tokens = plan.layout.block_tokens
    out[plan.num_tokens :] = 0
    if lse is not None:
        lse[plan.num_tokens :] = float("-inf")
    for seq, context in enumerate(plan.context_lens.tolist()):
        first, last = plan.query_start[seq : seq + 2].tolist()
        if first == last:
            continue
        table = torch.from_numpy(plan.block_tables[seq, : -(-context // block_tokens)]).long()
        blocks = kv_cache[table, layer].float()  # [blocks, 2, kv_heads, block_tokens, hs]
        if kv_scales is not None:
            blocks *= kv_scales[table, layer][..., None, None]
        keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,hkd->hqk", q[first:last].float(), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        position, token = torch.arange(context - (last - first), context)[:, None], torch.arange(context)
        hidden = (token > position) | ((token <= position - window) if window else torch.tensor(False))
        scores.masked_fill_(hidden, float("-inf"))
        out[first:last] = torch.einsum("hqk,hkd->qhd", scores.softmax(-1), values).to(out.dtype)
        if lse is not None:
            lse[first:last] = scores.logsumexp(-1).t()


def merge_states(
    out: torch.Tensor,
    lse: torch.Tensor,
    a: torch.Tensor,
    lse_a: torch.Tensor,
    b: torch.Tensor,
    lse_b: torch.Tensor,
) -> None:
    """Two attention results [N, heads, hs] over disjoint KV, with their log-sum-exps [N, heads], become one."""
    both = torch.logaddexp(lse_a, lse_b)
    merged = torch.zeros(a.shape)
    for part, weight in ((a, (lse_a - both).exp()), (b, (lse_b - both).exp())):
        merged += torch.where(weight[..., None] > 0, part.float() * weight[..., None], 0)
    out.copy_(merged)
    lse.copy_(both)


def gather_blocks(pool: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> None:
    """staging[i] = pool[ids[i]]; a negative id skips its place."""
    used = ids >= 0
    staging.view(torch.uint8)[: len(ids)][used] = pool.view(torch.uint8)[ids[used]]


def scatter_blocks(staging: torch.Tensor, ids: torch.Tensor, pool: torch.Tensor) -> None:
    """pool[ids[i]] = staging[i]; a negative id skips its place."""
    used = ids >= 0
    pool.view(torch.uint8)[ids[used]] = staging.view(torch.uint8)[: len(ids)][used]
