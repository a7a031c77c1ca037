"""kill -9 of store and clients at random moments under load: nothing wrong is served, and what lies on disk
verifies.
"""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path
from socket import socket, socketpair

import pytest

from tests.helpers.history import HistoryFile, check, load
from tests.kvstore.store_harness import HALVES, READER, SLOT, WHOLE, Store, exit_of, folder_bytes, forked
from tests.kvstore.store_worker import CHAINS, Worker, chain_of, oracle, work
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.slots import SlotState

CAP, SEGMENT = 4 << 20, 512 << 10
TIER = {"nvme": NvmeConfig(), "nvme_bytes": CAP, "segment_bytes": SEGMENT}


class Group:
    """The two ranks of one writer, each a process."""

    def __init__(self, store: Store, folder: Path, writer_id: int) -> None:
        self.pids: list[int] = []
        self._steps: list[int] = []
        partners = socketpair()
        for rank in range(2):
            history = HistoryFile(folder / f"history-{writer_id}-{rank}")
            steps, output = os.pipe()
            work_here = partial(_work_alone, partners, store, history, writer_id, rank, output)
            self.pids.append(forked(work_here, 0))
            history.close()
            os.close(output)
            self._steps.append(steps)
        for partner in partners:
            partner.close()

    def steps(self, rank: int, count: int) -> None:
        """Wait until a rank has made so many more steps, or has ended."""
        while count > 0 and (made := len(os.read(self._steps[rank], count))):
            count -= made

    def kill(self, first: int) -> None:
        """One rank is killed, then its parent kills the other before it forms the group again."""
        for rank in (first, 1 - first):
            os.kill(self.pids[rank], signal.SIGKILL)
            exit_of(self.pids[rank])
            os.close(self._steps[rank])


def _work_alone(
    partners: tuple[socket, socket], store: Store, history: HistoryFile, writer_id: int, rank: int, output: int
) -> int:
    """In the child: hold one end only, so that the end of the partner shows."""
    partners[1 - rank].close()
    return work(store.socket, history, writer_id, rank, partners[rank], output)


def run(tmp_path: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    store = Store("socket", tmp_path)
    histories = tmp_path / "histories"
    histories.mkdir()
    writers = iter(range(1, 10_000))
    groups: list[Group] = []
    try:
        store.start(host_bytes=128 * SLOT, **TIER)
        groups += [Group(store, histories, next(writers)) for _ in range(2)]
        for _ in range(kills):
            place = rng.randrange(2)
            groups[place].steps(rng.randrange(2), rng.randrange(1, 25))
            if rng.random() < 0.4:
                store.kill()
                assert folder_bytes(store.nvme_folder) <= CAP + SEGMENT
                store.start(host_bytes=128 * SLOT, **TIER)
            else:
                groups[place].kill(rng.randrange(2))
                groups[place] = Group(store, histories, next(writers))
        for group in groups:
            group.steps(0, 5)
        store.kill()
    finally:
        for group in groups:
            group.kill(0)
        store.close()
    store.start(host_bytes=128 * SLOT, **TIER)
    try:
        assert folder_bytes(store.nvme_folder) <= CAP + SEGMENT
        assert store.status().adopted > 50
        checked = store.verify()
        assert checked.nvme_bad == checked.host_bad == 0
        assert checked.nvme_good > 50
        reader = Worker(store.attach(READER), HistoryFile(histories / "reader"), f"{os.getpid()}.reader")
        assert sum(reader.read([key]) for number in range(CHAINS) for key in chain_of(number)) > 50
        assert store.pages(SlotState.LENT) == 0
    finally:
        store.close()
    records = load(histories.iterdir())
    assert check(records, WHOLE, oracle) == []
    opens = [record for record in records if record.op == "open"]
    good = sum(record.outcome == "ok" for record in opens)
    assert good >= 0.3 * len(opens), f"I15: {good} of {len(opens)} reads found anything"
    assert {record.part for record in records if record.op == "accept"} == {
        (part.layer_start, part.layer_stop, part.head_start, part.head_stop) for part in HALVES
    }


def test_twenty_random_kills(tmp_path: Path) -> None:
    run(tmp_path, kills=20, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_hundred_random_kills(tmp_path: Path) -> None:
    run(tmp_path, kills=200, seed=2)
