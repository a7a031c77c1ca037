"""Ceilings of a card and its link, and block copies against them."""

from __future__ import annotations

import torch

from benchmarks.device.bench import Bench, WrongResultError, wall_seconds
from tournant.kernels.layout import KVLayout
from tournant.workers.block_copies import BlockCopies

COPY_BAR, BOTH_BAR = 0.85, 1.5


def ceilings(bench: Bench) -> None:
    """Copy bandwidth in the card's memory, bf16 products, page-locked copies each way and both at once."""
    device = bench.device.torch_device
    source = torch.randn(bench.pick(1 << 29, 1 << 12), device=device)
    target = torch.empty_like(source)
    bench.copy_rate = 2 * source.nbytes / bench.seconds(lambda: target.copy_(source))
    bench.add("copy in memory, read and written", f"{bench.copy_rate / 1e12:.2f} TB/s")
    size = bench.pick(8192, 64)
    matrix = torch.randn(size, size, device=device, dtype=bench.dtype)
    bench.product_rate = 2.0 * size**3 / bench.seconds(lambda: matrix @ matrix)
    bench.add(f"{bench.dtype} products of {size}³", f"{bench.product_rate / 1e12:.0f} TFLOP/s")
    count = bench.pick(1 << 28, 1 << 12)
    there, here = (torch.randint(0, 99, (count,), dtype=torch.uint8, device=device) for _ in range(2))
    hosts = [bench.device.host_buffer((count,), torch.uint8) for _ in range(2)]
    out, into = bench.device.new_lane(), bench.device.new_lane()

    def move(outward: bool, inward: bool) -> None:
        if outward:
            with out.active():
                hosts[0].copy_(there, non_blocking=True)
        if inward:
            with into.active():
                here.copy_(hosts[1], non_blocking=True)
        out.mark().wait()
        into.mark().wait()

    hosts[1].random_(0, 99)
    rates = {}
    for name, outward, inward in (("out", True, False), ("in", False, True), ("both", True, True)):
        took = wall_seconds(lambda o=outward, i=inward: move(o, i), device, bench.pick(5, 1))  # type: ignore[misc]
        rates[name] = (outward + inward) * count / took
        bench.add(f"page-locked copy, {name}", f"{rates[name] / 1e9:.1f} GB/s")
    if not (torch.equal(hosts[0], there.cpu()) and torch.equal(here.cpu(), hosts[1])):
        raise WrongResultError("copies over the link changed bytes")
    bench.link_rate = min(rates["out"], rates["in"])


def block_copies(bench: Bench) -> None:
    """Scattered blocks of an 8B shape between pool and host memory, each way and both, against one large copy."""
    device = bench.device
    layout = KVLayout(*bench.pick((32, 8, 64, 128), (2, 2, 8, 16)), dtype=bench.dtype)
    num_blocks, moved = bench.pick((512, 96), (12, 4))
    pool = layout.allocate(num_blocks, device.torch_device).normal_()
    ids = torch.randperm(num_blocks)[: 2 * moved].tolist()
    out_ids, in_ids = ids[:moved], ids[moved:]
    image = (moved, layout.block_bytes)
    out_host, in_host = (device.host_buffer(image, torch.uint8) for _ in range(2))
    in_host.copy_(pool[torch.tensor(out_ids, device=pool.device)].view(moved, -1).view(torch.uint8))
    staging = torch.empty(image, dtype=torch.uint8, device=device.torch_device)
    copies = BlockCopies(device, pool, bench.pick(16, 3))
    copies.read(out_ids, out_host).wait()
    copies.write(in_host, in_ids).wait()
    if not torch.equal(out_host, in_host):
        raise WrongResultError("blocks read from the pool differ from its bytes")
    if not torch.equal(pool[torch.tensor(in_ids)], pool[torch.tensor(out_ids)]):
        raise WrongResultError("blocks written to the pool differ from what was written")

    def both() -> None:
        marks = copies.read(out_ids, out_host), copies.write(in_host, in_ids)
        for mark in marks:
            mark.wait()

    rounds, where, size = bench.pick(5, 1), device.torch_device, moved * layout.block_bytes
    bench.need_time()
    large_out = wall_seconds(lambda: out_host.copy_(staging, non_blocking=True), where, rounds)
    large_in = wall_seconds(lambda: staging.copy_(in_host, non_blocking=True), where, rounds)
    name = f"{moved} blocks of {layout.block_bytes >> 10} KiB"
    bench.need_time()
    took_out = wall_seconds(lambda: copies.read(out_ids, out_host).wait(), where, rounds)
    bench.add(f"{name}, out", f"{size / took_out / 1e9:.1f} GB/s", large_out / took_out, COPY_BAR)
    took_in = wall_seconds(lambda: copies.write(in_host, in_ids).wait(), where, rounds)
    bench.add(f"{name}, in", f"{size / took_in / 1e9:.1f} GB/s", large_in / took_in, COPY_BAR)
    took_both = wall_seconds(both, where, rounds)
    alone = max(took_out, took_in)
    bench.add(f"{name}, both ways", f"{2 * size / took_both / 1e9:.1f} GB/s", 2 * alone / took_both, BOTH_BAR)
