"""The GPU benchmark, small and on the CPU: every section ends with its rows; figures mean nothing here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.device import run
from benchmarks.device.bench import Bench, OutOfTimeError, Row, WrongResultError
from tournant.kernels import ops
from tournant.workers.device import CpuDevice

REPO = Path(__file__).resolve().parents[2]

ROWS = {
    "ceilings": ["copy in memory", "products of", "page-locked copy, out", "page-locked copy, in", "copy, both"],
    "tokens": ["cold", "from the cache"],
    "decode attention": ["1 x 600 tokens, of copy bandwidth", "2 x 600 tokens, torch ("],
    "prefill attention": ["40 tokens, of the matrix rate", "40 tokens, torch ("],
    "block copies": ["KiB, out", "KiB, in", "KiB, both ways"],
    "decode step": ["eager: floor / step", "captured: floor / step", "in flight", "two in flight / one"],
    "restore": ["recomputed", "restored", "step while blocks move both ways / idle"],
    "beyond the device": ["streamed", "in_place", "tokens on the device", "prefill: on", "link / this", "in place: on"],
}

ON_A_BARE_MACHINE = """
import importlib.abc, importlib.util, sys
GONE = {"ray", "pydantic", "fastapi", "starlette", "uvicorn", "typer", "prometheus_client", "openai", "lz4"}
class Gone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in GONE:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path = [Gone(), *(finder for finder in sys.meta_path if "editable" not in repr(finder))]
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {"gguf", "tournant"} else found(name, *rest)
from benchmarks.device.run import main
sys.exit(main(["--dry", "--section", "ceilings"]))
"""


@pytest.mark.timeout(300)
def test_every_section_ends_with_its_rows(tmp_path: Path) -> None:
    before = ops.backend()
    assert run.main(["--dry", "--output", str(tmp_path / "page.md")]) == 0
    assert ops.backend() == before
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "no card (a dry run" in page
    assert "every section ran to its end" in page
    assert set(ROWS) == set(run.SECTIONS)
    for section, names in ROWS.items():
        rows = [line for line in page.splitlines() if line.startswith(f"| {section} |")]
        for name in names:
            assert any(name in row and any(map(str.isdigit, row)) for row in rows), (section, name)


def test_it_runs_where_nothing_of_ours_is_installed() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ON_A_BARE_MACHINE]
    result = subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "page-locked copy, both" in result.stdout


def test_without_a_gpu_one_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main(["--output", str(tmp_path / "page.md")]) == 2
    assert "finds no usable NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_what_goes_wrong_in_a_section_stays_there() -> None:
    bench = Bench(CpuDevice(), dry=True)

    def wrong(bench: Bench) -> None:
        bench.add("before", "1")
        bench.compare("a sum", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), 0.01)

    def slow(bench: Bench) -> None:
        bench.add("within", "2")
        bench.need_time(5.0)

    bench.run("first", 60.0, wrong)
    bench.run("second", 1.0, slow)
    bench.run("third", 60.0, lambda bench: bench.add("after", "3"))
    assert [row.what for row in bench.rows] == ["before", "within", "after"]
    assert bench.notes[0].startswith(f"first: ended by {WrongResultError.__name__}: a sum is off by 0.1")
    assert bench.notes[1] == "second: not all measured within 1 s"
    assert all(note in bench.markdown() for note in bench.notes)
    bench.run("fourth", -1.0, lambda bench: None)
    with pytest.raises(OutOfTimeError):
        bench.need_time()
    bench.compare("nothing", torch.tensor([1.0]), torch.tensor([1.0]), 0.0)


@pytest.mark.parametrize(
    ("ratio", "bar", "at_most", "verdict"),
    [
        (0.8, 0.8, False, "met"),
        (0.79, 0.8, False, "missed"),
        (1.05, 1.05, True, "met"),
        (1.06, 1.05, True, "missed"),
        (0.1, None, False, ""),
        (None, 0.8, False, ""),
        (float("nan"), 0.8, False, "missed"),
    ],
)
def test_bars(ratio: float | None, bar: float | None, at_most: bool, verdict: str) -> None:
    assert Row("s", "w", "f", ratio, bar, at_most).verdict == verdict
