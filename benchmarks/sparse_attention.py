"""Attention of one decode step over KV in RAM below the device: over all of it, and over chosen shares of its blocks.

What an engine runs (`OverflowStep`), layer after layer, over as many layers as make what is read much larger than the
last cache. Choosing is timed apart, on as cold a cache: it takes turns with attention over everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks.common import Options, Report, Table, at_most, interleave, run_main, say
from benchmarks.offload_engine import BLOCK_TOKENS, model_of
from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import AttentionPlan, BlocksBelow
from tournant.workers.config import SparseAttention
from tournant.workers.device import CpuDevice
from tournant.workers.models.families import read_decoder_config
from tournant.workers.overflow_attention import LongRows, OverflowAttention
from tournant.workers.overflow_pool import OverflowPool
from tournant.workers.sparse_attention import SparseReader

TOKENS, QUICK_TOKENS = 32768, 2048
NUM_LAYERS, DEVICE_BLOCKS, STEPS = 16, 8, 3
BUDGETS = (0.5, 0.25)
MAX_SPARSE, MAX_CHOOSING = {0.5: 0.6}, 0.1


class _Steps:
    """Decode steps of one sequence of random keys whose blocks, but for the last, lie in RAM below the device."""

    def __init__(self, tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
        self.layout = KVLayout(NUM_LAYERS, kv_heads, BLOCK_TOKENS, size, dtype)
        self.tokens, self.heads, below = tokens, heads, tokens // BLOCK_TOKENS - 1
        self.device = CpuDevice()
        self.pool = OverflowPool(self.layout, below, 0, self.device, bounds_dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        for start in range(0, below, DEVICE_BLOCKS):
            kv = torch.randn(self.layout.shape(DEVICE_BLOCKS), generator=generator).to(dtype)
            self.pool.put(kv, [(place - start, place) for place in range(start, min(start + DEVICE_BLOCKS, below))])
        self.device_kv = kv
        self.q = torch.randn(NUM_LAYERS, 1, heads, size, generator=generator).to(dtype)
        self.table = np.append(DEVICE_BLOCKS + np.arange(below), 0)
        self._plan = self._new_plan()

    def contestant(self, budget: float) -> Callable[[], float]:
        """Seconds of attention of a layer over a share of the blocks, the mean of some steps."""
        owner = OverflowAttention(self.pool, self.device, DEVICE_BLOCKS, self.heads, [0] * NUM_LAYERS)
        owner.sparse = self._reader(budget)
        out, scale = torch.empty_like(self.q[0]), self.layout.head_size**-0.5

        def run() -> float:
            start = time.perf_counter()
            for _ in range(STEPS):
                step = owner.step([], [LongRows(0, slice(0, 1), self.tokens, self.table)])
                for layer in range(NUM_LAYERS):
                    step.attend(out, self.q[layer], self.device_kv, layer, scale, 0, 0.0)
            return (time.perf_counter() - start) / (STEPS * NUM_LAYERS)

        return run

    def _reader(self, budget: float) -> SparseReader:
        in_place = self.pool.host_blocks
        return SparseReader(self.pool, SparseAttention(budget), self.heads, in_place, ThreadPoolExecutor(1), 1)

    def choosing(self, budget: float) -> Callable[[], float]:
        """Seconds of choosing a share of the blocks in a layer, each after attention over all of another."""
        row = self._reader(budget).row(self.table, DEVICE_BLOCKS, self.tokens)
        scale = self.layout.head_size**-0.5

        def run() -> float:
            spent = 0.0
            for layer in range(NUM_LAYERS):
                self._attend_densely((layer + NUM_LAYERS // 2) % NUM_LAYERS)
                start = time.perf_counter()
                row.choose(self.q[layer, 0], layer, scale, 0.0)
                spent += time.perf_counter() - start
            return spent / NUM_LAYERS

        return run

    def dense(self) -> float:
        """Seconds of attention of a layer over all blocks, as an engine attends to them where they lie."""
        start = time.perf_counter()
        for _ in range(STEPS):
            self._plan = self._new_plan()
            for layer in range(NUM_LAYERS):
                self._attend_densely(layer)
        return (time.perf_counter() - start) / (STEPS * NUM_LAYERS)

    def _new_plan(self) -> AttentionPlan:
        below = BlocksBelow(DEVICE_BLOCKS, self.pool.host)
        return ops.plan_attention(self.table[None], [0, 1], [self.tokens], self.layout, self.heads, below=below)

    def _attend_densely(self, layer: int) -> None:
        q, scale = self.q[layer], self.layout.head_size**-0.5
        ops.paged_attention(torch.empty_like(q), q, self.device_kv, layer, self._plan, scale)


def measure(options: Options) -> Table:
    """In bfloat16 and float32, with the numbers of heads of the model."""
    decoder = read_decoder_config(model_of(options).folder)
    tokens = QUICK_TOKENS if options.quick else TOKENS
    torch.set_num_threads(options.threads)
    rows: list[list[Any]] = []
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        say(f"sparse attention over {tokens} tokens, {name}")
        steps = _Steps(tokens, decoder.num_heads, decoder.num_kv_heads, decoder.head_size, dtype)
        shares = {f"{budget:.0%} of the blocks": budget for budget in BUDGETS}
        contestants = {"all": steps.dense}
        contestants |= {what: steps.contestant(budget) for what, budget in shares.items()}
        contestants |= {f"choosing {what}": steps.choosing(budget) for what, budget in shares.items()}
        found = interleave(contestants, options.rounds)
        whole = found["all"]
        rows.append([name, "all blocks", whole.map(lambda s: s * 1e6), "", ""])
        for what, budget in shares.items():
            ratio, choosing = found[what].over(whole), found[f"choosing {what}"]
            bar = at_most(MAX_SPARSE[budget], ratio) if budget in MAX_SPARSE else ""
            rows.append([name, what, found[what].map(lambda s: s * 1e6), ratio, bar])
            part = choosing.over(whole)
            rows.append([name, f"choosing {what}", choosing.map(lambda s: s * 1e6), part, at_most(MAX_CHOOSING, part)])
    share = 1 / BLOCK_TOKENS
    return Table(
        f"Attention of a decode step over {tokens} tokens below the device, in place, per layer",
        ("dtype", "blocks read", "microseconds", "/ all", "bar"),
        rows,
        [f"bound by bytes: choosing reads {share:.3g} of K and V, so with half of the blocks {0.5 + share:.3g}"],
    )


def run(options: Options) -> Report:
    """The table alone."""
    report = Report("Sparse attention")
    report.add(measure(options))
    return report


if __name__ == "__main__":
    run_main(run, __doc__)
