"""`tournant attention`: arrays, pictures and manifest of M; mistakes are a line and exit code 2; pictures' means."""

from __future__ import annotations

import importlib.util
import json
import stat
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from typer.testing import CliRunner

from tournant.deploy import attention_job, cli
from tournant.deploy.attention_cli import parse_numbers
from tournant.deploy.attention_pictures import down_sample
from tournant.workers.errors import ConfigError

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
PNG_START = b"\x89PNG\r\n\x1a\n"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["attention", *map(str, arguments)])
    return result.exit_code, result.output


def test_arrays_and_manifest(tiny_model: Path, tmp_path: Path) -> None:
    prompt, out = tmp_path / "prompt.txt", tmp_path / "maps"
    prompt.write_text("Attention $ über alles\n", encoding="utf-8")
    common = ("--model", tiny_model, "--cache-dir", tmp_path / "cache", "--dtype", "float32", "--no-png", "--out", out)
    code, output = run("--file", prompt, "--layers", "0-1", "--heads", "3,0", "--scores", *common)
    assert (code, "8 maps of 24 tokens" in output) == (0, True), output
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["tokens"][:3] == ["A", "t", "t"]
    assert manifest["shape"] == [24, 24]
    assert len(manifest["arrays"]) == 8 == len(list(out.glob("*.npy")))
    for array in manifest["arrays"]:
        found = np.load(out / array["file"], mmap_mode="r")
        assert (found.shape, found.dtype, bool(np.triu(found, 1).any())) == ((24, 24), np.float32, False)
        if array["kind"] == "probabilities":
            assert np.allclose(found.sum(1), 1, atol=1e-6)
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o600}
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    code, output = run("abc", *common)
    assert (code, "holds attention maps" in output) == (2, True)
    code, output = run("abc", *common, "--overwrite")
    assert (code, len(list(out.iterdir()))) == (0, 2), output


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="the extra `demo` is not installed")
def test_pictures(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "maps"
    code, output = run("a$b_{c}" * 50, "--model", tiny_model, "--cache-dir", tmp_path / "cache", "--out", out)
    assert code == 0, output
    (picture,) = out.glob("*.png")
    assert picture.name == "probabilities-layer-000-head-000.png"
    assert picture.read_bytes().startswith(PNG_START)
    assert stat.S_IMODE(picture.stat().st_mode) == 0o600


def test_without_matplotlib_there_are_arrays_and_a_line_that_says_so(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    out = tmp_path / "maps"
    common = ("--model", tiny_model, "--cache-dir", tmp_path / "cache", "--out", out, "--overwrite")
    code, output = run("abc", *common)
    assert (code, "no pictures were drawn: that needs matplotlib: pip install matplotlib" in output) == (0, True), (
        output
    )
    assert sorted(path.suffix for path in out.iterdir()) == [".json", ".npy"]
    code, output = run("abc", *common, "--no-png")
    assert (code, "pictures" in output) == (0, False), output


def test_pictures_that_are_asked_for_and_cannot_be_drawn_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    code, output = run("abc", "--png", "--model", "/nowhere")
    assert (code, "--png needs matplotlib: pip install matplotlib, or leave --png out" in output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "one of the two"),
        (("a", "--file", "b"), "one of the two"),
        (("--file", "/nowhere/at/all"), "cannot be read"),
        (("--file", "/dev/zero"), "more than 67108864 bytes"),
        (("a", "--no-probabilities"), "nothing to write"),
        (("a", "--layers", "1-x"), "numbers and ranges such as 0,5 or 0-3"),
        (("a", "--heads", "3-1"), "ranges go upwards"),
        (("a", "--model", "/nowhere/at/all"), "no such folder"),
        (("a", "--device", "tpu"), "one of auto, cpu, cuda"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    code, output = run(*arguments, "--no-png", "--out", tmp_path / "maps")
    assert (code, said in output) == (2, True), output
    assert not (tmp_path / "maps").exists()


def test_other_files_of_the_folder_are_neither_counted_nor_touched(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(3 << 20))
    (tmp_path / "link").symlink_to("nowhere")
    common = ("--model", tiny_model, "--cache-dir", tmp_path / "cache", "--no-png", "--out", tmp_path)
    code, output = run("abc", *common)
    assert (code, "1 maps of 3 tokens" in output, "(0 MB)" in output) == (0, True, True), output
    assert (tmp_path / "link").is_symlink()


def test_layers_that_the_model_lacks(tiny_model: Path, tmp_path: Path) -> None:
    common = ("--model", tiny_model, "--cache-dir", tmp_path / "cache", "--no-png", "--out", tmp_path / "maps")
    code, output = run("abc", "--layers", "1-2", *common)
    assert (code, "layers are [1, 2]; this model has 0 to 1" in output) == (2, True)
    assert not (tmp_path / "maps").exists()


def test_a_folder_that_cannot_be_made_is_named(tiny_model: Path, tmp_path: Path) -> None:
    common = ("--model", tiny_model, "--cache-dir", tmp_path / "cache", "--no-png")
    code, output = run("abc", *common, "--out", "/proc/maps/of/it")
    assert (code, "error: /proc/maps" in output) == (1, True), output


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="the extra `demo` is not installed")
@pytest.mark.parametrize(("error", "code"), [(OSError(28, "no room"), 1), (KeyboardInterrupt(), 130)])
def test_what_ends_it_while_pictures_are_drawn_leaves_the_arrays(
    error: BaseException, code: int, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(self: object, file: BinaryIO, **_: object) -> None:
        file.write(PNG_START)
        raise error

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half)
    out = tmp_path / "maps"
    found, output = run("abc", "--model", tiny_model, "--cache-dir", tmp_path / "cache", "--out", out)
    assert (found, "but not all pictures" in " ".join(output.split())) == (code, True), output
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "probabilities-layer-000-head-000.npy"]


@pytest.mark.parametrize(("error", "code"), [(OSError(28, "no room"), 1), (KeyboardInterrupt(), 130)])
def test_other_endings(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(attention_job, "run", end)
    assert run("abc", "--no-png") == (code, f"error: {'no room' if code == 1 else 'stopped'}\n")


def test_numbers() -> None:
    assert parse_numbers("--layers", "0,5") == [0, 5]
    assert parse_numbers("--layers", "7, 0-3") == [7, 0, 1, 2, 3]
    with pytest.raises(ConfigError, match="more than 4096"):
        parse_numbers("--layers", "0-999999")


@pytest.mark.parametrize(("tokens", "cells"), [(1, 1), (7, 7), (10, 4), (100, 9)])
def test_down_sampling_is_the_mean_over_cells_that_are_seen(tokens: int, cells: int) -> None:
    array = np.tril(np.random.default_rng(0).random((tokens, tokens)).astype(np.float32))
    found = down_sample(array, cells)
    edges = [place * tokens // cells for place in range(cells + 1)]
    for i in range(cells):
        for j in range(cells):
            seen = [array[q, k] for q in range(*edges[i : i + 2]) for k in range(*edges[j : j + 2]) if k <= q]
            assert np.isnan(found[i, j]) if not seen else np.isclose(found[i, j], np.mean(seen))
