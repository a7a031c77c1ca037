"""What differs between devices, as far as it can be shown without a GPU: choice, sizes, packing, captured calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.workers.harness import Session, make_engine
from tournant.kernels.layout import KVLayout
from tournant.workers.config import EngineConfig
from tournant.workers.device import CpuDevice, CudaDevice, make_device, pack
from tournant.workers.errors import ConfigError
from tournant.workers.kv_cache import DeviceMemory, gpu_pool_blocks
from tournant.workers.model_runner import ModelRunner
from tournant.workers.warm_up import kinds_of_steps, largest_batch

LAYOUT = KVLayout(2, 2, 16, 64, torch.float32)  # blocks of 32 KiB
GIB = 1 << 30


def test_auto_takes_the_cpu_where_there_is_no_gpu_and_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert make_device("auto").kind == make_device("cpu").kind == "cpu"
    with pytest.raises(
        ConfigError, match=r"^device is 'cuda', but .* finds no usable NVIDIA GPU .*; choose cpu or auto$"
    ):
        make_device("cuda")


def test_cpu_defaults() -> None:
    cpu = CpuDevice()
    assert (cpu.block_tokens, cpu.num_in_flight, cpu.graph_sizes(64)) == (16, 1, ())
    assert cpu.host_buffer((2, 3), torch.float16).shape == (2, 3)


def test_a_captured_call_runs_again_into_the_same_result() -> None:
    x = torch.ones(3)
    again = CpuDevice().capture(lambda: x * 2)
    first = again()
    x.fill_(5)
    assert again() is first
    assert first.tolist() == [10.0] * 3


def test_sizes_of_graphs_leave_little_padding() -> None:
    cuda = object.__new__(CudaDevice)  # a GPU's rules need none
    assert cuda.graph_sizes(1) == (1,)
    assert cuda.graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    sizes = cuda.graph_sizes(4096)
    assert sizes[-1] == 512
    assert sorted(set(sizes)) == list(sizes)
    for count in range(17, 513):
        assert min(size for size in sizes if size >= count) < count * 1.5 + 1


def test_packed_arrays_begin_at_16_bytes() -> None:
    arrays = [np.arange(count, dtype=np.int64) + count for count in (3, 0, 1, 8, 5)]
    packed, starts = pack(arrays, pin_memory=False)
    assert all(start % 2 == 0 for start in starts)
    for start, array in zip(starts, arrays, strict=True):
        assert packed[start : start + array.size].tolist() == array.tolist()


def test_a_gpu_pool_takes_what_is_left() -> None:
    memory = DeviceMemory(total=10 * GIB, used=4 * GIB, step=GIB)
    left = 9 * GIB - 5 * GIB
    assert gpu_pool_blocks(EngineConfig(), LAYOUT, memory) == left // LAYOUT.block_bytes
    assert gpu_pool_blocks(EngineConfig(kv_cache_bytes=GIB), LAYOUT, memory) == GIB // LAYOUT.block_bytes
    assert gpu_pool_blocks(EngineConfig(gpu_memory_utilization=0.6), LAYOUT, memory) == GIB // LAYOUT.block_bytes
    with pytest.raises(ConfigError, match=rf"kv_cache_bytes is {5 * GIB}, but .* leaves {left} bytes"):
        gpu_pool_blocks(EngineConfig(kv_cache_bytes=5 * GIB), LAYOUT, memory)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization 0.5 .* leaves 0 bytes .* max_num_batched_tokens"):
        gpu_pool_blocks(EngineConfig(gpu_memory_utilization=0.5), LAYOUT, memory)


@pytest.mark.parametrize("value", [0, -0.1, 1.01, True, "0.9", float("nan")])
def test_impossible_shares_of_memory_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization is"):
        EngineConfig(gpu_memory_utilization=value)  # type: ignore[arg-type]


def test_batches_of_the_warm_up_keep_every_limit() -> None:
    batch = largest_batch(max_num_seqs=5, max_num_batched_tokens=23, max_model_len=100, block_tokens=8, vocab_size=50)
    assert (len(batch.rows), batch.num_tokens, len(batch.sampling)) == (5, 23, 5)
    assert largest_batch(64, 1024, 10, 16, 50).counts == [10] * 64
    assert largest_batch(64, 7, 10, 16, 50).counts == [1] * 7
    steps = list(kinds_of_steps(24, 100, 64, 16, 50))
    assert {(step.counts[0], step.starts[0] + step.counts[0]) for step in steps} == {
        (count, context) for count in (1, 2, 4, 8, 16) for context in (count, 64)
    }
    assert all(len(step.block_updates[0][2]) <= 4 for step in steps)


class ProfilingCpu(CpuDevice):
    """Sizes its pool as a GPU does: after a run of the largest step."""

    profiled = 0

    def pool_blocks(self, config: EngineConfig, layout: KVLayout, profile: Callable[[], object]) -> int:
        profile()
        self.profiled += 1
        return gpu_pool_blocks(config, layout, DeviceMemory(1 << 20, 0, 1 << 19))


def test_the_largest_step_runs_before_the_pool_exists(tiny_model: Path) -> None:
    wanted = Session(make_engine(tiny_model)).ask([[1, 2, 3]], max_tokens=5)
    device = ProfilingCpu()
    engine = make_engine(tiny_model, 10, device, max_num_batched_tokens=100)
    assert device.profiled == 1
    assert isinstance(engine.runner, ModelRunner)
    assert engine.runner.cache.num_blocks == 10
    assert Session(engine).ask([[1, 2, 3]], max_tokens=5) == wanted


def test_a_device_says_how_many_batches_it_wants(tiny_model: Path) -> None:
    class Deep(CpuDevice):
        num_in_flight = 3

    session = Session(make_engine(tiny_model, on=Deep()))
    session.submit([1, 2, 3], max_tokens=6)
    session.step()
    session.step()
    assert not session.outputs  # two batches are in flight, the third makes the first be booked
    session.step()
    assert session.outputs
    shallow = Session(make_engine(tiny_model, on=Deep(), num_in_flight=1))
    shallow.submit([1, 2, 3], max_tokens=6)
    shallow.step()
    assert shallow.outputs
