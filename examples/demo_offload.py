"""See what tiers below the device do: 12 chats that return, on a device pool of 4,000 tokens, without and with a store.

`make demo-offload`, or `python examples/demo_offload.py`. Runs SmolLM2-135M on the CPU, one request at a time; prints a
table and saves a picture. Every chat reads on in this project's own documents, so its prompt grows with each turn.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tournant.deploy.config import ServiceConfig, parse_config
from tournant.deploy.frontend import Frontend, FrontendOptions
from tournant.deploy.startup import OwnStore, start_engine
from tournant.workers.sampling_params import SamplingParams

REPO = Path(__file__).resolve().parent.parent
CHATS, TURNS, NEW_TOKENS = 12, 4, 16
FIRST_CHARACTERS, MORE_CHARACTERS = 1400, 700  # of text that a chat reads in its first turn and in each later one
POOL_TOKENS, TOKEN_BYTES = 4000, 23_040  # of SmolLM2-135M in bfloat16
HOST_BYTES, NVME_BYTES = 208 << 20, 1 << 30
RESTORE = "auto"  # what is found below is loaded or computed again, whichever is faster here
MODEL = "SmolLM2-135M-Instruct"  # without --model
QUESTION = "What is this about? Answer in one sentence."
OFF, ON = "without a store", "with a store"
SOURCES = ("device", "RAM", "disk", "computed")


@dataclass(frozen=True, slots=True)
class Answered:
    """One turn. chat, turn: from 0; first_token_s: what the user waits; tokens: of the prompt, by where they came from
    (SOURCES); answer: token ids.
    """

    chat: int
    turn: int
    first_token_s: float
    tokens: tuple[int, int, int, int]
    answer: list[int]


def pieces(chats: int, turns: int) -> list[list[str]]:
    """What each chat reads, turn by turn: consecutive parts of the documents, no part twice."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((REPO / "docs").glob("*.md")))
    sizes = [FIRST_CHARACTERS] + [MORE_CHARACTERS] * (turns - 1)
    starts = iter(range(0, len(text), sum(sizes)))
    found = []
    for _ in range(chats):
        at = next(starts)
        found.append([text[at + sum(sizes[:turn]) : at + sum(sizes[: turn + 1])] for turn in range(turns)])
    return found


def order(chats: int, turns: int) -> list[int]:
    """Which chat sends its next turn: all take their first one, then they return in an order that nobody can guess."""
    rng = random.Random(7)
    return [chat for turn in range(turns) for chat in (rng.sample(range(chats), chats) if turn else range(chats))]


def configured(model: str | None, threads: int | None, kv_store: dict[str, Any]) -> ServiceConfig:
    """The same engine each time, with these tiers."""
    engine = {"device": "cpu", "dtype": "bfloat16", "kv_cache_bytes": POOL_TOKENS * TOKEN_BYTES, "deterministic": True}
    advanced = {"num_threads": threads, "restore": RESTORE}
    return parse_config({"model": model, "engine": engine, "advanced": advanced, "kv_store": kv_store})


async def serve(
    config: ServiceConfig, store: OwnStore | None, texts: list[list[str]], done: Callable[[], None]
) -> list[Answered]:
    """All turns, one after another. done: called after each."""
    _, tokenizer, engine = await start_engine(config, find_store=None if store is None else store.socket)
    try:
        frontend = Frontend(tokenizer, engine, FrontendOptions(tiers=True))
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
        messages: list[list[dict[str, str]]] = [[] for _ in texts]
        found: list[Answered] = []
        for chat in order(len(texts), len(texts[0])):
            turn = len(messages[chat]) // 2
            messages[chat].append({"role": "user", "content": f"{texts[chat][turn]}\n\n{QUESTION}"})
            stream = await frontend.stream(messages[chat], params)
            completion = await stream.collect()
            answer, usage = completion.answers[0], completion.usage
            messages[chat].append({"role": "assistant", "content": answer.text})
            by_tier = usage.cached_by_tier or (0, 0, 0)
            first = (stream.first_token_time or stream.arrival) - stream.arrival
            found.append(Answered(chat, turn, first, (*by_tier, usage.prompt_tokens - sum(by_tier)), answer.token_ids))
            done()
        return found
    finally:
        await engine.close()


@contextmanager
def tiers(which: str) -> Iterator[tuple[dict[str, Any], Callable[[ServiceConfig], OwnStore | None]]]:
    """The `kv_store:` of a run, whose files are gone afterwards, and what starts its store."""
    with tempfile.TemporaryDirectory(prefix="tournant-demo-") as folder:
        stores: list[OwnStore] = []

        def start(config: ServiceConfig) -> OwnStore | None:
            plan = config.kv_store.plan(on_gpu=False)
            stores.extend([] if plan is None else [OwnStore(plan)])
            return stores[0] if stores else None

        sizes = {"host_bytes": HOST_BYTES, "nvme_bytes": NVME_BYTES, "nvme_folder": str(Path(folder) / "nvme")}
        try:
            yield ({"host_bytes": 0} if which == OFF else sizes), start
        finally:
            for store in stores:
                store.close()


