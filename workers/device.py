"""Where an engine computes: exactly two devices, `cpu` and `cuda`, and everything in which they differ.

Owns: where tensors live, how a step's inputs get there and its results come back, streams and events, capturing of
graphs, memory for the KV pool. Does not own tensors, batches or kernels (`ops` dispatches by the device of a tensor).

Invariants:
 1. Work is given to a device in order and done in order; only a `Lane` runs beside it, and only as its marks say.
 2. Nothing but `Mark.wait`, `download`'s result and the profiling of memory waits for a GPU.
 3. On the CPU everything is done when a call returns, so the code above is the same for both.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.kvstore.host_tier import PageLock
from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError
from tournant.workers.kv_cache import DeviceMemory, cpu_pool_blocks, gpu_pool_blocks

Result = TypeVar("Result")
MAX_GRAPH_SEQS = 512


class Mark(Protocol):
    """A place in a lane's work."""

    def done(self) -> bool:
        """Whether everything before it has been carried out."""

    def wait(self) -> None:
        """Return when that is so. Raises RuntimeError when the device failed."""

    def hold_compute(self) -> None:
        """Let computing that is given to the device from now on begin only after it."""


class Lane(Protocol):
    """A queue of work that a device carries out beside computing, in order."""

    def follow_compute(self) -> None:
        """Let work given to this lane from now on begin only after all computing given so far."""

    def active(self) -> AbstractContextManager[object]:
        """While it is entered, what torch and the kernels are given goes to this lane."""

    def mark(self) -> Mark:
        """The place after all work given to this lane so far."""


