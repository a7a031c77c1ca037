"""Paged batches for tests: a KV cache that is NaN wherever nothing was stored, shuffled blocks, random heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tournant.kernels import ops
from tournant.kernels.layout import KVLayout

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of values of size 1 to 3
LAYER = 1


@dataclass
class Case:
    """Sequences with `lengths` tokens: q [tokens, heads, hs], k and v [tokens, kv_heads, hs] one after another."""

    layout: KVLayout
    lengths: Sequence[int]
    num_heads: int
    seed: int = 0

    def __post_init__(self) -> None:
        layout, generator = self.layout, torch.Generator().manual_seed(self.seed)
        tokens, size = sum(self.lengths), layout.head_size
        self.q, self.k, self.v = (
            torch.randn(tokens, heads, size, generator=generator).to(layout.dtype)
            for heads in (self.num_heads, layout.num_kv_heads, layout.num_kv_heads)
        )
        blocks = [-(-length // layout.block_tokens) for length in self.lengths]
        shuffled = torch.randperm(sum(blocks) + 2, generator=generator)[: sum(blocks)].to(torch.int32).numpy()
        self.tables = np.full((len(self.lengths), max(blocks, default=0) + 1), -7, np.int32)
        for table, own in zip(self.tables, np.split(shuffled, np.cumsum(blocks)[:-1]), strict=True):
            table[: len(own)] = own
        self.kv_cache = torch.full(layout.shape(sum(blocks) + 2), float("nan"), dtype=layout.dtype)
        self.first = np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def scale(self) -> float:
        return float(self.layout.head_size**-0.5)

    def rows(self, seq: int, start: int, stop: int) -> slice:
        """Rows of q, k, v that hold positions start to stop of a sequence."""
        return slice(int(self.first[seq]) + start, int(self.first[seq]) + stop)

    def slots(self, seq: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        return self.layout.slots(self.tables[seq], np.arange(start, stop))

    def store(self, seq: int, start: int, stop: int) -> None:
        rows = self.rows(seq, start, stop)
        ops.store_kv(self.k[rows], self.v[rows], self.kv_cache, LAYER, torch.from_numpy(self.slots(seq, start, stop)))

    def attend(self, parts: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Outputs of (sequence, start, stop) of each part, all computed in one call."""
        q = torch.cat([self.q[self.rows(*part)] for part in parts])
        counts = [stop - start for _, start, stop in parts]
        plan = ops.plan_attention(
            self.tables[[seq for seq, _, _ in parts]],
            np.concatenate([[0], np.cumsum(counts)]),
            [stop for _, _, stop in parts],
            self.layout,
            self.num_heads,
        )
        out = torch.full_like(q, float("nan"))
        ops.paged_attention(out, q, self.kv_cache, LAYER, plan, self.scale)
        return list(out.split(counts))

    def expected(self, seq: int, start: int, stop: int) -> torch.Tensor:
        """The same from dense tensors in float64."""
        rows = self.rows(seq, 0, stop)
        group = self.num_heads // self.layout.num_kv_heads
        k, v = (x[rows].double().repeat_interleave(group, 1) for x in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", self.q[self.rows(seq, start, stop)].double(), k) * self.scale
        scores.masked_fill_(torch.arange(stop) > torch.arange(start, stop)[:, None], float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
