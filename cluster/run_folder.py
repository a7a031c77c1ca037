"""Private temporary folders of running services, and what can be found in them.

Owns their names, locks, sweeping, and where in them a node store's socket lies. Linux only.

Invariants:
 1. A run folder is 0700 and locked by its owner for as long as that lives; only an unlocked one is swept.
 2. Folders and files of other users are neither entered nor removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
from pathlib import Path

MAX_SOCKET_CHARS = 107
BELOW_PARENT_CHARS = 85  # of a socket of Ray's at most (local_ray.py), without the digits of the user's id
LOCK_NAME = "lock"
STAGING_AGE_S = 60.0
STORE_SOCKET = Path("kv", "socket")  # of a node store, in a run folder


def temporary_folder() -> Path:
    """Where run folders are made: the system's temporary folder if its path is short enough for sockets, else /tmp."""
    base = Path(tempfile.gettempdir())
    longest = len(os.fsencode(base)) + BELOW_PARENT_CHARS + len(str(os.getuid()))
    return base if longest <= MAX_SOCKET_CHARS else Path("/tmp")


def store_sockets(parent: Path | None = None) -> list[Path]:
    """Sockets of node stores in run folders of this user, those of stores that have died included."""
    pattern = f"tournant-{os.getuid()}-????????/{STORE_SOCKET}"
    return sorted(path for path in (parent or temporary_folder()).glob(pattern) if path.is_socket())


class RunFolder:
    """A private temporary folder that lives as long as this process. `path` is absolute and short.

    name: eight hexadecimal digits, of a folder that a process which has ended may have left and that is gone on with;
    None = a new one. Making one sweeps what else earlier runs of this user left behind. Raises OSError when it cannot
    be made.
    """

    def __init__(self, parent: Path | None = None, name: str | None = None) -> None:
        self._base = parent or temporary_folder()
        self._prefix = f"tournant-{os.getuid()}-"
        path = self._base / f"{self._prefix}{name or secrets.token_hex(4)}"
        self._sweep(path.name)
        if name is not None and path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid():
            self._lock = _locked(path)
            self.path = path
            return
        staging = path.with_suffix(".new")
        staging.mkdir(mode=0o700)
        self._lock = _locked(staging)
        self.path = staging.rename(path)  # only now can a sweep see it, and it is locked

    def remove(self) -> None:
        """Delete the folder with all that is in it. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def _sweep(self, kept: str) -> None:
        name = re.compile(re.escape(self._prefix) + r"[0-9a-f]{8}(\.new)?")
        for entry in os.scandir(self._base):
            if not name.fullmatch(entry.name) or entry.name == kept or not entry.is_dir(follow_symlinks=False):
                continue
            found = entry.stat(follow_symlinks=False)
            new = entry.name.endswith(".new") and time.time() - found.st_mtime < STAGING_AGE_S
            if new or found.st_uid != os.getuid():
                continue
            if not _is_locked(Path(entry.path, LOCK_NAME)):
                shutil.rmtree(entry.path, ignore_errors=True)


def _locked(folder: Path) -> int:
    """The descriptor that holds the lock of a folder. Raises BlockingIOError while another process holds it."""
    lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
