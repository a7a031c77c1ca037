from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tournant.workers import local_cache
from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.local_cache import MEMO_NAME, exclusive, file_digests, file_stamp, private_folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read to be hashed."""
    names: list[str] = []
    original = local_cache._hash

    def count(item: tuple[Path, str]) -> str:
        names.append(item[0].name)
        return original(item)

    monkeypatch.setattr(local_cache, "_hash", count)
    return names


def test_a_change_of_equal_size_and_time_is_noticed(tmp_path: Path) -> None:
    """ctime tells, even when size and mtime are put back and the write follows at once."""
    path = tmp_path / "file"
    path.write_bytes(b"one")
    before, found = file_digests([path], tmp_path / "cache"), path.stat()
    with path.open("r+b") as file:
        file.write(b"two")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert file_digests([path], tmp_path / "cache") != before


def test_files_are_hashed_once_a_later_write_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose ctime is younger than the grain of file times is left to age before it is read."""
    path = tmp_path / "file"
    digest = local_cache.hashlib.file_digest
    ages: list[int] = []

    def digest_and_note(*arguments: Any) -> Any:
        ages.append(time.time_ns() - path.stat().st_ctime_ns)
        return digest(*arguments)

    monkeypatch.setattr(local_cache.hashlib, "file_digest", digest_and_note)
    for number in range(5):
        path.write_bytes(b"%d" % number)
        file_digests([path], tmp_path / "cache")
    assert len(ages) == 5
    assert min(ages) >= local_cache.TICK_NS


@pytest.mark.parametrize(
    "damage",
    [
        lambda memo: memo.write_bytes(b""),
        lambda memo: memo.write_bytes(b"\xff" * 100),
        lambda memo: memo.write_bytes(memo.read_bytes()[:-20]),
        lambda memo: memo.write_bytes(b"[" * 100_000),
        lambda memo: memo.write_text("[1]"),
        lambda memo: memo.write_text('{"format": 1, "files": [1]}'),
        lambda memo: memo.write_text(memo.read_text().replace('"format": 1', '"format": 2')),
        lambda memo: memo.write_text(json.dumps({"format": 1, "files": dict.fromkeys(_files(memo), "no digest")})),
        lambda memo: memo.write_text(json.dumps({"format": 1, "files": dict.fromkeys(_files(memo), 7)})),
        lambda memo: memo.chmod(0o666),
        lambda memo: (memo.rename(memo.with_suffix(".x")), memo.symlink_to(memo.with_suffix(".x"))),
        lambda memo: memo.unlink(),
    ],
)
def test_memo_that_cannot_be_trusted_is_ignored(
    tmp_path: Path, reads: list[str], damage: Callable[[Path], Any]
) -> None:
    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"one")
    first = file_digests([path], cache)
    damage(cache / MEMO_NAME)
    assert file_digests([path], cache) == first
    assert len(reads) == 2
    assert file_digests([path], cache) == first
    assert len(reads) == 2  # the memo was written anew


def _files(memo: Path) -> list[str]:
    return list(json.loads(memo.read_text())["files"])


def test_memo_is_bounded_and_what_a_kill_left_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cache, "MAX_MEMO_FILES", 3)
    cache = tmp_path / "cache"
    for number in range(5):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(b"%d" % number)
        file_digests([path], cache)
        (cache / MEMO_NAME).with_suffix(".new").write_bytes(b"half")
    assert _files(cache / MEMO_NAME) == [file_stamp((tmp_path / f"{n}.bin").stat()) for n in (2, 3, 4)]


def test_cache_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"one")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match=r"open .*mode 777.* writable by no one else"):
        file_digests([tmp_path / "file"], tmp_path / "open")
    assert private_folder(tmp_path / "new" / "deep").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_lock_that_is_not_free_is_an_error(tmp_path: Path) -> None:
    told: list[str] = []
    with (
        exclusive(tmp_path / "lock", 0),
        pytest.raises(TimeoutError, match=r"another process holds .*lock"),
        exclusive(tmp_path / "lock", 0.2, lambda: told.append("waiting")),
    ):
        pass
    assert told == ["waiting"]
    with exclusive(tmp_path / "lock", 0):
        pass


def test_memo_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    (tmp_path / "file").write_bytes(b"one")
    monkeypatch.setattr(local_cache, "_remember", fail)
    assert len(file_digests([tmp_path / "file"], tmp_path / "cache")[0]) == 32
    assert "file digests cannot be remembered" in caplog.text


def test_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    digest = local_cache.hashlib.file_digest

    def digest_and_write(*arguments: Any) -> Any:
        result = digest(*arguments)
        path.write_bytes(b"two")
        return result

    monkeypatch.setattr(local_cache.hashlib, "file_digest", digest_and_write)
    with pytest.raises(ModelFormatError, match=r"file changed while it was being read"):
        file_digests([path], tmp_path / "cache")
