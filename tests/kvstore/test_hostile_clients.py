"""What no honest client, file or operator sends: the store says no, drops it, or does what is asked, and goes on.

Behind a socket a store that breaks is gone; in one process `Store.stop` recounts everything.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kvstore.store_harness import (
    HALVES,
    PATIENCE_S,
    READER,
    SLOT,
    WEIGHTS,
    WHOLE,
    Store,
    entry,
    exit_of,
    forked,
    keys,
    read,
    write,
    writer,
)
from tournant.kvstore.block import Part, Version
from tournant.kvstore.checkpoint import read_checkpoint, write_checkpoint
from tournant.kvstore.client import Identity, connect
from tournant.kvstore.config import CHUNK_BYTES, StoreConfig
from tournant.kvstore.disk_events import WriteCheckpoint
from tournant.kvstore.disk_io import RealDisk
from tournant.kvstore.errors import StoreConfigError, StoreRefused
from tournant.kvstore.events import AdoptEntry
from tournant.kvstore.groups import MAX_COPIES, Handle
from tournant.kvstore.nvme_folder import segment_name
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.record import MAX_SEGMENT
from tournant.kvstore.server import MAX_STRANGERS

TIER = {"nvme": NvmeConfig(), "nvme_bytes": 8 << 20, "segment_bytes": 1 << 20}


@pytest.mark.parametrize("places", [(0,), (1,), (0, 1), (1, 0), (0, 0)])
def test_pins_of_a_chain_that_names_a_key_twice(store: Store, places: tuple[int, ...]) -> None:
    """Two versions of the key are shown twice each; some of the four are picked."""
    store.start()
    rank = store.attach(writer())
    (key,) = keys(1)
    write(rank, [key], first=1)
    write(rank, [key], first=2)
    number, _ = rank.open([key, key])
    assert rank.fetch(number, [Version(rank.identity.writer_id, 1 + place) for place in places]).counts
    rank.close_read(number)
    assert store.status().pinned_pages == 0


def test_a_load_that_is_asked_for_twice_at_once(store: Store) -> None:
    store.start(host_bytes=1 << 20, **TIER)
    rank = store.attach(writer())
    (key,) = keys(1)
    write(rank, [key])
    store.wait_for_disk()
    write(rank, keys(300, "others"), first=10)
    number, answer = rank.open([key, key])
    assert [handle.generation for handles in answer.handles() for handle in handles] == [0, 0], "on NVMe only"
    assert len(rank.fetch(number, [Version(rank.identity.writer_id, 1)] * 2).counts) == 2
    rank.close_read(number)
    assert store.status().pinned_pages == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_form": "bf16\0"}, "kv_form a name of up to 32 bytes, none of them zero"),
        ({"slot_bytes": CHUNK_BYTES + 1}, "slot_bytes is 67108865; a slot must fit into one chunk"),
        ({"slot_bytes": (1 << 64) - 1}, "a slot must fit into one chunk"),
        ({"slot_bytes": 0}, "slot_bytes is 0"),
        ({"local_parts": (WHOLE, *(Part(0, 1, i, i + 1) for i in range(MAX_COPIES)))}, "lists 128 parts"),
        ({"local_parts": HALVES}, "local_parts must list this client's part"),
    ],
)
def test_an_attach_that_nothing_can_come_of(store: Store, changes: dict[str, object], message: str) -> None:
    store.start(chunk_bytes=2 * CHUNK_BYTES, host_bytes=2 * CHUNK_BYTES, **TIER)
    with pytest.raises(StoreRefused, match=message):
        store.attach(replace(writer(), **changes))  # type: ignore[arg-type]
    assert store.status().clients == 0


def test_one_writer_has_one_kind_of_weights(store: Store) -> None:
    store.start()
    store.attach(writer(part=HALVES[0], parts=HALVES, writer_id=9))
    with pytest.raises(StoreRefused, match="writer 9 has attached with other weights"):
        store.attach(Identity(b"x" * 32, "bf16", 9, HALVES[1], HALVES, SLOT, 4))


def test_a_block_that_is_whole_gets_no_more_parts(store: Store) -> None:
    """The writer's number comes again with other parts once its first group of ranks is gone."""
    store.start()

    def first_group() -> int:
        return 0 if write(connect(store.socket, writer(writer_id=9), PATIENCE_S), keys(1)) == 1 else 1

    if store.kind == "socket":
        assert exit_of(forked(first_group)) == 0
    else:
        rank = store.attach(writer(writer_id=9))
        write(rank, keys(1))
        rank.close()
    store.wait_for(lambda found: found.clients == 0)
    other = store.attach(writer(part=HALVES[0], parts=HALVES, writer_id=9))
    assert other.publish([entry(other, keys(1)[0], 1)]).refused == (0,)  # type: ignore[list-item]
    assert read(other, keys(1)) == [Version(9, 1)]


