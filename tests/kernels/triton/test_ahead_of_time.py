"""Every kernel compiles to machine code for sm_80 and sm_90, and what has to fit the registers does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
KERNELS = {
    "block_copy",
    "flash_dkv",
    "flash_dq",
    "flash_forward",
    "gated",
    "merge_splits",
    "merge_states",
    "paged_decode",
    "paged_prefill",
    "paged_walk",
    "rms_norm",
    "rope",
    "rope_store_kv",
    "store_kv",
    "store_kv_e4m3",
}


@pytest.mark.timeout(300)  # half a minute of compiling; later runs find the results in the cache
def test_kernels_compile_and_do_not_spill() -> None:
    """A process of its own: in this one the kernels belong to Triton's interpreter."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(REPO / "build" / "triton")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tournant.kernels.triton.ahead_of_time"]
    result = subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in result.stdout.splitlines() if "|" in line]
    for arch in ("80", "90"):
        assert {row[0] for row in rows if row[2] == arch} == KERNELS
        for kernel in ("paged_decode", "paged_prefill"):
            for dtype in ("bf16", "fp16"):
                for size in (64, 128):
                    label = f"{dtype} head {size}, blocks of 64"
                    assert [row[5] for row in rows if row[:3] == [kernel, label, arch]] == ["0"], (label, arch)
        for kernel in ("flash_forward", "flash_dq", "flash_dkv"):
            for size in (64, 128):
                assert [row[5] for row in rows if row[:3] == [kernel, f"bf16 head {size}", arch]] == ["0"], (size, arch)
    assert [row for row in rows if row[5] != "0"] == []  # none of these may spill
