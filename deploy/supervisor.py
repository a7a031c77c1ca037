"""What surrounds the process that runs a private Ray: its folder, its descendants, and the certain end of both.

Owns run folders (`RunFolder`), the sweeping of those whose owner died, and the ending of whole process trees. Knows
neither Ray nor models. Linux only: it relies on child subreapers and /proc.

Invariants:
 1. Every process that descends from one that called `become_subreaper` stays below it, whoever else dies.
 2. After `end_descendants` none of them runs. Only processes of this tree are ever signalled, each by its id.
 3. A run folder is 0700 and locked by its owner for as long as that lives; only an unlocked one is swept.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

from tournant.workers.errors import ConfigError

PR_SET_CHILD_SUBREAPER = 36
MAX_PARENT_CHARS = 24  # Ray adds about 80 to it, and a socket's name may have 107
LOCK_NAME = "lock"
STAGING_AGE_S = 60.0


def become_subreaper() -> None:
    """From now on every descendant whose parent dies becomes a child of this process. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def descendants(pid: int) -> list[int]:
    """Ids of all processes below `pid`, those included that ended and wait to be reaped."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:
                continue  # it ended meanwhile
            parent = int(stat[stat.rindex(")") + 2 :].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def end_descendants(timeout_s: float = 10.0) -> list[int]:
    """Kill and reap every descendant of this process; returns those that outlived `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (running := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.01)
    return running


class RunFolder:
    """A private temporary folder that lives as long as this process. `path` is absolute and short.

    Making one sweeps what earlier runs of this user left behind. Raises OSError when it cannot be made.
    """

    def __init__(self, parent: Path | None = None) -> None:
        base = parent or Path(tempfile.gettempdir())
        self._base = base if parent or len(str(base)) <= MAX_PARENT_CHARS else Path("/tmp")
        self._prefix = f"tournant-{os.getuid()}-"
        self._sweep()
        staging = self._base / f"{self._prefix}{secrets.token_hex(4)}.new"
        staging.mkdir(mode=0o700)
        self._lock = os.open(staging / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = staging.rename(staging.with_suffix(""))  # only now can a sweep see it, and it is locked

    def remove(self) -> None:
        """Delete the folder with all that is in it. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def _sweep(self) -> None:
        name = re.compile(re.escape(self._prefix) + r"[0-9a-f]{8}(\.new)?")
        for entry in os.scandir(self._base):
            if not name.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
                continue
            found = entry.stat(follow_symlinks=False)
            new = entry.name.endswith(".new") and time.time() - found.st_mtime < STAGING_AGE_S
            if new or found.st_uid != os.getuid():
                continue
            if not _is_locked(Path(entry.path, LOCK_NAME)):
                shutil.rmtree(entry.path, ignore_errors=True)


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


def check_port(host: str, port: int) -> None:
    """Raises ConfigError unless a server could listen on this address now."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in addresses[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except UnicodeError:
        raise ConfigError(f"host is {host[:80]!r}; it must be a host name or an address") from None
    except OSError as error:
        raise ConfigError(
            f"cannot listen on port {port} of {host}: {error.strerror or error}; choose another with --port or --host"
        ) from None
