"""ruff and mypy find nothing, and the rules that are left to them can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.rules import FOLDERS

REPO = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def run(*command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / command[0], *command[1:]], cwd=REPO, input=text, capture_output=True, text=True)


def expect_success(result: subprocess.CompletedProcess[str]) -> None:
    if result.returncode:
        pytest.fail((result.stdout + result.stderr).replace("build/import/tournant/", ""), pytrace=False)


def make_link_tree() -> None:
    """build/import/tournant/ with a link to each folder: type checkers do not follow setuptools' package-dir."""
    tree = REPO / "build" / "import" / "tournant"
    tree.mkdir(parents=True, exist_ok=True)
    for folder in FOLDERS:
        link = tree / folder
        if not link.is_symlink():
            link.symlink_to(Path("../../..") / folder)


def test_ruff() -> None:
    expect_success(run("ruff", "check", "--quiet", "--output-format", "concise"))


@pytest.mark.timeout(600)  # the first run, without a cache, reads torch's and transformers' types
def test_mypy() -> None:
    make_link_tree()
    expect_success(run("mypy", "--no-error-summary"))


@pytest.mark.parametrize(
    ("code", "body"),
    [
        ("TID251", "import pickle"),
        ("TID251", "from torch import load"),
        ("TID251", "import torch\n\ntorch.load('x')"),
        ("S307", "eval('1')"),
        ("S102", "exec('1')"),
        ("S101", "assert sum([1])"),
        ("E722", "try:\n    print()\nexcept:\n    print()"),
        ("S110", "try:\n    print()\nexcept Exception:\n    pass"),
        ("ERA001", "# x = compute(1)"),
        ("D103", "def f() -> None:\n    print()"),
        ("D101", "class A:\n    x = 1"),
    ],
)
def test_ruff_rule_can_fail(code: str, body: str) -> None:
    found = run("ruff", "check", "--stdin-filename", "workers/a.py", "-", text=f'"""A module."""\n\n{body}\n')
    assert code in found.stdout


def test_missing_module_docstring_is_found() -> None:
    assert "D100" in run("ruff", "check", "--stdin-filename", "workers/a.py", "-", text="x = 1\n").stdout
