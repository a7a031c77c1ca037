"""Pool sizes and copies inside the pool."""

from __future__ import annotations

import pytest
import torch

from tournant.kernels.layout import KVLayout
from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError
from tournant.workers.kv_cache import DEFAULT_POOL_BYTES, KVCache, available_memory_bytes, cpu_pool_blocks

LAYOUT = KVLayout(2, 2, 16, 64, torch.float32)  # blocks of 32 KiB


def test_the_pool_is_what_was_asked_for_or_bounded_by_memory() -> None:
    assert cpu_pool_blocks(EngineConfig(kv_cache_bytes=10 * LAYOUT.block_bytes + 5), LAYOUT) == 10
    default = cpu_pool_blocks(EngineConfig(), LAYOUT) * LAYOUT.block_bytes
    assert 0 < default <= min(DEFAULT_POOL_BYTES, available_memory_bytes())
    with pytest.raises(ConfigError, match=f"at least {LAYOUT.block_bytes}"):
        cpu_pool_blocks(EngineConfig(kv_cache_bytes=LAYOUT.block_bytes - 1), LAYOUT)


def test_copies_happen_in_order_even_when_they_chain() -> None:
    cache = KVCache(LAYOUT, 4, torch.device("cpu"))
    for block in range(4):
        cache.tensor[block] = block
    cache.copy_blocks([(0, 1), (2, 3)])
    assert [float(cache.tensor[block].mean()) for block in range(4)] == [0, 0, 2, 2]
    cache.copy_blocks([(2, 0), (0, 1), (1, 2)])
    assert [float(cache.tensor[block].mean()) for block in range(4)] == [2, 2, 2, 2]
