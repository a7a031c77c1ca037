"""Sequences eight times larger than the device's pool, beside the same engine with room for all of it.

Prefill in chunks and decode at batch 1: all resident; below in RAM and attended to in place, or copied to the device
first ("streamed"); below on disk. Then the same under an emulated link, against what that link allows. Contexts are
read by their tokens: the first answer's seconds are prefill, the gaps between tokens decode. Sparse attention
(sparse_attention.py) and weights that stream (weights_offload.py) are measured alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks import sparse_attention, weights_offload
from benchmarks.common import Options, Report, Samples, Table, at_least, interleave, run_main, say
from benchmarks.model_costs import ModelCosts
from benchmarks.offload_engine import BLOCK_TOKENS, TieredEngine, model_of
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.families import read_decoder_config

SHARE = 8  # context / device pool
CONTEXT, NEW_TOKENS = 8064, 24  # within the 8,192 of the default model
QUICK_CONTEXT, QUICK_NEW = 512, 3
LINK_BYTES_PER_S = 1 << 30
MIN_PREFILL, MIN_IN_PLACE, MIN_STREAMED, MIN_OF_LINK = 0.85, 0.85, 0.5, 0.8
RESIDENT, IN_PLACE, STREAMED, DISK = "all resident", "in place", "streamed", "from disk"


def run(options: Options) -> Report:
    """All parts; quick: a short context."""
    report = Report("Beyond the device")
    files = model_of(options)
    for table in _contexts(files, options):
        report.add(table)
    report.add(sparse_attention.measure(options))
    report.add(weights_offload.measure(options))
    return report


class _Runs:
    """One contestant's engine. Each call is a context that was never seen before: its prefill, then its tokens."""

    def __init__(self, engine: TieredEngine, vocab: int, context: int, new: int) -> None:
        self.engine = engine
        self._vocab = vocab
        self._context = context
        self._new = new
        self._generator = np.random.default_rng(0)
        self.step_s: list[float] = []

    def prefill_rate(self) -> float:
        """Prompt tokens per second; notes the median seconds of the decode steps after it."""
        prompt = self._generator.integers(0, self._vocab, self._context).tolist()
        (answer,) = self.engine.ask([prompt], self._new)
        self.step_s.append(statistics.median(answer.gaps))
        return self._context / answer.first_s


def _measure(
    engines: Mapping[str, dict[str, Any]], files: ModelFiles, options: Options
) -> tuple[dict[str, Samples], dict[str, Samples]]:
    """(prefill tokens/s, seconds of a decode step), by name."""
    context, new = (QUICK_CONTEXT, QUICK_NEW) if options.quick else (CONTEXT, NEW_TOKENS)
    vocab = read_decoder_config(files.folder).vocab_size
    runs: dict[str, _Runs] = {}
    try:
        for name, config in engines.items():
            below = config.get("overflow_host_bytes", config.get("overflow_disk_bytes", 0))
            pool = context // SHARE if below else context + new + 2 * BLOCK_TOKENS
            engine = TieredEngine(files, pool, options.threads, deterministic=True, **config)
            runs[name] = _Runs(engine, vocab, context, new)
        prefill = interleave({name: one.prefill_rate for name, one in runs.items()}, options.rounds)
        decode = {name: Samples(tuple(one.step_s[1:])) for name, one in runs.items()}
        return prefill, decode
    finally:
        for one in runs.values():
            one.engine.close()


def _contexts(files: ModelFiles, options: Options) -> list[Table]:
    context = QUICK_CONTEXT if options.quick else CONTEXT
    token_bytes = ModelCosts.of(files.folder).kv_token_bytes
    size = (context + 256) * token_bytes
    host, disk = {"overflow_host_bytes": size}, {"overflow_disk_bytes": size}
    say(f"contexts of {context} tokens over pools of {context // SHARE}")
    rate, streamed = LINK_BYTES_PER_S, {**host, "overflow_attention": "streamed"}
    raw = {RESIDENT: {}, IN_PLACE: {**host, "overflow_attention": "in_place"}, STREAMED: streamed, DISK: disk}
    linked = {
        STREAMED: {**streamed, "overflow_host_bytes_per_s": rate},
        DISK: {**disk, "overflow_disk_bytes_per_s": rate},
    }
    prefill, decode = _measure(raw | {f"{name}, link": one for name, one in linked.items()}, files, options)
    bars = {IN_PLACE: (MIN_PREFILL, MIN_IN_PLACE), STREAMED: (MIN_PREFILL, MIN_STREAMED), DISK: (MIN_PREFILL, None)}
    rows: list[list[Any]] = []
    for name in raw:
        fast = prefill[name].over(prefill[RESIDENT])
        slow = decode[RESIDENT].over(decode[name])
        first, second = bars.get(name, (None, None))
        rows.append(
            [
                name,
                prefill[name],
                fast,
                "" if first is None else at_least(first, fast),
                decode[name].map(lambda s: s * 1e3),
                slow,
                "" if second is None else at_least(second, slow),
            ]
        )
    columns = ("KV below", "prefill tokens/s", "/ resident", "bar", "decode ms/token", "resident / this", "bar")
    tables = [Table(f"Context of {context} tokens, pool of {context // SHARE}, raw machine", columns, rows)]
    below = context - context // SHARE
    rows = []
    for name in linked:
        bound, found = decode[RESIDENT].map(lambda s: max(s, below * token_bytes / rate)), decode[f"{name}, link"]
        reached = bound.over(found)
        rows.append(
            [
                name,
                found.map(lambda s: s * 1e3),
                bound.map(lambda s: s * 1e3),
                reached,
                at_least(MIN_OF_LINK, reached),
            ]
        )
    tables.append(
        Table(
            f"Decode over an emulated link of {rate >> 20} MiB/s",
            ("KV below", "ms/token", "bound, ms", "bound / this", "bar"),
            rows,
            [f"bound: {below} tokens of {token_bytes:,} bytes over the link, or the resident step if that is longer"],
        )
    )
    return tables


if __name__ == "__main__":
    run_main(run, __doc__)
