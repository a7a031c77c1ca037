"""What is installed is what is in the folders, under tournant.* only, with its dependencies declared and pinned."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from tests.tidy.rules import FOLDERS, foreign_names, read_modules

REPO = Path(__file__).resolve().parents[2]
NOT_SHIPPED = {"__pycache__"}


@cache
def pyproject() -> dict[str, Any]:
    return tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))


def folders_with_code(root: Path) -> set[str]:
    """Folders, relative to root, that hold Python files."""
    return {path.parent.relative_to(root).as_posix() for folder in FOLDERS for path in (root / folder).rglob("*.py")}


def canonical(name: str) -> str:
    """A distribution's name as indexes spell it, without extras, bounds and comments."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;#]", name.strip())[0]).lower()


def test_package_list_is_the_folders_on_disk() -> None:
    mapped = pyproject()["tool"]["setuptools"]["package-dir"]
    assert set(mapped.values()) == folders_with_code(REPO) | set(FOLDERS)
    assert mapped == {f"tournant.{path.replace('/', '.')}": path for path in mapped.values()}
    assert sorted(pyproject()["tool"]["setuptools"]["packages"]) == sorted(mapped)


def test_top_folders_hold_no_init() -> None:
    """With one, a bare `kernels` on a Ray worker's path would pass for the package that transformers looks for."""
    assert [folder for folder in FOLDERS if (REPO / folder / "__init__.py").exists()] == []


def test_dependencies_are_declared_and_pinned() -> None:
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    runtime = {canonical(name) for name in project["dependencies"] + extras["cuda"]}
    every = runtime | {canonical(name) for name in extras["test"]}
    pins = [line for line in (REPO / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9-]+==[0-9][0-9a-z.]*", line)] == []
    assert every - {canonical(line) for line in pins} == set()

    installed = packages_distributions()
    used = {name for module in read_modules(REPO, FOLDERS) for name in foreign_names(module)}
    missing = [
        name
        for name in sorted(used - set(sys.stdlib_module_names))
        if not runtime & {canonical(distribution) for distribution in installed.get(name, [name])}
    ]
    assert missing == [], "imported, but not among the dependencies in pyproject.toml"


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names inside a wheel built from a copy, so that nothing stale in build/ slips in and the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(REPO / folder, source / folder, ignore=shutil.ignore_patterns(*NOT_SHIPPED))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    command = "pip wheel --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation -w dist ."
    result = subprocess.run([sys.executable, "-m", *command.split()], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (wheel,) = (source / "dist").glob("tournant-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_every_file_of_the_folders(wheel_names: set[str]) -> None:
    files = {
        f"tournant/{path.relative_to(REPO).as_posix()}"
        for folder in FOLDERS
        for path in (REPO / folder).rglob("*")
        if path.is_file() and not NOT_SHIPPED & set(path.parts)
    }
    assert {name for name in wheel_names if ".dist-info/" not in name} == files


def test_wheel_installs_nothing_beside_tournant(wheel_names: set[str]) -> None:
    version = pyproject()["project"]["version"]
    assert {name.split("/")[0] for name in wheel_names} == {"tournant", f"tournant-{version}.dist-info"}
    assert f"tournant-{version}.dist-info/licenses/LICENSE" in wheel_names