def test_a_part_of_an_incomplete_block_cannot_be_called_bad(store: Store) -> None:
    store.start()
    ranks = [store.attach(writer(part=part, parts=HALVES, writer_id=9)) for part in HALVES]
    first = entry(ranks[0], keys(1)[0], 1)
    assert first is not None
    wrong = replace(first, checksum=first.checksum ^ 1)
    ranks[0].publish([wrong])
    ranks[0].bad(wrong.key, Handle(9, 1, 0, SLOT, wrong.page, wrong.generation, wrong.checksum))
    assert store.verify().host_bad == 1
    if store.local is not None:
        store.local.shell.core.validate()
    assert not ranks[1].publish([entry(ranks[1], keys(1)[0], 1)]).refused  # type: ignore[list-item]
    assert read(ranks[0], keys(1), HALVES) == [], "a reader finds what is wrong"
    store.wait_for(lambda found: found.blocks == 0)


def test_small_segments_and_many_parts(store: Store) -> None:
    """Six records of three pages are more than a segment, though their payloads fill half of one."""
    parts = tuple(Part(0, 1, head, head + 1) for head in range(6))
    store.start(nvme=NvmeConfig(), nvme_bytes=1 << 20, segment_bytes=1 << 16)
    ranks = [store.attach(writer(1, part, parts, writer_id=9, slot_bytes=4096)) for part in parts]
    for rank in ranks:
        rank.publish([entry(rank, keys(1)[0], 1)])  # type: ignore[list-item]
    write(store.attach(writer(slot_bytes=4096)), keys(2, "others"))
    assert store.wait_for(lambda found: found.nvme_records == 2).in_host == 3


def test_parts_from_elsewhere_are_limited(tmp_path: Path) -> None:
    store = Store("local", tmp_path).start()
    assert store.local is not None
    parts = [Part(0, 1, head, head + 1) for head in range(MAX_COPIES + 9)]
    entries = [AdoptEntry(keys(1)[0], Version(1, 1), part, WEIGHTS, "bf16", 4096, 0) for part in parts]
    store.local.shell.adopt(entries, [bytes(4096)] * len(parts))
    reader = store.attach(READER)
    assert list(reader.open(keys(1))[1].counts) == [MAX_COPIES]
    assert reader.hard_pin([(keys(1)[0], Version(1, 1))])
    reader.close()
    store.close()


def test_a_reader_may_come_again_and_again(served: Store) -> None:
    """Without slots and hard pins it can touch nothing any more: its process need not end first."""
    served.start(max_clients=4)
    pid = served.process.process.pid  # type: ignore[union-attr]
    for _ in range(20):
        connect(served.socket, READER, PATIENCE_S).close()
        served.wait_for(lambda found: found.clients == 0)
    before = len(os.listdir(f"/proc/{pid}/fd"))
    for _ in range(20):
        connect(served.socket, READER, PATIENCE_S).close()
        served.wait_for(lambda found: found.clients == 0)
    served.wait_for(lambda found: len(os.listdir(f"/proc/{pid}/fd")) <= before)


