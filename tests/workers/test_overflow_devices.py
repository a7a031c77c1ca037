"""Sequences larger than a device with a link: the data path of a GPU, on a CPU whose lanes tell what was not ordered.

Kernels are the CPU's, whose walks have the bits of one call, so that tokens must be those of an engine that holds all;
at the end the same through Triton's interpreter.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.helpers.tiny_model import build_tiny_model
from tests.helpers.triton_interpreter import KERNELS
from tests.workers.harness import Session, make_engine
from tests.workers.linked_device import LinkedCpu, LinkedLane, LinkedMark, watch
from tests.workers.test_overflow import BLOCK, DEVICE_BLOCKS, build_long_family, fail_disk, prompt_of, runner_of
from tournant.kernels import ops
from tournant.kernels.layout import KVLayout
from tournant.workers import overflow_ring
from tournant.workers.device import Mark
from tournant.workers.engine import Engine
from tournant.workers.errors import ConfigError
from tournant.workers.model_runner import ModelRunner
from tournant.workers.overflow_pool import OverflowPool

BELOW = {"overflow_host_bytes": 24 * BLOCK, "overflow_disk_bytes": 100 * BLOCK}
WAYS = ["in_place", "streamed", "auto"]
NUM_NEW = 12
CASES = [(900, 1), (700, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("m"), max_positions=2100)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[tuple[int, int], list[int]]:
    """Greedy answers of an engine that holds everything, by length of the prompt and its seed."""
    session = Session(make_engine(folder, 150))
    return {key: session.ask([prompt_of(*key)], max_tokens=NUM_NEW)[0] for key in CASES}


MakeEngine = Callable[..., Engine]


@pytest.fixture
def engine_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    """Makes an engine over a pool of 8 blocks and a link; in the end nothing on either side of it was a race."""
    monkeypatch.setattr(overflow_ring, "PART_TOKENS", 256)
    devices: list[LinkedCpu] = []

    def make(folder: Path, way: str, num_blocks: int = DEVICE_BLOCKS, **config: Any) -> Engine:
        devices.append(LinkedCpu())
        fields = BELOW | {"deterministic": False, "overflow_attention": way} | config
        engine = make_engine(folder, num_blocks, devices[-1], **fields)
        watch(engine, devices[-1], monkeypatch)
        return engine

    yield make
    for device in devices:
        assert device.races.found == []
        assert len(device.races.accesses) > 10


@pytest.mark.parametrize("way", WAYS)
def test_seven_times_the_pool(
    folder: Path, expected: dict[tuple[int, int], list[int]], engine_of: MakeEngine, way: str
) -> None:
    engine = engine_of(folder, way)
    session = Session(engine)
    assert session.ask([prompt_of(900, 1)], max_tokens=NUM_NEW) == [expected[900, 1]]
    overflow = engine.stats().overflow
    assert overflow.written_bytes >= (900 // 16 - DEVICE_BLOCKS) * BLOCK
    assert overflow.host_bytes > 0
    assert overflow.disk_bytes > 0
    assert overflow.streamed_bytes > 0
    if way == "in_place":
        assert overflow.streamed_bytes < overflow.host_bytes / 3  # pieces that are partly on the device
    if way == "streamed":
        assert overflow.streamed_bytes == overflow.host_bytes
    again = session.submit(prompt_of(900, 1), max_tokens=NUM_NEW)  # its blocks are below
    session.drain()
    assert session.tokens(again) == expected[900, 1]
    assert (session.outputs[again][0].cached_tokens or 0) >= 900 - DEVICE_BLOCKS * 16 - 16


def test_several_at_once_with_a_short_one(
    folder: Path, expected: dict[tuple[int, int], list[int]], engine_of: MakeEngine
) -> None:
    short = prompt_of(40, 7)
    (alone,) = Session(make_engine(folder, 64)).ask([short], max_tokens=NUM_NEW)
    session = Session(engine_of(folder, "auto"))
    found = session.ask([prompt_of(900, 1), short, prompt_of(700, 2)], max_tokens=NUM_NEW)
    assert found == [expected[900, 1], alone, expected[700, 2]]


def test_forks_and_what_they_share_on_the_device(folder: Path, engine_of: MakeEngine) -> None:
    """A beginning that others hold stays on the device, before blocks that are below."""
    prompt, how = prompt_of(400, 4), {"max_tokens": 20, "n": 2, "temperature": 1.0, "seed": 5}
    whole = Session(make_engine(folder, 150))
    number = whole.submit(prompt, **how)
    whole.drain()
    session = Session(engine_of(folder, "in_place"))
    holder = session.submit(prompt[:64], max_tokens=150)
    for _ in range(4):
        session.step()
    other = session.submit(prompt, **how)
    session.drain()
    assert [session.tokens(other, i) for i in range(2)] == [whole.tokens(number, i) for i in range(2)]
    assert len(session.tokens(holder)) == 150


@pytest.mark.parametrize("way", WAYS[:2])
def test_cancelled_at_any_step_leaves_nothing(
    folder: Path, expected: dict[tuple[int, int], list[int]], engine_of: MakeEngine, way: str
) -> None:
    engine = engine_of(folder, way)
    session = Session(engine)
    for steps in (2, 7, 11):
        number = session.submit(prompt_of(700, 2), max_tokens=NUM_NEW)
        for _ in range(steps):
            session.step()
        engine.abort(number)
        session.drain()
        assert engine.stats().kv_used == 0
    assert engine.reset_prefix_cache()
    assert session.ask([prompt_of(700, 2)], max_tokens=NUM_NEW) == [expected[700, 2]]


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("what", ["read", "write"])
def test_a_disk_that_fails_once_costs_a_second_computation(
    folder: Path, expected: dict[tuple[int, int], list[int]], engine_of: MakeEngine, what: str, way: str
) -> None:
    """Two steps are in flight when the first turns out to mean nothing."""
    engine = engine_of(folder, way, overflow_host_bytes=8 * BLOCK)
    disk = fail_disk(engine)
    session = Session(engine)
    number = session.submit(prompt_of(900, 1), max_tokens=NUM_NEW)
    for _ in range(8):
        session.step()
    disk.fail(what, errno.EIO)
    session.drain()
    assert session.tokens(number) == expected[900, 1]
    assert engine.stats().num_preemptions == 1


@pytest.mark.parametrize("family", ["gemma3", "gemma2"])
def test_families_with_windows_and_caps(family: str, tmp_path: Path, engine_of: MakeEngine) -> None:
    folder = build_long_family(family, tmp_path)
    prompt = prompt_of(400, 9)
    want = Session(make_engine(folder, 64)).ask([prompt], max_tokens=8)
    for way in WAYS[:2]:
        session = Session(engine_of(folder, way, 6, overflow_disk_bytes=1 << 24, deterministic=way == "streamed"))
        assert session.ask([prompt], max_tokens=8) == want


def test_fp8_without_scales_goes_over_the_link(folder: Path, engine_of: MakeEngine) -> None:
    prompt = prompt_of(700, 10)
    want = Session(make_engine(folder, 64, kv_cache_dtype="fp8_e5m2")).ask([prompt], max_tokens=6)
    session = Session(engine_of(folder, "streamed", deterministic=True, kv_cache_dtype="fp8_e5m2"))
    assert session.ask([prompt], max_tokens=6) == want


def test_with_weights_that_stream_as_well(
    folder: Path, expected: dict[tuple[int, int], list[int]], engine_of: MakeEngine
) -> None:
    """Both use lanes of their own."""
    weights = {"device_bytes": 1 << 21, "host_bytes": 1 << 20}
    engine = engine_of(folder, "streamed", deterministic=True, weights_offload=weights)
    placed = runner_of(engine).decoder.placed
    assert placed is not None
    assert placed.streams
    assert Session(engine).ask([prompt_of(700, 2)], max_tokens=NUM_NEW) == [expected[700, 2]]


def test_what_such_a_device_cannot_do_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="sparse_attention is for the device cpu"):
        make_engine(folder, 8, LinkedCpu(), **BELOW, sparse_attention={"budget": 0.5, "min_mass": 0.9})
    with pytest.raises(ConfigError, match=r"deterministic is true and overflow_attention 'in_place'.*use streamed"):
        make_engine(folder, 8, LinkedCpu(), **BELOW, overflow_attention="in_place")


def test_auto_learns_from_both_ways_and_is_steady_where_bits_count(folder: Path, engine_of: MakeEngine) -> None:
    engine = engine_of(folder, "auto")
    Session(engine).ask([prompt_of(700, 2)], max_tokens=NUM_NEW)
    attention = runner_of(engine).inputs.overflow
    assert attention is not None
    assert attention.choice.copy_s(1 << 20, 0.0) is not None  # chunks of the prompt came over the link
    assert attention.choice.in_place_s(1, 1 << 20, 0.0) is not None
    steady = runner_of(make_engine(folder, 8, LinkedCpu(), **BELOW)).inputs.overflow
    assert steady is not None
    assert steady.way == "streamed"


class LateLane(LinkedLane):
    """A lane that copies when somebody waits for it, and not before."""

    def active(self) -> AbstractContextManager[object]:
        return Deferred(self.copies)

    copies: list[tuple[torch.Tensor, torch.Tensor]]

    def mark(self) -> Mark:
        lane = self

        class LateMark(LinkedMark):
            def wait(self) -> None:
                while lane.copies:
                    target, source = lane.copies.pop(0)
                    target.copy_(source)

        return LateMark({}, self._races)


class Deferred(TorchFunctionMode):
    """Keeps copies for later."""

    def __init__(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._copies = copies

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        self._copies.append(args)
        return args[0]


def test_what_leaves_is_read_when_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, device = KVLayout(3, 2, 8, 16, torch.float32), LinkedCpu()
    lane = LateLane("late", device.races)
    lane.copies = []
    monkeypatch.setattr(device, "new_lane", lambda: lane)
    pool = OverflowPool(layout, 6, 20, device, tmp_path)
    tensor = layout.allocate(30).normal_(generator=torch.Generator().manual_seed(0))
    before = tensor.clone()
    blocks, places = [7, 3, 29, 0, 12, 13, 14], [1, 2, 4, 5, 6, 7, 12]
    pool.put(tensor, list(zip(blocks, places, strict=True)))
    tensor.zero_()  # computing may write to them now
    for mark in pool.landing([2, 5]):
        mark.wait()
    for layer in range(layout.num_layers):
        found = torch.empty(len(places), 1, *tensor.shape[2:])
        assert pool.read_layer(layer, places, found) == frozenset()
        assert torch.equal(found[:, 0], before[blocks, layer])
    pool.close()


class OnlyAttention:
    """Triton's attention and copies under the interpreter, and the CPU's kernels for rows, which would take longest."""

    def __init__(self) -> None:
        self._rows = ops.cpu_kernels()

    def __getattr__(self, name: str) -> Any:
        own = ("paged_attention", "walk_pieces", "gather_blocks")
        return getattr(KERNELS if name in own else self._rows, name)


@pytest.mark.parametrize(
    ("way", "length"),
    [("streamed", 600), ("in_place", 400), *(pytest.param(way, 2000, marks=pytest.mark.soak) for way in WAYS)],
)
def test_through_the_interpreter(
    folder: Path, engine_of: MakeEngine, way: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's walks on the device, in place those of C before them. Streamed, deterministic bits are the same."""
    prompt, steady = prompt_of(length, 3), way == "streamed"
    how = {"dtype": "float16", "block_tokens": 16}  # blocks are half as large
    monkeypatch.setattr(ops, "_chosen", OnlyAttention())
    monkeypatch.setattr(ModelRunner, "check_row_independence", lambda runner: None)  # 324 sequences, half a minute
    whole = Session(make_engine(folder, 150, deterministic=True, **how))
    number = whole.submit(prompt, max_tokens=3, logprobs=1)
    whole.drain()
    engine = engine_of(folder, way, DEVICE_BLOCKS // 2, overflow_host_bytes=4 * BLOCK, deterministic=steady, **how)
    session = Session(engine)
    other = session.submit(prompt, max_tokens=3, logprobs=1)
    session.drain()
    assert session.tokens(other) == whole.tokens(number)
    overflow = engine.stats().overflow
    assert overflow.disk_bytes > 0
    assert overflow.host_bytes > 0
    assert (overflow.streamed_bytes == overflow.host_bytes) == (way == "streamed")
    if steady:
        assert logprobs_of(session, other) == logprobs_of(whole, number)


def logprobs_of(session: Session, number: int) -> list[float]:
    return [item.logprob for output in session.outputs[number] for item in output.logprobs]
