"""Weights larger than the device: tokens/s with layers in RAM and on disk, beside all on the device and the bound.

A step cannot be faster than with all layers on the device, nor than the bytes that it reads take on the link. Links: a
plain copy in RAM, plain direct reads of the model's file, and one that is emulated. Tokens of all runs are compared.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import (
    BenchmarkError,
    Cell,
    Options,
    Report,
    Samples,
    Table,
    at_least,
    interleave,
    run_main,
    say,
    timed,
)
from benchmarks.device.made_up import decode_batch, prefill_batch
from tests.helpers.tiny_model import build_tiny_model
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.token_bucket import Pace
from tournant.workers.batch import Batch
from tournant.workers.config import EngineConfig, WeightsOffload
from tournant.workers.model_files import resolve_model
from tournant.workers.model_folder import ModelFiles
from tournant.workers.model_runner import ModelRunner
from tournant.workers.models.families import describe
from tournant.workers.spill_file import bypass_page_cache
from tournant.workers.weights_offload import StreamedLayers, WeightsPlaces

SHAPE = {"num_layers": 8, "hidden": 1024, "num_heads": 16, "num_kv_heads": 8, "intermediate": 2816, "vocab_size": 2048}
QUICK_SHAPE = SHAPE | {"num_layers": 8, "hidden": 128, "num_heads": 2, "num_kv_heads": 2, "intermediate": 256}
EMULATED_BYTES_PER_S = 500_000_000
CONTEXT, PREFILL = 128, 512
READ_BYTES, READ_THREADS = 4 << 20, 4
BAR = 0.7
ALL, RAM, SLOW, DISK, ONE = (
    "all on the device",
    "half from RAM",
    f"half from RAM, link of {EMULATED_BYTES_PER_S / 1e9:g} GB/s emulated",
    "half from disk",
    "one layer stays, from disk",
)


@dataclass
class _Place:
    """A runner whose layers lie somewhere; tokens: what it chose, step by step."""

    runner: ModelRunner
    link: str | None = None
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)

    @property
    def layers(self) -> StreamedLayers:
        """Where they are."""
        found = self.runner.decoder.placed
        if found is None:
            raise BenchmarkError("a runner has no weights_offload")
        return found

    @property
    def places(self) -> WeightsPlaces:
        """Bytes."""
        return self.layers.places

    def seconds(self, name: str, batch: Callable[[], Batch], steps: int) -> Callable[[], float]:
        """A contestant: the seconds of a step."""

        def run() -> float:
            start = time.perf_counter()
            found = [self.runner.run(batch()).result().token_ids for _ in range(steps)]
            taken = (time.perf_counter() - start) / steps
            self.tokens.setdefault(name, []).extend(found)
            return taken

        return run


def _kinds(block_tokens: int, vocab: int, quick: bool) -> dict[str, tuple[int, int, Callable[[], Batch]]]:
    """Tokens of a step, steps of a round, and its batch, by name."""
    prefill, steps = (64, 2) if quick else (PREFILL, 4)
    return {
        f"prefill of {prefill}": (prefill, 1, lambda: prefill_batch(0, 0, prefill, block_tokens, vocab)),
        "decode, batch 1": (1, steps, lambda: decode_batch([CONTEXT], block_tokens)),
        "decode, batch 8": (8, steps, lambda: decode_batch([CONTEXT] * 8, block_tokens)),
    }


def _place(files: ModelFiles, options: Options, device_bytes: int, host_bytes: int, link: str | None) -> _Place:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        kv_cache_bytes=1 << 27,
        max_model_len=1024,
        num_threads=options.threads,
        weights_offload=WeightsOffload(device_bytes, host_bytes),
    )
    return _Place(ModelRunner(config, describe(files, config)), link)


def _raw_disk(path: Path) -> Callable[[], float]:
    """Bytes per second of plain direct reads of a file by several threads."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    bypass_page_cache(file)
    whole = path.stat().st_size
    size = min(whole, 1 << 28) // READ_BYTES * READ_BYTES or -(-whole // PAGE_BYTES) * PAGE_BYTES
    memory = memoryview(mmap.mmap(-1, size))
    starts = range(0, size, READ_BYTES)
    threads = ThreadPoolExecutor(READ_THREADS)

    def read(start: int) -> int:
        return os.preadv(file, [memory[start : start + READ_BYTES]], start)

    return lambda: size / timed(lambda: list(threads.map(read, starts)))()


