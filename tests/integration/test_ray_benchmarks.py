"""Every benchmark that starts Ray runs to its end on model M and shows the rows it promises; numbers are not judged."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import ingress_modes, run_all
from tests.integration.benchmark_tables import check_table, run_quickly

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ROWS_ON_RAY = {
    "control path of a step": [
        *("2 ranks, bound: TCP", "2 ranks, Tournant", "2 ranks, Ray compiled graph", "2 ranks, Ray actor calls"),
    ],
    "a shard alone, CPU time": ["look-up of 512", "announcement"],
    "a shard in its actor, one caller": ["look-up of 512"],
    "between two nodes of this machine": ["Ray's objects alone", "blocks of another node into the store here"],
}
ROWS_ON_SERVE = {"arrangements, Serve's proxy": ["uvicorn alone", "direct, Serve's proxy"]}


def test_tables_of_what_runs_on_ray_are_there(tiny_model: Path, tmp_path: Path) -> None:
    check_tables_on_ray(tiny_model, tmp_path, [one for one in run_all.ON_RAY if one is not ingress_modes], ROWS_ON_RAY)


@pytest.mark.soak
def test_tables_of_what_runs_on_serve_are_there(tiny_model: Path, tmp_path: Path) -> None:
    check_tables_on_ray(tiny_model, tmp_path, [ingress_modes], ROWS_ON_SERVE)


def check_tables_on_ray(model: Path, folder: Path, chosen: list[ModuleType], rows: dict[str, list[str]]) -> None:
    found = run_quickly(folder, model, chosen)
    assert list(dict.fromkeys(row["table"] for row in found.rows)) == list(rows)
    for title, names in rows.items():
        check_table(found, title, names)
