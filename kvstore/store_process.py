"""Starting and ending a node store process from a parent.

Owns the child process; the parent keeps it as long as it wants a store and starts another when it has died. The store
ends by itself when the parent does.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

from tournant.kvstore.config import StoreConfig
from tournant.kvstore.errors import StoreConfigError, StoreUnavailable
from tournant.kvstore.nvme_tier import NvmeConfig
from tournant.kvstore.server import READY

START_S = 60.0
STOP_S = 15.0


@dataclass(frozen=True, slots=True)
class StoreProcess:
    """A running store. process: the child; socket: where clients attach."""

    process: subprocess.Popen[bytes]
    socket: Path

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def stop(self, timeout_s: float = STOP_S) -> int:
        """Let it copy down what is dirty and end; killed when it takes longer. Returns the exit code. Idempotent."""
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.wait()

    def kill(self) -> None:
        """End it at once: what was only in its pool is gone. Works on a stopped process."""
        self.process.kill()
        self.process.wait()


def start_store(
    config: StoreConfig,
    socket: Path,
    *,
    nvme_folder: Path | None = None,
    nvme: NvmeConfig | None = None,
    tenant_check: bytes = b"",
    drain_s: float = 10.0,
    timeout_s: float = START_S,
) -> StoreProcess:
    """Start a store and wait until clients can attach.

    Raises StoreConfigError with what the store said when it cannot start, StoreUnavailable when it is not ready by
    then; no process is left in both cases.
    """
    command = [sys.executable, "-P", "-m", "tournant.kvstore.server", "--socket", str(socket)]
    command += ["--drain-s", str(drain_s), "--with-parent", str(os.getpid())]
    command += _flags(config, "--")
    if nvme_folder is not None:
        command += ["--nvme-folder", str(nvme_folder), *_flags(NvmeConfig() if nvme is None else nvme, "--nvme-")]
    ready, says_ready = os.pipe()
    check, gives_check = os.pipe()
    os.write(gives_check, tenant_check)
    os.close(gives_check)
    command += ["--ready-fd", str(says_ready), "--tenant-check-fd", str(check)]
    try:
        process = subprocess.Popen(  # its own session: Ctrl-C at a terminal is its parent's to understand
            command, pass_fds=[says_ready, check], stdin=subprocess.DEVNULL, start_new_session=True
        )
    finally:
        os.close(says_ready)
        os.close(check)
    try:
        _wait_until_ready(ready, timeout_s)
        return StoreProcess(process, socket)
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        os.close(ready)


def _wait_until_ready(ready: int, timeout_s: float) -> None:
    """The store writes one line: that it is ready, or why it cannot start."""
    end = time.monotonic() + timeout_s
    said = b""
    while not said.endswith(b"\n"):
        if not select.select([ready], [], [], max(0.0, end - time.monotonic()))[0]:
            raise StoreUnavailable(f"the store was not ready after {timeout_s:g} s; see its log above")
        more = os.read(ready, 4096)
        if not more:
            raise StoreUnavailable("the store ended while it started; see its log above")
        said += more
    if said != READY:
        raise StoreConfigError(said.decode(errors="replace").strip())


def _flags(config: StoreConfig | NvmeConfig, prefix: str) -> list[str]:
    flags = []
    for field in fields(config):
        name, value = prefix + field.name.replace("_", "-"), getattr(config, field.name)
        if isinstance(value, bool):
            flags.append(name if value else name.replace("--", "--no-", 1))
        elif value is not None:
            flags.append(f"{name}={value}")  # one word: a value may begin with a dash
    return flags
