"""A context eight times larger than the device's pool against the same one all on the device."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.device.bench import Bench, WrongResultError
from benchmarks.device.engine import engine_of, generate
from benchmarks.device.made_up import GREEDY, MadeUpRunner, made_up_config
from tournant.workers.config import EngineConfig
from tournant.workers.engine import Engine
from tournant.workers.messages import EngineRequest
from tournant.workers.sampling_params import SamplingParams

PREFILL_BAR, LINK_BAR = 0.85, 0.8
WAYS = ("streamed", "in_place")


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a prompt and, median, of a token after it."""

    prefill_s: float
    step_s: float


def timed(bench: Bench, engine: Engine, length: int, new: int, then: Callable[[], None] = lambda: None) -> Timed:
    """One answer, alone. then: called after its first token."""
    bench.need_time(2.0 if not bench.dry else -1e9)  # the interpreter takes as long as it takes
    params = SamplingParams(temperature=GREEDY.temperature, ignore_eos=True, max_tokens=new)
    vocab = engine.info.vocab_size
    began, times = time.perf_counter(), list[float]()
    engine.add_request(EngineRequest(length, [(13 * place + length) % vocab for place in range(length)], params))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise WrongResultError(output.error)
            if output.token_ids and not times:
                then()
            times += [time.perf_counter()] * len(output.token_ids)
    steps = [after - before for before, after in itertools.pairwise(times)]
    return Timed(times[0] - began, statistics.median(steps))


def runner_of(bench: Bench, shape: tuple[int, ...], dtype: str, pool: int, below: int, chunk: int) -> MadeUpRunner:
    """A model with room for `pool` tokens on the device and `below` in RAM."""
    model = made_up_config(*shape)  # type: ignore[call-arg]
    token_bytes = model.num_layers * 2 * model.num_kv_heads * model.head_size * (4 if dtype == "float32" else 2)
    config = EngineConfig(
        dtype=dtype,
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
        kv_cache_bytes=pool * token_bytes,
        overflow_host_bytes=below * token_bytes,
        block_tokens=bench.pick(None, 16),
        enable_prefix_caching=False,
    )
    return MadeUpRunner(config, model, bench.device)


def choose(runner: MadeUpRunner, way: str) -> None:
    """Attend to RAM this way from now on."""
    attention = runner.inputs.overflow
    if attention is None:
        raise WrongResultError("the runner has nothing below its device")
    attention.way = way


def same_tokens(bench: Bench) -> None:
    """A small model in float32: the same greedy tokens both ways as with everything on the device."""
    context, pool, new, chunk = bench.pick((2048, 256, 16, 128), (40, 32, 2, 16))
    shape = bench.pick((2, 512, 8, 2, 64, 1024, 1024, 4096), (1, 64, 2, 1, 16, 64, 128, 128))
    prompt = [(7 * place) % 97 for place in range(context)]
    wanted = generate(engine_of(runner_of(bench, shape, "float32", context + 128, 0, chunk)), [prompt], new)
    runner = runner_of(bench, shape, "float32", pool, context, chunk)
    for way in WAYS:
        choose(runner, way)
        if (found := generate(engine_of(runner), [prompt], new)) != wanted:
            raise WrongResultError(f"{way}: tokens differ from those on the device: {found} and {wanted}")
        bench.add(f"{context} tokens over a pool of {pool}, {way}", "equal")


def larger_contexts(bench: Bench) -> None:
    """An 8B shape, half its layers: prefill and decode of 64k tokens over a pool of 8k; the link bounds decode."""
    same_tokens(bench)
    bench.shared.clear()  # its memory is needed
    dtype = str(bench.dtype).removeprefix("torch.")
    context, pool, new, chunk = bench.pick((1 << 16, 1 << 13, 8, 4096), (40, 32, 3, 16))
    shape = bench.pick((16, 4096, 32, 8, 128, 14336, 32768, (1 << 16) + 64), (1, 64, 2, 1, 16, 64, 128, 128))
    room = context + bench.pick(64, 16)
    engine = engine_of(runner_of(bench, shape, dtype, room, 0, chunk))
    if not bench.dry:
        timed(bench, engine, chunk, 2)  # compiles
    resident = timed(bench, engine, context, new)
    del engine
    runner = runner_of(bench, shape, dtype, pool, room, chunk)
    bound = max(resident.step_s, (context - pool) * runner.layout.token_bytes / bench.link_rate)
    name = f"{context} tokens over a pool of {pool}"
    bench.add(f"{context} tokens on the device", f"{resident.prefill_s:.2f} s, {resident.step_s * 1e3:.2f} ms a token")
    for way in WAYS:
        choose(runner, "streamed")  # the prompt, whose chunks nobody would leave to the CPU
        engine = engine_of(runner)
        if way == WAYS[0] and not bench.dry:
            timed(bench, engine, 2 * pool, 2)
        found = timed(bench, engine, context, new, lambda chosen=way: choose(runner, chosen))  # type: ignore[misc]
        step = f"{found.step_s * 1e3:.2f} ms"
        if way == WAYS[0]:
            what = f"{name}, prefill: on the device / this"
            bench.add(what, f"{found.prefill_s:.2f} s", resident.prefill_s / found.prefill_s, PREFILL_BAR)
            bench.add(f"{name}, decode streamed: link / this", step, bound / found.step_s, LINK_BAR)
        else:
            bench.add(f"{name}, decode in place: on the device / this", step, resident.step_s / found.step_s)
