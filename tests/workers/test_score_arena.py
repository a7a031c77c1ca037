"""An arena with real threads and files: what comes back is what went in, faults are errors, and nothing is left."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.faulty_disk import FaultyDisk, Hang
from tournant.workers import spill_file
from tournant.workers.score_arena import ArenaFull, ScoreArena, SpillBottom
from tournant.workers.spill_file import SpillError, SpillFile
from tournant.workers.tile_ledger import Tier

PAGE = 4096
FLOATS = PAGE // 4
DOWN, UP = (Tier.HOST, Tier.BOTTOM), (Tier.BOTTOM, Tier.HOST)
WAIT_S = 20.0


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def arena(tmp_path: Path, disk: FaultyDisk) -> Iterator[ScoreArena]:
    """Ten pages on the device, ten on the host, a file below. It must be sound at the end, and the folder empty."""
    with ScoreArena(10 * PAGE, 10 * PAGE, SpillBottom(SpillFile(tmp_path, disk))) as made:
        yield made
        made.validate()
        assert made.stats.peak_bytes <= 20 * PAGE
    assert list(tmp_path.iterdir()) == []


def fill(arena: ScoreArena, count: int, reads: list[int]) -> None:
    """Tiles of a page that hold their number, and half a page every third."""
    arena.schedule(reads)
    for key in range(count):
        arena.new(key, (FLOATS // (2 if key % 3 == 0 else 1),)).fill_(key)
        arena.done(key)


def read_all(arena: ScoreArena, reads: list[int]) -> None:
    for key in reads:
        assert arena.read(key).unique().tolist() == [key]
        arena.done(key)
        arena.validate()


def there_and_back(arena: ScoreArena) -> None:
    fill(arena, 60, list(range(60)))
    read_all(arena, list(range(60)))


@pytest.mark.parametrize("order", ["as made", "backwards", "twice"])
def test_tiles_come_back_as_they_went(arena: ScoreArena, order: str) -> None:
    reads = {"as made": list(range(60)), "backwards": list(range(60))[::-1], "twice": 2 * list(range(60))}[order]
    fill(arena, 60, reads)
    read_all(arena, reads)
    moved = arena.stats.moved
    assert moved[DOWN] >= 40 * PAGE / 1.5
    assert moved[UP] == moved[DOWN]  # everything came back, once per way down
    assert arena._buffers == {}


def test_short_reads_and_writes_are_carried_on(arena: ScoreArena, disk: FaultyDisk) -> None:
    disk.short("write", 100, nth=2)
    disk.short("write", 0, nth=4)
    disk.short("read", 100, nth=3)
    fill(arena, 60, list(range(60)))
    read_all(arena, list(range(60)))
    assert disk.calls["write"] > 30


@pytest.mark.parametrize(
    ("method", "number", "said"),
    [
        ("write", errno.ENOSPC, "No space left.*give more RAM"),
        ("write", errno.EIO, "error"),
        ("read", errno.EIO, "back"),
    ],
)
def test_a_failing_disk_is_an_error_that_says_so(
    tmp_path: Path, disk: FaultyDisk, method: str, number: int, said: str
) -> None:
    before = _open_files()
    disk.fail(method, number, nth=5, forever=True)
    with ScoreArena(10 * PAGE, 10 * PAGE, SpillBottom(SpillFile(tmp_path, disk))) as arena:
        with pytest.raises(SpillError, match=said) as raised:
            there_and_back(arena)
        assert (raised.value.errno, tmp_path.name in str(raised.value)) == (number, True)
        with pytest.raises(SpillError):  # the arena is of no use any more, and says so
            arena.flush()
    assert list(tmp_path.iterdir()) == []
    assert _open_files() == before


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_cancelled_half_way_nothing_is_left_though_a_copy_hangs(tmp_path: Path, disk: FaultyDisk) -> None:
    hang = disk.hang("write", nth=3)
    before = _open_files()
    with pytest.raises(KeyboardInterrupt):
        _stopped_half_way(tmp_path, disk, hang)
    assert list(tmp_path.iterdir()) == []
    assert _open_files() == before


def _stopped_half_way(folder: Path, disk: FaultyDisk, hang: Hang) -> None:
    with ScoreArena(10 * PAGE, 10 * PAGE, SpillBottom(SpillFile(folder, disk))) as arena:
        fill(arena, 18, [])
        assert hang.begun.wait(WAIT_S)
        hang.release.set()
        raise KeyboardInterrupt


class SlowForOne(SpillBottom):
    """Its write of the tile "slow" hangs until it is released."""

    def __init__(self, file: SpillFile) -> None:
        super().__init__(file)
        self.begun, self.release = threading.Event(), threading.Event()

    def write(self, key: object, tile: torch.Tensor) -> None:
        if key == "slow":
            self.begun.set()
            assert self.release.wait(WAIT_S)
        super().write(key, tile)


def test_both_directions_at_once(tmp_path: Path) -> None:
    """While a write hangs, reads bring tiles back."""
    bottom = SlowForOne(SpillFile(tmp_path))
    with ScoreArena(10 * PAGE, 10 * PAGE, bottom) as arena:
        fill(arena, 40, list(range(40)))
        for key in ("slow", *(f"more {place}" for place in range(20))):  # nobody will read them: they leave first
            arena.new(key, (FLOATS * (4 if key == "slow" else 1),))
            arena.done(key)
        assert bottom.begun.wait(WAIT_S)
        before = arena.stats.moved.get(UP, 0)
        read_all(arena, list(range(40)))
        assert arena.stats.moved[UP] > before
        assert not bottom.release.is_set()
        bottom.release.set()


def test_what_fits_nowhere_is_an_error_with_numbers() -> None:
    with ScoreArena(10 * PAGE, 10 * PAGE) as arena:
        fill(arena, 15, [])
        with pytest.raises(ArenaFull, match=f"tile of {9 * PAGE} bytes: device_bytes is {10 * PAGE}, .* raise"):
            arena.new("large", (9 * FLOATS,))
    with ScoreArena(10 * PAGE) as arena, pytest.raises(ArenaFull, match="host_bytes 0"):
        arena.new("larger than the device", (11 * FLOATS,))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpillError, match=r"no spill file can be made in .*nowhere: No such file"):
        SpillFile(tmp_path / "nowhere")


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_spill_file_has_no_name_and_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool
) -> None:
    if not unnamed:
        _without_tmpfile(monkeypatch)
    files = [SpillFile(tmp_path) for _ in range(4)]
    assert list(tmp_path.iterdir()) == []
    assert len({file.identity for file in files}) == 4
    for file in files:
        found = os.fstat(file._file)
        assert (stat.S_IMODE(found.st_mode), found.st_nlink) == (0o600, 0)
        file.close()


def _without_tmpfile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that makes no files without names."""
    real = os.open

    def refuse(path: object, flags: int, *args: object, **named: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *args, **named)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(spill_file.os, "open", refuse)


