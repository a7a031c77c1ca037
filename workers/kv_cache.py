"""The KV bytes of one shard on its device: one preallocated tensor and its scales, written only through the kernels.

Owns the pool tensor and its form, how large it may be, and nothing about who uses which block (that is `BlockManager`).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError
from tournant.workers.host_memory import page_aligned

DEFAULT_POOL_BYTES = 1 << 30
KV_CACHE_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def kv_cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Of KV on the device of an engine that computes in `dtype`.

    Raises ConfigError for e4m3 in deterministic mode: a block's codes depend on which of its tokens came together.
    """
    if config.deterministic and config.kv_cache_dtype == "fp8_e4m3":
        raise ConfigError(
            "deterministic is true and kv_cache_dtype 'fp8_e4m3': the scale of a block grows with its tokens, so "
            "answers would depend on how prompts are cut into chunks; use fp8_e5m2 or auto"
        )
    return KV_CACHE_DTYPES.get(config.kv_cache_dtype, dtype)


def available_memory_bytes() -> int:
    """Bytes of RAM this process may still take: the kernel's estimate, or what the cgroup leaves, whichever is less."""
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_AVPHYS_PAGES")
    available = page * pages
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(fields.get("MemAvailable", f"{available >> 10} kB").split()[0]) << 10
    limit, current = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and current.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(current.read_text())))
    return available


def cpu_pool_blocks(config: EngineConfig, layout: KVLayout) -> int:
    """Blocks of the CPU pool: `kv_cache_bytes`, or the lesser of 1 GiB and a quarter of free memory.

    Raises ConfigError when not even one block fits, or when the pool exceeds the free memory.
    """
    num_bytes = config.kv_cache_bytes
    available = available_memory_bytes()
    if num_bytes is None:
        num_bytes = min(DEFAULT_POOL_BYTES, available // 4)
    if num_bytes > available:
        raise ConfigError(
            f"kv_cache_bytes is {num_bytes}, but only {available} bytes of memory are free; choose at most "
            f"{available // 2}, or leave it out"
        )
    return _whole_blocks(num_bytes, layout)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU: all of them, those in use (weights, libraries, other processes), what the largest step adds."""

    total: int
    used: int
    step: int


def gpu_pool_blocks(config: EngineConfig, layout: KVLayout, memory: DeviceMemory) -> int:
    """Blocks of a GPU's pool: gpu_memory_utilization of its memory, less what is in use and what a step needs; or
    `kv_cache_bytes`, when that is not more. Raises ConfigError when nothing is left, or too little.
    """
    left = int(config.gpu_memory_utilization * memory.total) - memory.used - memory.step
    sums = (
        f"gpu_memory_utilization {config.gpu_memory_utilization} of {memory.total} bytes, less {memory.used} in use "
        f"and {memory.step} for the largest step, leaves {max(left, 0)} bytes for the KV pool"
    )
    if left < layout.block_bytes:
        raise ConfigError(
            f"{sums}, too few for a block of {layout.block_bytes}; raise it, lower max_num_batched_tokens or "
            "max_num_seqs, or choose a smaller model or a larger GPU"
        )
    if config.kv_cache_bytes is None:
        return layout.num_blocks_for(left)
    if config.kv_cache_bytes > left:
        raise ConfigError(f"kv_cache_bytes is {config.kv_cache_bytes}, but {sums}; choose at most that")
    return _whole_blocks(config.kv_cache_bytes, layout)


def _whole_blocks(num_bytes: int, layout: KVLayout) -> int:
    blocks = layout.num_blocks_for(num_bytes)
    if blocks < 1:
        raise ConfigError(
            f"a KV pool of {num_bytes} bytes holds no block of {layout.block_bytes} bytes; "
            f"set kv_cache_bytes to at least {layout.block_bytes}"
        )
    return blocks


class KVCache:
    """`tensor` has shape [num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_size] (see KVLayout); `scales`
    are those of its form, None where it has none. They move together.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        shape = layout.shape(num_blocks)
        if device.type == "cpu":
            self.tensor = page_aligned(math.prod(shape) * layout.dtype.itemsize).view(layout.dtype).view(shape)
        else:
            self.tensor = layout.allocate(num_blocks, device)
        self.scales = layout.allocate_scales(num_blocks, device)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in the given order."""
        chained = {source for source, _ in pairs} & {target for _, target in pairs}
        for group in [[pair] for pair in pairs] if chained else [pairs]:
            source, target = torch.tensor(group, dtype=torch.int64).t().contiguous()
            ops.copy_blocks(self.tensor, source, target)
            if self.scales is not None:
                ops.copy_blocks(self.scales, source, target)
