"""A small file of secrets that is read again when it has changed.

Invariants:
 1. What `current` returns was valid when it was read; a new content that is not, or a file that is gone, changes
    nothing and is logged once, without any of its content.
 2. A change that was made CHECK_S before `current` is called is in what it returns.
 3. A file that everybody on the machine can read, or a group can change, is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from tournant.workers.errors import ConfigError

CHECK_S = 1.0
MAX_FILE_BYTES = 1 << 20
FORBIDDEN_MODE = 0o027  # others may do nothing, the group may read: a mounted secret belongs to root and a group
Content = TypeVar("Content")
Stamp = tuple[int, int, int, int, int]

logger = logging.getLogger("tournant.access")


def read_secret(path: Path) -> tuple[bytes, Stamp]:
    """What a file holds and what tells it from a later one. Raises ConfigError, without any of the content."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe must not be waited for
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{path} is no file")
            mode = stat.S_IMODE(found.st_mode)
            if mode & FORBIDDEN_MODE:
                raise ConfigError(
                    f"{path} has mode {mode:04o}, with which others can get at its keys; make it 0600, or 0640 for a "
                    f"group that may read it (chmod 600 {path})"
                )
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    return content, _stamp(found)


def _stamp(found: os.stat_result) -> Stamp:
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode)


class WatchedFile(Generic[Content]):
    """See the module. parse: makes something of the content, raises ConfigError without any of it.

    Reading it the first time is part of making one, and raises ConfigError.
    """

    def __init__(
        self, path: Path, parse: Callable[[Path, bytes], Content], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._parse, self._clock = path, parse, clock
        content, self._stamp = read_secret(path)
        self._current = parse(path, content)
        self._next_check = clock() + CHECK_S
        self._failed: Stamp | bool | None = False  # the stamp of what was refused, None = there was no file
        self._reading: asyncio.Task[None] | None = None

    async def current(self) -> Content:
        """What the file holds, by the last valid content."""
        now = self._clock()
        if self._reading is None and now >= self._next_check:
            self._next_check = now + CHECK_S
            stamp = self._look()
            if stamp not in (self._stamp, self._failed):
                self._reading = asyncio.get_running_loop().create_task(self._read(stamp))
        if self._reading is not None:
            await asyncio.shield(self._reading)
        return self._current

    def _look(self) -> Stamp | None:
        try:
            return _stamp(self._path.stat())
        except OSError:
            return None

    async def _read(self, seen: Stamp | None) -> None:
        try:
            content, stamp = await asyncio.to_thread(read_secret, self._path)
            self._current = await asyncio.to_thread(self._parse, self._path, content)
            self._stamp, self._failed = stamp, False
            logger.info("%s has changed and was read again", self._path)
        except ConfigError as error:
            self._failed = seen
            logger.error("%s; what was read from it before still holds", str(error).replace("\n", "; "))
        finally:
            self._reading = None
