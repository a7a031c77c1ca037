"""Attention over KV that lies in several places, a range of pieces at a time, for sequences larger than their device.

Owns: where the blocks of one sequence lie (`Places`), the state in which a walk over its keys is interrupted, and the
walk itself. Does not own the memory, nor who may change it: the caller keeps every block of a walk as it is until the
walk has returned.

A row's keys are walked in pieces of PIECE_TOKENS, in order, each folded into the row's state (sums, maximum, total).
Walks over [0, a), [a, b), ... therefore give the same bits as `ops.paged_attention` over all of them at once, with
Triton as that of a deterministic plan, wherever the blocks lie and wherever the walks are cut. A state means the same
to every back end, so one may go on where another stopped; then values are the same, not bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tournant.kernels import ops, reference
from tournant.kernels.checks import check_heads, refuse
from tournant.kernels.cpu.native import NativeKernels
from tournant.kernels.layout import KV_FORMS, KVLayout
from tournant.kernels.plan import PARTIAL_EXTRA, PIECE_TOKENS, AttentionPlan

_LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Places:
    """Block i of a sequence is `ids[i]` of `tensors[sources[i]]`.

    tensors: at most three, shaped as KVLayout says, of equal KV heads, block tokens, head size and dtype, each with as
    many layers as it likes, dense within a layer of a block; sources, ids: int64 [blocks]. A block that no walk needs
    may have any source and id. packed: of `pack_table`, for those who walk on a GPU in many layers, else None.
    """

    tensors: tuple[torch.Tensor, ...]
    sources: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    packed: torch.Tensor | None = None

    def strided(self, layers: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where the K of layer `layers[s]` of block 0 of each tensor lies, and bytes from block to block."""
        pairs = zip(self.tensors, layers, strict=True)
        bases = [tensor.data_ptr() + layer * tensor.stride(1) * tensor.itemsize for tensor, layer in pairs]
        return np.asarray(bases), np.asarray([tensor.stride(0) * tensor.itemsize for tensor in self.tensors])

    def addresses(self, layers: Sequence[int]) -> npt.NDArray[np.int64]:
        """Of the K of layer `layers[s]` of every block, s its source. For tensors on the CPU."""
        bases, strides = self.strided(layers)
        return np.asarray(bases[self.sources] + self.ids * strides[self.sources], dtype=np.int64)


