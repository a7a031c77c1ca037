"""Sequences larger than the device on a real engine: the tokens of one that holds all of them, whatever happens."""

from __future__ import annotations

import copy
import errno
import itertools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.faulty_disk import FaultyDisk
from tests.helpers.tiny_families import FAMILIES, build_family
from tests.helpers.tiny_model import build_tiny_model
from tests.workers.harness import Session, make_engine
from tests.workers.parallel_harness import Ranks, replica
from tournant.workers.engine import Engine
from tournant.workers.errors import ConfigError
from tournant.workers.messages import EngineRequest
from tournant.workers.model_runner import ModelRunner
from tournant.workers.sampling_params import SamplingParams

BLOCK = 16 * 2 * 2 * 2 * 64 * 4  # bytes of a block of M
DEVICE_BLOCKS = 8
BELOW = {"overflow_host_bytes": 64 * BLOCK, "overflow_disk_bytes": 512 * BLOCK}
HOW = ["in_place", "streamed", "auto"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("m"), max_positions=8400)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


def engine_of(folder: Path, **config: Any) -> Engine:
    return make_engine(folder, DEVICE_BLOCKS, **(BELOW | config))


def runner_of(engine: Engine) -> ModelRunner:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner


def fail_disk(engine: Engine) -> FaultyDisk:
    """Faults in the file of an engine's overflow."""
    pool = runner_of(engine).overflow
    assert pool is not None
    disk = FaultyDisk(pool._file._disk)
    pool._file._disk = disk
    return disk


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[tuple[int, int], list[int]]:
    """Greedy answers of an engine that holds everything, by length of the prompt and its seed."""
    session = Session(make_engine(folder, 600))
    wanted = [(8192, 0), (1000, 1), (1000, 2), (1500, 3)]
    return {key: session.ask([prompt_of(*key)], max_tokens=24)[0] for key in wanted}


