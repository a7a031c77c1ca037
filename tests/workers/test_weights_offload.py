"""Weights larger than the device: the tokens of an engine that holds all of them, wherever the others lie."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.helpers.faulty_disk import FaultyDisk
from tests.helpers.tiny_families import FAMILIES, build_family
from tests.helpers.tiny_gguf import Shape, build_tiny_gguf
from tests.helpers.tiny_model import build_tiny_model
from tests.workers.harness import Session, files_of, make_engine
from tests.workers.parallel_harness import Ranks, Replica
from tests.workers.test_engine_process import Answer, run, started
from tournant.kernels import ops
from tournant.kvstore.token_bucket import Pace
from tournant.workers.config import EngineConfig, WeightsOffload
from tournant.workers.device import CpuDevice, Mark
from tournant.workers.engine import Engine
from tournant.workers.engine_process import build_engine
from tournant.workers.errors import ConfigError
from tournant.workers.layer_images import DiskImage, HostImage, WeightsLost
from tournant.workers.model_files import resolve_model
from tournant.workers.model_folder import ModelFiles
from tournant.workers.model_runner import ModelRunner
from tournant.workers.models.families import describe
from tournant.workers.models.layer_weights import LayerWeights
from tournant.workers.models.linear import Linear
from tournant.workers.weights import load_checkpoint
from tournant.workers.weights_offload import LayerTiers, StreamedLayers, spread

LAYERS = 6
EVERYTHING = 1 << 40
PROMPTS = [[5 + 7 * i % 250 for i in range(start, start + length)] for start, length in ((0, 9), (3, 40), (50, 21))]


@pytest.fixture(scope="module")
def m6(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """M with six layers."""
    return build_tiny_model(tmp_path_factory.mktemp("m6"), num_layers=LAYERS)


@pytest.fixture(scope="module")
def models(m6: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFiles]:
    folder = tmp_path_factory.mktemp("models")
    build_tiny_gguf(folder / "q.gguf", kind=Kind.Q4_1, shape=Shape(layers=LAYERS))
    return {
        "m": files_of(m6),
        "gemma": files_of(build_family(FAMILIES["gemma3"], folder / "gemma")),
        "quantised": resolve_model(str(folder / "q.gguf"), "float32", folder),
    }


def engine_of(files: ModelFiles, **config: Any) -> Engine:
    fields: dict[str, Any] = {"device": "cpu", "dtype": "float32", "deterministic": True, "num_threads": 1}
    made = EngineConfig(**fields | {"kv_cache_bytes": 1 << 22} | config)
    return build_engine(made, describe(files, made), 1)[0]


def layers_of(engine: Engine) -> StreamedLayers:
    assert isinstance(engine.runner, ModelRunner)
    found = engine.runner.decoder.placed
    assert found is not None
    return found


def limits(files: ModelFiles, resident: int, host: int = 0, **config: Any) -> dict[str, Any]:
    """weights_offload for so many layers on the device, and so many in RAM."""
    places = layers_of(engine_of(files, weights_offload={"device_bytes": EVERYTHING}, **config)).places
    layer = -(-places.resident // places.layers[0] // 4096) * 4096
    return {"device_bytes": places.fixed + resident * layer, "host_bytes": host * layer}


@pytest.fixture(scope="module")
def expected(models: dict[str, ModelFiles]) -> dict[str, list[list[int]]]:
    """Greedy answers of engines without weights_offload."""
    return {name: Session(engine_of(files)).ask(PROMPTS, max_tokens=8) for name, files in models.items()}


@pytest.mark.parametrize("below", ["host", "disk", "both"])
@pytest.mark.parametrize("resident", ["all", "half", "one"])
@pytest.mark.parametrize("name", ["m", "gemma", "quantised"])
def test_tokens_are_those_of_all_layers_on_the_device(
    models: dict[str, ModelFiles], expected: dict[str, list[list[int]]], name: str, resident: str, below: str
) -> None:
    if name == "quantised" and ops.select_backend("c") != "c":
        pytest.skip("no C compiler here")
    count = 4 if name == "gemma" else LAYERS
    stay = {"all": count, "half": count // 2, "one": 1}[resident]
    host = {"host": count - stay, "disk": 0, "both": (count - stay) // 2}[below]
    chosen = limits(models[name], stay, host)
    engine = engine_of(models[name], weights_offload=chosen)
    layers, places = layers_of(engine), layers_of(engine).places
    assert Session(engine).ask(PROMPTS, max_tokens=8) == expected[name]
    layers.validate()
    assert places.layers == (stay, host, count - stay - host)
    assert places.fixed + places.resident <= chosen["device_bytes"]
    assert places.host <= chosen["host_bytes"]
    biggest = max((item.form.num_bytes for item in layers._below), default=0)
    assert places.buffers == sum(buffer.memory.nbytes for buffer in layers._buffers) == 2 * biggest
    on_device = {tensor.data_ptr(): tensor.nbytes for tensor in device_tensors(engine)}
    assert sum(on_device.values()) == places.fixed + places.resident
    assert places.spilled == (places.disk if name == "quantised" else 0)
    assert (engine.runner.decoder._fused is not None) == (name == "quantised" and stay == count)


def device_tensors(engine: Engine) -> Iterator[torch.Tensor]:
    """Every tensor of weights that is not in a buffer."""
    decoder, layers = engine.runner.decoder, layers_of(engine)
    yield from (*decoder._ropes, decoder._table, *decoder._head.matrices, *decoder._norms)
    for index in range(len(layers)):
        weights = layers.peek(index)
        norms = (weights.mlp_norm, weights.q_norm, weights.k_norm, weights.attention_out_norm, weights.mlp_out_norm)
        yield from (norm for norm in norms if norm is not None)
        yield from () if index in layers._ordinals else weights.matrices


def test_another_dtype_than_the_files_goes_through_a_spill_file(m6: Path, tmp_path: Path) -> None:
    files, plain = files_of(m6), {"dtype": "bfloat16", "deterministic": False}
    whole = engine_of(files, weights_offload={"device_bytes": EVERYTHING}, **plain)
    chosen = limits(files, 2, 1, **plain) | {"folder": str(tmp_path)}
    engine = engine_of(files, weights_offload=chosen, **plain)
    places = layers_of(engine).places
    assert places.spilled == places.disk == 3 * places.resident // 2
    assert Session(engine).ask(PROMPTS, max_tokens=8) == Session(whole).ask(PROMPTS, max_tokens=8)
    assert list(tmp_path.iterdir()) == []


def test_biases_and_joined_projections(tmp_path: Path) -> None:
    for name in ("llama_biases", "phi3"):
        files = files_of(build_family(FAMILIES[name], tmp_path / name))
        engine = engine_of(files, weights_offload=limits(files, 1))
        assert Session(engine).ask(PROMPTS, max_tokens=6) == Session(engine_of(files)).ask(PROMPTS, max_tokens=6)


def test_too_small_is_refused_with_the_numbers(m6: Path) -> None:
    files = files_of(m6)
    enough = limits(files, 1)["device_bytes"]
    assert layers_of(engine_of(files, weights_offload={"device_bytes": enough})).places.layers == (1, 0, 5)
    for size in (enough - 1, 1000):
        with pytest.raises(ConfigError, match=rf"device_bytes is {size}, .* choose at least {enough}"):
            engine_of(files, weights_offload={"device_bytes": size})


def test_sizes_may_be_text() -> None:
    config = EngineConfig(weights_offload={"device_bytes": "1.5GiB", "host_bytes": "2MB"})  # type: ignore[arg-type]
    assert config.weights_offload == WeightsOffload(3 << 29, 2_000_000)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "must have device_bytes"),
        (5, "must have device_bytes"),
        ({"device_bytes": 0}, "device_bytes is 0; it must be a size from 1"),
        ({"device_bytes": True}, "device_bytes is True"),
        ({"device_bytes": "lots"}, "device_bytes is 'lots'; write 1073741824, 512MiB"),
        ({"device_bytes": 1, "host_bytes": -1}, "host_bytes is -1"),
        ({"device_bytes": 1, "disk_bytes": 1}, "weights_offload.disk_bytes is no key"),
        ({"device_bytes": 1, "folder": 1}, "weights_offload.folder is 1"),
    ],
)
def test_what_makes_no_sense_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(weights_offload=value)


def test_a_folder_that_is_not_there_is_refused(models: dict[str, ModelFiles], tmp_path: Path) -> None:
    chosen = limits(models["quantised"], 1) | {"folder": str(tmp_path / "nowhere")}
    with pytest.raises(ConfigError, match="needs a file for layers: no spill file can be made in"):
        engine_of(models["quantised"], weights_offload=chosen)


def test_a_full_disk_is_refused(models: dict[str, ModelFiles], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = limits(models["quantised"], 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ConfigError, match=r"needs \d+ bytes of disk for layers, .* has 1000 free"):
        engine_of(models["quantised"], weights_offload=chosen)


def faulty(engine: Engine) -> FaultyDisk:
    """Faults in the file that an engine's layers are read from."""
    images = [item.image for item in layers_of(engine)._below]
    file = next(image.pieces[0].file for image in images if isinstance(image, DiskImage))
    name = "disk" if hasattr(file, "disk") else "_disk"
    disk = FaultyDisk(getattr(file, name))
    setattr(file, name, disk)
    return disk


