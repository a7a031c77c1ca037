"""Attention over paged KV beside contiguous scaled_dot_product_attention in its best form, and copies of blocks.

A pass goes over all layers of SmolLM2-135M in bfloat16, so that KV comes from RAM as it does in a model. Results are
compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common import (
    BenchmarkError,
    Bounds,
    Cell,
    Options,
    Report,
    Table,
    at_least,
    interleave,
    run_main,
    timed,
)
from tournant.kernels import ops
from tournant.kernels.layout import KVLayout

NUM_HEADS = 9
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, block_tokens=16, head_size=64, dtype=torch.bfloat16)
QUICK_LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, block_tokens=16, head_size=64, dtype=torch.bfloat16)
TOLERANCE = 3e-2  # of results of size about 1 in bfloat16
PASSES = 5  # of what takes milliseconds: a value is their mean
OURS, READ, MEMCPY = "paged, in place", "read", "memcpy"
MIN_RATIO, MIN_SHARE, MIN_COPY_RATIO = 0.9, 0.25, 0.8


@dataclass
class PagedCase:
    """`seqs` sequences of `tokens` tokens, the last `queries` of which ask; blocks lie scattered over the pool.

    Contiguous k and v are [layers, seqs, kv_heads, tokens, head_size], q is [seqs, queries, heads, head_size].
    """

    layout: KVLayout
    seqs: int
    tokens: int
    queries: int

    def __post_init__(self) -> None:
        layout, generator = self.layout, torch.Generator().manual_seed(20)
        shape = (layout.num_layers, self.seqs, layout.num_kv_heads, self.tokens, layout.head_size)
        self.k, self.v = (torch.randn(shape, generator=generator).to(layout.dtype) for _ in range(2))
        q_shape = (self.seqs, self.queries, NUM_HEADS, layout.head_size)
        self.q = torch.randn(q_shape, generator=generator).to(layout.dtype)
        self.scale = layout.head_size**-0.5
        blocks = -(-self.tokens // layout.block_tokens)
        self.tables = torch.randperm(self.seqs * blocks, generator=generator).to(torch.int32).view(self.seqs, blocks)
        self.cache = layout.allocate(self.seqs * blocks)
        positions = torch.arange(self.tokens)
        slots = self.tables.long()[:, positions // layout.block_tokens] * layout.block_tokens
        slots = (slots + positions % layout.block_tokens).flatten()
        for layer in range(layout.num_layers):
            k, v = (x[layer].transpose(1, 2).flatten(0, 1).contiguous() for x in (self.k, self.v))
            ops.store_kv(k, v, self.cache, layer, slots)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a pass reads."""
        return self.k.nbytes + self.v.nbytes

    def paged(self) -> torch.Tensor:
        """Ours, with the plan of the step; [seqs, queries, heads, head_size] of the last layer."""
        plan = ops.plan_attention(
            self.tables,
            torch.arange(self.seqs + 1, dtype=torch.int32) * self.queries,
            torch.full((self.seqs,), self.tokens, dtype=torch.int32),
            self.layout,
            NUM_HEADS,
        )
        q = self.q.flatten(0, 1)
        out = torch.empty_like(q)
        for layer in range(self.layout.num_layers):
            ops.paged_attention(out, q, self.cache, layer, plan, self.scale)
        return out.view(self.q.shape)

    def packed(self) -> torch.Tensor:
        """Contiguous, one query per sequence: the heads of a KV head are the query rows of one product."""
        q = self.q.view(self.seqs, self.layout.num_kv_heads, -1, self.layout.head_size)
        for k, v in zip(self.k, self.v, strict=True):
            out = scaled_dot_product_attention(q, k, v)
        return out.view(self.q.shape)

    def grouped(self) -> torch.Tensor:
        """Contiguous and causal with `enable_gqa`."""
        q = self.q.transpose(1, 2)
        for k, v in zip(self.k, self.v, strict=True):
            out = scaled_dot_product_attention(q, k, v, is_causal=self.queries > 1, enable_gqa=True)
        return out.transpose(1, 2)

    def repeated(self) -> torch.Tensor:
        """Contiguous and causal, KV heads repeated for every query head."""
        q, group = self.q.transpose(1, 2), NUM_HEADS // self.layout.num_kv_heads
        for k, v in zip(self.k, self.v, strict=True):
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            out = scaled_dot_product_attention(q, k, v, is_causal=self.queries > 1)
        return out.transpose(1, 2)


