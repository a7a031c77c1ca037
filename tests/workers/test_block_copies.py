"""Blocks between the pool and host memory, through every back end of the CPU; order of work with a slow lane."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.workers.block_copies import BlockCopies
from tournant.workers.device import CpuDevice, Lane, Mark

LAYOUT = KVLayout(2, 2, 8, 16, torch.float16)


@pytest.fixture(params=["c", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    ops.select_backend(request.param)
    yield request.param
    ops.select_backend("c")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("staging_blocks", [1, 2, 64])
def test_there_and_back(staging_blocks: int) -> None:
    device = CpuDevice()
    pool = torch.randn(LAYOUT.shape(9)).to(torch.float16)
    before = pool.clone()
    copies = BlockCopies(device, pool, staging_blocks)
    host = device.host_buffer((3, LAYOUT.block_bytes), torch.uint8)
    mark = copies.read([7, 0, 4], host)
    mark.wait()
    assert mark.done()
    for image, block in zip(host, (7, 0, 4), strict=True):
        assert torch.equal(image, before[block].contiguous().view(torch.uint8).view(-1))  # the byte image of a block
    pool.zero_()
    copies.write(host, [1, 8, 3]).hold_compute()
    assert torch.equal(pool[[1, 8, 3]], before[[7, 0, 4]])
    assert not pool[[0, 2, 4, 5, 6, 7]].any()
    assert copies.read([], host[:0]).done()


def test_host_memory_of_another_size_is_refused() -> None:
    copies = BlockCopies(CpuDevice(), torch.zeros(LAYOUT.shape(3), dtype=torch.float16), 4)
    with pytest.raises(ValueError, match="2 blocks do not fit host memory of 3 blocks"):
        copies.read([0, 1], torch.empty((3, LAYOUT.block_bytes), dtype=torch.uint8))


class _Told:
    """A lane or mark that notes what it is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def follow_compute(self) -> None:
        self._log.append(f"{self._name} follows")

    def active(self) -> AbstractContextManager[object]:
        self._log.append(f"{self._name} works")
        return nullcontext()

    def mark(self) -> Mark:
        self._log.append(f"{self._name} mark")
        return self

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def hold_compute(self) -> None:
        return


class TellingDevice(CpuDevice):
    def __init__(self) -> None:
        self.log: list[str] = []
        self._names = iter(("out", "in"))

    def new_lane(self) -> Lane:
        return _Told(next(self._names), self.log)


def test_each_direction_has_a_lane_that_follows_computing_first() -> None:
    device = TellingDevice()
    copies = BlockCopies(device, torch.zeros(LAYOUT.shape(3), dtype=torch.float16), 4)
    host = torch.zeros((1, LAYOUT.block_bytes), dtype=torch.uint8)
    copies.read([0], host)
    copies.write(host, [1])
    assert device.log == [f"{lane} {what}" for lane in ("out", "in") for what in ("follows", "works", "mark")]