def run(which: str, model: str | None, threads: int | None, texts: list[list[str]], console: Console) -> list[Answered]:
    """One of the two services from its start to its end, with a progress bar."""
    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tiers(which) as (kv_store, start), Progress(*columns, console=console) as progress:
        bar = progress.add_task(which, total=sum(map(len, texts)))
        config = configured(model, threads, kv_store)
        return asyncio.run(serve(config, start(config), texts, lambda: progress.advance(bar)))


# -------------------------------------------------------------------- what is shown


def percentile(values: list[float], percent: int) -> float:
    """Of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def returning(answers: list[Answered]) -> list[float]:
    """Times to the first token of the turns after a chat's first one, in milliseconds."""
    return [answer.first_token_s * 1e3 for answer in answers if answer.turn]


def shares(answers: list[Answered]) -> list[float]:
    """Of all prompt tokens, by where they came from."""
    sums = [sum(answer.tokens[source] for answer in answers) for source in range(len(SOURCES))]
    return [value / sum(sums) for value in sums]


def as_table(found: dict[str, list[Answered]]) -> Table:
    """Both runs side by side."""
    table = Table("", OFF, ON)
    for percent in (50, 95):
        times = [percentile(returning(answers), percent) for answers in found.values()]
        table.add_row(f"first token of a returning turn, p{percent}", *(f"{time:,.0f} ms" for time in times))
    for source, name in enumerate(SOURCES):
        what = "prompt tokens computed" if name == "computed" else f"prompt tokens found: {name}"
        table.add_row(what, *(f"{shares(answers)[source]:.1%}" for answers in found.values()))
    return table


def draw(found: dict[str, list[Answered]], path: Path, model: str) -> None:
    """Save the picture; model: its name. Raises ImportError without matplotlib."""
    import matplotlib as mpl  # an extra, which only this needs

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), width_ratios=(3, 2))
    for (name, answers), color, marker in zip(found.items(), ("tab:red", "tab:blue"), "so", strict=True):
        times = sorted(returning(answers))
        median = percentile(times, 50)
        left.plot(
            range(1, len(times) + 1),
            times,
            f"{marker}-",
            ms=4,
            color=color,
            label=f"{name}: median {median:,.0f} ms (dotted)",
        )
        left.axhline(median, color=color, linestyle=":", linewidth=1)
    left.set(yscale="log", xlabel="returning turns, sorted from the fastest to the slowest")
    left.set(ylabel="time to first token (ms, logarithmic)", title="How long a user who returns waits")
    left.yaxis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:,.0f}"))
    left.grid(visible=True, axis="y", which="both", alpha=0.25)
    left.legend(loc="upper left")
    below = {
        "device": f"pool of {POOL_TOKENS:,} tokens",
        "RAM": f"{HOST_BYTES >> 20} MiB",
        "disk": f"{NVME_BYTES >> 20} MiB",
    }
    bottoms = [0.0] * len(found)
    for source, color in enumerate(("tab:green", "tab:blue", "tab:purple", "lightgray")):
        heights = [100 * shares(answers)[source] for answers in found.values()]
        size = below.get(SOURCES[source])
        label = SOURCES[source] + (f" ({size})" if size else " anew")
        bars = right.bar(list(found), heights, 0.6, bottom=bottoms, color=color, label=label)
        right.bar_label(bars, [f"{height:.0f} %" if height >= 3 else "" for height in heights], label_type="center")
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    right.set(ylabel="prompt tokens of all turns (%)", ylim=(0, 100), title="Where their KV came from")
    handles, labels = right.get_legend_handles_labels()
    right.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5))  # as the bars are stacked
    turns = max(answer.turn for answers in found.values() for answer in answers) + 1
    chats = max(answer.chat for answers in found.values() for answer in answers) + 1
    figure.suptitle(f"{model} on this CPU: {chats} chats of {turns} turns, device pool of {POOL_TOKENS:,} tokens")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run both, compare, show. Exit code 1 when the answers differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="model folder or .gguf file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine (default: all cores)")
    parser.add_argument("--chats", type=int, default=CHATS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--png", type=Path, default=REPO / "build" / "demo_offload.png", help="where the picture goes")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(
        f"{options.chats} chats of {options.turns} turns on a device pool of {POOL_TOKENS:,} tokens, then the same "
        f"with {HOST_BYTES >> 20} MiB of RAM and {NVME_BYTES >> 20} MiB of disk below it.",
        highlight=False,
    )
    texts = pieces(options.chats, options.turns)
    found = {which: run(which, options.model, options.threads, texts, console) for which in (OFF, ON)}
    console.print(as_table(found))
    different = sum(a.answer != b.answer for a, b in zip(found[OFF], found[ON], strict=True))
    if different:
        console.print(f"{different} answers differ: this is a defect of Tournant, please report it", style="bold red")
        return 1
    console.print(f"All {len(found[ON])} answers are the same, token for token (greedy, deterministic: true).")
    try:
        draw(found, options.png, MODEL if options.model is None else Path(options.model).name)
    except ImportError:
        console.print("No picture: it needs matplotlib, which `make demo-offload` installs.")
    else:
        console.print(f"The picture is in {options.png}", soft_wrap=True, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