def run(options: Options) -> Report:
    """Decode, prefill, copies."""
    report = Report("Attention and block copies on the CPU")
    layout, bounds = (QUICK_LAYOUT if options.quick else LAYOUT), Bounds(options.quick)
    shrink = 16 if options.quick else 1
    note = f"back end {ops.backend()!r}, {layout.num_layers} layers per pass, blocks scattered"
    for title, seqs, tokens in (
        ("decode, 1 sequence of 8,192 tokens", 1, 8192),
        ("decode, 32 sequences of 160 tokens", 32, 160),
    ):
        case = PagedCase(layout, seqs, tokens // (shrink if seqs == 1 else 1), 1)
        forms = {"contiguous, heads packed": case.packed, "contiguous, enable_gqa": case.grouped}
        report.add(_compare(title, case, forms, bounds, options, note, memory_bound=True))
    case = PagedCase(layout, 1, 2048 // shrink, 2048 // shrink)
    forms = {"contiguous, enable_gqa": case.grouped, "contiguous, KV heads repeated": case.repeated}
    report.add(_compare("prefill of 2,048 tokens", case, forms, bounds, options, note, memory_bound=False))
    report.add(_copies(layout, 16 if options.quick else 256, bounds, options))
    return report


def _compare(
    title: str,
    case: PagedCase,
    forms: dict[str, Callable[[], torch.Tensor]],
    bounds: Bounds,
    options: Options,
    note: str,
    *,
    memory_bound: bool,
) -> Table:
    ours = case.paged().float()
    for name, form in forms.items():
        error = (ours - form().float()).abs().max().item()
        if not error < TOLERANCE:
            raise BenchmarkError(f"{title}: ours differs from {name} by {error}")
    bound = READ if memory_bound else "matmul"
    passes = PASSES if memory_bound and not options.quick else 1
    contestants = {name: timed(form, passes) for name, form in {OURS: case.paged, **forms}.items()}
    found = interleave(contestants | {bound: bounds.read if memory_bound else bounds.matmul}, options.rounds)
    best = min(forms, key=lambda name: found[name].median)
    work = case.kv_bytes if memory_bound else 2 * case.layout.num_layers * NUM_HEADS * 64 * case.tokens**2
    rows: list[list[Cell]] = []
    for name in contestants:
        rate = found[name].map(lambda seconds: work / seconds)
        share = rate.over(found[bound])
        ratio = found[best].over(found[OURS])
        bars = [at_least(MIN_RATIO, ratio), at_least(MIN_SHARE, share)] if memory_bound and name == OURS else []
        rows.append(
            [
                name,
                found[name].map(lambda seconds: seconds * 1e3 / case.layout.num_layers),
                share,
                ratio if name == OURS else "best" if name == best else "",
                "; ".join(bars),
            ]
        )
    unit, size = ("GB/s RAM read", 1e9) if memory_bound else ("TFLOP/s bfloat16 matrix product", 1e12)
    shown = found[bound].map(lambda value: value / size)
    return Table(
        title,
        ("form", "ms per layer", f"share of {unit}", "speed over best contiguous", "bars"),
        rows,
        (f"{note}; {unit} of the same rounds: {shown}; largest difference below {TOLERANCE:g}.",),
    )


def _copies(layout: KVLayout, count: int, bounds: Bounds, options: Options) -> Table:
    """Scattered blocks to scattered blocks in one call, beside one memcpy of as many bytes."""
    cache = torch.randn(layout.shape(2 * count)).to(layout.dtype)
    order = torch.randperm(2 * count)
    source, target = order[:count].contiguous(), order[count:].contiguous()
    ops.copy_blocks(cache, source, target)
    if not torch.equal(cache[source], cache[target]):
        raise BenchmarkError("copied blocks differ from their sources")
    passes = 1 if options.quick else PASSES
    left, right = cache[:count], cache[count:].clone()
    found = interleave(
        {
            "scattered blocks": timed(lambda: ops.copy_blocks(cache, source, target), passes),
            MEMCPY: timed(lambda: right.copy_(left), passes),
        },
        options.rounds,
    )
    num_bytes = count * layout.block_bytes
    ratio = found[MEMCPY].over(found["scattered blocks"])
    return Table(
        "copies of blocks",
        ("form", "GB/s copied", "speed over memcpy", "bar"),
        [
            (
                name,
                seconds.map(lambda value: num_bytes / value / 1e9),
                "" if name == MEMCPY else ratio,
                "" if name == MEMCPY else at_least(MIN_COPY_RATIO, ratio),
            )
            for name, seconds in found.items()
        ],
        (
            f"{count} blocks of {layout.block_bytes >> 10} KiB; a large copy of other memory runs at "
            f"{bounds.copy() / 1e9:.3g} GB/s.",
        ),
    )


if __name__ == "__main__":
    run_main(run, __doc__)
