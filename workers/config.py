"""Configuration of one replica's engine: validated once, frozen, never overwritten after construction.

Values that depend on the machine or the model (pool size, largest context) are `None` here and are returned in
`EngineInfo` (messages.py) by the engine that measured them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from tournant.kvstore.config import parse_bytes
from tournant.workers.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "bfloat16", "float16", "float32")
QUANTIZATIONS = ("auto", "native", "dequantize")
OVERFLOW_ATTENTIONS = ("auto", "in_place", "streamed")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """Decode steps of sequences larger than the device read only some of their blocks below it.

    budget: share of these blocks that each KV head reads, chosen anew in each step and layer; min_mass: share of the
    attention that they must carry, estimated, or the layer reads all of them; 0: no demand.
    """

    budget: float
    min_mass: float = 0.0

    def __post_init__(self) -> None:
        for name, low, high in (("budget", 0.0, 1.0), ("min_mass", -1.0, 1.0)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not low < value <= high or value < 0:
                least = "above 0" if name == "budget" else "from 0"
                raise ConfigError(f"sparse_attention.{name} is {value!r}; it must be a number {least} to 1")


@dataclass(frozen=True, slots=True)
class WeightsOffload:
    """Layers that stay on the device, and those that stream to it while it computes; of each rank.

    device_bytes: of embedding, head, norms and the layers that stay, beside which there are two buffers of a layer;
    host_bytes: RAM for layers that stream, the others are read from disk; folder: of the file without a name for layers
    that the model's files do not hold as they are multiplied, None = /var/tmp. Sizes may be text ("512MiB").
    """

    device_bytes: int
    host_bytes: int = 0
    folder: str | None = None

    def __post_init__(self) -> None:
        for name, low in (("device_bytes", 1), ("host_bytes", 0)):
            value = given = getattr(self, name)
            if isinstance(given, str):
                try:
                    value = parse_bytes(given)
                except ValueError as error:
                    raise ConfigError(f"weights_offload.{name} is {given!r}; {error}") from None
                object.__setattr__(self, name, value)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= 1 << 44:
                raise ConfigError(
                    f"weights_offload.{name} is {given!r}; it must be a size from {low} to {1 << 44} bytes"
                )
        if not isinstance(self.folder, str | None) or self.folder == "":
            raise ConfigError(f"weights_offload.folder is {self.folder!r}; it must be the path of a folder")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an operator chooses about an engine.

    device: "auto" takes cuda when there is one; dtype: compute and KV dtype, "auto" = bfloat16;
    quantization: of a .gguf file's matrices: "native" multiplies 4- and 8-bit ones as they are, "dequantize" turns them
    into the dtype first, "auto" = native on a CPU where the types allow it (Q4_0, Q4_1, Q8_0);
    kv_cache_dtype: of KV on the device, "auto" = dtype;
    max_model_len: tokens of prompt + output per sequence, None = the model's own limit;
    max_num_seqs: sequences that run at once; max_num_batched_tokens: tokens computed in one step;
    max_queued_requests: requests that may wait beyond max_num_seqs before new ones are refused with 503;
    kv_cache_bytes: size of the device block pool, None = the lesser of 1 GiB and a quarter of free memory on CPU, what
    gpu_memory_utilization leaves on CUDA; gpu_memory_utilization: share of a GPU's memory that weights, the largest
    step and the pool may take together;
    block_tokens: tokens per KV block, None = 16 on CPU, 64 on CUDA; num_threads: CPU threads, None = all cores;
    num_in_flight: batches that run or wait to be booked while the next is scheduled, None = 1 on CPU, 2 on CUDA, but
    one per stage at least;
    overflow_host_bytes, overflow_disk_bytes: places below the device, of each rank, for the KV of running sequences
    that are larger than it, in RAM and on disk, 0 and 0 = such sequences are refused; overflow_folder: where the disk
    part lies, None = /var/tmp; overflow_attention: "in_place" attends to RAM's blocks with the CPU, "streamed" copies
    them to the device first, "auto" = on CUDA what takes less time by estimate, in deterministic mode streamed, else in
    place; overflow_host_bytes_per_s, overflow_disk_bytes_per_s: emulated link between device and RAM and emulated
    drive, 0 = off; sparse_attention: see SparseAttention, None = all blocks count; weights_offload: see
    WeightsOffload, None = all layers are on the device;
    tensor_parallel_size: ranks that share every layer; pipeline_parallel_size: stages of layers, one after another.
    Each rank is a process; on CUDA each has a GPU. num_threads and kv_cache_bytes are of each rank then.
    """

    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_queued_requests: int = 1024
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    deterministic: bool = False
    block_tokens: int | None = None
    num_threads: int | None = None
    num_in_flight: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    overflow_host_bytes: int = 0
    overflow_disk_bytes: int = 0
    overflow_folder: str | None = None
    overflow_attention: str = "auto"
    overflow_host_bytes_per_s: int = 0
    overflow_disk_bytes_per_s: int = 0
    sparse_attention: SparseAttention | None = None
    weights_offload: WeightsOffload | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError(f"device is {self.device!r}; it must be one of {', '.join(DEVICES)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"quantization is {self.quantization!r}; it must be one of {', '.join(QUANTIZATIONS)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}; it must be one of {', '.join(KV_CACHE_DTYPES)}"
            )
        if self.overflow_attention not in OVERFLOW_ATTENTIONS:
            raise ConfigError(
                f"overflow_attention is {self.overflow_attention!r}; it must be one of {', '.join(OVERFLOW_ATTENTIONS)}"
            )
        for name, kind in _SECTIONS.items():
            object.__setattr__(self, name, _section(name, kind, getattr(self, name)))
        if not isinstance(self.overflow_folder, str | None) or self.overflow_folder == "":
            raise ConfigError(f"overflow_folder is {self.overflow_folder!r}; it must be the path of a folder")
        limits = {
            "max_model_len": (1, 1 << 24),
            "max_num_seqs": (1, 4096),
            "max_num_batched_tokens": (1, 1 << 20),
            "max_queued_requests": (0, 1 << 20),
            "kv_cache_bytes": (1 << 10, 1 << 44),
            "overflow_host_bytes": (0, 1 << 44),
            "overflow_disk_bytes": (0, 1 << 46),
            "overflow_host_bytes_per_s": (0, 1 << 44),
            "overflow_disk_bytes_per_s": (0, 1 << 44),
            "block_tokens": (8, 256),
            "num_threads": (1, 1024),
            "num_in_flight": (1, 8),
            "tensor_parallel_size": (1, 256),
            "pipeline_parallel_size": (1, 256),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization is {share!r}; it must be a number above 0 and at most 1")
        if self.sparse_attention is not None and not self.overflow_host_bytes + self.overflow_disk_bytes:
            raise ConfigError(
                "sparse_attention chooses among blocks below the device, and there are none: give overflow_host_bytes "
                "or overflow_disk_bytes too, or leave it out"
            )
        for name in ("enable_prefix_caching", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        if self.block_tokens is not None and self.block_tokens & (self.block_tokens - 1):
            raise ConfigError(f"block_tokens is {self.block_tokens}; it must be a power of two")

    @property
    def num_ranks(self) -> int:
        """Processes that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def _section(name: str, kind: type[Any], data: object) -> object:
    """What `data`, a mapping of names to values, says of a section; None and a section are left as they are."""
    if data is None or isinstance(data, kind):
        return data
    known = [item.name for item in fields(kind)]
    needed = next(item.name for item in fields(kind) if item.default is MISSING)
    if not isinstance(data, Mapping) or needed not in data:
        raise ConfigError(f"{name} is {data!r}; it must have {needed}, and may have {', '.join(known[1:])}")
    if unknown := [key for key in data if key not in known]:
        raise ConfigError(f"{name}.{unknown[0]} is no key; known keys: {', '.join(known)}")
    return kind(**data)


_SECTIONS: Mapping[str, type[Any]] = {"sparse_attention": SparseAttention, "weights_offload": WeightsOffload}
_OPTIONAL = frozenset(item.name for item in fields(EngineConfig) if item.default is None)
