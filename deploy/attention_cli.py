"""`tournant attention`: write the attention of some layers and heads over a prompt to disk, with pictures.

Owns flags, what is refused before anything is loaded, and exit codes. The work needs torch, whose import takes longer
than everything else of the command line, so attention_job.py is imported only once it is to be done.

Exit codes: 0 done, 1 the disk is full or fails, 2 wrong arguments, model or configuration, 130 stopped by Ctrl-C.
If it is not 0, no array is left; but what ends it while pictures are drawn leaves all arrays, whole, and the manifest.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Annotated

import typer

from tournant.workers.errors import ConfigError, ModelFormatError

MAX_PROMPT_BYTES = 64 << 20
MAX_NUMBERS = 4096
NEEDED = "needs matplotlib: pip install matplotlib"
Option = typer.Option


def attention_command(
    prompt: Annotated[str | None, typer.Argument(help="The text; or --file.")] = None,
    layers: Annotated[str, Option(help="Layers, such as 0,5 or 0-3.")] = "0",
    heads: Annotated[str, Option(help="Heads, such as 0,5 or 0-3.")] = "0",
    out: Annotated[Path, Option(help="Folder for arrays, pictures and manifest.json.")] = Path("attention"),
    model: Annotated[str | None, Option(help="Folder, .gguf file or hub id; default SmolLM2-135M-Instruct.")] = None,
    file: Annotated[Path | None, Option(help="Take the prompt from a file (UTF-8).")] = None,
    scores: Annotated[bool, Option("--scores/--no-scores", help="Write scores, before the softmax.")] = False,
    probabilities: Annotated[bool, Option("--probabilities/--no-probabilities", help="Write probabilities.")] = True,
    png: Annotated[
        bool | None, Option("--png/--no-png", help="Draw a heat map of every array; without either, if it can.")
    ] = None,
    overwrite: Annotated[bool, Option(help="Replace maps that the folder holds.")] = False,
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, Option(help="What the model computes in; maps are float32 always.")] = "auto",
    cache_dir: Annotated[Path | None, Option(help="Where converted models are kept.")] = None,
) -> None:
    """Write the attention of chosen layers and heads over a prompt, whole and exact, however long it is."""
    try:
        text = _text(prompt, file)
        kinds = tuple(name for name, on in (("scores", scores), ("probabilities", probabilities)) if on)
        if not kinds:
            raise ConfigError("there is nothing to write: use --scores, --probabilities or both")
        can_draw = importlib.util.find_spec("matplotlib") is not None
        if png and not can_draw:
            raise ConfigError(f"--png {NEEDED}, or leave --png out")
        chosen = parse_numbers("--layers", layers), parse_numbers("--heads", heads)
        job = importlib.import_module("tournant.deploy.attention_job")
        draws = can_draw if png is None else png
        job.run(text, *chosen, out, kinds, model, device, dtype, cache_dir, png=draws, overwrite=overwrite)
        if png is None and not can_draw:
            typer.echo(f"no pictures were drawn: that {NEEDED}, or say --no-png", err=True)
    except (ConfigError, ModelFormatError) as error:
        _fail(str(error), 2)
    except OSError as error:
        what = error.strerror or str(error)
        _fail(what if error.filename is None else f"{error.filename}: {what}", 1)
    except KeyboardInterrupt:
        _fail("stopped", 130)


def parse_numbers(flag: str, text: str) -> list[int]:
    """Numbers of a list such as "0,5" or "0-3,7", in its order. Raises ConfigError."""
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if found is None:
            raise ConfigError(f"{flag} is {text!r:.100}; it must be numbers and ranges such as 0,5 or 0-3")
        numbers += range(int(found[1]), int(found[2] or found[1]) + 1)
        if len(numbers) > MAX_NUMBERS:
            raise ConfigError(f"{flag} names more than {MAX_NUMBERS} numbers")
    if not numbers:
        raise ConfigError(f"{flag} is {text!r:.100}, which names nothing: ranges go upwards")
    return numbers


def _text(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise ConfigError("give the prompt as an argument or by --file, one of the two")
    if file is None:
        return prompt or ""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_PROMPT_BYTES + 1)
        if len(data) > MAX_PROMPT_BYTES:
            raise ConfigError(f"--file {file} has more than {MAX_PROMPT_BYTES} bytes; give a shorter prompt")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file {file} cannot be read: {error}") from None


def _fail(message: str, code: int) -> None:
    for line in message.splitlines():
        typer.echo(f"error: {line}", err=True)
    raise typer.Exit(code)
