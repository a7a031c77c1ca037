"""Input tensors against a loop that anyone can check."""

from __future__ import annotations

import random

import pytest
import torch

from tournant.kernels.layout import KVLayout
from tournant.workers.batch import UNKNOWN_TOKEN, Batch
from tournant.workers.device import CpuDevice
from tournant.workers.forward_input import ROW_MULTIPLE, InputBuilder

LAYOUT = KVLayout(1, 2, 8, 16, torch.float32)


def random_batch(rng: random.Random, max_seqs: int) -> tuple[Batch, dict[int, list[int]]]:
    batch = Batch(step=1)
    tables: dict[int, list[int]] = {}
    blocks = iter(rng.sample(range(1000), 900))
    for row in rng.sample(range(max_seqs), rng.randint(1, max_seqs)):
        start, count = rng.randint(0, 40), rng.choice([1, 1, 5, 17])
        tables[row] = [next(blocks) for _ in range(-(-(start + count) // 8))]
        cut = rng.randint(0, len(tables[row]))
        batch.block_updates += [(row, 0, tables[row][:cut]), (row, cut, tables[row][cut:])]
        batch.rows.append(row)
        batch.starts.append(start)
        batch.counts.append(count)
        batch.rope_offsets.append(rng.choice([0, 1000]))
        batch.token_ids += [rng.randrange(500) for _ in range(count - 1)] + [rng.choice([UNKNOWN_TOKEN, 7])]
        if rng.random() < 0.7:
            batch.sampling.append(len(batch.rows) - 1)
    return batch, tables


@pytest.mark.parametrize("deterministic", [False, True])
def test_against_a_loop(deterministic: bool) -> None:
    rng = random.Random(1)
    for _ in range(30):
        builder = InputBuilder(LAYOUT, 4, 6, 8, CpuDevice(), deterministic=deterministic)
        builder.last_tokens.copy_(torch.arange(100, 106))
        batch, tables = random_batch(rng, 6)
        step = builder.build(batch)
        ids, positions, slots, ends, at = [], [], [], [], 0
        for row, start, count, offset in zip(batch.rows, batch.starts, batch.counts, batch.rope_offsets, strict=True):
            for position in range(start, start + count):
                token = batch.token_ids[at]
                ids.append(100 + row if token == UNKNOWN_TOKEN else token)
                positions.append(position + offset)
                slots.append(tables[row][position // 8] * 8 + position % 8)
                at += 1
            ends.append(at - 1)
        assert step.num_tokens == at
        padding = -at % ROW_MULTIPLE if deterministic else 0
        assert step.input_ids.tolist() == ids + [0] * padding
        assert step.rope_positions.tolist() == positions + [0] * padding
        assert step.slot_mapping.tolist() == slots + [-1] * padding
        assert step.sample_rows.tolist() == [ends[entry] for entry in batch.sampling]
        assert step.sample_seqs.tolist() == [batch.rows[entry] for entry in batch.sampling]
        assert step.only_decodes == all(count == 1 for count in batch.counts)
        assert step.plan.num_tokens == at
        assert step.plan.deterministic == deterministic
        builder.remember(step, torch.arange(len(batch.sampling)) + 900)
        assert builder.last_tokens[step.sample_seqs].tolist() == list(range(900, 900 + len(batch.sampling)))