@pytest.mark.parametrize("how", HOW)
def test_eight_thousand_tokens_over_a_pool_of_128(
    folder: Path, expected: dict[tuple[int, int], list[int]], how: str
) -> None:
    engine = engine_of(folder, overflow_attention=how)
    session = Session(engine)
    assert session.ask([prompt_of(8192)], max_tokens=24) == [expected[8192, 0]]
    stats = engine.stats()
    assert stats.num_preemptions == 0
    assert stats.overflow.written_bytes >= (8192 // 16 - DEVICE_BLOCKS) * BLOCK
    assert stats.overflow.disk_bytes > stats.overflow.host_bytes > 0
    assert (stats.overflow.streamed_bytes > 0) == (how == "streamed")
    again = session.submit(prompt_of(8192), max_tokens=24)  # its blocks are below: nearly all of them are hits
    session.drain()
    assert session.tokens(again) == expected[8192, 0]
    assert (session.outputs[again][0].cached_tokens or 0) >= 8192 - DEVICE_BLOCKS * 16 - 16


def test_all_of_it_in_ram_is_read_where_it_lies(folder: Path, expected: dict[tuple[int, int], list[int]]) -> None:
    engine = engine_of(folder, overflow_host_bytes=520 * BLOCK, overflow_disk_bytes=0)
    assert Session(engine).ask([prompt_of(8192)], max_tokens=24) == [expected[8192, 0]]
    counts = engine.stats().overflow
    assert (counts.disk_bytes, counts.streamed_bytes) == (0, 0)
    assert counts.host_bytes > 24 * (8192 // 16 - DEVICE_BLOCKS) * BLOCK


@pytest.mark.parametrize("disk", [0, 512])
@pytest.mark.parametrize("how", HOW)
def test_several_at_once_with_short_ones(
    folder: Path, expected: dict[tuple[int, int], list[int]], how: str, disk: int
) -> None:
    places = {"overflow_host_bytes": (64 if disk else 512) * BLOCK, "overflow_disk_bytes": disk * BLOCK}
    session = Session(engine_of(folder, overflow_attention=how, **places))
    short = [prompt_of(40, 7), prompt_of(25, 8)]
    alone = [Session(make_engine(folder, 64)).ask([prompt], max_tokens=24)[0] for prompt in short]
    long = [prompt_of(1000, 1), prompt_of(1000, 2), prompt_of(1500, 3)]
    found = session.ask([long[0], short[0], long[1], short[1], long[2]], max_tokens=24)
    assert found == [expected[1000, 1], alone[0], expected[1000, 2], alone[1], expected[1500, 3]]


def test_places_of_a_sequence_that_ended_are_read_in_long_runs(
    folder: Path, expected: dict[tuple[int, int], list[int]]
) -> None:
    """They are given out last block first, so that the next sequence's lie there the other way round."""
    engine = engine_of(folder, overflow_host_bytes=0, overflow_disk_bytes=66 * BLOCK)
    session, pool = Session(engine), runner_of(engine).overflow
    assert pool is not None
    assert session.ask([prompt_of(1000, 1)], max_tokens=24) == [expected[1000, 1]]
    runs: list[int] = []
    read = pool._read_disk
    pool._read_disk = lambda layer, places, rows: runs.append(len(places)) or read(layer, places, rows)  # type: ignore[func-returns-value, method-assign]
    assert session.ask([prompt_of(1000, 2)], max_tokens=24) == [expected[1000, 2]]
    last = runs[-4:]  # of the last step's two layers
    assert sum(last) >= 2 * (1000 // 16 - DEVICE_BLOCKS)


def test_forks_share_what_is_below(folder: Path) -> None:
    prompt = prompt_of(700, 4)
    whole = Session(make_engine(folder, 300))
    number = whole.submit(prompt, max_tokens=30, n=3, temperature=1.0, seed=5)
    whole.drain()
    session = Session(engine_of(folder))
    other = session.submit(prompt, max_tokens=30, n=3, temperature=1.0, seed=5)
    session.drain()
    assert [session.tokens(other, i) for i in range(3)] == [whole.tokens(number, i) for i in range(3)]


def test_cancelled_at_any_step_leaves_nothing(folder: Path, expected: dict[tuple[int, int], list[int]]) -> None:
    engine = engine_of(folder)
    session = Session(engine)
    for steps in (1, 3, 9, 12):
        number = session.submit(prompt_of(1000, 1), max_tokens=24)
        for _ in range(steps):
            session.step()
        engine.abort(number)
        session.drain()
        assert engine.stats().kv_used == 0
    assert engine.reset_prefix_cache()
    assert session.ask([prompt_of(1000, 1)], max_tokens=24) == [expected[1000, 1]]


def test_without_a_prefix_cache(folder: Path, expected: dict[tuple[int, int], list[int]]) -> None:
    session = Session(engine_of(folder, enable_prefix_caching=False))
    assert session.ask([prompt_of(1000, 1)], max_tokens=24) == [expected[1000, 1]]


def test_beyond_all_places_is_refused_with_the_numbers(folder: Path) -> None:
    engine = engine_of(folder, overflow_host_bytes=20 * BLOCK, overflow_disk_bytes=12 * BLOCK)
    assert engine.info.max_sequence_tokens == (DEVICE_BLOCKS + 32) * 16
    request = EngineRequest(1, prompt_of(641), SamplingParams(max_tokens=1))
    (output,) = engine.add_request(request)
    assert output.finish_reason == "error"
    assert output.error is not None
    assert "641 tokens; at most 639 fit" in output.error
    session = Session(engine)
    whole = Session(make_engine(folder, 64))
    prompt = prompt_of(600, 5)
    assert session.ask([prompt], max_tokens=40) == whole.ask([prompt], max_tokens=40)  # up to the last place


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_disk_that_fails_once_costs_a_second_computation(
    folder: Path, expected: dict[tuple[int, int], list[int]], what: str
) -> None:
    engine = engine_of(folder, overflow_host_bytes=8 * BLOCK)
    disk = fail_disk(engine)
    session = Session(engine)
    number = session.submit(prompt_of(1500, 3), max_tokens=24)
    for _ in range(9):
        session.step()
    disk.fail(what, errno.EIO)
    session.drain()
    assert session.tokens(number) == expected[1500, 3]
    assert engine.stats().num_preemptions == 1


def test_changed_bytes_on_disk_are_found(folder: Path, expected: dict[tuple[int, int], list[int]]) -> None:
    engine = engine_of(folder, overflow_host_bytes=8 * BLOCK)
    session = Session(engine)
    number = session.submit(prompt_of(1500, 3), max_tokens=24)
    for _ in range(9):
        session.step()
    pool = runner_of(engine).overflow
    assert pool is not None
    for place, writing in pool._writing.items():
        writing.result()
        row = place - pool.host_blocks
    pool._file.write(pool._offset(row, 1), memoryview(b"\x01" * 64))
    session.drain()
    assert session.tokens(number) == expected[1500, 3]
    assert engine.stats().num_preemptions == 1


def test_a_disk_that_never_works_ends_the_answer_and_serves_others(folder: Path) -> None:
    engine = engine_of(folder, overflow_host_bytes=8 * BLOCK)
    disk = fail_disk(engine)
    disk.fail("read", errno.EIO, forever=True)
    session = Session(engine)
    number = session.submit(prompt_of(1500, 3), max_tokens=24)
    short = session.submit(prompt_of(30, 6), max_tokens=24)
    session.drain()
    last = session.outputs[number][-1]
    assert last.finish_reason == "error"
    assert last.error is not None
    assert "was lost 4 times" in last.error
    assert session.tokens(short) == Session(make_engine(folder, 64)).ask([prompt_of(30, 6)], max_tokens=24)[0]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    found.start(1)
    yield found
    found.close()


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_every_rank_has_places_of_its_own(ranks: Ranks, folder: Path, tensor: int, pipeline: int) -> None:
    prompt, half = prompt_of(600, 12), BLOCK // 2  # what a rank has of a block
    with replica(ranks, folder, tensor, pipeline) as whole:
        want = whole.ask([prompt], max_tokens=12)
    below = {"overflow_host_bytes": 16 * half, "overflow_disk_bytes": 64 * half}
    with replica(ranks, folder, tensor, pipeline, kv_cache_bytes=DEVICE_BLOCKS * half, **below) as session:
        assert session.ask([prompt], max_tokens=12) == want
        stats = session.engine.stats().overflow
        assert min(stats.disk_bytes, stats.host_bytes) > 0
        told = pipeline * half  # of a block: first and last stage tell, of a stage one rank
        assert stats.written_bytes >= (600 // 16 - DEVICE_BLOCKS) * told


def build_long_family(family: str, folder: Path) -> Path:
    """A family of tiny_families, for up to 600 tokens."""
    config = copy.deepcopy(FAMILIES[family])
    config.max_position_embeddings = 600
    return build_family(config, folder)


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "qwen3"])
def test_families_with_windows_and_caps(family: str, tmp_path: Path) -> None:
    folder = build_long_family(family, tmp_path)
    prompt = prompt_of(400, 9)
    want = Session(make_engine(folder, 64)).ask([prompt], max_tokens=8)
    assert len(want[0]) == 8
    for how, place in itertools.product(HOW[:2], ("disk", "host")):
        engine = make_engine(folder, 6, overflow_attention=how, **{f"overflow_{place}_bytes": 1 << 24})
        assert Session(engine).ask([prompt], max_tokens=8) == want
        counts = engine.stats().overflow
        assert counts.disk_bytes + counts.host_bytes == getattr(counts, f"{place}_bytes") > 0


def test_a_form_with_scales_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="use fp8_e5m2 or auto"):
        engine_of(folder, kv_cache_dtype="fp8_e4m3", deterministic=False)


def test_sizes_without_sense_are_refused_with_the_numbers(folder: Path) -> None:
    with pytest.raises(ConfigError, match="overflow_host_bytes is 100, less than one block of 32768 bytes"):
        engine_of(folder, overflow_host_bytes=100)
    with pytest.raises(ConfigError, match=r"overflow_host_bytes is \d+, but only \d+ bytes of memory are free"):
        engine_of(folder, overflow_host_bytes=1 << 43)


def test_more_than_the_disk_has_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ConfigError, match=rf"overflow_disk_bytes is \d+, but {tmp_path} has 1000 free; choose"):
        engine_of(folder, overflow_disk_bytes=1 << 24, overflow_folder=str(tmp_path))
    with pytest.raises(ConfigError, match="overflow_folder is ''; it must be the path of a folder"):
        engine_of(folder, overflow_folder="")


def test_fp8_without_scales_goes_below(folder: Path) -> None:
    prompt = prompt_of(700, 10)
    want = Session(make_engine(folder, 64, kv_cache_dtype="fp8_e5m2")).ask([prompt], max_tokens=8)
    engine = engine_of(folder, kv_cache_dtype="fp8_e5m2")
    assert Session(engine).ask([prompt], max_tokens=8) == want
    assert engine.stats().overflow.written_bytes > 0


def test_nothing_of_it_is_left_in_the_folder(folder: Path, tmp_path: Path) -> None:
    engine = engine_of(folder, overflow_host_bytes=0, overflow_folder=str(tmp_path))
    assert Session(engine).ask([prompt_of(400, 11)], max_tokens=4)
    assert list(tmp_path.iterdir()) == []
