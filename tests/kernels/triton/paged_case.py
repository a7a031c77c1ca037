"""Steps with paged KV of any form for the attention kernels: what is not stored is NaN, unused table entries lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.helpers.triton_interpreter import KERNELS
from tests.kernels.kernel_case import LAYER, Case
from tournant.kernels import reference
from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import AttentionPlan, make_plan

FORMS = {"plain": None, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class PagedCase(Case):
    """`Case` whose sequences are stored by the twins, with KV in `form`."""

    def __init__(self, layout: KVLayout, lengths: Sequence[int], num_heads: int, form: str = "plain") -> None:
        super().__init__(layout, lengths, num_heads)
        self.kv_scales: torch.Tensor | None = None
        if dtype := FORMS[form]:
            self.kv_cache = torch.full(self.kv_cache.shape, 0x7F, dtype=torch.uint8).view(dtype)
        if form == "e4m3":
            self.kv_scales = torch.full((len(self.kv_cache), layout.num_layers, 2, layout.num_kv_heads), float("nan"))
        slots = torch.from_numpy(np.concatenate([self.slots(i, 0, length) for i, length in enumerate(lengths)]))
        reference.store_kv(self.k, self.v, self.kv_cache, LAYER, slots, kv_scales=self.kv_scales)

    def step(
        self, parts: Sequence[tuple[int, int, int]], *, deterministic: bool = False
    ) -> tuple[torch.Tensor, AttentionPlan]:
        """q and plan of one step that computes (sequence, start, stop) of each part."""
        q = torch.cat([self.q[self.rows(*part)] for part in parts])
        starts = np.concatenate([[0], np.cumsum([stop - start for _, start, stop in parts])])
        tables = self.tables[[seq for seq, _, _ in parts]]
        contexts = [stop for _, _, stop in parts]
        return q, make_plan(tables, starts, contexts, self.layout, self.num_heads, deterministic=deterministic)

    def run(
        self, parts: Sequence[tuple[int, int, int]], *, deterministic: bool = False, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionPlan]:
        """out, lse and the plan (with what the back end prepared) of one step through the kernels."""
        q, plan = self.step(parts, deterministic=deterministic)
        out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:2], float("nan"))
        KERNELS.paged_attention(
            out, q, self.kv_cache, LAYER, plan, self.scale, lse=lse, kv_scales=self.kv_scales, **options
        )
        return out, lse, plan

    def twin(self, parts: Sequence[tuple[int, int, int]], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse of the same step by the twin, in float32."""
        q, plan = self.step(parts)
        out, lse = torch.full(q.shape, float("nan")), torch.full(q.shape[:2], float("nan"))
        reference.paged_attention(
            out, q, self.kv_cache, LAYER, plan, self.scale, lse=lse, kv_scales=self.kv_scales, **options
        )
        return out, lse