@pytest.mark.parametrize("name", ["m", "quantised"])
def test_a_read_that_fails_once_is_made_again(
    models: dict[str, ModelFiles], expected: dict[str, list[list[int]]], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(models[name], weights_offload=limits(models[name], 1))
    session = Session(engine)
    assert session.ask(PROMPTS, max_tokens=8) == expected[name]
    faulty(engine).fail("read", errno.EIO, nth=3)
    assert session.ask(PROMPTS, max_tokens=8) == expected[name]
    assert "cannot be read from" in caplog.text


@pytest.mark.parametrize("name", ["m", "quantised"])
def test_a_disk_that_fails_ends_requests_and_says_why(
    models: dict[str, ModelFiles], expected: dict[str, list[list[int]]], name: str
) -> None:
    engine = engine_of(models[name], weights_offload=limits(models[name], 1))
    session = Session(engine)
    disk = faulty(engine)
    number = session.submit(PROMPTS[0], max_tokens=8)
    session.step()
    disk.fail("read", errno.EIO, forever=True)
    with pytest.raises(WeightsLost, match=r"layer \d of the weights cannot be read from .*: Input/output error; see"):
        session.drain()
    session.book(engine.fail_all("the engine could not compute a step"))
    assert session.outputs[number][-1].finish_reason == "error"
    layers_of(engine).validate()
    disk.heal()
    assert session.ask(PROMPTS, max_tokens=8) == expected[name]


def test_a_model_file_that_changes_is_found(m6: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(m6, tmp_path / "own"))
    engine = engine_of(files_of(folder), weights_offload=limits(files_of(m6), 1))
    session = Session(engine)
    want = session.ask(PROMPTS, max_tokens=8)
    image = next(item.image for item in layers_of(engine)._below if isinstance(item.image, DiskImage))
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(image.pieces[1].offset + 77)
        (byte,) = file.read(1)
        file.seek(image.pieces[1].offset + 77)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(WeightsLost, match=rf"layer {image.layer} .*model\.safetensors changed, or its disk fails"):
        session.ask(PROMPTS, max_tokens=8)
    engine.fail_all("the engine could not compute a step")
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(image.pieces[1].offset + 77)
        file.write(bytes([byte]))
    assert session.ask(PROMPTS, max_tokens=8) == want
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(image.pieces[1].offset)
    with pytest.raises(WeightsLost, match=r"cannot be read from .*model\.safetensors: it has become shorter"):
        session.ask(PROMPTS, max_tokens=8)


def test_an_engine_process_ends_the_request_and_says_why(
    m6: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(m6, tmp_path / "own"))
    offload = WeightsOffload(**limits(files_of(m6), 1))
    config = EngineConfig(dtype="float32", deterministic=True, kv_cache_bytes=1 << 22, weights_offload=offload)

    async def scenario() -> None:
        async with started(folder, config) as client:
            for step in ("good", "bad", "good"):
                with place.file.open("r+b") as file:
                    file.seek(place.offset)
                    file.write(bad if step == "bad" else good)
                answer = Answer(client, PROMPTS[1])
                await answer.done.wait()
                last = answer.outputs[-1]
                assert (last.finish_reason, last.error) == endings[step]

    place = load_checkpoint(folder).place("model.layers.5.mlp.up_proj.weight", (256, 128), torch.float32)
    assert place is not None
    good = place.file.read_bytes()[place.offset : place.offset + 10]
    bad = bytes(byte ^ 255 for byte in good)
    endings = {"good": ("length", None), "bad": ("error", "the engine could not compute a step: WeightsLost")}
    run(scenario)
    assert "own/model.safetensors changed, or its disk fails" in capfd.readouterr().err


def test_changed_bytes_of_a_spill_file_are_found(models: dict[str, ModelFiles]) -> None:
    engine = engine_of(models["quantised"], weights_offload=limits(models["quantised"], 1))
    image = layers_of(engine)._below[1].image
    assert isinstance(image, DiskImage)
    page = torch.full((2 * 4096,), 7, dtype=torch.uint8)
    start = -page.data_ptr() % 4096
    image.pieces[0].file.write(image.pieces[0].offset, page.numpy()[start : start + 4096].data)  # type: ignore[attr-defined]
    with pytest.raises(WeightsLost, match=r"a spill file in .* changed"):
        Session(engine).ask(PROMPTS, max_tokens=8)


def test_sequences_larger_than_the_device_at_the_same_time(m6: Path) -> None:
    prompt = [random.Random(1).randrange(256) for _ in range(600)]
    want = Session(make_engine(m6, 64)).ask([prompt], max_tokens=8)
    below = {"overflow_host_bytes": 1 << 21, "overflow_disk_bytes": 1 << 24}
    engine = make_engine(m6, 8, weights_offload=limits(files_of(m6), 1, 2), **below)
    assert Session(engine).ask([prompt], max_tokens=8) == want


def test_two_ranks(m6: Path) -> None:
    """Each of both has its own tiers; what a split cuts out of the file's columns is spilled."""
    ranks = Ranks()
    try:
        answers = []
        for offload in (None, {"device_bytes": 1_190_000, "host_bytes": 400_000}):
            replica = Replica(ranks, m6, 2, 1, weights_offload=offload)
            answers.append(Session(replica.engine).ask(PROMPTS, max_tokens=8))
            placed = replica.shard.decoder.placed
            assert replica.close() == [""]
        assert answers[0] == answers[1]
        assert placed is not None
        assert placed.places.layers == (1, 1, 4)
        assert placed.places.spilled == placed.places.disk
    finally:
        ranks.close()


@pytest.mark.parametrize(("count", "chosen"), [(6, 0), (6, 6), (30, 7), (5, 4), (1, 1)])
def test_spread_is_even_and_ends_with_the_last(count: int, chosen: int) -> None:
    found = [index for index in range(count) if spread(index, count, chosen)]
    assert len(found) == chosen
    if chosen:
        assert found[-1] == count - 1
        gaps = [b - a for a, b in zip([-1, *found], found, strict=False)]
        assert max(gaps) - min(gaps) <= 1


# -------------------------------------------------------------------- buffers alone


class Recorded:
    """A lane that says in which order it was given what."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def follow_compute(self) -> None:
        self.said.append(f"{self.name} follows")

    def active(self) -> AbstractContextManager[object]:
        @contextmanager
        def entered() -> Iterator[None]:
            self.said.append(f"{self.name} copies")
            yield

        return entered()

    def mark(self) -> Mark:
        return RecordedMark(self)


class RecordedMark:
    def __init__(self, lane: Recorded) -> None:
        self.lane = lane

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        self.lane.said.append(f"{self.lane.name} waited for")

    def hold_compute(self) -> None:
        self.lane.said.append(f"{self.lane.name} holds")


class ElsewhereDevice(CpuDevice):
    """A device whose memory is not the CPU's, as far as buffers know."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.lanes = 0
        self.locked: list[tuple[int, int]] = []

    @property
    def kind(self) -> str:
        return "cuda"

    def new_lane(self) -> Recorded:
        self.lanes += 1
        return Recorded("ab-"[self.lanes - 1], self.said)

    @property
    def page_lock(self) -> Any:
        def lock(address: int, num_bytes: int) -> Any:
            self.locked.append((address % 4096, num_bytes))
            return lambda: self.locked.clear()

        return lock


def made_up_layers(count: int, size: int = 48) -> list[LayerWeights]:
    """Layers whose weights are their number."""

    def linear(value: int) -> Linear:
        return Linear(torch.full((size, size), float(value)), None, packed=False)

    return [
        LayerWeights(linear(i), linear(10 + i), linear(20 + i), linear(30 + i), torch.ones(size), torch.ones(size))
        for i in range(count)
    ]


def is_layer(weights: LayerWeights, index: int) -> bool:
    return [float(matrix.mean()) for matrix in weights.matrices] == [index, 10 + index, 20 + index, 30 + index]


def streamed(count: int, stay: int, host: int, device: CpuDevice) -> StreamedLayers:
    layers = made_up_layers(count)
    image = -(-4 * 48 * 48 * 4 // 4096) * 4096
    small = count * layers[0].small_bytes
    found = LayerTiers(WeightsOffload(small + stay * image, host * image), device).place(layers, count, 0)
    assert found.places.layers == (stay, host, count - stay - host)
    return found


@pytest.mark.parametrize(("count", "stay", "host"), [(9, 3, 3), (9, 1, 0), (4, 2, 2), (3, 2, 0), (5, 1, 4)])
def test_any_order_gives_the_right_layers(count: int, stay: int, host: int) -> None:
    generator = random.Random(count)
    for device in (CpuDevice(), ElsewhereDevice()):
        layers = streamed(count, stay, host, device)
        orders = [range(count), range(count), [generator.randrange(count) for _ in range(60)], range(count)]
        for order in orders:
            for index in order:
                assert is_layer(layers[index], index)
                assert is_layer(layers[index], index)
                layers.validate()
            if generator.random() < 0.5:
                layers.release()
                layers.validate()


def test_steps_in_order_read_each_layer_once_and_ahead() -> None:
    layers = streamed(6, 1, 0, CpuDevice())
    assert all(buffer.coming.result() for buffer in layers._coming)
    read: list[int] = []
    fetch = layers._reader.read
    layers._reader.read = lambda image, target: (read.append(image.layer), fetch(image, target))[1]  # type: ignore
    for _ in range(3):
        for index in range(6):
            assert is_layer(layers[index], index)
        layers.release()
    assert layers[0] is layers.peek(0)
    assert all(buffer.coming.result() for buffer in layers._coming)
    assert sorted(read) == sorted([3, 4, 5, *[1, 2, 3, 4, 5] * 2, 1, 2])  # 1 and 2 had come before


def test_two_streaming_layers_are_read_once() -> None:
    layers = streamed(4, 2, 0, CpuDevice())
    assert all(buffer.coming.result() for buffer in layers._coming)
    layers._fetch = lambda *_: pytest.fail("a layer was fetched again")  # type: ignore
    for _ in range(3):
        assert all(is_layer(layers[index], index) for index in range(4))


def test_copies_to_a_device_follow_what_reads_their_buffer() -> None:
    device = ElsewhereDevice()
    layers = streamed(5, 1, 2, device)
    for buffer in layers._coming:
        buffer.coming.result()
    assert [word for word in device.said if "waited" not in word] == ["a copies", "- holds", "b copies", "a holds"]
    device.said.clear()
    assert is_layer(layers[1], 1)  # in buffer a
    assert device.said == ["a holds"]
    assert is_layer(layers[2], 2)
    layers._coming[-1].coming.result()
    said = [word for word in device.said if "waited" not in word]
    assert said.index("a follows") < said.index("a copies")
    assert said.count("b holds") >= 1
    places = layers.places
    assert all(start == 0 for start, _ in device.locked)
    assert sum(size for _, size in device.locked) == places.host + places.buffers  # images, and one staging per buffer


def test_an_emulated_link_takes_its_time() -> None:
    layers = streamed(6, 1, 5, CpuDevice())
    waits: list[float] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    for buffer in layers._coming:
        buffer.coming.result()
    layers.host_pace = Pace(1e6, lambda: now[0], sleep)
    for index in (*range(6), 0):
        assert is_layer(layers[index], index)
    assert sum(waits) == pytest.approx(len(waits) * 36_864e-6, abs=0.01)
    assert all(isinstance(item.image, HostImage) for item in layers._below)


@pytest.mark.soak
def test_the_default_model_from_disk() -> None:
    """SmolLM2, half of its layers streaming from disk, as its file quantised it and widened."""
    for quantization in ("native", "dequantize"):
        files = resolve_model(None, "float32")
        plain = {"quantization": quantization, "kv_cache_bytes": 1 << 26}
        want = Session(engine_of(files, **plain)).ask(PROMPTS, max_tokens=16)
        engine = engine_of(files, weights_offload=limits(files, 15, **plain), **plain)
        assert layers_of(engine).places.layers == (15, 0, 15)
        assert Session(engine).ask(PROMPTS, max_tokens=16) == want
