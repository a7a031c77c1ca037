"""Runs benchmarks quickly and reads the tables they make."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks import run_all


@dataclass
class Run:
    printed: str
    markdown: str
    rows: list[dict[str, Any]]


def run_quickly(folder: Path, model: Path, chosen: Sequence[ModuleType]) -> Run:
    """Model M, one thread, one short round, no peers, no traces."""
    printed, threads = io.StringIO(), torch.get_num_threads()
    files = ["--markdown", str(folder / "out.md"), "--json", str(folder / "out.jsonl"), "--traces", str(folder)]
    try:
        with redirect_stdout(printed):
            run_all.main(["--quick", "--rounds", "1", "--model", str(model), *files], chosen)
    finally:
        torch.set_num_threads(threads)
    lines = (folder / "out.jsonl").read_text().splitlines()
    return Run(printed.getvalue(), (folder / "out.md").read_text(), [json.loads(line) for line in lines])


def check_table(run: Run, title: str, names: list[str]) -> None:
    """It was printed and written, with these rows and a number in each."""
    heading = f"### {title}"
    assert title in run.printed
    assert heading in run.markdown
    section = run.markdown.split(heading, 1)[1].split("\n### ", 1)[0]
    for name in names:
        cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith(f"| {name} |")]
        assert len(cells) >= 1, f"no row {name!r} in {section}"
        assert any(character.isdigit() for character in "".join(cells[0][1:]))
        assert any(line.lstrip("│ ").startswith(name) for line in run.printed.splitlines())
