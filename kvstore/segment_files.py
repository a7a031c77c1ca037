"""Open files of segments, shared by the threads of the NVMe tier.

Owns file descriptors and how many are kept open; which segments exist is the core's business. No call to the disk is
made under the lock, so one that hangs holds nobody else up.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tournant.kvstore.disk_io import DiskIO
from tournant.kvstore.nvme_folder import segment_name

MAX_OPEN = 64


@dataclass(slots=True)
class _Open:
    """A file. users: threads inside `use`; doomed: to be closed when the last of them leaves."""

    file: int
    users: int = 0
    doomed: bool = False


class SegmentFiles:
    """Files by segment number. At most MAX_OPEN stay open unused, the least recently used are closed first."""

    def __init__(self, disk: DiskIO, folder: int, *, direct: bool) -> None:
        self._disk, self._folder, self._direct = disk, folder, direct
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _Open] = OrderedDict()

    @contextmanager
    def use(self, segment: int, *, create: bool = False) -> Iterator[int]:
        """The file of a segment, open for the length of the block. Raises OSError when it cannot be opened."""
        entry, surplus = self._enter(segment), list[int]()
        if entry is None:
            file = self._disk.open_file(self._folder, segment_name(segment), create=create, direct=self._direct)
            entry = self._enter(segment, file)
            if entry is None or entry.file != file:
                surplus.append(file)
        if entry is None:
            raise OSError(f"segment {segment} could not be kept open")
        try:
            yield entry.file
        finally:
            with self._lock:
                entry.users -= 1
                if entry.doomed and not entry.users:
                    surplus.append(entry.file)
                surplus += self._excess()
            for file in surplus:
                self._disk.close(file)

    def drop(self, segment: int) -> None:
        """Close a segment's file as soon as nobody uses it."""
        with self._lock:
            entry = self._files.pop(segment, None)
            if entry is None:
                return
            entry.doomed = True
        if not entry.users:
            self._disk.close(entry.file)

    def close(self) -> None:
        """Close all files, those in use as soon as they are not."""
        for segment in list(self._files):
            self.drop(segment)

    def _enter(self, segment: int, file: int | None = None) -> _Open | None:
        """Become a user of the segment's open file; `file` becomes it if there is none."""
        with self._lock:
            entry = self._files.get(segment)
            if entry is None:
                if file is None:
                    return None
                entry = self._files[segment] = _Open(file)
            entry.users += 1
            self._files.move_to_end(segment)
            return entry

    def _excess(self) -> list[int]:
        """Take unused files beyond MAX_OPEN out of the table."""
        excess = []
        for segment, entry in list(self._files.items()):
            if len(self._files) <= MAX_OPEN:
                break
            if not entry.users:
                del self._files[segment]
                excess.append(entry.file)
        return excess
