"""Heat maps of attention: one PNG beside each array, down-sampled by the mean over cells.

Owns what a picture shows. It needs matplotlib, which the extra `demo` installs and nothing else here uses.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tournant.workers.map_files import AttentionMaps, MapName

MAX_CELLS = 256  # of a side
MAX_LABELS, MAX_LABEL_CHARS = 24, 12


def down_sample(array: npt.NDArray[np.float32], cells: int) -> npt.NDArray[np.float64]:
    """Means of [tokens, tokens] over [cells, cells] pieces, of what lies on or below the diagonal; NaN where a piece
    has nothing there. Reads the array once, a piece of rows at a time.
    """
    edges = np.arange(cells) * len(array) // cells
    ends = [*edges[1:], len(array)]
    keys = np.arange(len(array))
    means = np.full((cells, cells), np.nan)
    for place, (begin, end) in enumerate(zip(edges, ends, strict=True)):
        sums = np.add.reduceat(np.tril(array[begin:end], int(begin)).sum(0, dtype=np.float64), edges)
        counts = np.add.reduceat(np.clip(end - np.maximum(keys, begin), 0, None), edges)
        seen = counts > 0
        means[place, seen] = sums[seen] / counts[seen]
    return means


def draw(maps: AttentionMaps, name: MapName, token_texts: Sequence[str], model: str) -> Path:
    """Draw one array and return the picture. Raises ImportError without matplotlib, OSError when the disk is full; no
    picture is left then.
    """
    figures: Any = importlib.import_module("matplotlib.figure")
    count = maps.num_tokens
    cells = min(count, MAX_CELLS)
    means = down_sample(maps.open(name.kind, name.layer, name.head), cells)
    figure = figures.Figure(figsize=(9, 8), layout="constrained")
    axes = figure.add_subplot()
    low, high = np.nanpercentile(means, (0.5, 99.5))
    image = axes.imshow(means, cmap="viridis", vmin=low, vmax=max(high, low + 1e-9), interpolation="nearest")
    places = np.unique(np.linspace(0, count - 1, min(count, MAX_LABELS)).astype(int))
    labels = [_label(place, token_texts) for place in places]
    ticks = (places + 0.5) * cells / count - 0.5
    axes.set_xticks(ticks, labels, rotation=90, fontsize=7, parse_math=False)
    axes.set_yticks(ticks, labels, fontsize=7, parse_math=False)
    axes.set(xlabel="key", ylabel="query")
    per_cell = "" if cells == count else f", mean of {count / cells:.3g} x {count / cells:.3g} cells"
    title = f"{model}, layer {name.layer}, head {name.head}: {name.kind}, {count:,} tokens{per_cell}"
    axes.set_title(title, fontsize=10, parse_math=False)
    figure.colorbar(image, ax=axes, label=name.kind.removesuffix("s") if name.kind == "scores" else "probability")
    path = maps.folder / f"{name.stem}.png"
    path.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            figure.savefig(file, format="png", dpi=120)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def _label(place: int, token_texts: Sequence[str]) -> str:
    """Position of a token, and its text where that can be shown."""
    text = token_texts[place] if place < len(token_texts) else ""
    shown = "".join(char if char.isascii() and char.isprintable() else "·" for char in text)[:MAX_LABEL_CHARS]
    return f"{place} {shown}".rstrip()
