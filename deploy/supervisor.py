"""What surrounds the process that runs a private Ray: its descendants and their certain end, and its port.

Owns the ending of whole process trees. Knows neither Ray nor models; run folders are cluster/run_folder.py's. Linux
only: it relies on child subreapers and /proc.

Invariants:
 1. Every process that descends from one that called `become_subreaper` stays below it, whoever else dies.
 2. After `end_descendants` none of them runs. Only processes of this tree are ever signalled, each by its id.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from pathlib import Path

from tournant.workers.errors import ConfigError

PR_SET_CHILD_SUBREAPER = 36


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
