"""How tests are dealt to several processes: file by file, and all folders that start Ray to one of them."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

RAY_FOLDERS = ("tests/cluster/", "tests/integration/")
WITHOUT_RAY = tuple(
    f"tests/integration/test_{name}" for name in ("attention_maps", "benchmarks", "device", "offload", "prompt_tuning")
)


def starts_ray(nodeid: str) -> bool:
    """Whether a test is of a folder whose tests start Ray, and not of one of its files where none does."""
    return nodeid.startswith(RAY_FOLDERS) and not nodeid.startswith(WITHOUT_RAY)


class ByFile(LoadScopeScheduling):
    """Every file is one test process's, and so is all that starts Ray."""

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if starts_ray(nodeid) else nodeid.partition("::")[0]
