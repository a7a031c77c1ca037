"""The description of one step as the attention kernels read it: device arrays made from an `AttentionPlan`.

Owns: which rows which kernel serves, their tiles, and the scratch memory of split KV. Everything is uploaded in one
copy. A step's work is data, not launch geometry, so a `DevicePlan` made with `static_decode_plan` can be refilled
(`refill`) under a captured CUDA graph.

Invariants:
 1. Every query row belongs to exactly one tile of one kernel; a tile holds queries of one sequence.
 2. Sections of the packed array begin at multiples of 16 bytes: Triton compiles anew when an alignment changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import AttentionPlan, Int32Array
from tournant.kernels.triton.card import Card
from tournant.kernels.triton.tiles import TileShape, decode_shape, decode_splits, prefill_shape, prefill_splits

_ALIGN = 4  # int32 entries in 16 bytes


@dataclass(frozen=True, slots=True)
class Work:
    """One launch. tiles int32 [T, 4]: sequence, first row of q, number of rows, position of the first row; 0 rows mark
    an unused tile, position -1 a padding row, which gets zeros. partial float32 [T * queries, heads, splits,
    head_size] and partial_lse [T * queries, heads, splits] when KV is split, else None.
    """

    tiles: torch.Tensor
    shape: TileShape
    partial: torch.Tensor | None
    partial_lse: torch.Tensor | None

    @property
    def num_splits(self) -> int:
        """Parts of each sequence's KV."""
        return 1 if self.partial is None else self.partial.shape[2]


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """block_tables int32 [S, max_blocks] and the work of both kernels, on the device."""

    block_tables: torch.Tensor
    decode: Work | None
    prefill: Work | None


