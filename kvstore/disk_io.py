"""The system calls of the NVMe tier behind one protocol, so that tests can put faults and crashes in their place.

Owns flags and modes (folder 0700, files 0600, no symlink followed, everything close-on-exec), the probe for direct I/O,
and what is done about short reads and writes. Knows nothing of records.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tournant.kvstore.config import PAGE_BYTES

Buffers = Sequence[memoryview]

_COMMON = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a fifo under one of our names must not block
PROBE_NAME = "probe"


class FolderRefused(RuntimeError):  # noqa: N818 - the store said no
    """The folder cannot be the store's: another store uses it, others could write to it, or it is no folder."""


@dataclass(frozen=True, slots=True)
class FileSize:
    """length: of the file; allocated: what it takes of the disk, holes left out; both in bytes."""

    length: int
    allocated: int


class DiskIO(Protocol):
    """System calls on one folder. Every method may raise OSError; folders and files are numbers until closed."""

    def open_folder(self, path: Path) -> int:
        """Open a folder, made with mode 0700 if there is none. Raises FolderRefused when it is not safely ours."""
        ...

    def open_file(self, folder: int, name: str, *, create: bool = False, direct: bool = False) -> int:
        """Open a regular file for reading and writing. Anything else under that name is OSError."""
        ...

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        """pwritev: bytes written, which may be fewer than asked."""
        ...

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        """preadv: bytes read, 0 at the end of the file."""
        ...

    def sync(self, file: int) -> None:
        """fsync of a file or a folder."""
        ...

    def rename(self, folder: int, old: str, new: str) -> None:
        """Rename within the folder, over what has the new name."""
        ...

    def unlink(self, folder: int, name: str) -> None:
        """Remove a name."""
        ...

    def names(self, folder: int) -> list[str]:
        """Names in the folder, sorted."""
        ...

    def size(self, folder: int, name: str) -> FileSize:
        """Size of whatever has this name; links are not followed."""
        ...

    def free_bytes(self, folder: int) -> int:
        """Room on the folder's file system for a process without privileges."""
        ...

    def lock(self, file: int) -> bool:
        """Take the exclusive lock of a file, held until it is closed. False when another process has it."""
        ...

    def close(self, file: int) -> None:
        """Close a file or folder."""
        ...


class RealDisk:
    """The file system."""

    def open_folder(self, path: Path) -> int:
        """See DiskIO."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST):
                raise FolderRefused(f"{path} is a link or no folder; name the folder itself") from None
            raise
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            os.close(folder)
            raise FolderRefused(
                f"{path} has mode {stat.S_IMODE(found.st_mode):04o} and owner {found.st_uid}; it must belong to user "
                f"{os.geteuid()} with mode 0700 (chmod 700), because whoever can write there can replace blocks"
            )
        if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
            os.close(folder)
            raise FolderRefused(f"{path} cannot be written to; name a folder on a disk that can, with mode 0700")
        return folder

    def open_file(self, folder: int, name: str, *, create: bool = False, direct: bool = False) -> int:
        """See DiskIO."""
        flags = os.O_RDWR | _COMMON | (os.O_CREAT if create else 0) | (os.O_DIRECT if direct else 0)
        file = os.open(name, flags, 0o600, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, f"{name} is no regular file")
        return file

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        """See DiskIO."""
        return os.pwritev(file, buffers, offset)

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        """See DiskIO."""
        return os.preadv(file, buffers, offset)

    def sync(self, file: int) -> None:
        """See DiskIO."""
        os.fsync(file)

    def rename(self, folder: int, old: str, new: str) -> None:
        """See DiskIO."""
        os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)

    def unlink(self, folder: int, name: str) -> None:
        """See DiskIO."""
        os.unlink(name, dir_fd=folder)

    def names(self, folder: int) -> list[str]:
        """See DiskIO."""
        return sorted(os.listdir(folder))

    def size(self, folder: int, name: str) -> FileSize:
        """See DiskIO."""
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return FileSize(found.st_size, found.st_blocks * 512)

    def free_bytes(self, folder: int) -> int:
        """See DiskIO."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    def lock(self, file: int) -> bool:
        """See DiskIO."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self, file: int) -> None:
        """See DiskIO."""
        os.close(file)


@contextmanager
def opened(disk: DiskIO, folder: int, name: str, *, create: bool = False, direct: bool = False) -> Iterator[int]:
    """A file, closed at the end of the block."""
    file = disk.open_file(folder, name, create=create, direct=direct)
    try:
        yield file
    finally:
        disk.close(file)


def write_all(disk: DiskIO, file: int, buffers: Buffers, offset: int) -> tuple[int, OSError | None]:
    """Write all buffers, whole pages from a page on, carrying on after short writes. Returns (bytes written, error).

    Direct I/O cannot go on inside a page, so a page written in part is written again.
    """
    total = sum(len(buffer) for buffer in buffers)
    done = stalls = 0
    while done < total:
        try:
            count = disk.write(file, _after(buffers, done), offset + done)
        except OSError as error:
            return done, error
        step = count if done + count >= total else count // PAGE_BYTES * PAGE_BYTES
        stalls = 0 if step else stalls + 1
        if stalls > 2:
            return done, OSError(errno.EIO, f"writing stopped at offset {offset + done} without an error")
        done += step
    return done, None


def read_all(disk: DiskIO, file: int, buffers: Buffers, offset: int) -> int:
    """Fill all buffers from `offset`, a page border, on, carrying on after short reads. Returns the bytes read: fewer
    than asked only at the end of the file. Raises OSError.
    """
    total = sum(len(buffer) for buffer in buffers)
    done = stalls = 0
    while done < total:
        count = disk.read(file, _after(buffers, done), offset + done)
        step = count if done + count >= total else count // PAGE_BYTES * PAGE_BYTES
        stalls = 0 if step else stalls + 1
        if count == 0 or stalls > 2:
            return done + count
        done += step
    return done


def page_buffer(pages: int) -> memoryview:
    """Zeroed memory that begins at a page, as direct I/O wants it."""
    return memoryview(mmap.mmap(-1, pages * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def direct_works(disk: DiskIO, folder: int) -> bool:
    """Whether a page can be written and read back with direct I/O in this folder. False for a full or failing disk:
    buffered I/O then says itself what is wrong.
    """
    ours, theirs = page_buffer(1), page_buffer(1)
    ours[:] = bytes(range(256)) * (PAGE_BYTES // 256)
    works = False
    try:
        with opened(disk, folder, PROBE_NAME, create=True, direct=True) as file:
            wrote = disk.write(file, [ours], 0) == PAGE_BYTES
            works = wrote and disk.read(file, [theirs], 0) == PAGE_BYTES and ours == theirs
        disk.unlink(folder, PROBE_NAME)
    except OSError:
        return works
    return works


def _after(buffers: Buffers, skip: int) -> Buffers:
    """The buffers without their first `skip` bytes."""
    if not skip:
        return buffers
    rest = []
    for buffer in buffers:
        if skip < len(buffer):
            rest.append(buffer[skip:])
        skip = max(0, skip - len(buffer))
    return rest
