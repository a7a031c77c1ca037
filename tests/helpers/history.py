"""The history of a run of the store as its clients saw it, and the checker of STORE.md section 6.

Versions are unique, so checking is linear: accepts are matched with reports (I2, I3), the accepts of one read joined
(I1), lends and reports swept by slot and generation (I4). The checker knows nothing of how the store works.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tournant.kvstore.block import Part
from tournant.kvstore.read_group import tiles

Op = Literal["lend", "report", "release", "open", "accept"]
Oracle = Callable[[str, tuple[int, int], tuple[int, int, int, int]], int]
"""(key in hex, version, part) -> the checksum that these bytes must have."""


@dataclass(frozen=True, slots=True)
class Record:
    """One effect. actor: one attachment of one process; id: number of the report or read; slot: (incarnation, page,
    generation); outcome: info = it may or may not have happened; invoke, back: ns of a clock that all processes share.
    """

    actor: str
    op: Op
    id: int = 0
    key: str = ""
    part: tuple[int, int, int, int] = (0, 0, 0, 0)
    version: tuple[int, int] = (0, 0)
    slot: tuple[int, int, int] = (0, 0, 0)
    checksum: int = 0
    outcome: Literal["ok", "fail", "info"] = "ok"
    invoke: int = 0
    back: int = 0


class HistoryFile:
    """Appends records so that kill -9 loses none that was written, and at most tears the last line."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, records: Iterable[Record]) -> None:
        """Append, in one call."""
        os.write(self._fd, "".join(json.dumps(asdict(record)) + "\n" for record in records).encode())

    def close(self) -> None:
        """No more records from this process."""
        os.close(self._fd)


def load(paths: Iterable[Path]) -> list[Record]:
    """All records of some files, by time of invocation. A torn last line is left out."""
    records = []
    for path in paths:
        *lines, _ = path.read_text(encoding="ascii").split("\n")
        for line in lines:
            fields = json.loads(line)
            for name in ("part", "version", "slot"):
                fields[name] = tuple(fields[name])
            records.append(Record(**fields))
    return sorted(records, key=lambda record: record.invoke)


def check(records: Iterable[Record], whole: Part, oracle: Oracle) -> list[str]:
    """Every broken invariant in words; empty for a good history."""
    by_op: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_op[record.op].append(record)
    return [
        *_reports(by_op["report"]),
        *_accepts(by_op["accept"], by_op["report"], oracle),
        *_joined(by_op["accept"], whole),
        *_slots(by_op["lend"], by_op["report"], by_op["release"]),
    ]


def _name(record: Record) -> tuple[str, tuple[int, int, int, int], tuple[int, int]]:
    return record.key, record.part, record.version


def _reports(reports: list[Record]) -> Iterable[str]:
    """I3: a (key, part, version) is written once; the invocation counts, its reply may be a record of its own."""
    asked = Counter(_name(record) for record in reports if record.outcome == "info")
    return [f"I3: {name} was reported {count} times" for name, count in asked.items() if count > 1]


def _accepts(accepts: list[Record], reports: list[Record], oracle: Oracle) -> Iterable[str]:
    """I3: what is accepted was reported before; I2: with the bytes that this version must have."""
    first = {_name(record): record for record in reversed(reports)}
    for accept in accepts:
        report = first.get(_name(accept))
        if report is None or report.invoke > accept.back:
            yield f"I3: {_name(accept)} was accepted by {accept.actor} and never reported before"
        if accept.checksum != oracle(accept.key, accept.version, accept.part):
            yield f"I2: {_name(accept)} was accepted by {accept.actor} with other bytes than were written"


def _joined(accepts: list[Record], whole: Part) -> Iterable[str]:
    """I1: the parts that one read accepted of one key have one version and tile the block."""
    reads: dict[tuple[str, int, str], list[Record]] = defaultdict(list)
    for accept in accepts:
        reads[accept.actor, accept.id, accept.key].append(accept)
    for name, parts in reads.items():
        if len({accept.version for accept in parts}) != 1:
            yield f"I1: read {name} mixes versions {sorted({accept.version for accept in parts})}"
        if not tiles([Part(*accept.part) for accept in parts], whole):
            yield f"I1: read {name} accepted parts {sorted(accept.part for accept in parts)}, which are no block"


def _slots(lends: list[Record], reports: list[Record], releases: list[Record]) -> Iterable[str]:
    """I4: a slot generation has one writer, and only what it reports of it counts, once."""
    owner: dict[tuple[int, int, int], Record] = {}
    for lend in lends:
        if lend.slot in owner:
            yield f"I4: slot {lend.slot} was lent to {owner[lend.slot].actor} and {lend.actor}"
        owner[lend.slot] = lend
    taken = Counter(record.slot for record in reports if record.outcome == "ok")
    taken.update(record.slot for record in releases)
    for slot, count in taken.items():
        if count > 1:
            yield f"I4: slot {slot} was taken back {count} times"
    for record in reports:
        if record.outcome == "ok" and (record.slot not in owner or owner[record.slot].actor != record.actor):
            yield f"I4: a report of {record.actor} counted for slot {record.slot}, which was not lent to it"
