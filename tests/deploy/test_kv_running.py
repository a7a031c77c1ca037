"""`tournant kv` on a running store."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.kvstore.store_harness import SLOT, Store, keys, read, write, writer
from tournant.cluster.node_store import StoreKeeper, StorePlan
from tournant.cluster.run_folder import RunFolder
from tournant.deploy.cli import app
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.nvme_tier import NvmeConfig


def kv(*words: object, say: str = "") -> Result:
    return CliRunner().invoke(app, ["kv", *(str(word) for word in words)], input=say)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with five blocks in both tiers."""
    store = Store("socket", tmp_path_factory.mktemp("store"))
    store.start(nvme=NvmeConfig(), nvme_bytes=8 << 20, segment_bytes=1 << 20)
    write(store.attach(writer(writer_id=0xAB)), keys(5))
    store.wait_for_disk()
    yield store
    store.close()


def test_status(running: Store) -> None:
    found = kv("status", "--socket", running.socket)
    assert found.exit_code == 0
    facts = dict(line.split() for line in found.output.splitlines())
    assert facts["host_visible_bytes"] == str(5 * SLOT)
    assert facts["host_bytes"] == str(4 << 20)
    assert (
        sum(
            int(facts[name])
            for name in facts
            if name.startswith("host_") and name.endswith("_bytes") and name != "host_bytes"
        )
        == 4 << 20
    )
    assert (facts["blocks"], facts["clients"], facts["reported"], facts["written"]) == ("5", "1", "5", "5")
    assert (facts["host_hits"], facts["nvme_hits"], facts["max_reads"]) == ("0", "0", "64")


def run_folders_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tournant.cluster.run_folder.temporary_folder", lambda: folder)
    monkeypatch.setattr("tournant.deploy.kv_cli.temporary_folder", lambda: folder)


def test_commands_that_change_nothing_find_the_stores_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folders_in(tmp_path, monkeypatch)
    nothing = f"error: no store of this user runs below {tmp_path}; name the "
    assert (kv("status").exit_code, kv("status").output) == (1, f"{nothing}--socket of one\n")
    for command in ("ls", "verify"):
        found = kv(command)
        assert (found.exit_code, found.output) == (1, f"{nothing}folder of one that does not run, or a --socket\n")
    folders = [RunFolder(tmp_path) for _ in range(2)]
    stores = [StoreKeeper(StorePlan(StoreConfig(1 << 20)), folder.path / "kv") for folder in folders]
    sockets = sorted(str(store.wait_ready()) for store in stores)
    found = kv("status")
    assert found.exit_code == 0
    assert sorted(line.split()[1] for line in found.output.splitlines() if line.startswith("socket ")) == sockets
    none = "0 blocks of 0 bytes; 0 in host slots, 0 on NVMe\n"
    assert (kv("ls").exit_code, kv("ls").output) == (0, "".join(f"socket {one}\n{none}" for one in sockets))
    good = "host slots: 0 parts verified, 0 corrupt; NVMe: 0 verified, 0 corrupt\n"
    assert (kv("verify").exit_code, kv("verify").output) == (0, "".join(f"socket {one}\n{good}" for one in sockets))
    assert kv("clear", "--yes").exit_code == 2, "what is to be cleared is named"
    for store in stores:
        store.stop()
    dead = folders[0].path / "kv" / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))
    gone = kv("status")
    assert gone.exit_code == 1
    assert f"these do not answer: {dead}" in gone.output
    for folder in folders:
        folder.remove()


def test_status_shows_hits_per_tier(running: Store) -> None:
    facts = dict(line.split() for line in kv("status", "--socket", running.socket).output.splitlines())
    assert {"host_hits", "nvme_hits"} <= facts.keys()


def test_ls(running: Store) -> None:
    found = kv("ls", "--socket", running.socket, "--records")
    assert found.exit_code == 0
    assert f"{keys(1)[0].hex()[:16]} 00000000000000ab.1 host+nvme 1 parts, {SLOT} bytes, depth 0" in found.output
    assert found.output.splitlines()[-1] == f"5 blocks of {5 * SLOT} bytes; 5 in host slots, 5 on NVMe"


def test_verify_then_clear(running: Store) -> None:
    good = kv("verify", "--socket", running.socket)
    assert (good.exit_code, good.output) == (
        0,
        "host slots: 5 parts verified, 0 corrupt; NVMe: 5 verified, 0 corrupt\n",
    )
    segment = next(running.nvme_folder.glob("segment-*"))
    data = bytearray(segment.read_bytes())
    data[5000] ^= 1
    segment.write_bytes(data)
    bad = kv("verify", "--socket", running.socket)
    assert (bad.exit_code, bad.output.partition("; ")[2]) == (1, "NVMe: 4 verified, 1 corrupt\n")
    assert kv("clear", "--socket", running.socket, say="n\n").exit_code == 1
    cleared = kv("clear", "--socket", running.socket, "--yes")
    assert (cleared.exit_code, cleared.output) == (0, "5 blocks forgotten\n")
    assert read(running._clients[0], keys(5)) == []


def test_a_place_is_needed_and_must_be_there(tmp_path: Path) -> None:
    for words in (["clear", "--yes"], ["ls", tmp_path, "--socket", tmp_path / "s"]):
        found = kv(*words)
        assert (found.exit_code, found.output) == (
            2,
            "error: name either a folder or the --socket of a running store\n",
        )
    found = kv("status", "--socket", tmp_path / "none")
    assert found.exit_code == 1
    assert "no store can be reached at" in found.output
