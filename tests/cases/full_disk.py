"""A node store whose disk another program fills and frees again: every write fails while a file of that name is there.

Run as a module it is that store's process; `FullDiskStore` starts one, for a server.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tournant.cluster.node_store import StorePlan
from tournant.kvstore import server
from tournant.kvstore.disk_io import Buffers, RealDisk
from tournant.kvstore.shell import NvmePlace
from tournant.kvstore.store_process import START_S, StoreProcess, _flags, _wait_until_ready

REPO = Path(__file__).resolve().parent.parent.parent


class FullDisk(RealDisk):
    """full: the file that says so."""

    def __init__(self, full: Path) -> None:
        self._full = full

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        """See DiskIO."""
        if self._full.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(file, buffers, offset)


class FullDiskStore:
    """See `OwnStore`. folder: for the socket, and for the file `full` that a test makes and removes."""

    def __init__(self, folder: Path, plan: StorePlan) -> None:
        self.full = folder / "full"
        path = folder / "store" / "socket"
        ready, says_ready = os.pipe()
        command = [sys.executable, "-m", "tests.cases.full_disk", str(self.full), "--socket", str(path)]
        command += ["--ready-fd", str(says_ready), "--with-parent", str(os.getpid()), *_flags(plan.store, "--")]
        command += ["--nvme-folder", str(plan.nvme_folder), *_flags(plan.nvme, "--nvme-")]
        process = subprocess.Popen(command, pass_fds=[says_ready], cwd=REPO, stdin=subprocess.DEVNULL)
        self._store = StoreProcess(process, path)
        os.close(says_ready)
        try:
            _wait_until_ready(ready, START_S)
        except BaseException:
            self._store.kill()
            raise
        finally:
            os.close(ready)

    def socket(self) -> str:
        """Where engines attach."""
        return str(self._store.socket)

    def close(self) -> None:
        """End it."""
        self._store.stop()


def main(argv: Sequence[str]) -> int:
    """Be the store. argv: the name of the file, then the flags of kvstore/server.py."""
    server.NvmePlace = partial(NvmePlace, disk=FullDisk(Path(argv[0])))  # type: ignore[misc, assignment]
    return server.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
