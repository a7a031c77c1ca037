"""Images of two forms: which block gets which, bytes as the kernels make them, there and back, on several threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tournant.kernels import ops, reference
from tournant.kernels.layout import KVLayout
from tournant.workers.block_images import PlainImages
from tournant.workers.device import CpuDevice
from tournant.workers.errors import ConfigError
from tournant.workers.fp8_images import Fp8Images, lower_kv_form, make_images
from tournant.workers.kv_cache import KVCache
from tournant.workers.offload_config import OffloadConfig

LAYOUT = KVLayout(2, 2, 16, 64, torch.bfloat16)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class StagedCpu(CpuDevice):
    """Takes the ways of a GPU."""

    @property
    def kind(self) -> str:
        return "cuda"


@pytest.fixture(params=["c", "torch", "staged"])
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    back_end = "c" if request.param == "staged" else request.param
    if ops.select_backend(back_end) != back_end:
        pytest.skip("no C compiler here")
    yield StagedCpu() if request.param == "staged" else CpuDevice()
    ops.select_backend("c")


def cache_of(num_blocks: int, layout: KVLayout = LAYOUT) -> KVCache:
    cache = KVCache(layout, num_blocks, torch.device("cpu"))
    if layout.dtype.itemsize > 1:
        cache.tensor.normal_()
    return cache


def offload_of(form: str, first: int = 0) -> OffloadConfig:
    return OffloadConfig(store_socket="/nowhere", lower_kv_dtype=form, lower_kv_dtype_from=first)


@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_images_there_and_back(device: CpuDevice, form: torch.dtype) -> None:
    """Bytes are the twins'; what comes back is the same as from the twins; other blocks stay as they are."""
    cache, coded = cache_of(12), replace(LAYOUT, dtype=form)
    images, before = Fp8Images(device, cache, form, staging_blocks=2), cache.tensor.clone()
    assert images.slot_bytes == images.image_bytes(0) == images.image_bytes(9) == coded.block_bytes
    blocks, others = [7, 0, 4, 11, 2], [1, 3, 5, 6, 8]
    slots = [memoryview(bytearray(coded.block_bytes)) for _ in blocks]
    images.save(blocks, slots)
    wanted = torch.empty(len(blocks), coded.block_bytes, dtype=torch.uint8)
    reference.encode_blocks(before, torch.tensor(blocks), wanted, form)
    assert [bytes(slot) for slot in slots] == [bytes(row.numpy()) for row in wanted]
    images.load([slots[0].toreadonly(), *slots[1:]], others)
    reference.decode_blocks(wanted, form, torch.tensor(others), before)
    assert torch.equal(cache.tensor, before)


def test_only_later_blocks_are_lossy(device: CpuDevice) -> None:
    """From token 20 on: the second block begins at 16, the third at 32."""
    cache = cache_of(6)
    images, before = Fp8Images(device, cache, E4M3, from_token=20), cache.tensor.clone()
    plain, coded = LAYOUT.block_bytes, replace(LAYOUT, dtype=E4M3).block_bytes
    assert [images.image_bytes(depth) for depth in range(4)] == [plain, plain, coded, coded]
    assert images.slot_bytes == plain > coded
    slots = [memoryview(bytearray(images.image_bytes(depth))) for depth in range(3)]
    images.save([0, 1, 2], slots)
    cache.tensor.zero_()
    images.load(slots, [3, 4, 5])
    assert torch.equal(cache.tensor[[3, 4]], before[[0, 1]])
    assert not torch.equal(cache.tensor[5], before[2])
    torch.testing.assert_close(cache.tensor[5], before[2], rtol=2**-4, atol=2**-9)
    for length in (plain - 1, coded + 1):
        with pytest.raises(ValueError, match=f"a slot has {length} bytes; an image has {coded} \\(fp8\\) or {plain}"):
            images.save([0], [memoryview(bytearray(length))])


def test_several_threads_at_once(device: CpuDevice) -> None:
    cache, coded = cache_of(64), replace(LAYOUT, dtype=E4M3)
    images, slots = Fp8Images(device, cache, E4M3), [memoryview(bytearray(coded.block_bytes)) for _ in range(64)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda block: images.save([block], [slots[block]]), range(64)))
        wanted = torch.empty(64, coded.block_bytes, dtype=torch.uint8)
        reference.encode_blocks(cache.tensor, torch.arange(64), wanted, E4M3)
        assert [bytes(slot) for slot in slots] == [bytes(row.numpy()) for row in wanted]
        again = cache.tensor.clone()
        reference.decode_blocks(wanted, E4M3, torch.arange(64), again)
        list(pool.map(lambda block: images.load([slots[block]], [block]), range(64)))
    assert torch.equal(cache.tensor, again)


def test_what_a_configuration_asks_for() -> None:
    for layout, form, first, wanted in (
        (LAYOUT, "same", 0, "bf16"),
        (LAYOUT, "fp8_e4m3", 1024, "bf16/fp8_e4m3@1024"),
        (replace(LAYOUT, dtype=torch.float32), "fp8_e5m2", 0, "fp32/fp8_e5m2@0"),
        (replace(LAYOUT, dtype=E4M3), "fp8_e4m3", 7, "fp8_e4m3"),
    ):
        offload = offload_of(form, first)
        assert lower_kv_form(layout, offload) == wanted
        images = make_images(CpuDevice(), cache_of(2, layout), offload, deterministic=False)
        assert type(images) is (Fp8Images if "/" in wanted else PlainImages)
        assert images.image_bytes(0) == (layout.block_bytes if first or "/" not in wanted else LAYOUT.block_bytes // 2)


def test_lossy_forms_are_refused_where_tokens_must_not_change() -> None:
    cache = cache_of(2)
    with pytest.raises(ConfigError, match=r"deterministic is true and lower_kv_dtype 'fp8_e5m2'.*is bf16.*use 'same'"):
        make_images(CpuDevice(), cache, offload_of("fp8_e5m2"), deterministic=True)
    exact = cache_of(2, replace(LAYOUT, dtype=E5M2))
    assert isinstance(make_images(CpuDevice(), exact, offload_of("fp8_e5m2"), deterministic=True), PlainImages)
    with pytest.raises(ConfigError, match="is fp8_e5m2 already, which is as small"):
        make_images(CpuDevice(), exact, offload_of("fp8_e4m3"), deterministic=False)