def _upload(arrays: list[npt.NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """All arrays in one copy, which does not wait when the device is a GPU."""
    ends = np.cumsum([-(-array.size // _ALIGN) * _ALIGN for array in arrays]).tolist()
    packed = torch.empty(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for array, end in zip(arrays, ends, strict=True):
        start = end - -(-array.size // _ALIGN) * _ALIGN
        host[start : start + array.size] = array.ravel()
    moved = packed.to(device, non_blocking=True)
    starts = [0, *ends[:-1]]
    return [moved[at : at + array.size].view(array.shape) for at, array in zip(starts, arrays, strict=True)]


def _cut(seqs: Int32Array, plan: AttentionPlan, queries: int) -> Int32Array:
    """Tiles of at most `queries` rows of the given sequences, the longest contexts first: they take longest."""
    counts = plan.query_start[seqs + 1] - plan.query_start[seqs]
    per_seq = -(-counts // queries)
    owner = np.repeat(np.arange(len(seqs)), per_seq)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(per_seq) - per_seq, per_seq)
    first = within * queries
    tiles = np.stack(
        [
            seqs[owner],
            plan.query_start[seqs][owner] + first,
            np.minimum(counts[owner] - first, queries),
            (plan.context_lens[seqs] - counts)[owner] + first,
        ],
        axis=1,
    ).astype(np.int32)
    return tiles[np.argsort(-tiles[:, 3], kind="stable")]


def _work(
    tiles: torch.Tensor, shape: TileShape, splits: int, layout: KVLayout, num_heads: int, device: torch.device
) -> Work:
    if splits == 1:
        return Work(tiles, shape, None, None)
    rows = len(tiles) * (shape.block_m // (num_heads // layout.num_kv_heads))
    partial = torch.empty(rows, num_heads, splits, layout.head_size, dtype=torch.float32, device=device)
    return Work(tiles, shape, partial, torch.empty(partial.shape[:3], dtype=torch.float32, device=device))


def device_plan(
    plan: AttentionPlan,
    card: Card,
    device: torch.device,
    *,
    decode: TileShape | None = None,
    prefill: TileShape | None = None,
) -> DevicePlan:
    """Sort the step's rows into the two kernels' tiles and upload them.

    A sequence with one query row is served by paged_decode, any other by paged_prefill. In a deterministic plan all
    rows go through paged_prefill with one tile size and no splits, so that a row's bits do not depend on its step.
    decode and prefill: tiles to try instead of those that tiles.py chooses.
    """
    layout, group, deterministic = plan.layout, plan.num_heads // plan.layout.num_kv_heads, plan.deterministic
    bytes_, size = layout.dtype.itemsize, layout.head_size
    counts = np.diff(plan.query_start)
    order = np.arange(len(counts), dtype=np.int32)
    decodes = order[(counts == 1) & (not deterministic)]
    prefills = order[(counts > 1) | ((counts == 1) & deterministic)]
    most = 1 << 20 if deterministic else int(counts.max(initial=1))
    d_shape = decode or decode_shape(card, size, bytes_, group)
    p_shape = prefill or prefill_shape(card, size, bytes_, group, most)
    d_tiles, p_tiles = _cut(decodes, plan, 1), _cut(prefills, plan, p_shape.block_m // group)
    tables, d_device, p_device = _upload([plan.block_tables, d_tiles, p_tiles], device)

    def work(tiles: torch.Tensor, host: Int32Array, shape: TileShape, splits: Callable[..., int]) -> Work | None:
        if not len(host):
            return None
        longest = int((host[:, 2] + host[:, 3]).max())
        parts = 1 if deterministic else splits(card, len(host) * layout.num_kv_heads, longest)
        return _work(tiles, shape, parts, layout, plan.num_heads, device)

    return DevicePlan(
        tables,
        work(d_device, d_tiles, d_shape, decode_splits),
        work(p_device, p_tiles, p_shape, prefill_splits),
    )


def static_decode_plan(
    layout: KVLayout, num_heads: int, num_seqs: int, max_blocks: int, card: Card, device: torch.device
) -> DevicePlan:
    """A plan for `num_seqs` decoding sequences of up to max_blocks blocks whose arrays stay where they are: capture it
    in a CUDA graph, then `refill` and replay. As made, every row is padding.
    """
    group = num_heads // layout.num_kv_heads
    shape = decode_shape(card, layout.head_size, layout.dtype.itemsize, group)
    splits = decode_splits(card, num_seqs * layout.num_kv_heads, max_blocks * layout.block_tokens)
    tiles = torch.empty(num_seqs, 4, dtype=torch.int32, device=device)
    tables = torch.zeros(num_seqs, max_blocks, dtype=torch.int32, device=device)
    plan = DevicePlan(tables, _work(tiles, shape, splits, layout, num_heads, device), None)
    tiles.copy_(torch.from_numpy(_padding(0, num_seqs)))
    return plan


def _padding(start: int, stop: int) -> Int32Array:
    rows = np.arange(start, stop, dtype=np.int32)
    return np.stack([rows, rows, np.ones_like(rows), np.full_like(rows, -1)], axis=1)


def refill(static: DevicePlan, plan: AttentionPlan) -> None:
    """Put a step of at most as many sequences, all with one query row, into a static plan, on the current stream.

    Rows beyond the step's are padding: they get zeros. Raises ValueError when the step does not fit; then nothing has
    changed.
    """
    work, (rows, blocks) = static.decode, static.block_tables.shape
    num_seqs, used = plan.block_tables.shape
    if work is None or num_seqs > rows or used > blocks or (np.diff(plan.query_start) != 1).any():
        raise ValueError(
            f"a step of {plan.num_tokens} rows in {num_seqs} sequences of up to {used} blocks does not fit a static "
            f"plan of {rows} decoding sequences of {blocks} blocks"
        )
    order = np.arange(num_seqs, dtype=np.int32)
    tiles = np.stack([order, order, np.ones_like(order), plan.context_lens - 1], axis=1)
    tiles = np.concatenate([tiles, _padding(num_seqs, rows)]).astype(np.int32)
    moved_tables, moved_tiles = _upload([plan.block_tables, tiles], static.block_tables.device)
    static.block_tables[:num_seqs, :used].copy_(moved_tables, non_blocking=True)
    work.tiles.copy_(moved_tiles, non_blocking=True)
