"""Plain-PyTorch twins of every kernel: the meaning of the fast ones, and the back end where no compiler is found.

Same signatures as the fast kernels; arguments were checked by `ops`. Clear before fast: loops over sequences are
allowed here. Activations are bfloat16, float16 or float32, KV the same or fp8 (float8_e5m2, or float8_e4m3fn with
`kv_scales` of KVLayout.allocate_scales); arithmetic is float32. The twins do not promise that a row's bits are
independent of its batch; the C back end does. They refuse slots and positions out of range, which kernels on a GPU
leave alone: they cannot raise.
"""

from __future__ import annotations

import torch

from tournant.kernels.plan import AttentionPlan

E4M3_MAX, E5M2_MAX = 448.0, 57344.0
MIN_SCALE_EXPONENT = -60


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    """x normalised over its last axis in float32, rounded to its dtype, then times weight; see `ops.rms_norm`."""
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


def rope(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """Rotate the rows of x [N, heads, hs] whose position lies in the table into out, which may be x."""
    rows = ((positions >= 0) & (positions < len(cos_sin))).nonzero().squeeze(-1)
    cos, sin = cos_sin[positions[rows].long()].unsqueeze(1).chunk(2, dim=-1)
    out[rows] = _rotated(x[rows], cos, sin)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    *,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Write k and v [N, kv_heads, hs] to their token slots of one layer; slot -1 is skipped; e5m2 saturates."""
    block_tokens = kv_cache.shape[4]
    bad = (slot_mapping < -1) | (slot_mapping >= len(kv_cache) * block_tokens)
    if bad.any():
        raise row_error(int(bad.nonzero()[0]), slot_mapping, kv_cache)
    rows = (slot_mapping >= 0).nonzero().squeeze(-1)
    slots = slot_mapping[rows]
    if kv_scales is not None:
        _store_e4m3(k[rows], v[rows], kv_cache, kv_scales, layer, slots)
        return
    blocks, offsets = slots // block_tokens, slots % block_tokens
    for which, x in enumerate((k, v)):
        stored = x[rows].float().clamp(-E5M2_MAX, E5M2_MAX) if kv_cache.dtype == torch.float8_e5m2 else x[rows]
        target, values = kv_cache, stored.to(kv_cache.dtype)
        if kv_cache.itemsize == 1:  # torch cannot index fp8
            target, values = kv_cache.view(torch.uint8), values.view(torch.uint8)
        target[blocks, layer, which, :, offsets] = values


def _e4m3_scale(largest: torch.Tensor) -> torch.Tensor:
    """The least power of two s with largest <= 448 s, at least 2^-60; elementwise."""
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [0.5, 1)
    needed = torch.where(mantissa > E4M3_MAX / 512, exponent - 8, exponent - 9)
    needed = torch.where(largest > 0, needed, MIN_SCALE_EXPONENT).clamp(min=MIN_SCALE_EXPONENT)
    return torch.ldexp(torch.ones_like(largest), needed)


def _store_e4m3(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
) -> None:
    """Write codes of value / scale; kv_scales [blocks, layers, 2, kv_heads] grow as needed."""
    block_tokens = kv_cache.shape[4]
    for block in (slots // block_tokens).unique().tolist():
        rows = (slots // block_tokens == block).nonzero().squeeze(-1)
        offsets = slots[rows] % block_tokens
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
    """Rotate q in place, write rotated k and v to their token slots; rows with slot -1 are left alone."""
    real = slot_mapping >= 0
    bad = (slot_mapping < -1) | (slot_mapping >= len(kv_cache) * kv_cache.shape[4])
    bad |= real & ((positions < 0) | (positions >= len(cos_sin)))
    if bad.any():
        raise row_error(int(bad.nonzero()[0]), slot_mapping, kv_cache, positions, cos_sin)
    rows = real.nonzero().squeeze(-1)
    cos, sin = cos_sin[positions[rows].long()].unsqueeze(1).chunk(2, dim=-1)
    q[rows] = _rotated(q[rows], cos, sin)
    rotated, slots = _rotated(k[rows], cos, sin), slot_mapping[rows]
    store_kv(rotated, v[rows], kv_cache, layer, slots, kv_scales=kv_scales)


def copy_blocks(kv_cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy whole blocks src[i] to dst[i], all sources read before any destination is written."""
    kv_cache.view(torch.uint8)[dst] = kv_cache.view(torch.uint8)[src]


def gather_blocks(pool: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> None:
    """staging[i] = pool[ids[i]]; a negative id skips its place."""
    for place, block in enumerate(ids.tolist()):
        if block >= 0:
            staging[place].copy_(pool[block])


def scatter_blocks(staging: torch.Tensor, ids: torch.Tensor, pool: torch.Tensor) -> None:
    """pool[ids[i]] = staging[i]; a negative id skips its place."""
    for place, block in enumerate(ids.tolist()):
        if block >= 0:
            pool[block].copy_(staging[place])


def encode_blocks(pool: torch.Tensor, ids: torch.Tensor, images: torch.Tensor, dtype: torch.dtype) -> None:
    """images[i] = the fp8 image of pool[ids[i]]: codes, then (e4m3) scales; see `ops.encode_blocks`."""
    values, most = pool[ids].float(), E5M2_MAX
    if dtype == torch.float8_e4m3fn:
        most, scales = E4M3_MAX, _e4m3_scale(values.abs().amax(dim=(-2, -1)))
        values /= scales[..., None, None]
        images[:, -scales[0].nbytes :] = scales.flatten(1).view(torch.uint8)
    codes = values.clamp_(-most, most).to(dtype).flatten(1).view(torch.uint8)
    images[:, : codes.shape[1]] = codes


def decode_blocks(images: torch.Tensor, dtype: torch.dtype, ids: torch.Tensor, pool: torch.Tensor) -> None:
    """pool[ids[i]] = what images[i] is worth, rounded to the pool's dtype, at most its largest number."""
    shape, most = (len(ids), *pool.shape[1:]), torch.finfo(pool.dtype).max
    values = images[:, : pool[0].numel()].contiguous().view(dtype).view(shape).float()
    if dtype == torch.float8_e4m3fn:
        scales = images[:, pool[0].numel() :].contiguous().view(torch.float32)
        values *= scales.view(shape[:4])[..., None, None]
    pool[ids] = values.clamp_(-most, most).to(pool.dtype)


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
    """Causal attention of q[N, heads, hs] over the paged KV of its sequences, into out; see `ops.paged_attention`."""
    group = plan.num_heads // plan.layout.num_kv_heads
    block_tokens, device = plan.layout.block_tokens, kv_cache.device
    out[plan.num_tokens :] = 0
    if lse is not None:
        lse[plan.num_tokens :] = float("-inf")
    for seq, context in enumerate(plan.context_lens.tolist()):
        first, last = plan.query_start[seq : seq + 2].tolist()
        if first == last:
            continue
        table = torch.from_numpy(plan.block_tables[seq, : -(-context // block_tokens)]).long().to(device)
        blocks = _blocks_of(plan, kv_cache, table, layer).float()  # [blocks, 2, kv_heads, block_tokens, hs]
        if kv_scales is not None:
            blocks *= kv_scales[table, layer][..., None, None]
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


def _blocks_of(plan: AttentionPlan, kv_cache: torch.Tensor, table: torch.Tensor, layer: int) -> torch.Tensor:
    """A layer of blocks, wherever they lie."""
    if plan.below is None:
        return kv_cache[table, layer]
    below, is_below = plan.below, table >= plan.below.first
    blocks = kv_cache.new_empty(len(table), *kv_cache.shape[2:])
    blocks[~is_below] = kv_cache[table[~is_below], layer]
    blocks[is_below] = below.tensor[table[is_below] - below.first, layer]
    return blocks


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
    merged = torch.zeros(a.shape, device=a.device)
    for part, weight in ((a, (lse_a - both).exp()), (b, (lse_b - both).exp())):
        merged += torch.where(weight[..., None] > 0, part.float() * weight[..., None], 0)
    out.copy_(merged)
    lse.copy_(both)
