"""The NVMe tier on real files: what is written comes back or misses, whatever the disk and the folder do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.faulty_disk import FaultyDisk
from tests.helpers.nvme import Pool, TestTier, header, payload
from tournant.kvstore.block import Version
from tournant.kvstore.checkpoint import CHECKPOINT_NAME
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_events import (
    CheckpointDone,
    CloseSegment,
    DeleteSegment,
    ReadRecords,
    RecordAt,
    RecordToWrite,
    SegmentCover,
    SegmentDeleted,
    WriteCheckpoint,
    WriteRecords,
)
from tournant.kvstore.disk_io import FolderRefused
from tournant.kvstore.errors import StoreConfigError
from tournant.kvstore.io_trace import compare
from tournant.kvstore.nvme_folder import LOCK_NAME, clear, ls, segment_name, verify
from tournant.kvstore.nvme_tier import NvmeConfig, NvmeTier
from tournant.kvstore.token_bucket import Pace

LENGTHS = (1, PAGE_BYTES, 5000, 3 * PAGE_BYTES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "nvme"


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def tier(folder: Path, disk: FaultyDisk) -> Iterator[TestTier]:
    tier = TestTier(folder, disk)
    yield tier
    disk.heal()
    assert tier.close()


def write(
    tier: TestTier, *numbers: int, segment: int = 1, offset: int = 0, length: int | None = None
) -> list[RecordAt]:
    """Records of these numbers, in one run; all must be written."""
    lengths = [LENGTHS[number % 4] if length is None else length for number in numbers]
    run = tuple(tier.to_write(number, size) for number, size in zip(numbers, lengths, strict=True))
    done = tier.do(WriteRecords(1000 + numbers[0], segment, offset, run))
    assert done.error is None
    assert done.written == len(numbers)
    return list(done.records)


def outcomes(tier: TestTier, records: list[RecordAt], io: int = 5000) -> list[str]:
    """Read records; "ok" only with the right bytes in the slot."""
    reads = tuple(tier.to_read(record) for record in records)
    done = tier.do(ReadRecords(io, reads))
    for read, result in zip(reads, done.results, strict=True):
        if result.outcome == "ok":
            data = payload(read.header.version.counter, read.header.length)
            assert tier.pool.get(read.slot, read.header.length) == data
    return [result.outcome for result in done.results]


# ---------------------------------------------------------------- life without faults


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("order", ["fcfs", "sstf", "scan"])
def test_what_is_written_is_read_and_found_again(folder: Path, direct: bool, order: str) -> None:
    tier = TestTier(folder, direct=direct, order=order)
    records = write(tier, *range(1, 9))
    records += write(tier, 9, offset=1 << 20)  # a hole before it
    records += write(tier, 10, segment=7)
    assert outcomes(tier, records) == ["ok"] * 10
    assert tier.do(CloseSegment(1, 1)).error is None
    assert tier.close()
    again = TestTier(folder, direct=direct)
    assert list(again.found.records) == records
    assert (again.found.next_segment, again.found.refused, again.found.corrupt) == (8, 0, 0)
    assert outcomes(again, records) == ["ok"] * 10
    assert again.close()


def test_modes_of_folder_and_files(folder: Path, tier: TestTier) -> None:
    write(tier, 1)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_another_version_key_or_part_is_never_served(tier: TestTier) -> None:
    record = write(tier, 3)[0]
    wrong = [
        replace(record, header=replace(record.header, version=Version(1, 3))),
        replace(record, header=replace(record.header, key=b"x" * 32)),
        replace(record, header=replace(record.header, checksum=1)),
        replace(record, header=replace(record.header, kv_form="fp32")),
        replace(record, segment=2),
        replace(record, offset=PAGE_BYTES),
    ]
    assert outcomes(tier, wrong) == ["corrupt"] * 6


def test_case_9_persistence(folder: Path) -> None:
    """Case 9: with persistence the blocks of the last run are there; without it the folder is empty at start."""
    tier = TestTier(folder)
    records = write(tier, *range(1, 21))
    assert tier.close()
    (folder / "notes.txt").write_text("not the store's")
    tier = TestTier(folder)
    assert outcomes(tier, records) == ["ok"] * 20
    assert tier.found.foreign_bytes > 0
    assert tier.close()
    tier = TestTier(folder, persist=False)
    assert (tier.found.records, tier.found.segments) == ((), ())
    assert sorted(path.name for path in folder.iterdir()) == [LOCK_NAME, "notes.txt"]
    assert tier.close()


def test_a_deleted_segment_is_gone(folder: Path, tier: TestTier) -> None:
    records = write(tier, 1, 2)
    assert tier.do(DeleteSegment(1, 1)) == SegmentDeleted(1, 1, None)
    assert tier.do(DeleteSegment(2, 1)).error is None
    assert not (folder / segment_name(1)).exists()
    assert outcomes(tier, records) == ["corrupt", "corrupt"]


def test_codec_of_each_record_is_its_own(folder: Path) -> None:
    tier = TestTier(folder, codec="lz4", pool=Pool(64))
    zeros = bytes(4 * PAGE_BYTES)
    items = (
        RecordToWrite(header(1, len(zeros), data=zeros), tier.pool.put(zeros)),
        tier.to_write(2, 3 * PAGE_BYTES),  # noise
        RecordToWrite(header(3, len(zeros), kv_form="fp8", data=zeros), tier.pool.put(zeros)),
    )
    records = tier.do(WriteRecords(1, 1, 0, items)).records
    assert [record.size // PAGE_BYTES for record in records] == [3, 5, 6]
    reads = tuple(tier.to_read(record) for record in records)
    assert [result.outcome for result in tier.do(ReadRecords(2, reads)).results] == ["ok"] * 3
    assert tier.pool.get(reads[0].slot, len(zeros)) == tier.pool.get(reads[2].slot, len(zeros)) == zeros
    assert tier.tier.stats().codec == {"bf16": ""}
    assert tier.close()
    assert verify(folder).stored_bytes < verify(folder).payload_bytes


def test_trace_and_merged_reads(folder: Path, disk: FaultyDisk) -> None:
    tier = TestTier(folder, disk, order="scan", workers=1, trace_requests=8)
    records = write(tier, *range(1, 9))
    hang = disk.hang("read")
    tier.tier.submit(ReadRecords(1, (tier.to_read(records[0]),)))
    assert hang.begun.wait(20)
    before = tier.tier.stats().calls
    tier.tier.submit(ReadRecords(2, tuple(tier.to_read(record) for record in records[:0:-1])))
    hang.release.set()
    assert [result.outcome for result in tier.wait(2).results] == ["ok"] * 7
    assert tier.tier.stats().calls - before == 2
    assert [request.position & (2**40 - 1) for request in tier.tier.trace()[-7:]] == [
        record.offset for record in records[:0:-1]
    ]
    assert {done.order: done.runs for done in compare(tier.tier.trace()[-7:])}["scan"] == 1
    assert tier.close()


# ---------------------------------------------------------------- what lies in the folder


def test_two_stores_never_share_a_folder(folder: Path, tier: TestTier) -> None:
    for use in (lambda: TestTier(folder), lambda: ls(folder), lambda: verify(folder), lambda: clear(folder)):
        with pytest.raises(FolderRefused, match="used by another process"):
            use()


def test_an_open_or_linked_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(FolderRefused, match="chmod 700"):
        TestTier(folder)
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(FolderRefused, match="link"):
        TestTier(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(FolderRefused, match="no folder"):
        TestTier(tmp_path / "file")
    with pytest.raises(FolderRefused, match="no folder"):
        ls(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def damage(folder: Path, kind: str) -> None:
    """Do something to the files of segments 1 and 2, each with records of 3, 4 and 5 pages."""
    first, second = folder / segment_name(1), folder / segment_name(2)
    data = bytearray(first.read_bytes())
    match kind:
        case "truncated in the last record":
            os.truncate(first, len(data) - 2 * PAGE_BYTES)
        case "truncated inside a page":
            os.truncate(first, len(data) - 100)
        case "zero-filled":
            first.write_bytes(bytes(len(data)))
        case "swapped":
            second.rename(folder / "aside")
            first.rename(second)
            (folder / "aside").rename(first)
        case "header flipped":
            data[20] ^= 1
            first.write_bytes(data)
        case "payload flipped":
            data[PAGE_BYTES + 20] ^= 1
            first.write_bytes(data)
        case "trailer flipped":
            data[2 * PAGE_BYTES + 20] ^= 1
            first.write_bytes(data)
        case "emptied":
            os.truncate(first, 0)
        case "symlink":
            first.rename(folder / "elsewhere")
            first.symlink_to("elsewhere")
        case "fifo":
            first.unlink()
            os.mkfifo(first)
        case "folder":
            first.unlink()
            first.mkdir()
        case "rubbish":
            first.write_bytes(os.urandom(len(data)))
        case _:
            raise ValueError(kind)


DAMAGE = {  # kind: (records of segment 1 found by a scan, corrupt, read ok)
    "truncated in the last record": (2, 1, 2),
    "truncated inside a page": (2, 1, 2),
    "zero-filled": (0, 0, 0),
    "header flipped": (2, 1, 2),
    "payload flipped": (3, 0, 2),
    "trailer flipped": (2, 1, 2),
    "emptied": (0, 0, 0),
    "symlink": (0, 1, 0),
    "fifo": (0, 1, 0),
    "folder": (0, 1, 0),
    "rubbish": (0, 1, 0),
}


@pytest.mark.parametrize("with_checkpoint", [False, True])
@pytest.mark.parametrize("kind", [*DAMAGE, "swapped"])
def test_damaged_files(folder: Path, kind: str, with_checkpoint: bool) -> None:
    tier = TestTier(folder)
    sizes = (PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES)
    records: list[RecordAt] = []
    for segment in (1, 2):
        run = tuple(tier.to_write(10 * segment + index, size) for index, size in enumerate(sizes))
        records += tier.do(WriteRecords(segment, segment, 0, run)).records
    if with_checkpoint:
        covers = tuple(SegmentCover(segment, 12 * PAGE_BYTES) for segment in (1, 2))
        assert tier.do(WriteCheckpoint(9, 3, covers, tuple(records))) == CheckpointDone(9, None)
    assert tier.close()
    damage(folder, kind)
    tier = TestTier(folder)
    assert tier.found.checkpoint == ""
    assert tier.found.next_segment == 3
    found, corrupt, good = DAMAGE.get(kind, (0, 3, 0))
    if not with_checkpoint:
        assert [record.segment for record in tier.found.records].count(1) == found
        assert tier.found.segments[0].corrupt == corrupt
    got = outcomes(tier, records)
    assert got[:3].count("ok") == good
    assert got[3:].count("ok") == (0 if kind == "swapped" else 3)
    assert "error" not in got
    assert tier.close()
    report = verify(folder)
    assert report.adopted == got.count("ok")
    assert bool(report.corrupt) == bool(corrupt or kind == "payload flipped")
    if kind == "folder":
        (folder / segment_name(1)).rmdir()
    clear(folder)
    assert {path.name for path in folder.iterdir()} <= {LOCK_NAME, "elsewhere"}


def test_records_of_another_form_or_format_are_refused(folder: Path) -> None:
    tier = TestTier(folder)
    run = (tier.to_write(1, 5000), tier.to_write(2, 5000, kv_form="fp8"), tier.to_write(3, 5000))
    records = tier.do(WriteRecords(1, 1, 0, run)).records
    assert (
        tier.do(WriteCheckpoint(2, 2, (SegmentCover(1, records[1].offset + records[1].size),), records)).error is None
    )
    assert tier.close()
    with (folder / segment_name(1)).open("r+b") as file:
        file.seek(records[2].offset + 8)
        file.write((9).to_bytes(4, "little"))
    tier = TestTier(folder, kv_form="bf16")
    assert list(tier.found.records) == [records[0]]
    assert (tier.found.refused, tier.found.corrupt) == (2, 0)
    assert tier.close()
    assert (verify(folder).adopted, verify(folder).refused, verify(folder).corrupt) == (2, 1, 0)


# ---------------------------------------------------------------- checkpoints


def test_a_checkpoint_spares_the_scan_and_the_rest_is_scanned(folder: Path) -> None:
    disk = FaultyDisk()
    tier = TestTier(folder, disk)
    records: list[RecordAt] = []
    for first in range(1, 1201, 60):
        records += write(tier, *range(first, first + 60), segment=first, length=1)
    covers = tuple(SegmentCover(record.segment, record.offset + record.size) for record in records[59::60])
    dropped = [record for record in records if record.header.version.counter % 10]
    assert tier.do(WriteCheckpoint(1, 5000, covers, tuple(dropped))).error is None
    later = write(tier, 2001, segment=1141, offset=1 << 20)
    assert tier.close()
    calls = disk.calls.get("read", 0)
    tier = TestTier(folder, disk)
    assert list(tier.found.records) == [*dropped, *later]
    assert tier.found.next_segment == 5000
    assert disk.calls["read"] - calls < 100  # 1,200 records take 2 reads each
    assert tier.close()


@pytest.mark.parametrize("at", [0, 8, 20, 40, -1])
def test_a_damaged_checkpoint_costs_only_a_scan(folder: Path, at: int) -> None:
    tier = TestTier(folder)
    records = write(tier, *range(1, 9))
    assert tier.do(WriteCheckpoint(1, 2, (SegmentCover(1, 1 << 20),), ())).error is None
    assert tier.close()
    path = folder / CHECKPOINT_NAME
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)
    tier = TestTier(folder)
    assert tier.found.checkpoint != ""
    assert list(tier.found.records) == records
    assert tier.close()


def test_a_truncated_or_linked_checkpoint_costs_only_a_scan(folder: Path, tmp_path: Path) -> None:
    tier = TestTier(folder)
    records = write(tier, 1, 2, 3)
    assert tier.do(WriteCheckpoint(1, 2, (SegmentCover(1, 1 << 20),), tuple(records))).error is None
    assert tier.close()
    path = folder / CHECKPOINT_NAME
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        tier = TestTier(folder, workers=1)
        assert tier.found.checkpoint != ""
        assert list(tier.found.records) == records
        assert tier.close()
    (tmp_path / "outside").write_bytes(whole)
    path.unlink()
    path.symlink_to(tmp_path / "outside")
    tier = TestTier(folder)
    assert "cannot be read" in tier.found.checkpoint
    assert tier.close()


@pytest.mark.parametrize("method", ["open_file", "write", "sync", "rename"])
def test_a_failed_checkpoint_leaves_the_old_one(folder: Path, tier: TestTier, disk: FaultyDisk, method: str) -> None:
    records = write(tier, 1, 2)
    cover = (SegmentCover(1, 1 << 20),)
    assert tier.do(WriteCheckpoint(1, 77, cover, tuple(records))).error is None
    disk.fail(method, errno.ENOSPC)
    assert tier.do(WriteCheckpoint(2, 88, cover, ())).error.kind == "full"
    shutil.copytree(folder, folder.parent / "copy")
    (folder.parent / "copy").chmod(0o700)
    again = TestTier(folder.parent / "copy")
    assert (again.found.next_segment, len(again.found.records)) == (77, 2)
    assert again.close()
    assert tier.do(WriteCheckpoint(3, 99, cover, tuple(records))).error is None


# ---------------------------------------------------------------- faults of the disk


@pytest.mark.parametrize("forever", [False, True])
@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, "io"), (errno.ENOSPC, "full"), (errno.EDQUOT, "full")])
def test_a_failed_write(tier: TestTier, disk: FaultyDisk, number: int, kind: str, forever: bool) -> None:
    good = write(tier, 1, 2)
    disk.fail("write", number, forever=forever)
    run = tuple(tier.to_write(number, 5000) for number in (3, 4))
    done = tier.do(WriteRecords(1, 1, 1 << 20, run))
    assert (done.error.kind, done.error.errno, done.written) == (kind, number, 0)
    assert outcomes(tier, good) == ["ok", "ok"]
    again = tier.do(WriteRecords(2, 2, 0, run))
    assert (again.error is None) is not forever


def test_a_disk_that_fills_up_inside_a_run(tier: TestTier, disk: FaultyDisk) -> None:
    """The first record and part of the second were written: only the first counts."""
    disk.short("write", 3 * PAGE_BYTES + 100)
    disk.fail("write", errno.ENOSPC, nth=2)
    run = tuple(tier.to_write(number, PAGE_BYTES) for number in (1, 2))
    done = tier.do(WriteRecords(1, 1, 0, run))
    assert (done.error.kind, done.written) == ("full", 1)
    assert outcomes(tier, list(done.records)) == ["ok"]


@pytest.mark.parametrize("most", [PAGE_BYTES, 5000, 8 * PAGE_BYTES - 1])
@pytest.mark.parametrize("forever", [False, True])
def test_short_writes_and_reads_are_carried_on(tier: TestTier, disk: FaultyDisk, most: int, forever: bool) -> None:
    disk.short("write", most, forever=forever)
    records = write(tier, *range(1, 9))
    disk.short("read", most, forever=forever)
    assert outcomes(tier, records) == ["ok"] * 8


@pytest.mark.parametrize("method", ["write", "read"])
def test_calls_that_move_nothing_end(tier: TestTier, disk: FaultyDisk, method: str) -> None:
    records = write(tier, 1)
    disk.short(method, 0, forever=True)
    if method == "write":
        done = tier.do(WriteRecords(1, 2, 0, (tier.to_write(2, 5000),)))
        assert (done.error.kind, done.written) == ("io", 0)
    else:
        assert outcomes(tier, records) == ["corrupt"]


def test_a_failed_read_is_no_damage(tier: TestTier, disk: FaultyDisk) -> None:
    records = write(tier, 1, 2)
    disk.fail("read")
    assert outcomes(tier, records[:1]) == ["error"]
    assert outcomes(tier, records) == ["ok", "ok"]


def test_one_bad_record_of_a_merged_read_fails_alone(folder: Path, disk: FaultyDisk) -> None:
    tier = TestTier(folder, disk, order="scan", workers=1)
    records = write(tier, *range(1, 6))
    hang = disk.hang("read")
    tier.tier.submit(ReadRecords(1, (tier.to_read(records[0]),)))
    assert hang.begun.wait(20)
    disk.fail("read", nth=1)  # the merged call
    disk.fail("read", nth=3)  # the second record alone
    tier.tier.submit(ReadRecords(2, tuple(tier.to_read(record) for record in records[1:])))
    hang.release.set()
    assert [result.outcome for result in tier.wait(2).results] == ["ok", "error", "ok", "ok"]
    assert tier.close()


@pytest.mark.parametrize("nth", [1, 2])
def test_a_failed_sync_is_told_once_and_not_retried(tier: TestTier, disk: FaultyDisk, nth: int) -> None:
    records = write(tier, 1)
    disk.fail("sync", nth=nth)
    calls = disk.calls.get("sync", 0)
    assert tier.do(CloseSegment(1, 1)).error.kind == "sync"
    assert disk.calls["sync"] - calls == nth
    assert outcomes(tier, records) == ["ok"]


def test_files_that_cannot_be_opened_or_removed(tier: TestTier, disk: FaultyDisk) -> None:
    disk.fail("open_file", errno.EMFILE)
    assert tier.do(WriteRecords(1, 1, 0, (tier.to_write(1, 10),))).error.kind == "io"
    assert tier.do(CloseSegment(2, 99)).error.kind == "io"
    record = write(tier, 1)[0]
    disk.fail("unlink", errno.EROFS)
    assert tier.do(DeleteSegment(3, 1)).error.errno == errno.EROFS
    assert outcomes(tier, [record]) == ["ok"]


@pytest.mark.parametrize("method", ["write", "read", "sync"])
def test_a_hung_call_holds_nobody_up(folder: Path, disk: FaultyDisk, method: str) -> None:
    tier = TestTier(folder, disk, workers=2)
    records = write(tier, 1, 2)
    hang = disk.hang(method)
    if method == "write":
        tier.tier.submit(WriteRecords(1, 2, 0, (tier.to_write(3, 10),)))
    elif method == "read":
        tier.tier.submit(ReadRecords(1, (tier.to_read(records[0]),)))
    else:
        tier.tier.submit(CloseSegment(1, 1))
    assert hang.begun.wait(20)
    assert outcomes(tier, records) == ["ok", "ok"]
    write(tier, 4, segment=3)
    assert not tier.tier.close(0.05)
    with pytest.raises(FolderRefused):  # its call may still land in the folder
        TestTier(folder)
    hang.release.set()
    assert tier.close()
    assert tier.events.empty()  # nothing comes after close
    again = TestTier(folder)
    assert outcomes(again, records) == ["ok", "ok"]
    assert again.close()


def test_slow_syncs_leave_threads_for_reads(folder: Path, disk: FaultyDisk) -> None:
    tier = TestTier(folder, disk, workers=2)
    records = write(tier, 1)
    hangs = [disk.hang("sync", nth=nth) for nth in (1, 2)]
    for io in (1, 2):
        tier.tier.submit(CloseSegment(io, 1))
    assert hangs[0].begun.wait(20)
    assert outcomes(tier, records) == ["ok"]
    assert tier.tier.stats().queued == 1
    for hang in hangs:
        hang.release.set()
    assert [tier.wait(io).error for io in (1, 2)] == [None, None]
    assert tier.close()


def test_what_an_earlier_read_left_in_memory_is_not_taken(folder: Path) -> None:
    """The file is cut after a good read; header, trailer and payload of it still lie in the buffers."""
    tier = TestTier(folder, workers=1, direct=False)
    read = tier.to_read(write(tier, 1)[0])
    assert tier.do(ReadRecords(1, (read,))).results[0].outcome == "ok"
    os.truncate(folder / segment_name(1), PAGE_BYTES)
    assert tier.do(ReadRecords(2, (read,))).results[0].outcome == "corrupt"
    assert tier.close()


def test_close_answers_what_has_not_begun(folder: Path, disk: FaultyDisk) -> None:
    tier = TestTier(folder, disk, workers=1)
    records = write(tier, 1, 2)
    hang = disk.hang("read")
    tier.tier.submit(ReadRecords(1, tuple(tier.to_read(record) for record in records)))
    assert hang.begun.wait(20)
    tier.tier.submit(WriteRecords(2, 2, 0, (tier.to_write(3, 10),)))
    for io, instruction in enumerate((CloseSegment(3, 1), DeleteSegment(4, 9), WriteCheckpoint(5, 1, (), ())), 3):
        assert tier.tier.submit(instruction), io
    assert not tier.tier.close(0.05)
    assert [tier.wait(io).error.message for io in (2, 3, 4, 5)] == ["the tier was closed"] * 4
    assert not tier.tier.submit(DeleteSegment(6, 1))
    hang.release.set()
    assert tier.close()


def test_the_queue_is_bounded(folder: Path, disk: FaultyDisk) -> None:
    tier = TestTier(folder, disk, workers=1, queue_limit=3)
    records = write(tier, 1)
    hang = disk.hang("read")
    read = tier.to_read(records[0])
    assert tier.tier.submit(ReadRecords(1, (read,)))
    assert hang.begun.wait(20)
    assert [tier.tier.submit(ReadRecords(io, (read,))) for io in (2, 3, 4, 5)] == [True, True, True, False]
    assert tier.tier.submit(DeleteSegment(6, 9))
    hang.release.set()
    for io in (1, 2, 3, 4, 6):
        tier.wait(io)
    assert tier.close()
    assert tier.events.empty()


def test_no_direct_io_means_buffered(folder: Path, disk: FaultyDisk) -> None:
    disk.fail("open_file", errno.EINVAL, nth=2)  # the first is the lock
    tier = TestTier(folder, disk)
    assert not tier.tier.direct
    records = write(tier, 1, 2)
    assert outcomes(tier, records) == ["ok", "ok"]
    assert tier.close()


def test_a_receiver_that_fails_stops_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: object) -> None:
        raise RuntimeError("receiver")

    tier = NvmeTier(folder, NvmeConfig(workers=1), Pool(8).view, fail)
    tier.open()
    assert tier.submit(DeleteSegment(1, 1))
    assert tier.submit(DeleteSegment(2, 2))
    assert tier.close()
    assert "receiver" in caplog.text


# ---------------------------------------------------------------- what is refused before it begins


def test_impossible_instructions_are_refused(tier: TestTier) -> None:
    good = tier.to_write(1, 5000)
    read = tier.to_read(write(tier, 1)[0])
    for wrong in (
        WriteRecords(1, 1, 100, (good,)),
        WriteRecords(1, -1, 0, (good,)),
        WriteRecords(1, 1, 1 << 40, (good,)),
        WriteRecords(1, 1, 0, ()),
        WriteRecords(1, 1, 0, (good,) * 65),
        WriteRecords(1, 1, 0, (replace(good, slot=4000),)),
        WriteRecords(1, 1, 0, (replace(good, header=replace(good.header, key=b"")),)),
        ReadRecords(1, ()),
        ReadRecords(1, (replace(read, size=4096),)),
        ReadRecords(1, (replace(read, size=read.size + 4096),)),
        ReadRecords(1, (replace(read, slot=-1),)),
    ):
        with pytest.raises(ValueError, match=r"\d|no reads"):
            tier.tier.submit(wrong)
    assert tier.tier.stats().queued == 0


def test_configuration_is_checked() -> None:
    for wrong in ({"workers": 0}, {"order": "clook"}, {"codec": "zip"}, {"queue_limit": 0}, {"kv_form": ""}):
        with pytest.raises(StoreConfigError, match="must"):
            NvmeConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="page"):
        NvmeTier(Path("/nowhere"), NvmeConfig(), memoryview(bytearray(8192))[1:], print)


def test_an_emulated_disk_has_a_pace_for_reads_and_one_for_writes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[float, list[int]]] = []

    class Noted(Pace):
        def __init__(self, per_s: float) -> None:
            super().__init__(0)
            self.spent: list[int] = []
            made.append((per_s, self.spent))

        def spend(self, amount: int) -> None:
            self.spent.append(amount)

    monkeypatch.setattr("tournant.kvstore.nvme_tier.Pace", Noted)
    tier = TestTier(folder, bytes_per_s=5_000_000)
    records = write(tier, 1, 2, 3)
    assert outcomes(tier, records[:2]) == ["ok"] * 2
    assert tier.close()
    (read_rate, read), (write_rate, written) = made
    assert read_rate == write_rate == 5_000_000
    assert sum(written) == sum(record.size for record in records)
    assert sum(read) == sum(record.size for record in records[:2])
