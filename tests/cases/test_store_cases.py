"""Cases about the block store's tiers: restarts, a pool that is too small, pins that end during a copy, full disks."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.faulty_disk import FaultyDisk
from tests.kvstore.store_harness import SLOT, Store, folder_bytes, keys, read, write, writer
from tournant.kvstore.admin import Status
from tournant.kvstore.config import StoreConfig
from tournant.kvstore.local_store import LocalStore
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.record import FRAME_BYTES
from tournant.kvstore.shell import NvmePlace

CAP, SEGMENT = 2 << 20, 256 << 10
EAGER = {"copy_start": 0.02, "copy_stop": 0.01, "copy_parallel": 0.9, "nvme_bytes": CAP, "segment_bytes": SEGMENT}


@pytest.fixture(params=["socket", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    found = Store(request.param, tmp_path)
    yield found
    found.close()


@pytest.mark.case(9)
@pytest.mark.parametrize("persist", [True, False])
def test_case_9_disk_index_after_a_restart(store: Store, persist: bool) -> None:
    tier = {"nvme": NvmeConfig(persist=persist), "nvme_bytes": 8 << 20, "segment_bytes": SEGMENT}
    store.start(**tier)
    prompts = [keys(8, f"prompt {number}") for number in range(12)]
    rank = store.attach(writer())
    for number, prompt in enumerate(prompts):
        assert write(rank, prompt, first=100 * number + 1) == 8
    store.stop()
    store.start(**tier)
    rank = store.attach(writer())
    hits = sum(len(read(rank, prompt)) for prompt in prompts)
    if persist:
        assert hits > 0.9 * 96
    else:
        assert hits == 0
        assert store.status().nvme_used_bytes == 0
        assert not list(store.nvme_folder.glob("segment-*"))


@pytest.mark.case(11)
def test_case_11_pool_smaller_than_a_prompt(store: Store) -> None:
    store.start(host_bytes=4 * SLOT)
    rank = store.attach(writer(credit=1))
    found = 0
    for number in range(100):
        prompt = keys(30, f"prompt {number}")
        found += len(read(rank, prompt))
        assert write(rank, prompt[::-1], first=100 * number + 1) == 30, "a block is skipped, never an error"
        found += len(read(rank, prompt))
    assert found > 0
    assert store.status().lost > 2900


@pytest.mark.case(13)
def test_case_13_pins_end_while_the_copy_runs(store: Store) -> None:
    store.start(host_bytes=48 * SLOT, pin_us=100_000)
    rank, other = store.attach(writer(credit=4)), store.attach(writer(credit=4))
    batch = keys(20)
    assert write(rank, batch) == 20
    number, answer = rank.open(batch)
    handles = [found[0] for found in answer.handles()]
    assert len(handles) == 20

    def slow(target: memoryview, source: memoryview) -> None:
        if store.status().reported == 20:  # the first of them
            store.wait_for(lambda found: found.expired_reads == 1)
            assert write(other, keys(60, "others"), first=1) == 60
        target[:] = source

    targets = [memoryview(bytearray(SLOT)) for _ in batch]
    assert rank.copy_out(batch, handles, targets, slow) == 0
    assert not any(rank.current(handle) for handle in handles)
    assert rank.num_bad == 0, "nothing was wrong with the store's bytes"
    rank.close_read(number)
    assert read(rank, batch) == []


@pytest.mark.case(15)
def test_case_15_ten_times_the_cap(store: Store) -> None:
    store.start(host_bytes=128 * SLOT, nvme=NvmeConfig(), **EAGER)
    rank = store.attach(writer(credit=16))
    blocks, most = 0, 0
    while store.status().written_bytes < 10 * CAP:
        assert write(rank, keys(32, f"prompt {blocks}"), first=blocks + 1) == 32
        blocks += 32
        store.wait_for(lambda found, sure=blocks - 16: found.written + found.lost >= sure)  # type: ignore[misc]
        most = max(most, folder_bytes(store.nvme_folder))
    assert most <= CAP + SEGMENT
    found = store.status()
    assert found.nvme_used_bytes <= CAP + SEGMENT
    assert found.write_errors == 0
    assert len(read(rank, keys(32, f"prompt {blocks - 32}"))) > 0


@pytest.mark.case(15)
def test_case_15_another_program_fills_the_disk(tmp_path: Path) -> None:
    """And takes what the store gives back: one segment, however often the store tries to write."""
    disk = FaultyDisk()
    config = StoreConfig(host_bytes=128 * SLOT, disk_retry_us=1000, **EAGER)  # type: ignore[arg-type]
    with LocalStore(config, NvmePlace(tmp_path / "nvme", NvmeConfig(), disk)) as local:
        store = Store("local", tmp_path)
        store.local = local
        rank = store.attach(writer(credit=16))
        assert write(rank, keys(80, "before"), first=10_000) == 80
        store.wait_for_disk()
        before = store.status()
        assert before.nvme_segments >= 5
        disk.fail("write", errno.ENOSPC, forever=True)
        for number in range(10):
            prompt = keys(32, f"prompt {number}")
            assert write(rank, prompt, first=100 * number + 1) == 32
            assert len(read(rank, prompt)) == 32
        full = store.wait_for(lambda found: found.write_errors > 10)
        assert full.written == before.written
        assert full.nvme_records >= before.nvme_records - SEGMENT // (SLOT + FRAME_BYTES)
        assert sum(len(read(rank, [key])) for key in keys(80, "before")) >= full.nvme_records
        disk.heal()

        versions = itertools.count(20_000)

        def writes_again(_: Status) -> bool:
            write(rank, keys(1, "again"), first=next(versions))
            return store.status().written > before.written

        store.wait_for(writes_again)
        rank.close()
