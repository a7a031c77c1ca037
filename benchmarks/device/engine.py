"""The whole engine on the card: right tokens, a decode step of an 8B shape, restoring against recomputing."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.device.bench import Bench, WrongResultError, synchronize, wall_seconds
from benchmarks.device.made_up import GREEDY, MadeUpRunner, decode_batch, made_up_config, prefill_batch
from tournant.kernels import ops
from tournant.workers.batch import Batch, PendingStep
from tournant.workers.block_copies import BlockCopies
from tournant.workers.config import EngineConfig
from tournant.workers.device import CpuDevice
from tournant.workers.engine import Engine
from tournant.workers.messages import EngineInfo, EngineRequest
from tournant.workers.sampling_params import SamplingParams

STEP_BAR, RESTORE_BAR, DISTURBED_BAR = 0.60, 8.0, 1.05


def engine_of(runner: MadeUpRunner, num_in_flight: int | None = None) -> Engine:
    """An engine over a runner; num_in_flight None: as many as its device wants."""
    config, decoder = runner.config, runner.decoder_config
    info = EngineInfo(
        writer_id=1,
        pid=0,
        max_model_len=decoder.max_model_len,
        pool_tokens=runner.cache.num_blocks * runner.layout.block_tokens,
        block_tokens=runner.layout.block_tokens,
        overflow_tokens=runner.overflow_blocks * runner.layout.block_tokens,
        max_num_seqs=config.max_num_seqs,
        max_queued_requests=config.max_queued_requests,
        vocab_size=decoder.vocab_size,
        eos_token_ids=decoder.eos_token_ids,
        dtype=str(runner.decoder.dtype),
        device=runner.device.kind,
        namespace=runner.namespace,
    )
    return Engine(replace(config, num_in_flight=num_in_flight), runner, info)


def generate(engine: Engine, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy answers of all prompts, run together."""
    params = SamplingParams(temperature=GREEDY.temperature, ignore_eos=True, max_tokens=max_tokens)
    answers: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        engine.add_request(EngineRequest(number, prompt, params))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise WrongResultError(output.error)
            answers[output.request_id] += output.token_ids
    engine.validate()
    return list(answers.values())


def tokens(bench: Bench) -> None:
    """A small model in float32: the same greedy tokens as plain PyTorch on the CPU, cold, cached, captured."""
    model = made_up_config(*bench.pick((2, 512, 8, 2, 64, 1024, 1024, 1024), (1, 64, 2, 1, 16, 64, 128, 64)))
    lengths, new = bench.pick(((5, 70, 300), 32), ((3, 20), 3))
    prompts = [[(11 * place + length) % model.vocab_size for place in range(length)] for length in lengths]
    chunk = bench.pick(64, 8)
    config = EngineConfig(
        dtype="float32", kv_cache_bytes=1 << 25, max_num_seqs=4, max_num_batched_tokens=chunk, block_tokens=16
    )
    before, cpu = ops.backend(), torch.device("cpu")
    ops.select_backend("torch")
    try:
        wanted = generate(engine_of(MadeUpRunner(config, model, CpuDevice(), cpu)), prompts, new)
    finally:
        ops.select_backend(before)
    engine = engine_of(MadeUpRunner(config, model, bench.device, cpu))
    for state in ("cold", "from the cache"):
        found = generate(engine, prompts, new)
        if found != wanted:
            raise WrongResultError(f"tokens {state} differ from those of the CPU: {found} and {wanted}")
        bench.add(f"{len(prompts)} answers of {new} tokens, {state}", "equal")


