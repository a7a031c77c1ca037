"""How tests are dealt to several processes: file by file, and all files that start Ray to one of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

REPO = Path(__file__).resolve().parents[2]


@cache
def _marks_ray(file: str) -> bool:
    return "mark.ray" in (REPO / file).read_text()


def starts_ray(nodeid: str) -> bool:
    """Whether a test is of a file with tests that may start Ray."""
    return _marks_ray(nodeid.partition("::")[0])


class ByFile(LoadScopeScheduling):
    """Every file is one test process's, and so is all that starts Ray."""

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if starts_ray(nodeid) else nodeid.partition("::")[0]
