"""See a text eight times larger than the device pool answered, beside the refusal that the same pool gives without.

`make demo-long`, or `python examples/demo_long.py`. Runs SmolLM2-135M on the CPU with a device pool of 960 tokens: the
text is this project's own documents, with one sentence planted in the middle that the question is about.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tournant.deploy.errors import RequestError
from tournant.deploy.llm import LLM
from tournant.workers.model_files import resolve_model
from tournant.workers.models.families import read_decoder_config
from tournant.workers.sampling_params import SamplingParams

REPO = Path(__file__).resolve().parent.parent
POOL_TOKENS, TIMES = 960, 8
RAM_TIMES, DISK_TIMES = 2, 8  # places below the device, of the pool
NEEDLE = "The secret word of the kitchen is marjoram."
QUESTION = "What is the secret word of the kitchen? Answer with the sentence of the text that says it."


def messages(llm: LLM, tokens: int) -> list[dict[str, str]]:
    """A conversation of about so many tokens, with the needle in its middle."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((REPO / "docs").glob("*.md")))
    few, many = 0, len(text)
    while many - few > 16:  # as much of the text as fits
        half = (few + many) // 2
        if len(llm.encode(told(text[:half]))) <= tokens:
            few = half
        else:
            many = half
    return told(text[:few])


def told(text: str) -> list[dict[str, str]]:
    """The text with the needle, and the question."""
    half = len(text) // 2
    return [{"role": "user", "content": f"{text[:half]}\n{NEEDLE}\n{text[half:]}\n\n{QUESTION}"}]


def peak_bytes(pid: int) -> int:
    """Most memory that a process has held so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def mib(num_bytes: int) -> str:
    """As it is printed."""
    return f"{num_bytes / 2**20:,.1f} MiB"


def kv_token_bytes(model: str | None) -> int:
    """Bytes of a token's KV in bfloat16."""
    decoder = read_decoder_config(resolve_model(model, "bfloat16").folder)
    return decoder.num_layers * 2 * decoder.num_kv_heads * decoder.head_size * 2


def engine(options: argparse.Namespace, pool_bytes: int, **below: Any) -> LLM:
    """The same engine each time, with or without places below its device."""
    return LLM(
        options.model,
        dtype="bfloat16",
        device="cpu",
        kv_cache_bytes=pool_bytes,
        num_threads=options.threads,
        **below,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Ask twice and print both outcomes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", help="folder or .gguf file; default: SmolLM2-135M-Instruct")
    parser.add_argument("--pool-tokens", type=int, default=POOL_TOKENS, help="room of the device for KV, in tokens")
    parser.add_argument("--threads", type=int, help="CPU threads; default: all cores")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    console, params = Console(), SamplingParams(temperature=0, max_tokens=48)
    token_bytes = kv_token_bytes(options.model)
    pool_bytes = options.pool_tokens * token_bytes
    below = {"overflow_host_bytes": RAM_TIMES * pool_bytes, "overflow_disk_bytes": DISK_TIMES * pool_bytes}
    with engine(options, pool_bytes) as llm:
        conversation = messages(llm, TIMES * options.pool_tokens)
        tokens = len(llm.encode(conversation))
        console.print(f"A text of {tokens:,} tokens, a device pool of {options.pool_tokens:,}.\n", highlight=False)
        try:
            llm.chat(conversation, params, use_tqdm=False)
            raise SystemExit("the text fits the device: choose fewer --pool-tokens")
        except RequestError as error:
            console.print(f"[bold]Without places below the device[/bold]: refused\n  {error}\n", highlight=False)
    with engine(options, pool_bytes, **below) as llm:
        start = time.perf_counter()
        (output,) = llm.chat(conversation, params)
        seconds = time.perf_counter() - start
        stats, peak = llm.engine_stats.overflow, peak_bytes(llm.engine_pid)
    console.print("[bold]With them[/bold]: answered\n", highlight=False)
    console.print(f"  {output.outputs[0].text.strip()}\n", highlight=False, markup=False)
    table = Table("", "")
    for name, value in (
        ("time", f"{seconds:.1f} s for {tokens:,} + {len(output.outputs[0].token_ids)} tokens"),
        ("KV copied off the device", mib(stats.written_bytes)),
        ("KV attended to in RAM, where it lies", mib(stats.host_bytes)),
        ("KV attended to that was read from disk", mib(stats.disk_bytes)),
        ("the device pool", mib(pool_bytes)),
        ("the text's KV", mib(tokens * token_bytes)),
        ("peak memory of the engine, weights included", mib(peak)),
    ):
        table.add_row(name, value)
    console.print(table)


if __name__ == "__main__":
    main()