class Steps:
    """A runner over an 8B shape (or a tiny one), made once for the sections that need it."""

    def __init__(self, bench: Bench) -> None:
        limit = bench.pick((1 << 17) + 64, 40)
        shape = bench.pick((32, 4096, 32, 8, 128, 14336, 128256), (1, 64, 2, 1, 16, 64, 128))
        self.model = made_up_config(*shape, limit)
        dtype = str(bench.dtype).removeprefix("torch.")
        seqs, chunk = bench.pick((16, 8192), (2, 16))
        config = EngineConfig(
            dtype=dtype,
            max_num_seqs=seqs,
            max_num_batched_tokens=chunk,
            kv_cache_bytes=bench.pick(None, 1 << 20),
            block_tokens=bench.pick(None, 16),
        )
        self.bench = bench
        self.runner = MadeUpRunner(config, self.model, bench.device)
        self.runner.cache.tensor.normal_()
        self.chunk = chunk

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: all but the embedding."""
        m = self.model
        attention = m.hidden_size * (2 * m.num_heads + 2 * m.num_kv_heads) * m.head_size
        layer = attention + 3 * m.hidden_size * m.intermediate_size
        return (m.num_layers * layer + m.vocab_size * m.hidden_size) * self.runner.decoder.dtype.itemsize

    def floor_s(self, contexts: list[int]) -> float:
        """The time in which weights and KV can be read."""
        return (self.weight_bytes + sum(contexts) * self.runner.layout.token_bytes) / self.bench.copy_rate

    def step_s(self, batch: Batch, count: int) -> float:
        """Wall time of a step when two are in flight, as the engine runs them."""
        batches = [batch, *[replace(batch, new_rows=[], block_updates=[])] * (count - 1)]

        def steps() -> None:
            flying: deque[PendingStep] = deque()
            for each in batches:
                flying.append(self.runner.run(each))
                if len(flying) == 2:
                    flying.popleft().result()
            while flying:
                flying.popleft().result()

        self.bench.need_time()
        return wall_seconds(steps, self.bench.device.torch_device, self.bench.pick(3, 1)) / count


def steps(bench: Bench) -> Steps:
    """The runner of this run."""
    found: Steps | None = bench.shared.get("steps")
    if found is None:
        found = bench.shared["steps"] = Steps(bench)
    return found


def decode_step(bench: Bench) -> None:
    """A whole step, captured and eager, against the time in which weights and KV can be read; overlap in the engine."""
    made = steps(bench)
    runner, tokens_of_block = made.runner, made.runner.layout.block_tokens
    graphs, count = runner.graphs, bench.pick(20, 1)
    for contexts in bench.pick(([512], [8192], [1 << 17], [8192] * 16), ([20], [20, 33])):
        batch = decode_batch(contexts, tokens_of_block)
        captured = runner.run(batch).result().token_ids
        runner.graphs = None
        eager = runner.run(batch).result().token_ids
        name, floor = f"{len(contexts)} x {contexts[0]} tokens", made.floor_s(contexts)
        if captured != eager:
            bench.notes.append(f"decode step: {name}: captured {captured}, eager {eager}: other tiles, or a mistake")
        took = made.step_s(batch, count)
        bench.add(f"{name}, eager: floor / step", f"{took * 1e3:.2f} ms", floor / took)
        runner.graphs = graphs
        took = made.step_s(batch, count)
        bench.add(f"{name}, captured: floor / step", f"{took * 1e3:.2f} ms", floor / took, STEP_BAR)
    prompts = [[(3 * place + row) % 97 for place in range(bench.pick(200, 3))] for row in range(bench.pick(16, 2))]
    rates = {}
    for depth in (1, 2):
        bench.need_time()
        engine, new = engine_of(runner, depth), bench.pick(64, 3)
        took = wall_seconds(lambda e=engine, n=new: generate(e, prompts, n), bench.device.torch_device, 1)  # type: ignore[misc]
        rates[depth] = len(prompts) * new / took
        bench.add(f"engine, {len(prompts)} sequences, {depth} in flight", f"{rates[depth]:.0f} tokens/s")
    bench.add("engine, two in flight / one", "", rates[2] / rates[1])


def restore(bench: Bench) -> None:
    """The first token of an 8k prompt: its KV copied from RAM, or computed; and a step while blocks move both ways."""
    made, device = steps(bench), bench.device
    runner, tokens_of_block = made.runner, made.runner.layout.block_tokens
    length = bench.pick(8192, 32)
    chunks = [
        prefill_batch(0, start, min(made.chunk, length - start), tokens_of_block, made.model.vocab_size)
        for start in range(0, length, made.chunk)
    ]

    def recompute() -> None:
        for chunk in chunks:
            runner.run(chunk).result()

    where, rounds = device.torch_device, bench.pick(3, 1)
    computing = wall_seconds(recompute, where, rounds)
    blocks = list(range(length // tokens_of_block))
    host = device.host_buffer((len(blocks), runner.layout.block_bytes), torch.uint8)
    copies = BlockCopies(device, runner.cache.tensor, bench.pick(32, 2))
    copies.read(blocks, host).wait()
    last = decode_batch([length], tokens_of_block)

    def fetch() -> list[int]:
        copies.write(host, blocks).hold_compute()
        return runner.run(last).result().token_ids

    wanted = runner.run(last).result().token_ids
    runner.cache.tensor[: len(blocks)].zero_()
    if fetch() != wanted:
        raise WrongResultError("restored KV gives another token than computed KV")
    fetching = wall_seconds(fetch, where, rounds)
    bench.add(f"first token of {length}, recomputed", f"{computing * 1e3:.1f} ms")
    bench.add(f"first token of {length}, restored", f"{fetching * 1e3:.1f} ms", computing / fetching, RESTORE_BAR)
    _disturbed(bench, made, copies, blocks, host)


def _disturbed(bench: Bench, made: Steps, copies: BlockCopies, blocks: list[int], host: torch.Tensor) -> None:
    """A decode step while blocks move out and in, against an idle link."""
    first, where = len(blocks), bench.device.torch_device
    batch = decode_batch([bench.pick(8192, 20)], made.runner.layout.block_tokens, first_block=2 * first)
    other, count = bench.device.host_buffer(host.shape, torch.uint8), bench.pick(4, 1)

    def step_s(*, moving: bool) -> float:
        synchronize(where)
        if moving:
            copies.read(blocks, other)
            copies.write(host, list(range(first, 2 * first)))
        start = time.perf_counter()
        for _ in range(count):
            made.runner.run(batch).result()
        took = (time.perf_counter() - start) / count
        synchronize(where)
        return took

    bench.need_time()
    pairs = [(step_s(moving=True), step_s(moving=False)) for _ in range(bench.pick(6, 1))][-5:]
    busy, idle = (statistics.median(side) for side in zip(*pairs, strict=True))
    figure = f"{busy * 1e3:.2f} and {idle * 1e3:.2f} ms"
    bench.add("step while blocks move both ways / idle", figure, busy / idle, DISTURBED_BAR, at_most=True)
