"""How tests are dealt to several processes: file by file, and all folders that start Ray to one of them."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

RAY_FOLDERS = ("tests/cluster/", "tests/integration/")


def starts_ray(nodeid: str) -> bool:
    """Whether a test is of a folder whose tests start Ray."""
    return nodeid.startswith(RAY_FOLDERS)


class ByFile(LoadScopeScheduling):
    """Every file is one test process's, and so is all that starts Ray."""

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if starts_ray(nodeid) else nodeid.partition("::")[0]
