"""Pool sizes and copies inside the pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError
from tournant.workers.kv_cache import (
    DEFAULT_POOL_BYTES,
    KVCache,
    available_memory_bytes,
    cpu_pool_blocks,
    kv_cache_dtype,
)

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


@pytest.mark.parametrize("back_end", ["c", "torch", "triton"])
def test_scales_move_with_their_codes(back_end: str) -> None:
    if ops.select_backend(back_end) != back_end:
        pytest.skip("no C compiler here")
    try:
        cache = KVCache(replace(LAYOUT, dtype=torch.float8_e4m3fn), 4, torch.device("cpu"))
        for block in range(4):
            cache.tensor.view(torch.uint8)[block] = block
            cache.scales[block] = 2.0**block
        cache.copy_blocks([(2, 0), (3, 1)])
        assert [int(cache.tensor.view(torch.uint8)[block].unique()) for block in range(4)] == [2, 3, 2, 3]
        assert [float(cache.scales[block].unique()) for block in range(4)] == [4, 8, 4, 8]
    finally:
        ops.select_backend("c")


def test_the_form_of_kv_on_the_device() -> None:
    for name, wanted in (("auto", torch.float16), ("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        assert kv_cache_dtype(EngineConfig(kv_cache_dtype=name), torch.float16) == wanted
    assert kv_cache_dtype(EngineConfig(kv_cache_dtype="fp8_e5m2", deterministic=True), torch.float16).itemsize == 1
    with pytest.raises(ConfigError, match="use fp8_e5m2 or auto"):
        kv_cache_dtype(EngineConfig(kv_cache_dtype="fp8_e4m3", deterministic=True), torch.float16)
