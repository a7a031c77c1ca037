"""A file without a name for tiles that left memory: of one call, mode 0600, gone with its descriptor.

Owns the file, which places of it are free, and the words of its errors. Which tile goes there is tile_ledger.py's
business.

Where the file system can, the file never has a name, so that the end of the process, kill -9 included, is its end.
Elsewhere it is made under an unpredictable name that is removed at once; a process that is killed between the two
leaves an empty file, which the next spill file in that folder removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import tempfile
import threading
from pathlib import Path

from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_io import DiskIO, RealDisk, page_buffer, read_all, write_all

UNSUPPORTED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


class SpillError(OSError):
    """A spill file cannot be made, written or read; the message names the folder and what to do."""


def spill_folder() -> Path:
    """Where spill files are made unless told otherwise: /var/tmp, which is on a disk, else the temporary folder."""
    disk = Path("/var/tmp")
    return disk if disk.is_dir() and os.access(disk, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


class SpillFile:
    """Places of whole pages in one file. Any thread may call any method; a place is written and read by one at a time.

    folder: None = `spill_folder`; disk: the system calls; direct: see `bypass_page_cache`, what is written and read
    must begin at a page then. Raises SpillError; nothing is left then.
    """

    def __init__(self, folder: Path | None = None, disk: DiskIO | None = None, *, direct: bool = False) -> None:
        self._folder = folder or spill_folder()
        self._disk = disk or RealDisk()
        self._lock = threading.Lock()
        self._free: dict[int, list[int]] = {}
        self._end = 0
        try:
            self._file = _open(self._folder)
        except OSError as error:
            raise SpillError(
                error.errno, f"no spill file can be made in {self._folder}: {error.strerror}; name another folder"
            ) from error
        if direct:
            bypass_page_cache(self._file)

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"a spill file in {self._folder}"

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode: what tells this file from every other one."""
        found = os.fstat(self._file)
        return found.st_dev, found.st_ino

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._end

    def take(self, num_bytes: int) -> int:
        """A free place of `num_bytes`, whole pages; its offset."""
        if num_bytes <= 0 or num_bytes % PAGE_BYTES:
            raise ValueError(f"a place has {num_bytes} bytes; it must have whole pages of {PAGE_BYTES}")
        with self._lock:
            if free := self._free.get(num_bytes):
                return free.pop()
            offset, self._end = self._end, self._end + num_bytes
            return offset

    def give_back(self, offset: int, num_bytes: int) -> None:
        """A place of `take` is free again."""
        with self._lock:
            self._free.setdefault(num_bytes, []).append(offset)

    def write(self, offset: int, data: memoryview) -> None:
        """Fill a place. Raises SpillError; what the place holds is undefined then."""
        done, error = write_all(self._disk, self._file, [data], offset)
        if error is not None:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = (
                "free some, name another folder, or give more RAM, so that less is spilled" if full else "see the disk"
            )
            raise SpillError(
                error.errno,
                f"{done} of {len(data)} bytes were spilled to {self._folder}, whose file is to have {self._end}: "
                f"{error.strerror}; {advice}",
            ) from error

    def read(self, offset: int, data: memoryview) -> None:
        """Read a place back. Raises SpillError."""
        try:
            done = read_all(self._disk, self._file, [data], offset)
        except OSError as error:
            message = f"what was spilled cannot be read back from {self._folder}: {error.strerror}; see the disk"
            raise SpillError(error.errno, message) from error
        if done != len(data):
            raise SpillError(errno.EIO, f"{done} of {len(data)} bytes that were spilled came back from {self._folder}")

    def close(self) -> None:
        """End the file. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            self._disk.close(file)


def bypass_page_cache(file: int) -> None:
    """Let a file be read and written without the page cache from now on, where its file system can."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(file, [page_buffer(1)], 0)
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)


def _open(folder: Path) -> int:
    _sweep(folder)
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in UNSUPPORTED or not folder.is_dir():
            raise
    path = folder / f"{_prefix()}{secrets.token_hex(16)}"
    file = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    _unlink(path)
    return file


def _prefix() -> str:
    return f"tournant-spill-{os.getuid()}-"


def _sweep(folder: Path) -> None:
    """Remove what killed processes left. Whoever still makes such a file is about to remove its name, too."""
    name = re.compile(re.escape(_prefix()) + "[0-9a-f]{32}")
    for path in Path(folder).iterdir():
        if name.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                found = path.lstat()
                if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
                    path.unlink()


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)  # another process may sweep it first
