"""Images of device blocks: the bytes of the pool, on the CPU directly and through the staging of a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tournant.kernels.layout import KVLayout
from tournant.workers.block_images import PlainImages
from tournant.workers.device import CpuDevice, Device

LAYOUTS = [
    KVLayout(2, 2, 8, 16, torch.bfloat16),
    KVLayout(3, 1, 16, 32, torch.float32),
    KVLayout(2, 2, 8, 16, torch.float8_e4m3fn),
]


class StagingDevice(CpuDevice):
    """The CPU, taken for a device with memory of its own."""

    @property
    def kind(self) -> str:
        return "cuda"


def random_pool(layout: KVLayout, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    pool = layout.allocate(num_blocks)
    pool.view(torch.uint8).copy_(torch.randint(0, 256, pool.view(torch.uint8).shape, dtype=torch.uint8))
    scales = layout.allocate_scales(num_blocks)
    if scales is not None:
        scales.copy_(torch.rand(scales.shape))
    return pool, scales


def image_of(pool: torch.Tensor, scales: torch.Tensor | None, block: int) -> bytes:
    data = pool[block].contiguous().view(torch.uint8).numpy().tobytes()
    return data if scales is None else data + scales[block].numpy().tobytes()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.kv_form)
@pytest.mark.parametrize("device", [CpuDevice(), StagingDevice()], ids=["cpu", "staged"])
@pytest.mark.parametrize("staging_blocks", [1, 2, 8])
def test_there_and_back(layout: KVLayout, device: Device, staging_blocks: int) -> None:
    pool, scales = random_pool(layout, 9)
    before = [image_of(pool, scales, block) for block in range(9)]
    images = PlainImages(device, pool, scales, staging_blocks)
    assert images.slot_bytes == images.image_bytes(0) == images.image_bytes(7) == layout.block_bytes
    memory = memoryview(bytearray(5 * layout.block_bytes))
    slots = [memory[start : start + layout.block_bytes] for start in range(0, len(memory), layout.block_bytes)]
    images.save([7, 0, 4, 8, 1], slots)
    assert [bytes(slot) for slot in slots] == [before[block] for block in (7, 0, 4, 8, 1)]
    pool.view(torch.uint8).zero_()
    images.load(slots[:3], [1, 8, 3])
    assert [image_of(pool, scales, block) for block in (1, 8, 3)] == [before[block] for block in (7, 0, 4)]
    assert not pool.view(torch.uint8)[[0, 2, 4, 5, 6, 7]].any()
    images.save([], [])
    images.load([], [])


@pytest.mark.parametrize("device", [CpuDevice(), StagingDevice()], ids=["cpu", "staged"])
def test_slots_of_another_length_are_refused(device: Device) -> None:
    layout = LAYOUTS[0]
    pool, _ = random_pool(layout, 3)
    images = PlainImages(device, pool)
    before = [image_of(pool, None, block) for block in range(3)]
    short = memoryview(bytearray(layout.block_bytes - 1))
    for call in (lambda: images.save([0], [short]), lambda: images.load([short], [0])):
        with pytest.raises(ValueError, match=f"has {layout.block_bytes - 1} bytes; an image of these blocks has"):
            call()
    assert [image_of(pool, None, block) for block in range(3)] == before


@pytest.mark.parametrize("device", [CpuDevice(), StagingDevice()], ids=["cpu", "staged"])
def test_several_threads_may_copy_at_once(device: Device) -> None:
    layout = LAYOUTS[1]
    pool, _ = random_pool(layout, 64)
    images = PlainImages(device, pool)
    slots = [memoryview(bytearray(layout.block_bytes)) for _ in range(64)]
    with ThreadPoolExecutor(4) as threads:
        shares = [range(start, start + 16) for start in range(0, 64, 16)]
        list(threads.map(lambda share: images.save(share, [slots[block] for block in share]), shares))
    assert [bytes(slot) for slot in slots] == [image_of(pool, None, block) for block in range(64)]
