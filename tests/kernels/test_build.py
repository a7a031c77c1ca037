"""Compiling once, falling back aloud, trusting no folder of others, and code paths of lesser CPUs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.kernels.kernel_case import DTYPES, TOLERANCE, Case
from tournant.kernels import ops
from tournant.kernels.cpu import build
from tournant.kernels.layout import KVLayout

pytestmark = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C compiler here")


@pytest.fixture(autouse=True)
def default_backend() -> Iterator[None]:
    yield
    ops.select_backend("c")


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces compiling by copying an empty library; lists what was compiled."""
    compiled: list[Path] = []

    def fake(compiler: str, link: list[str], target: Path) -> None:
        subprocess.run([compiler, "-shared", "-x", "c", "/dev/null", "-o", str(target)], check=True)
        compiled.append(target)

    monkeypatch.setattr(build, "_compile", fake)
    return compiled


def attention_error(dtype: torch.dtype) -> float:
    case = Case(KVLayout(2, 3, 16, 64, dtype), [300, 20], num_heads=9)
    case.store(0, 0, 300)
    case.store(1, 0, 20)
    first, second = case.attend([(0, 250, 300), (1, 19, 20)])
    errors = (first.double() - case.expected(0, 250, 300), second.double() - case.expected(1, 19, 20))
    return max(float(error.abs().max()) for error in errors)


def test_without_a_compiler_the_twins_serve_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(ops, "_chosen", None)
    with pytest.warns(UserWarning, match="looked for no-such-compiler.*install gcc"):
        assert ops.backend() == "torch"
    assert attention_error(torch.float32) < TOLERANCE[torch.float32]  # and the warning came only once


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "FLAGS", ("--no-such-flag",))
    with pytest.warns(UserWarning, match="no-such-flag"):
        assert ops.select_backend("c", tmp_path) == "torch"
    assert list(tmp_path.iterdir()) == []


def test_compiles_once_into_a_private_folder(quick_compiler: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "kernels"
    build.load(folder)
    build.load(folder)
    (library,) = folder.iterdir()
    assert quick_compiler == [library]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_other_flags_are_another_library(
    quick_compiler: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build.load(tmp_path)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    build.load(tmp_path)
    assert len(set(quick_compiler)) == 2


def test_old_libraries_and_killed_compilations_are_cleared(quick_compiler: list[Path], tmp_path: Path) -> None:
    for age in range(20):
        library = tmp_path / f"kernels-{age}.so"
        library.touch()
        os.utime(library, (1e9 - age, 1e9 - age))
    (tmp_path / ".building-now.so").touch()
    (tmp_path / ".building-then.so").touch()
    os.utime(tmp_path / ".building-then.so", (1e9, 1e9))
    build.load(tmp_path)
    left = {path.name for path in tmp_path.iterdir()} - {quick_compiler[0].name}
    assert left == {f"kernels-{age}.so" for age in range(build.KEPT_LIBRARIES - 1)} | {".building-now.so"}


def test_a_folder_that_others_can_write_is_not_used(quick_compiler: list[Path], tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    build.load(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (library,) = quick_compiler
    assert not library.exists()  # built for this process alone and already gone


def test_a_damaged_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_compile", lambda compiler, link, target: target.write_bytes(b"not a library"))
    with pytest.raises(build.KernelBuildError, match=r"kernels-.*\.so cannot be loaded.*delete it"):
        build.load(tmp_path)


def test_the_openmp_runtime_is_torchs_own() -> None:
    runtime = build.openmp_runtime()
    if runtime is None:
        pytest.skip("torch loaded no OpenMP library here")
    ops.select_backend("c")
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    loaded = {Path(line.split()[-1]) for line in mapped.splitlines() if "libgomp" in line}
    assert {path for path in loaded if path.name == runtime.name} == {runtime}


def test_compiling_at_the_same_time_leaves_one_whole_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "FLAGS", ("-std=gnu11", "-O0", "-march=native", "-fopenmp", "-fPIC", "-w"))
    both_started, compile_for_real = threading.Barrier(2), build._compile

    def compile_together(compiler: str, link: list[str], target: Path) -> None:
        both_started.wait(timeout=60)
        compile_for_real(compiler, link, target)

    monkeypatch.setattr(build, "_compile", compile_together)
    with ThreadPoolExecutor(2) as pool:
        libraries = list(pool.map(build.load, [tmp_path, tmp_path]))
    assert all(library.copy_blocks for library in libraries)
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.parametrize("flag", ["-mno-avx512f", "-march=x86-64-v2"])  # vectors of 8 floats, of 4
def test_cpus_with_narrower_vectors(flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1", flag))
    assert ops.select_backend("c", tmp_path) == "c"
    for dtype in DTYPES:
        assert attention_error(dtype) < TOLERANCE[dtype]
