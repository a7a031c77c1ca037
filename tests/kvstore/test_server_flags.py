"""The command line of the store process."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from tests.kvstore.store_harness import Store
from tournant.kvstore.config import StoreConfig, parse_bytes
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.server_flags import HELP, parse_flags, values_of

LEAST = ["--socket", "/s", "--host-bytes", "64MiB"]


def test_sizes_may_have_units() -> None:
    args = parse_flags([*LEAST, "--nvme-bytes", "1.5GiB", "--segment-bytes", "4096", "--no-nvme-direct"])
    config = StoreConfig(**values_of(args, StoreConfig))
    assert (config.host_bytes, config.nvme_bytes, config.segment_bytes) == (64 << 20, 3 << 29, 4096)
    assert config == StoreConfig(64 << 20, nvme_bytes=3 << 29, segment_bytes=4096)
    assert NvmeConfig(**values_of(args, NvmeConfig)) == NvmeConfig(direct=False)
    assert parse_bytes(str((1 << 60) + 1)) == (1 << 60) + 1, "no digit is lost"


def test_what_is_no_size_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("lots", "1 GiBB", "-1MiB", "99999999999TiB"):
        with pytest.raises(SystemExit, match="2"):
            parse_flags([*LEAST, f"--nvme-bytes={text}"])
        assert f"argument --nvme-bytes: {text!r}; " in capsys.readouterr().err


def test_help_tells_meaning_and_default_of_every_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="0"):
        parse_flags(["--help"])
    printed = capsys.readouterr().out
    settings = [*fields(StoreConfig), *fields(NvmeConfig)]
    assert HELP.keys() == {field.name for field in settings}
    for field in settings[1:]:
        assert f"{HELP[field.name]} (default: {field.default})" in printed


def test_one_line_says_that_the_store_is_ready(served: Store, capfd: pytest.CaptureFixture[str]) -> None:
    served.start(nvme=NvmeConfig(), nvme_bytes=8 << 20, segment_bytes=1 << 20)
    served.stop()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "ready" in line]
    wanted = f"pool of 4,194,304 bytes, up to 8,388,608 bytes in {served.nvme_folder}, 0 blocks adopted from there"
    assert line.endswith(f"ready at {served.socket}: {wanted}")


def test_a_value_may_look_like_a_flag(served: Store) -> None:
    served.start(nvme=NvmeConfig(kv_form="--help"), nvme_bytes=8 << 20, segment_bytes=1 << 20)
    assert served.status().blocks == 0


def test_a_cap_above_the_room_on_the_disk_is_told_with_both_numbers(
    served: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    served.start(nvme=NvmeConfig(), nvme_bytes=1 << 59)
    served.stop()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    found = re.search(r"nvme_bytes is (\d+), but there is room for (\d+) bytes in \S+: (\d+) are in use", line)
    assert found is not None
    cap, room, used = map(int, found.groups())
    assert cap == 1 << 59
    assert 0 <= used < room < cap
    served.start(nvme=NvmeConfig(), nvme_bytes=8 << 20, segment_bytes=1 << 20)
    served.stop()
    assert "WARNING" not in capfd.readouterr().err