SPILLING = """
import sys, threading
from pathlib import Path
from tournant.workers.score_arena import ScoreArena, SpillBottom
from tournant.workers.spill_file import SpillFile

arenas = []
for sequence in range(2):
    file = SpillFile(Path(sys.argv[1]))
    arenas.append(ScoreArena(40960, 40960, SpillBottom(file)))
    for key in range(60):
        arenas[-1].new(key, (1024,)).fill_(key)
        arenas[-1].done(key)
    print(*file.identity, file.num_bytes > 100000, flush=True)
print("ready", flush=True)
threading.Event().wait()
"""
MAKING = """
import errno, os, sys, threading
from pathlib import Path
from tournant.workers import spill_file

real = os.open
def refuse(path, flags, *args, **named):
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "")
    return real(path, flags, *args, **named)
os.open = refuse
spill_file._unlink = lambda path: (print("ready", flush=True), threading.Event().wait())
spill_file.SpillFile(Path(sys.argv[1]))
"""


def until_ready(code: str, folder: Path) -> tuple[subprocess.Popen[str], list[str]]:
    """A process that runs `code`, once it says "ready", and the lines that it printed before."""
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    if process.stdout is None:
        raise RuntimeError("the process has no output")
    lines = []
    for line in process.stdout:
        if line == "ready\n":
            return process, lines
        lines.append(line.strip())
    raise RuntimeError(f"the process ended with {process.wait()}")


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_two_ranks_with_two_sequences_share_no_file_and_kill_9_leaves_none(tmp_path: Path) -> None:
    other, lines = until_ready(SPILLING, tmp_path)
    try:
        files = [SpillFile(tmp_path) for _ in range(2)]
        for file in files:
            with ScoreArena(10 * PAGE, 10 * PAGE, SpillBottom(file)) as arena:
                lines.append(" ".join(map(str, file.identity)) + " True")
                there_and_back(arena)
        assert len({line.removesuffix(" True") for line in lines}) == 4
        assert all(line.endswith(" True") for line in lines)
    finally:
        kill(other)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_kill_9_leaves_is_swept_at_the_next_start(tmp_path: Path) -> None:
    others = [tmp_path / "tournant-spill-kept", tmp_path / f"{spill_file._prefix()}{'0' * 32}"]
    others[0].touch()
    others[1].mkdir()  # no file of ours, whatever it is called
    kill(until_ready(MAKING, tmp_path)[0])
    (left,) = set(tmp_path.iterdir()) - set(others)
    assert stat.S_IMODE(left.stat().st_mode) == 0o600
    SpillFile(tmp_path).close()
    assert set(tmp_path.iterdir()) == set(others)


def test_inference_mode_does_not_reach_the_buffers() -> None:
    with torch.inference_mode(), ScoreArena(10 * PAGE, 10 * PAGE) as arena:
        assert not arena.new(0, (FLOATS,)).is_inference()


def test_what_another_process_sweeps_at_the_same_time_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / f"{spill_file._prefix()}{'0' * 32}"
    left.touch()
    real = Path.lstat

    def faster(path: Path) -> os.stat_result:
        left.unlink()
        return real(path)

    monkeypatch.setattr(Path, "lstat", faster)
    SpillFile(tmp_path).close()
    assert list(tmp_path.iterdir()) == []
