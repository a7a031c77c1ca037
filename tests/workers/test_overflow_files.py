"""Files below the device: each rank of each engine has one of its own, without a name that others could open."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.tiny_model import build_tiny_model
from tests.workers.harness import Session, make_engine
from tests.workers.parallel_harness import Ranks, prompts_of, replica

NUM_NEW = 8
HALF_BLOCK = 16 * 2 * 2 * 64 * 4  # bytes of a block of M on one rank of two


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


def files_of(pid: int, folder: Path) -> list[os.stat_result]:
    """What a process has open in a folder, names or not."""
    opened = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(link).startswith(f"{folder}/"):
                opened.append(link.stat())
        except FileNotFoundError:
            continue  # closed meanwhile
    return opened


def test_two_ranks_and_two_engines_beside_them_share_no_file(folder: Path, tmp_path: Path, ranks: Ranks) -> None:
    """Rank 0 and the other engines are in this process; each has two sequences, most of whose KV goes to its file."""
    prompts, place = prompts_of((300, 420)), {"overflow_folder": str(tmp_path)}
    want = Session(make_engine(folder, num_blocks=100)).ask(prompts, max_tokens=NUM_NEW)
    below = {"overflow_disk_bytes": 64 * HALF_BLOCK, "kv_cache_bytes": 8 * HALF_BLOCK}
    with replica(ranks, folder, 2, 1, **below, **place) as group:
        alone = [Session(make_engine(folder, 8, overflow_disk_bytes=64 * 2 * HALF_BLOCK, **place)) for _ in range(2)]
        sessions = [group, *alone]
        numbers = [[session.submit(prompt, max_tokens=NUM_NEW) for prompt in prompts] for session in sessions]
        while busy := [session for session in sessions if session.engine.has_work]:
            for session in busy:
                session.step()
        for session, asked in zip(sessions, numbers, strict=True):
            assert [session.tokens(number) for number in asked] == want
            assert session.engine.stats().overflow.disk_bytes > 0
        here, there = files_of(os.getpid(), tmp_path), files_of(ranks.running[0].process.pid or 0, tmp_path)
        assert (len(here), len(there)) == (3, 1)
        assert len({(found.st_dev, found.st_ino) for found in (*here, *there)}) == 4
        assert {(stat.S_IMODE(found.st_mode), found.st_nlink) for found in (*here, *there)} == {(0o600, 0)}
        assert min(found.st_size for found in (*here, *there)) > 10 * HALF_BLOCK  # all four were written
        assert list(tmp_path.iterdir()) == []
