"""The user's own cache folder: where it is, who may read it, and digests of files remembered in it.

Owns the folder's permissions, file_digests.json and the locks; what other modules keep in sub-folders is theirs.

Invariants:
 1. Folders are made 0700 and files 0600; a folder that belongs to, or can be written by, other users is refused.
 2. A remembered digest is used only for the same (device, inode, size, mtime_ns, ctime_ns); a memo that is damaged or
    could have been written by others is ignored. Losing it costs one more read of the files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tournant.workers.errors import ConfigError, ModelFormatError

logger = logging.getLogger(__name__)

MEMO_NAME = "file_digests.json"
MEMO_FORMAT = 1
MAX_MEMO_BYTES = 4 << 20
MAX_MEMO_FILES = 8192
MEMO_WAIT_S = 5.0
LOCK_POLL_S = 0.05
HASH_THREADS = 4
TICK_NS = 20_000_000  # longer than the grain of file times on common file systems (one kernel tick, at most 10 ms)
_DIGEST = re.compile(r"[0-9a-f]{64}")


def default_cache_dir() -> Path:
    """The per-user cache folder of this platform; it may not exist yet."""
    base = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return base / "tournant"


def private_folder(path: Path) -> Path:
    """Make `path` and what lies above it (mode 0700) where missing, and return it.

    Raises ConfigError when it belongs to, or can be written by, another user, and OSError when it cannot be made.
    """
    for missing in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"cache folder {path} (owner {found.st_uid}, mode {found.st_mode & 0o777:o}) must belong to user "
            f"{os.getuid()} and be writable by no one else; choose another or correct it with chmod go-w"
        )
    return path


@contextmanager
def exclusive(path: Path, wait_s: float, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock file `path`; the lock ends with the process at the latest. `waiting` is called once if it is taken.

    Raises TimeoutError when it is not free within wait_s.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        told = False
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process holds {path} for more than {wait_s:g} s; wait for it or end it")
            if not told:
                waiting()
                told = True
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def file_stamp(found: os.stat_result) -> str:
    """What changes when a file does: device, inode, size, mtime_ns, ctime_ns."""
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"


def file_digests(paths: Sequence[Path], cache_dir: Path) -> list[bytes]:
    """SHA-256 (32 bytes) of each file, read at most once per content and then remembered in `cache_dir`.

    Raises OSError when a file cannot be read and ModelFormatError when one changes meanwhile. A memo that cannot be
    written is logged, not an error.
    """
    memo_path = cache_dir / MEMO_NAME
    memo = _read_memo(memo_path)
    stamps = [file_stamp(path.stat()) for path in paths]
    missing = [(path, stamp) for path, stamp in zip(paths, stamps, strict=True) if stamp not in memo]
    if missing:
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            new = dict(zip((stamp for _, stamp in missing), pool.map(_hash, missing), strict=True))
        memo |= new
        try:
            _remember(memo_path, new)
        except OSError as error:
            logger.warning("file digests cannot be remembered in %s: %s", memo_path, error)
    return [bytes.fromhex(memo[stamp]) for stamp in stamps]


def _hash(item: tuple[Path, str]) -> str:
    path, stamp = item
    with path.open("rb") as file:
        age = time.time_ns() - os.fstat(file.fileno()).st_ctime_ns
        if 0 <= age < TICK_NS:  # a later write must get another ctime, or the stamp could stand for two contents
            time.sleep((TICK_NS - age) / 1e9)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if file_stamp(os.fstat(file.fileno())) != stamp:
            raise ModelFormatError(f"{path} changed while it was being read; start again when it is complete")
    return digest


def _read_memo(path: Path) -> dict[str, str]:
    """Remembered digests in hex by file stamp; empty when there is no memo that can be trusted."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            private = found.st_uid == os.getuid() and not found.st_mode & 0o077
            if not stat.S_ISREG(found.st_mode) or not private or found.st_size > MAX_MEMO_BYTES:
                return {}
            memo = json.loads(file.read(MAX_MEMO_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    files = memo.get("files") if isinstance(memo, dict) and memo.get("format") == MEMO_FORMAT else None
    if not isinstance(files, dict):
        return {}
    return {stamp: digest for stamp, digest in files.items() if isinstance(digest, str) and _DIGEST.fullmatch(digest)}


def _remember(path: Path, new: dict[str, str]) -> None:
    """Add to the memo; beyond MAX_MEMO_FILES the oldest entries leave."""
    private_folder(path.parent)
    with exclusive(path.with_suffix(".lock"), MEMO_WAIT_S):
        files = dict(list((_read_memo(path) | new).items())[-MAX_MEMO_FILES:])
        aside = path.with_suffix(".new")
        aside.unlink(missing_ok=True)  # of a process killed right here
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            json.dump({"format": MEMO_FORMAT, "files": files}, file)
        os.replace(aside, path)
