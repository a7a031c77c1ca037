"""Attention over paged KV against the card's bounds and the best of torch's own kernels over contiguous KV."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.device.bench import Bench
from tournant.kernels import ops
from tournant.kernels.layout import KVLayout

DECODE_BAR, SDPA_BAR, PREFILL_BAR = 0.80, 0.95, 0.45
BIG_KV_BYTES = 256e6  # from here on the bars of decoding hold
TOLERANCE = 0.02  # of the largest value of a bfloat16 result
SDPA_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
CHECKED_ROWS = 16


@dataclass
class Work:
    """sequences with `queries` query rows each at the end of `context` tokens, one layer; random blocks, random KV."""

    sequences: int
    queries: int
    context: int
    heads: int
    kv_heads: int
    layout: KVLayout

    def make(self, device: torch.device) -> None:
        """Put it on the device."""
        layout, blocks = self.layout, -(-self.context // self.layout.block_tokens)
        order = np.random.default_rng(0).permutation(self.sequences * blocks)
        self.tables = order.reshape(self.sequences, blocks).astype(np.int32)
        self.kv_cache = torch.empty(layout.shape(order.size), dtype=layout.dtype, device=device).normal_()
        rows = self.sequences * self.queries
        self.q = torch.randn(rows, self.heads, layout.head_size, dtype=layout.dtype, device=device)
        self.out = torch.empty_like(self.q)
        starts, contexts = np.arange(self.sequences + 1) * self.queries, [self.context] * self.sequences
        self.plan = ops.plan_attention(self.tables, starts, contexts, layout, self.heads)

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.layout.head_size**-0.5)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that must be read at least once."""
        return self.sequences * self.context * self.layout.token_bytes

    @property
    def operations(self) -> float:
        """Of both products, causal."""
        seen = self.queries * (self.context - self.queries) + self.queries * (self.queries + 1) / 2
        return 4.0 * self.sequences * self.heads * self.layout.head_size * seen

    def attend(self) -> torch.Tensor:
        """Ours."""
        ops.paged_attention(self.out, self.q, self.kv_cache, 0, self.plan, self.scale)
        return self.out

    def contiguous(self, sequence: int) -> torch.Tensor:
        """KV of a sequence, [2, kv_heads, context, head_size]."""
        table = torch.from_numpy(self.tables[sequence]).to(self.kv_cache.device).long()
        blocks = self.kv_cache[table, 0]
        return blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.context]

    def expected(self, rows: list[int]) -> torch.Tensor:
        """float64 results of some rows of q, [rows, heads, head_size]."""
        group, found = self.heads // self.kv_heads, []
        for row in rows:
            sequence, query = divmod(row, self.queries)
            seen = self.context - self.queries + query + 1
            q = self.q[row].double().view(self.kv_heads, group, -1)
            kv, parts = self.contiguous(sequence), []
            for head in range(self.kv_heads):  # one at a time: 128k tokens in float64 are large
                k, v = kv[:, head, :seen].double()
                parts.append((q[head] @ k.T * self.scale).softmax(-1) @ v)
            found.append(torch.cat(parts))
        return torch.stack(found)


def best_sdpa(bench: Bench, work: Work) -> tuple[float, str]:
    """(seconds, name) of the fastest of torch's kernels over the same KV laid out contiguously."""
    shape = (work.sequences, work.kv_heads, work.context, work.layout.head_size)
    k, v = (torch.empty(shape, dtype=work.q.dtype, device=work.q.device) for _ in range(2))
    for sequence in range(work.sequences):
        k[sequence], v[sequence] = work.contiguous(sequence)
    q = work.q.view(work.sequences, work.queries, work.heads, -1).transpose(1, 2)
    found: list[tuple[float, str]] = []
    for backend in SDPA_BACKENDS:
        for packed in (True, False):
            if packed and work.queries > 1:
                continue  # a causal mask knows nothing of packed heads
            args = (q.reshape(work.sequences, work.kv_heads, -1, q.shape[-1]) if packed else q, k, v)
            options = {"is_causal": work.queries > 1, "enable_gqa": not packed}
            with suppress(RuntimeError), sdpa_kernel([backend]):  # a backend may refuse a shape
                took = bench.seconds(lambda a=args, o=options: scaled_dot_product_attention(*a, **o))  # type: ignore[misc]
                found.append((took, f"{backend.name.split('_')[0].lower()}{' packed' if packed else ''}"))
    return min(found, default=(math.nan, "none"))


def check(bench: Bench, work: Work, what: str) -> None:
    """Rows spread over the work against float64. Raises WrongResultError."""
    rows = np.unique(np.linspace(0, len(work.q) - 1, CHECKED_ROWS).astype(int)).tolist()
    bench.compare(what, work.attend()[rows], work.expected(rows), TOLERANCE)


def _grid(bench: Bench) -> Iterator[tuple[int, int]]:
    for context in bench.pick((1 << 10, 1 << 13, 1 << 15, 1 << 17), (20, 600)):
        for batch in bench.pick((1, 16, 64), (1, 2)):
            yield batch, context


def decode(bench: Bench) -> None:
    """One query per sequence: batch x context, against copy bandwidth and torch."""
    heads, kv_heads, layout = _shape(bench)
    for batch, context in _grid(bench):
        bench.need_time(2.0 if not bench.dry else 0.0)
        work = Work(batch, 1, context, heads, kv_heads, layout)
        work.make(bench.device.torch_device)
        what = f"{batch} x {context} tokens"
        check(bench, work, what)
        took = bench.seconds(work.attend)
        torch_took, name = best_sdpa(bench, work)
        share = work.kv_bytes / took / bench.copy_rate
        bars = work.kv_bytes >= BIG_KV_BYTES
        bench.add(f"{what}, of copy bandwidth", f"{took * 1e6:.0f} µs", share, DECODE_BAR if bars else None)
        best = f"{torch_took * 1e6:.0f} µs"
        bench.add(f"{what}, torch ({name}) / ours", best, torch_took / took, SDPA_BAR if bars else None)


def prefill(bench: Bench) -> None:
    """A whole prompt, causal, against the rate of matrix products and torch."""
    heads, kv_heads, layout = _shape(bench)
    for tokens in bench.pick((1 << 13, 1 << 15), (40,)):
        bench.need_time(2.0 if not bench.dry else 0.0)
        work = Work(1, tokens, tokens, heads, kv_heads, layout)
        work.make(bench.device.torch_device)
        check(bench, work, f"{tokens} tokens")
        took = bench.seconds(work.attend)
        torch_took, name = best_sdpa(bench, work)
        share = work.operations / took / bench.product_rate
        bench.add(f"{tokens} tokens, of the matrix rate", f"{took * 1e3:.2f} ms", share, PREFILL_BAR)
        bench.add(f"{tokens} tokens, torch ({name}) / ours", f"{torch_took * 1e3:.2f} ms", torch_took / took)


def _shape(bench: Bench) -> tuple[int, int, KVLayout]:
    """32 heads over 8 KV heads of 128, blocks of 64 tokens."""
    heads, kv_heads, block_tokens, size = bench.pick((32, 8, 64, 128), (4, 2, 16, 16))
    return heads, kv_heads, KVLayout(1, kv_heads, block_tokens, size, bench.dtype)
