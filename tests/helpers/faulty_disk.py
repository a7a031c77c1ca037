"""A disk whose n-th call of a kind fails, is short or hangs: wraps the system calls of the NVMe tier."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tournant.kvstore.config import PAGE_BYTES
from tournant.kvstore.disk_io import DiskIO, RealDisk

WAIT_S = 20.0


@dataclass(slots=True)
class Hang:
    """A call that hangs. begun: set when it was made; release: set to let it go on."""

    begun: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Fault:
    method: str
    nth: int
    forever: bool
    act: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    seen: int = 0

    def hits(self) -> bool:
        self.seen += 1
        return self.seen == self.nth or (self.forever and self.seen > self.nth)


class FaultyDisk:
    """See DiskIO for the methods; `calls` counts them by name. Faults count calls from when they were ordered."""

    def __init__(self, inner: DiskIO | None = None) -> None:
        self._inner = RealDisk() if inner is None else inner
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self.calls: dict[str, int] = {}

    def fail(self, method: str, number: int = errno.EIO, *, nth: int = 1, forever: bool = False) -> None:
        """The n-th call raises OSError; with `forever` all later ones, too."""

        def act(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        self._faults.append(_Fault(method, nth, forever, act))

    def short(self, method: str, most: int, *, nth: int = 1, forever: bool = False) -> None:
        """The n-th read or write says that it moved at most so many bytes; what it moved is rounded up to pages, as
        direct I/O needs it.
        """

        def act(call: Callable[..., Any], args: tuple[Any, ...], _: object) -> Any:
            file, buffers, offset = args
            data, left = [], -(-most // PAGE_BYTES) * PAGE_BYTES
            for buffer in buffers:
                data.append(buffer[:left])
                left -= len(data[-1])
            return min(most, call(file, [buffer for buffer in data if len(buffer)], offset)) if most else 0

        self._faults.append(_Fault(method, nth, forever, act))

    def hang(self, method: str, *, nth: int = 1) -> Hang:
        """The n-th call waits until it is released, then goes on."""
        hang = Hang()

        def act(call: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            hang.begun.set()
            if not hang.release.wait(WAIT_S):
                raise TimeoutError("a hanging call was never released")
            return call(*args, **named)

        self._faults.append(_Fault(method, nth, False, act))
        return hang

    def heal(self) -> None:
        """No more faults."""
        self._faults.clear()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._inner, name)

        def wrapped(*args: Any, **named: Any) -> Any:
            with self._lock:
                self.calls[name] = self.calls.get(name, 0) + 1
                acts = [fault.act for fault in self._faults if fault.method == name and fault.hits()]
            return acts[0](call, args, named) if acts else call(*args, **named)

        return wrapped
