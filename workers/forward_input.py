"""Tensors of one step, made from a `Batch`: vectorised, no Python loop over tokens.

Owns the per-row block tables of this shard and, on the device, the last token each row sampled (for batches scheduled
before that token was known: it may not have reached the CPU yet). A `ForwardInput` is made, used and dropped within one
step.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import BlocksBelow
from tournant.workers.batch import UNKNOWN_TOKEN, Batch
from tournant.workers.device import Device
from tournant.workers.overflow_attention import InPlaceStep, LongRows, OverflowAttention, OverflowStep

ROW_MULTIPLE = 16  # matmul rows are padded to this in deterministic mode (DESIGN.md section 9)


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """input_ids, rope_positions, slot_mapping: int64 [num_rows], rows past `num_tokens` are padding (slot -1);
    rope_positions: rows of the RoPE tables (the position, or the row of its long-prompt twin);
    sample_rows: int64 [num_samples], row whose hidden state yields each sampled token; sample_seqs: int64
    [num_samples], row of the batch (`Batch.rows`) that it belongs to; only_decodes: every sequence has one token;
    plan: attention of this step; overflow: its attention instead, when some sequences have blocks below the device;
    in_place: when the plan names such blocks. Tensors are on the device.
    """

    input_ids: torch.Tensor
    rope_positions: torch.Tensor
    slot_mapping: torch.Tensor
    sample_rows: torch.Tensor
    sample_seqs: torch.Tensor
    num_tokens: int
    only_decodes: bool
    plan: ops.AttentionPlan
    overflow: OverflowStep | None = None
    in_place: InPlaceStep | None = None


class InputBuilder:
    """Turns batches into `ForwardInput`s. One per shard.

    max_blocks: blocks of the longest sequence; deterministic: pad to multiples of ROW_MULTIPLE, plan accordingly.
    last_tokens: int64 [max_num_seqs] on the device; overflow: what attends where sequences have blocks below, None
    where none can.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_heads: int,
        max_num_seqs: int,
        max_blocks: int,
        device: Device,
        *,
        deterministic: bool,
    ) -> None:
        self._layout = layout
        self._num_heads = num_heads
        self._device = device
        self._deterministic = deterministic
        self.overflow: OverflowAttention | None = None
        self._tables: npt.NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device.torch_device)

    def digest(self, batch: Batch) -> int:
        """xxh64 of the block tables of the batch's rows, its updates applied: equal on all shards of a replica."""
        self._update(batch)
        longest = max(start + count for start, count in zip(batch.starts, batch.counts, strict=True))
        tables = self._tables[batch.rows, : -(-longest // self._layout.block_tokens)]
        return xxhash.xxh64_intdigest(np.ascontiguousarray(tables).data)

    def _update(self, batch: Batch) -> None:
        for row, first, blocks in batch.block_updates:
            self._tables[row, first : first + len(blocks)] = blocks

    def build(self, batch: Batch) -> ForwardInput:
        """Apply the batch's block updates and lay its tokens out row by row, sequences one after another."""
        self._update(batch)
        rows = np.asarray(batch.rows, dtype=np.int64)
        starts = np.asarray(batch.starts, dtype=np.int64)
        counts = np.asarray(batch.counts, dtype=np.int64)
        ends = np.cumsum(counts)
        num_tokens = int(ends[-1])
        entry_of = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(num_tokens) - np.repeat(ends - counts, counts) + starts[entry_of]
        token_ids = np.asarray(batch.token_ids, dtype=np.int64)
        unknown = (token_ids == UNKNOWN_TOKEN).nonzero()[0]
        context_lens = starts + counts
        block_tokens = self._layout.block_tokens
        used = int(-(-context_lens.max() // block_tokens))
        tables = np.ascontiguousarray(self._tables[rows, :used])
        slots = tables[entry_of, positions // block_tokens].astype(np.int64) * block_tokens + positions % block_tokens
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        query_start[1:] = ends
        overflow, in_place = self._overflow_step(tables, query_start, context_lens)
        hot = slice(0, len(rows) if overflow is None else 0)
        below = None if in_place is None else in_place.below
        plan = self._plan(tables[hot], query_start[: hot.stop + 1], context_lens[hot], below)
        padding = -num_tokens % ROW_MULTIPLE if self._deterministic else 0
        input_ids, rope_positions, slot_mapping, sample_rows, sample_seqs, unknown_at, unknown_seqs = (
            self._device.upload(
                [
                    _padded(token_ids, padding, 0),
                    _padded(positions + np.asarray(batch.rope_offsets)[entry_of], padding, 0),
                    _padded(slots, padding, -1),
                    ends[batch.sampling] - 1,
                    rows[batch.sampling],
                    unknown,
                    rows[entry_of[unknown]],
                ]
            )
        )
        if len(unknown):
            input_ids.index_copy_(0, unknown_at, self.last_tokens.index_select(0, unknown_seqs))
        return ForwardInput(
            input_ids=input_ids,
            rope_positions=rope_positions,
            slot_mapping=slot_mapping,
            sample_rows=sample_rows,
            sample_seqs=sample_seqs,
            num_tokens=num_tokens,
            only_decodes=num_tokens == len(rows) and overflow is None and in_place is None,
            plan=plan,
            overflow=overflow,
            in_place=in_place,
        )

    def _plan(
        self,
        tables: npt.NDArray[np.int32],
        query_start: npt.NDArray[np.int32],
        context_lens: npt.NDArray[np.int64],
        below: BlocksBelow | None = None,
    ) -> ops.AttentionPlan:
        return ops.plan_attention(
            torch.from_numpy(tables),
            torch.from_numpy(query_start),
            torch.from_numpy(context_lens.astype(np.int32)),
            self._layout,
            self._num_heads,
            deterministic=self._deterministic,
            below=below,
        )

    def _overflow_step(
        self, tables: npt.NDArray[np.int32], query_start: npt.NDArray[np.int32], context_lens: npt.NDArray[np.int64]
    ) -> tuple[OverflowStep | None, InPlaceStep | None]:
        """One of them for a step in which a sequence has blocks below."""
        found = None if self.overflow is None else self.overflow.find(tables, context_lens)
        if self.overflow is None or found is None or not found.any():
            return None, None
        if (in_place := self.overflow.in_place(tables, found, context_lens, np.diff(query_start))) is not None:
            return None, in_place
        below = np.asarray(found.any(axis=1), dtype=np.bool_)
        hot: list[tuple[slice, ops.AttentionPlan]] = []
        long: list[LongRows] = []
        edges = np.flatnonzero(np.diff(below, prepend=~below[:1], append=~below[-1:]))
        for first, end in itertools.pairwise(edges.tolist()):
            if not below[first]:
                starts = query_start[first : end + 1]
                plan = self._plan(tables[first:end], starts - starts[0], context_lens[first:end])
                hot.append((slice(int(starts[0]), int(starts[-1])), plan))
                continue
            for entry in range(first, end):
                rows = slice(int(query_start[entry]), int(query_start[entry + 1]))
                context = int(context_lens[entry])
                table = tables[entry, : -(-context // self._layout.block_tokens)].astype(np.int64)
                long.append(LongRows(entry, rows, context, table))
        return self.overflow.step(hot, long), None

    def remember(self, step: ForwardInput, tokens: torch.Tensor) -> None:
        """Note the tokens [num_samples] of a step, on the device, for later batches that do not know them."""
        self.last_tokens.index_copy_(0, step.sample_seqs, tokens)


def _padded(values: npt.NDArray[np.int64], padding: int, fill: int) -> npt.NDArray[np.int64]:
    return np.concatenate([values, np.full(padding, fill, dtype=np.int64)]) if padding else values
