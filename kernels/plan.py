"""What paged attention needs to know about a step, checked once and shared by all layers of the step.

Owns: the checks of block tables, query ranges and context lengths, and the compact arrays that kernels read. Does not
own the KV tensor or the block tables' meaning beyond this step.

Invariants of a plan:
 1. Every block id that a kernel may read through it lies in [0, num_blocks_needed).
 2. Query rows of sequence s are the last `query_start[s+1] - query_start[s]` of its `context_lens[s]` positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tournant.kernels.layout import KVLayout

Int32Array = npt.NDArray[np.int32]
PIECE_TOKENS = 256  # keys of one piece: the unit of the fixed order of summation
PARTIAL_EXTRA = 16  # floats beside the sums of a row that is not finished


@dataclass(frozen=True, slots=True)
class BlocksBelow:
    """A second KV tensor of a step, in memory of the CPU: block ids from `first` on are its blocks, `first` is block 0.

    tensor: as KVLayout shapes it, of the first one's dtype, a layer of a block dense. Its blocks are whole and are only
    read.
    """

    first: int
    tensor: torch.Tensor


@dataclass(slots=True)
class AttentionPlan:
    """A checked step. Make it with `ops.plan_attention`; never change its arrays afterwards.

    block_tables int32 [S, max_blocks]; query_start int32 [S+1]; context_lens int32 [S]; num_tokens = query_start[S];
    num_blocks_needed: one more than the largest block id that is read; deterministic: bits of a row's attention must
    not depend on its step (the C back end always keeps that); pieces: (first, end) of the 256-token pieces of every
    sequence that are walked, end 0 = to the last (see `segments`); below: where blocks are that the KV cache lacks, or
    None; native: what the back end prepared from all this once per step, for all layers, or None.
    """

    block_tables: Int32Array
    query_start: Int32Array
    context_lens: Int32Array
    layout: KVLayout
    num_heads: int
    num_tokens: int
    num_blocks_needed: int
    deterministic: bool = False
    pieces: tuple[int, int] = (0, 0)
    below: BlocksBelow | None = None
    native: Any = field(default=None, repr=False)


def _int32(array: torch.Tensor | npt.ArrayLike, name: str, ndim: int) -> Int32Array:
    values = np.ascontiguousarray(array.numpy() if isinstance(array, torch.Tensor) else array, dtype=np.int32)
    if values.ndim != ndim:
        raise ValueError(f"{name} has {values.ndim} axes; it must have {ndim}")
    return values


def make_plan(
    block_tables: torch.Tensor | npt.ArrayLike,
    query_start: torch.Tensor | npt.ArrayLike,
    context_lens: torch.Tensor | npt.ArrayLike,
    layout: KVLayout,
    num_heads: int,
    *,
    deterministic: bool = False,
    below: BlocksBelow | None = None,
) -> AttentionPlan:
    """Check and pack the description of one step; see `ops.plan_attention`."""
    tables = _int32(block_tables, "block_tables", 2)
    starts = _int32(query_start, "query_start", 1)
    contexts = _int32(context_lens, "context_lens", 1)
    num_seqs = len(contexts)
    if len(starts) != num_seqs + 1 or len(tables) != num_seqs:
        raise ValueError(
            f"block_tables has {len(tables)} rows, query_start {len(starts)} and context_lens {num_seqs} entries; "
            "for S sequences they must have S, S+1 and S"
        )
    if num_heads < 1 or num_heads % layout.num_kv_heads:
        raise ValueError(f"num_heads is {num_heads}; it must be a multiple of num_kv_heads {layout.num_kv_heads}")
    num_queries = np.diff(starts)
    if starts[0] != 0 or (num_queries < 0).any():
        raise ValueError(f"query_start must begin at 0 and never fall; it is {starts.tolist()[:16]}")
    if (num_queries > contexts).any():
        seq = int(np.argmax(num_queries > contexts))
        raise ValueError(f"sequence {seq} has {num_queries[seq]} query rows but only {contexts[seq]} tokens of context")
    num_blocks = -(-contexts // layout.block_tokens)
    if num_seqs and int(num_blocks.max()) > tables.shape[1]:
        seq = int(np.argmax(num_blocks))
        raise ValueError(
            f"sequence {seq} has {contexts[seq]} tokens, which take {num_blocks[seq]} blocks of {layout.block_tokens}; "
            f"its block table has room for {tables.shape[1]}"
        )
    used = tables[np.arange(tables.shape[1]) < num_blocks[:, None]]
    if used.size and int(used.min()) < 0:
        raise ValueError(f"a block table names block {used.min()} within its context; block ids begin at 0")
    return AttentionPlan(
        block_tables=tables,
        query_start=starts,
        context_lens=contexts,
        layout=layout,
        num_heads=num_heads,
        num_tokens=int(starts[-1]),
        num_blocks_needed=int(used.max()) + 1 if used.size else 0,
        deterministic=deterministic,
        below=below,
    )
