"""The host pool: memory shared by a node store and its clients, and the table of slot generations.

Owns two memfds and their mappings: the pool, which every client may write (into slots lent to it, and nowhere else),
and the generations, one u64 per page, which clients map read-only. Decides nothing about slots (slots.py).

Invariants:
 1. Both are sealed against shrinking and growing, so that no process can make another's access a fault; the generations
    also against new writable mappings.
 2. All memory is there when the constructor returns: a slot never fails later for lack of it.
 3. Descriptors are close-on-exec and mappings are not inherited by forked children. Nothing has a name in a folder, so
    nothing is left when the last process that maps it ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np

from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.errors import StoreConfigError, StoreRefused

PageLock = Callable[[int, int], Callable[[], None]]
"""Locks (address, bytes) into memory for a device and returns what undoes it."""

GENERATION_BYTES = 8
FIRST_GENERATION = 1  # of slots.py
_SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE of linux/fcntl.h, which this Python has no name for
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MEMINFO = "/proc/meminfo"
_BLOCK_BYTES = 512  # of st_blocks


class HostMemory:
    """Both mappings of one process. pool: all bytes, writable; generations: u64 by page number.

    Made by `create` in the store and by `adopt` in a client. pool_fd, generations_fd: to be passed on, -1 in a client.
    """

    def __init__(
        self,
        pool: mmap.mmap,
        generations: mmap.mmap,
        fds: tuple[int, int] = (-1, -1),
        page_lock: PageLock | None = None,
    ) -> None:
        self._maps = [pool, generations]
        for mapping in self._maps:
            mapping.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # only where the system lets shared memory have huge pages
            pool.madvise(mmap.MADV_HUGEPAGE)
        self.pool = memoryview(pool)
        self.generations = memoryview(generations).cast("Q")
        self.pool_fd, self.generations_fd = fds
        self.num_pages = len(pool) // PAGE_BYTES
        self._unlock: Callable[[], None] | None = None
        if page_lock is not None:
            self._unlock = page_lock(np.frombuffer(self.pool, np.uint8).ctypes.data, len(pool))

    @classmethod
    def create(cls, host_bytes: int, page_lock: PageLock | None = None) -> HostMemory:
        """A new pool, zeroed, every page in memory. Raises StoreConfigError when the machine cannot give so much."""
        table_bytes = _table_bytes(host_bytes)
        available = _available_bytes()
        if host_bytes + table_bytes > available:
            raise StoreConfigError(
                f"host_bytes is {host_bytes}; this machine has {available} bytes of memory left: ask for less"
            )
        fds: list[int] = []
        try:
            maps = []
            for name, size in (("tournant-pool", host_bytes), ("tournant-generations", table_bytes)):
                fds.append(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
                os.posix_fallocate(fds[-1], 0, size)
                maps.append(mmap.mmap(fds[-1], size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
            fcntl.fcntl(fds[0], fcntl.F_ADD_SEALS, _FIXED | fcntl.F_SEAL_SEAL)
            fcntl.fcntl(fds[1], fcntl.F_ADD_SEALS, _FIXED | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            for fd in fds:
                os.close(fd)
            raise StoreConfigError(f"host_bytes is {host_bytes}; the machine does not give it: {error}") from error
        memory = cls(maps[0], maps[1], (fds[0], fds[1]), page_lock)
        np.frombuffer(memory.generations, np.uint64)[:] = FIRST_GENERATION
        return memory

    @classmethod
    def adopt(cls, pool_fd: int, generations_fd: int, page_lock: PageLock | None = None) -> HostMemory:
        """Map what a store has passed; the descriptors are closed in every case.

        Raises StoreRefused when they are not a sealed pool and its table, all of it in memory (of what is not, a page
        that is touched is a fault when the machine has none left), or cannot be mapped.
        """
        try:
            found = [os.fstat(fd) for fd in (pool_fd, generations_fd)]
            size, table_size = (one.st_size for one in found)
            sealed = all(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FIXED == _FIXED for fd in (pool_fd, generations_fd))
            there = all(one.st_blocks * _BLOCK_BYTES >= one.st_size for one in found)
            fits = size >= PAGE_BYTES and size % PAGE_BYTES == 0 and table_size == _table_bytes(size)
            if not (sealed and there and fits):
                raise StoreRefused(
                    f"the store passed memory of {size} and {table_size} bytes, sealed: {sealed}, all there: {there}; "
                    "it cannot be a pool and its generations; start the store anew, of the same version as this process"
                )
            shared = mmap.MAP_SHARED | mmap.MAP_POPULATE
            pool = mmap.mmap(pool_fd, size, flags=shared)
            table = mmap.mmap(generations_fd, table_size, flags=shared, prot=mmap.PROT_READ)
            return cls(pool, table, (-1, -1), page_lock)
        except OSError as error:
            raise StoreRefused(f"the pool of the store cannot be mapped: {error}") from error
        finally:
            os.close(pool_fd)
            os.close(generations_fd)

    def slot(self, page: int, length: int) -> memoryview:
        """The first `length` bytes of the slot that begins at a page. Raises ValueError outside the pool."""
        start = page * PAGE_BYTES
        if page < 0 or length < 0 or start + length > len(self.pool):
            raise ValueError(f"{length} bytes from page {page} on are not in a pool of {self.num_pages} pages")
        return self.pool[start : start + length]

    def set_generations(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Show (page, generation) pairs to everyone. In the store only."""
        generations = self.generations
        for page, generation in pairs:
            generations[page] = generation

    def close(self) -> bool:
        """Unmap. Memory that views of slots still show stays mapped until the last of them is gone; False then.

        Idempotent: a second call returns True.
        """
        if self._unlock is not None:
            self._unlock()
            self._unlock = None
        unmapped = True
        for view in (self.pool, self.generations):
            try:
                view.release()
            except BufferError:  # an array looks at it
                unmapped = False
        for mapping in self._maps:
            try:
                mapping.close()
            except BufferError:
                unmapped = False
        self._maps.clear()
        for fd in (self.pool_fd, self.generations_fd):
            if fd >= 0:
                os.close(fd)
        self.pool_fd = self.generations_fd = -1
        return unmapped


def _table_bytes(host_bytes: int) -> int:
    """Whole pages for the generations of a pool."""
    return -(-host_bytes // PAGE_BYTES * GENERATION_BYTES // PAGE_BYTES) * PAGE_BYTES


def _available_bytes() -> int:
    """What the system thinks a new program can get without swapping."""
    with open(_MEMINFO, encoding="ascii") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    return 1 << 62
