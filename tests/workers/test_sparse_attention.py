"""Decode steps that read some of a sequence's blocks below the device, on a real engine."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.faulty_disk import FaultyDisk
from tests.helpers.tiny_model import build_tiny_model
from tests.workers.harness import Session, make_engine
from tests.workers.test_overflow import BLOCK, DEVICE_BLOCKS, prompt_of, runner_of
from tournant.kernels.layout import KVLayout
from tournant.workers.config import EngineConfig, SparseAttention
from tournant.workers.device import CpuDevice
from tournant.workers.engine import Engine
from tournant.workers.errors import ConfigError
from tournant.workers.overflow_pool import OverflowPool

LENGTH, NEW = 500, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("m"), max_positions=1024)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """The answer of an engine that holds everything and reads everything."""
    return Session(make_engine(folder, 64)).ask([prompt_of(LENGTH)], max_tokens=NEW)[0]


def engine_of(folder: Path, budget: float, min_mass: float = 0.0, **config: Any) -> Engine:
    fields: dict[str, Any] = {"overflow_host_bytes": 40 * BLOCK} | config
    return make_engine(folder, DEVICE_BLOCKS, sparse_attention={"budget": budget, "min_mass": min_mass}, **fields)


def answer_of(engine: Engine) -> list[int]:
    return Session(engine).ask([prompt_of(LENGTH)], max_tokens=NEW)[0]


WHERE = {
    "in place": {},
    "streamed": {"overflow_attention": "streamed"},
    "disk": {"overflow_host_bytes": 0, "overflow_disk_bytes": 40 * BLOCK},
    "both": {"overflow_host_bytes": 7 * BLOCK, "overflow_disk_bytes": 40 * BLOCK},
}


@pytest.mark.parametrize("where", WHERE)
def test_with_all_blocks_it_is_dense_attention(folder: Path, expected: list[int], where: str) -> None:
    engine = engine_of(folder, 1.0, **WHERE[where])
    assert answer_of(engine) == expected
    stats = engine.stats().overflow
    assert stats.chosen_layers == 2 * (NEW - 1)
    assert stats.dense_layers == 0
    assert stats.missed_mass == 0.0


def test_half_of_the_blocks_are_the_same_wherever_they_lie(folder: Path, expected: list[int]) -> None:
    answers, read = [], []
    for config in WHERE.values():
        engine = engine_of(folder, 0.5, **config)
        answers.append(answer_of(engine))
        stats = engine.stats().overflow
        read.append(stats.host_bytes + stats.disk_bytes)
        assert 0 < stats.missed_mass <= stats.chosen_layers
    assert answers == answers[:1] * len(WHERE)
    assert len(set(read)) == 1  # each head's own half, wherever it lies
    assert answers[0] != expected  # random weights: every token depends on all of its context


def test_reads_everything_where_too_much_may_be_missed(folder: Path, expected: list[int]) -> None:
    engine = engine_of(folder, 0.5, 1.0)
    assert answer_of(engine) == expected
    stats = engine.stats().overflow
    assert stats.dense_layers == stats.chosen_layers == 2 * (NEW - 1)
    assert stats.missed_mass == 0.0


def test_a_chosen_block_that_is_lost_costs_a_second_computation(folder: Path, expected: list[int]) -> None:
    engine = engine_of(folder, 1.0, **WHERE["disk"])
    session = Session(engine)
    number = session.submit(prompt_of(LENGTH), max_tokens=NEW)
    while not session.tokens(number):
        session.step()
    pool = runner_of(engine).overflow
    assert pool is not None
    disk = FaultyDisk(pool._file._disk)
    pool._file._disk = disk
    disk.fail("read", errno.EIO)
    session.drain()
    assert session.tokens(number) == expected
    assert engine.stats().num_preemptions == 1


def test_several_rows_of_a_step_choose_for_themselves(folder: Path) -> None:
    prompts = [prompt_of(300, 1), prompt_of(40, 2), prompt_of(400, 3)]
    expected = Session(make_engine(folder, 64)).ask(prompts, max_tokens=NEW)
    engine = engine_of(folder, 1.0)
    assert Session(engine).ask(prompts, max_tokens=NEW) == expected
    assert engine.stats().overflow.chosen_layers > 2 * (NEW - 1)


@pytest.mark.parametrize(("budget", "min_mass"), [(0.0, 0.0), (1.5, 0.0), (0.5, -0.1), (0.5, 1.1), (True, 0.0)])
def test_shares_without_sense_are_refused(folder: Path, budget: float, min_mass: float) -> None:
    with pytest.raises(ConfigError, match="must be a number"):
        engine_of(folder, budget, min_mass)


def test_without_places_below_there_is_nothing_to_choose() -> None:
    with pytest.raises(ConfigError, match="there are none: give overflow_host_bytes or overflow_disk_bytes too"):
        EngineConfig(sparse_attention=SparseAttention(0.5))


def test_heads_are_read_alone(tmp_path: Path) -> None:
    """From RAM and from disk; what the others hold stays, and a fault costs those who read it."""
    layout = KVLayout(2, 4, 8, 16, torch.float32)
    pool = OverflowPool(layout, 3, 6, CpuDevice(), tmp_path, bounds_dtype=torch.float32)
    tensor = layout.allocate(9).normal_(generator=torch.Generator().manual_seed(0))
    pool.put(tensor, [(block, block) for block in range(9)])
    places = [0, 2, 3, 5, 8]
    heads = np.array([[1, 0, 1, 1, 0], [1, 1, 0, 1, 0], [1, 0, 1, 1, 1], [1, 1, 1, 1, 1]], np.bool_)
    chosen = torch.from_numpy(heads.T)[:, None, :, None, None]
    for layer in range(2):
        found = torch.full((len(places), 1, 2, 4, 8, 16), 7.0)
        assert pool.read_heads(layer, places, heads, found) == frozenset()
        assert torch.equal(found[:, 0], torch.where(chosen, tensor[places, layer], 7.0))
    head_bytes = pool.layer_bytes // 4 // 2
    at = pool._offset(3 - 3, 1) + 1 * head_bytes  # K of head 1 of place 3 in layer 1
    pool._file.write(at, memoryview(bytes(head_bytes)))
    found = torch.full((1, 1, 2, 4, 8, 16), 7.0)
    assert pool.read_heads(1, [3], np.array([[1], [0], [1], [1]], np.bool_), found) == frozenset()
    assert pool.read_heads(1, [3], np.array([[0], [1], [1], [0]], np.bool_), found) == frozenset({3})
    assert found[0, 0, :, 1:3].abs().max() == 0
    assert torch.equal(found[0, 0, :, 0], tensor[3, 1, :, 0])
    pool.close()
