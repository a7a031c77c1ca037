"""Tile sizes and splits of the attention kernels: small rules with their reasons. Not yet measured on a card."""

from __future__ import annotations

from dataclasses import dataclass

from tournant.kernels.triton.card import Card

MIN_ROWS = 16  # the smallest tile side of a tensor-core product
DECODE_LOAD_BYTES = 16 << 10
MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 128


@dataclass(frozen=True, slots=True)
class TileShape:
    """block_m: rows (query heads of one KV head times queries); block_n: tokens; warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def decode_shape(card: Card, head_size: int, kv_bytes: int, group: int) -> TileShape:
    """Tile for one query per sequence. head_size in elements, kv_bytes per element of KV, group: heads per KV head.

    Reading at full speed needs about 60 KiB in flight per multiprocessor (bandwidth times latency, with a margin).
    K and V come in pieces of 16 KiB; four stages keep three of each in shared memory, 104 KiB with the rest, so two
    programs fit a multiprocessor: one loads while the other computes. With less shared memory (sm_80), three stages.
    """
    padded = _power_of_two(head_size)
    block_n = min(max(DECODE_LOAD_BYTES // (padded * kv_bytes), MIN_ROWS), 128)
    num_warps = 8 if kv_bytes == 4 else 4  # float32 products live in registers: fewer for each thread
    return TileShape(max(MIN_ROWS, _power_of_two(group)), block_n, num_warps, 4 if card.shared_bytes > 200 << 10 else 3)


def prefill_shape(card: Card, head_size: int, kv_bytes: int, group: int, num_queries: int) -> TileShape:
    """Tile for many queries per sequence; num_queries: the most that one sequence has in this step.

    128 rows reuse a KV tile 128 times from shared memory, which is enough for the tensor cores, and leave the
    accumulator 64 registers per thread at head size 128 with 8 warps; a head twice as large halves the rows. Fewer
    rows when there are not that many queries. 64 tokens, or 32 where sm_80, whose products take both operands from
    registers, would spill. Three stages load one tile (sm_80) or two (sm_90) ahead; a large head does not leave room
    for that in 99 KiB (sm_86, sm_89). float32 runs without tensor cores, where only small tiles fit the registers.
    """
    padded = _power_of_two(head_size)
    rows = max(_power_of_two(num_queries * group), _power_of_two(group), MIN_ROWS)
    if kv_bytes == 4:
        return TileShape(max(min(rows, 32), _power_of_two(group)), MIN_ROWS, 8, 2)
    block_m = max(min(rows, 128 if padded <= 128 else 64), _power_of_two(group))
    block_n = 64 if padded <= (128 if card.arch >= 90 else 64) else 32
    num_stages = 3 if padded <= 128 or card.shared_bytes > 100 << 10 else 2
    return TileShape(block_m, block_n, 8 if block_m >= 128 else 4, num_stages)


def prefill_splits(card: Card, num_programs: int, max_tokens: int) -> int:
    """Into how many parts paged_prefill cuts KV: more than one only while whole multiprocessors would idle, as for the
    last chunk of a long cached prompt, so that the scratch memory stays below one tile a multiprocessor.
    """
    return max(1, min(card.num_sms // max(num_programs, 1), max_tokens // MIN_SPLIT_TOKENS, MAX_SPLITS))


def decode_splits(card: Card, num_programs: int, max_tokens: int) -> int:
    """Into how many parts paged_decode cuts KV, given the programs there are without (tiles times KV heads).

    Two programs fit a multiprocessor. The last wave of programs leaves part of the card idle, so among the splits
    that keep MIN_SPLIT_TOKENS tokens each (below that, combining costs more than it gains), take the smallest whose
    waves are within 5 % of the fullest.
    """
    slots = 2 * card.num_sms
    most = min(max_tokens // MIN_SPLIT_TOKENS, MAX_SPLITS, -(-4 * slots // max(num_programs, 1)))
    if num_programs >= 4 * slots or most <= 1:
        return 1

    def fullness(splits: int) -> float:
        waves = num_programs * splits / slots
        return waves / -(-num_programs * splits // slots)

    best = max(fullness(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if fullness(splits) >= 0.95 * best)
