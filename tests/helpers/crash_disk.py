"""A disk in memory that remembers what was synced, and what a loss of power may leave of the rest.

A write, a new name, a rename and a removal are unsynced until their file or folder is synced. After a crash any subset
of the unsynced pages and name changes has happened; a page may be torn inside; what is lost reads as
zeros, or is beyond the end of the file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path

from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_io import FileSize

PageAt = tuple[int, int]  # inode, page


@dataclass(slots=True)
class _File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    dirty: set[int] = field(default_factory=set)  # pages

    def copy(self) -> _File:
        return _File(bytearray(self.data), self.synced, set(self.dirty))


@dataclass(frozen=True, slots=True)
class _NameChange:
    """name now means `inode` (None = nothing); `gone`: a name that ends with it."""

    name: str
    inode: int | None
    gone: str = ""

    def apply(self, names: dict[str, int]) -> None:
        if self.gone:
            names.pop(self.gone, None)
        if self.inode is None:
            names.pop(self.name, None)
        else:
            names[self.name] = self.inode


class CrashDisk:
    """See DiskIO. One folder; `after_change` is called after every call that changed something."""

    FOLDER = 1

    def __init__(self) -> None:
        self.files: dict[int, _File] = {}
        self.names_now: dict[str, int] = {}
        self.names_synced: dict[str, int] = {}
        self.changes: list[_NameChange] = []
        self.after_change: Callable[[], None] = lambda: None
        self._open: dict[int, int] = {}
        self._next = 10
        self._next_inode = 1

    # ---------------------------------------------------------------- DiskIO

    def open_folder(self, path: Path) -> int:
        return self.FOLDER

    def open_file(self, folder: int, name: str, *, create: bool = False, direct: bool = False) -> int:
        if name not in self.names_now:
            if not create:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            inode, self._next_inode = self._next_inode, self._next_inode + 1
            self.files[inode] = _File()
            self._change(_NameChange(name, inode))
        self._next += 1
        self._open[self._next] = self.names_now[name]
        return self._next

    def write(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        found, data = self.files[self._open[file]], b"".join(bytes(buffer) for buffer in buffers)
        found.data.extend(bytes(max(0, offset + len(data) - len(found.data))))
        found.data[offset : offset + len(data)] = data
        found.dirty |= set(range(offset // PAGE_BYTES, -(-(offset + len(data)) // PAGE_BYTES)))
        self.after_change()
        return len(data)

    def read(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        data, done = self.files[self._open[file]].data, 0
        for buffer in buffers:
            piece = data[offset + done : offset + done + len(buffer)]
            buffer[: len(piece)] = piece
            done += len(piece)
        return done

    def sync(self, file: int) -> None:
        if file == self.FOLDER:
            self.names_synced, self.changes = dict(self.names_now), []
        else:
            found = self.files[self._open[file]]
            found.synced, found.dirty = bytes(found.data), set()
        self.after_change()

    def rename(self, folder: int, old: str, new: str) -> None:
        self._change(_NameChange(new, self.names_now[old], gone=old))

    def unlink(self, folder: int, name: str) -> None:
        if name not in self.names_now:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        self._change(_NameChange(name, None))

    def names(self, folder: int) -> list[str]:
        return sorted(self.names_now)

    def size(self, folder: int, name: str) -> FileSize:
        length = len(self.files[self.names_now[name]].data)
        return FileSize(length, length)

    def free_bytes(self, folder: int) -> int:
        return 1 << 40

    def lock(self, file: int) -> bool:
        return True

    def close(self, file: int) -> None:
        self._open.pop(file, None)

    def _change(self, change: _NameChange) -> None:
        change.apply(self.names_now)
        self.changes.append(change)
        self.after_change()

    # ---------------------------------------------------------------- crashes

    def copy(self) -> CrashDisk:
        """The same disk at this moment, for a crash."""
        twin = CrashDisk()
        twin.files = {inode: file.copy() for inode, file in self.files.items()}
        twin.names_now, twin.names_synced = dict(self.names_now), dict(self.names_synced)
        twin.changes = list(self.changes)
        twin._next_inode = self._next_inode
        return twin

    def content(self) -> int:
        """Digest of all names and bytes."""
        return hash(tuple((name, bytes(self.files[inode].data)) for name, inode in sorted(self.names_now.items())))

    def name_states(self) -> Iterator[dict[str, int]]:
        """What the folder may list after a crash."""
        for keep in product((False, True), repeat=len(self.changes)):
            names = dict(self.names_synced)
            for change, kept in zip(self.changes, keep, strict=True):
                if kept:
                    change.apply(names)
            yield names

    def dirty_pages(self, names: dict[str, int]) -> list[PageAt]:
        """Unsynced pages of the files that still have a name."""
        return [(inode, page) for inode in sorted(set(names.values())) for page in sorted(self.files[inode].dirty)]

    def after_crash(
        self, names: dict[str, int], kept: frozenset[PageAt], torn: dict[PageAt, int], *, keep_length: bool
    ) -> CrashDisk:
        """The disk with these names, unsynced pages kept whole, and pages of which only the first bytes were written.

        keep_length: whether files have the length they had before, or end with the last page that was written.
        """
        disk = CrashDisk()
        disk.names_now, disk.names_synced = dict(names), dict(names)
        for inode in set(names.values()):
            before = self.files[inode]
            data = bytearray(before.synced)
            for page in sorted(before.dirty):
                start, stop = page * PAGE_BYTES, min((page + 1) * PAGE_BYTES, len(before.data))
                stop = stop if (inode, page) in kept else min(stop, start + torn.get((inode, page), 0))
                if stop > start:
                    data.extend(bytes(max(0, stop - len(data))))
                    data[start:stop] = before.data[start:stop]
            if keep_length:
                data.extend(bytes(len(before.data) - len(data)))
            disk.files[inode] = _File(data, bytes(data), set())
        disk._next_inode = self._next_inode
        return disk


def subsets(pages: Sequence[PageAt]) -> Iterator[frozenset[PageAt]]:
    """All subsets."""
    for count in range(len(pages) + 1):
        yield from (frozenset(some) for some in combinations(pages, count))