def pack_table(sources: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Where the blocks of a sequence lie, as kernels of a GPU read it: int32 [blocks] on `device`."""
    table = torch.from_numpy((ids * 4 + sources).astype(np.int32))
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)


def plan_pieces(
    num_queries: int, context_len: int, layout: KVLayout, num_heads: int, first: int, end: int
) -> AttentionPlan:
    """A walk of one sequence: its last `num_queries` of `context_len` positions over pieces [first, end) of its keys.

    end: at most the number of pieces; walks of a sequence must cover its pieces once, in order. Raises ValueError.
    """
    pieces = -(-context_len // PIECE_TOKENS)
    if not 0 <= first < end <= pieces:
        raise ValueError(f"pieces {first} to {end} of {pieces}; a walk has at least one, and only those there are")
    tables = np.zeros((1, -(-context_len // layout.block_tokens)), np.int32)
    plan = ops.plan_attention(tables, [0, num_queries], [context_len], layout, num_heads, deterministic=True)
    plan.pieces = (first, end)
    return plan


def new_state(num_queries: int, num_heads: int, head_size: int, device: torch.device) -> torch.Tensor:
    """Room for the states of a sequence's rows between walks; what is in it before the first walk does not matter."""
    return torch.zeros(num_queries, num_heads, head_size + PARTIAL_EXTRA, dtype=torch.float32, device=device)


def walk(
    out: torch.Tensor,
    q: torch.Tensor,
    places: Places,
    layers: Sequence[int],
    plan: AttentionPlan,
    scale: float,
    state: torch.Tensor,
    *,
    window: int = 0,
    softcap: float = 0.0,
    goes_on: bool = False,
    on_cpu: bool = False,
) -> None:
    """Go on with the attention of a sequence's rows over the pieces of `plan`; the walk over the last piece of a row
    writes it to `out`.

    out, q [num_queries, heads, hs], rows may be strided; layers: of each of places' tensors, the one to read; state: of
    `new_state`, the same for all walks of these rows. scale, window, softcap: as of `ops.paged_attention`. goes_on: the
    state counts even for a walk that begins at piece 0, so that walks may come in any order but that the last piece is
    walked last; the bits are then those of that order. on_cpu: by what serves the CPU beside a GPU. All tensors are on
    one device. Raises ValueError; then nothing has changed.
    """
    _check(out, q, places, layers, plan, state)
    kernels = ops.cpu_kernels() if on_cpu else ops.kernels_for(q)
    in_c = isinstance(kernels, NativeKernels)
    if in_c and not (goes_on and plan.pieces[0] == 0):
        tensor = places.tensors[0]
        addresses = places.addresses(layers)
        kernels.walk_pieces(out, q, tensor, addresses, plan, scale, window, softcap, state)
    elif in_c or kernels is reference:
        _walk_in_torch(out, q, places, layers, plan, scale, window, softcap, state, goes_on)
    else:
        packed = pack_table(places.sources, places.ids, q.device) if places.packed is None else places.packed
        how = (packed, plan, scale, window, softcap, state)
        kernels.walk_pieces(out, q, places.tensors, layers, *how, goes_on=goes_on)


def _check(
    out: torch.Tensor,
    q: torch.Tensor,
    places: Places,
    layers: Sequence[int],
    plan: AttentionPlan,
    state: torch.Tensor,
) -> None:
    layout, first, (begin, end) = plan.layout, places.tensors[0], plan.pieces
    form = (layout.num_kv_heads, layout.block_tokens, layout.head_size)
    for tensor, layer in zip(places.tensors, layers, strict=True):
        dense = not len(tensor) or tensor[0, 0].is_contiguous()
        if tensor.shape[2:] != (2, *form) or not dense or tensor.dtype not in KV_FORMS:
            raise refuse("a place", tensor, f"of the plan's layout {layout}")
        if tensor.dtype != first.dtype or tensor.device != q.device or not 0 <= layer < tensor.shape[1]:
            raise refuse("a place", tensor, f"{first.dtype} on {q.device} with a layer {layer}")
    if first.dtype == torch.float8_e4m3fn:
        raise ValueError("a place is float8_e4m3fn, whose scales do not travel with its blocks; use another form")
    check_heads("q", q, plan.num_tokens, plan.num_heads, first, q.dtype)
    check_heads("out", out, plan.num_tokens, plan.num_heads, first, q.dtype)
    wanted = (plan.num_tokens, plan.num_heads, layout.head_size + PARTIAL_EXTRA)
    if state.shape != wanted or state.dtype != torch.float32 or not state.is_contiguous():
        raise refuse("state", state, f"dense float32 {wanted}")
    step = PIECE_TOKENS // layout.block_tokens
    blocks = slice(begin * step, min(end * step, plan.block_tables.shape[1]))
    if len(places.sources) < blocks.stop or len(places.ids) != len(places.sources):
        raise ValueError(f"places of {len(places.ids)} blocks; this walk ends at block {blocks.stop}")
    sources, ids = places.sources[blocks], places.ids[blocks]
    if sources.min() < 0 or sources.max() >= len(places.tensors):
        raise ValueError(f"a block has source {sources.max()}; there are {len(places.tensors)}")
    sizes = np.asarray([len(tensor) for tensor in places.tensors])
    if (ids < 0).any() or (ids >= sizes[sources]).any():
        bad = int(((ids < 0) | (ids >= sizes[sources])).argmax())
        raise ValueError(f"block {blocks.start + bad} is {ids[bad]} of a tensor of {sizes[sources[bad]]} blocks")


def _walk_in_torch(
    out: torch.Tensor,
    q: torch.Tensor,
    places: Places,
    layers: Sequence[int],
    plan: AttentionPlan,
    scale: float,
    window: int,
    softcap: float,
    state: torch.Tensor,
    goes_on: bool,
) -> None:
    """The twin, on any device, in float32: logits to base 2, as the C kernels have them."""
    layout, count, context = plan.layout, plan.num_tokens, int(plan.context_lens[0])
    size, group, tokens = layout.head_size, plan.num_heads // layout.num_kv_heads, layout.block_tokens
    sums, maximum, total = state[..., :size], state[..., size], state[..., size + 1]
    position = torch.arange(context - count, context, device=q.device)
    begin, end = plan.pieces
    if begin == 0 and not goes_on:
        total.zero_()
    for piece in range(begin, end):
        keys = torch.arange(piece * PIECE_TOKENS, min((piece + 1) * PIECE_TOKENS, context), device=q.device)
        blocks = range(piece * PIECE_TOKENS // tokens, -(-(int(keys[-1]) + 1) // tokens))
        images = [places.tensors[s][i, layers[s]] for s, i in ((places.sources[b], places.ids[b]) for b in blocks)]
        k, v = torch.stack(images).float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : len(keys)]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = torch.einsum("qhd,hkd->qhk", q.float(), k) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        hidden = keys > position[:, None]
        if window:
            hidden |= keys <= position[:, None] - window
        scores = (scores * _LOG2E).masked_fill_(hidden[:, None, :], float("-inf"))
        seen = ~hidden.all(-1)[:, None].expand_as(total)
        peak = torch.where(seen, scores.amax(-1), 0)
        weights = torch.exp2(scores - peak[..., None])
        top = torch.where(total > 0, torch.maximum(maximum, peak), peak)
        old = torch.where(total > 0, torch.exp2(maximum - top), 0)
        new = torch.exp2(peak - top)
        folded = torch.where(old[..., None] > 0, sums * old[..., None], 0)
        folded += torch.einsum("qhk,hkd->qhd", weights, v) * new[..., None]
        sums.copy_(torch.where(seen[..., None], folded, sums))
        total.copy_(torch.where(seen, total * old + weights.sum(-1) * new, total))
        maximum.copy_(torch.where(seen, top, maximum))
    if end * PIECE_TOKENS >= context:
        out.copy_(sums / total[..., None])