def test_connections_that_say_nothing_shut_nobody_out(served: Store) -> None:
    served.start()
    silent = []
    for _ in range(MAX_STRANGERS + 8):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(PATIENCE_S)
        sock.connect(str(served.socket))
        silent.append(sock)
    rank = served.attach(writer())
    assert write(rank, keys(3)) == 3
    assert b"too many connections have not attached" in silent[0].recv(1000)
    for sock in silent:
        sock.close()


def test_a_store_without_descriptors_waits(served: Store, capfd: pytest.CaptureFixture[str]) -> None:
    """It serves whom it has and tries again after a pause, not with every turn of its loop."""
    served.start()
    rank = served.attach(writer(credit=1))
    pid = served.process.process.pid  # type: ignore[union-attr]
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), limits[1]))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(served.socket))
        assert write(rank, keys(300)) == 300
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert write(served.attach(writer()), keys(3)) == 3
    assert 0 < capfd.readouterr().err.count("a connection cannot be taken") < 30


@pytest.mark.parametrize("number", [MAX_SEGMENT + 1, (1 << 64) - 1])
def test_a_segment_after_which_none_can_come(store: Store, number: int) -> None:
    store.nvme_folder.mkdir(mode=0o700)
    foreign = store.nvme_folder / segment_name(number)
    foreign.write_bytes(b"x")
    store.start(**TIER)
    assert write(store.attach(writer()), keys(5)) == 5
    store.wait_for_disk()
    store.stop()
    assert foreign.read_bytes() == b"x"
    assert segment_name(1) in {path.name for path in store.nvme_folder.iterdir()}


def test_a_checkpoint_that_names_a_place_twice(store: Store) -> None:
    store.start(**TIER)
    rank = store.attach(writer())
    write(rank, keys(5))
    store.wait_for_disk()
    store.stop()
    disk = RealDisk()
    folder = disk.open_folder(store.nvme_folder)
    found = read_checkpoint(disk, folder)
    assert found is not None
    first = found.records[0]
    again = replace(first, header=replace(first.header, key=b"k" * 32))
    forged = WriteCheckpoint(1, found.next_segment, found.segments, (*found.records, again))
    write_checkpoint(disk, folder, forged)
    disk.close(folder)
    store.start(**TIER)
    assert (store.status().adopted, store.status().refused_records) == (5, 0)
    assert len(read(store.attach(READER), keys(5))) == 5
    write(store.attach(writer()), keys(600, "others"))


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--ready-fd", "99999999999999999999", "is no open descriptor"),
        ("--ready-fd", "-1", "is no open descriptor"),
        ("--tenant-check-fd", "1000", "is no open descriptor"),
        ("--with-parent", "99999999999999999999", "is not the parent of this store"),
        ("--with-parent", "-1", "is not the parent of this store"),
        ("--copy-start", "nan", "copy_start is nan; it must be above 0 and at most 1"),
        ("--max-lent-share", "inf", "it must be above 0 and at most 1"),
        ("--eviction", "lruu", "did you mean 'lru'"),
    ],
)
def test_flags_of_the_process(tmp_path: Path, flag: str, value: str, message: str) -> None:
    tmp_path.chmod(0o700)
    command = [sys.executable, "-m", "tournant.kvstore.server", "--socket", str(tmp_path / "s"), "--host-bytes", "8192"]
    found = subprocess.run([*command, flag, value], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert found.returncode == 2
    assert message in found.stderr.splitlines()[-1]
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("changes", [{"segment_bytes": 1 << 41}, {"nvme_bytes": 1 << 64}])
def test_sizes_that_no_disk_has(changes: dict[str, int]) -> None:
    with pytest.raises(StoreConfigError, match=f"is {next(iter(changes.values()))}"):
        StoreConfig(**{"host_bytes": 1 << 20, "nvme_bytes": 1 << 50, **changes})  # type: ignore[arg-type]