def _raw_ram(num_bytes: int) -> Callable[[], float]:
    """Bytes per second of plain copies of a layer, one after another, by one thread."""
    sources = [np.full(num_bytes, index, np.uint8) for index in range(4)]
    target = np.zeros(num_bytes, np.uint8)
    return lambda: num_bytes / (timed(lambda: [np.copyto(target, source) for source in sources])() / len(sources))


def run(options: Options) -> Report:
    """Every place and kind of step in turn, with the raw rates of links between them."""
    report = Report("Weights larger than the device")
    report.add(measure(options))
    return report


def measure(options: Options) -> Table:
    """The table, for a report of this or of another benchmark. Raises BenchmarkError when tokens differ."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        if options.model is None:
            build_tiny_model(Path(scratch) / "model", **(QUICK_SHAPE if options.quick else SHAPE))
        files = resolve_model(options.model or str(Path(scratch) / "model"), "float32")
        return _measured(files, options)


def _measured(files: ModelFiles, options: Options) -> Table:
    everything = 1 << 40
    whole = _place(files, options, everything, 0, None)
    found, count = whole.places, len(whole.runner.decoder_config.layers)
    half = found.fixed + found.resident * (count // 2) // count + (1 << 12) * count
    one = found.fixed + found.resident // count + (1 << 13)
    places = {
        ALL: whole,
        RAM: _place(files, options, half, everything, "RAM"),
        SLOW: _place(files, options, half, everything, "emulated"),
        DISK: _place(files, options, half, 0, "disk"),
        ONE: _place(files, options, one, 0, "disk"),
    }
    places[SLOW].layers.host_pace = Pace(EMULATED_BYTES_PER_S)
    kinds = _kinds(whole.runner.layout.block_tokens, whole.runner.decoder_config.vocab_size, options.quick)
    rates = {"RAM": _raw_ram(found.resident // count), "disk": _raw_disk(sorted(files.folder.glob("*.safetensors"))[0])}
    rates["emulated"] = lambda: float(EMULATED_BYTES_PER_S)
    contestants: dict[str, Callable[[], float]] = {}
    for kind, (_, steps, batch) in kinds.items():
        for name, place in places.items():
            if place.link is not None:  # right before what is compared with it: drives change their pace
                contestants[f"raw, {name}, {kind}"] = rates[place.link]
            contestants[f"{name}, {kind}"] = place.seconds(kind, batch, steps)
    say(f"{files.folder.name}: {found.fixed + found.resident:,} bytes of weights, {count} layers")
    with torch.inference_mode():
        samples = interleave(contestants, options.rounds)
    for name, place in places.items():
        if place.tokens != whole.tokens:
            raise BenchmarkError(f"{name}: tokens are not those of all layers on the device")
    return Table(
        "tokens/s of weights in lower tiers",
        (
            "layers",
            "step",
            "tokens/s",
            "all on the device",
            "bytes read a step",
            "link, GB/s",
            "bound",
            "of bound",
            "bar",
        ),
        [row for name, place in places.items() for row in _rows(name, place, kinds, samples)],
        (
            "Bound: the lesser of tokens/s with all layers on the device and of what the link lets through, of the same"
            f" round. Link: plain copies by one thread, or direct reads of {READ_BYTES >> 20} MiB by {READ_THREADS}.",
            f"float32, {options.threads} threads; every place chose the same tokens. On a CPU a copy from RAM takes "
            "memory bandwidth from computing, which the bound does not know.",
        ),
    )


def _rows(
    name: str,
    place: _Place,
    kinds: dict[str, tuple[int, int, Callable[[], Batch]]],
    samples: dict[str, Samples],
) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for kind, (tokens, _, _) in kinds.items():
        own, resident = samples[f"{name}, {kind}"], samples[f"{ALL}, {kind}"]
        rate = resident.map(lambda seconds, tokens=tokens: tokens / seconds)  # type: ignore[misc]
        row: list[Cell] = [name, kind, own.map(lambda seconds, tokens=tokens: tokens / seconds)]  # type: ignore[misc]
        if place.link is None:
            rows.append([*row, rate, 0.0, "-", rate, 1.0, "-"])
            continue
        num_bytes = place.places.host + place.places.disk
        link = samples[f"raw, {name}, {kind}"]
        least = [max(a, num_bytes / b) for a, b in zip(resident.values, link.values, strict=True)]
        share = Samples(tuple(least)).over(own)
        bound = Samples(tuple(tokens / seconds for seconds in least))
        rows.append([*row, rate, float(num_bytes), link.map(lambda r: r / 1e9), bound, share, at_least(BAR, share)])
    return rows


if __name__ == "__main__":
    run_main(run, __doc__)