class Stopwatch:
    """How long a queue's work between `start` and `stop` takes, where it is active; here what a call takes."""

    def start(self) -> None:
        """Begin."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """End."""
        self._seconds = time.perf_counter() - self._started

    def seconds(self) -> float | None:
        """None until the work is over."""
        return self._seconds


class Device(ABC):
    """torch_device: where tensors live; block_tokens, num_in_flight: defaults of the configuration."""

    torch_device: torch.device
    block_tokens: int
    num_in_flight: int

    @property
    def kind(self) -> str:
        """ "cpu" or "cuda"."""
        return self.torch_device.type

    @property
    def has_link(self) -> bool:
        """Whether its memory is not the CPU's, so that bytes go from one to the other over a link, in lanes."""
        return self.kind != "cpu"

    def stopwatch(self) -> Stopwatch:
        """One to use once."""
        return Stopwatch()

    @abstractmethod
    def pool_blocks(self, config: EngineConfig, layout: KVLayout, profile: Callable[[], object]) -> int:
        """Blocks of the KV pool. profile: runs the largest step, to see what it takes. Raises ConfigError."""

    @abstractmethod
    def upload(self, arrays: Sequence[npt.NDArray[np.int64]]) -> list[torch.Tensor]:
        """One-dimensional int64 arrays as tensors of the device; the arrays must not change afterwards."""

    @abstractmethod
    def download(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Begin to bring tensors to the CPU. The result waits until they are there and returns them."""

    @abstractmethod
    def graph_sizes(self, max_num_seqs: int) -> tuple[int, ...]:
        """Numbers of sequences for which decode steps are captured, ascending; empty for none."""

    @abstractmethod
    def capture(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """`call` as something that can be run again and again on the same tensors, faster than by calling it.

        It is called a few times now. The result of every run is the same object, overwritten by the next run.
        """

    @abstractmethod
    def new_lane(self) -> Lane:
        """A queue beside computing."""

    @property
    def page_lock(self) -> PageLock | None:
        """What locks memory of other processes, mapped here, so that this device copies it fast; None: no need."""
        return None

    @abstractmethod
    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the CPU that this device reads and writes fast."""


def _register(address: int, num_bytes: int) -> Callable[[], None]:
    """Make CUDA know memory as page-locked; returns what undoes that. Raises RuntimeError when it cannot."""
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
    return lambda: torch.cuda.check_error(runtime.cudaHostUnregister(address))


def pack(arrays: Sequence[npt.NDArray[np.int64]], *, pin_memory: bool) -> tuple[torch.Tensor, list[int]]:
    """All arrays in one int64 tensor of the CPU, and where each begins: at multiples of 16 bytes, since Triton compiles
    anew when an alignment changes.
    """
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += array.size + array.size % 2
    packed = torch.empty(end, dtype=torch.int64, pin_memory=pin_memory)
    host = packed.numpy()
    for start, array in zip(starts, arrays, strict=True):
        host[start : start + array.size] = array
    return packed, starts


class _Done:
    """A mark or lane of the CPU: what was given has been done."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def hold_compute(self) -> None:
        return

    def follow_compute(self) -> None:
        return

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Mark:
        return self


class CpuDevice(Device):
    """The machine's own cores and memory."""

    torch_device = torch.device("cpu")
    block_tokens = 16
    num_in_flight = 1

    def pool_blocks(self, config: EngineConfig, layout: KVLayout, profile: Callable[[], object]) -> int:
        """`kv_cache_bytes`, or a share of free memory; nothing needs to be tried."""
        return cpu_pool_blocks(config, layout)

    def upload(self, arrays: Sequence[npt.NDArray[np.int64]]) -> list[torch.Tensor]:
        """The arrays' own memory."""
        return [torch.from_numpy(array) for array in arrays]

    def download(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """The tensors themselves."""
        return lambda: list(tensors)

    def graph_sizes(self, max_num_seqs: int) -> tuple[int, ...]:
        """None: a call costs less than a copy into static buffers."""
        return ()

    def capture(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """Calls `call` each time and copies its result, so that the contract of graphs can be tested without one."""
        kept = call()

        def again() -> Result:
            found = call()
            if isinstance(kept, torch.Tensor) and isinstance(found, torch.Tensor):
                kept.copy_(found)
            return kept

        return again

    def new_lane(self) -> Lane:
        """Nothing runs beside computing."""
        return _Done()

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(tuple(shape), dtype=dtype)


class _Event:
    """A CUDA event on the stream that is current when it is made."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def hold_compute(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class _CudaStopwatch(Stopwatch):
    """Two CUDA events on the streams that are current when they are made."""

    def start(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begin.record()

    def stop(self) -> None:
        self._end.record()

    def seconds(self) -> float | None:
        return self._begin.elapsed_time(self._end) / 1e3 if self._end.query() else None


class _Stream:
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def follow_compute(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    def active(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        with torch.cuda.stream(self._stream):
            return _Event()


class CudaDevice(Device):
    """One NVIDIA GPU. Computing goes to the thread's current stream. Raises ConfigError when there is none."""

    block_tokens = 64
    num_in_flight = 2

    def __init__(self, index: int = 0) -> None:
        require_cuda(index)
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        try:
            ops.backend(self.torch_device)
        except ops.MissingBackendError as error:
            raise ConfigError(f"device is 'cuda': {error}") from error
        self._capture_stream = torch.cuda.Stream(self.torch_device)
        self._graph_memory = torch.cuda.graph_pool_handle()

    def pool_blocks(self, config: EngineConfig, layout: KVLayout, profile: Callable[[], object]) -> int:
        """`kv_cache_bytes`, or what `gpu_memory_utilization` leaves beside weights and the largest step."""
        device = self.torch_device
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_reserved(device)
        profile()
        torch.cuda.synchronize(device)
        step = torch.cuda.max_memory_reserved(device) - before
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return gpu_pool_blocks(config, layout, DeviceMemory(total, total - free, step))

    def upload(self, arrays: Sequence[npt.NDArray[np.int64]]) -> list[torch.Tensor]:
        """All arrays in one copy out of page-locked memory; torch reuses that memory only after the copy."""
        packed, starts = pack(arrays, pin_memory=True)
        moved = packed.to(self.torch_device, non_blocking=True)
        return [moved[start : start + array.size] for start, array in zip(starts, arrays, strict=True)]

    def download(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Copies into page-locked memory on the current stream, and an event after them."""
        found = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for target, source in zip(found, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        arrived = _Event()

        def wait() -> list[torch.Tensor]:
            arrived.wait()
            return found

        return wait

    def graph_sizes(self, max_num_seqs: int) -> tuple[int, ...]:
        """1, 2, 4, then multiples of 8 up to 64, of 16 up to 256, of 32: at most a seventh of the rows are padding."""
        sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MAX_GRAPH_SEQS + 1, 32)]
        most = min(max_num_seqs, MAX_GRAPH_SEQS)
        return (*(size for size in sizes if size < most), most)

    def capture(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """A CUDA graph. All graphs share their scratch memory, which is right because they run one after another."""
        self._capture_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._capture_stream):
            for _ in range(2):  # compiles kernels, sets up libraries: neither may happen while capturing
                call()
        torch.cuda.current_stream().wait_stream(self._capture_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory, stream=self._capture_stream):
            result = call()

        def replay() -> Result:
            graph.replay()
            return result

        return replay

    def stopwatch(self) -> Stopwatch:
        """One of the GPU's clock."""
        return _CudaStopwatch()

    def new_lane(self) -> Lane:
        """A stream."""
        return _Stream(self.torch_device)

    @property
    def page_lock(self) -> PageLock | None:
        """Registers memory with CUDA."""
        return _register

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Page-locked memory."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


def require_cuda(index: int = 0) -> None:
    """Raises ConfigError where this NVIDIA GPU cannot be used."""
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise ConfigError(
            f"device is 'cuda', but torch {torch.__version__} finds no usable NVIDIA GPU {index} here; choose cpu "
            "or auto"
        )


def make_device(name: str, index: int = 0) -> Device:
    """The device that `EngineConfig.device` names; index: which GPU. Raises ConfigError when it is "cuda" and there is
    none.
    """
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return CudaDevice(index)
    return CpuDevice()
