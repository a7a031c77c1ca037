"""Whole blocks between the KV pool and one contiguous staging buffer, or within the pool: bytes, nothing else.

pool: any dense tensor whose first axis is the block (the KV cache, or the scales of fp8 KV); its blocks hold a multiple
of 8 bytes. staging: dense, the same dtype and block shape, at least as many blocks as ids. ids int64 [M], dense, on
the pool's device; a negative id skips its place. Offsets are 64-bit. The caller allocates everything; no block may be
written twice or be both read and written in one call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WORD = torch.int64
CHUNK_WORDS = 2048  # 16 KiB a program: eight 16-byte loads in flight per thread, and pieces enough to fill the card


@triton.jit(do_not_specialize=["chunks"])
def block_copy_kernel(
    target_ptr, source_ptr, target_ids_ptr, source_ids_ptr, block_words, chunks, chunk_words: tl.constexpr
):
    """One program: a chunk of one block."""
    place = tl.program_id(0) // chunks
    words = tl.program_id(0) % chunks * chunk_words + tl.arange(0, chunk_words)
    source, target = place.to(tl.int64), place.to(tl.int64)
    if source_ids_ptr is not None:
        source = tl.load(source_ids_ptr + place)
    if target_ids_ptr is not None:
        target = tl.load(target_ids_ptr + place)
    if (source < 0) | (target < 0):
        return
    mask = words < block_words
    values = tl.load(source_ptr + source * block_words + words, mask=mask)
    tl.store(target_ptr + target * block_words + words, values, mask=mask)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(len(tensor), -1).view(torch.uint8).view(WORD)


def _launch(
    target: torch.Tensor,
    source: torch.Tensor,
    target_ids: torch.Tensor | None,
    source_ids: torch.Tensor | None,
    num_blocks: int,
) -> None:
    if not num_blocks:
        return
    source, target = _words(source), _words(target)
    block_words = source.shape[1]
    chunks = triton.cdiv(block_words, CHUNK_WORDS)
    block_copy_kernel[(num_blocks * chunks,)](
        target, source, target_ids, source_ids, block_words, chunks, CHUNK_WORDS, num_warps=4, enable_fp_fusion=True
    )


def gather_blocks(pool: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> None:
    """staging[i] = pool[ids[i]]."""
    _launch(staging, pool, None, ids, len(ids))


def scatter_blocks(staging: torch.Tensor, ids: torch.Tensor, pool: torch.Tensor) -> None:
    """pool[ids[i]] = staging[i]."""
    _launch(pool, staging, ids, None, len(ids))


def copy_blocks(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """pool[dst[i]] = pool[src[i]]; see `ops.copy_blocks`."""
    _launch(pool, pool, dst, src, len(src))
