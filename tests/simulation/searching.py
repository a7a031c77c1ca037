"""What the searches of all simulated worlds share: running a schedule, making a failure small, all cores, one trace.

Owns no world. A setup is a frozen dataclass; `run` raises Violation when a schedule breaks an invariant.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from tests.simulation.world import Violation

S = TypeVar("S")
R = TypeVar("R")


def violation_of(run: Callable[[S], object], setup: S) -> Violation | None:
    """The violation that a schedule runs into."""
    try:
        run(setup)
    except Violation as violation:
        return violation
    return None


def smallest(
    setup: S, violation: Violation, simpler: Callable[[S], Iterable[S]], fails: Callable[[S], Violation | None]
) -> tuple[S, Violation]:
    """The last of a chain of simpler setups that all break the same invariant. simpler: what to try for a setup."""
    changed = True
    while changed:
        changed = False
        for candidate in simpler(setup):
            found = fails(candidate) if candidate != setup else None
            if found is not None and found.invariant == violation.invariant:
                setup, violation, changed = candidate, found, True
                break
    return setup, violation


def on_all_cores(batch: Callable[[int], R], firsts: Sequence[int], chunksize: int = 1) -> Iterator[R]:
    """`batch` of each number, in order, in processes of their own. batch: a function of a module."""
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=get_context("spawn")) as pool:
        yield from pool.map(batch, firsts, chunksize=chunksize)


def printed_under_hash_seeds(code: str, seeds: Sequence[str]) -> set[str]:
    """All that a program prints, over values of PYTHONHASHSEED."""
    return {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
            check=True,
        ).stdout
        for seed in seeds
    }  # fmt: skip
