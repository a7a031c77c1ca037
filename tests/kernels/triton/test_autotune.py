"""The tuner runs end to end on CPU tensors under the interpreter; its figures mean nothing there."""

from __future__ import annotations

import torch

from benchmarks.device.autotune import Workload, bounds, candidates, report, try_tiles
from tournant.kernels.triton.tiles import TileShape

CPU = torch.device("cpu")


def test_tuner_end_to_end() -> None:
    for kind, queries in (("decode", 1), ("prefill", 20)):
        work = Workload(kind, 2, queries, 40, 4, 2, 64, 16, torch.float16)
        rows = try_tiles(work, [TileShape(16, 16, 4, 2), TileShape(32, 32, 4, 2)], CPU)
        assert [wrong for wrong, _, _ in rows] == ["", ""]
        assert rows[0][1] <= rows[1][1]
        assert len(report(work, rows, *bounds(CPU, 64)).splitlines()) == 4


def test_workload_counts_what_must_move() -> None:
    decode = Workload("decode", 3, 1, 100, 8, 2, 64, 16, torch.bfloat16)
    assert decode.kv_bytes == 3 * 100 * 2 * 2 * 64 * 2
    assert decode.operations == 4 * 3 * 8 * 64 * 100
    assert Workload("prefill", 1, 4, 4, 1, 1, 64, 16, torch.bfloat16).operations == 4 * 64 * (1 + 2 + 3 + 4)


def test_candidates_differ() -> None:
    for kind in ("decode", "prefill"):
        assert len(set(candidates(kind))) == len(list(candidates(kind))) > 30
