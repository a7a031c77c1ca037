"""Train a soft prompt: a few vectors in front of a text that make a frozen SmolLM2-135M expect it.

`python examples/prompt_tuning.py`. The model is transformers'; its attention is Tournant's, both ways without a matrix
of scores (kernels/flash_attention.py), registered under the name "tournant". Prints the loss of each step, the time,
and the memory that the steps took beyond the loaded model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from tournant.kernels.flash_attention import flash_attention
from tournant.workers.model_files import resolve_model

ATTENTION = "tournant"
TEXT = """Time turns slowly here. In the village of Tournant every clock runs backwards on Sundays, and
the baker sells yesterday's bread before it is baked. Children learn to answer before they are asked. When the mayor was
elected, he had already resigned, and the speech that he gave was the one that everybody remembered from the year after.
Nobody minds. The river, which flows uphill as far as the mill, brings back what was lost in it: hats, letters, a boat.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """loss: mean over the text's tokens, in nats, before this step's change; seconds: forward, backward and change."""

    loss: float
    seconds: float


def tiled_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: heads in, [batch, tokens, heads, size] and no weights out.

    Raises ValueError for a mask (padding) and for dropout, neither of which tiles know.
    """
    del module
    if attention_mask is not None or dropout:
        raise ValueError(f"{ATTENTION} attention knows neither padding masks nor dropout ({dropout}); train without")
    out = flash_attention(query, key, value, scale=scaling, window=sliding_window or 0, softcap=softcap or 0.0)
    return out.transpose(1, 2), None


def load(model: str | None, attention: str) -> tuple[Any, Any]:
    """(frozen model in float32, tokenizer). attention: ATTENTION, or one of transformers' own to compare with."""
    AttentionInterface.register(ATTENTION, tiled_attention)
    folder = resolve_model(model).folder
    frozen = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, local_files_only=True
    )
    return frozen.eval().requires_grad_(False), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def train(model: Any, tokens: torch.Tensor, length: int, steps: int, rate: float) -> Iterator[Step]:
    """Train `length` vectors, which begin as embeddings of the text's own tokens, in front of tokens [T], by Adam."""
    embed = model.get_input_embeddings()
    text = embed(tokens)
    prompt = text[torch.arange(length) % len(tokens)].clone().requires_grad_()
    optimizer = torch.optim.Adam([prompt], lr=rate)
    for _ in range(steps):
        start = time.perf_counter()
        hidden = model(inputs_embeds=torch.cat([prompt, text])[None], use_cache=False, logits_to_keep=len(tokens) + 1)
        loss = torch.nn.functional.cross_entropy(hidden.logits[0, :-1].float(), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield Step(loss.item(), time.perf_counter() - start)


def matrices_bytes(model: Any, tokens: int) -> int:
    """What probabilities of all layers and heads would take, if they were kept for the backward pass in float32."""
    config = model.config
    return 4 * int(config.num_hidden_layers) * int(config.num_attention_heads) * tokens**2


# -------------------------------------------------------------------- memory of the process


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.split(f"{name}:")[1].split()[0]) << 10


def begin_peak() -> int:
    """Forget the highest memory so far (Linux); bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def peak() -> int:
    """The highest resident bytes since `begin_peak`."""
    return _status("VmHWM")


def count(text: str) -> int:
    """A whole number from 1, for argparse."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Train and print. 0 when the loss fell, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="folder, .gguf file or hub id; without: SmolLM2-135M")
    parser.add_argument("--steps", type=count, default=10)
    parser.add_argument("--prompt-tokens", type=count, default=8, help="vectors that are trained")
    parser.add_argument("--text", type=Path, help="a text file to learn instead of the built-in lines")
    parser.add_argument("--max-tokens", type=count, default=1024, help="of the text")
    parser.add_argument("--rate", type=float, default=0.01, help="of Adam")
    parser.add_argument("--attention", default=ATTENTION, help=f"{ATTENTION}, or transformers' eager or sdpa")
    options = parser.parse_args(arguments)
    try:
        text = options.text.read_text(encoding="utf-8") if options.text else TEXT
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--text {options.text} cannot be read: {error}")
    if not text:
        parser.error(f"--text {options.text} is empty; there is nothing to learn")
    model, tokenizer = load(options.model, options.attention)
    tokens = torch.tensor(tokenizer(text)["input_ids"][: options.max_tokens])
    total = options.prompt_tokens + len(tokens)
    print(f"{options.prompt_tokens} vectors in front of {len(tokens)} tokens, attention: {options.attention}")
    before = begin_peak()
    losses, seconds = [], []
    for number, step in enumerate(train(model, tokens, options.prompt_tokens, options.steps, options.rate), 1):
        losses.append(step.loss)
        seconds.append(step.seconds)
        print(f"step {number:3}: loss {step.loss:.4f}, {step.seconds:.2f} s", flush=True)
    extra, matrices = (peak() - before) >> 20, matrices_bytes(model, total) >> 20
    print(f"{sum(seconds):.1f} s; peak extra memory: {extra:,} MiB")
    print(f"(probabilities of all layers and heads, which {ATTENTION} attention does not keep: {matrices:,} MiB)")
    return 0 if losses and losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
