"""Tensors of one step, made from a `Batch`: vectorised, no Python loop over tokens.

Owns the per-row block tables of this shard and the last token each row sampled (for batches scheduled before that
token was known). A `ForwardInput` is made, used and dropped within one step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.workers.batch import UNKNOWN_TOKEN, Batch

ROW_MULTIPLE = 16  # matmul rows are padded to this in deterministic mode (DESIGN.md section 9)


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """input_ids, rope_positions, slot_mapping: int64 [num_rows], rows past `num_tokens` are padding (slot -1);
    rope_positions: rows of the RoPE tables (the position, or the row of its long-prompt twin);
    sample_rows: int64 [num_samples], row whose hidden state yields each sampled token; plan: attention of this step.
    """

    input_ids: torch.Tensor
    rope_positions: torch.Tensor
    slot_mapping: torch.Tensor
    sample_rows: torch.Tensor
    num_tokens: int
    plan: ops.AttentionPlan


class InputBuilder:
    """Turns batches into `ForwardInput`s. One per shard.

    max_blocks: blocks of the longest sequence; pad_rows: pad to multiples of ROW_MULTIPLE (deterministic mode).
    """

    def __init__(self, layout: KVLayout, num_heads: int, max_num_seqs: int, max_blocks: int, *, pad_rows: bool) -> None:
        self._layout = layout
        self._num_heads = num_heads
        self._pad_rows = pad_rows
        self._tables: npt.NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.last_tokens: npt.NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)

    def build(self, batch: Batch) -> ForwardInput:
        """Apply the batch's block updates and lay its tokens out row by row, sequences one after another."""
        for row, first, blocks in batch.block_updates:
            self._tables[row, first : first + len(blocks)] = blocks
        rows = np.asarray(batch.rows, dtype=np.int64)
        starts = np.asarray(batch.starts, dtype=np.int64)
        counts = np.asarray(batch.counts, dtype=np.int64)
        ends = np.cumsum(counts)
        num_tokens = int(ends[-1])
        entry_of = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(num_tokens) - np.repeat(ends - counts, counts) + starts[entry_of]
        token_ids = np.asarray(batch.token_ids, dtype=np.int64)
        unknown = token_ids == UNKNOWN_TOKEN
        if unknown.any():
            token_ids = np.where(unknown, self.last_tokens[rows[entry_of]], token_ids)
        context_lens = starts + counts
        block_tokens = self._layout.block_tokens
        used = int(-(-context_lens.max() // block_tokens))
        tables = np.ascontiguousarray(self._tables[rows, :used])
        slots = tables[entry_of, positions // block_tokens].astype(np.int64) * block_tokens + positions % block_tokens
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        query_start[1:] = ends
        plan = ops.plan_attention(
            torch.from_numpy(tables),
            torch.from_numpy(query_start),
            torch.from_numpy(context_lens.astype(np.int32)),
            self._layout,
            self._num_heads,
        )
        padding = -num_tokens % ROW_MULTIPLE if self._pad_rows else 0
        return ForwardInput(
            input_ids=_padded(token_ids, padding, 0),
            rope_positions=_padded(positions + np.asarray(batch.rope_offsets)[entry_of], padding, 0),
            slot_mapping=_padded(slots, padding, -1),
            sample_rows=torch.from_numpy(ends[batch.sampling] - 1),
            num_tokens=num_tokens,
            plan=plan,
        )


def _padded(values: npt.NDArray[np.int64], padding: int, fill: int) -> torch.Tensor:
    if padding:
        values = np.concatenate([values, np.full(padding, fill, dtype=np.int64)])
    return torch.from_numpy(values)
