"""Compiles the C kernels once per machine and loads them.

Owns: the compiler call, the cache folder of compiled libraries, the choice of the OpenMP runtime. Does not own what the
library does (kernels/cpu/*.c) or how it is called (native.py).

Invariants:
 1. A cached library is named by the digest of everything that decides its code: sources, flags, compiler, CPU.
 2. It appears under that name complete or not at all (written beside, then renamed), so concurrent processes are safe.
 3. Nothing is loaded from a folder that someone else owns or can write to.
 4. The library uses the OpenMP runtime that torch brought, so that both share one thread pool.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import torch

SOURCE_FOLDER = Path(__file__).parent
UNITS = {"kernels.c": (), "quantized.c": ("-ffp-contract=off",)}  # what is compiled, with flags of its own
HEADERS = (
    *("common.h", "attention.h", "bounds.h", "quantized.h"),
    *("tiles.inc", "rows.inc", "attention.inc", "bounds.inc", "layers.inc"),
)
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-Wno-psabi")
COMPILERS = ("gcc", "cc")
COMPILE_TIMEOUT_S = 300
KEPT_LIBRARIES = 8  # of other versions, so that switching between two checkouts does not compile every time
ABANDONED_S = 3600  # an unfinished library this old belongs to a process that was killed
OPENMP_RUNTIMES = ("libgomp", "libiomp5", "libomp")


class KernelBuildError(RuntimeError):
    """The C kernels cannot be compiled or loaded here; the message says why and what to do."""


def default_cache_folder() -> Path:
    """Where compiled kernels of this user live."""
    return Path.home() / ".cache" / "tournant" / "kernels"


def openmp_runtime() -> Path | None:
    """The OpenMP library that torch loaded into this process, or None when none is found."""
    torch.get_num_threads()
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in mapped.splitlines() if line.count("/")}
    found = [Path(path) for path in sorted(paths) if Path(path).name.split(".")[0].split("-")[0] in OPENMP_RUNTIMES]
    bundled = [path for path in found if any(part.startswith("torch") for part in path.parts)]
    return next(iter(bundled + found), None)


def _cpu_identity() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in wanted}))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        raise KernelBuildError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[:2000]}")
    return done.stdout


def _compile(compiler: str, link: list[str], target: Path) -> None:
    """Write the library to `target`, complete or not at all."""
    handle, temporary = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        with tempfile.TemporaryDirectory(prefix="tournant-build-") as scratch:
            objects = []
            for source, flags in UNITS.items():
                objects.append(os.path.join(scratch, f"{source}.o"))
                _run([compiler, *FLAGS, *flags, "-c", str(SOURCE_FOLDER / source), "-o", objects[-1]])
            _run([compiler, "-shared", *objects, "-o", temporary, *link, "-lm"])
        os.chmod(temporary, 0o700)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _prune(folder: Path) -> None:
    """Delete what killed compilations left and all but the newest libraries; those in use stay mapped."""
    libraries = sorted(folder.glob("kernels-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    unfinished = [path for path in folder.glob(".building-*") if time.time() - path.stat().st_mtime > ABANDONED_S]
    for path in libraries[KEPT_LIBRARIES:] + unfinished:
        path.unlink(missing_ok=True)


def _private_folder(folder: Path) -> bool:
    """Make `folder` if needed; True when it is ours alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return False
    return (
        status.st_uid == os.getuid()
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        and os.access(folder, os.W_OK)
    )


def load(cache_folder: Path | None = None) -> ctypes.CDLL:
    """The compiled kernels, from the cache folder or freshly compiled (a few seconds).

    A folder that cannot be written, or that others can write to, is not used: the library is then built for this
    process alone. Raises KernelBuildError.
    """
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if compiler is None:
        raise KernelBuildError(f"no C compiler found (looked for {' and '.join(COMPILERS)}); install gcc")
    runtime = openmp_runtime()
    link = [str(runtime)] if runtime else ["-fopenmp"]
    hasher = hashlib.sha256()
    for piece in (*FLAGS, *map(str, UNITS.items()), *link, _run([compiler, "--version"]), _cpu_identity()):
        hasher.update(f"{len(piece)}:{piece}".encode())
    for name in (*UNITS, *HEADERS):
        hasher.update((SOURCE_FOLDER / name).read_bytes())
    name = f"kernels-{hasher.hexdigest()[:32]}.so"
    folder = cache_folder or default_cache_folder()
    if _private_folder(folder):
        if not (folder / name).exists():
            _compile(compiler, link, folder / name)
            _prune(folder)
        return _open(folder / name)
    with tempfile.TemporaryDirectory(prefix="tournant-kernels-") as own:
        _compile(compiler, link, Path(own) / name)
        return _open(Path(own) / name)


def _open(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelBuildError(f"{library} cannot be loaded: {error}; delete it to compile it again") from error
