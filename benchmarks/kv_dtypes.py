"""What KV in fp8 costs in accuracy, on the device and only below it, and what it costs or saves in time on the CPU.

Accuracy is measured on real text with the default model, its weights dequantised: logits along this repository's own
prose, and greedy answers of the whole engine. Every error has that of bfloat16 itself beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.common import REPO, BenchmarkError, Cell, Options, Report, Table, interleave, run_main, say, timed
from tournant.kernels import ops
from tournant.kernels.layout import KV_FORMS, KVLayout
from tournant.workers.batch import Batch
from tournant.workers.config import EngineConfig
from tournant.workers.device import make_device
from tournant.workers.engine_process import build_engine
from tournant.workers.forward_input import InputBuilder
from tournant.workers.kv_cache import KV_CACHE_DTYPES, KVCache
from tournant.workers.messages import EngineRequest
from tournant.workers.model_files import resolve_model
from tournant.workers.model_folder import ModelFiles
from tournant.workers.models.decoder import Decoder
from tournant.workers.models.families import describe, read_decoder_config
from tournant.workers.models.linear import can_pack
from tournant.workers.sampling_params import SamplingParams
from tournant.workers.weights import load_checkpoint

TEXTS = ("README.md", "docs/architecture.md", "docs/decisions.md", "LICENSE")
PIECE, PIECES = 512, 4  # tokens of a piece of text; from its middle on, KV before it comes from below the device
PROMPT, PROMPTS, NUM_NEW = 64, 20, 64
CHARACTERS_PER_TOKEN = 6  # more than there are
BLOCK_TOKENS, CONTEXT, PASSES = 16, 8192, 5
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, block_tokens=BLOCK_TOKENS, head_size=64, dtype=torch.bfloat16)
NUM_HEADS = 9
EXACT, PLAIN = "float32", "bfloat16"


def run(options: Options) -> Report:
    """Logits, greedy answers, attention, conversion."""
    report = Report("KV in fp8")
    files = resolve_model(options.model, EXACT, progress=say)
    ids = _text(files, options)
    report.add(_logits_table(files, ids, options))
    report.add(_greedy_table(files, ids, options))
    report.add(_attention_table(options))
    report.add(_images_table(options))
    return report


def _text(files: ModelFiles, options: Options) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(str(files.folder), local_files_only=True)
    text = "\n".join((REPO / name).read_text(encoding="utf-8") for name in TEXTS if (REPO / name).is_file())
    wanted = 64 if options.quick else PIECE * PIECES
    ids: list[int] = tokenizer(text[: wanted * CHARACTERS_PER_TOKEN])["input_ids"]
    if len(ids) < wanted:
        raise BenchmarkError(f"the texts have {len(ids)} tokens; {wanted} are needed")
    return ids[:wanted]


# -------------------------------------------------------------------- logits


class _Model:
    """The weights in one dtype, over KV of any form."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype, most_tokens: int) -> None:
        self._config = read_decoder_config(files.folder, most_tokens)
        self._device = make_device("cpu")
        checkpoint = load_checkpoint(files.folder)
        cpu = self._device.torch_device
        self.decoder = Decoder(self._config, checkpoint, dtype, cpu, packed=can_pack(dtype))

    def logits(
        self, piece: list[int], kv_dtype: torch.dtype | None = None, lower: torch.dtype | None = None
    ) -> torch.Tensor:
        """float32 [tokens, vocab] of one sequence. lower: its first half's KV has been down and up again as that."""
        layout = self.decoder.layout(BLOCK_TOKENS, kv_dtype)
        blocks, half = -(-len(piece) // BLOCK_TOKENS), len(piece) // 2
        cache = KVCache(layout, blocks, self._device.torch_device)
        builder = InputBuilder(layout, self._config.num_heads, 1, blocks, self._device, deterministic=False)
        parts = []
        for start, stop in ((0, half), (half, len(piece))):
            batch = Batch(
                step=0,
                rows=[0],
                starts=[start],
                counts=[stop - start],
                rope_offsets=[0],
                token_ids=piece[start:stop],
                block_updates=[(0, 0, list(range(blocks)))],
                sampling=[0],
            )
            hidden = self.decoder.forward(builder.build(batch), cache.tensor, kv_scales=cache.scales)
            parts.append(self.decoder.logits(hidden))
            if lower is not None and not start:
                stored = torch.arange(half // BLOCK_TOKENS)
                images = torch.empty(len(stored), replace(layout, dtype=lower).block_bytes, dtype=torch.uint8)
                ops.encode_blocks(cache.tensor, stored, images, lower)
                ops.decode_blocks(images, lower, stored, cache.tensor)
        return torch.cat(parts)


@dataclass
class _Errors:
    """Sums over pieces of logits beside others."""

    largest: float = 0.0
    squares: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    equal: list[float] = field(default_factory=list)

    def add(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        error = found - wanted
        self.largest = max(self.largest, float(error.abs().max()))
        self.squares.append(float(error.square().mean()))
        self.spreads.append(float(wanted.std(-1).mean()))
        self.equal.append(float((found.argmax(-1) == wanted.argmax(-1)).float().mean()))

    def cells(self) -> list[Cell]:
        spread = float(np.mean(self.spreads))
        return [self.largest / spread, float(np.mean(self.squares)) ** 0.5 / spread, f"{np.mean(self.equal):.2%}"]


@torch.inference_mode()
def _logits_table(files: ModelFiles, ids: list[int], options: Options) -> Table:
    length = 32 if options.quick else PIECE
    exact, plain = _Model(files, torch.float32, length), _Model(files, torch.bfloat16, length)
    errors: dict[tuple[str, str], _Errors] = {}

    def compare(name: str, beside: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        errors.setdefault((name, beside), _Errors()).add(found, wanted)

    for start in range(0, len(ids), length):
        piece = ids[start : start + length]
        say(f"computing logits of tokens {start} to {start + length}")
        wide, narrow = exact.logits(piece), plain.logits(piece)
        compare(PLAIN, EXACT, narrow, wide)
        for name, dtype in KV_CACHE_DTYPES.items():
            found = plain.logits(piece, dtype)
            compare(f"{PLAIN}, KV {name}", PLAIN, found, narrow)
            compare(f"{PLAIN}, KV {name}", EXACT, found, wide)
        for name, dtype in KV_CACHE_DTYPES.items():
            later = slice(length // 2, None)
            found = plain.logits(piece, lower=dtype)[later]
            compare(f"{PLAIN}, {name} below the device", PLAIN, found, narrow[later])
            compare(f"{PLAIN}, {name} below the device", EXACT, found, wide[later])
    return Table(
        "logits on real text",
        ("form", "beside", "largest error / spread", "RMS error / spread", "top token equal"),
        [[name, beside, *found.cells()] for (name, beside), found in errors.items()],
        (
            f"{len(ids)} positions of {', '.join(TEXTS)} in pieces of {length} tokens, each in two chunks; below the "
            "device: positions of the second, KV of the first converted once to fp8 and back.",
            "Spread: mean over positions of the standard deviation of the other's logits.",
        ),
    )


# -------------------------------------------------------------------- greedy answers


def _answers(files: ModelFiles, prompts: list[list[int]], dtype: str, form: str, num_new: int) -> list[list[int]]:
    config = EngineConfig(
        device="cpu",
        dtype=dtype,
        quantization="dequantize",
        kv_cache_dtype=form,
        kv_cache_bytes=1 << 28,
        num_threads=torch.get_num_threads(),
    )
    engine = build_engine(config, describe(files, config), writer_id=1)[0]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_new)
    for number, prompt in enumerate(prompts):
        engine.add_request(EngineRequest(number, prompt, params))
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return tokens


def _greedy_table(files: ModelFiles, ids: list[int], options: Options) -> Table:
    count, length, num_new = (2, 16, 4) if options.quick else (PROMPTS, PROMPT, NUM_NEW)
    stride = (len(ids) - length) // (count - 1)
    prompts = [ids[stride * number : stride * number + length] for number in range(count)]
    say("answering greedily")
    found = {
        EXACT: _answers(files, prompts, EXACT, "auto", num_new),
        PLAIN: _answers(files, prompts, PLAIN, "auto", num_new),
    }
    for form in KV_CACHE_DTYPES:
        found[f"{PLAIN}, KV {form}"] = _answers(files, prompts, PLAIN, form, num_new)
    rows: list[list[Cell]] = []
    for name, beside in ((PLAIN, EXACT), *((name, other) for name in list(found)[2:] for other in (PLAIN, EXACT))):
        equal = np.asarray(found[name]) == np.asarray(found[beside])
        same = np.where(equal.all(1), num_new, np.argmin(equal, 1))
        rows.append([name, beside, f"{equal.mean():.1%}", f"{equal.all(1).sum()} of {count}", float(same.mean())])
    return Table(
        "greedy answers of the engine",
        ("form", "beside", "tokens equal", "answers equal", "mean tokens until the first difference"),
        rows,
        (
            f"{count} prompts of {length} tokens of the same text, {num_new} new tokens each, in one batch. Answers go "
            "their own ways after the first difference.",
        ),
    )


# -------------------------------------------------------------------- time


def _attention(layout: KVLayout, seqs: int, tokens: int, queries: int) -> Callable[[], object]:
    """Attention of all layers over scattered blocks of random KV of size about 1."""
    blocks = -(-tokens // BLOCK_TOKENS)
    plain = replace(layout, dtype=torch.bfloat16).allocate(seqs * blocks).normal_()
    cache, scales = layout.allocate(seqs * blocks), layout.allocate_scales(seqs * blocks)
    every = torch.arange(seqs * blocks * BLOCK_TOKENS)
    for layer in range(layout.num_layers):
        k, v = (plain[:, layer, which].transpose(1, 2).flatten(0, 1).contiguous() for which in (0, 1))
        ops.store_kv(k, v, cache, layer, every, kv_scales=scales)
    tables = torch.randperm(seqs * blocks).int().view(seqs, blocks)
    q = torch.randn(seqs * queries, NUM_HEADS, layout.head_size).bfloat16()
    out = torch.empty_like(q)

    def attend() -> None:
        starts, contexts = torch.arange(seqs + 1).int() * queries, torch.full((seqs,), tokens).int()
        plan = ops.plan_attention(tables, starts, contexts, layout, NUM_HEADS)
        for layer in range(layout.num_layers):
            ops.paged_attention(out, q, cache, layer, plan, layout.head_size**-0.5, kv_scales=scales)

    return attend


def _attention_table(options: Options) -> Table:
    layers, shrink = (2, 16) if options.quick else (LAYOUT.num_layers, 1)
    rows: list[list[Cell]] = []
    for title, seqs, tokens, queries, passes in (
        (f"decode, 1 sequence of {CONTEXT // shrink:,} tokens", 1, CONTEXT // shrink, 1, PASSES),
        ("decode, 32 sequences of 160 tokens", 32, 160, 1, PASSES),
        (f"prefill of {2048 // shrink:,} tokens", 1, 2048 // shrink, 2048 // shrink, 1),
    ):
        dtypes = (torch.bfloat16, *KV_CACHE_DTYPES.values())
        layouts = {KV_FORMS[dtype]: replace(LAYOUT, num_layers=layers, dtype=dtype) for dtype in dtypes}
        found = interleave(
            {name: timed(_attention(layout, seqs, tokens, queries), passes) for name, layout in layouts.items()},
            options.rounds,
        )
        plain = found[KV_FORMS[torch.bfloat16]]
        for name, seconds in found.items():
            ratio: Cell = "" if seconds is plain else plain.over(seconds)
            rows.append([title, name, seconds.map(lambda value: value * 1e3 / layers), ratio])
    return Table(
        "attention in bfloat16",
        ("work", "KV", "ms per layer", "speed over bf16 KV"),
        rows,
        (f"back end {ops.backend()!r}, {torch.get_num_threads()} threads, {layers} layers per pass, blocks scattered",),
    )


def _images_table(options: Options) -> Table:
    count = 16 if options.quick else 256
    layout = replace(LAYOUT, num_layers=2) if options.quick else LAYOUT
    pool, ids = layout.allocate(count).normal_(), torch.randperm(count)
    work: dict[str, Callable[[], object]] = {}
    for name, dtype in KV_CACHE_DTYPES.items():
        images = torch.zeros(count, replace(layout, dtype=dtype).block_bytes, dtype=torch.uint8)
        ops.encode_blocks(pool, ids, images, dtype)
        work[f"to {name}"] = lambda images=images, dtype=dtype: ops.encode_blocks(pool, ids, images, dtype)
        work[f"from {name}"] = lambda images=images, dtype=dtype: ops.decode_blocks(images, dtype, ids, pool)
    plain = torch.zeros_like(pool)
    work["copied"] = lambda: ops.gather_blocks(pool, ids, plain)
    found = interleave({name: timed(action) for name, action in work.items()}, options.rounds)
    rows: list[list[Cell]] = [
        [name, seconds.map(lambda value: count * layout.block_bytes / value / 1e9)] for name, seconds in found.items()
    ]
    note = f"{count} blocks of {layout.block_bytes >> 10} KiB, in one thread; copied: in torch's threads."
    return Table("bfloat16 blocks", ("work", "GB/s of the device's blocks"), rows, (note,))


if __name__ == "__main__":
    run_main(run, __doc__)
