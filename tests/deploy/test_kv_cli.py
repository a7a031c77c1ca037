"""`tournant kv` as a user meets it: what is printed, exit codes, and what is left in the folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.helpers.nvme import TestTier
from tournant.deploy.cli import app
from tournant.deploy.kv_cli import MAX_TRACE_BYTES
from tournant.kvstore.disk_events import WriteRecords
from tournant.kvstore.io_trace import format_trace
from tournant.kvstore.nvme_folder import LOCK_NAME, segment_name
from tournant.kvstore.policies.io_order import IoRequest


def kv(*words: object, say: str = "") -> Result:
    return CliRunner().invoke(app, ["kv", *(str(word) for word in words)], input=say)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three records in one segment."""
    path = tmp_path / "nvme"
    tier = TestTier(path)
    run = tuple(tier.to_write(number, 5000) for number in (1, 2, 3))
    assert tier.do(WriteRecords(1, 1, 0, run)).written == 3
    assert tier.close()
    return path


def flip(folder: Path, at: int) -> None:
    path = folder / segment_name(1)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_ls_and_verify_of_a_good_folder(folder: Path) -> None:
    listed = kv("ls", folder, "--records")
    assert listed.exit_code == 0
    assert listed.output.count("bf16 5000 bytes, 5000 stored (none)") == 3
    assert "adopted 3, refused 0, corrupt 0" in listed.output
    assert kv("verify", folder).exit_code == 0


def test_a_reader_that_has_enough_ends_it_quietly(folder: Path) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    command = [Path(sys.executable).parent / "tournant", "kv", "ls", folder, "--records"]
    found = subprocess.run(command, stdout=writable, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(writable)
    assert found.stderr == ""


def test_verify_finds_what_ls_does_not_read(folder: Path) -> None:
    flip(folder, 4096 + 17)
    assert "adopted 3" in kv("ls", folder).output
    found = kv("verify", folder)
    assert found.exit_code == 1
    assert "adopted 2, refused 0, corrupt 1" in found.output
    assert "segment 1 offset 0: the checksum" in found.output


def test_clear_asks_and_leaves_what_is_not_ours(folder: Path) -> None:
    (folder / "notes").write_text("mine")
    assert kv("clear", folder, say="n\n").exit_code == 1
    assert (folder / segment_name(1)).exists()
    assert "freed" in kv("clear", folder, say="y\n").output
    assert sorted(path.name for path in folder.iterdir()) == [LOCK_NAME, "notes"]
    assert kv("clear", folder, "--yes").exit_code == 0


@pytest.mark.parametrize("command", ["ls", "verify", "clear --yes"])
def test_a_folder_in_use_or_missing_is_refused(folder: Path, command: str) -> None:
    tier = TestTier(folder)
    busy = kv(*command.split(), folder)
    assert (busy.exit_code, "used by another process" in busy.output) == (1, True)
    assert tier.close()
    missing = kv(*command.split(), folder / "nothing")
    assert (missing.exit_code, "no folder" in missing.output) == (1, True)


def figures(result: Result) -> dict[str, list[str]]:
    """Rows of the last table by their first cell."""
    rows = [
        [cell.strip() for cell in line.strip("│┃").split("│")] for line in result.output.splitlines() if "│" in line
    ]
    return {row[0]: row[1:] for row in rows}


def test_io_trace_of_positions() -> None:
    found = figures(kv("io-trace", "98,183,37,122,14,124,65,67", "--start", 53))
    assert found["total seek distance"] == ["640", "236", "299"]
    assert found["1"] == ["98 (0, 45)", "65 (0, 12)", "65 (0, 12)"]
    assert found["8"] == ["67 (7, 640)", "183 (7, 236)", "14 (7, 299)"]
    assert found["mean way"] == ["392.25", "109.50", "114.50"]
    ended = figures(kv("io-trace", "98,183,37,122,14,124,65,67", "--start", 53, "--down", "--ends", "0:199"))
    assert ended["total seek distance"] == ["640", "236", "236"]


def test_io_trace_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "queue"
    path.write_text(format_trace([IoRequest(0, 8192, 4096, 0), IoRequest(1, 4096, 4096, 0), IoRequest(2, 0, 4096, 2)]))
    found = figures(kv("io-trace", path, "--show", 1))
    assert found["total seek distance"] == ["24576", "16384", "16384"]
    assert found["calls after merging"] == ["3", "3", "2"]
    assert "2" not in found


@pytest.mark.parametrize("words", [["missing-file"], ["1,2", "--ends", "5:1"], ["1,2", "--start", "-1"]])
def test_io_trace_refuses_nonsense(words: list[str]) -> None:
    assert kv("io-trace", *words).exit_code == 2


@pytest.mark.parametrize(
    ("queue", "message"),
    [
        ("98,-5,3", "'98,-5,3' is neither a file nor positions"),
        ("", "'' is neither a file nor positions"),
        ("/dev/zero", f"/dev/zero has more than {MAX_TRACE_BYTES} bytes"),
    ],
)
def test_what_is_no_queue_is_named(queue: str, message: str) -> None:
    found = kv("io-trace", queue)
    assert found.exit_code == 2
    assert message in found.stderr


def test_io_trace_of_files_that_hold_none(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "digits").write_text("0 " + "9" * 5000 + " 1")
    for name, message in (("binary", "binary is no text in UTF-8"), ("digits", "it must be `arrival position length`")):
        found = kv("io-trace", tmp_path / name)
        assert found.exit_code == 2
        assert message in found.stderr
        assert len(found.stderr) < 500
