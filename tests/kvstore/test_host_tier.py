"""The shared pool: what is sealed, what a forked child has of it, when it is there and when it is gone."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import pytest

from tests.kvstore.store_harness import exit_of, forked
from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.errors import StoreConfigError, StoreRefused
from tournant.kvstore.host_tier import HostMemory

PAGES = 1100  # more generations than fit into two pages


def mapped_memfds() -> set[int]:
    """Inodes of the memfds of stores that this process maps."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    fields = [line.split(maxsplit=5) for line in lines]
    return {int(one[4]) for one in fields if len(one) == 6 and one[5].startswith("/memfd:tournant-")}


def adopted(memory: HostMemory) -> HostMemory:
    return HostMemory.adopt(os.dup(memory.pool_fd), os.dup(memory.generations_fd))


def test_what_one_side_writes_the_other_reads() -> None:
    store = HostMemory.create(PAGES * PAGE_BYTES)
    client = adopted(store)
    assert list(client.generations[:PAGES]) == [1] * PAGES
    store.set_generations([(0, 5), (PAGES - 1, (1 << 64) - 1)])
    assert (client.generations[0], client.generations[PAGES - 1]) == (5, (1 << 64) - 1)
    client.slot(3, 5)[:] = b"hello"
    assert store.slot(3, 5) == b"hello"
    for page, length in ((PAGES, 1), (PAGES - 1, PAGE_BYTES + 1), (-1, 1), (0, -1)):
        with pytest.raises(ValueError, match="not in a pool"):
            client.slot(page, length)
    client.close()
    client.close()
    store.close()


def test_neither_size_nor_protection_can_be_changed() -> None:
    store = HostMemory.create(PAGES * PAGE_BYTES)
    for fd in (store.pool_fd, store.generations_fd):
        for size in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        mmap.mmap(store.generations_fd, PAGE_BYTES, flags=mmap.MAP_SHARED)
    with pytest.raises(PermissionError):
        os.pwrite(store.generations_fd, b"x", 0)
    store.close()


def test_all_of_it_is_in_memory_at_once() -> None:
    size = 64 << 20
    store = HostMemory.create(size)
    assert os.fstat(store.pool_fd).st_blocks * 512 >= size
    maps = Path("/proc/self/smaps").read_text(encoding="ascii").split("tournant-pool")[1].splitlines()
    resident = next(int(line.split()[1]) for line in maps if line.startswith("Rss:"))
    assert resident << 10 == size
    store.close()


def test_a_forked_child_has_none_of_it() -> None:
    store = HostMemory.create(PAGES * PAGE_BYTES)
    files = {os.fstat(fd).st_ino for fd in (store.pool_fd, store.generations_fd)}

    def body() -> int:
        return int(bool(files & mapped_memfds()))

    assert mapped_memfds() >= files
    assert exit_of(forked(body)) == 0
    store.close()


def test_only_the_mappings_of_the_store_itself_count(tmp_path: Path) -> None:
    """What else has the name of the project, such as a mapped file or another store, does not."""
    store, other = HostMemory.create(PAGE_BYTES), HostMemory.create(PAGE_BYTES)
    path = tmp_path / "tournant-memfd:"
    path.write_bytes(bytes(PAGE_BYTES))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        found = mapped_memfds()
        assert os.fstat(file.fileno()).st_ino not in found
    assert {os.fstat(one.pool_fd).st_ino for one in (store, other)} <= found
    assert os.fstat(store.pool_fd).st_ino != os.fstat(other.pool_fd).st_ino
    other.close()
    store.close()


def test_pages_are_locked_and_unlocked() -> None:
    calls: list[object] = []

    def lock(address: int, size: int) -> object:
        calls.append((address % PAGE_BYTES, size))
        return lambda: calls.append("unlocked")

    store = HostMemory.create(PAGES * PAGE_BYTES, lock)  # type: ignore[arg-type]
    assert calls == [(0, PAGES * PAGE_BYTES)]
    store.close()
    store.close()
    assert calls[1:] == ["unlocked"]


def test_more_than_there_is_is_refused() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreConfigError, match="ask for less"):
        HostMemory.create(1 << 50)
    assert set(os.listdir("/proc/self/fd")) == before


def passed(size: int, table_size: int, *, there: tuple[bool, bool] = (True, True)) -> tuple[int, int]:
    """Sealed memory as a store passes it."""
    fds = []
    for wanted, filled in zip((size, table_size), there, strict=True):
        fds.append(os.memfd_create("passed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(fds[-1], wanted)
        if filled:
            os.posix_fallocate(fds[-1], 0, wanted)
        fcntl.fcntl(fds[-1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fds[0], fds[1]


@pytest.mark.parametrize(
    ("size", "table_size", "there"),
    [
        (512 * PAGE_BYTES, PAGE_BYTES, (False, True)),
        (8 * PAGE_BYTES, PAGE_BYTES, (True, False)),
        (8 * PAGE_BYTES, 8 * 8, (True, True)),
        (8 * PAGE_BYTES, PAGE_BYTES - 3, (True, True)),
        (8 * PAGE_BYTES, 2 * PAGE_BYTES, (True, True)),
        (8 * PAGE_BYTES + 1, PAGE_BYTES, (True, True)),
        (600 * PAGE_BYTES, PAGE_BYTES, (True, True)),
        (0, 0, (False, False)),
    ],
)
def test_memory_that_no_store_makes_is_not_mapped(size: int, table_size: int, there: tuple[bool, bool]) -> None:
    fds = passed(size, table_size, there=there)
    with pytest.raises(StoreRefused, match="cannot be a pool"):
        HostMemory.adopt(*fds)
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_memory_as_a_store_makes_it_is_mapped() -> None:
    client = HostMemory.adopt(*passed(600 * PAGE_BYTES, 2 * PAGE_BYTES))
    assert (client.num_pages, len(client.generations)) == (600, 1024)
    client.close()


def test_memory_that_could_shrink_is_not_mapped() -> None:
    fds = [os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for _ in range(2)]
    for fd in fds:
        os.ftruncate(fd, PAGE_BYTES)
    with pytest.raises(StoreRefused, match="sealed: False"):
        HostMemory.adopt(*fds)
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
