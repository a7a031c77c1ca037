"""Which blocks below the device a decode step reads, and how much of the attention the others can carry at most.

Owns the choice and its bound; reads no keys, only their bounds (kernels/block_sparse.py). Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tournant.kernels.block_sparse import score_bounds


@dataclass(slots=True)
class SparseCounts:
    """Of a step: layers of rows that chose; those of them that then read everything; sum of what was missed at most."""

    num_chosen: int = 0
    num_dense: int = 0
    missed: float = 0.0

    def add(self, missed: float, *, good: bool) -> None:
        """One layer of one row. missed: most of its attention that the blocks left out can carry."""
        self.num_chosen += 1
        self.num_dense += not good
        self.missed += missed if good else 0.0


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """mask: bool [kv_heads, blocks], those to read; bounds: float32 [heads, blocks], of the scores in each block."""

    mask: npt.NDArray[np.bool_]
    bounds: torch.Tensor

    def missed(self, lse: torch.Tensor, block_tokens: int) -> float:
        """Largest share of a head's attention, over all heads, that the blocks left out can carry.

        lse: float32 [heads], log of the sum of exponentials over what was read. With sums Z of what was read and U, at
        most, of what was not, the share is at most U / (U + Z).
        """
        heads, left_out = len(self.bounds), torch.from_numpy(~self.mask)
        if not left_out.any():
            return 0.0
        hidden = left_out.repeat_interleave(heads // len(left_out), 0)
        most = self.bounds.masked_fill(~hidden, -math.inf).logsumexp(-1) + math.log(block_tokens)
        return float(torch.sigmoid(most - lse).max())


def choose_blocks(
    q: torch.Tensor,
    bounds: torch.Tensor,
    places: npt.NDArray[np.int64],
    budget: float,
    scale: float,
    softcap: float = 0.0,
) -> BlockChoice:
    """The share `budget` of blocks, at least one, in which a query of the KV head's group can score highest.

    q [heads, hs], of one row; bounds [kv_heads, 2, places, hs]; places: int64 [blocks] of the sequence; scale, softcap:
    of the scores. Heads of a group count by how near they may come to the best that they may reach anywhere.
    """
    kv_heads = len(bounds)
    found = score_bounds(q, bounds.index_select(2, torch.from_numpy(places))) * scale
    if softcap:
        found = torch.tanh(found / softcap) * softcap
    near = (found - found.amax(-1, keepdim=True)).view(kv_heads, -1, len(places)).amax(1)
    chosen = near.topk(max(1, math.ceil(budget * len(places))), dim=-1).indices
    mask = np.zeros((kv_heads, len(places)), np.bool_)
    np.put_along_axis(mask, chosen.numpy(), True, axis=1)
    return BlockChoice(mask, found)
