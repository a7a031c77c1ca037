"""Shape of the KV cache and slot arithmetic: the only place that computes either.

Owns: the tensor `[num_blocks, num_layers, 2 (K|V), num_kv_heads, block_tokens, head_size]` that holds the KV of one
shard, sizes in bytes, and the numbering of token slots. Does not own the tensor itself or who may write which block.

Invariants:
 1. A block is one contiguous piece over all layers, so a copy of a block is one memcpy.
 2. Token slot = physical block * block_tokens + position % block_tokens; slots and offsets are 64-bit.
 3. `layout_id` depends on nothing that tensor or pipeline parallelism changes: blocks cut differently over shards keep
    their keys. Changing its encoding changes FORMAT_TAG; a golden vector in tests/kernels/test_layout.py holds it.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

FORMAT_TAG = b"tournant-layout-1"
AXES = b"block,layer,kv,kv_head,token,head_size"
MIN_BLOCK_TOKENS, MAX_BLOCK_TOKENS = 8, 256
HEAD_SIZE_STEP, MAX_HEAD_SIZE = 16, 256

KV_FORMS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
SCALE_BYTES = torch.float32.itemsize

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class KVLayout:
    """KV of one shard: how many layers and KV heads it holds, and the form of a block.

    block_tokens: a power of two from 8 to 256; head_size: a multiple of 16 up to 256; dtype: one of KV_FORMS;
    rope_digest: digest of the RoPE frequencies that the stored keys were rotated with (part of `layout_id`).

    float8_e4m3fn codes are worth code * scale, with one float32 scale per block, layer, K|V and KV head. Scales live
    beside the KV tensor, in one of their own [num_blocks, num_layers, 2, num_kv_heads] (`allocate_scales`), and follow
    the codes in a block's byte image. The other forms have none.
    """

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    head_size: int
    dtype: torch.dtype
    rope_digest: bytes = b""

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_kv_heads < 1:
            raise ValueError(
                f"num_layers is {self.num_layers}, num_kv_heads {self.num_kv_heads}; both must be 1 or more"
            )
        tokens, size = self.block_tokens, self.head_size
        if not MIN_BLOCK_TOKENS <= tokens <= MAX_BLOCK_TOKENS or tokens & (tokens - 1):
            raise ValueError(
                f"block_tokens is {tokens}; it must be a power of two from {MIN_BLOCK_TOKENS} to {MAX_BLOCK_TOKENS}"
            )
        if not 0 < size <= MAX_HEAD_SIZE or size % HEAD_SIZE_STEP:
            raise ValueError(f"head_size is {size}; it must be a multiple of {HEAD_SIZE_STEP} up to {MAX_HEAD_SIZE}")
        if self.dtype not in KV_FORMS:
            raise ValueError(f"KV dtype is {self.dtype}; it must be one of {', '.join(map(str, KV_FORMS))}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and KV heads of the shard, K and V, without scales."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, scales included: what it takes of the pool, and its byte image in every tier."""
        return self.token_bytes * self.block_tokens + self.scale_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of one block: 0 for every form but e4m3."""
        return self.num_layers * 2 * self.num_kv_heads * SCALE_BYTES if self.has_scales else 0

    @property
    def has_scales(self) -> bool:
        """Whether stored KV is only known together with its scales."""
        return self.dtype == torch.float8_e4m3fn

    @property
    def kv_form(self) -> str:
        """Numeric form of stored KV, a value of KV_FORMS."""
        return KV_FORMS[self.dtype]

    @property
    def layout_id(self) -> bytes:
        """SHA-256 over the length-prefixed block tokens, head size, order of axes and RoPE digest (32 bytes)."""
        hasher = hashlib.sha256()
        numbers = (_LENGTH.pack(self.block_tokens), _LENGTH.pack(self.head_size))
        for piece in (FORMAT_TAG, *numbers, AXES, self.rope_digest):
            hasher.update(_LENGTH.pack(len(piece)) + piece)
        return hasher.digest()

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """Shape of the KV tensor of `num_blocks` blocks."""
        return (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.head_size)

    def num_blocks_for(self, num_bytes: int) -> int:
        """Whole blocks that fit into `num_bytes`."""
        return num_bytes // self.block_bytes

    def allocate(self, num_blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """A zeroed KV tensor of `shape(num_blocks)`; on CPU its pages are taken from the system when first written."""
        return torch.zeros(self.shape(num_blocks), dtype=self.dtype, device=device)

    def allocate_scales(self, num_blocks: int, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """Zeroed float32 scales [num_blocks, num_layers, 2, num_kv_heads] of a KV tensor that needs them, else None."""
        shape = (num_blocks, self.num_layers, 2, self.num_kv_heads)
        return torch.zeros(shape, dtype=torch.float32, device=device) if self.has_scales else None

    def block_offset(self, block: int) -> int:
        """Byte offset of a block in the KV tensor."""
        return block * self.token_bytes * self.block_tokens

    def slots(self, block_table: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Token slots of `positions` (int [N]) of a sequence with physical blocks `block_table` (int [max_blocks]).

        Raises IndexError when a position lies beyond the table.
        """
        table = np.asarray(block_table, dtype=np.int64)
        where = np.asarray(positions, dtype=np.int64)
        return table[where // self.block_tokens] * self.block_tokens + where % self.block_tokens
