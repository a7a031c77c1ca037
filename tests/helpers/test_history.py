"""The history checker finds what it is there to find."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.history import HistoryFile, Record, check, load
from tournant.kvstore.block import Part

WHOLE = Part(0, 2, 0, 2)
LEFT, RIGHT = (0, 2, 0, 1), (0, 2, 1, 2)


def oracle(key: str, version: tuple[int, int], part: tuple[int, int, int, int]) -> int:
    return sum([len(key), *version, *part])


def told(actor: str, part: tuple[int, int, int, int], slot: tuple[int, int, int], at: int) -> list[Record]:
    """A lend, and a report of it that came through."""
    report = Record(actor, "report", 1, "k", part, (7, 1), slot, 0, "info", at)
    return [Record(actor, "lend", slot=slot, invoke=at - 1), report, replace(report, outcome="ok", back=at + 5)]


def accept(part: tuple[int, int, int, int], version: tuple[int, int] = (7, 1)) -> Record:
    return Record("r", "accept", 3, "k", part, version, checksum=oracle("k", version, part), invoke=50, back=60)


GOOD = [*told("a", LEFT, (1, 0, 1), 10), *told("b", RIGHT, (1, 2, 1), 20), accept(LEFT), accept(RIGHT)]


def test_a_good_history() -> None:
    assert check(GOOD, WHOLE, oracle) == []


BROKEN = {
    "I3: .* reported 2 times": [*GOOD, replace(GOOD[1], actor="c", invoke=70)],
    "I3: .* never reported": [*GOOD[:3], *GOOD[6:]],
    "I3: .* reported before": [*GOOD[:6], replace(GOOD[6], back=5), GOOD[7]],
    "I2: ": [*GOOD[:6], replace(GOOD[6], checksum=1 << 20), GOOD[7]],
    "I1: .* mixes": [*GOOD[:7], accept(RIGHT, (8, 1))],
    "I1: .* no block": GOOD[:7],
    "I4: .* was lent to": [*GOOD, Record("c", "lend", slot=(1, 0, 1), invoke=80)],
    "I4: .* taken back 2": [*GOOD, Record("a", "release", slot=(1, 0, 1), invoke=80)],
    "I4: .* not lent to it": GOOD[1:],
}


@pytest.mark.parametrize(("problem", "records"), BROKEN.items(), ids=BROKEN)
def test_a_broken_history(problem: str, records: list[Record]) -> None:
    found = check(records, WHOLE, oracle)
    assert any(re.match(problem, line) for line in found), found


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history"
    HistoryFile(path).add(GOOD)
    assert load([path]) == sorted(GOOD, key=lambda record: record.invoke)
    path.write_text(path.read_text()[:-5])
    assert len(load([path])) == len(GOOD) - 1
