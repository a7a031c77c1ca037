from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.deploy.async_test import async_test
from tests.deploy.keys import Clock, write_secret
from tournant.deploy.watched_file import MAX_FILE_BYTES, WatchedFile, read_secret
from tournant.workers.errors import ConfigError


def number(path: Path, content: bytes) -> int:
    try:
        return int(content)
    except ValueError:
        raise ConfigError(f"{path} holds no number") from None


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o601, 0o620, 0o666, 0o660])
def test_a_file_that_others_can_get_at_is_refused(tmp_path: Path, mode: int) -> None:
    path = write_secret(tmp_path / "keys", "1", mode)
    with pytest.raises(ConfigError, match=rf"keys has mode {mode:04o}, .* make it 0600"):
        read_secret(path)
    path.chmod(0o640)
    assert read_secret(path)[0] == b"1"


def test_what_is_no_file_or_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none cannot be read: No such file"):
        read_secret(tmp_path / "none")
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match=r"is no file|cannot be read"):
        read_secret(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="pipe is no file"):
        read_secret(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=f"more than {MAX_FILE_BYTES} bytes"):
        read_secret(write_secret(tmp_path / "long", "1" * (MAX_FILE_BYTES + 1)))


@async_test
async def test_a_broken_file_keeps_the_old_content_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    clock, path = Clock(), write_secret(tmp_path / "n", "1")
    found = WatchedFile(path, number, clock)

    async def later() -> int:
        clock.now += 1.0
        return await found.current()

    def told() -> int:
        return sum("what was read from it before still holds" in record.message for record in caplog.records)

    assert await later() == 1
    write_secret(path, "2")
    assert await found.current() == 1  # it is looked at once a second
    assert await later() == 2
    for count, broken in enumerate((lambda: write_secret(path, "SECRET"), lambda: path.chmod(0o644), path.unlink), 1):
        broken()
        for _ in range(3):
            assert await later() == 2
        assert told() == count
    assert "SECRET" not in caplog.text
    write_secret(path, "3")
    assert await later() == 3
    assert told() == 3
