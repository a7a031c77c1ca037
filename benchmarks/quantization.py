"""What multiplying with quantised weights costs in accuracy: logits on real text, beside dequantised float32.

The text is this repository's own prose, in pieces of 512 tokens; every position's logits count. Nothing is timed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmarks.common import REPO, Cell, Options, Report, Table, run_main, say
from tournant.kernels.layout import KVLayout
from tournant.workers.batch import Batch
from tournant.workers.device import make_device
from tournant.workers.forward_input import InputBuilder
from tournant.workers.model_files import resolve_model
from tournant.workers.models.decoder import Decoder
from tournant.workers.models.families import read_decoder_config
from tournant.workers.models.linear import can_pack
from tournant.workers.weights import load_checkpoint

TEXTS = ("README.md", "docs/architecture.md", "docs/decisions.md", "LICENSE")
PIECE, PIECES = 512, 4
CHARACTERS_PER_TOKEN = 6  # more than there are
BLOCK_TOKENS = 16
FORMS = (("float32", False), ("float32", True), ("bfloat16", False), ("bfloat16", True))  # dtype, native


@torch.inference_mode()
def run(options: Options) -> Report:
    """Logits of every form beside those of the first."""
    report = Report("Quantised weights")
    pieces = _pieces(options)
    ids = torch.tensor(pieces)
    exact: torch.Tensor | None = None
    rows: list[list[Cell]] = []
    for dtype, native in FORMS:
        say(f"computing logits in {dtype}, {'native' if native else 'dequantised'}")
        logits = torch.stack([_logits(options.model, dtype, native, piece) for piece in pieces])
        exact = logits if exact is None else exact
        rows.append([f"{dtype}, {'native' if native else 'dequantised'}", *_compared(logits, exact, ids)])
    report.add(
        Table(
            "logits on real text, beside float32 dequantised",
            ("form", "mean abs error", "max abs error", "error / spread", "greedy tokens equal", "perplexity"),
            rows,
            (
                f"{ids.numel()} positions of {', '.join(TEXTS)} in pieces of {len(pieces[0])} tokens.",
                "Spread: mean over positions of the standard deviation of the exact logits; error: root mean square.",
            ),
        )
    )
    return report


def _pieces(options: Options) -> list[list[int]]:
    files = resolve_model(options.model, "float32", progress=say)
    tokenizer = AutoTokenizer.from_pretrained(str(files.folder), local_files_only=True)
    text = "\n".join((REPO / name).read_text(encoding="utf-8") for name in TEXTS if Path(REPO / name).is_file())
    length, count = (32, 2) if options.quick else (PIECE, PIECES)
    ids = tokenizer(text[: length * count * CHARACTERS_PER_TOKEN])["input_ids"]
    return [ids[start : start + length] for start in range(0, length * count, length)]


def _logits(model: str | None, dtype: str, native: bool, piece: list[int]) -> torch.Tensor:
    """float32 [tokens, vocab] of one sequence."""
    folder, device = resolve_model(model, dtype).folder, make_device("cpu")
    config, torch_dtype = read_decoder_config(folder, len(piece)), getattr(torch, dtype)
    decoder = Decoder(
        config, load_checkpoint(folder), torch_dtype, device.torch_device, packed=can_pack(torch_dtype), native=native
    )
    layout: KVLayout = decoder.layout(BLOCK_TOKENS)
    blocks = -(-len(piece) // BLOCK_TOKENS)
    builder = InputBuilder(layout, config.num_heads, 1, blocks, device, deterministic=False)
    batch = Batch(
        step=0,
        rows=[0],
        starts=[0],
        counts=[len(piece)],
        rope_offsets=[0],
        token_ids=piece,
        block_updates=[(0, 0, list(range(blocks)))],
        sampling=[0],
    )
    return decoder.logits(decoder.forward(builder.build(batch), layout.allocate(blocks, device.torch_device)))


def _compared(logits: torch.Tensor, exact: torch.Tensor, ids: torch.Tensor) -> list[Cell]:
    error = logits - exact
    spread = float(exact.std(-1).mean())
    equal = float((logits.argmax(-1) == exact.argmax(-1)).float().mean())
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    root = float(error.square().mean().sqrt())
    return [float(error.abs().mean()), float(error.abs().max()), root / spread, f"{equal:.2%}", float(loss.exp())]


if __name__ == "__main__":
    run_main(run, __doc__)
