"""What `tournant attention` does once its flags are known to make sense: model, maps, progress, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tournant.deploy.attention_pictures import draw
from tournant.deploy.tokenizer import Tokenizer
from tournant.workers.attention_maps import MapRequest, write_attention_maps
from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError
from tournant.workers.map_files import AttentionMaps
from tournant.workers.model_files import resolve_model


def run(
    text: str,
    layers: Sequence[int],
    heads: Sequence[int],
    out: Path,
    kinds: Sequence[str],
    model: str | None,
    device: str,
    dtype: str,
    cache_dir: Path | None,
    *,
    png: bool,
    overwrite: bool,
) -> None:
    """Write the maps and, with `png`, a picture beside each. Raises as `write_attention_maps`; what ends it while
    pictures are drawn leaves the maps.
    """
    config = EngineConfig(device=device, dtype=dtype)
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        files = resolve_model(model, "bfloat16" if dtype == "auto" else dtype, cache_dir)
        tokenizer = Tokenizer.from_folder(files.folder)
        try:
            token_ids = tokenizer.encode(text)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        request = MapRequest(
            token_ids, layers, heads, out, kinds, overwrite=overwrite, token_texts=tokenizer.spellings(token_ids)
        )
        bars = {name: progress.add_task(name, total=None, visible=False) for name in ("layers", "rows")}
        maps = write_attention_maps(
            config,
            files,
            request,
            progress=lambda what, done, total: progress.update(bars[what], completed=done, total=total, visible=True),
        )
        if png:
            _draw_all(maps, request, files.name, progress)
    size = sum(path.stat().st_blocks * 512 for name in maps.names for path in out.glob(f"{name.stem}.*"))
    console.print(f"{len(maps.names)} maps of {maps.num_tokens:,} tokens in {out} ({size / 1e6:,.0f} MB)")


def _draw_all(maps: AttentionMaps, request: MapRequest, model: str, progress: Progress) -> None:
    bar = progress.add_task("pictures", total=len(maps.names))
    try:
        for name in maps.names:
            draw(maps, name, request.token_texts or (), model)
            progress.advance(bar)
    except (OSError, KeyboardInterrupt):
        progress.console.print(f"all arrays are in {maps.folder}, but not all pictures")
        raise
